"""Which tensors a node writes to. Missing a write gives wrong numbers, claiming one too many only leaves a chain unfused: in doubt, yes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

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
# In eval these return their very argument; torch's decomposition, which fake tensors go through, returns a copy.
RETURN_THEIR_ARGUMENT = (F.dropout, torch.dropout, torch.ops.aten.dropout, torch.ops.aten.dropout.default)


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
    return [target for target in dict.fromkeys(found) if _may_be_written(target)]


def reshaped(node: fx.Node) -> list[fx.Node | ModuleParameter]:
    """The tensors whose shape, strides or storage the node changes in place."""
    return written(node) if _name(node.target).split(".")[0] in RESHAPES else []


def moves_storage(node: fx.Node) -> bool:
    """Whether the node gives a tensor another storage, `x.set_(y)` or `x.data = y`: what example values share says little from there on."""
    return _name(node.target).split(".")[0] == "set_"


def returned_argument(node: fx.Node) -> fx.Node | None:
    """The argument that a node may return as it is, without the example value saying so."""
    is_module = node.op == "call_module" and isinstance(_module_of(node), nn.Dropout)
    return node.all_input_nodes[0] if (is_module or node.target in RETURN_THEIR_ARGUMENT) and node.all_input_nodes else None


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _may_be_written(target: fx.Node | ModuleParameter) -> bool:
    """Whether a write target may be memory, which tensors, storages and tuples of tensors are; numbers and the body of a higher-order op are not."""
    value = value_of(target)
    return not isinstance(value, (int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype)) and (
        value is not None or target.op != "get_attr"
    )


def _flat(value: Any) -> list[fx.Node | ModuleParameter]:
    nodes: list[fx.Node | ModuleParameter] = []
    fx.map_arg(value, nodes.append)
    return nodes


def _in_place_name(name: str) -> bool:
    """`add_`, `_foreach_mul_`, `__iadd__`, `__setitem__`; not `add`, `__add__`."""
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def _module_of(node: fx.Node) -> nn.Module:
    return node.graph.owning_module.get_submodule(node.target)


def _module_writes(node: fx.Node) -> list[fx.Node | ModuleParameter]:
    """A module that is not all torch's own may write to everything that it has and is given."""
    module = _module_of(node)
    is_known = all(_is_known_module(inner) for inner in module.modules())
    is_in_place = any(getattr(inner, "inplace", False) for inner in module.modules())
    is_renormalised = any(getattr(inner, "max_norm", None) is not None for inner in module.modules())
    state = [*module.named_buffers(), *(module.named_parameters() if is_renormalised or not is_known else ())]
    given = node.all_input_nodes if is_in_place or not is_known else []
    return [*given, *(ModuleParameter(f"{node.target}.{name}", tensor) for name, tensor in state)]


def _is_known_module(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.") and torch_private.calls_own_forward(module)


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
        yield _first(node)
    for names, marked in _signatures(target):
        given = {**dict(zip(names, node.args)), **node.kwargs}
        if given.get("inplace", False) is not False:
            yield _first(node)
        yield [given.get(name) for name in (*marked, "out")]
    if target in RENORMALISED:
        yield node.args[1:2] or node.kwargs.get("weight")


def _first(node: fx.Node) -> Any:
    """The first argument, which is what in-place calls write to; given by a keyword, whose name is the function's own, it may be any of them."""
    return node.args[:1] or node.all_input_nodes


def is_known(target: Any) -> bool:
    """Whether the rules here cover a function: torch's and Python's own are, a user's (`torch.fx.wrap`, `allow_in_graph`), an extension's and
    NumPy's are not."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
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
        # A torch builtin has no signature: the aten op of its name knows the order of arguments, and what is written to.
        packet = getattr(torch.ops.aten, _name(target), None)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            return ()
        return [_by_schema(schema, _in_place_name(_name(target))) for schema in _schemas(packet)]
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return ()
    return [(names, _updated(names))]


def _schemas(packet: Any) -> list[torch._C.FunctionSchema]:
    return [getattr(packet, name)._schema for name in packet.overloads()]


def _updated(names: Sequence[str]) -> list[str]:
    return [name for name in names if name in UPDATED_ARGUMENTS]


def _by_schema(schema: torch._C.FunctionSchema, lists: bool = True) -> tuple[list[str], list[str]]:
    """lists: whether lists of tensors count. TorchScript's functions for lists share names with torch's for tensors (`aten::sort`)."""
    marked = [a.name for a in schema.arguments if a.name in UPDATED_ARGUMENTS or (_is_marked(a) and (lists or "List" not in str(a.type)))]
    return [a.name for a in schema.arguments if not a.kwarg_only], marked


def _is_marked(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
