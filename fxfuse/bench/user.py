"""A model of the user's: `module.py:factory` or `package.module:factory`, where the factory returns (model, example inputs)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .. import precision
from . import BenchError
from .timing import in_a_word
from .workloads import Built, Kind, Workload


def workload(target: str, wanted: str | None) -> tuple[Workload, torch.device]:
    """The user's model as it is, and the device that it is on; raises BenchError with the sentence why there is none.

    wanted: the precision of fp32 convolutions; None for what the switches say.
    """
    built = _built(target)
    tensors = [value for value in (*built[1], *built[0].parameters()) if isinstance(value, torch.Tensor)]
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise BenchError(f"{target} returns a model on {device}; fxfuse bench measures on cpu and cuda")
    dtype = next((str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()), "")
    switch = (wanted or precision.current()) if device.type == "cuda" and dtype == "float32" else ""
    kind = Kind(dtype, switch, _layout(built[1]))
    return Workload(Path(target).name, "", kind, lambda device: built), device


def _layout(inputs: tuple[Any, ...]) -> str:
    """"contiguous" if every input is, else "as given"."""
    return "contiguous" if all(value.is_contiguous() for value in inputs if isinstance(value, torch.Tensor)) else "as given"


def _built(target: str) -> Built:
    factory = _factory(target)
    try:
        with torch.no_grad():
            result = factory()
    except (Exception, SystemExit) as error:
        raise BenchError(f"{target} raises {in_a_word(error)}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module) and isinstance(result[1], (tuple, list))):
        raise BenchError(f"{target} returns {_described(result)}, not (model, tuple of example inputs)")
    return result[0], tuple(result[1])


def _described(result: Any) -> str:
    names = ", ".join(type(item).__name__ for item in result) if isinstance(result, tuple) else type(result).__name__
    return f"({names})" if isinstance(result, tuple) else names


def _factory(target: str) -> Callable[[], Any]:
    source, _, name = target.rpartition(":")
    try:
        module = _from_file(Path(source)) if source.endswith(".py") else _by_name(source)
    except BenchError:
        raise
    except (Exception, SystemExit) as error:
        raise BenchError(f"importing {source} raises {in_a_word(error)}") from error
    if not hasattr(module, name):
        raise BenchError(f"{source} has no attribute {name!r}")
    factory = getattr(module, name)
    if not callable(factory):
        raise BenchError(f"{target} is {type(factory).__name__} {factory!r}, which cannot be called; give a function")
    return factory


def _from_file(path: Path) -> ModuleType:
    """The file imported as a script's module would be: its own folder comes first on the path."""
    if not path.is_file():
        raise BenchError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where pickling and dataclasses look
    spec.loader.exec_module(module)
    return module


def _by_name(name: str) -> ModuleType:
    """The module imported by its dotted name, from the working directory too."""
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise BenchError(f"there is no module {name!r} (looked in the working directory and the installed packages)") from error
        raise
