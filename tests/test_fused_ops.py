"""The fused ops on a CPU, where they are the dispatcher's convolution and the tail kernel: values, strides, and what torch asks of an op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxfuse import library
from fxfuse.chain import chains

pytestmark = pytest.mark.compiler

CONVS = {1: (torch.conv1d, F.adaptive_avg_pool1d), 2: (torch.conv2d, F.adaptive_avg_pool2d), 3: (torch.conv3d, F.adaptive_avg_pool3d)}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    chains()
    library.load("cpu")
    with torch.no_grad():
        yield


def laid_out(shape: tuple[int, ...], channels_last: bool) -> torch.Tensor:
    x = torch.randn(shape)
    return x.to(memory_format=CHANNELS_LAST[x.dim()]) if channels_last and x.dim() in CHANNELS_LAST else x


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("keepdim", [True, False], ids=["keepdim", "dropped"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv_gelu_pool(dims: int, keepdim: bool, batched: bool, channels_last: bool) -> None:
    torch.manual_seed(0)
    x = laid_out((2,) * batched + (4,) + (9,) * dims, channels_last and batched)
    weight, bias = torch.randn(6, 4, *(3,) * dims), torch.randn(6)
    geometry = ([2] * dims, [1] * dims, [1] * dims)
    arguments: tuple[Any, ...] = (x, weight, bias, *geometry, keepdim, "none", "tf32", None)
    conv, pool = CONVS[dims]
    eager = pool(F.gelu(conv(x, weight, bias, *geometry)), 1)
    eager = eager if keepdim else eager.reshape(eager.shape[:-dims])
    out = torch.ops.fxfuse.conv_gelu_pool(*arguments)
    torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-6)
    assert out.stride() == eager.stride()
    torch.library.opcheck(torch.ops.fxfuse.conv_gelu_pool.default, arguments)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("transposed", [False, True], ids=["conv3d", "conv_transpose3d"])
def test_conv_norm_pool_gelu(transposed: bool, batched: bool, channels_last: bool) -> None:
    torch.manual_seed(0)
    x = laid_out((2,) * batched + (4, 5, 6, 7), channels_last and batched)
    weight, bias, addend = torch.randn(4, 6, 3, 3, 3) if transposed else torch.randn(6, 4, 3, 3, 3), torch.randn(6), torch.randn(())
    if transposed:
        y = torch.conv_transpose3d(x, weight, bias, 2, 1, 1)
        geometry = ([2] * 3, [1] * 3, [1] * 3)
    else:
        y = torch.conv3d(x, weight, bias, 1, 1)
        geometry = ([1] * 3, [1] * 3, [0] * 3)
    norm = torch.randn(2, y.shape[-1])
    eager = F.gelu(F.avg_pool3d(F.layer_norm(y + 2 * addend, y.shape[-1:], *norm), 2))
    arguments = (x, weight, bias, addend, *norm, transposed, *geometry, 2.0, 0.0, 1e-5, [2, 2, 2], "none", "ieee", None)
    out = torch.ops.fxfuse.conv_norm_pool_gelu(*arguments)
    torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-6)
    assert out.stride() == eager.stride()
    torch.library.opcheck(torch.ops.fxfuse.conv_norm_pool_gelu.default, arguments)
