"""The ops of the chain conv_norm_pool_gelu: schemas, fakes, and their twins for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxfuse import flops, fused
from fxfuse.ops import define
from fxfuse.recompute import through_convolution
from fxfuse.training import Backward, define_training

from .conv_norm_pool_gelu_gradients import conv_norm_pool_gelu_parameter_gradients, kernel_takes, norm_pool_gelu_gradients


def norm_pool_gelu_fake(
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
) -> torch.Tensor:
    """gelu(avg_pool3d(layer_norm(input + bias[c] + addend_scale * addend + addend_value), ...)), contiguous.

    input: [N, C, D, H, W] or [C, D, H, W]. addend broadcasts to it. The norm is over the last norm_ndim dimensions. kernel_size, stride
    and padding have three entries.
    """
    # Pooling a meta tensor gives eager's shape rule (ceil_mode) and eager's own errors.
    shape = F.avg_pool3d(input.new_empty(input.shape), kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override).shape
    return input.new_empty(shape, dtype=input.dtype if out_dtype is None else out_dtype)


norm_pool_gelu = define(
    "norm_pool_gelu(Tensor input, Tensor? bias, Tensor? addend, Tensor? norm_weight, Tensor? norm_bias, float addend_scale, "
    "float addend_value, int norm_ndim, float eps, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, "
    "bool count_include_pad, int? divisor_override, str approximate, ScalarType? out_dtype) -> Tensor",
    norm_pool_gelu_fake,
)


def conv_norm_pool_gelu_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    transposed: bool,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    addend_scale: float,
    addend_value: float,
    eps: float,
    pool_size: Sequence[int],
    approximate: str,
    precision: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """norm_pool_gelu of the convolution, with the norm over the last dimension and pool windows side by side.

    precision: "tf32" or "ieee", how fp32 inputs are multiplied. addend: one value, or one for each channel.
    """
    output = fused.convolution(input, weight, stride, padding, [1, 1, 1], transposed, output_padding)
    dtype = input.dtype if out_dtype is None else out_dtype
    return input.new_empty(F.avg_pool3d(output.new_empty(output.shape), pool_size).shape, dtype=dtype)


conv_norm_pool_gelu = define(
    "conv_norm_pool_gelu(Tensor input, Tensor weight, Tensor? bias, Tensor? addend, Tensor? norm_weight, Tensor? norm_bias, bool transposed, "
    "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, float addend_scale, float addend_value, float eps, int[] pool_size, "
    "str approximate, str precision, ScalarType? out_dtype) -> Tensor",
    conv_norm_pool_gelu_fake,
    formula=flops.of_convolution,
)


def _is_sample(name: str, arguments: Mapping[str, Any]) -> bool:
    input, value = arguments["input"], arguments[name]
    return name in ("input", "addend") and value.dim() == input.dim() == 5 and value.shape[0] == input.shape[0]


def _fused_norm(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What conv_norm_pool_gelu leaves unsaid of norm_pool_gelu's arguments."""
    pool = arguments["pool_size"]
    fixed = {"padding": [0, 0, 0], "ceil_mode": False, "count_include_pad": True, "divisor_override": None}
    return {"norm_ndim": 1, "kernel_size": pool, "stride": pool, **fixed}


norm_pool_gelu_training = define_training(
    norm_pool_gelu,
    Backward(
        norm_pool_gelu_gradients,
        inner=lambda arguments: arguments["input"].numel(),
        is_sample=_is_sample,
        splits=lambda arguments: arguments["norm_ndim"] < 5 and not kernel_takes(arguments),
        traced=lambda arguments: kernel_takes(arguments),
    ),
)
conv_norm_pool_gelu_training = define_training(
    conv_norm_pool_gelu, through_convolution(norm_pool_gelu_gradients, _fused_norm, kernel=conv_norm_pool_gelu_parameter_gradients)
)
