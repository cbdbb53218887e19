"""What torch asks of an op: `opcheck` over layouts, dtypes and arguments; fake strides = real strides = eager's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import ADAPTIVE_POOLS

from fxfuse import library
from fxfuse.chain import chains

pytestmark = pytest.mark.compiler

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUTS = ("contiguous", "channels_last", "sliced", "expanded", "permuted", "offset")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def ops() -> Any:
    chains()
    library.load("cpu")
    with torch.no_grad():
        yield


def laid_out(shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values of a shape in a layout that a convolution's output, or anything in its place, may have."""
    if layout == "channels_last" and len(shape) in CHANNELS_LAST:
        return torch.randn(shape, dtype=dtype).to(memory_format=CHANNELS_LAST[len(shape)])
    if layout == "sliced":
        return torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    if layout == "expanded":
        return torch.randn(1, *shape[1:], dtype=dtype).expand(shape)
    if layout == "permuted":
        return torch.randn(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
    if layout == "offset":
        return torch.randn(shape[0] + 1, *shape[1:], dtype=dtype)[1:]
    return torch.randn(shape, dtype=dtype)


def norm_pool_gelu_arguments(x: torch.Tensor, **changed: Any) -> dict[str, Any]:
    width = x.shape[-1]
    defaults = {
        "input": x,
        "bias": torch.randn(x.shape[-4]),
        "addend": torch.randn(()),
        "norm_weight": torch.randn(width),
        "norm_bias": torch.randn(width, dtype=x.dtype),
        "addend_scale": 1.0,
        "addend_value": 0.0,
        "norm_ndim": 1,
        "eps": 1e-5,
        "kernel_size": [2, 2, 2],
        "stride": [2, 2, 2],
        "padding": [0, 0, 0],
        "ceil_mode": False,
        "count_include_pad": True,
        "divisor_override": None,
        "approximate": "none",
        "out_dtype": None,
    }
    return {**defaults, **changed}


BARE = {"bias": None, "addend": None, "norm_weight": None, "norm_bias": None}
BATCHED, UNBATCHED = (2, 3, 4, 5, 6), (3, 4, 5, 6)
NORM_POOL_GELU = [
    *itertools.product([BATCHED], LAYOUTS, [torch.float32], [{}]),
    *itertools.product([BATCHED], ("contiguous", "channels_last"), DTYPES[1:], [{}]),
    *itertools.product([UNBATCHED], ("contiguous", "permuted"), [torch.float32], [{}]),
    (BATCHED, "contiguous", torch.float32, {**BARE, "addend_value": 1.5, "norm_ndim": 3, "approximate": "tanh"}),
    (UNBATCHED, "offset", torch.bfloat16, {**BARE, "out_dtype": torch.float32, "ceil_mode": True, "divisor_override": 3}),
    (BATCHED, "contiguous", torch.float32, {"addend": torch.randn(3, 1, 1, 1), "addend_scale": -2.0, "padding": [1, 1, 1], "count_include_pad": False}),
]


@pytest.mark.parametrize(("shape", "layout", "dtype", "changed"), NORM_POOL_GELU)
def test_opcheck_norm_pool_gelu(shape, layout, dtype, changed):
    arguments = norm_pool_gelu_arguments(laid_out(shape, layout, dtype), **changed)
    torch.library.opcheck(torch.ops.fxfuse.norm_pool_gelu.default, tuple(arguments.values()))


GELU_POOL = [
    *itertools.product([(2, 3, 5, 6)], LAYOUTS, [torch.float32], [([1, 1], True, None)]),
    *itertools.product([(2, 3, 5, 6)], ("contiguous", "channels_last"), DTYPES[1:], [([1, 1], True, None)]),
    *itertools.product([(2, 3, 7), (2, 3, 5, 6), (2, 3, 4, 5, 6)], ("contiguous", "channels_last"), [torch.float32], [(2, True, None), (1, False, None)]),
    *itertools.product([(2, 3, 5, 6), (3, 5, 6)], ["channels_last"], [torch.float16], [([-1, 2], True, torch.float32)]),
    ((0, 3, 5, 6), "contiguous", torch.float32, ([1, 1], False, None)),
]


@pytest.mark.parametrize(("shape", "layout", "dtype", "given"), GELU_POOL)
def test_opcheck_gelu_pool(shape, layout, dtype, given):
    output_size, keepdim, out_dtype = given
    size = output_size if isinstance(output_size, list) else [output_size] * (len(shape) - 2)
    x = laid_out(shape, layout, dtype)
    arguments = (x, torch.randn(x.shape[-len(size) - 1]), size, keepdim, "none", out_dtype)
    torch.library.opcheck(torch.ops.fxfuse.gelu_pool.default, arguments)


# (1, C) and one pixel: strides do not tell contiguous from channels_last there, and eager takes them for contiguous.
SHAPES = [(2, 4, 6), (2, 4, 6, 5), (2, 1, 6, 5), (2, 4, 1, 1), (1, 4, 1, 1), (2, 4, 1, 5), (2, 4, 6, 5, 3), (2, 1, 6, 5, 3), (2, 4, 1, 1, 1)]


def fake_strides(op: Any, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    with torch._subclasses.FakeTensorMode() as mode:
        faked = [mode.from_tensor(argument) if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        return op(*faked).stride()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, None])
def test_gelu_pool_strides(shape, layout, size):
    x, spatial = laid_out(shape, layout), len(shape) - 2
    eager = ADAPTIVE_POOLS[spatial - 1](F.gelu(x), size if spatial == 1 and size else [size] * spatial if spatial > 1 else shape[-1])
    arguments = (x, None, [-1 if size is None else size] * spatial, True, "none", None)
    op = torch.ops.fxfuse.gelu_pool.default
    assert op(*arguments).stride() == eager.stride()
    assert fake_strides(op, arguments) == eager.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 6), (2, 1, 4, 4, 4), (2, 3, 2, 2, 2), (1, 3, 2, 2, 2), (3, 4, 5, 6)])
def test_norm_pool_gelu_strides(shape, layout):
    x = laid_out(shape, layout)
    eager = F.gelu(F.avg_pool3d(F.layer_norm(x, shape[-1:]), 2))
    arguments = tuple(norm_pool_gelu_arguments(x).values())
    op = torch.ops.fxfuse.norm_pool_gelu.default
    assert op(*arguments).stride() == eager.stride()
    assert fake_strides(op, arguments) == eager.stride()
