"""The canonical view of an FX graph: which nodes are words of the vocabulary, and who reads which value.

A Dynamo graph is not functional: after `y.add_(w)` every later read of `y` sees the sum. The view follows such links, so that a value is
named by the node that wrote it last, and a chain can be walked from value to reader whatever the spelling.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import torch_private, vocabulary

GETITEM = operator.getitem
IN_PLACE_OPERATORS = {
    getattr(operator, f"i{name}") for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift concat".split()
}
# Functionals that take `inplace` by position as well as by name.
INPLACE_FUNCTIONALS = {"relu", "relu6", "dropout", "hardtanh", "leaky_relu", "elu", "celu", "selu", "silu", "mish", "threshold", "hardswish"}


@dataclass(frozen=True)
class ModuleParameter:
    """A parameter of a `call_module` node: it becomes a `get_attr` node only if the match is rewritten."""

    path: str
    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """One op of the graph read as a word: `node` reads the arguments, `result` is the node whose value the word produces.

    The two differ only for ops that return a tuple (`native_layer_norm` and its getitem). Arguments are reached as attributes by the
    word's argument names; tensors among them are nodes (or `ModuleParameter`s). `by` is the argument by which the chain flows in.
    """

    word: str
    node: fx.Node
    result: fx.Node
    args: Mapping[str, Any]
    by: str = ""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.args[name]
        except KeyError:
            raise AttributeError(f"{self.word} has no argument {name}; it has {', '.join(self.args)}") from None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (self.node,) if self.node is self.result else (self.node, self.result)

    @property
    def value(self) -> torch.Tensor:
        """The result as a fake tensor: shape, dtype, device and strides, no data."""
        return value_of(self.result)

    def tensor(self, name: str) -> torch.Tensor | None:
        """The fake tensor given for argument `name`; None where no tensor is given."""
        argument = self.args.get(name)
        return value_of(argument) if isinstance(argument, (fx.Node, ModuleParameter)) else None


def value_of(argument: Any) -> Any:
    """The example value of a node: a fake tensor, a SymInt or a number; None where the graph holds none."""
    if isinstance(argument, ModuleParameter):
        return argument.value
    if not isinstance(argument, fx.Node):
        return argument
    return argument.meta.get("example_value", argument.meta.get("val"))


def read(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    """The word that `node` spells and its arguments, or None."""
    if node.op == "call_module":
        return _read_module(node)
    spelling = None
    if node.op == "call_function":
        spelling = vocabulary.functions().get(node.target)
    elif node.op == "call_method":
        spelling = vocabulary.methods().get(node.target)
    if spelling is None or "out" in node.kwargs:
        return None
    args = vocabulary.bind(spelling.schema, node.args, node.kwargs)
    return None if args is None else (spelling.word, spelling.adapt(args))


def _read_module(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    module = node.graph.owning_module.get_submodule(node.target)
    row = vocabulary.MODULES.get(type(module))
    plain = row is not None and getattr(module, "padding_mode", "zeros") == "zeros" and not torch_private.has_hooks(module)
    if not plain or len(node.args) != 1 or node.kwargs:
        return None
    function, names = row
    given = {name: getattr(module, name) for name in names}
    given = {n: ModuleParameter(f"{node.target}.{n}", v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    spelling = vocabulary.functions()[function]
    args = vocabulary.bind(spelling.schema, node.args, given)
    return None if args is None else (spelling.word, spelling.adapt(args))


def mutated(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors `node` writes to: in-place methods, operators and functions, `out=`, `inplace=True`, writing aten schemas."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    first = [a for a in node.args[:1] if isinstance(a, fx.Node)]
    out = node.kwargs.get("out")
    written = list(out) if isinstance(out, (tuple, list)) else [out]
    if _writes_first(node):
        written += first
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        given = {**dict(zip((a.name for a in schema), node.args)), **node.kwargs}
        written += [given.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
    elif isinstance(node.target, torch._ops.HigherOrderOperator) and "mutation" in str(node.target):
        written += node.all_input_nodes
    return [a for a in written if isinstance(a, fx.Node)]


def _writes_first(node: fx.Node) -> bool:
    if node.kwargs.get("inplace"):
        return True
    if node.op == "call_module":
        return bool(getattr(node.graph.owning_module.get_submodule(node.target), "inplace", False))
    if node.op == "call_method":
        name = node.target
        dunder = name.startswith("__")
        return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__") or (name.endswith("_") and not dunder)
    if node.target is operator.setitem or node.target in IN_PLACE_OPERATORS:
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return False
    name = getattr(node.target, "__name__", "")
    return (name.endswith("_") and not name.startswith("_")) or (name in INPLACE_FUNCTIONALS and True in node.args[1:])


class GraphView:
    """Words, order and readers of one graph; built in one pass, linear in its size.

    calls: the word a node spells, by the node that reads its arguments.
    readers: the nodes that read a value, by the node that wrote it last, in graph order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.calls: dict[fx.Node, Call] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self.writes: list[tuple[fx.Node, fx.Node]] = []
        self._object: dict[fx.Node, fx.Node] = {}
        self._latest: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            self._visit(node)

    def anchors(self, word: str) -> Iterator[Call]:
        """Every call of `word`, in graph order."""
        return (call for call in self.calls.values() if call.word == word)

    def _visit(self, node: fx.Node) -> None:
        spelled = read(node)
        for source in node.all_input_nodes:
            self.readers[self._current(source)].append(node)
        if spelled is not None:
            self.calls[node] = Call(spelled[0], node, _result(node), spelled[1])
        for target in mutated(node):
            self.writes.append((node, target))
            if spelled is not None and node.args and node.args[0] is target:
                owner = self._object.get(target, target)
                self._object[node] = owner
                self._latest[owner] = node

    def _current(self, node: fx.Node) -> fx.Node:
        owner = self._object.get(node, node)
        return self._latest.get(owner, node)

    def flows(self, value: fx.Node, reader: fx.Node) -> Call | None:
        """`reader` as a word into which `value` flows, with `by` set to the argument it flows in by; None for any other reader."""
        call = self.calls.get(reader)
        if call is None:
            return None
        for name in vocabulary.through(call.word):
            argument = call.args.get(name)
            if isinstance(argument, fx.Node) and (argument is value or self._object.get(argument, argument) is self._object.get(value, value)):
                return Call(call.word, call.node, call.result, call.args, by=name)
        return None


def _result(node: fx.Node) -> fx.Node:
    if node.target not in (torch.ops.aten.native_layer_norm.default, torch.native_layer_norm):
        return node
    firsts = [user for user in node.users if user.target is GETITEM and user.args[1] == 0]
    return firsts[0] if firsts else node
