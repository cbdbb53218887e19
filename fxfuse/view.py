"""The canonical view of an FX graph: which nodes are words of the vocabulary, who reads which value, and who writes where.

A Dynamo graph is not functional: after `y.add_(w)` every later read of `y` sees the sum. The view follows such links, so that a value is
named by the node that wrote it last, and a chain can be walked from value to reader whatever the spelling.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from . import torch_private, words
from .guarded import Guarded, PassError
from .identities import is_identity
from .states import changes_state, transform_step
from .values import ModuleParameter, attribute_of, value_of
from .vocabulary import NONE, Args, Spelling, Vocabulary, Word
from .writes import moves_storage, reshaped, returned_argument, written


if TYPE_CHECKING:
    from .chain import Chain


@dataclass(frozen=True, eq=False)
class Call:
    """One op of the graph read as a word: `node` reads the arguments, `result` is the node whose value the word produces.

    The two differ for ops that return a tuple (`native_layer_norm` and its getitem) and for words that are written out in several ops, between
    which are the `others`. Arguments are reached as attributes by the
    word's argument names (one that is called like an attribute here, as `value`, in `args`); tensors among them are nodes (or
    `ModuleParameter`s). `by` is the argument by which the chain flows in; of a
    chain's first call, the first by which it could.
    """

    word: str
    node: fx.Node
    result: fx.Node
    args: Mapping[str, Any]
    by: str = ""
    others: tuple[fx.Node, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.args:
            raise AttributeError(f"{self.word} has no argument {name}; it has {', '.join(self.args)}")
        return self.args[name]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """In graph order."""
        return tuple(dict.fromkeys((self.node, *self.others, self.result)))

    @property
    def value(self) -> torch.Tensor:
        """The result as a fake tensor: shape, dtype, device and strides, no data."""
        return value_of(self.result)

    def tensor(self, name: str) -> torch.Tensor | None:
        """The fake tensor given for argument `name`; None where no tensor is given."""
        argument = self.args.get(name)
        return value_of(argument) if isinstance(argument, (fx.Node, ModuleParameter)) else None


class Views:
    """A graph as each chain reads it: one view for all chains of the same words, made when it is first asked for.

    same_storage: as `GraphView` takes it.
    """

    def __init__(self, graph: fx.Graph, same_storage: Mapping[int, int] = NONE) -> None:
        self._graph = graph
        self._same_storage = same_storage
        self._views: dict[Vocabulary, GraphView] = {}

    def of(self, chain: Chain) -> GraphView:
        """The view of a chain. Raises PassError for a mistake in its words."""
        if chain.vocabulary not in self._views:
            self._views[chain.vocabulary] = GraphView(self._graph, chain, self._same_storage)
        return self._views[chain.vocabulary]


class GraphView:
    """Words, order, readers and writes of one graph; built in one pass, linear in its size.

    chain: whose words nodes are read as; by default the words that every chain knows. Raises PassError for a mistake in the chain's own.
    same_storage: of storages that example values take for two, though they may be one, which one stands for both.
    calls: the word a node spells, by the node that reads its arguments.
    readers: the nodes that read a value, by the node that wrote it last, in graph order.
    """

    def __init__(self, graph: fx.Graph, chain: Chain | None = None, same_storage: Mapping[int, int] = NONE) -> None:
        self._vocabulary = chain.vocabulary if chain is not None else words.vocabulary()
        self._reader = chain.name if chain is not None else ""
        self.nodes = list(graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.calls: dict[fx.Node, Call] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        # Positions of writes by storage; under None those whose storage is not known, which may be any.
        self._writes: dict[int | None, list[int]] = defaultdict(list)
        # Storages that are another one in truth: a parameter is a fake tensor where a get_attr node reads it and the real one where a module
        # holds it; and some ops return their argument, though the fake is a copy.
        self._true_storage: dict[int, int] = dict(same_storage)
        # Storages of inputs that may be one at another call: Dynamo sees to it that its graph runs on inputs that share memory as its examples do.
        self._input_storages: set[int | None] = set()
        self._storages_move = any(map(moves_storage, self.nodes))
        # The node that reshapes a tensor in place, by the tensor's storage.
        self._reshaped: dict[int | None, fx.Node] = {}
        # Positions of nodes that change how later ops run, and how many torch.func transforms are open before the first and behind each.
        self.state_changes: list[int] = []
        self.transform_depth: list[int] = [0]
        self._object: dict[fx.Node, fx.Node] = {}
        self._latest: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            self._visit(node)

    def anchors(self, accepted: Container[str]) -> Iterator[Call]:
        """Every call of an accepted word, in graph order."""
        return (call for call in self.calls.values() if call.word in accepted)

    def flows(self, value: fx.Node, reader: fx.Node) -> Call | None:
        """`reader` as a word into which `value` flows, with `by` set to the argument it flows in by; None for any other reader."""
        call = self.calls.get(reader)
        if call is None:
            return None
        owner = self._object.get(value, value)
        arguments = ((name, call.args.get(name)) for name in self._vocabulary.words[call.word].through)
        by = next((name for name, given in arguments if isinstance(given, fx.Node) and self._object.get(given, given) is owner), None)
        return None if by is None else replace(call, by=by)

    def write_between(
        self, argument: fx.Node | ModuleParameter, first: int, last: int, apart_from: Container[fx.Node] = ()
    ) -> fx.Node | None:
        """A node strictly between two positions that writes, or may write, to the argument's storage."""
        own = self.storage_of(argument)
        for storage in (own, None, *(self._input_storages if own in self._input_storages else ())):
            positions = self._writes.get(storage, [])
            inside = positions[bisect_right(positions, first) : bisect_left(positions, last)]
            writer = next((self.nodes[position] for position in inside if self.nodes[position] not in apart_from), None)
            if writer is not None:
                return writer
        return None

    def storage_of(self, argument: fx.Node | ModuleParameter) -> int | None:
        """Identity of the storage under an argument; None where it has none or it is not known."""
        storage = torch_private.storage_of(value_of(argument))
        return self._true_storage.get(storage, storage)

    def reshaped_by(self, node: fx.Node | ModuleParameter) -> fx.Node | None:
        """The node that changes shape, strides or storage of what `node` stands for, or may do so: a view may be the tensor itself
        (`x.contiguous()`)."""
        return self._reshaped.get(self.storage_of(node))

    def _visit(self, node: fx.Node) -> None:
        self._note_storage(node)
        if changes_state(node):
            self.state_changes.append(self.order[node])
            self.transform_depth.append(self.transform_depth[-1] + transform_step(node))
        for source in node.all_input_nodes:
            owner = self._object.get(source, source)
            self.readers[self._latest.get(owner, source)].append(node)
        spelled = self._vocabulary.read(node)
        if spelled is not None:
            word, spelling, bound = spelled
            args = self._adapted(node, word, spelling, bound)
            self.calls[node] = Call(word.name, node, _result(node, spelling), fx.map_arg(args, _constant_or_node), _flows_in(word, args))
        for target in reshaped(node):
            self._reshaped.setdefault(self.storage_of(target), node)
        for target in () if is_identity(node) else written(node):
            self._writes[None if self._storages_move else self.storage_of(target)].append(self.order[node])
            if spelled is not None and node.args and node.args[0] is target:
                self._object[node] = self._object.get(target, target)
                self._latest[self._object[node]] = node

    def _adapted(self, node: fx.Node, word: Word, spelling: Spelling, bound: Args) -> Args:
        adapt, expected = Guarded(self._reader, f"adapt of {word.name}", spelling.adapt), "it should turn a dict of arguments into another"
        try:
            args = adapt(expected, bound)
            if not isinstance(args, dict):
                raise adapt.mistake(f"returns {args!r}", expected)
        except PassError as error:
            error.node = node
            raise
        return args

    def _note_storage(self, node: fx.Node) -> None:
        own, argument = torch_private.storage_of(value_of(node)), returned_argument(node)
        if argument is not None:
            truth = self.storage_of(argument)
        else:
            truth = torch_private.storage_of(attribute_of(node)) if node.op == "get_attr" else None
        if own is not None and truth is not None:
            self._true_storage[own] = truth
        if node.op == "placeholder" and own is not None and "example_value" not in node.meta:
            self._input_storages.add(own)


def _constant_or_node(node: fx.Node) -> Any:
    """A node whose value is a number that does not vary reads as that number, so that conditions see a literal."""
    constant = torch_private.constant_of(value_of(node))
    return node if constant is None else constant


def _result(node: fx.Node, spelling: Spelling) -> fx.Node:
    firsts = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0] if spelling.returns_tuple() else []
    return firsts[0] if firsts else node


def _flows_in(word: Word, args: Mapping[str, Any]) -> str:
    return next((name for name in word.through if isinstance(args.get(name), (fx.Node, ModuleParameter))), word.through[0])
