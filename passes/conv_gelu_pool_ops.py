"""The ops of the chain conv_gelu_pool: schemas, fakes, and their twins for training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fxfuse import flops, fused, torch_private
from fxfuse.ops import define
from fxfuse.recompute import through_convolution
from fxfuse.training import Backward, define_training

from .conv_gelu_pool_gradients import conv_gelu_pool_parameter_gradients, gelu_pool_gradients, kernel_takes

POOLS = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


def gelu_pool_fake(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    output_size: Sequence[int],
    keepdim: bool,
    approximate: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """adaptive_avg_pool(gelu(input + bias[c]), output_size) over the last len(output_size) dimensions.

    input: [N, C, *spatial] or [C, *spatial]. output_size: -1 keeps the input's size. keepdim: without it the pooled dimensions, all of
    size 1, are dropped. The result is channels_last where eager's is, else contiguous.
    """
    dims = len(output_size)
    spatial = input.shape[-dims:]
    size = [given if own == -1 else own for given, own in zip(spatial, output_size)]
    dtype = input.dtype if out_dtype is None else out_dtype
    # A meta tensor of the input's shape gives eager's own errors for sizes that cannot be pooled.
    shape = POOLS[dims - 1](input.new_empty(input.shape), size).shape
    if not keepdim:
        return input.new_empty(shape[:-dims], dtype=dtype)
    # gelu makes strides that are both contiguous and channels_last contiguous; adaptive_avg_pool3d keeps channels_last_3d only for size 1.
    channels_last = input.dim() == dims + 2 and dims > 1 and torch_private.is_channels_last(input) and not input.is_contiguous()
    channels_last = channels_last and (dims == 2 or all(n == 1 for n in size))
    memory_format = {2: torch.channels_last, 3: torch.channels_last_3d}[dims] if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=input.device, memory_format=memory_format)


gelu_pool = define(
    "gelu_pool(Tensor input, Tensor? bias, SymInt[] output_size, bool keepdim, str approximate, ScalarType? out_dtype) -> Tensor",
    gelu_pool_fake,
)


def conv_gelu_pool_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    keepdim: bool,
    approximate: str,
    precision: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """The mean of gelu(conv(input, weight, bias)) over all its pixels, as gelu_pool of the convolution would return it.

    precision: "tf32" or "ieee", how fp32 inputs are multiplied.
    """
    dims = weight.dim() - 2
    output = fused.convolution(input, weight, stride, padding, dilation, False, [0] * dims)
    return gelu_pool_fake(output, bias, [1] * dims, keepdim, approximate, out_dtype)


conv_gelu_pool = define(
    "conv_gelu_pool(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool keepdim, "
    "str approximate, str precision, ScalarType? out_dtype) -> Tensor",
    conv_gelu_pool_fake,
    formula=flops.of_convolution,
)


gelu_pool_training = define_training(
    gelu_pool,
    Backward(
        gelu_pool_gradients,
        inner=lambda arguments: arguments["input"].numel(),
        is_sample=lambda name, arguments: name == "input" and arguments["input"].dim() == len(arguments["output_size"]) + 2,
        splits=lambda arguments: not kernel_takes(arguments),
        traced=lambda arguments: kernel_takes(arguments),
    ),
)
conv_gelu_pool_training = define_training(
    conv_gelu_pool,
    through_convolution(
        gelu_pool_gradients, lambda arguments: {"output_size": [1] * (arguments["weight"].dim() - 2)}, kernel=conv_gelu_pool_parameter_gradients
    ),
)
