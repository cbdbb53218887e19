"""What chains with the convolution inside the kernel share: which convolutions they take, and what those cost."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from . import precision, torch_private
from .chain import Condition
from .conditions import KERNEL_DTYPES
from .view import Call

# Shared memory of a multiprocessor with which every plan of the fused kernels fits (sm_90, sm_100). Smaller devices take the tail op.
SHARED_BYTES = 228 * 1024


def fused_convolution(conv: Call) -> Iterator[Condition]:
    """Conditions on the convolution and the device, whatever the chain."""
    weight = conv.tensor("weight")
    dtypes = [conv.tensor(name).dtype for name in ("input", "weight")] + [conv.value.dtype]
    yield len(set(dtypes)) == 1 and dtypes[0] in KERNEL_DTYPES, f"input, weight and result are {', '.join(map(str, dtypes))}, not one kernel dtype"
    yield conv.groups == 1, f"the convolution has {conv.groups} groups"
    yield all(isinstance(size, int) for size in weight.shape), "the weight's shape is not constant"
    geometry = [*conv.stride, *conv.dilation, *conv.output_padding]
    yield all(isinstance(n, int) for n in geometry), "the convolution's geometry is not constant"
    yield numeric_padding(conv) is not None, f"the padding {conv.padding!r} is not constant, or not the same on both sides"
    yield conv.value.device.type == "cuda", "the convolution is on a CPU, whose library runs it best"
    yield torch.cuda.is_available() and _shared_bytes(conv.value.device) >= SHARED_BYTES, f"the device has less than {SHARED_BYTES} bytes of shared memory"


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


def convolution_flops(conv: Call) -> float:
    """Operations of the convolution: 2 * C_in * taps for each output element; a transposed one meets each tap once in stride steps."""
    weight = conv.tensor("weight")
    c_in = weight.shape[0] if conv.transposed else weight.shape[1]
    taps = math.prod(weight.shape[2:]) / (math.prod(conv.stride) if conv.transposed else 1)
    return 2.0 * c_in * taps * math.prod(torch_private.hint(size) for size in conv.value.shape)


def _shared_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
