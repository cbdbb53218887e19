"""The canonical view of an FX graph: which nodes are words of the vocabulary, who reads which value, and who writes where.

A Dynamo graph is not functional: after `y.add_(w)` every later read of `y` sees the sum. The view follows such links, so that a value is
named by the node that wrote it last, and a chain can be walked from value to reader whatever the spelling.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from . import torch_private, vocabulary
from .values import ModuleParameter, attribute_of, value_of
from .writes import reshapes, written


STATE_CHANGES = frozenset(
    "_enter_autocast _exit_autocast _set_grad_enabled _enter_inference_mode _exit_inference_mode set_default_dtype set_stream "
    "_exchange_device _maybe_exchange_device set_device _set_deterministic_algorithms".split()
)


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
        if name.startswith("__") or name not in self.args:
            raise AttributeError(f"{self.word} has no argument {name}; it has {', '.join(self.args)}")
        return self.args[name]

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


def read(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    """The word that `node` spells and its arguments, or None."""
    if node.op == "call_module":
        return _read_module(node)
    spelling = None
    if node.op == "call_function":
        spelling = vocabulary.functions().get(node.target)
    elif node.op == "call_method":
        spelling = vocabulary.methods().get(node.target)
    return None if spelling is None else spelling.read(node.args, node.kwargs)


def _read_module(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    module = node.graph.owning_module.get_submodule(node.target)
    row = vocabulary.MODULES.get(type(module))
    if row is None or getattr(module, "padding_mode", "zeros") != "zeros" or torch_private.has_hooks(module):
        return None
    function, names = row
    given = {name: getattr(module, name) for name in names}
    given = {n: ModuleParameter(f"{node.target}.{n}", v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    return vocabulary.functions()[function].read(node.args, {**given, **node.kwargs})


class GraphView:
    """Words, order, readers and writes of one graph; built in one pass, linear in its size.

    calls: the word a node spells, by the node that reads its arguments.
    readers: the nodes that read a value, by the node that wrote it last, in graph order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.calls: dict[fx.Node, Call] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        # Positions of writes by storage; under None those whose storage is not known, which may be any.
        self._writes: dict[int | None, list[int]] = defaultdict(list)
        # A parameter is a fake tensor where a get_attr node reads it and the real one where a module holds it.
        self._real_storage: dict[int, int] = {}
        # The node that reshapes a tensor in place, by the tensor's node.
        self.reshaped: dict[fx.Node, fx.Node] = {}
        # Positions of nodes that change how later ops run, and how many torch.func transforms are open before the first and behind each.
        self.state_changes: list[int] = []
        self.transform_depth: list[int] = [0]
        self._object: dict[fx.Node, fx.Node] = {}
        self._latest: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            self._visit(node)

    def anchors(self, word: str) -> Iterator[Call]:
        """Every call of `word`, in graph order."""
        return (call for call in self.calls.values() if call.word == word)

    def flows(self, value: fx.Node, reader: fx.Node) -> Call | None:
        """`reader` as a word into which `value` flows, with `by` set to the argument it flows in by; None for any other reader."""
        call = self.calls.get(reader)
        if call is None:
            return None
        owner = self._object.get(value, value)
        arguments = ((name, call.args.get(name)) for name in vocabulary.through(call.word))
        by = next((name for name, given in arguments if isinstance(given, fx.Node) and self._object.get(given, given) is owner), None)
        return None if by is None else replace(call, by=by)

    def write_between(self, argument: fx.Node | ModuleParameter, first: int, last: int) -> fx.Node | None:
        """A node strictly between two positions that writes, or may write, to the argument's storage."""
        for storage in (self.storage_of(argument), None):
            positions = self._writes.get(storage, [])
            index = bisect_right(positions, first)
            if index < len(positions) and positions[index] < last:
                return self.nodes[positions[index]]
        return None

    def storage_of(self, argument: fx.Node | ModuleParameter) -> int | None:
        """Identity of the storage under an argument; None where it has none or it is not known."""
        storage = torch_private.storage_of(value_of(argument))
        return self._real_storage.get(storage, storage)

    def _visit(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self._note_parameter(node)
        if changes_state(node):
            self.state_changes.append(self.order[node])
            self.transform_depth.append(self.transform_depth[-1] + _transform_step(node))
        for source in node.all_input_nodes:
            owner = self._object.get(source, source)
            self.readers[self._latest.get(owner, source)].append(node)
        spelled = read(node)
        if spelled is not None:
            self.calls[node] = Call(spelled[0], node, _result(node), fx.map_arg(spelled[1], _constant_or_node))
        if reshapes(node) and isinstance(node.args[0], fx.Node):
            self.reshaped[node.args[0]] = node
        for target in written(node):
            self._writes[self.storage_of(target)].append(self.order[node])
            if spelled is not None and node.args and node.args[0] is target:
                self._object[node] = self._object.get(target, target)
                self._latest[self._object[node]] = node

    def _note_parameter(self, node: fx.Node) -> None:
        fake, real = (torch_private.storage_of(value) for value in (value_of(node), attribute_of(node)))
        if fake is not None and real is not None:
            self._real_storage[fake] = real


def _constant_or_node(node: fx.Node) -> Any:
    """A node whose value is a number that does not vary reads as that number, so that conditions see a literal."""
    constant = torch_private.constant_of(value_of(node))
    return node if constant is None else constant


def changes_state(node: fx.Node) -> bool:
    """Whether a node changes how later ops run: autocast, grad mode, default dtype, streams, devices, torch.func transforms."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace == "streams"
    name = getattr(node.target, "__name__", "")
    return name in STATE_CHANGES or bool(_transform_step(node))


def _transform_step(node: fx.Node) -> int:
    name = getattr(node.target, "__name__", "")
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _result(node: fx.Node) -> fx.Node:
    if node.target not in (torch.ops.aten.native_layer_norm.default, torch.native_layer_norm):
        return node
    firsts = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    return firsts[0] if firsts else node
