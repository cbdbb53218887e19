"""What a call costs at least: operations of its convolutions and matrix products, and the bytes of its inputs, parameters and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .. import torch_private
from ..constants import known_constants
from ..preserved import preserved


@dataclass(frozen=True)
class Counts:
    """flops: two for a multiplication with its addition. bytes: inputs, parameters, buffers and results, each once. largest: elements of the
    largest value inside, of which a reference in fp64 holds a few at once."""

    flops: float
    bytes: int
    input_bytes: int
    output_bytes: int
    largest: int


def count(model: nn.Module, inputs: tuple[Any, ...]) -> Counts | None:
    """Counts one call on fake tensors: nothing is computed. None for a model that fake tensors cannot stand in for."""
    mode = torch_private.new_fake_mode()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sizes, flops = torch_private.LargestValue(), FlopCounterMode(display=False)
    try:
        with known_constants(mode), preserved(model, inputs) as modules, flops, sizes:
            for module in modules:
                torch_private.put_on_fakes(module, mode)
            result = model(*torch_private.faked(inputs, mode))
    except Exception:
        return None
    given, output = number_of_bytes(inputs), number_of_bytes(result)
    return Counts(flops.get_total_flops(), number_of_bytes(state) + given + output, given, output, sizes.elements)


def number_of_bytes(values: Any) -> int:
    """Bytes of all tensors in nested values."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


def reference_bytes(model: nn.Module, inputs: tuple[Any, ...], counts: Counts | None, held: int) -> int | None:
    """An estimate of what the model takes in fp64 beyond what is there now: its parameters, inputs, and `held` values of the largest size."""
    if counts is None:
        return None
    leaves = torch.utils._pytree.tree_leaves((list(model.parameters()), list(model.buffers()), inputs))
    elements = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
    return 8 * (elements + held * counts.largest)


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be allocated on a device; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
