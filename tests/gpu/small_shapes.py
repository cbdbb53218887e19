"""Small shapes of every kernel and path, for compute-sanitizer (see sanitize): python small_shapes.py OP.

Inputs are made on the CPU and compared there, so that no kernel but the ops' own runs on the GPU: tools see everything that was written, and
report nothing about libraries.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fxfuse import library

KINDS = ((torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "tf32"), (torch.float16, "tf32"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def randn(*shape: int, dtype: torch.dtype, channels_last: bool = False) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float32).to(dtype)
    return x.contiguous(memory_format=CHANNELS_LAST[x.dim()]) if channels_last and x.dim() in CHANNELS_LAST else x


def compare(op: Callable[..., torch.Tensor], arguments: tuple[Any, ...], chain: Callable[..., torch.Tensor]) -> None:
    """Runs `op` on copies of its arguments on the GPU, and `chain` on their values in fp32 on the CPU."""
    out = op(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments)).cpu().float()
    expected = chain(*(a.float() if isinstance(a, torch.Tensor) else a for a in arguments))
    error = (out - expected).norm() / expected.norm()
    assert error < 3e-2, f"{op}: relative error {error:.2g} for {[tuple(a.shape) for a in arguments if isinstance(a, torch.Tensor)]}"


def gelu_pool() -> None:
    shapes = [((2, 3, 40), 1), ((2, 5, 9, 11), 1), ((1, 2, 130, 140), 1), ((1, 40, 3, 17, 19), 1), ((2, 33, 14, 15), 7), ((1, 64, 30, 31), 2), ((1, 4, 5, 6, 7), 3)]
    for (shape, size), dtype, channels_last in itertools.product(shapes, DTYPES, (False, True)):
        y, bias = randn(*shape, dtype=dtype, channels_last=channels_last), randn(shape[1], dtype=dtype)
        sizes = [size] * (len(shape) - 2)
        pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(sizes) - 1]
        compare(
            torch.ops.fxfuse.gelu_pool,
            (y, bias, sizes, True, "none", None),
            lambda y, bias, *rest: pool(F.gelu(y + bias.view(-1, *[1] * len(sizes))), sizes),
        )


def norm_pool_gelu() -> None:
    widths, pools = (8, 31, 64, 100, 256, 520, 1100), ((2, 2, 0), (3, 2, 1), (1, 1, 0))
    cases = [((1, 3, 4, 4, width), 1, pool) for width, pool in itertools.product(widths, pools)]
    cases += [((2, 34, 4, 5, 12), ndim, pool) for ndim, pool in itertools.product((1, 2, 3, 4), pools)]
    for (shape, ndim, pool), dtype, channels_last, full in itertools.product(cases, DTYPES, (False, True), (False, True)):
        y, bias = randn(*shape, dtype=dtype, channels_last=channels_last), randn(shape[1], dtype=dtype)
        addend = randn(*shape, dtype=dtype) if full else randn(1, shape[1], 1, 1, 1, dtype=dtype)
        weight, norm_bias = randn(2, *shape[-ndim:], dtype=dtype)
        window = [[n] * 3 for n in pool]
        compare(
            torch.ops.fxfuse.norm_pool_gelu,
            (y, bias, addend, weight, norm_bias, 1.0, 0.0, ndim, 1e-5, *window, False, True, None, "none", None),
            lambda y, bias, addend, weight, norm_bias, *rest: F.gelu(
                F.avg_pool3d(F.layer_norm(y + bias.view(-1, 1, 1, 1) + addend, weight.shape, weight, norm_bias), *window)
            ),
        )


def conv_gelu_pool() -> None:
    # batch, C_in, C_out, size, kernel, stride, padding, dilation
    shapes = [
        (2, 8, 64, (12, 140), (3, 3), 1, 0, 1), (1, 3, 70, (17, 19), (3, 3), 1, 1, 1), (1, 5, 40, (9, 10), (5, 5), 2, 2, 1), (2, 16, 64, (7, 9), (1, 1), 1, 0, 1),
        (1, 64, 128, (8, 9), (3, 3), 1, 1, 1), (1, 12, 64, (20, 21), (3, 3), 1, 3, 4), (2, 6, 48, (300,), (9,), 1, 4, 1), (1, 4, 64, (5, 7, 9), (3, 3, 3), 1, 1, 1),
        (1, 9, 33, (6, 7, 8), (2, 3, 1), 2, 1, 1),
    ]  # fmt: skip
    for shape, (dtype, precision), channels_last in itertools.product(shapes, KINDS, (False, True)):
        n, c_in, c_out, size, kernel, *geometry = shape
        x, weight = (randn(*s, dtype=dtype, channels_last=channels_last) for s in ((n, c_in, *size), (c_out, c_in, *kernel)))
        dims, numbers = len(size), [[value] * len(size) for value in geometry]
        compare(
            torch.ops.fxfuse.conv_gelu_pool,
            (x, weight, randn(c_out, dtype=dtype), *numbers, False, "none", precision, None),
            lambda x, weight, bias, *rest: F.gelu(CONVS[dims](x, weight, bias, *numbers)).mean(tuple(range(-dims, 0))),
        )


def conv_norm_pool_gelu() -> None:
    # input shape, C_out, kernel, transposed, stride, padding, output_padding, pool
    shapes = [
        ((9, 32, 2, 32, 32), 64, 3, True, 2, 1, 1, 2), ((11, 7, 2, 24, 32), 40, 3, True, 2, 1, 1, 2),  # the Hopper kernel's class
        ((1, 8, 3, 4, 10), 17, 3, True, 2, 1, 1, 2), ((1, 40, 4, 5, 33), 8, 3, False, 1, 1, 0, 2), ((1, 3, 6, 7, 100), 33, 5, False, 2, 2, 0, 3),
        ((1, 5, 3, 3, 64), 16, 4, True, 2, 1, 0, 4), ((2, 16, 4, 4, 20), 64, 1, False, 1, 0, 0, 1), ((1, 6, 2, 3, 250), 16, 3, True, 1, 1, 0, 2),
    ]  # fmt: skip
    for shape, (dtype, precision), channels_last in itertools.product(shapes, KINDS, (False, True)):
        size, c_out, kernel, transposed, stride, padding, output_padding, pool = shape
        channels = (size[1], c_out) if transposed else (c_out, size[1])
        x, weight = (randn(*s, dtype=dtype, channels_last=channels_last) for s in (size, (*channels, *[kernel] * 3)))

        def conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            if transposed:
                return F.conv_transpose3d(x, weight, bias, stride, padding, output_padding)
            return F.conv3d(x, weight, bias, stride, padding)

        bias = randn(c_out, dtype=dtype)
        width = conv(x.float(), weight.float(), bias.float()).shape[-1]
        norm = randn(2, width, dtype=dtype)
        geometry = (transposed, [stride] * 3, [padding] * 3, [output_padding] * 3, 1.0, 0.5, 1e-5, [pool] * 3, "none", precision, None)
        compare(
            torch.ops.fxfuse.conv_norm_pool_gelu,
            (x, weight, bias, randn(c_out, 1, 1, 1, dtype=dtype), norm[0], norm[1], *geometry),
            lambda x, weight, bias, addend, *norm: F.gelu(F.avg_pool3d(F.layer_norm(conv(x, weight, bias) + addend + 0.5, (width,), *norm[:2]), pool)),
        )


def compare_gradients(name: str, arguments: tuple[Any, ...], chain: Callable[..., torch.Tensor]) -> None:
    """The gradients of every tensor among an op's arguments, on copies on the GPU, and those of `chain` on their values in fp32 on the CPU."""

    def gradients(op: Callable[..., torch.Tensor], move: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        given = [move(a.detach()).requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments]
        with torch.enable_grad():
            out = op(*given)
        grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
        return list(torch.autograd.grad(out, [a for a in given if isinstance(a, torch.Tensor)], grad))

    op = getattr(torch.ops.fxfuse, f"{name}_training")
    ours, expected = gradients(op, lambda a: a.cuda()), gradients(chain, lambda a: a.float())
    scale = max(want.norm() for want in expected)
    for out, want in zip(ours, expected):
        assert (out.cpu().float() - want).norm() < 3e-2 * max(want.norm(), 0.1 * scale), f"{op}: {[tuple(e.shape) for e in expected]}"


def gelu_pool_gradients() -> None:
    shapes = [((2, 3, 40), 1), ((2, 5, 9, 11), 1), ((1, 2, 80, 70), 1), ((1, 40, 3, 7, 9), 1), ((2, 33, 14, 15), 7), ((1, 64, 30, 31), 2)]
    for (shape, size), dtype, channels_last in itertools.product(shapes, DTYPES, (False, True)):
        y, bias = randn(*shape, dtype=dtype, channels_last=channels_last), randn(shape[1], dtype=dtype)
        sizes = [size] * (len(shape) - 2)
        pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(sizes) - 1]
        compare_gradients(
            "gelu_pool",
            (y, bias, sizes, True, "none", None),
            lambda y, bias, *rest: pool(F.gelu(y + bias.view(-1, *[1] * len(sizes))), sizes),
        )


def norm_pool_gelu_gradients() -> None:
    for width, pool, dtype, channels_last, full in itertools.product((8, 31, 64, 256, 520, 1000), (1, 2, 3), DTYPES, (False, True), (False, True)):
        shape = (1, 18, 3, 4, width)
        y, bias = randn(*shape, dtype=dtype, channels_last=channels_last), randn(shape[1], dtype=dtype)
        addend = randn(*shape, dtype=dtype) if full else randn(1, shape[1], 1, 1, 1, dtype=dtype)
        weight, norm_bias = randn(2, width, dtype=dtype)
        window = [[pool] * 3, [pool] * 3, [0] * 3]
        compare_gradients(
            "norm_pool_gelu",
            (y, bias, addend, weight, norm_bias, 1.0, 0.0, 1, 1e-5, *window, False, True, None, "none", None),
            lambda y, bias, addend, weight, norm_bias, *rest: F.gelu(
                F.avg_pool3d(F.layer_norm(y + bias.view(-1, 1, 1, 1) + addend, weight.shape, weight, norm_bias), *window)
            ),
        )


def weight_gradient(chain: Callable[..., torch.Tensor], grad: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Of a chain whose second argument is the weight."""

    def gradient(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        with torch.enable_grad():
            leaf = weight.requires_grad_()
            return torch.autograd.grad(chain(x, leaf, *rest), leaf, grad.float())[0]

    return gradient


def conv_gelu_pool_gradients() -> None:
    # batch, C_in, C_out, size, kernel, padding, dilation
    shapes = [
        (2, 8, 64, (12, 140), (3, 3), 0, 1), (1, 3, 70, (17, 19), (3, 3), 1, 1), (2, 24, 64, (9, 10), (3, 3), 1, 1), (2, 16, 64, (7, 9), (1, 1), 0, 1),
        (1, 5, 40, (9, 10), (5, 5), 2, 1), (1, 8, 64, (20, 21), (3, 3), 3, 4), (2, 6, 48, (300,), (9,), 4, 1), (1, 4, 64, (5, 7, 9), (3, 3, 3), 1, 1),
    ]  # fmt: skip
    for shape, (dtype, precision), channels_last in itertools.product(shapes, KINDS, (False, True)):
        n, c_in, c_out, size, kernel, padding, dilation = shape
        dims = len(size)
        x, weight = (randn(*s, dtype=dtype, channels_last=channels_last) for s in ((n, c_in, *size), (c_out, c_in, *kernel)))
        grad = randn(n, c_out, dtype=dtype)

        def op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            of_weight, geometry = torch.empty_like(weight), [[value] * dims for value in (1, padding, dilation)]
            call = (grad.cuda(), x, weight, bias, *geometry, "none", precision, of_weight, torch.empty_like(bias))
            assert torch.ops.fxfuse.conv_gelu_pool_weight_gradient(*call)
            return of_weight

        def chain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.gelu(CONVS[dims](x, weight, bias, padding=padding, dilation=dilation)).mean(tuple(range(-dims, 0)))

        compare(op, (x, weight, randn(c_out, dtype=dtype)), weight_gradient(chain, grad))


def conv_norm_pool_gelu_gradients() -> None:
    shapes = [((9, 32, 2, 32, 32), 64), ((23, 7, 3, 11, 32), 40)]  # of the input, and C_out
    for (size, c_out), (dtype, precision), channels_last in itertools.product(shapes, KINDS, (False, True)):
        x, weight = (randn(*s, dtype=dtype, channels_last=channels_last) for s in (size, (size[1], c_out, 3, 3, 3)))
        grad = randn(size[0], c_out, *size[2:], dtype=dtype)

        def op(x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor) -> torch.Tensor:
            of_weight, of_norm, geometry = torch.empty_like(weight), torch.empty_like(torch.stack([norm_weight] * 2)), [[n] * 3 for n in (2, 1, 1)]
            settings = (True, *geometry, 1.0, 0.0, 1e-5, [2] * 3, "none", precision)
            call = (grad.cuda(), x, weight, None, None, norm_weight, norm_bias, *settings, of_weight, *of_norm, None)
            assert torch.ops.fxfuse.conv_norm_pool_gelu_weight_gradient(*call)
            return of_weight

        def chain(x: torch.Tensor, weight: torch.Tensor, *norm: torch.Tensor) -> torch.Tensor:
            return F.gelu(F.avg_pool3d(F.layer_norm(F.conv_transpose3d(x, weight, None, 2, 1, 1), (64,), *norm), 2))

        compare(op, (x, weight, *randn(2, 64, dtype=dtype)), weight_gradient(chain, grad))


OPS = {
    run.__name__: run
    for run in (
        gelu_pool, norm_pool_gelu, conv_gelu_pool, conv_norm_pool_gelu,
        gelu_pool_gradients, norm_pool_gelu_gradients, conv_gelu_pool_gradients, conv_norm_pool_gelu_gradients,
    )
}  # fmt: skip
PORTABLE = ("conv_gelu_pool", "conv_norm_pool_gelu")  # those with a portable path beside Hopper's


def main(op: str) -> None:
    """Runs an op's shapes on each of its code paths."""
    torch.manual_seed(0)
    library.load("cuda")
    for portable in ("0", "1") if op in PORTABLE else ("0",):
        os.environ["FXFUSE_PORTABLE"] = portable
        OPS[op]()
        print(f"{op}, FXFUSE_PORTABLE={portable}: right", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1])
