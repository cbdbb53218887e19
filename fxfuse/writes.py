"""Which tensors a node writes to. Missing a write gives wrong numbers, claiming one too many only leaves a chain unfused: in doubt, yes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .values import ModuleParameter, value_of

IN_PLACE_OPERATORS = {
    operator.setitem,
    *(getattr(operator, f"i{name}") for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift concat".split()),
}
# Functions that write to arguments other than the first, in training mode or on request: argument positions and names.
SIDE_WRITES = {
    F.batch_norm: {1: "running_mean", 2: "running_var"},
    F.instance_norm: {1: "running_mean", 2: "running_var"},
    torch.batch_norm: {3: "running_mean", 4: "running_var"},
    torch.instance_norm: {3: "running_mean", 4: "running_var"},
    torch.native_batch_norm: {3: "running_mean", 4: "running_var"},
    F.embedding: {1: "weight"},
    F.embedding_bag: {1: "weight"},
}


def written(node: fx.Node) -> list[fx.Node | ModuleParameter]:
    """The tensors that `node` writes to: through in-place methods, operators and functions, `out=`, `inplace=True`, aten schemas, modules'
    buffers. A higher-order op may write to every tensor that it is given."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return []
    found = [_flat(node.kwargs.get("out"))]
    if node.op == "call_module":
        found += [_module_writes(node)]
    elif node.op == "call_method":
        found += [_flat(node.args[:1]) if _in_place_name(node.target) else []]
    elif isinstance(node.target, torch._ops.OpOverload):
        found += [_flat(value) for value in _schema_writes(node)]
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        found += [node.all_input_nodes]
    else:
        found += [_flat(value) for value in _function_writes(node)]
    return [target for targets in found for target in targets if _is_tensor(target)]


def _is_tensor(target: fx.Node | ModuleParameter) -> bool:
    """Whether a write target is, or for all the graph says may be, a tensor; numbers and the body of a higher-order op are not."""
    value = value_of(target)
    return isinstance(value, torch.Tensor) or (value is None and target.op != "get_attr")


def _flat(value: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    return nodes


def _in_place_name(name: str) -> bool:
    """`add_`, `_foreach_mul_`, `__iadd__`, `__setitem__`; not `add`, `__add__`."""
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def _function_writes(node: fx.Node) -> Iterator[Any]:
    target = node.target
    in_place = target in IN_PLACE_OPERATORS or _in_place_name(getattr(target, "__name__", "")) or node.kwargs.get("inplace")
    if in_place or _inplace_by_position(node):
        yield node.args[:1] or node.kwargs.get("input")
    for position, name in SIDE_WRITES.get(target, {}).items():
        yield node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _inplace_by_position(node: fx.Node) -> bool:
    position = _inplace_position(node.target)
    return position is not None and position < len(node.args) and node.args[position] is not False


@cache
def _inplace_position(target: Any) -> int | None:
    """Where a function takes `inplace`, as most of torch.nn.functional's activations and dropouts do."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # builtins have no signature, and none of them takes `inplace`
        return None
    return names.index("inplace") if "inplace" in names else None


def _schema_writes(node: fx.Node) -> Iterator[Any]:
    arguments = node.target._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), node.args)), **node.kwargs}
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield given.get(argument.name)


def _module_writes(node: fx.Node) -> list[fx.Node | ModuleParameter]:
    module = node.graph.owning_module.get_submodule(node.target)
    buffers = [ModuleParameter(f"{node.target}.{name}", buffer) for name, buffer in module.named_buffers()]
    return [*(_flat(node.args[:1]) if getattr(module, "inplace", False) else []), *buffers]
