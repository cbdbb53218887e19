"""The pipeline over one graph: view, find, check, choose, rewrite. It knows no chain and never leaves a graph half rewritten."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx
from torch._dynamo.utils import counters

from . import library
from .chain import Chain, chains
from .decide import Availability, Plan, Terms, decide, declined, unread
from .guarded import PassError
from .match import Match, Miss, find
from .options import Options
from .report import Declined, Report, alike_ones, places
from .replacement import rewritten
from .values import attribute_of, value_of
from .view import GraphView, Views
from .weigh import Timer

log = logging.getLogger(__name__)


class NotFusedError(RuntimeError):
    """Under `fxfuse.strict`, a candidate was not fused. report: what was found; nothing was rewritten."""

    def __init__(self, report: Report) -> None:
        super().__init__("; ".join(f"{group[0].chain} at {places(group)}: {group[0].reason}" for group in alike_ones(report.declined)))
        self.report = report


def fuse(
    graph: fx.Graph, options: Options, unavailable: Availability = library.unavailable, timer: Timer | None = None
) -> tuple[fx.Graph, Report]:
    """The graph with its chains fused, and what was done. With nothing to fuse, the very same graph object.

    graph: nodes carry fake tensors as `meta["example_value"]` or `meta["val"]`. timer: measures candidates instead of predicting them.
    Each chain is looked for once, in the graph as it is given: what a replacement is made of is not looked at again.
    Raises NotFusedError under `options.strict` if a candidate is declined whose nodes no other chain fuses, PassError if the reason is a mistake in its chain.
    """
    report, terms = Report(graphs=1), Terms(options, unavailable, timer)
    on = _chains_on(options)
    plans = plan(graph, on, terms, report)
    decline_nested(graph, on, options, report)
    if options.strict and _left(report, plans):
        raise NotFusedError(report)
    result, done = _rewritten(graph, plans, options, report)
    report.fused += [p.fused() for p in done]
    return result, report


def plan(graph: fx.Graph, on: Sequence[Chain], terms: Terms, report: Report) -> list[Plan]:
    """Chooses for every candidate of every chain that is on; what is declined goes into the report. A node serves one plan at most: that of
    the chain that comes first."""
    plans: list[Plan] = []
    taken: dict[fx.Node, str] = {}
    for view, found in _candidates(graph, on, terms.options, report):
        decision = _decision(view, found, terms, taken)
        if isinstance(decision, Plan):
            plans.append(decision)
            taken |= dict.fromkeys(decision.match.nodes, decision.match.chain.name)
        else:
            report.declined.append(decision)
    order = {node: index for index, node in enumerate(graph.nodes)}
    return sorted(plans, key=lambda p: order[p.match.anchor.node])


def decline_nested(graph: fx.Graph, on: Sequence[Chain], options: Options, report: Report, path: str = "") -> None:
    """Declines the candidates in the bodies of higher-order ops (checkpoint, cond): only the graph itself is rewritten."""
    bodies = {f"{path}{node.target}": attribute_of(node) for node in graph.nodes if node.op == "get_attr"}
    for name, body in bodies.items():
        if not isinstance(body, fx.GraphModule):
            continue
        inner = Report()
        for _, found in _candidates(body.graph, on, options, inner):
            call = found.call if isinstance(found, Miss) else found.anchor
            inner.declined.append(declined(found, call.node, "it is in the body of a higher-order op (checkpoint, cond)"))
        report.declined += [replace(record, body=name) for record in inner.declined]
        decline_nested(body.graph, on, options, report, f"{name}.")


def count(report: Report) -> None:
    """Adds a compiled graph's report to Dynamo's counters."""
    for record in report.fused:
        counters["fxfuse"][record.chain] += 1
    for record in report.declined:
        counters["fxfuse_declined"][record.chain] += 1


def needs_values(graph: fx.Graph) -> bool:
    """Whether any op that a chain could hold lacks an example value, so that shapes must be propagated before `fuse`."""
    vocabularies = {chain.vocabulary for chain in chains()}
    return any(value_of(node) is None and any(vocabulary.read(node) for vocabulary in vocabularies) for node in graph.nodes)


def _chains_on(options: Options) -> list[Chain]:
    return [chain for chain in chains() if options.passes is None or chain.name in options.passes]


def _candidates(graph: fx.Graph, on: Sequence[Chain], options: Options, report: Report) -> Iterator[tuple[GraphView, Match | Miss]]:
    """Every candidate of every chain, with the chain's view of the graph; a chain that cannot read the graph is declined."""
    views = Views(graph)
    for chain in on:
        try:
            view = views.of(chain)
        except PassError as error:
            report.declined.append(_mistaken(error, unread(chain, error), options))
            continue
        for found in find(view, chain):
            yield view, found


def _decision(view: GraphView, found: Match | Miss, terms: Terms, taken: Mapping[fx.Node, str]) -> Plan | Declined:
    try:
        return decide(view, found, terms, taken)
    except PassError as error:
        return _mistaken(error, declined(found, found.anchor.node, str(error)), terms.options)


def _left(report: Report, plans: list[Plan]) -> list[Declined]:
    """The declined candidates that really stay as they are: the nodes of others are all fused, as another chain."""
    fused = {node.name for p in plans for node in p.match.in_order}
    return [record for record in report.declined if record.body or not fused.issuperset(record.nodes)]


def _rewritten(graph: fx.Graph, plans: list[Plan], options: Options, report: Report) -> tuple[fx.Graph, list[Plan]]:
    """The rewritten graph and the plans that it came of: one whose replacement is no good is declined, and the others are made anew."""
    while plans:
        try:
            return rewritten(graph, [(p.match, p.weighed.taken.replace) for p in plans]), plans
        except PassError as error:
            report.declined.append(_mistaken(error, declined(error.match, error.match.anchor.node, str(error)), options))
            plans = [p for p in plans if p.match is not error.match]
    return graph, plans


def _mistaken(error: PassError, record: Declined, options: Options) -> Declined:
    """The record of a candidate that a mistake in its chain left alone; it is raised under `fxfuse.strict`."""
    if options.strict:
        raise error
    log.error("fxfuse: %s", error, exc_info=error.__cause__)
    return record
