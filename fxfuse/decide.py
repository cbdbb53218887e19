"""What becomes of one candidate: a plan to fuse it, or the record of why it was declined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from . import library
from .chain import Chain, first_failure
from .guarded import Guarded, PassError
from .match import Match, Miss
from .options import Options
from .places import location_of, module_of
from .report import Declined, Fused, text_of
from .safety import Refusal, refusal
from .view import GraphView
from .weigh import Timer, Weighed, weigh

# Whether the kernels for a device ("cpu", "cuda:0") can be used: None, or the sentence why not.
Availability = Callable[[str], "str | None"]


@dataclass(frozen=True)
class Plan:
    """A match and what came of weighing its implementations: one of them was taken."""

    match: Match
    weighed: Weighed

    def fused(self) -> Fused:
        """The record of the match once it is replaced."""
        match, weighed = self.match, self.weighed
        values = (match.anchor.tensor(match.anchor.by), match.anchor.value, match.last.value)
        shapes = " -> ".join(text_of(value.shape) for value in values if value is not None)
        names = tuple(node.name for node in match.in_order)
        where = {"location": location_of(match.anchor.node), "module": module_of(match.anchor.node)}
        return Fused(match.chain.name, weighed.taken.op, names, shapes, weighed.why, candidates=weighed.candidates, **where)


@dataclass(frozen=True)
class Terms:
    """On what terms candidates are decided. timer: measures implementations instead of predicting their times. around: refuses a match for
    what its graph does not show, where that is the body of a higher-order op."""

    options: Options
    unavailable: Availability = library.unavailable
    timer: Timer | None = None
    around: Callable[[Match], Refusal | None] = lambda match: None


def decide(view: GraphView, found: Match | Miss, terms: Terms, taken: Mapping[fx.Node, str]) -> Plan | Declined:
    """What becomes of a candidate. taken: nodes that other plans have, and their chains. Raises PassError for a mistake in the chain."""
    if isinstance(found, Miss):
        return declined(found, found.call.node, found.reason)
    overlap = next((node for node in found.in_order if node in taken), None)
    if overlap is not None:
        return declined(found, overlap, f"{overlap.name} already belongs to another fused chain, {taken[overlap]}")
    unsafe = refusal(view, found) or terms.around(found)
    if unsafe is not None:
        return declined(found, *unsafe)
    anchor, chain = found.anchor, found.chain
    reason = first_failure(Guarded(chain.name, "requires", chain.requires).conditions(**found.calls))
    if reason is not None:
        return declined(found, anchor.node, reason)
    if terms.options.select == "never":
        return declined(found, anchor.node, 'fxfuse.select is "never"')
    missing = _missing(chain, str(anchor.value.device), terms.unavailable)
    if missing is not None and all(implementation.is_own for implementation in chain.implementations):
        return declined(found, anchor.node, missing)
    weighed = weigh(found, terms.options, terms.timer, missing)
    if weighed.taken is None:
        return replace(declined(found, anchor.node, weighed.why), candidates=weighed.candidates)
    return Plan(found, weighed)


def declined(found: Match | Miss, node: fx.Node, reason: str) -> Declined:
    """The record of a candidate that is left alone."""
    reached = found.reached if isinstance(found, Miss) else list(found.calls)[-1]
    nodes = tuple(inner.name for inner in found.in_order)
    is_parted = isinstance(found, Miss) and bool(found.behind)
    return Declined(found.chain.name, reached, node.name, reason, location_of(node), nodes, module=module_of(found.in_order[0]), is_parted=is_parted)


def unread(chain: Chain, error: PassError) -> Declined:
    """The record of a chain whose words could not be read in the graph."""
    node = error.node
    return Declined(chain.name, chain.steps[0].name, node.name, str(error), location_of(node), (node.name,), module=module_of(node))


def _missing(chain: Chain, device: str, unavailable: Availability) -> str | None:
    """Why fxfuse's own kernels cannot be used; they are loaded, and built, only for a chain that has ops of fxfuse's."""
    return unavailable(device) if any(implementation.is_own for implementation in chain.implementations) else None
