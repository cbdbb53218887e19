"""The ops of the chain conv_norm_pool_gelu: schemas, fakes and gradients.

Gradients are the chain's in torch's own ops, in fp32 behind the convolution whatever its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxfuse import fused
from fxfuse.ops import define
from fxfuse.recompute import over_channels, sum_but_channels, through_convolution
from fxfuse.training import Backward, define_training

aten = torch.ops.aten


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
)


conv_norm_pool_gelu_weight_gradient = define(
    "conv_norm_pool_gelu_weight_gradient(Tensor grad, Tensor input, Tensor weight, Tensor? bias, Tensor? addend, Tensor? norm_weight, "
    "Tensor? norm_bias, bool transposed, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, float addend_scale, "
    "float addend_value, float eps, int[] pool_size, str approximate, str precision, Tensor(a!) of_weight, Tensor(b!)? of_norm_weight, "
    "Tensor(c!) of_values) -> bool",
    lambda *arguments: True,
)


def norm_pool_gelu_gradients(grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Gradients of norm_pool_gelu with respect to its input, in fp32, and what is asked for of the rest."""
    input, bias, addend = (arguments[name] for name in ("input", "bias", "addend"))
    weight, shift = (None if arguments[name] is None else arguments[name].float() for name in ("norm_weight", "norm_bias"))
    # What joins the input is added up first: mostly it is small, and one pass over the input is enough.
    joining = arguments["addend_value"] if bias is None else over_channels(bias, 3) + arguments["addend_value"]
    joining = joining if addend is None else joining + arguments["addend_scale"] * addend.float()
    y = input.float() + joining
    shape = y.shape[y.dim() - arguments["norm_ndim"] :]
    normed, mean, rstd = aten.native_layer_norm(y, shape, weight, shift, arguments["eps"])
    window = [arguments[name] for name in ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")]
    pooled = aten.avg_pool3d(normed, *window)
    of_pooled = aten.gelu_backward(grad.float(), pooled, approximate=arguments["approximate"])
    of_normed = aten.avg_pool3d_backward(of_pooled, normed, *window)
    asked = [True, "norm_weight" in names, "norm_bias" in names]
    of_y, of_weight, of_shift = aten.native_layer_norm_backward(of_normed, y, shape, mean, rstd, weight, shift, asked)
    found = {"input": of_y, "norm_weight": of_weight, "norm_bias": of_shift}
    if "bias" in names:
        found["bias"] = sum_but_channels(of_y, 3)
    if "addend" in names:
        found["addend"] = arguments["addend_scale"] * of_y.sum_to_size(addend.shape)
    return {name: found[name] for name in ("input", *names)}


def conv_norm_pool_gelu_parameter_gradients(grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, torch.Tensor] | None:
    """Gradients of conv_norm_pool_gelu but for its input's, where the library has a kernel for the convolution."""
    if not grad.is_cuda or "input" in names:
        return None
    given = [arguments[name] for name in arguments if name != "out_dtype"]
    found = {name: torch.empty_like(arguments[name], memory_format=torch.contiguous_format) for name in names if name == "norm_weight"}
    found["weight"] = torch.empty_like(arguments["weight"])
    of_values = torch.empty_like(grad, memory_format=torch.contiguous_format)  # of every value in an output's window
    if not conv_norm_pool_gelu_weight_gradient(grad.contiguous(), *given, found["weight"], found.get("norm_weight"), of_values):
        return None
    if "norm_bias" in names:
        depth, height, width = arguments["pool_size"]
        of_columns = of_values.sum(list(range(of_values.dim() - 1)), dtype=torch.float32) * (depth * height)
        found["norm_bias"] = of_columns.repeat_interleave(width)
    # What is constant along a row drops out of its norm: the gradient is 0, or nan where the row is.
    nothing = (found["weight"].float() * 0).sum()
    found.update({name: nothing.expand_as(arguments[name]) for name in ("bias", "addend") if name in names})
    return found


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
        splits=lambda arguments: arguments["norm_ndim"] < 5,
    ),
)
conv_norm_pool_gelu_training = define_training(conv_norm_pool_gelu, through_convolution(norm_pool_gelu_gradients, _fused_norm, kernel=conv_norm_pool_gelu_parameter_gradients))
