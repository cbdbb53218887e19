"""Finding chains: from each anchor, follow the value from reader to reader for as long as the chain's steps go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from . import torch_private
from .chain import Chain, Step
from .values import ModuleParameter, value_of
from .view import Call, GraphView


@dataclass(frozen=True)
class Match:
    """A complete chain: every step's call by step name (None for an optional step that is absent)."""

    chain: Chain
    calls: Mapping[str, Call | None]

    @property
    def present(self) -> list[Call]:
        """The calls in chain order, absent optional steps left out."""
        return [call for call in self.calls.values() if call is not None]

    @property
    def anchor(self) -> Call:
        return self.present[0]

    @property
    def last(self) -> Call:
        return self.present[-1]

    @property
    def subject(self) -> str:
        """How a sentence names the anchor."""
        return "the convolution" if self.anchor.word == "conv" else f"the {self.anchor.word}"

    @property
    def in_order(self) -> tuple[fx.Node, ...]:
        """The nodes in chain order."""
        return tuple(node for call in self.present for node in call.nodes)

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
    """A candidate that is no match: the last step that was found, why the next one was not, and the nodes up to there."""

    chain: Chain
    reached: str
    call: Call
    reason: str
    in_order: tuple[fx.Node, ...]


def find(view: GraphView, chain: Chain) -> Iterator[Match | Miss]:
    """Every candidate of the chain, in graph order; an anchor that no step follows is not a candidate."""
    for anchor in view.anchors(chain.steps[0].words):
        if chain.dims is None or anchor.args.get("dims") in chain.dims:
            found = _follow(view, chain, anchor)
            if found is not None:
                yield found


def _follow(view: GraphView, chain: Chain, anchor: Call) -> Match | Miss | None:
    calls: dict[str, Call | None] = {chain.steps[0].name: anchor}
    current, reached = anchor, chain.steps[0]
    for step in chain.steps[1:]:
        following = _next(view, current, step)
        calls[step.name] = following
        if following is not None:
            current, reached = following, step
        elif not step.optional:
            if current is anchor:
                return None
            return Miss(chain, reached.name, current, _stopped(view, current, step), Match(chain, calls).in_order)
    return Match(chain, calls)


def _next(view: GraphView, current: Call, step: Step) -> Call | None:
    for reader in view.readers[current.result]:
        call = view.flows(current.result, reader)
        if call is not None and call.word in step.words:
            return call
    return None


def _stopped(view: GraphView, current: Call, step: Step) -> str:
    followers = listed([describe(view, reader) for reader in view.readers[current.result]])
    return f"{current.word} is followed by {followers}; the chain goes on with {' or '.join(step.words)}"


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
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
