"""Which tensors a node writes to. Missing a write gives wrong numbers, claiming one too many only leaves a chain unfused: in doubt, yes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from . import torch_private
from .higher_order import body_of, operands
from .values import ModuleParameter, value_of

IN_PLACE_OPERATORS = {
    operator.setitem,
    *(getattr(operator, f"i{name}") for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift concat".split()),
}
# Batch and instance norms update these in training, though their schemas do not say so.
UPDATED_ARGUMENTS = {"running_mean", "running_var"}
# With max_norm, looking up rows of an embedding rescales them.
RENORMALISED = (F.embedding, F.embedding_bag)
# In-place methods that change a tensor's shape, strides or storage: its example value is no longer what earlier readers saw.
RESHAPES = frozenset("resize_ resize_as_ set_ squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_ as_strided_ swap_axes_".split())


def written(node: fx.Node) -> list[fx.Node | ModuleParameter]:
    """The tensors that `node` writes to: through in-place methods, operators and functions, `out=`, `inplace=True`, schemas that say so,
    modules' buffers. A higher-order op writes to what its bodies write to; one of which that is not known may write to every tensor it is given."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return []
    found = _flat(node.kwargs.get("out"))
    if node.op == "call_module":
        found += _module_writes(node)
    elif node.op == "call_method":
        found += _flat(node.args[:1]) if _in_place_name(node.target) else []
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        found += _body_writes(node)
    else:
        found += _flat(list(_function_writes(node)))
    return [target for target in dict.fromkeys(found) if _is_tensor(target)]


def reshapes(node: fx.Node) -> bool:
    """Whether the node changes the shape, strides or storage of its first argument in place."""
    return _name(node.target).split(".")[0] in RESHAPES


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is_tensor(target: fx.Node | ModuleParameter) -> bool:
    """Whether a write target is, or for all the graph says may be, a tensor; numbers and the body of a higher-order op are not."""
    value = value_of(target)
    return isinstance(value, torch.Tensor) or (value is None and target.op != "get_attr")


def _flat(value: Any) -> list[fx.Node | ModuleParameter]:
    nodes: list[fx.Node | ModuleParameter] = []
    fx.map_arg(value, nodes.append)
    return nodes


def _in_place_name(name: str) -> bool:
    """`add_`, `_foreach_mul_`, `__iadd__`, `__setitem__`; not `add`, `__add__`."""
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def _module_writes(node: fx.Node) -> list[fx.Node | ModuleParameter]:
    module = node.graph.owning_module.get_submodule(node.target)
    buffers = [ModuleParameter(f"{node.target}.{name}", buffer) for name, buffer in module.named_buffers()]
    return [*(_flat(node.args[:1]) if getattr(module, "inplace", False) else []), *buffers]


def _body_writes(call: fx.Node) -> list[fx.Node | ModuleParameter]:
    """The operands of a higher-order op that a body of its writes to, itself or a view of it."""
    bodies = [body for body in map(body_of, call.all_input_nodes) if body is not None]
    found: list[Any] = []
    for body in bodies:
        targets = [target for node in body.graph.nodes for target in written(node)]
        given = operands(call, body)
        storages = {torch_private.storage_of(value_of(target)) for target in targets}
        if given is None or None in storages:
            return call.all_input_nodes
        placeholders = body.graph.find_nodes(op="placeholder")
        found += [operand for node, operand in zip(placeholders, given) if torch_private.storage_of(value_of(node)) in storages]
    return _flat(found) if bodies else call.all_input_nodes


def _function_writes(node: fx.Node) -> Iterator[Any]:
    target = node.target
    if not is_known(target):
        yield node.all_input_nodes
    if target in IN_PLACE_OPERATORS or _in_place_name(_name(target)):
        yield node.args[:1] or node.kwargs.get("input")
    for names, marked in _signatures(target):
        given = {**dict(zip(names, node.args)), **node.kwargs}
        if given.get("inplace", False) is not False:
            yield node.args[:1] or node.kwargs.get("input")
        yield [given.get(name) for name in marked]
    if target in RENORMALISED:
        yield node.args[1:2] or node.kwargs.get("weight")


def is_known(target: Any) -> bool:
    """Whether the rules here cover a function: torch's and Python's own are, a user's (`torch.fx.wrap`, `allow_in_graph`) and NumPy's are not."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) or inspect.isbuiltin(target):
        return True
    module = getattr(target, "__module__", None) or type(target).__module__
    return module.split(".")[0] in ("torch", "math", "builtins", "_operator") and not type(target).__name__.startswith("numpy_")


@cache
def _signatures(target: Any) -> Sequence[tuple[Sequence[str], Sequence[str]]]:
    """Names of a target's positional arguments, and of those it writes to; several pairs for a packet of overloads."""
    if isinstance(target, torch._ops.OpOverload):
        return [_by_schema(target._schema)]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [_by_schema(schema) for schema in _schemas(target)]
    if inspect.isbuiltin(target):
        # A torch builtin has no signature: the aten op of its name knows the order of arguments. What it writes to, its own name and
        # `out` have said already, and TorchScript's list functions share names with some (`aten::sort` of a list).
        packet = getattr(torch.ops.aten, _name(target), None)
        by_schema = [_by_schema(schema) for schema in _schemas(packet)] if packet is not None else []
        return [(names, _updated(marked)) for names, marked in by_schema]
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return ()
    return [(names, _updated(names))]


def _schemas(packet: Any) -> list[torch._C.FunctionSchema]:
    return [getattr(packet, name)._schema for name in packet.overloads()]


def _updated(names: Sequence[str]) -> list[str]:
    return [name for name in names if name in UPDATED_ARGUMENTS]


def _by_schema(schema: torch._C.FunctionSchema) -> tuple[list[str], list[str]]:
    marked = [a.name for a in schema.arguments if a.name in UPDATED_ARGUMENTS or (a.alias_info is not None and a.alias_info.is_write)]
    return [a.name for a in schema.arguments if not a.kwarg_only], marked
