"""Conditions and measures that several chains share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from . import torch_private
from .chain import Condition
from .values import value_of
from .view import Call

# What the kernels load and store; the arithmetic inside is fp32.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_dtypes(*calls: Call | None) -> Iterator[Condition]:
    """The chain runs in one kernel dtype from the convolution on; autocast may raise it to float32 on the way, and nothing else may."""
    present = [call for call in calls if call is not None]
    first = present[0].value.dtype
    yield first in KERNEL_DTYPES, f"the convolution's result is {first}; the kernels take {', '.join(map(str, KERNEL_DTYPES))}"
    returned = " or ".join(dict.fromkeys((str(first), "torch.float32")))
    for call in present[1:]:
        dtype = call.value.dtype
        yield dtype in (first, torch.float32), f"{call.word} turns {first} into {dtype}; the kernels return {returned}"
    last = present[-1].value.dtype
    raised = next((call for call in present if call.value.dtype == torch.float32), None)
    yield raised is None or last == torch.float32, f"the chain is {first}, torch.float32 at {raised and raised.word}, and {last} at its end"


def parameter_dtype(name: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> Iterator[Condition]:
    """A bias or norm parameter, if given, is float32 or of the chain's dtype."""
    if tensor is not None:
        taken = dict.fromkeys((torch.float32, dtype))
        yield tensor.dtype in taken, f"{name} is {tensor.dtype}; the kernels take it as {' or '.join(map(str, taken))}"


def are_sizes(entries: Sequence[object]) -> bool:
    """Whether each entry is a size, constant or not; False where the graph holds several as one value."""
    return all(isinstance(value_of(entry), (int, torch.SymInt)) for entry in entries)


def same_shape(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two (fake) tensors have the same shape for every size the graph was compiled for; installs no guard."""
    return left.dim() == right.dim() and all(torch_private.known_true(a == b) for a, b in zip(left.shape, right.shape))


def number_of_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a (fake) tensor; symbolic sizes count with their example values and install no guard."""
    return math.prod(torch_private.hint(size) for size in tensor.shape) * tensor.element_size()
