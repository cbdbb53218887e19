"""Gradients of gelu_pool and conv_gelu_pool: the library's kernels where they take the call; else, for gelu_pool, torch's own ops in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxfuse import ops
from fxfuse.recompute import dense, over_channels, sum_but_channels

aten = torch.ops.aten
MOST_PAIRS = 27  # of a tap and 8 channels, whose sums the weight's gradient kernel keeps


def gelu_pool_input_gradient_fake(
    grad: torch.Tensor,
    input: torch.Tensor,
    bias: torch.Tensor | None,
    output_size: Sequence[int],
    approximate: str,
    of_input: torch.Tensor,
    of_channels: torch.Tensor | None,
) -> None:
    """Writes the gradients of gelu_pool.

    grad: [N, C, *output_size], contiguous, fp32 or of the input's dtype. input: [N, C, *spatial], contiguous or channels_last. of_input: the
    input's gradient, in its dtype and strides; may be `input` itself. of_channels: fp32 [N, C], of_input summed over the spatial dimensions
    before it is rounded.
    """


gelu_pool_input_gradient = ops.define(
    "gelu_pool_input_gradient(Tensor grad, Tensor input, Tensor? bias, int[] output_size, str approximate, Tensor(a!) of_input, "
    "Tensor(b!)? of_channels) -> ()",
    gelu_pool_input_gradient_fake,
)

def conv_gelu_pool_weight_gradient_fake(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    approximate: str,
    precision: str,
    of_weight: torch.Tensor,
    of_bias: torch.Tensor | None,
) -> bool:
    """Writes the gradients of conv_gelu_pool with respect to weight and bias, and says whether it did: the kernel does not take every call.

    grad: [N, C_out] values, contiguous, fp32 or of the input's dtype. of_weight, of_bias: like weight and bias, in any strides.
    """
    return True


conv_gelu_pool_weight_gradient = ops.define(
    "conv_gelu_pool_weight_gradient(Tensor grad, Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, str approximate, str precision, Tensor(a!) of_weight, Tensor(b!)? of_bias) -> bool",
    conv_gelu_pool_weight_gradient_fake,
)


def kernel_takes(arguments: Mapping[str, Any]) -> bool:
    """Whether the library's kernel computes these gradients of gelu_pool."""
    input = arguments["input"]
    if input.device.type != "cuda" or input.numel() == 0 or not ops.has_kernel(gelu_pool_input_gradient, "cuda"):
        return False
    spatial, out = input.shape[-len(arguments["output_size"]) :], _output_size(arguments)
    return 0 not in out and math.prod(spatial) < 2**30 and all((size + 1) * (windows + 1) < 2**31 - 1 for size, windows in zip(spatial, out))


def gelu_pool_gradients(
    grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str], may_overwrite: bool = False
) -> dict[str, torch.Tensor]:
    """Gradients of gelu_pool with respect to its input and, if asked for, its bias.

    may_overwrite: whether the input's gradient may take the input's place in memory.
    """
    find = _kernel_gradients if kernel_takes(arguments) else _torch_gradients
    return find(grad, arguments, names, may_overwrite)


def conv_gelu_pool_parameter_gradients(grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, torch.Tensor] | None:
    """Gradients of conv_gelu_pool with respect to weight and bias, where those are all and the library has a kernel for the convolution."""
    if "input" in names or _is_refused(arguments) or not ops.has_kernel(conv_gelu_pool_weight_gradient, grad.device.type):
        return None
    found = {name: torch.empty_like(arguments[name]) for name in ("weight", *names)}
    given = [arguments[name] for name in ("input", "weight", "bias", "stride", "padding", "dilation", "approximate", "precision")]
    done = conv_gelu_pool_weight_gradient(grad.contiguous(), *given, found["weight"], found.get("bias"))
    return found if done else None


def _is_refused(arguments: Mapping[str, Any]) -> bool:
    """Whether the weight's gradient kernel does not take a convolution anywhere, as `gradient_tiling` of csrc/conv_gelu_pool_gradient.cu says: to
    ask the kernel takes as long as a launch."""
    weight = arguments["weight"].shape
    return math.ceil(weight[1] / 8) * math.prod(weight[2:]) > MOST_PAIRS


def _output_size(arguments: Mapping[str, Any]) -> list[int]:
    size = arguments["output_size"]
    return [given if own == -1 else own for given, own in zip(arguments["input"].shape[-len(size) :], size)]


def _kernel_gradients(grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str], may_overwrite: bool) -> dict[str, torch.Tensor]:
    given = (grad, arguments["input"], arguments["bias"], _output_size(arguments), arguments["approximate"], "bias" in names)
    of_input, *sums = _run_kernel(*given, may_overwrite=True) if may_overwrite else gelu_pool_kernel_gradients(*given)
    return {"input": of_input, "bias": sums[0].sum(0)} if sums else {"input": of_input}


def _run_kernel(
    grad: torch.Tensor,
    input: torch.Tensor,
    bias: torch.Tensor | None,
    output_size: Sequence[int],
    approximate: str,
    joins: bool,
    may_overwrite: bool = False,
) -> list[torch.Tensor]:
    """gelu_pool_input_gradient of tensors of any strides: of_input, and of_channels if `joins`."""
    is_batched = input.dim() == len(output_size) + 2
    x, is_ours = dense(input if is_batched else input.unsqueeze(0))
    of_input = x if is_ours or may_overwrite else torch.empty_like(x)
    of_channels = x.new_empty(x.shape[:2], dtype=torch.float32) if joins else None
    grad = (grad if grad.dtype in (x.dtype, torch.float32) else grad.float()).reshape(*x.shape[:2], *output_size).contiguous()
    gelu_pool_input_gradient(grad, x, bias, output_size, approximate, of_input, of_channels)
    found = (of_input if is_batched else of_input.squeeze(0), of_channels)
    return [value for value in found if value is not None]


gelu_pool_kernel_gradients = ops.define(
    "gelu_pool_kernel_gradients(Tensor grad, Tensor input, Tensor? bias, int[] output_size, str approximate, bool joins) -> Tensor[]",
    fake=_run_kernel,
    kernel=_run_kernel,
)


def _torch_gradients(grad: torch.Tensor, arguments: Mapping[str, Any], names: Sequence[str], may_overwrite: bool) -> dict[str, torch.Tensor]:
    input, bias, output_size = (arguments[name] for name in ("input", "bias", "output_size"))
    dims = len(output_size)
    y = input.float() if bias is None else input.float() + over_channels(bias, dims)
    of_gelu = _adaptive_gradient(grad.float().reshape(*input.shape[:-dims], *grad.shape[input.dim() - dims :] or (1,) * dims), y, dims)
    of_y = aten.gelu_backward(of_gelu, y, approximate=arguments["approximate"])
    return {"input": of_y, "bias": sum_but_channels(of_y, dims)} if "bias" in names else {"input": of_y}


def _adaptive_gradient(grad: torch.Tensor, y: torch.Tensor, dims: int) -> torch.Tensor:
    """Of adaptive_avg_pool, whose result has the shape of `grad`, with respect to its input `y`."""
    spatial = y.shape[-dims:]
    if all(size == 1 for size in grad.shape[-dims:]):
        return (grad / math.prod(spatial)).expand(y.shape)
    if dims == 3:
        return aten._adaptive_avg_pool3d_backward(grad, y)
    if dims == 2:
        return aten._adaptive_avg_pool2d_backward(grad, y)
    return aten._adaptive_avg_pool2d_backward(grad.unsqueeze(-2), y.unsqueeze(-2)).squeeze(-2)
