"""FLOPs of fxfuse's ops by torch's own counter: a fused op counts what eager's convolution does, and a tail nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, ConvNormPoolGelu
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxfuse import library
from fxfuse.chain import chains

pytestmark = pytest.mark.compiler

CONVS = {False: (F.conv1d, F.conv2d, F.conv3d), True: (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)}


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    chains()
    library.load("cpu")
    yield


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def pooled(twin: str, x: torch.Tensor, w: torch.Tensor, stride: int, padding: int, dilation: int) -> torch.Tensor:
    """conv_gelu_pool, or its twin for training."""
    geometry = ([given] * (w.dim() - 2) for given in (stride, padding, dilation))
    return getattr(torch.ops.fxfuse, f"conv_gelu_pool{twin}")(x, w, None, *geometry, True, "none", "ieee", None)


def normed(twin: str, x: torch.Tensor, w: torch.Tensor, transposed: bool, stride: int, padding: int, output_padding: int) -> torch.Tensor:
    """conv_norm_pool_gelu, or its twin for training."""
    geometry = ([given] * 3 for given in (stride, padding, output_padding))
    op = getattr(torch.ops.fxfuse, f"conv_norm_pool_gelu{twin}")
    return op(x, w, None, None, None, None, transposed, *geometry, 1.0, 0.0, 1e-5, [1, 1, 1], "none", "ieee", None)


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("geometry", [(1, 0, 1), (2, 1, 1), (1, 2, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv_gelu_pool(dims: int, geometry: tuple[int, int, int], batched: bool) -> None:
    x, w = torch.zeros((2,) * batched + (3,) + (9, 8, 10)[:dims]), torch.zeros((5, 3) + (3, 2, 3)[:dims])
    expected = counted(lambda: CONVS[False][dims - 1](x, w, None, *geometry))
    assert expected > 0
    for twin in ("", "_training"):
        with torch.inference_mode():
            assert counted(lambda: pooled(twin, x, w, *geometry)) == expected


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("transposed", [True, False], ids=["transposed", "convolution"])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv_norm_pool_gelu(stride: int, transposed: bool, batched: bool) -> None:
    x = torch.zeros((2,) * batched + (3, 5, 4, 8))
    w = torch.zeros((3, 5, 3, 3, 3) if transposed else (5, 3, 3, 3, 3))
    extra = stride - 1 if transposed else 0
    given = (stride, 1, extra) if transposed else (stride, 1)
    expected = counted(lambda: CONVS[transposed][2](x, w, None, *given))
    assert expected > 0
    for twin in ("", "_training"):
        with torch.inference_mode():
            assert counted(lambda: normed(twin, x, w, transposed, stride, 1, extra)) == expected


@pytest.mark.parametrize("needed", ["w", "x", "xw"])
@pytest.mark.parametrize("op", [lambda x, w: pooled("_training", x, w, 1, 0, 1), lambda x, w: normed("_training", x, w, False, 1, 0, 0)])
def test_a_backward_counts_the_convolution_again_and_the_gradients_that_are_asked_for(op: Callable[..., torch.Tensor], needed: str) -> None:
    x = torch.randn(2, 3, 5, 4, 8, requires_grad="x" in needed)
    w = torch.randn(5, 3, 3, 3, 3, requires_grad="w" in needed)
    forward = counted(lambda: F.conv3d(x.detach(), w.detach()))
    eager = counted(lambda: F.gelu(F.conv3d(x, w)).sum().backward())
    assert eager == forward * (1 + len(needed))
    # A first convolution forward, the same once more behind it.
    assert counted(lambda: op(x, w).sum().backward()) == eager + forward


def test_tails_count_nothing() -> None:
    y = torch.randn(2, 4, 6, 6, 8, requires_grad=True)
    tails = (
        lambda: torch.ops.fxfuse.gelu_pool_training(y, None, [1, 1, 1], True, "none", None),
        lambda: torch.ops.fxfuse.norm_pool_gelu_training(
            y, None, None, None, None, 1.0, 0.0, 1, 1e-5, [2] * 3, [2] * 3, [0] * 3, False, True, None, "none", None
        ),
    )
    for tail in tails:
        assert counted(lambda: tail().sum().backward()) == 0


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(("model", "shape"), [(ConvGeluPool, (2, 4, 8, 8)), (ConvNormPoolGelu, (2, 4, 6, 6, 12))], ids=["pool", "norm"])
def test_the_partitioner_reads_them_for_its_memory_budget(model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    net = nn.Sequential(model(), nn.Tanh())
    compiled = torch.compile(net, backend="fxfuse", options={"fxfuse.strict": True, "fxfuse.select": "always"})
    x = torch.randn(shape)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        gradients = torch.autograd.grad(compiled(x).sum(), list(net.parameters()))
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-3, atol=1e-4)
