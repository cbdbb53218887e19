"""What the ops of the chain conv_norm_pool_gelu cost, and Inductor's kernels in their place."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fxfuse import fused, torch_private
from fxfuse.conditions import number_of_bytes
from fxfuse.cost import BackwardCost, Cost, Training, Work
from fxfuse.training_cost import computed_again, gradients_of, torchs_own, wide_bytes
from fxfuse.values import value_of
from fxfuse.view import Call

# Elements of a norm group that the contiguous tail surely keeps in the registers of a block (`plan_block` of csrc/norm_pool_gelu_plan.cuh).
MOST_IN_A_BLOCK = 8192
# The widest rows of which one CUDA kernel computes the gradient.
WIDEST_BACKWARD = 1024


def fused_cost(conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> Cost:
    """One read of the convolution's input, one write of the result, and the convolution's operations. Against it: a tail that reads the
    convolution's output once, which Inductor's does not reach but the tail op does."""
    written = number_of_bytes(gelu.value)
    kernel = f"conv_norm_pool_gelu {'hopper' if _hopper_takes(conv, pool) else 'portable'} {fused.operand_of(conv)}"
    op = Work(number_of_bytes(conv.tensor("input")) + written, kernels=2, flops=fused.convolution_flops(conv), kernel=kernel)
    return Cost(op, Work(number_of_bytes(conv.value) + written, kernels=1), fused.library_convolution(conv))


def fused_backward_cost(training: Training, conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> BackwardCost:
    """The convolution again and the tail's backward, or the kernels that have both and the weight's gradient in them. In training, where it saves
    memory, it is held against Inductor itself: with the forward's normalised rows, which `fused_cost` leaves out."""
    own = None if training.needs("conv.input") else _own_backward(conv, pool)
    again = computed_again(conv, tail_backward_cost(training, conv, add, norm, pool, gelu), own)
    return replace(again, inductor=replace(again.inductor, bytes=again.inductor.bytes + _normalised(norm, pool)))


def _own_backward(conv: Call, pool: Call) -> Work | None:
    """Hopper's kernels: the forward's once more, which leaves the gradients of the windows' values, and one with the weight's gradient in it."""
    if not _hopper_takes(conv, pool):
        return None
    kernel = f"conv_norm_pool_gelu backward hopper {fused.operand_of(conv)}"
    moved = number_of_bytes(conv.tensor("input")) + 3 * number_of_bytes(pool.value)
    return Work(moved, kernels=6, flops=2 * fused.convolution_flops(conv), kernel=kernel)


def tail_cost(conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> Cost:
    """One read of the convolution's output and one write of the result, at the share of a copy's bandwidth that the kernel reaches; Inductor
    writes the normalised rows and reads them again to pool, but for windows of one element."""
    read, written = number_of_bytes(conv.value), number_of_bytes(gelu.value)
    normalised = _normalised(norm, pool)
    share = _bandwidth_share(conv, add, norm, pool) if conv.value.device.type == "cuda" else 1.0
    op, inductor = Work(int((read + written) / share), kernels=1), Work(read + normalised + written, kernels=2 if normalised else 1)
    return Cost(op, inductor, fused.library_convolution(conv))


def _normalised(norm: Call, pool: Call) -> int:
    """Bytes of the normalised rows, written and read."""
    return 2 * number_of_bytes(norm.value) if math.prod(pool.kernel_size) > 1 else 0


def tail_backward_cost(training: Training, conv: Call, add: Call | None, norm: Call, pool: Call, gelu: Call) -> BackwardCost:
    """A read of the convolution's output and a write of its gradient where a kernel does it."""
    moved = 2 * number_of_bytes(conv.value) + number_of_bytes(gelu.value)
    if _has_backward_kernel(conv, norm, pool):
        # Of a copy's bandwidth, as measured of the headline's rows on an H200; narrower and wider ones as in the forward.
        is_wide = conv.value.element_size() == 4
        share = (0.5 if is_wide else 0.28) if _is_channels_last(conv) else (0.8 if is_wide else 0.6)
        share = min(_bandwidth_share(conv, add, norm, pool), share)
        op = Work(int(moved / share), kernels=3)
    else:
        op = torchs_own(conv.value, _torchs_passes(training))
    return BackwardCost(op, _inductors_backward(training, conv, norm, pool), gradients_of(conv, training))


def _has_backward_kernel(conv: Call, norm: Call, pool: Call) -> bool:
    """Whether one kernel computes the tail's backward: on a GPU, of a norm over rows that a warp holds and windows side by side."""
    rows = len(norm.normalized_shape) == 1 and torch_private.hint(conv.value.shape[-1]) <= WIDEST_BACKWARD
    plain = tuple(pool.kernel_size) == tuple(pool.stride) and not any(pool.padding) and not pool.ceil_mode and pool.divisor_override is None
    return conv.value.device.type == "cuda" and rows and plain


def _torchs_passes(training: Training) -> int:
    """What joins is added (2), the norm (2) and the pool (1) come again, then the backwards of pool (1) and norm (3, and 2 for its parameters),
    and sums for what joined."""
    parameters = bool(training.needs("norm.weight", "norm.bias"))
    return 9 + 2 * parameters + training.needs("conv.bias", "add.self", "add.other")


def _inductors_backward(training: Training, conv: Call, norm: Call, pool: Call) -> Work:
    """As Inductor's code for a CPU has it: gelu's backward at the pooled size, whose input the forward writes; a kernel that spreads it over
    the windows, reads the convolution's output, and writes its gradient in fp32; one that narrows that; and another pass for each parameter: the
    convolution's output is read again for the norm's weight, its gradient for what joined. With the forward's that is 9 times the convolution's
    output of the headline model in fp32 and 14 times in bf16, where 11.8 and 15.8 were measured on an H200."""
    y, wide, pooled = number_of_bytes(conv.value), wide_bytes(conv.value), number_of_bytes(pool.value)
    passes = [4 * pooled]
    if training.needs("conv.input", "conv.weight", "conv.bias", "add.self", "add.other"):
        passes += [y + wide + pooled] + ([wide + y] if wide != y else [])
    passes += [y + pooled] * training.needs("norm.weight") + [pooled] * training.needs("norm.bias")
    passes += [y] * training.needs("conv.bias") + [wide] * training.needs("add.self", "add.other")
    # Of small tensors the sums come in one kernel.
    return Work(sum(passes), kernels=min(3, len(passes)))


def _hopper_takes(conv: Call, pool: Call) -> bool:
    """Mirrors `hopper_takes` of csrc/conv_norm_pool_gelu_hopper_plan.cuh with the example sizes."""
    n, c_in, _, height, width = ([1] + [torch_private.hint(size) for size in conv.tensor("input").shape])[-5:]
    doubles = conv.transposed and set(conv.stride) == {2} and set(fused.numeric_padding(conv)) == {1} and set(conv.output_padding) == {1}
    doubles = doubles and set(conv.tensor("weight").shape[2:]) == {3} and set(pool.kernel_size) == {2}
    c_out = conv.tensor("weight").shape[1]
    gpu = fused.gpu_of(conv.value.device)
    fills = gpu is not None and gpu.major == 9 and 2 * n * math.ceil(height / 4) >= gpu.num_processors
    return doubles and width == 32 and c_in <= 32 and 32 < c_out <= 64 and fills


def _is_channels_last(conv: Call) -> bool:
    return conv.value.dim() == 5 and torch_private.known_true(conv.value.stride(1) == 1)


def _bandwidth_share(conv: Call, add: Call | None, norm: Call, pool: Call) -> float:
    """What the CUDA tail reaches of a copy's bandwidth on an H200, the least over fp32 and bf16, per kind of row: measured, and fitted on
    sweep_h200.json in examples/results. The layout is that of the trace, which Inductor may change."""
    width = torch_private.hint(conv.value.shape[-1])
    group = math.prod(torch_private.hint(value_of(size)) for size in norm.normalized_shape)
    if group > MOST_IN_A_BLOCK or (_is_channels_last(conv) and (len(norm.normalized_shape) > 1 or width > 256)):
        return 0.07  # statistics in a pass of their own
    if any(stride < size for size, stride in zip(pool.kernel_size, pool.stride)):
        return 0.25  # rows are normalised once for each window that they are in
    value = value_of(addend_of(add)) if add is not None else None
    if isinstance(value, torch.Tensor) and value.dim() and torch_private.hint(value.shape[-1]) > 1:
        return 0.2  # as many bytes of addend as of input, or scattered reads of it
    if len(norm.normalized_shape) > 1 or width > 128:
        return 0.42
    return 0.5 if width % 2 or width < 32 else 0.8


def addend_of(add: Call) -> object:
    """What joins the convolution's result."""
    return add.other if add.by == "self" else add.self
