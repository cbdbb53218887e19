"""conv -> gelu -> adaptive_avg_pool, or a mean over exactly the spatial dimensions.

The fused op `fxfuse::conv_gelu_pool` contains the convolution, whose output never reaches memory, and pools whole planes. The tail op
`fxfuse::gelu_pool` takes the convolution's output without bias and returns the pooled result in one pass over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from fxfuse import fused, precision, torch_private
from fxfuse.chain import Chain, Condition, Implementation, Step
from fxfuse.conditions import are_sizes, kernel_dtypes, parameter_dtype
from fxfuse.emitter import Emitter
from fxfuse.values import value_of
from fxfuse.view import Call

from .conv_gelu_pool_costs import fused_backward_cost, fused_cost, tail_backward_cost, tail_cost
from .conv_gelu_pool_ops import conv_gelu_pool, gelu_pool

# Padded values of a weight that fit the fused op's workspace.
MOST_WEIGHTS = 2**19


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
        in_half = torch.float16 in pool.args.get("summed", ())
        yield not in_half, "the mean is a sum in torch.float16, which may overflow, and a quotient; use mean, or sum with dtype=torch.float32"
    else:
        yield pool.dims == conv.dims, f"the pool is over {pool.dims} dims, the convolution over {conv.dims}"
        given = [size for size in pool.output_size if size is not None]
        yield are_sizes(given), f"the pool's output size {_text(pool.output_size)} is not known size by size"
        negative = [size for size in pool.output_size if isinstance(size, int) and size < 0]
        yield not negative, f"the pool's output size {_text(pool.output_size)} is negative"


def fused_takes(conv: Call, gelu: Call, pool: Call) -> Iterator[Condition]:
    """What the kernels of `csrc/conv_gelu_pool.cu` take (`conv_gelu_pool_takes` there bounds the weights)."""
    yield from fused.fused_convolution(conv)
    yield not conv.transposed, "the convolution is transposed"
    if pool.word != "mean":
        yield set(pool.output_size) == {1}, f"the pool's output size {_text(pool.output_size)} is not global"
    weight = conv.tensor("weight").shape
    packed = _padded(weight[1], 8) * _padded(weight[0], 64) * math.prod(weight[2:])
    yield packed <= MOST_WEIGHTS, f"the weight of shape {list(weight)} takes {packed} padded values, over {MOST_WEIGHTS}"
    # The op itself refuses a larger image where sizes vary: comparing a symbolic size here would install a guard.
    image = math.prod(torch_private.hint(size) for size in conv.tensor("input").shape[-conv.dims - 1 :])
    yield image < 2**31, f"an image of the input has {image} elements, 2^31 or more"


def fused_replace(emit: Emitter, conv: Call, gelu: Call, pool: Call) -> fx.Node:
    """The whole chain as one op."""

    def pooled(keepdim: bool) -> fx.Node:
        geometry = [list(conv.stride), fused.numeric_padding(conv), list(conv.dilation)]
        own = (keepdim, gelu.approximate, precision.current(), _out_dtype(conv, pool))
        return emit(conv_gelu_pool, conv.input, conv.weight, conv.bias, *geometry, *own)

    return _with_dims(emit, conv, pool, pooled)


def tail_takes(conv: Call, gelu: Call, pool: Call) -> Iterator[Condition]:
    """The tail op computes every case that the chain allows."""
    yield True, ""


def tail_replace(emit: Emitter, conv: Call, gelu: Call, pool: Call) -> fx.Node:
    """conv without bias -> gelu_pool."""
    size = [1] * conv.dims if pool.word == "mean" else [-1 if entry is None else entry for entry in pool.output_size]

    def pooled(keepdim: bool) -> fx.Node:
        return emit(gelu_pool, emit.conv_without_bias(conv), conv.bias, size, keepdim, gelu.approximate, _out_dtype(conv, pool))

    return _with_dims(emit, conv, pool, pooled)


def _with_dims(emit: Emitter, conv: Call, pool: Call, pooled: Callable[[bool], fx.Node]) -> fx.Node:
    """The pooled result with the dimensions that the pool keeps. A mean's result is contiguous whatever came in, unlike an adaptive pool's:
    the op drops its dimensions, and those it keeps (not all of them, where some were merged first) are added behind."""
    if pool.word != "mean":
        return pooled(True)
    result = pooled(False)
    for _ in range(pool.value.dim() - (conv.value.dim() - conv.dims)):
        result = emit(torch.unsqueeze, result, -1)
    return result


def _out_dtype(conv: Call, pool: Call) -> torch.dtype | None:
    return pool.value.dtype if pool.value.dtype != conv.value.dtype else None


def _padded(size: int, to: int) -> int:
    return math.ceil(size / to) * to


def _channels_innermost(value: torch.Tensor) -> bool:
    return torch_private.known_true(value.stride(-2) == 1) and not torch_private.known_true(value.shape[-1] == 1)


def _text(sizes: Sequence[object]) -> str:
    return str([value_of(size) for size in sizes])


CHAIN = Chain(
    name="conv_gelu_pool",
    steps=(Step("conv", "conv"), Step("gelu", "gelu"), Step("pool", "adaptive_avg_pool", "mean")),
    requires=requires,
    implementations=(
        Implementation(
            "conv_gelu_pool",
            fused_takes,
            fused_replace,
            fused_cost,
            "the whole chain on a GPU, whose convolution's output never reaches memory: a convolution that is not transposed, of one group and "
            f"symmetric padding, with weights of up to {MOST_WEIGHTS} padded values; a pool of whole planes",
            fused_backward_cost,
        ),
        Implementation(
            "gelu_pool",
            tail_takes,
            tail_replace,
            tail_cost,
            "gelu and pool behind any convolution of the chain's, on a GPU or a CPU",
            tail_backward_cost,
        ),
    ),
    dims=(1, 2, 3),
    description="The mean over space, or an adaptive average pool, of the gelu of a convolution, transposed or not, in float32, bfloat16 or float16.",
)
