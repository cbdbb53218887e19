"""Example values: what a graph knows about its tensors without running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class ModuleParameter:
    """A parameter or buffer of a `call_module` node: it becomes a `get_attr` node only if a match is rewritten."""

    path: str
    value: torch.Tensor


def value_of(argument: Any) -> Any:
    """The example value of an argument: a fake tensor, a SymInt, a number; None for a node of which the graph holds none."""
    if isinstance(argument, ModuleParameter):
        return argument.value
    if not isinstance(argument, fx.Node):
        return argument
    return argument.meta.get("example_value", argument.meta.get("val"))


def attribute_of(node: fx.Node) -> Any:
    """The real attribute that a `get_attr` node reads from the graph's module; None if there is none."""
    value = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def name_of(argument: fx.Node | ModuleParameter) -> str:
    """How a sentence names a tensor that flows into a chain."""
    return argument.name if isinstance(argument, fx.Node) else argument.path
