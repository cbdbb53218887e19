"""fxfuse::gelu_pool on a GPU: values against fp64 beside eager's error, strides, special values, sizes that broke other kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POOLS = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


def gelu_pool(x, bias, output_size, keepdim=True, approximate="none", out_dtype=None):
    """The op, on an output buffer that last held nan: an element that no thread writes is seen."""
    poison = torch.full((4 * math.prod(x.shape[: x.dim() - len(output_size)]) + 4096,), math.nan, device="cuda")
    del poison
    return torch.ops.fxfuse.gelu_pool(x, bias, output_size, keepdim, approximate, out_dtype)


def eager(x, bias, output_size, approximate="none"):
    """gelu(x + bias) pooled by eager's kernels, in x's dtype."""
    shape = (-1,) + (1,) * len(output_size)
    y = x if bias is None else x + bias.to(x.dtype).view(shape)
    size = [own if given == -1 else given for given, own in zip(output_size, x.shape[-len(output_size) :])]
    return POOLS[len(size)](F.gelu(y, approximate=approximate), size)


def assert_accurate(out: torch.Tensor, from_eager: torch.Tensor, reference: torch.Tensor) -> None:
    """Error at most twice eager's in the norm (1e-6 in fp32 where eager is better than that), no element ten times further off."""
    assert out.shape == reference.shape
    norm = reference.norm()
    # Below the floor lies the rounding of the output alone: where there are few, eager's may be small by luck.
    floor = 1e-6 if from_eager.dtype == torch.float32 else torch.finfo(from_eager.dtype).eps / 2 / min(reference.numel(), 16) ** 0.5
    bound = max(2 * ((from_eager.double() - reference).norm() / norm).item(), floor)
    difference = (out.double() - reference).abs()
    error = (difference.norm() / norm).item()
    worst = difference.argmax()
    where = f"out {out.flatten()[worst].item():.9g}, reference {reference.flatten()[worst].item():.9g} at {worst.item()}"
    assert error <= bound, f"relative error {error:.3g}, bound {bound:.3g}; {where}"
    assert difference.max() <= 10 * bound * reference.abs().max(), f"one element is far off: {where}"


def check(x, bias, output_size, approximate="none", keepdim=True, out_dtype=None, strides=True):
    out = gelu_pool(x, bias, output_size, keepdim, approximate, out_dtype)
    from_eager = eager(x, bias, output_size, approximate)
    reference = eager(x.double(), None if bias is None else bias.double(), output_size, approximate)
    assert out.dtype == (out_dtype or x.dtype)
    if strides and keepdim:
        assert out.stride() == from_eager.stride()
    if not keepdim:
        kept = x.dim() - len(output_size)
        reference, from_eager = reference.flatten(kept - 1), from_eager.flatten(kept - 1)
        assert out.is_contiguous()
    assert_accurate(out, from_eager, reference)
    return out


def randn(shape: Sequence[int], dtype=torch.float32, layout: str = "contiguous", scale: float = 1.0, shift: float = 0.0, batched=True):
    x = torch.randn(shape, device="cuda", dtype=torch.float32).mul_(scale).add_(shift).to(dtype)
    return x.contiguous(memory_format=FORMATS[len(shape) - 2]) if layout == "channels_last" else x


def cases(*shapes):
    """Each shape contiguous, and channels_last where torch has that."""
    return [(shape, layout) for shape in shapes for layout in ("contiguous", "channels_last") if layout == "contiguous" or len(shape) > 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, layout",
    cases(
        (4, 64, 254, 254),  # the headline's rows: 16-byte aligned in fp32, every other one 8 bytes off in 16 bits
        (2, 67, 61, 53),  # nothing divides anything: 3233 pixels, channels that repeat after 67 loads
        (3, 3, 97, 101),  # fewer channels than a load holds
        (2, 1100, 9, 13),  # channels in two tiles of a block
        (2, 1031, 13, 11),  # more odd channels than a block: single loads
        (1, 8, 512, 512),  # 8 rows for the whole card: chunks
        (2, 2048, 7, 7), (5, 6, 1, 1), (300, 5, 3, 2), (2, 1, 33, 35), (1, 1, 1, 1),
        (2, 5, 1023), (64, 3, 17), (1, 4, 3_000_001),
        (2, 24, 9, 30, 31), (1, 7, 3, 5, 2),
    ),
    ids=str,
)
def test_global(shape, layout, dtype):
    x = randn(shape, dtype, layout)
    out = check(x, randn(shape[1:2], dtype), [1] * (len(shape) - 2))
    dropped = check(x, randn(shape[1:2], dtype), [1] * (len(shape) - 2), keepdim=False)
    assert dropped.shape == out.shape[:2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, layout, size",
    [
        (shape, layout, size)
        for shapes, sizes in [
            ([(2, 6, 29, 31), (1, 33, 150, 170)], [(2, 2), (7, 5), (-1, 1), (1, -1), (1, 4), (3, 1), (40, 33), (29, 31), (64, 200)]),
            ([(2, 5, 1000), (3, 4, 7)], [(3,), (7,), (-1,), (50,)]),
            ([(2, 9, 11, 20, 18)], [(1, 2, 3), (4, 4, 4), (-1, 1, 1), (2, -1, 40), (1, 1, -1)]),
        ]
        for shape, layout in cases(*shapes)
        for size in sizes
    ],
    ids=str,
)
def test_adaptive(shape, layout, size, dtype):
    check(randn(shape, dtype, layout), randn(shape[1:2], dtype), list(size))


def test_few_large_windows_are_cut_into_chunks():
    for layout in ("contiguous", "channels_last"):
        check(randn((1, 4, 700, 901), layout=layout), None, [2, 2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, size", [((6, 250), [1]), ((6, 25, 31), [1, 1]), ((6, 25, 31), [3, 2]), ((6, 5, 25, 31), [1, 1, 1]), ((6, 5, 25, 31), [2, 3, 4])]
)
def test_unbatched(shape, size, dtype):
    check(randn(shape, dtype), randn(shape[:1], dtype), size)
    if size == [1] * len(size):
        assert check(randn(shape, dtype), None, size, keepdim=False).shape == shape[:1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("size", [[1, 1], [3, 5]], ids=str)
def test_bias_and_out_dtypes(dtype, layout, size):
    x = randn((3, 24, 40, 41), dtype, layout)
    for bias in (None, randn((24,), torch.float32).to(dtype).float(), randn((24,), dtype), randn((48,), dtype)[::2]):
        for out_dtype in (None, dtype, torch.float32):
            check(x, bias, size, out_dtype=out_dtype)
            check(x, bias, size, out_dtype=out_dtype, approximate="tanh")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", range(1, 8))
def test_misaligned_views(dtype, offset):
    flat = randn((offset + 200_000,), dtype)[offset:]
    for channels, height, width in ((12, 45, 49), (35, 20, 33), (2080, 9, 10)):  # 2080: more loads than a block has threads
        pixels = flat[: channels * height * width].view(1, height, width, channels)
        for x in (pixels.permute(0, 3, 1, 2), pixels.view(1, channels, height, width)):
            for size in ([1, 1], [2, 3]):
                check(x, randn((channels,), dtype), size)


@pytest.mark.parametrize("size", [[1, 1], [4, 3]], ids=str)
def test_other_strides(size):
    x = randn((4, 12, 30, 34))
    for view in (x[:, ::2], x[..., 1:-1], x.transpose(2, 3), x[:1].expand(3, -1, -1, -1), x.transpose(0, 1), x[:, :, ::3, ::2]):
        check(view, randn((view.shape[1],)), size, strides=False)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "scale, shift",
    [(1e-3, 0), (0.01, 0), (0.1, 0), (0.7, 0.1), (10, 0), (1e4, 0), (0.2, -3), (0.2, -4), (0.2, -5), (0, 1.3), (0, -2.7), (1, 1e3)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_magnitudes(dtype, scale, shift, layout):
    """Small zero-mean planes cancel; around -5 gelu itself is a cancellation; constant planes make every rounding error the same."""
    x = randn((4, 48, 254, 254), dtype, layout, scale, shift)
    check(x, None, [1, 1])
    check(randn((4, 48, 40, 40), dtype, layout, scale, shift), None, [20, 8])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_plane_of_four_million_pixels(layout):
    check(randn((1, 2, 2048, 2048), layout=layout, shift=0.3), randn((2,)), [1, 1])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "shape, size", [((2, 5, 60, 61), [1, 1]), ((2, 5, 60, 61), [2, 3]), ((1, 5, 9, 9), [9, 9]), ((1, 2, 400, 400), [1, 1])]
)
def test_nan_and_inf(shape, size, layout, dtype, approximate):
    for value in (math.inf, -math.inf, math.nan, torch.finfo(dtype).max, torch.finfo(dtype).min):
        for position in ((0, 0, 0, 0), (0, 1, shape[2] // 2, 3), (0, 1, shape[2] - 1, shape[3] - 1)):
            x = randn(shape, dtype, layout)
            x[position] = value
            # Eager's arithmetic in fp32, since that is what a 16-bit sum overflows in here.
            expected = eager(x.float(), None, size, approximate)
            out = gelu_pool(x, None, size, approximate=approximate, out_dtype=torch.float32)
            torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_deterministic():
    for layout in ("contiguous", "channels_last"):
        for shape, size in (((2, 33, 211, 200), [1, 1]), ((1, 3, 700, 700), [2, 1])):
            x = randn(shape, layout=layout)
            first = gelu_pool(x, None, size)
            assert all(torch.equal(first, gelu_pool(x, None, size)) for _ in range(5))


def test_runs_on_the_current_stream():
    x, stream = randn((4, 16, 500, 500)), torch.cuda.Stream()
    expected = eager(x + 1, None, [1, 1])
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = x
        for _ in range(20):
            late = late + 0.05
        out = gelu_pool(late, None, [1, 1])
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_graph_capture():
    x, graph = randn((2, 8, 300, 300)), torch.cuda.CUDAGraph()
    gelu_pool(x, None, [1, 1])
    with torch.cuda.graph(graph):
        out = torch.ops.fxfuse.gelu_pool(x, None, [1, 1], True, "none", None)
    x.copy_(randn((2, 8, 300, 300), shift=1.0))
    graph.replay()
    torch.testing.assert_close(out, eager(x, None, [1, 1]), rtol=1e-5, atol=1e-6)


def test_empty():
    for shape, size in (((0, 4, 5, 5), [1, 1]), ((0, 4, 5, 5), [2, 3]), ((2, 0, 5, 5), [1, 1]), ((2, 4, 5, 5), [0, 2])):
        x = torch.empty(shape, device="cuda")
        out = gelu_pool(x, None, size)
        assert out.shape == eager(x, None, size).shape and out.stride() == eager(x, None, size).stride()
    assert gelu_pool(torch.empty((0, 4, 5, 5), device="cuda"), None, [1, 1], keepdim=False).shape == (0, 4)
    assert gelu_pool(torch.empty((2, 4, 0, 5), device="cuda"), None, [1, 1]).isnan().all()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (((2, 4, 0, 5), torch.float32, 4, [2, 2], True, "none", None), "pool over nothing"),
        (((2, 4, 5, 5), torch.float64, 4, [1, 1], True, "none", None), "float32, bfloat16 and float16 are supported"),
        (((2, 4, 5, 5), torch.float32, 3, [1, 1], True, "none", None), "bias must have one dim of 4 values"),
        (((2, 4, 5, 5), torch.float32, 4, [1, 2], False, "none", None), "every output size is 1"),
        (((2, 4, 5, 5), torch.float32, 4, [1, 1, 1, 1], True, "none", None), "1, 2 or 3 are supported"),
        (((2, 4, 5, 5), torch.float32, 4, [1], True, "none", None), "needs a channel dim"),
        (((2, 4, 5, 5), torch.float32, 4, [-2, 1], True, "none", None), "0 or more, or -1"),
        (((2, 4, 5, 5), torch.float32, 4, [1, 1], True, "sigmoid", None), "'none' \\(exact\\) and 'tanh'"),
        (((2, 4, 5, 5), torch.bfloat16, 4, [1, 1], True, "none", torch.float16), "out_dtype is"),
    ],
)
def test_refusals(arguments, sentence):
    shape, dtype, num_bias, *rest = arguments
    with pytest.raises(RuntimeError, match=sentence):
        torch.ops.fxfuse.gelu_pool(torch.ones(shape, device="cuda", dtype=dtype), torch.ones(num_bias, device="cuda", dtype=dtype), *rest)


@pytest.mark.large
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_more_than_2_to_31_elements(layout):
    shape, size = (2, 1100, 1000, 1000), math.prod((2, 1100, 1000, 1000))
    if torch.cuda.mem_get_info()[0] < 5 * size:
        pytest.skip("needs 11 GB of free GPU memory")
    flat = torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_()
    x = flat.view(shape) if layout == "contiguous" else flat.view(2, 1000, 1000, 1100).permute(0, 3, 1, 2)
    for output_size in ([1, 1], [2, 3]):
        out = gelu_pool(x, None, output_size)
        for image, channels in ((0, slice(0, 50)), (1, slice(1050, 1100))):
            part = x[image : image + 1, channels]
            assert_accurate(out[image : image + 1, channels], eager(part, None, output_size), eager(part.double(), None, output_size))


@pytest.mark.large
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_more_than_2_to_31_outputs(layout):
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    flat = torch.empty(2 * 23_500 * 46_000, device="cuda", dtype=torch.float16).normal_()
    x = flat.view(1, 2, 23_500, 46_000) if layout == "contiguous" else flat.view(1, 23_500, 46_000, 2).permute(0, 3, 1, 2)
    out = gelu_pool(x, None, [-1, -1])
    assert out.numel() > 2**31
    for rows in (slice(0, 100), slice(23_400, 23_500)):
        part = x[:, :, rows]
        assert_accurate(out[:, :, rows], eager(part, None, [-1, -1]), eager(part.double(), None, [-1, -1]))
