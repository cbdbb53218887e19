"""Gradients of norm_pool_gelu and conv_norm_pool_gelu: the library's kernels where they take the call; else, for norm_pool_gelu, torch's own ops in
fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxfuse import ops
from fxfuse.recompute import dense, over_channels, sum_but_channels

aten = torch.ops.aten
WIDEST = 1024  # rows that the kernel holds in a warp's registers
LARGEST_WINDOW = 1024  # positions whose channels_last rows fit the shared memory of every device


def norm_pool_gelu_input_gradient_fake(
    grad: torch.Tensor,
    input: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    addend_scale: float,
    addend_value: float,
    eps: float,
    pool_size: Sequence[int],
    approximate: str,
    of_input: torch.Tensor,
    of_channels: torch.Tensor | None,
    of_norm: torch.Tensor | None,
) -> None:
    """Writes the gradients of norm_pool_gelu for a norm over W and windows side by side.

    grad: [N, C, D', H', W'], contiguous, fp32 or of the input's dtype. input: [N, C, D, H, W], contiguous or channels_last_3d. of_input: the
    input's gradient, in its dtype and strides; may be `input` itself. of_channels: fp32 [N, C], of_input summed over D, H and W before it is
    rounded. of_norm: fp32 [2, W], the gradients of norm_weight and norm_bias.
    """


norm_pool_gelu_input_gradient = ops.define(
    "norm_pool_gelu_input_gradient(Tensor grad, Tensor input, Tensor? bias, Tensor? addend, Tensor? norm_weight, Tensor? norm_bias, "
    "float addend_scale, float addend_value, float eps, int[] pool_size, str approximate, Tensor(a!) of_input, Tensor(b!)? of_channels, "
    "Tensor(c!)? of_norm) -> ()",
    norm_pool_gelu_input_gradient_fake,
)

def conv_norm_pool_gelu_weight_gradient_fake(grad: torch.Tensor, *arguments: Any) -> bool:
    """Writes the gradients of conv_norm_pool_gelu with respect to its parameters, and says whether it did: the kernels do not take every call.

    grad: of the output, contiguous, fp32 or of the input's dtype. arguments: the op's but for out_dtype; then of_weight, like weight in any
    strides; contiguous or None: of_norm_weight, of_norm_bias, and of_constants [C_out], of the weight's dtype: of what a channel adds to all of
    its values.
    """
    return True


conv_norm_pool_gelu_weight_gradient = ops.define(
    "conv_norm_pool_gelu_weight_gradient(Tensor grad, Tensor input, Tensor weight, Tensor? bias, Tensor? addend, Tensor? norm_weight, "
    "Tensor? norm_bias, bool transposed, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, float addend_scale, "
    "float addend_value, float eps, int[] pool_size, str approximate, str precision, Tensor(a!) of_weight, Tensor(b!)? of_norm_weight, "
    "Tensor(c!)? of_norm_bias, Tensor(d!)? of_constants) -> bool",
    conv_norm_pool_gelu_weight_gradient_fake,
)


def kernel_takes(arguments: Mapping[str, Any]) -> bool:
    """Whether the library's kernel computes these gradients of norm_pool_gelu."""
    input, kernel = arguments["input"], list(arguments["kernel_size"])
    if input.device.type != "cuda" or input.numel() == 0 or not ops.has_kernel(norm_pool_gelu_input_gradient, "cuda"):
        return False
    side_by_side = list(arguments["stride"]) == kernel and not any(arguments["padding"]) and arguments["divisor_override"] is None
    whole = not arguments["ceil_mode"] or all(size % window == 0 for size, window in zip(input.shape[-3:], kernel))
    return arguments["norm_ndim"] == 1 and side_by_side and whole and input.shape[-1] <= WIDEST and math.prod(input.shape[:-1]) < 2**31


def norm_pool_gelu_gradients(
    grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str], may_overwrite: bool = False
) -> dict[str, torch.Tensor]:
    """Gradients of norm_pool_gelu with respect to its input and what is asked for of the rest.

    may_overwrite: whether the input's gradient may take the input's place in memory.
    """
    find = _kernel_gradients if kernel_takes(arguments) else _torch_gradients
    return find(grad, arguments, names, may_overwrite)


def conv_norm_pool_gelu_parameter_gradients(
    grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str]
) -> dict[str, torch.Tensor] | None:
    """Gradients of conv_norm_pool_gelu but for its input's, where the library has a kernel for the convolution."""
    # The kernels are for transposed convolutions: to ask them about others takes as long as a launch.
    if "input" in names or not arguments["transposed"]:
        return None
    if not ops.has_kernel(conv_norm_pool_gelu_weight_gradient, grad.device.type):
        return None
    given = [value for name, value in arguments.items() if name != "out_dtype"]
    of_norm = [name for name in ("norm_weight", "norm_bias") if name in names]
    found = {name: torch.empty_like(arguments[name], memory_format=torch.contiguous_format) for name in of_norm}
    found["weight"] = torch.empty_like(arguments["weight"])
    of_constants = arguments["weight"].new_empty(arguments["weight"].shape[1]) if "bias" in names or "addend" in names else None
    grad = grad.contiguous()
    if grad.data_ptr() % (2 * grad.element_size()):  # part of another tensor; the kernel reads pairs
        grad = grad.clone()
    of_norm_weight, of_norm_bias = found.get("norm_weight"), found.get("norm_bias")
    if not conv_norm_pool_gelu_weight_gradient(grad, *given, found["weight"], of_norm_weight, of_norm_bias, of_constants):
        return None
    if "bias" in names:
        found["bias"] = of_constants
    if "addend" in names:
        addend = arguments["addend"]
        found["addend"] = (of_constants.sum() if addend.numel() == 1 else of_constants.clone()).reshape(addend.shape)
    return found


def _kernel_gradients(grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str], may_overwrite: bool) -> dict[str, torch.Tensor]:
    addend = arguments["addend"]
    varies = addend is not None and addend.shape[-3:].numel() > 1
    joins, scales = "bias" in names or ("addend" in names and not varies), "norm_weight" in names or "norm_bias" in names
    taken = ("input", "bias", "addend", "norm_weight", "norm_bias", "addend_scale", "addend_value", "eps", "kernel_size", "approximate")
    given = (grad, *(arguments[name] for name in taken), joins, scales)
    of_input, *sums = _run_kernel(*given, may_overwrite=True) if may_overwrite else norm_pool_gelu_kernel_gradients(*given)
    found = {"input": of_input}
    if scales:
        found["norm_weight"], found["norm_bias"] = sums.pop().unbind()
    if "bias" in names:
        found["bias"] = sums[0].sum(0)
    if "addend" in names:
        summed = of_input.float() if varies else sums[0].view(*sums[0].shape, 1, 1, 1)
        found["addend"] = (arguments["addend_scale"] * summed.sum_to_size(addend.shape)).to(addend.device)
    return {name: found[name] for name in ("input", *names)}


def _run_kernel(
    grad: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None, addend: torch.Tensor | None, *given: Any, may_overwrite: bool = False
) -> list[torch.Tensor]:
    """norm_pool_gelu_input_gradient of tensors of any strides: of_input, of_channels if `joins`, of_norm if `scales`."""
    *norm, kernel_size, approximate, joins, scales = given
    is_batched = input.dim() == 5
    grad, batch = (grad, input) if is_batched else (grad.unsqueeze(0), input.unsqueeze(0))
    varies = addend is not None and addend.shape[-3:].numel() > 1
    window = math.prod(kernel_size[:2]) * input.shape[-1]
    x, is_ours = dense(batch, contiguous=varies or window > LARGEST_WINDOW)
    of_input = x if is_ours or may_overwrite else torch.empty_like(x)
    of_channels = x.new_empty(x.shape[:2], dtype=torch.float32) if joins else None
    of_norm = x.new_empty((2, x.shape[-1]), dtype=torch.float32) if scales else None
    grad = (grad if grad.dtype in (x.dtype, torch.float32) else grad.float()).contiguous()
    norm_pool_gelu_input_gradient(grad, x, bias, addend, *norm, kernel_size, approximate, of_input, of_channels, of_norm)
    found = (of_input if is_batched else of_input.squeeze(0), of_channels, of_norm)
    return [value for value in found if value is not None]


norm_pool_gelu_kernel_gradients = ops.define(
    "norm_pool_gelu_kernel_gradients(Tensor grad, Tensor input, Tensor? bias, Tensor? addend, Tensor? norm_weight, Tensor? norm_bias, "
    "float addend_scale, float addend_value, float eps, int[] kernel_size, str approximate, bool joins, bool scales) -> Tensor[]",
    fake=_run_kernel,
    kernel=_run_kernel,
)


def _torch_gradients(grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str], may_overwrite: bool) -> dict[str, torch.Tensor]:
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
        found["addend"] = (arguments["addend_scale"] * of_y.sum_to_size(addend.shape)).to(addend.device)
    return {name: found[name] for name in ("input", *names)}
