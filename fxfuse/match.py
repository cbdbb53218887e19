"""Finding chains: from each anchor, follow the value from reader to reader for as long as the chain's steps go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from . import torch_private
from .chain import Chain, Step
from .identities import is_identity, why_not
from .op_names import op_name, source_of
from .values import ModuleParameter, value_of
from .view import Call, GraphView
from .written_out import READERS

# How many other ops may stand between a chain's steps for it to be a near miss, and how many readers of a value are followed.
NEAR = 2
MOST_FOLLOWED = 8


@dataclass(frozen=True)
class Match:
    """A complete chain: every step's call by step name (None for an optional step that is absent).

    path: the calls in the order the value flows, with the identities between steps, which belong to no step.
    """

    chain: Chain
    calls: Mapping[str, Call | None]
    path: tuple[Call, ...]

    @property
    def present(self) -> list[Call]:
        """The steps' calls in chain order, absent optional ones left out."""
        return [call for call in self.calls.values() if call is not None]

    @property
    def anchor(self) -> Call:
        return self.path[0]

    @property
    def last(self) -> Call:
        return self.path[-1]

    @property
    def subject(self) -> str:
        """How a sentence names the anchor."""
        return "the convolution" if self.anchor.word == "conv" else f"the {self.anchor.word}"

    @property
    def in_order(self) -> tuple[fx.Node, ...]:
        """The nodes in chain order."""
        return tuple(node for call in self.path for node in call.nodes)

    @property
    def nodes(self) -> set[fx.Node]:
        return set(self.in_order)

    @property
    def inputs(self) -> list[fx.Node | ModuleParameter]:
        """The tensors that flow into the chain from outside, each once, in chain order."""
        inner = self.nodes
        found: dict[object, fx.Node | ModuleParameter] = {}
        for call in self.present:
            for argument in call.args.values():
                node = isinstance(argument, fx.Node) and argument not in inner and not isinstance(value_of(argument), (int, float, torch.SymInt))
                if node or isinstance(argument, ModuleParameter):
                    found.setdefault(argument, argument)
        return list(found.values())


@dataclass(frozen=True)
class Miss:
    """A candidate that is no match: the last step that was found, why the next one was not, and the nodes up to there.

    behind: the nodes of the steps that are there all the same, behind other ops.
    """

    chain: Chain
    reached: str
    call: Call
    reason: str
    in_order: tuple[fx.Node, ...]
    behind: frozenset[fx.Node] = frozenset()


def find(view: GraphView, chain: Chain) -> Iterator[Match | Miss]:
    """Every candidate of the chain, in graph order: an anchor that a step follows which is not optional, or would but for a few ops between
    the steps. Where what follows those belongs to a match, it is none."""
    anchors = (anchor for anchor in view.anchors(chain.steps[0].words) if chain.dims is None or anchor.args.get("dims") in chain.dims)
    found = [candidate for candidate in (_follow(view, chain, anchor) for anchor in anchors) if candidate is not None]
    matched = {node for candidate in found if isinstance(candidate, Match) for node in candidate.in_order}
    return (candidate for candidate in found if isinstance(candidate, Match) or matched.isdisjoint(candidate.behind))


def _follow(view: GraphView, chain: Chain, anchor: Call) -> Match | Miss | None:
    first, *steps = chain.steps
    calls, path, missing = _walk(view, anchor.result, steps, anchor.args.get("dims"))
    found = Match(chain, {first.name: anchor, **calls}, (anchor, *path))
    if missing is None:
        return found
    reached = next(index for index, step in reversed(list(enumerate(chain.steps))) if found.calls.get(step.name) is not None)
    behind: list[Call] | None = []
    if all(step.optional for step in chain.steps[1 : reached + 1]):
        behind = _near(view, found, found.last.result, chain.steps[reached + 1 :], NEAR)
    if behind is None:
        return None
    nodes = frozenset(node for call in behind for node in call.nodes)
    return Miss(chain, chain.steps[reached].name, found.present[-1], _stopped(view, found.present[-1], missing), found.in_order, nodes)


def _walk(view: GraphView, value: fx.Node, steps: Sequence[Step], dims: int | None) -> tuple[dict[str, Call | None], list[Call], Step | None]:
    """Follows a value through the steps: their calls, the path, and the step that is missing; None where there is none."""
    calls: dict[str, Call | None] = {}
    path: list[Call] = []
    for step in steps:
        way = _way(view, value, step, dims)
        calls[step.name] = way[-1] if way else None
        if way:
            path += way
            value = way[-1].result
        elif not step.optional:
            return calls, path, step
    return calls, path, None


def _way(view: GraphView, value: fx.Node, step: Step, dims: int | None) -> list[Call]:
    """The step's call that reads the value, with the identities in front of it that the value passes; empty where there is none."""
    written_out = (READERS[word](view, value, dims) for word in step.words if word in READERS)
    spelled = (view.flows(value, reader) for reader in view.readers[value])
    found = next((call for call in (*written_out, *spelled) if call is not None and call.word in step.words), None)
    if found is not None:
        return [found]
    ways = ((passed, _way(view, passed.result, step, dims)) for passed in _identities(view, value))
    return next(([passed, *behind] for passed, behind in ways if behind), [])


def _identities(view: GraphView, value: fx.Node) -> Iterator[Call]:
    """What hands the value on as it is, as calls."""
    for reader in view.readers[value]:
        if source_of(reader) is value and is_identity(reader):
            yield Call(op_name(reader), reader, reader, {"self": value}, "self")


def _near(view: GraphView, found: Match, value: fx.Node, steps: Sequence[Step], others: int) -> list[Call] | None:
    """The calls of the steps behind a value, with at most so many other ops on the way; None where they do not all come."""
    calls, path, missing = _walk(view, value, steps, found.anchor.args.get("dims"))
    if missing is None:
        return path
    if others == 0:
        return None
    left = steps[max((index + 1 for index, step in enumerate(steps) if calls.get(step.name)), default=0) :]
    anchors, value = found.chain.steps[0].words, path[-1].result if path else value
    readers = [reader for reader in view.readers[value] if not (reader in view.calls and view.calls[reader].word in anchors)]
    ways = (_near(view, found, reader, left, others - 1) for reader in readers[:MOST_FOLLOWED])
    return next(([*path, *way] for way in ways if way is not None), None)


def _stopped(view: GraphView, last: Call, step: Step) -> str:
    value = last.result
    while (passed := next(_identities(view, value), None)) is not None:
        value = passed.result
    followers = listed([_described(view, reader) for reader in view.readers[value]])
    return f"{last.word} is followed by {followers}; the chain goes on with {' or '.join(step.words)}"


def _described(view: GraphView, node: fx.Node) -> str:
    """The node's name, with what it does if it is an identity elsewhere."""
    does = why_not(node)
    return f"{describe(view, node)} ({does})" if does else describe(view, node)


def listed(names: list[str], shown: int = 3) -> str:
    """Names for a sentence, each once: the first few and how many more."""
    names = list(dict.fromkeys(names)) or ["nothing"]
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def describe(view: GraphView, node: fx.Node) -> str:
    """How a sentence names a node: the word it spells, else what it calls; of a module its class, and whether its call is not its class's."""
    if node in view.calls:
        return view.calls[node].word
    if node.op == "output":
        return "the graph's output"
    if node.op == "call_module":
        module = node.graph.owning_module.get_submodule(node.target)
        return type(module).__name__ + ("" if torch_private.calls_own_forward(module) else " with hooks or a forward of its own")
    target = getattr(node.target, "overloadpacket", node.target)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
