"""The CPU kernels of both tail ops against float64: every argument, dtype, memory order and odd size, on every instruction set here."""

from __future__ import annotations

import itertools
import math
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from reference import assert_within_contract, gelu_pool_reference, norm_pool_gelu_reference

from fxfuse import library

pytestmark = pytest.mark.compiler

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "channels_last", "sliced", "offset")
DEFAULTS = dict(
    bias=None, addend=None, norm_weight=None, norm_bias=None, addend_scale=1.0, addend_value=0.0, norm_ndim=1, eps=1e-5,
    kernel_size=[2, 2, 2], stride=[2, 2, 2], padding=[0, 0, 0], ceil_mode=False, count_include_pad=True, divisor_override=None,
    approximate="none", out_dtype=None,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    library.load("cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x with the same values: channels innermost, every other element of a larger tensor, or not aligned to a vector."""
    if layout == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "sliced":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if layout == "offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    return x


def poison(numel: int) -> None:
    """Leaves nan in the memory that the next output of this size is likely to get: an element that nobody writes is seen."""
    torch.full((numel,), math.nan)


def eager(reference, args: dict, dtype: torch.dtype) -> torch.Tensor:
    """The chain in `dtype`; where torch has no CPU kernel for it, in float32."""
    try:
        return reference(**args, dtype=dtype)
    except RuntimeError:
        return reference(**args, dtype=torch.float32)


def check(op, reference, x: torch.Tensor, **arguments) -> torch.Tensor:
    args = {"input": x, **arguments}
    expected = reference(**args)
    dtype = args["out_dtype"] or x.dtype
    poison(expected.numel())
    out = op(*args.values())
    assert out.dtype == dtype
    assert_within_contract(out, expected, eager(reference, args, x.dtype).to(dtype), dtype)
    return out


def norm_pool(x: torch.Tensor, **arguments) -> torch.Tensor:
    out = check(torch.ops.fxfuse.norm_pool_gelu, norm_pool_gelu_reference, x, **{**DEFAULTS, **arguments})
    assert out.is_contiguous()
    return out


def gelu_pool(x: torch.Tensor, output_size: Sequence[int], bias=None, keepdim=True, approximate="none", out_dtype=None) -> torch.Tensor:
    return check(
        torch.ops.fxfuse.gelu_pool, gelu_pool_reference, x, bias=bias, output_size=list(output_size), keepdim=keepdim,
        approximate=approximate, out_dtype=out_dtype,
    )  # fmt: skip


# ---- norm_pool_gelu ----------------------------------------------------------------------------------------------

# Around the widths of vectors (4, 8, 16), of batches and tiles; the last two take more than one tile.
WIDTHS = (1, 2, 3, 5, 13, 16, 31, 64, 65, 100, 129, 200, 1030, 9000, 20001)
CHANNELS = (1, 2, 3, 8, 17, 33, 50, 64, 70, 130)  # 1 to 4 vectors, whole and cut, and more than one block
ARGUMENTS = [
    dict(kernel_size=[1, 1, 1], stride=[1, 1, 1]),
    dict(kernel_size=[3, 2, 4], stride=[1, 2, 3]),
    dict(kernel_size=[3, 3, 3], stride=[1, 1, 1], padding=[1, 1, 1]),
    dict(kernel_size=[3, 3, 3], stride=[2, 2, 2], padding=[1, 0, 1], count_include_pad=False),
    dict(kernel_size=[2, 2, 5], stride=[3, 3, 4], padding=[1, 1, 2], ceil_mode=True),
    dict(kernel_size=[4, 5, 13], stride=[1, 1, 1]),
    dict(kernel_size=[4, 5, 1], stride=[4, 5, 2]),
    dict(divisor_override=3),
    dict(divisor_override=-5, padding=[1, 1, 1], count_include_pad=False),
    dict(eps=1e-12),
    dict(eps=1.0),
    dict(addend_value=2.5),
    dict(approximate="tanh"),
    dict(out_dtype=torch.float32),
    *[dict(norm_ndim=n) for n in (2, 3, 4, 5)],
    *[dict(norm_ndim=n, kernel_size=[3, 3, 3], stride=[2, 2, 1], padding=[1, 1, 1]) for n in (1, 2, 4)],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_pool_values_widths(layout: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x = laid_out(torch.randn(2, 3, 4, 4, width) if width < 1000 else torch.randn(1, 2, 2, 2, width), layout).to(dtype)
        kernel = [2, 2, min(2, width)]
        weight = torch.randn(width)
        norm_pool(x, kernel_size=kernel, stride=kernel, norm_weight=weight, norm_bias=torch.randn(width), bias=torch.randn(x.shape[1]))
        norm_pool(x, kernel_size=kernel, stride=[1, 1, 1], norm_bias=weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_pool_values_channels(dtype: torch.dtype) -> None:
    for channels in CHANNELS:
        x = laid_out(torch.randn(1, channels, 2, 4, 21), "channels_last").to(dtype)
        norm_pool(x, bias=torch.randn(channels))
        norm_pool(x, bias=torch.randn(channels), norm_ndim=2, kernel_size=[1, 3, 2], addend=torch.randn(channels, 1, 1, 21))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_norm_pool_values_arguments(arguments: dict, layout: str, dtype: torch.dtype) -> None:
    x = laid_out(torch.randn(2, 5, 4, 5, 13), layout).to(dtype)
    norm_pool(x, **arguments)
    shape = x.shape[5 - arguments.get("norm_ndim", 1) :]
    affine = dict(norm_weight=torch.randn(shape).to(dtype), norm_bias=torch.randn(shape))
    norm_pool(x, bias=torch.randn(5).to(dtype), addend=torch.tensor(0.7), **affine, **arguments)
    if arguments.get("norm_ndim", 1) < 5:
        norm_pool(x[0], bias=torch.randn(5), **affine, **arguments)


ADDENDS = ((), (1,), (13,), (5, 1), (5, 1, 1, 1), (4, 1, 1), (1, 5, 13), (5, 1, 1, 13), (2, 1, 1, 1, 1), (2, 5, 4, 5, 13), (5, 4, 5, 1))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("shape", ADDENDS, ids=str)
def test_norm_pool_values_addends(shape: tuple[int, ...], layout: str) -> None:
    for dtype, norm_ndim in itertools.product(DTYPES, (1, 3)):
        x = laid_out(torch.randn(2, 5, 4, 5, 13), layout).to(dtype)
        for addend in (torch.randn(shape), torch.randn(shape).to(dtype), torch.randn(shape[::-1]).permute([*reversed(range(len(shape)))])):
            norm_pool(x, addend=addend, addend_scale=-1.5, norm_ndim=norm_ndim)
        if len(shape) == 5:
            norm_pool(x, addend=laid_out(torch.randn(shape), "channels_last"), norm_ndim=norm_ndim)
            norm_pool(x, addend=torch.randn(shape[:3] + (1, 1)).expand(shape), norm_ndim=norm_ndim)


def test_norm_pool_ceil_mode() -> None:
    """torch's rule for the last window, and its divisor."""
    for size, kernel, stride, padding, include in itertools.product((4, 5, 7), (2, 3), (1, 2, 3), (0, 1), (True, False)):
        x = torch.randn(1, 2, size, 5, 7)
        norm_pool(x, kernel_size=[kernel] * 3, stride=[stride] * 3, padding=[padding] * 3, ceil_mode=True, count_include_pad=include)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm_pool_hard_statistics(layout: str) -> None:
    """Mean 1e4 and noise 1, over rows and over blocks; fp16 whose sum of squares overflows; a constant row."""
    x = laid_out(torch.randn(2, 20, 4, 6, 70) + 1e4, layout)
    for norm_ndim in (1, 2, 3, 4, 5):
        norm_pool(x, norm_ndim=norm_ndim)
    large = laid_out(torch.randn(2, 20, 4, 4, 64) * 2000 + 1000, layout).to(torch.float16)
    norm_pool(large)
    norm_pool(large, norm_ndim=3)
    shift = torch.randn(70)
    norm_pool(torch.full_like(x, 3.3), norm_bias=shift, eps=1e-12)
    long = laid_out(torch.randn(1, 2, 4, 16, 9000) + 1e3, layout)
    norm_pool(long, norm_ndim=3)
    norm_pool(long, norm_ndim=4, kernel_size=[4, 16, 3000], stride=[4, 16, 3000], norm_bias=torch.ones(long.shape[1:]))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("norm_ndim", (1, 2, 3, 4))
def test_norm_pool_special_values(norm_ndim: int, layout: str) -> None:
    """A nan or inf anywhere makes its whole normalised block nan, and no other."""
    for value in (math.nan, math.inf, -math.inf):
        x = torch.randn(2, 3, 4, 4, 20)
        x[1, 2, 3, 1, 7] = value
        assert norm_pool(laid_out(x, layout), norm_ndim=norm_ndim).isnan().any()
        x = laid_out(torch.randn(2, 3, 4, 4, 20), layout)
        norm_pool(x, norm_ndim=norm_ndim, bias=torch.tensor([1.0, value, 2.0]))
        norm_pool(x, norm_ndim=norm_ndim, addend=torch.tensor([0.0, value, 0.0, 1.0]).view(4, 1, 1))
        norm_pool(x, norm_ndim=norm_ndim, addend=torch.tensor(value))
        norm_pool(x, norm_ndim=norm_ndim, addend_value=value)
    weight = torch.ones(20)
    weight[3] = math.inf
    norm_pool(laid_out(torch.randn(2, 3, 4, 4, 20), layout), norm_weight=weight)


def test_norm_pool_empty_batch() -> None:
    out = torch.ops.fxfuse.norm_pool_gelu(torch.randn(0, 3, 4, 4, 8), *list(DEFAULTS.values()))
    assert out.shape == (0, 3, 2, 2, 4)


# ---- gelu_pool ---------------------------------------------------------------------------------------------------

PLANES = [
    ((1,), (1,)), ((300,), (1,)), ((70,), (7,)), ((13,), (5,)), ((5,), (13,)), ((5000,), (2,)), ((9,), (-1,)),
    ((1, 1), (1, 1)), ((7, 7), (1, 1)), ((33, 31), (1, 1)), ((300, 301), (1, 1)), ((14, 14), (7, 7)), ((7, 9), (3, 2)), ((6, 5), (1, 3)),
    ((6, 5), (3, 1)), ((6, 7), (-1, 2)), ((4, 3), (6, 5)), ((40, 2500), (2, 3)), ((60, 20), (1, 2)),
    ((1, 1, 1), (1, 1, 1)), ((5, 6, 7), (1, 1, 1)), ((40, 44, 40), (1, 1, 1)), ((5, 6, 7), (2, 3, 4)), ((4, 6, 5), (2, 1, 1)),
    ((4, 6, 5), (1, 1, 2)), ((4, 6, 5), (4, 6, 5)), ((20, 6, 5), (1, 2, 1)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gelu_pool_values_planes(layout: str, dtype: torch.dtype) -> None:
    for plane, output_size in PLANES:
        for channels in (3,) if math.prod(plane) > 5000 else (1, 5, 64):
            x = laid_out(torch.randn(2, channels, *plane), layout).to(dtype)
            out = gelu_pool(x, output_size, bias=torch.randn(channels).to(dtype))
            if len(plane) > 1:
                assert out.stride() == eager(gelu_pool_reference, arguments_of(x, output_size), x.dtype).stride()
            else:
                assert out.is_contiguous()


def arguments_of(x: torch.Tensor, output_size: Sequence[int]) -> dict:
    return dict(input=x, bias=None, output_size=output_size, keepdim=True, approximate="none", out_dtype=None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_gelu_pool_values_arguments(layout: str, dtype: torch.dtype) -> None:
    for channels in CHANNELS + (300, 3000):
        x = laid_out(torch.randn(2, channels, 9, 11), layout).to(dtype)
        for output_size in ((1, 1), (2, 3)):
            gelu_pool(x, output_size)
            gelu_pool(x, output_size, bias=torch.randn(channels), approximate="tanh", out_dtype=torch.float32)
        gelu_pool(x, (1, 1), keepdim=False, bias=torch.randn(channels).to(dtype))
    gelu_pool(x[0], (1, 1), bias=torch.randn(channels))
    gelu_pool(x[0], (2, 2))
    gelu_pool(x[0, :, 0], (1,), keepdim=False)


@pytest.mark.parametrize("approximate", ("none", "tanh"))
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_gelu_pool_hard_sums(layout: str, approximate: str) -> None:
    """A plane of 4 million values; mean 1e4 and noise 1; nothing but a negative tail; small values whose mean is all curvature."""
    large = torch.randn(1, 1, 2048, 2048) if layout == "contiguous" else torch.randn(1, 2, 1024, 2048)
    gelu_pool(laid_out(large, layout), (1, 1), approximate=approximate)
    gelu_pool(laid_out(large + 1e4, layout), (1, 1), approximate=approximate)
    gelu_pool(laid_out(large + 1e4, layout), (1, 2), approximate=approximate)
    for scale, shift in ((0.1, -5.0), (0.5, -3.0), (0.01, 0.0), (0.1, 0.0), (5.0, 0.0)):
        for output_size in ((1, 1), (3, 2)):
            gelu_pool(laid_out(torch.randn(2, 20, 90, 70) * scale + shift, layout), output_size, approximate=approximate)


@pytest.mark.parametrize("approximate", ("none", "tanh"))
def test_gelu_pool_of_one_pixel_is_gelu(approximate: str) -> None:
    """The function itself, over its whole range: 4e-7 absolute, and relative where 1 + erf has nothing left."""
    x = torch.cat([torch.linspace(-12, 12, 48001), torch.tensor([-0.0, 1e-30, -1e-30, 3e38, -3e38, 1e20, -1e20])])
    out = torch.ops.fxfuse.gelu_pool(x.view(1, -1, 1, 1), None, [1, 1], False, approximate, None)[0].double()
    y = x.double()
    u = math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)
    right = y * (torch.special.erfc(-y / math.sqrt(2)) / 2 if approximate == "none" else torch.sigmoid(2 * u))
    assert ((out - right).abs() <= 4e-7 * y.abs().clamp(1, None)).all()
    tail = (y < -1) & (y > -5)
    assert ((out - right).abs() <= 1e-3 * right.abs())[tail].all()
    assert (out[y < -13].abs() == 0).all()
    special = torch.tensor([math.inf, -math.inf, math.nan]).view(1, 3, 1, 1)
    for dtype in DTYPES:
        inf, minus_inf, nan = torch.ops.fxfuse.gelu_pool(special.to(dtype), None, [1, 1], False, approximate, None)[0].tolist()
        assert inf == math.inf and math.isnan(minus_inf) and math.isnan(nan)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_gelu_pool_special_values(layout: str) -> None:
    """A nan or inf stays in the windows that hold it, wherever in vectors, rows and chunks it lies."""
    for value, position in itertools.product((math.nan, math.inf, -math.inf), (0, 17, 166, 167)):
        x = torch.randn(2, 5, 12, 14)
        x.view(2, 5, -1)[1, 3, position] = value
        gelu_pool(laid_out(x, layout), (1, 1))
        gelu_pool(laid_out(x, layout), (3, 4))


def test_gelu_pool_empty() -> None:
    op = torch.ops.fxfuse.gelu_pool
    assert op(torch.randn(0, 4, 6, 6), None, [1, 1], True, "none", None).shape == (0, 4, 1, 1)
    assert op(torch.randn(2, 0, 6, 6), None, [2, 2], True, "none", None).shape == (2, 0, 2, 2)
    assert op(torch.randn(2, 4, 6, 6), None, [0, 1], True, "none", None).shape == (2, 4, 0, 1)
    assert op(torch.randn(2, 4, 0, 6), None, [1, 1], False, "none", None).isnan().all()


# ---- both --------------------------------------------------------------------------------------------------------


def calls() -> Iterator[tuple]:
    """Calls that take each path through the kernels, with work for several threads."""
    for layout in ("contiguous", "channels_last"):
        x = laid_out(torch.randn(2, 20, 6, 8, 70), layout)
        for norm_ndim, stride in itertools.product((1, 2, 3, 4, 5), (1, 2)):
            yield torch.ops.fxfuse.norm_pool_gelu, x, {**DEFAULTS, "norm_ndim": norm_ndim, "stride": [stride] * 3}
        for output_size in ([1, 1, 1], [2, 3, 4]):
            yield torch.ops.fxfuse.gelu_pool, x, {**arguments_of(x, output_size)}
        yield torch.ops.fxfuse.gelu_pool, laid_out(torch.randn(1, 2, 700, 700), layout), arguments_of(x, [1, 1])


def test_bits_do_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    try:
        for op, x, arguments in calls():
            values = [value for name, value in arguments.items() if name != "input"]
            results = []
            for threads in (1, 2, 3, 7, 2):
                torch.set_num_threads(threads)
                results.append(op(x, *values))
            assert all(torch.equal(results[0], other) for other in results[1:])
    finally:
        torch.set_num_threads(before)


def test_random_arguments() -> None:
    """Arguments drawn together: what single arguments do not show."""
    rng = random.Random(0)
    for _ in range(150):
        dtype, layout = rng.choice(DTYPES), rng.choice(LAYOUTS)
        size = [rng.randint(1, 3), rng.choice((1, 3, 17, 70)), rng.randint(1, 6), rng.randint(1, 7), rng.choice((1, 7, 16, 33, 64, 100))]
        kernel = [rng.randint(1, min(n, 4)) for n in size[2:]]
        norm_ndim = rng.randint(1, 5)
        parameter = lambda shape: rng.choice((None, torch.randn(shape), torch.randn(shape).to(dtype)))  # noqa: E731
        norm_pool(
            laid_out(torch.randn(size) * rng.choice((0.01, 1, 5)) + rng.choice((0, 0, 3)), layout).to(dtype),
            bias=parameter(size[1]),
            addend=parameter([n if rng.random() < 0.5 else 1 for n in size[rng.randint(0, 5) :]]),
            norm_weight=parameter(size[5 - norm_ndim :]),
            norm_bias=torch.randn(size[5 - norm_ndim :]),
            norm_ndim=norm_ndim,
            kernel_size=kernel,
            stride=[rng.randint(1, 4) for _ in kernel],
            padding=[rng.randint(0, n // 2) for n in kernel],
            ceil_mode=rng.random() < 0.5,
            count_include_pad=rng.random() < 0.5,
            approximate=rng.choice(("none", "tanh")),
            out_dtype=rng.choice((None, torch.float32)),
        )


# ---- instruction sets --------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from fxfuse import library
library.load("cpu")
torch.ops.fxfuse.gelu_pool(torch.randn(2, 3, 4), None, [1], False, "none", None)
"""


def run_with_isa(name: str, *command: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "FXFUSE_CPU_ISA": name}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other architectures have one instruction set")
@pytest.mark.parametrize("name", ("baseline", "avx2"))
def test_narrower_instruction_sets(name: str) -> None:
    """The widest is what the rest of this file runs on; the tests of values run again on the others."""
    done = run_with_isa(name, "-c", SCRIPT)
    if done.returncode and "this machine has no more than" in done.stderr:
        pytest.skip(f"this machine has no {name}")
    done = run_with_isa(name, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "widths or channels or planes or hard")
    assert done.returncode == 0, done.stdout[-3000:]


def test_unknown_instruction_set() -> None:
    done = run_with_isa("sse9", "-c", SCRIPT)
    assert done.returncode != 0
    assert "FXFUSE_CPU_ISA is 'sse9', but baseline, avx2 and avx512 are known: set one of them or unset it." in done.stderr
