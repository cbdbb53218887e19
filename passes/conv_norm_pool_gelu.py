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
from fxfuse.choose import Cost, Work
from fxfuse.conditions import are_sizes, kernel_dtypes, number_of_bytes, parameter_dtype, same_shape
from fxfuse.emitter import Emitter
from fxfuse.values import value_of
from fxfuse.view import Call

from .conv_norm_pool_gelu_ops import conv_norm_pool_gelu, norm_pool_gelu

# Elements of a norm group that the contiguous tail surely keeps in the registers of a block (`plan_block` of csrc/norm_pool_gelu_plan.cuh).
MOST_IN_A_BLOCK = 8192


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
    addend, alpha = _addend(add), add.alpha
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
    if add is not None and isinstance(value_of(_addend(add)), torch.Tensor):
        shape = value_of(_addend(add)).shape
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


def fused_cost(conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> Cost:
    """One read of the convolution's input, one write of the result, and the convolution's operations. Against it: a tail that reads the
    convolution's output once, which Inductor's does not reach but the tail op does."""
    written = number_of_bytes(gelu.value)
    kernel = f"conv_norm_pool_gelu {'hopper' if _hopper_takes(conv, pool) else 'portable'} {fused.operand_of(conv)}"
    op = Work(number_of_bytes(conv.tensor("input")) + written, kernels=2, flops=fused.convolution_flops(conv), kernel=kernel)
    return Cost(op, Work(number_of_bytes(conv.value) + written, kernels=1), fused.library_convolution(conv))


def _shared_bytes(conv: Call, pool: Call) -> int:
    """A bound of what a block of the portable kernel needs at least (`refusal` of csrc/conv_norm_pool_gelu_plan.cuh): weights and sums, and for
    one row of windows the input rows, 32 bytes a pixel, of a width padded to a power of two."""
    width = conv.value.shape[-1]
    padded = 2 ** max(5, math.ceil(math.log2(width))) if isinstance(width, int) else 256
    down, across = (1, 1 / conv.stride[-1]) if conv.transposed else conv.stride[-2:]
    rows = (pool.kernel_size[-2] - 1) * down + conv.tensor("weight").shape[-2]
    return 28 * 1024 + rows * math.ceil(padded * across + 4 * max(across, 1)) * 32


def _hopper_takes(conv: Call, pool: Call) -> bool:
    """Mirrors `hopper_takes` of csrc/conv_norm_pool_gelu_hopper_plan.cuh with the example sizes."""
    n, c_in, _, height, width = ([1] + [torch_private.hint(size) for size in conv.tensor("input").shape])[-5:]
    doubles = conv.transposed and set(conv.stride) == {2} and set(fused.numeric_padding(conv)) == {1} and set(conv.output_padding) == {1}
    doubles = doubles and set(conv.tensor("weight").shape[2:]) == {3} and set(pool.kernel_size) == {2}
    c_out = conv.tensor("weight").shape[1]
    gpu = fused.gpu_of(conv.value.device)
    fills = gpu is not None and gpu.major == 9 and 2 * n * math.ceil(height / 4) >= gpu.num_processors
    return doubles and width == 32 and c_in <= 32 and 32 < c_out <= 64 and fills


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


def tail_cost(conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> Cost:
    """One read of the convolution's output and one write of the result, at the share of a copy's bandwidth that the kernel reaches; Inductor
    writes the normalised rows and reads them again to pool, but for windows of one element."""
    read, written = number_of_bytes(conv.value), number_of_bytes(gelu.value)
    normalised = 2 * number_of_bytes(norm.value) if math.prod(pool.kernel_size) > 1 else 0
    share = _bandwidth_share(conv, add, norm, pool) if conv.value.device.type == "cuda" else 1.0
    op, inductor = Work(int((read + written) / share), kernels=1), Work(read + normalised + written, kernels=2 if normalised else 1)
    return Cost(op, inductor, fused.library_convolution(conv))


def _bandwidth_share(conv: Call, add: Call | None, norm: Call, pool: Call) -> float:
    """What the CUDA tail reaches of a copy's bandwidth on an H200, the least over fp32 and bf16, per kind of row: measured, and fitted on
    sweep_h200.json in examples/results. The layout is that of the trace, which Inductor may change."""
    width = torch_private.hint(conv.value.shape[-1])
    is_channels_last = conv.value.dim() == 5 and torch_private.known_true(conv.value.stride(1) == 1)
    group = math.prod(torch_private.hint(value_of(size)) for size in norm.normalized_shape)
    if group > MOST_IN_A_BLOCK or (is_channels_last and (len(norm.normalized_shape) > 1 or width > 256)):
        return 0.07  # statistics in a pass of their own
    if any(stride < size for size, stride in zip(pool.kernel_size, pool.stride)):
        return 0.25  # rows are normalised once for each window that they are in
    value = value_of(_addend(add)) if add is not None else None
    if isinstance(value, torch.Tensor) and value.dim() and torch_private.hint(value.shape[-1]) > 1:
        return 0.2  # as many bytes of addend as of input, or scattered reads of it
    if len(norm.normalized_shape) > 1 or width > 128:
        return 0.42
    return 0.5 if width % 2 or width < 32 else 0.8


def _out_dtype(conv: Call, gelu: Call) -> torch.dtype | None:
    return gelu.value.dtype if gelu.value.dtype != conv.value.dtype else None


def _addend(add: Call) -> object:
    return add.other if add.by == "self" else add.self


def _split_addend(emit: Emitter, conv: Call, add: Call | None) -> tuple[fx.Node | None, float, float]:
    """The addend as the op takes it: a tensor and its scale, or a number. Integer and CPU scalars become tensors of the chain's kind."""
    if add is None:
        return None, 1.0, 0.0
    addend = _addend(add)
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
        ),
        Implementation(
            "norm_pool_gelu", tail_takes, tail_replace, tail_cost, "add, norm, pool and gelu behind any convolution of the chain's, on a GPU or a CPU"
        ),
    ),
    dims=(3,),
    description="The gelu of the average-pooled layer norm of a 3-d convolution, transposed or not, plus a sum or none, in float32, bfloat16 or float16.",
)
