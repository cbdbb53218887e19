"""conv -> add (optional) -> layer_norm -> avg_pool3d -> gelu.

The tail op `fxfuse::norm_pool_gelu` takes the convolution's output without bias, holds the rows of a pool window on chip, normalises and
pools them, and writes only the pooled result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import fx

from fxfuse.chain import Chain, Condition, Implementation, Step
from fxfuse.choose import Cost
from fxfuse.conditions import kernel_dtypes, number_of_bytes, parameter_dtype, same_shape
from fxfuse.ops import define
from fxfuse.replacement import Emitter
from fxfuse.values import value_of
from fxfuse.view import Call


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


def tail_takes(conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> Iterator[Condition]:
    """The tail op computes every case that the chain allows."""
    yield True, ""


def tail_replace(emit: Emitter, conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> fx.Node:
    """conv without bias -> norm_pool_gelu."""
    addend, scale, number = _split_addend(emit, conv, add)
    out_dtype = gelu.value.dtype if gelu.value.dtype != conv.value.dtype else None
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
        out_dtype,
    )


def tail_cost(conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> Cost:
    """One read of the convolution's output and one write of the result; Inductor writes the normalised rows and reads them again to pool."""
    read, written = number_of_bytes(conv.value), number_of_bytes(gelu.value)
    normalised = number_of_bytes(norm.value)
    return Cost(bytes=read + written, kernels=1, inductor_bytes=read + 2 * normalised + written, inductor_kernels=2)


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
    implementations=(Implementation("norm_pool_gelu", tail_takes, tail_replace, tail_cost),),
    dims=(3,),
)
