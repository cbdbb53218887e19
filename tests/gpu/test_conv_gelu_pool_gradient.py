"""fxfuse::conv_gelu_pool's gradients of weight and bias by the kernel that contains the convolution: against fp64, layouts, special values."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from fxfuse import precision as precisions
from fxfuse.passes.conv_gelu_pool_gradients import conv_gelu_pool_parameter_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
KINDS = ((torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "tf32"), (torch.float16, "tf32"))
of_kinds = pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=["tf32", "ieee", "bfloat16", "float16"])


def operands(batch, c_in, c_out, size, kernel, dtype=torch.float32, channels_last=False, has_bias=True):
    """Input, weight, bias and the output's gradient; outputs of size 1 or so."""
    x = torch.randn((batch, c_in, *size), device="cuda").to(dtype)
    weight = torch.randn((c_out, c_in, *kernel), device="cuda").mul_((c_in * math.prod(kernel)) ** -0.5).to(dtype)
    bias = torch.randn(c_out, device="cuda").mul_(0.3).to(dtype) if has_bias else None
    if channels_last and len(size) > 1:
        x, weight = (t.contiguous(memory_format=FORMATS[len(size)]) for t in (x, weight))
    return x, weight, bias, torch.randn((batch, c_out), device="cuda").to(dtype)


def kernel_gradients(x, weight, bias, grad, precision="tf32", padding=0, dilation=1, approximate="none"):
    """The op's on poisoned outputs; None where it has no kernel for the convolution."""
    dims = weight.dim() - 2
    triple = [list(v) if isinstance(v, (list, tuple)) else [v] * dims for v in (1, padding, dilation)]
    of_weight = torch.full_like(weight, math.nan)
    of_bias = None if bias is None else torch.full_like(bias, math.nan)
    done = torch.ops.fxfuse.conv_gelu_pool_weight_gradient(grad, x, weight, bias, *triple, approximate, precision, of_weight, of_bias)
    return [g for g in (of_weight, of_bias) if g is not None] if done else None


def chain_gradients(x, weight, bias, grad, padding=0, dilation=1, approximate="none", dtype=None):
    """Autograd's of eager's chain, in the operands' dtype or in another."""
    dims = weight.dim() - 2
    values = [t if t is None else t.to(dtype or t.dtype) for t in (x, weight, bias, grad)]
    leaves = [t.detach().requires_grad_() for t in values[1:3] if t is not None]
    y = CONVS[dims](values[0], leaves[0], *leaves[1:], padding=padding, dilation=dilation)
    out = F.gelu(y, approximate=approximate).mean(tuple(range(-dims, 0)))
    return torch.autograd.grad(out, leaves, values[3])


def relative_error(value, reference):
    return ((value.double() - reference).norm() / reference.norm().clamp(min=1e-300)).item()


def check(arguments, precision="tf32", **geometry):
    """Whether there is a kernel; it then is as near to fp64 as eager, whose luck with few values does not count."""
    found = kernel_gradients(*arguments, precision, **geometry)
    if found is None:
        return False
    with precisions.switched(precision):
        exact, eager = (chain_gradients(*arguments, **geometry, dtype=dtype) for dtype in (torch.float64, None))
    floor = 5e-7 if precision == "ieee" else {torch.float32: 2e-4, torch.bfloat16: 4e-3, torch.float16: 5e-4}[arguments[0].dtype]
    for ours, want, theirs in zip(found, exact, eager, strict=True):
        error, bound = relative_error(ours, want), max(2 * relative_error(theirs, want), floor)
        assert error <= bound, f"{tuple(ours.shape)}: relative error {error:.3g}, bound {bound:.3g}"
    return True


SHAPES = (
    # batch, C_in, C_out, size, kernel, geometry
    (4, 8, 64, (256, 256), (3, 3), {}),  # the headline's images
    (2, 8, 64, (130, 300), (3, 3), {}),  # rows of several tiles
    (3, 3, 64, (57, 61), (3, 3), {"padding": 1}),  # most of a chunk is padding
    (2, 8, 70, (33, 129), (3, 3), {"padding": (0, 2)}),  # a second tile of channels that ends
    (2, 16, 64, (30, 31), (3, 3), {"padding": 1}),  # two chunks: two groups
    (2, 24, 64, (40, 36), (3, 3), {}),  # three
    (2, 20, 40, (20, 44), (1, 1), {}),  # nothing but channels
    (2, 5, 40, (28, 28), (5, 5), {"padding": 2}),  # 25 single taps
    (1, 8, 64, (90, 90), (3, 3), {"dilation": 7, "padding": 3}),
    (3, 8, 64, (3, 3), (3, 3), {}),  # one output pixel
    (2, 6, 64, (1000,), (9,), {"padding": 4}),  # 1-d
    (2, 6, 64, (512,), (3,), {}),
    (2, 3, 64, (6, 20, 33), (2, 3, 3), {"padding": (1, 0, 1)}),  # 3-d
    (40, 8, 64, (10, 12), (3, 3), {"padding": 1}),  # images smaller than a run
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape[:5])))
@of_kinds
def test_gradients(shape, dtype, precision):
    *sizes, geometry = shape
    for channels_last in (False, True):
        assert check(operands(*sizes, dtype=dtype, channels_last=channels_last), precision, **geometry)


@of_kinds
def test_no_bias_and_the_tanh_form(dtype, precision):
    assert check(operands(2, 8, 64, (40, 50), (3, 3), dtype=dtype, has_bias=False), precision, approximate="tanh")
    assert check(operands(2, 8, 64, (40, 50), (3, 3), dtype=dtype), precision, approximate="tanh")


def test_random_convolutions():
    draw, taken = random.Random(0), 0
    for _ in range(150):
        dims = draw.choice((1, 2, 2, 2, 3))
        kernel = [draw.choice((1, 2, 3, 3, 5)) for _ in range(dims)]
        dilation = [draw.choice((1, 1, 2)) for _ in range(dims)]
        padding = [draw.randint(0, k) for k in kernel]
        size = [draw.randint(max(1, d * (k - 1) + 1 - 2 * p), {1: 600, 2: 60, 3: 14}[dims]) for k, d, p in zip(kernel, dilation, padding)]
        sizes = (draw.randint(1, 5), draw.randint(1, 20), draw.choice((40, 64, 100, 130)), size, kernel)
        dtype, precision = draw.choice(KINDS)
        arguments = operands(*sizes, dtype, draw.random() < 0.5, draw.random() < 0.8)
        try:
            taken += check(arguments, precision, padding=padding, dilation=dilation, approximate=draw.choice(("none", "tanh")))
        except AssertionError as error:
            raise AssertionError(f"{sizes}, padding {padding}, dilation {dilation}, {dtype} {precision}: {error}") from error
    assert taken > 60


def test_tiny_and_huge_output_gradients():
    """g joins behind the products: fp16 neither underflows nor overflows."""
    for dtype, scale in ((torch.float16, 2e-7), (torch.float16, 3e4), (torch.float32, 1e-30), (torch.float32, 1e30)):
        x, weight, bias, grad = operands(2, 8, 64, (60, 50), (3, 3), dtype=dtype)
        grad = torch.full_like(grad, scale)
        found = kernel_gradients(x, weight, bias, grad)
        for ours, want in zip(found, chain_gradients(x, weight, bias, grad, dtype=torch.float64), strict=True):
            # Half a last place of fp16 where its numbers are that small.
            floor = 6e-8 * want.numel() ** 0.5 if dtype == torch.float16 else 0
            assert (ours.double() - want).norm() <= 1e-3 * want.norm() + floor


@of_kinds
def test_nan_and_inf_in_one_image_reach_the_gradient(dtype, precision):
    for value in (math.nan, math.inf):
        x, weight, bias, grad = operands(3, 8, 64, (30, 40), (3, 3), dtype=dtype)
        x[1, 2, 10, 20] = value
        of_weight, of_bias = kernel_gradients(x, weight, bias, grad, precision)
        assert not of_weight[:, 2].isfinite().any() and not of_bias.isfinite().any()


@of_kinds
def test_the_same_bits_in_every_run(dtype, precision):
    arguments = operands(5, 8, 64, (120, 130), (3, 3), dtype=dtype)
    first = kernel_gradients(*arguments, precision)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, kernel_gradients(*arguments, precision), strict=True))


def test_one_sign():
    """All products positive: sums that grow to the end, which tensor cores alone would round towards zero at each step."""
    x, weight, bias, grad = operands(16, 8, 64, (200, 220), (3, 3))
    assert check((x.abs() + 0.5, weight, bias, grad.abs()), "ieee")


@of_kinds
def test_python_asks_about_what_the_kernel_takes(dtype, precision):
    """Pairs of a tap and 8 channels: one more is refused, and not asked about."""
    for c_in, kernel in ((24, (3, 3)), (32, (3, 3)), (8, (4, 7))):
        x, weight, bias, grad = operands(2, c_in, 64, (20, 40), kernel, dtype=dtype)
        fixed = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "approximate": "none", "precision": precision}
        asked = conv_gelu_pool_parameter_gradients(grad, {"input": x, "weight": weight, "bias": bias, **fixed}, ["weight", "bias"])
        assert (asked is None) == (kernel_gradients(x, weight, bias, grad, precision) is None) == (c_in // 8 * math.prod(kernel) > 27)


def test_what_it_does_not_take_is_left_alone():
    x, weight, bias, grad = operands(2, 64, 64, (20, 20), (3, 3))
    assert kernel_gradients(x, weight, bias, grad) is None  # more taps and channels than groups
    x, weight, bias, grad = operands(2, 8, 64, (20, 20), (3, 3))
    outputs = torch.full_like(weight, 7.0), torch.full_like(bias, 7.0)
    done = torch.ops.fxfuse.conv_gelu_pool_weight_gradient(grad, x, weight, bias, [2, 2], [0, 0], [1, 1], "none", "tf32", *outputs)
    assert not done and all((out == 7.0).all() for out in outputs)  # a stride
