"""fxfuse::conv_norm_pool_gelu's gradients by kernels that contain the convolution: against fp64, odd sizes, special values."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from fxfuse import precision as precisions
from fxfuse.passes.conv_norm_pool_gelu_gradients import conv_norm_pool_gelu_parameter_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]

KINDS = ((torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "tf32"), (torch.float16, "tf32"))
of_kinds = pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=["tf32", "ieee", "bfloat16", "float16"])
GEOMETRY = {"stride": 2, "padding": 1, "output_padding": 1}


def operands(batch, c_in, c_out, depth, height, dtype=torch.float32, precision="tf32", channels_last=False, is_affine=True, out_dtype=None):
    """The op's arguments by name, in its order, and the output's gradient."""
    x = torch.randn((batch, c_in, depth, height, 32), device="cuda").to(dtype)
    weight = torch.randn((c_in, c_out, 3, 3, 3), device="cuda").mul_((8 / 27 / c_in) ** 0.5).to(dtype)
    if channels_last:
        x, weight = (t.contiguous(memory_format=torch.channels_last_3d) for t in (x, weight))
    small = {"bias": torch.randn(c_out, device="cuda").to(dtype), "addend": torch.randn((), device="cuda").to(dtype), "norm_weight": None, "norm_bias": None}
    if is_affine:
        small |= {name: torch.randn(64, device="cuda").to(dtype) for name in ("norm_weight", "norm_bias")}
    settings = {"transposed": True, "stride": [2] * 3, "padding": [1] * 3, "output_padding": [1] * 3, "addend_scale": 1.0, "addend_value": 0.0}
    settings |= {"eps": 1e-5, "pool_size": [2] * 3, "approximate": "none", "precision": precision, "out_dtype": out_dtype}
    grad = torch.randn((batch, c_out, depth, height, 32), device="cuda").to(out_dtype or dtype)
    return {"input": x, "weight": weight, **small, **settings}, grad


def names_of(arguments):
    return [name for name in ("weight", "bias", "addend", "norm_weight", "norm_bias") if arguments[name] is not None]


def chain_gradients(arguments, grad, dtype=None):
    """Autograd's of eager's chain, in the operands' dtype or in another."""
    values = {name: value.detach().to(dtype or value.dtype) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    leaves = [values[name].requires_grad_() for name in names_of(arguments)]
    y = F.conv_transpose3d(values["input"], values["weight"], values["bias"], **GEOMETRY) + values["addend"]
    z = F.avg_pool3d(F.layer_norm(y, (64,), values.get("norm_weight"), values.get("norm_bias"), arguments["eps"]), 2)
    return torch.autograd.grad(F.gelu(z, approximate=arguments["approximate"]).to(dtype or grad.dtype), leaves, grad.to(dtype or grad.dtype))


def check(arguments, grad):
    names = names_of(arguments)
    poison = [torch.full((size,), math.nan, device="cuda") for size in (1 << 16, 1 << 20, 1 << 24)]
    del poison
    found = conv_norm_pool_gelu_parameter_gradients(grad, arguments, names)
    precision = arguments["precision"]
    with precisions.switched(precision):
        exact, eager = (chain_gradients(arguments, grad, dtype) for dtype in (torch.float64, None))
    floor = 1e-6 if precision == "ieee" else {torch.float32: 3e-4, torch.bfloat16: 4e-3, torch.float16: 5e-4}[arguments["input"].dtype]
    for name, want, theirs in zip(names, exact, eager, strict=True):
        ours = found[name]
        assert ours.shape == want.shape
        if name in ("bias", "addend"):  # 0: constants drop out of a norm over W
            assert (ours == 0).all()
            continue
        error, bound = ((value.double() - want).norm() / want.norm() for value in (ours, theirs))
        assert error <= max(2 * bound, floor), f"{name}: relative error {error:.3g}, eager's {bound:.3g}"


SHAPES = (
    # batch, C_in, C_out, depth, height
    (9, 32, 64, 4, 32),
    (17, 32, 64, 1, 16),
    (40, 20, 40, 3, 7),  # channels that only fill up, rows and planes that end in a tile
    (9, 1, 64, 5, 31),
    (32, 32, 64, 16, 32),  # the headline's
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@of_kinds
def test_gradients(shape, dtype, precision):
    for channels_last in (False, True):
        check(*operands(*shape, dtype=dtype, precision=precision, channels_last=channels_last))


@of_kinds
def test_no_parameters_of_the_norm_the_tanh_form_and_an_fp32_output(dtype, precision):
    check(*operands(9, 16, 64, 2, 33, dtype=dtype, precision=precision, is_affine=False))
    arguments, grad = operands(9, 16, 64, 2, 33, dtype=dtype, precision=precision, out_dtype=torch.float32)
    check({**arguments, "approximate": "tanh"}, grad)


@of_kinds
@pytest.mark.parametrize("first", [0, 3, 8])
def test_channels_of_a_wider_channels_last_tensor(first, dtype, precision):
    arguments, grad = operands(9, 24, 64, 3, 31, dtype=dtype, precision=precision)
    wide = torch.randn((9, 40, 3, 31, 32), device="cuda").to(dtype).contiguous(memory_format=torch.channels_last_3d)
    check({**arguments, "input": wide[:, first : first + 24]}, grad)


@of_kinds
def test_an_output_gradient_that_starts_anywhere(dtype, precision):
    arguments, grad = operands(9, 24, 64, 3, 31, dtype=dtype, precision=precision)
    check(arguments, torch.cat([grad.new_ones(1), grad.flatten()])[1:].view(grad.shape))


@of_kinds
def test_no_eps_and_sizes_that_end_in_a_tile(dtype, precision):
    arguments, grad = operands(9, 24, 64, 3, 31, dtype=dtype, precision=precision)
    check({**arguments, "eps": 0.0}, grad)


def test_random_shapes():
    draw = random.Random(0)
    for _ in range(40):
        depth, height = draw.randint(1, 6), draw.randint(1, 40)
        batch = max(draw.randint(1, 8), math.ceil(66 / math.ceil(height / 4)))
        shape = (batch, draw.randint(1, 32), draw.randint(33, 64), depth, height)
        kind = draw.choice(KINDS)
        arguments, grad = operands(*shape, *kind, channels_last=draw.random() < 0.5, is_affine=draw.random() < 0.8)
        if draw.random() < 0.5:
            arguments["addend"] = torch.randn((shape[2], 1, 1, 1), device="cuda", dtype=kind[0])
        try:
            check(arguments, grad)
        except AssertionError as error:
            raise AssertionError(f"{shape}, {kind}: {error}") from error


@of_kinds
def test_nan_in_one_image_reaches_the_gradients(dtype, precision):
    for value in (math.nan, math.inf):
        arguments, grad = operands(9, 32, 64, 4, 32, dtype=dtype, precision=precision)
        arguments["input"][1, 2, 3, 20, 20] = value
        found = conv_norm_pool_gelu_parameter_gradients(grad, arguments, names_of(arguments))
        assert not any(gradient.isfinite().all() for gradient in found.values())


@of_kinds
def test_the_same_bits_in_every_run(dtype, precision):
    arguments, grad = operands(9, 32, 64, 4, 32, dtype=dtype, precision=precision)
    first = conv_norm_pool_gelu_parameter_gradients(grad, arguments, names_of(arguments))
    for _ in range(10):
        again = conv_norm_pool_gelu_parameter_gradients(grad, arguments, names_of(arguments))
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_what_they_do_not_take_is_left_alone():
    arguments, grad = operands(9, 32, 64, 4, 32)
    change = {"stride": [1, 2, 2], "output_padding": [0, 1, 1]}
    assert conv_norm_pool_gelu_parameter_gradients(grad[:, :, :2].contiguous(), {**arguments, **change}, ["weight"]) is None
