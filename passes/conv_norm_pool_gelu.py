"""conv -> add (optional) -> layer_norm -> avg_pool3d -> gelu.

The fused op `fxfuse::conv_norm_pool_gelu` contains the convolution, whose output never reaches memory. The tail op `fxfuse::norm_pool_gelu`
takes the convolution's output without bias, holds the rows of a pool window on chip, normalises and pools them, and writes only the
pooled result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fxfuse import fused, precision, torch_private
from fxfuse.chain import Chain, Condition, Implementation, Step
from fxfuse.conditions import are_sizes, kernel_dtypes, parameter_dtype, same_shape
from fxfuse.emitter import Emitter
from fxfuse.values import value_of
from fxfuse.view import Call

from .conv_norm_pool_gelu_costs import addend_of, fused_backward_cost, fused_cost, tail_backward_cost, tail_cost
from .conv_norm_pool_gelu_ops import conv_norm_pool_gelu, norm_pool_gelu


def requires(conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> Iterator[Condition]:
    """What the chain must be for any implementation."""
    yield from kernel_dtypes(conv)
    if add is not None:
        yield from addend_conditions(conv, add)
    yield from kernel_dtypes(conv, add, norm, pool, gelu)
    dtype = conv.value.dtype
    for name in ("weight", "bias"):
        yield from parameter_dtype(f"layer_norm's {name}", norm.tensor(name), dtype)
    yield from parameter_dtype("the convolution's bias", conv.tensor("bias"), dtype)
    window = [*pool.kernel_size, *pool.stride, *pool.padding]
    yield all(isinstance(n, int) for n in window), f"avg_pool3d's window {_text(window)} is not constant"
    yield pool.divisor_override is None or isinstance(pool.divisor_override, int), "avg_pool3d's divisor_override is not constant"
    yield are_sizes(norm.normalized_shape), "layer_norm's normalized_shape is not known size by size"
    yield isinstance(norm.eps, (int, float)), "layer_norm's eps is not constant"
    yield gelu.approximate in ("none", "tanh"), f"gelu's approximate={gelu.approximate!r} is neither 'none' nor 'tanh'"


def addend_conditions(conv: Call, add: Call) -> Iterator[Condition]:
    """The addend joins the convolution's unscaled result, without raising its dtype or enlarging it."""
    addend, alpha = addend_of(add), add.alpha
    yield isinstance(alpha, (int, float)), "the add's alpha is not a constant number"
    yield add.by == "self" or alpha == 1, f"the add scales the convolution's result by {alpha}; only the addend may be scaled"
    value = value_of(addend)
    if not isinstance(value, torch.Tensor):
        yield isinstance(value, (bool, int, float)) and not isinstance(addend, fx.Node), "the addend is a symbolic or complex number"
        return
    result, given = add.value.dtype, conv.value.dtype
    yield result == given, f"the addend is {value.dtype} and turns the convolution's {given} into {result}"
    yield same_shape(add.value, conv.value), f"the addend of shape {list(value.shape)} enlarges the convolution's result {list(conv.value.shape)}"


def fused_takes(conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> Iterator[Condition]:
    """What the kernels of `csrc/conv_norm_pool_gelu.cu` take."""
    yield from fused.fused_convolution(conv)
    yield max(conv.tensor("weight").shape[2:]) <= 5, f"the kernel {list(conv.tensor('weight').shape[2:])} has a size over 5"
    yield set(conv.stride) <= {1, 2}, f"the stride {list(conv.stride)} is not made of 1 and 2"
    yield set(conv.dilation) == {1}, f"the dilation {list(conv.dilation)} is not 1"
    yield len(norm.normalized_shape) == 1, f"layer_norm is over {len(norm.normalized_shape)} dimensions, not over the last one"
    width = conv.value.shape[-1]
    yield torch_private.known_true(width <= 256), f"rows of the convolution's output are {width} wide, over 256 or not known to be less"
    yield tuple(pool.kernel_size) == tuple(pool.stride), "avg_pool3d's windows overlap or leave gaps"
    yield max(pool.kernel_size) <= 4, f"avg_pool3d's window {list(pool.kernel_size)} has a size over 4"
    yield set(pool.padding) == {0} and not pool.ceil_mode, "avg_pool3d pads or has ceil_mode"
    yield pool.divisor_override is None, "avg_pool3d has a divisor_override"
    needed, given = _shared_bytes(conv, pool), fused.gpu_of(conv.value.device).shared_bytes
    yield needed <= given, f"a row of windows needs up to {needed} bytes of shared memory, and a block has {given} on this device"
    if add is not None and isinstance(value_of(addend_of(add)), torch.Tensor):
        shape = value_of(addend_of(add)).shape
        # All sizes but the channels', if it has that many dimensions, are 1.
        others = (*shape[:-4], *shape[-3:]) if len(shape) >= 4 else shape
        yield all(torch_private.known_true(n == 1) for n in others), f"the addend of shape {list(shape)} is not one value or one a channel"


def fused_replace(emit: Emitter, conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> fx.Node:
    """The whole chain as one op."""
    addend, scale, number = _split_addend(emit, conv, add)
    return emit(
        conv_norm_pool_gelu,
        conv.input,
        conv.weight,
        conv.bias,
        addend,
        norm.weight,
        norm.bias,
        conv.transposed,
        list(conv.stride),
        fused.numeric_padding(conv),
        list(conv.output_padding),
        scale,
        number,
        float(norm.eps),
        list(pool.kernel_size),
        gelu.approximate,
        precision.current(),
        _out_dtype(conv, gelu),
    )


def _shared_bytes(conv: Call, pool: Call) -> int:
    """A bound of what a block of the portable kernel needs at least (`refusal` of csrc/conv_norm_pool_gelu_plan.cuh): weights and sums, and for
    one row of windows the input rows, 32 bytes a pixel, of a width padded to a power of two."""
    width = conv.value.shape[-1]
    padded = 2 ** max(5, math.ceil(math.log2(width))) if isinstance(width, int) else 256
    down, across = (1, 1 / conv.stride[-1]) if conv.transposed else conv.stride[-2:]
    rows = (pool.kernel_size[-2] - 1) * down + conv.tensor("weight").shape[-2]
    return 28 * 1024 + rows * math.ceil(padded * across + 4 * max(across, 1)) * 32


def tail_takes(conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> Iterator[Condition]:
    """The tail op computes every case that the chain allows."""
    yield True, ""


def tail_replace(emit: Emitter, conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> fx.Node:
    """conv without bias -> norm_pool_gelu."""
    addend, scale, number = _split_addend(emit, conv, add)
    return emit(
        norm_pool_gelu,
        emit.conv_without_bias(conv),
        conv.bias,
        addend,
        norm.weight,
        norm.bias,
        scale,
        number,
        len(norm.normalized_shape),
        float(norm.eps),
        list(pool.kernel_size),
        list(pool.stride),
        list(pool.padding),
        pool.ceil_mode,
        pool.count_include_pad,
        pool.divisor_override,
        gelu.approximate,
        _out_dtype(conv, gelu),
    )


def _out_dtype(conv: Call, gelu: Call) -> torch.dtype | None:
    return gelu.value.dtype if gelu.value.dtype != conv.value.dtype else None


def _split_addend(emit: Emitter, conv: Call, add: Call | None) -> tuple[fx.Node | None, float, float]:
    """The addend as the op takes it: a tensor and its scale, or a number. Integer and CPU scalars become tensors of the chain's kind."""
    if add is None:
        return None, 1.0, 0.0
    addend = addend_of(add)
    value = value_of(addend)
    if not isinstance(value, torch.Tensor):
        return None, 1.0, float(add.alpha * addend)
    device, dtype = conv.value.device, conv.value.dtype
    if value.device != device or value.dtype not in (torch.float32, dtype):
        addend = emit(torch.ops.aten.to.device, addend, device, dtype)
    return addend, float(add.alpha), 0.0


def _text(sizes: Sequence[object]) -> str:
    return str([value_of(size) for size in sizes])


CHAIN = Chain(
    name="conv_norm_pool_gelu",
    steps=(
        Step("conv", "conv"),
        Step("add", "add", optional=True),
        Step("norm", "layer_norm"),
        Step("pool", "avg_pool3d"),
        Step("gelu", "gelu"),
    ),
    requires=requires,
    implementations=(
        Implementation(
            "conv_norm_pool_gelu",
            fused_takes,
            fused_replace,
            fused_cost,
            "the whole chain on a GPU, whose convolution's output never reaches memory: kernels up to 5, strides of 1 and 2, one group, no dilation, "
            "symmetric padding; rows up to 256 with the norm over them alone; pool windows up to 4, side by side; one addend, or one a channel",
            fused_backward_cost,
        ),
        Implementation(
            "norm_pool_gelu",
            tail_takes,
            tail_replace,
            tail_cost,
            "add, norm, pool and gelu behind any convolution of the chain's, on a GPU or a CPU",
            tail_backward_cost,
        ),
    ),
    dims=(3,),
    description="The gelu of the average-pooled layer norm of a 3-d convolution, transposed or not, plus a sum or none, in float32, bfloat16 or float16.",
)
