"""fxfuse::conv_gelu_pool on a GPU, both code paths: values against fp64, strides, special values, random convolutions."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
# What is multiplied: dtype of the operands, precision of the op.
PRODUCTS = ((torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "tf32"), (torch.float16, "tf32"))


@pytest.fixture(params=["widest", "portable"], autouse=True)
def path(request, monkeypatch):
    monkeypatch.setenv("FXFUSE_PORTABLE", "1" if request.param == "portable" else "0")
    return request.param


def triple(value, dims):
    return list(value) if isinstance(value, (list, tuple)) else [value] * dims


def conv_gelu_pool(x, weight, bias, stride=1, padding=0, dilation=1, keepdim=True, approximate="none", precision="tf32", out_dtype=None):
    """The op, on memory that last held nan: an element that no thread writes is seen."""
    dims = weight.dim() - 2
    poison = [torch.full((size,), math.nan, device="cuda") for size in (1 << 16, 1 << 19, 1 << 21)]
    del poison
    geometry = (triple(value, dims) for value in (stride, padding, dilation))
    return torch.ops.fxfuse.conv_gelu_pool(x, weight, bias, *geometry, keepdim, approximate, precision, out_dtype)


def chain(x, weight, bias, stride=1, padding=0, dilation=1, approximate="none"):
    """Eager's chain in the operands' dtype."""
    dims = weight.dim() - 2
    y = CONVS[dims](x, weight, bias, stride=stride, padding=padding, dilation=dilation)
    return F.gelu(y, approximate=approximate).mean(tuple(range(-dims, 0)), keepdim=True)


def rounded_to_tf32(x):
    return (x.view(torch.int32).add(0x1000) & -0x2000).view(torch.float32)


def relative_error(out, reference):
    return ((out.double() - reference).norm() / reference.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()


def bound_of(x, weight, bias, precision, reference, **geometry):
    """TF32: twice what rounding the operands costs. Strict fp32: 2e-6. 16 bits: twice eager's error.

    In fp32 never less than the error of eager's GELU alone, which cancels at very negative values.
    """
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    if x.dtype == torch.float32:
        approximate = geometry.pop("approximate", "none")
        dims = tuple(range(2 - weight.dim(), 0))
        y = CONVS[len(dims)](*wide, **geometry)
        of_gelu = relative_error(F.gelu(y.float(), approximate=approximate).double().mean(dims, keepdim=True), reference)
        if precision == "ieee":
            return max(2e-6, of_gelu)
        rounded = chain(rounded_to_tf32(x).double(), rounded_to_tf32(weight).double(), wide[2], approximate=approximate, **geometry)
        return max(2 * relative_error(rounded, reference), 1e-6, of_gelu)
    # Where there are few outputs, eager's rounding of them may be small by luck.
    floor = torch.finfo(x.dtype).eps / 2 / min(reference.numel(), 16) ** 0.5
    return max(2 * relative_error(chain(x, weight, bias, **geometry), reference), floor)


def check(x, weight, bias, precision="tf32", keepdim=True, out_dtype=None, **geometry):
    out = conv_gelu_pool(x, weight, bias, precision=precision, keepdim=keepdim, out_dtype=out_dtype, **geometry)
    reference = chain(x.double(), weight.double(), None if bias is None else bias.double(), **geometry)
    bound = bound_of(x, weight, bias, precision, reference, **geometry)
    if not keepdim:
        reference = reference.flatten(x.dim() - weight.dim() + 1)
    assert out.dtype == (out_dtype or x.dtype) and out.shape == reference.shape
    difference = (out.double() - reference).abs()
    worst = difference.argmax()
    where = f"out {out.flatten()[worst].item():.9g}, reference {reference.flatten()[worst].item():.9g} at {worst.item()}"
    error = relative_error(out, reference)
    assert error <= bound, f"relative error {error:.3g}, bound {bound:.3g}; {where}"
    assert difference.max() <= 10 * bound * reference.abs().max(), f"one element is far off: {where}"
    return out


def operands(batch, c_in, c_out, size, kernel, dtype=torch.float32, channels_last=False, scale=1.0, has_bias=True):
    """Inputs and weights as a model has them: outputs of size 1 or so."""
    dims = len(size)
    x = torch.randn((batch, c_in, *size), device="cuda").mul_(scale).to(dtype)
    fan_in = c_in * math.prod(kernel)
    weight = torch.randn((c_out, c_in, *kernel), device="cuda").mul_(fan_in**-0.5).to(dtype)
    bias = torch.randn(c_out, device="cuda").mul_(0.3).to(dtype) if has_bias else None
    if channels_last and dims > 1:
        x, weight = (t.contiguous(memory_format=FORMATS[dims]) for t in (x, weight))
    return x, weight, bias


SHAPES = (
    # batch, C_in, C_out, size, kernel, geometry
    (2, 8, 64, (256, 256), (3, 3), {}),  # the headline's images: rows of exactly two runs
    (1, 8, 64, (130, 300), (3, 3), {}),  # rows of several tiles, each a strip of many steps
    (3, 3, 64, (57, 61), (3, 3), {"padding": 1}),  # an RGB image: most of a chunk is padding
    (2, 8, 70, (33, 129), (3, 3), {"padding": (0, 2)}),  # rows of channels that end in a tile
    (1, 1, 33, (5, 300), (5, 1), {}),  # one channel; a tile of one row
    (4, 5, 40, (28, 28), (5, 5), {"padding": 2}),
    (2, 16, 64, (30, 31), (1, 1), {}),  # nothing but channels
    (2, 7, 96, (40, 36), (3, 3), {"stride": 2, "padding": 1}),
    (2, 8, 24, (40, 36), (4, 2), {"stride": (3, 1), "padding": (1, 0), "dilation": (1, 2)}),
    (1, 12, 64, (90, 90), (3, 3), {"dilation": 7, "padding": 3}),
    (2, 4, 64, (70, 70), (3, 3), {"dilation": 30}),  # a box would be mostly halo
    (2, 64, 128, (20, 22), (3, 3), {"padding": 1}),  # weights that do not fit into shared memory
    (2, 150, 48, (14, 14), (3, 3), {"padding": 1}),
    (5, 24, 64, (7, 7), (7, 7), {"padding": 3}),  # kernel as large as the image
    (3, 8, 64, (3, 3), (3, 3), {}),  # one output pixel
    (2, 6, 64, (1000,), (9,), {"padding": 4}),
    (2, 6, 20, (4097,), (16,), {"stride": 5}),
    (2, 4, 64, (9, 17, 19), (3, 3, 3), {"padding": 1}),
    (2, 9, 40, (8, 15, 21), (2, 3, 1), {"stride": (1, 2, 2), "padding": (0, 1, 0)}),
    (1, 1, 65, (40, 2, 5), (5, 2, 2), {}),
)


@pytest.mark.parametrize("dtype, precision", PRODUCTS, ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, channels_last, dtype, precision):
    *sizes, geometry = shape
    check(*operands(*sizes, dtype=dtype, channels_last=channels_last), precision=precision, **geometry)


@pytest.mark.parametrize("dtype, precision", PRODUCTS, ids=str)
def test_random_convolutions(dtype, precision):
    draw = random.Random(5)
    for _ in range(60):
        dims = draw.choice((1, 2, 2, 3))
        most = {1: 500, 2: 50, 3: 14}[dims]
        kernel = [draw.randint(1, 5) for _ in range(dims)]
        dilation = [draw.choice((1, 1, 2, 3)) for _ in range(dims)]
        padding = [draw.randint(0, 3) for _ in range(dims)]
        size = [max(draw.randint(1, most), (k - 1) * d + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding)]
        geometry = {"stride": [draw.choice((1, 1, 2, 3)) for _ in range(dims)], "padding": padding, "dilation": dilation}
        x, weight, bias = operands(
            draw.randint(1, 4), draw.randint(1, 40), draw.randint(1, 140), size, kernel, dtype, draw.random() < 0.5, has_bias=draw.random() < 0.7
        )
        try:
            check(x, weight, bias, precision, approximate=draw.choice(("none", "none", "tanh")), **geometry)
        except AssertionError as error:
            raise AssertionError(f"x {tuple(x.shape)} {x.stride()}, weight {tuple(weight.shape)}, {geometry}: {error}") from error


@pytest.mark.parametrize("dtype, precision", PRODUCTS, ids=str)
def test_results(dtype, precision):
    """keepdim, out_dtype, no batch, strides."""
    for channels_last in (False, True):
        x, weight, bias = operands(3, 8, 64, (20, 21), (3, 3), dtype, channels_last)
        out = check(x, weight, bias, precision)
        assert out.stride() == F.adaptive_avg_pool2d(F.gelu(F.conv2d(x, weight, bias)), 1).stride()
        assert check(x, weight, bias, precision, keepdim=False).is_contiguous()
        assert check(x, weight, bias, precision, out_dtype=torch.float32).dtype == torch.float32
        for keepdim in (False, True):
            check(x[0], weight, bias, precision, keepdim=keepdim)
        check(x, weight, None, precision, approximate="tanh")
    for c_out, size in ((1, 20), (64, 3)):  # strides that are both contiguous and channels_last before the pool
        x, weight, bias = operands(3, 8, c_out, (size, size), (3, 3), dtype, channels_last=True)
        out = check(x, weight, bias, precision)
        assert out.stride() == F.adaptive_avg_pool2d(F.gelu(F.conv2d(x, weight, bias)), 1).stride()


@pytest.mark.parametrize("dtype, precision", PRODUCTS, ids=str)
def test_other_strides(dtype, precision):
    x, weight, bias = operands(4, 12, 64, (30, 34), (3, 3), dtype)
    wide = torch.randn((128, 12, 3, 3), device="cuda").mul_(0.1).to(dtype)
    for view in (x[..., 1:-1], x.transpose(2, 3), x[:1].expand(3, -1, -1, -1), x[:, :, ::3, ::2]):
        check(view, wide[::2].transpose(2, 3), bias, precision)
    check(x[:, 1::2], wide[:64, ::2], bias, precision)


@pytest.mark.parametrize("dtype, precision", PRODUCTS, ids=str)
@pytest.mark.parametrize("scale, shift", [(1e-3, 0), (0.05, 0), (20, 0), (0.1, -3), (0.1, -4.5), (0.3, 40), (1e3, 0)])
def test_magnitudes(scale, shift, dtype, precision):
    for c_in in (8, 12):
        x, weight, bias = operands(4, c_in, 64, (60, 60), (3, 3), dtype, scale=scale)
        check(x, weight, bias.mul_(scale).add_(shift), precision)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype, precision", PRODUCTS, ids=str)
def test_nan_and_inf(dtype, precision, approximate):
    for c_in in (8, 4):
        for value in (math.inf, -math.inf, math.nan):
            for sign in (1, -1):
                x, weight, bias = operands(3, c_in, 64, (40, 40), (3, 3), dtype)
                weight = weight.abs().mul(sign)
                x[1, 2, 17, 5] = value
                expected = chain(x.float(), weight.float(), bias.float(), approximate=approximate)
                out = conv_gelu_pool(x, weight, bias, approximate=approximate, precision=precision, out_dtype=torch.float32)
                torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2, equal_nan=True)
    # A bias or a weight that is inf or nan touches its own channel only.
    x, weight, bias = operands(2, 8, 64, (20, 20), (3, 3), dtype)
    bias[3], bias[5], bias[40] = math.inf, -math.inf, math.nan
    weight[7, 2, 1, 1], weight[8, 7, 0, 2], weight[50, 0, 2, 2] = math.inf, -math.inf, math.nan
    expected = chain(x.float(), weight.float(), bias.float(), approximate=approximate)
    out = conv_gelu_pool(x, weight, bias, approximate=approximate, precision=precision, out_dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_huge_and_tiny(precision):
    """Near the ends of fp32: no overflow in rounding, to TF32 or to bf16, whose largest value is smaller; no loss of what is small."""
    x, weight, _ = operands(2, 8, 64, (20, 20), (3, 3))
    for scale_x, scale_w in ((1e-30, 1e10), (1e30, 1e-30), (1e18, 1e18)):
        check(x * scale_x, weight * scale_w, None, precision)
    largest = torch.full_like(x, torch.finfo(torch.float32).max)
    out = conv_gelu_pool(largest, weight * 1e-3, None, precision=precision)
    assert out.isfinite().all() or precision == "tf32"
    if precision == "ieee":
        check(largest, weight * 1e-6, None, precision)
        check(x * 1e-6, weight.sign() * torch.finfo(torch.float32).max, None, precision)


def test_range_of_values_in_one_image():
    """In "ieee" no value is lost beside larger ones: each pixel's products are as accurate as fp32's, whatever its neighbours are."""
    x, weight, bias = operands(2, 8, 64, (60, 60), (3, 3))
    x[:, :, :30] *= 1e12
    weight = weight.abs().neg()  # what is large becomes a gelu of 0
    x = x.abs()
    check(x, weight * 1e-3, None, "ieee")


@pytest.mark.parametrize("dtype, precision", PRODUCTS, ids=str)
def test_deterministic(dtype, precision):
    for sizes in ((2, 8, 64, (200, 210), (3, 3)), (1, 70, 100, (50, 60), (3, 3))):
        arguments = operands(*sizes, dtype=dtype)
        first = conv_gelu_pool(*arguments, precision=precision)
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                assert all(torch.equal(first, conv_gelu_pool(*arguments, precision=precision)) for _ in range(20))


def test_batch_larger_than_the_workspace():
    check(*operands(9000, 2, 64, (4, 4), (3, 3)))


def test_graph_capture_and_stream():
    x, weight, bias = operands(2, 8, 64, (100, 100), (3, 3))
    graph = torch.cuda.CUDAGraph()
    conv_gelu_pool(x, weight, bias)
    with torch.cuda.graph(graph):
        out = torch.ops.fxfuse.conv_gelu_pool(x, weight, bias, [1, 1], [0, 0], [1, 1], True, "none", "tf32", None)
    x.copy_(torch.randn_like(x) + 1)
    graph.replay()
    torch.testing.assert_close(out, chain(x, weight, bias), rtol=1e-2, atol=1e-3)


def test_empty():
    x, weight, bias = operands(2, 8, 64, (10, 10), (3, 3))
    assert conv_gelu_pool(x[:0], weight, bias).shape == (0, 64, 1, 1)
    assert conv_gelu_pool(x[:0], weight, bias, keepdim=False).shape == (0, 64)
    assert conv_gelu_pool(x, weight[:0], None).shape == (2, 0, 1, 1)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"weight": torch.ones(64, 7, 3, 3)}, "groups are not supported"),
        ({"weight": torch.ones(64, 8, 11, 3)}, "needs more pixels"),
        ({"weight": torch.ones(64, 8, 3, 3, dtype=torch.float16)}, "both must have one dtype"),
        ({"weight": torch.ones(64, 8, 3)}, "input needs a channel dimension"),
        ({"bias": torch.ones(63)}, "bias has shape"),
        ({"x": torch.ones(2, 8, 10, 10, dtype=torch.float64)}, "float32, bfloat16 and float16 are supported"),
        ({"stride": 0}, "are positive"),
        ({"stride": [1, 1, 1]}, "2 entries are needed"),
        ({"precision": "high"}, "'tf32' or 'ieee'"),
        ({"approximate": "sigmoid"}, "'none' \\(exact\\) or 'tanh'"),
        ({"out_dtype": torch.float16}, "out_dtype is"),
        ({"x": torch.ones(1, 512, 10, 10), "weight": torch.ones(512, 512, 3, 3), "bias": None}, "use fxfuse::gelu_pool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(change, sentence):
    arguments = {"x": torch.ones(2, 8, 10, 10), "weight": torch.ones(64, 8, 3, 3), "bias": torch.ones(64)} | change
    arguments = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(RuntimeError, match=sentence):
        conv_gelu_pool(**arguments)


@pytest.mark.large
def test_more_than_2_to_31_elements():
    if torch.cuda.mem_get_info()[0] < 14e9:
        pytest.skip("needs 14 GB of free GPU memory")
    x = torch.empty((35000, 8, 88, 88), device="cuda", dtype=torch.bfloat16).normal_()
    assert x.numel() > 2**31
    _, weight, bias = operands(1, 8, 64, (88, 88), (3, 3), torch.bfloat16)
    out = conv_gelu_pool(x, weight, bias)
    torch.testing.assert_close(out[-4:], chain(x[-4:].float(), weight.float(), bias.float()).bfloat16(), rtol=2e-2, atol=1e-3)
