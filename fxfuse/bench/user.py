"""A model of the user's as a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .. import factory, precision
from . import BenchError
from .workloads import Kind, Workload


def workload(target: str, wanted: str | None) -> tuple[Workload, torch.device]:
    """The user's model as it is, and the device that it is on; raises CommandError with the sentence why there is none.

    wanted: the precision of fp32 convolutions; None for what the switches say.
    """
    built = factory.build(target)
    device = factory.device_of(*built)
    if device.type not in ("cpu", "cuda"):
        raise BenchError(f"{target} returns a model on {device}; fxfuse bench measures on cpu and cuda")
    floating = (tensor for tensor in factory.tensors_of(*built) if tensor.is_floating_point())
    dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in floating), "")
    switch = (wanted or precision.current()) if device.type == "cuda" and dtype == "float32" else ""
    kind = Kind(dtype, switch, _layout(built[1]))
    return Workload(Path(target).name, "", kind, lambda device: built), device


def _layout(inputs: tuple[Any, ...]) -> str:
    """"contiguous" if every input is, else "as given"."""
    return "contiguous" if all(value.is_contiguous() for value in inputs if isinstance(value, torch.Tensor)) else "as given"
