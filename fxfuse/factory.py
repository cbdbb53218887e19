"""A model of the user's: `module.py:factory` or `package.module:factory`, where the factory returns (model, example inputs)."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from . import torch_private
from .command import CommandError, in_a_word


def build(target: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and its example inputs, made under `torch.no_grad()`; raises CommandError with the sentence why there are none."""
    return made(target, find(target))


def made(target: str, factory: Callable[[], Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """What the factory that `find` found makes, under `torch.no_grad()`; raises CommandError where it is not a model and its inputs."""
    try:
        with torch.no_grad():
            result = factory()
    except (Exception, SystemExit) as error:
        raise CommandError(f"{target} raises {_told(error)}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module) and isinstance(result[1], (tuple, list))):
        raise CommandError(f"{target} returns {_described(result)}, not (model, tuple of example inputs)")
    return result[0], tuple(result[1])


def tensors_of(model: nn.Module, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among the inputs, then the model's parameters."""
    return [value for value in (*inputs, *model.parameters()) if isinstance(value, torch.Tensor)]


def device_of(model: nn.Module, inputs: tuple[Any, ...]) -> torch.device:
    """Where the model runs: the device of its first tensor; the CPU where it has none."""
    return next((tensor.device for tensor in tensors_of(model, inputs)), torch.device("cpu"))


def _told(error: BaseException) -> str:
    """What was raised, and at which line of the user's."""
    return f"{in_a_word(error)} {torch_private.user_line(error)}".strip()


def _described(result: Any) -> str:
    names = ", ".join(type(item).__name__ for item in result) if isinstance(result, tuple) else type(result).__name__
    return f"({names})" if isinstance(result, tuple) else names


def find(target: str) -> Callable[[], Any]:
    """The factory, its module imported; raises CommandError with the sentence why there is none."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise CommandError(f"{target!r} is neither module.py:factory nor package.module:factory")
    module = module_of(source)
    if not hasattr(module, name):
        nearest = difflib.get_close_matches(name, [known for known, value in vars(module).items() if callable(value)], n=1)
        raise CommandError(f"{source} has no attribute {name!r}" + (f"; the nearest is {nearest[0]!r}" if nearest else ""))
    factory = getattr(module, name)
    if not callable(factory):
        raise CommandError(f"{target} is {type(factory).__name__} {factory!r}, which cannot be called; give a function")
    return factory


def module_of(source: str) -> ModuleType:
    """The module `module.py` or `package.module`, imported; raises CommandError where that fails."""
    try:
        return _from_file(Path(source)) if source.endswith(".py") else _by_name(source)
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        raise CommandError(f"importing {source} raises {_told(error)}") from error


def _from_file(path: Path) -> ModuleType:
    """The file imported as a script's module would be: its own folder comes first on the path."""
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.resolve()))
    # A name of its own: Dynamo finds a module's globals by its name, and another module may have the file's.
    name = f"{path.stem}_{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Dynamo, pickling and dataclasses look
    spec.loader.exec_module(module)
    return module


def _by_name(name: str) -> ModuleType:
    """The module imported by its dotted name, from the working directory too."""
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise CommandError(f"there is no module {name!r} (looked in the working directory and the installed packages)") from error
        raise
