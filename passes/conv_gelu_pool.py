"""conv -> gelu -> adaptive_avg_pool, or a mean over exactly the spatial dimensions.

The tail op `fxfuse::gelu_pool` takes the convolution's output without bias and returns the pooled result in one pass over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import fx

from fxfuse import torch_private
from fxfuse.chain import Chain, Condition, Implementation, Step
from fxfuse.choose import Cost
from fxfuse.conditions import kernel_dtypes, number_of_bytes, parameter_dtype
from fxfuse.ops import define
from fxfuse.replacement import Emitter
from fxfuse.values import value_of
from fxfuse.view import Call

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


def requires(conv: Call, gelu: Call, pool: Call) -> Iterator[Condition]:
    """What the chain must be for any implementation: dtypes that kernels exist for, a pool over exactly the spatial dimensions."""
    yield from kernel_dtypes(conv, gelu, pool)
    yield from parameter_dtype("the convolution's bias", conv.tensor("bias"), conv.value.dtype)
    yield gelu.approximate in ("none", "tanh"), f"gelu's approximate={gelu.approximate!r} is neither 'none' nor 'tanh'"
    rank = conv.value.dim()
    yield conv.dims > 1 or not _channels_innermost(conv.value), "the 1-d convolution's result has its channels innermost; the op returns it contiguous"
    spatial = set(range(rank - conv.dims, rank))
    if pool.word == "mean":
        dim = pool.dim if pool.dim is not None else range(rank)
        literal = all(isinstance(d, int) for d in dim)
        yield literal and {d % rank for d in dim} == spatial, f"the mean is over dims {_text(dim)}, not over exactly the spatial dims {sorted(spatial)}"
        yield isinstance(pool.keepdim, bool), f"the mean's keepdim={pool.keepdim} is not a bool"
    else:
        yield pool.dims == conv.dims, f"the pool is over {pool.dims} dims, the convolution over {conv.dims}"
        negative = [size for size in pool.output_size if isinstance(size, int) and size < 0]
        yield not negative, f"the pool's output size {_text(pool.output_size)} is negative"


def tail_takes(conv: Call, gelu: Call, pool: Call) -> Iterator[Condition]:
    """The tail op computes every case that the chain allows."""
    yield True, ""


def tail_replace(emit: Emitter, conv: Call, gelu: Call, pool: Call) -> fx.Node:
    """conv without bias -> gelu_pool; a mean's result is contiguous whatever came in, so its kept dims are added behind the op."""
    out_dtype = pool.value.dtype if pool.value.dtype != conv.value.dtype else None
    if pool.word == "mean":
        result = emit(gelu_pool, emit.conv_without_bias(conv), conv.bias, [1] * conv.dims, False, gelu.approximate, out_dtype)
        for _ in range(conv.dims if pool.keepdim else 0):
            result = emit(torch.unsqueeze, result, -1)
        return result
    size = [-1 if entry is None else entry for entry in pool.output_size]
    return emit(gelu_pool, emit.conv_without_bias(conv), conv.bias, size, True, gelu.approximate, out_dtype)


def tail_cost(conv: Call, gelu: Call, pool: Call) -> Cost:
    """One read of the convolution's output and a small write; Inductor's reduction moves the same bytes."""
    total = number_of_bytes(conv.value) + number_of_bytes(pool.value)
    return Cost(bytes=total, kernels=1, inductor_bytes=total, inductor_kernels=1)


def _channels_innermost(value: torch.Tensor) -> bool:
    return torch_private.known_true(value.stride(-2) == 1) and not torch_private.known_true(value.shape[-1] == 1)


def _text(sizes: Sequence[object]) -> str:
    return str([value_of(size) for size in sizes])


CHAIN = Chain(
    name="conv_gelu_pool",
    steps=(Step("conv", "conv"), Step("gelu", "gelu"), Step("pool", "adaptive_avg_pool", "mean")),
    requires=requires,
    implementations=(Implementation("gelu_pool", tail_takes, tail_replace, tail_cost),),
)
