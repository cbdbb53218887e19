"""What chains with the convolution inside the kernel share: which convolutions they take, and what those cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from . import precision, torch_private
from .chain import Condition
from .cost import Convolution
from .conditions import KERNEL_DTYPES, number_of_bytes
from .view import Call

# By a tensor's rank.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

# The oldest compute capability, by its major number, that the fused kernels are written for.
OLDEST_MAJOR = 8


@dataclass(frozen=True)
class Gpu:
    """What conditions and costs ask of a CUDA device. shared_bytes: the most shared memory that one block can have."""

    major: int
    num_processors: int
    shared_bytes: int


def gpu_of(device: torch.device) -> Gpu | None:
    """The facts of a CUDA device; None for another device, or where this process sees no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(device)
    # The system keeps 1 KB of a multiprocessor's shared memory.
    return Gpu(found.major, found.multi_processor_count, found.shared_memory_per_multiprocessor - 1024)


def path_of(gpu: Gpu) -> str:
    """Which kernels take fused convolutions on a device, for people."""
    if gpu.major < OLDEST_MAJOR:
        return "none: the tail ops alone"
    return "Hopper's (wgmma), else portable (mma.sync)" if gpu.major == 9 else "portable (mma.sync)"


def fused_convolution(conv: Call) -> Iterator[Condition]:
    """Conditions on the convolution and the device, whatever the chain."""
    weight = conv.tensor("weight")
    dtypes = [conv.tensor(name).dtype for name in ("input", "weight")] + [conv.value.dtype]
    one = len(set(dtypes)) == 1 and dtypes[0] in KERNEL_DTYPES
    yield one, f"input, weight and result are {', '.join(map(str, dtypes))}, not one kernel dtype"
    yield conv.groups == 1, f"the convolution has {conv.groups} groups"
    yield all(isinstance(size, int) for size in weight.shape), "the weight's shape is not constant"
    geometry = [*conv.stride, *conv.dilation, *conv.output_padding]
    yield all(isinstance(n, int) for n in geometry), "the convolution's geometry is not constant"
    yield numeric_padding(conv) is not None, f"the padding {conv.padding!r} is not constant, or not the same on both sides"
    yield conv.value.device.type == "cuda", "the convolution is on a CPU, whose library runs it best"
    gpu = gpu_of(conv.value.device)
    yield gpu is not None, "there is no GPU to run it on"
    yield gpu.major >= OLDEST_MAJOR, f"the device's compute capability {gpu.major}.x is older than {OLDEST_MAJOR}.0"


def convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
) -> torch.Tensor:
    """The convolution inside an op, for the op's fake: [N, C, ...] or, unlike aten::convolution alone, [C, ...]."""
    batched = input.dim() == weight.dim()
    batch = input if batched else input.unsqueeze(0)
    output = torch.convolution(batch, weight, None, stride, padding, dilation, transposed, output_padding, 1)
    return output if batched else output.squeeze(0)


def numeric_padding(conv: Call) -> list[int] | None:
    """The padding as one number a dimension; None where it is not constant, or "same" pads one side more."""
    kernel = conv.tensor("weight").shape[2:]
    if conv.padding == "valid":
        return [0] * conv.dims
    if conv.padding == "same":
        total = [dilation * (size - 1) for dilation, size in zip(conv.dilation, kernel)]
        return None if any(n % 2 for n in total) else [n // 2 for n in total]
    return list(conv.padding) if all(isinstance(n, int) for n in conv.padding) else None


def operand_of(conv: Call) -> str:
    """What the matrix units multiply: "bfloat16", "float16", "tf32", or "ieee" for fp32-accurate products."""
    dtype = conv.tensor("input").dtype
    return precision.current() if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def library_convolution(conv: Call) -> Convolution:
    """The matched convolution as its library would compute it."""
    tensors = (conv.tensor("input"), conv.tensor("weight"), conv.value)
    return Convolution(sum(map(number_of_bytes, tensors)), convolution_flops(conv), operand_of(conv), channels_in(conv))


def channels_in(conv: Call) -> int:
    """Input channels of a group."""
    weight = conv.tensor("weight")
    return weight.shape[0] if conv.transposed else weight.shape[1]


def convolution_flops(conv: Call) -> float:
    """Operations of the convolution: 2 * C_in * taps for each output element; a transposed one meets each tap once in stride steps."""
    taps = math.prod(conv.tensor("weight").shape[2:]) / (math.prod(conv.stride) if conv.transposed else 1)
    return 2.0 * channels_in(conv) * taps * math.prod(torch_private.hint(size) for size in conv.value.shape)
