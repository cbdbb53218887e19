"""What both tail ops must compute, in float64, and the error contract as data. Pure torch; no fxfuse.

`norm_pool_gelu_reference` and `gelu_pool_reference` take the ops' own arguments. With `dtype=torch.float32` (or the input's) the same
functions are the eager chain whose error the contract is measured against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

ADAPTIVE_POOLS = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)

# An op's relative error, as a norm, may be twice that of the eager chain in the same dtype: two roundings of the same kind.
EAGER_FACTOR = 2.0
# Eager is sometimes lucky. In float32 a sum of a few rounded terms is good to 1e-6; a 16-bit result is rounded to nearest once.
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
# A norm hides one wrong row: no element may be off by more than this many times the same bound, scaled to the largest value.
ELEMENT_FACTOR = 10.0


def add_channels(input: torch.Tensor, bias: torch.Tensor | None, spatial: int) -> torch.Tensor:
    return input if bias is None else input + bias.reshape(-1, *[1] * spatial)


def norm_pool_gelu_reference(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    addend_scale: float,
    addend_value: float,
    norm_ndim: int,
    eps: float,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    approximate: str,
    out_dtype: torch.dtype | None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The chain of torch ops with every tensor cast to `dtype` first; the result stays in `dtype`, whatever out_dtype says."""
    input, bias, addend, weight, shift = (None if t is None else t.to(dtype) for t in (input, bias, addend, norm_weight, norm_bias))
    y = add_channels(input, bias, 3)
    if addend is not None:
        y = y + addend_scale * addend
    z = F.layer_norm(y + addend_value, y.shape[y.dim() - norm_ndim :], weight, shift, eps)
    p = F.avg_pool3d(z, list(kernel_size), list(stride), list(padding), ceil_mode, count_include_pad, divisor_override)
    return F.gelu(p, approximate=approximate)


def gelu_pool_reference(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    output_size: Sequence[int],
    keepdim: bool,
    approximate: str,
    out_dtype: torch.dtype | None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The chain of torch ops with every tensor cast to `dtype` first; the result stays in `dtype`, whatever out_dtype says."""
    spatial = len(output_size)
    input, bias = (None if t is None else t.to(dtype) for t in (input, bias))
    size = [given if own == -1 else own for given, own in zip(input.shape[-spatial:], output_size, strict=True)]
    out = ADAPTIVE_POOLS[spatial - 1](F.gelu(add_channels(input, bias, spatial), approximate=approximate), size)
    return out if keepdim else out.reshape(out.shape[:-spatial])


def relative_error(out: torch.Tensor, ref64: torch.Tensor) -> float:
    """The norm of the difference over the reference's, of the elements that are finite in the reference."""
    finite = ref64.isfinite()
    difference = torch.where(finite, out.double() - ref64, 0.0)
    return (difference.norm() / torch.where(finite, ref64, 0.0).norm().clamp_min(1e-300)).item()


def assert_within_contract(out: torch.Tensor, ref64: torch.Tensor, eager: torch.Tensor, dtype: torch.dtype) -> None:
    """out is as close to ref64 as the contract asks, and inf and nan are where ref64 has them.

    eager: the same chain by torch ops, rounded to `dtype`. dtype: what arithmetic and rounding the contract is that of: the input's, or
    float32 if eager could do no better. A failure names the worst element and both its values.
    """
    assert out.shape == ref64.shape, f"shape is {list(out.shape)}, {list(ref64.shape)} is right"
    if out.numel() == 0:
        return
    out, ref64, eager = out.detach().cpu(), ref64.detach().cpu(), eager.detach().cpu()
    special = torch.where(ref64.isnan(), out.isnan(), (out == ref64) | (ref64.isfinite() & out.isfinite()))
    assert special.all(), f"inf or nan differ: {_worst(~special, out, ref64)}"
    bound = max(EAGER_FACTOR * relative_error(eager, ref64), FLOOR[dtype])
    error = relative_error(out, ref64)
    finite = ref64.isfinite()
    difference = torch.where(finite, (out.double() - ref64).abs(), 0.0)
    assert error <= bound, f"error {error:.2e} is above the bound {bound:.2e}; worst: {_worst(difference, out, ref64)}"
    limit = ELEMENT_FACTOR * bound * torch.where(finite, ref64.abs(), 0.0).max().item()
    assert difference.max().item() <= limit, f"an element is off by more than {limit:.2e}: {_worst(difference, out, ref64)}"


def _worst(score: torch.Tensor, out: torch.Tensor, ref64: torch.Tensor) -> str:
    index = tuple(i.item() for i in torch.unravel_index(score.to(torch.float64).argmax(), score.shape))
    return f"[{', '.join(map(str, index))}] is {out[index].item():.9g}, {ref64[index].item():.9g} is right"
