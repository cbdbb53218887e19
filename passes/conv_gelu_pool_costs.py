"""What the ops of the chain conv_gelu_pool cost, and Inductor's kernels in their place."""

from __future__ import annotations

import math

from fxfuse import fused, torch_private
from fxfuse.conditions import number_of_bytes
from fxfuse.cost import BackwardCost, Cost, Training, Work
from fxfuse.training_cost import computed_again, gradients_of, torchs_own
from fxfuse.view import Call

# K steps whose weights the Hopper kernel keeps in shared memory.
HOPPER_STEPS = 48
# Lines of three taps whose gradient a block of the backward's kernel sums, and as many such groups as it takes.
LINES, MOST_GROUPS = 3, 3
# What the kernels' rates were measured on: chunks of channels, K steps.
MOST_CHUNKS, MOST_HOPPER_STEPS, MOST_PORTABLE_STEPS = 4, 14, 9
# The largest window that Inductor computes an adaptive pool for itself (`_adaptive_avg_pool2d` of its lowerings).
INDUCTORS_WINDOW = 25
# What a GELU and its sum cost an output element, in operations of the matrix units that take about as long on an H200.
GELU_FLOPS = 200.0


def fused_cost(conv: Call, gelu: Call, pool: Call) -> Cost:
    """One read of the convolution's input, and its operations with those of a GELU for each output element."""
    flops = fused.convolution_flops(conv) + GELU_FLOPS * _outputs(conv)
    kernel = f"conv_gelu_pool {_kernel(conv)} {fused.operand_of(conv)}"
    op = Work(number_of_bytes(conv.tensor("input")), kernels=3, flops=flops, kernel=kernel)
    return Cost(op, _inductors(conv, pool), fused.library_convolution(conv))


def fused_backward_cost(training: Training, conv: Call, gelu: Call, pool: Call) -> BackwardCost:
    """The convolution again and the tail's backward, or the kernel that has both and the weight's gradient in it."""
    own = None if training.needs("conv.input") else _own_backward(conv)
    return computed_again(conv, tail_backward_cost(training, conv, gelu, pool), own)


def _own_backward(conv: Call) -> Work | None:
    """The Hopper kernel with the weight's gradient in it: mirrors `gradient_tiling` of csrc/conv_gelu_pool_gradient.cu. Each group of lines
    computes the convolution and its GELUs' derivatives again."""
    operand = fused.operand_of(conv)
    kernel = conv.tensor("weight").shape[2:]
    if not _is_on_hopper(conv):
        return None
    chunks, taps = math.ceil(fused.channels_in(conv) / 8), math.prod(kernel)
    wide = 3 if conv.dims > 1 and kernel[-1] == 3 else 1
    groups = math.ceil(chunks * taps // wide / (LINES * 3 // wide))
    steps = math.ceil(chunks * taps / 2) * {"tf32": 2, "ieee": 3}.get(operand, 1)  # fp32 comes in parts of bf16
    if groups > MOST_GROUPS or steps > HOPPER_STEPS:
        return None
    flops = (groups + 1) * fused.convolution_flops(conv) + groups * GELU_FLOPS * _outputs(conv)
    return Work(number_of_bytes(conv.tensor("input")), kernels=3, flops=flops, kernel=f"conv_gelu_pool backward hopper {operand}")


def tail_cost(conv: Call, gelu: Call, pool: Call) -> Cost:
    """One read of the convolution's output and a small write."""
    moved = number_of_bytes(conv.value) + number_of_bytes(pool.value)
    share = _bandwidth_share(conv, pool) if conv.value.device.type == "cuda" else 1.0
    return Cost(Work(int(moved / share), kernels=1), _inductors(conv, pool), fused.library_convolution(conv))


def tail_backward_cost(training: Training, conv: Call, gelu: Call, pool: Call) -> BackwardCost:
    """On a GPU a read of the convolution's output and a write of its gradient. torch's own ops: gelu's backward, the bias that joins first and
    its sum, the pool's backward where it is not an average of all."""
    passes = 2 + 2 * (conv.bias is not None) + training.needs("conv.bias") + 2 * (not _is_global(pool))
    moved = (2 * number_of_bytes(conv.value) + number_of_bytes(pool.value)) / (0.5 if conv.dims == 1 else 1.0)
    op = Work(int(moved), kernels=2) if conv.value.device.type == "cuda" else torchs_own(conv.value, passes)
    return BackwardCost(op, _inductors_backward(training, conv, pool), gradients_of(conv, training))


def _kernel(conv: Call) -> str:
    """The CUDA kernel: "hopper" mirrors `make_hopper_tiling` of csrc/conv_gelu_pool_hopper_plan.cuh, but for its search of a tile and for its
    comparison with the portable kernel. "deep" ones have so many channels or taps that they no longer run at the same rate."""
    kernel = conv.tensor("weight").shape[2:]
    # 16 bytes of channels make a chunk, two chunks of a tap a step; fp32-accurate products take each step for two parts of the weights.
    chunks = math.ceil(fused.channels_in(conv) / (16 // conv.tensor("weight").element_size()))
    steps = math.ceil(chunks * math.prod(kernel) / 2)
    splits = 2 if fused.operand_of(conv) == "ieee" else 1
    is_hopper = _is_on_hopper(conv) and steps * splits <= HOPPER_STEPS
    is_deep = chunks > MOST_CHUNKS or steps > (MOST_HOPPER_STEPS if is_hopper else MOST_PORTABLE_STEPS)
    return ("hopper" if is_hopper else "portable") + (" deep" if is_deep else "")


def _is_on_hopper(conv: Call) -> bool:
    gpu = fused.gpu_of(conv.value.device)
    return gpu is not None and gpu.major == 9 and set(conv.stride) == {1} and conv.tensor("weight").shape[0] > 32


def _bandwidth_share(conv: Call, pool: Call) -> float:
    """What the CUDA tail reaches of a copy's bandwidth on an H200, at the least."""
    if conv.dims == 1:  # a lane reads a window; rows of some hundred elements leave warps waiting
        return 0.05 if not _is_global(pool) and _window(conv, pool) > INDUCTORS_WINDOW else 0.5
    is_channels_last = torch_private.known_true(conv.value.stride(-conv.dims - 1) == 1)
    return 0.9 if is_channels_last and conv.value.element_size() == 2 else 1.0


def _inductors(conv: Call, pool: Call) -> Work:
    """Inductor's kernels behind the convolution: one that reads it and computes a GELU for each element, and more where it leaves the pool to
    eager's kernel, which reads what the first one writes."""
    read, written = number_of_bytes(conv.value), number_of_bytes(pool.value)
    falls_back = _window(conv, pool) > INDUCTORS_WINDOW and not _is_global(pool)
    return Work((3 if falls_back else 1) * read + written, kernels=2 if falls_back else 1, gelus=_outputs(conv))


def _inductors_backward(training: Training, conv: Call, pool: Call) -> Work:
    """A kernel reads the convolution's output and writes its gradient, and another one, for the bias, sums what it computes from that output
    again. With the forward's that is three GELUs an element, 2.6 ms of the headline model on an H200, where its tails were measured to take 2.7 in
    bf16 and 3.4 in fp32."""
    read, gradient = number_of_bytes(conv.value), bool(training.needs("conv.input", "conv.weight"))
    kernels = gradient + training.needs("conv.bias")
    return Work(read * (kernels + gradient) + kernels * number_of_bytes(pool.value), kernels, gelus=kernels * _outputs(conv))


def _is_global(pool: Call) -> bool:
    return pool.word == "mean" or set(pool.output_size) == {1}


def _window(conv: Call, pool: Call) -> float:
    """Elements of a window, about."""
    return _outputs(conv) / max(1, math.prod(torch_private.hint(size) for size in pool.value.shape))


def _outputs(conv: Call) -> int:
    return math.prod(torch_private.hint(size) for size in conv.value.shape)
