"""The pipeline over one graph and the bodies of its higher-order ops: view, find, check, choose, rewrite. It knows no chain and never leaves a
graph half rewritten."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import fx
from torch._dynamo.utils import counters

from . import body_safety, library
from .bodies import Body, bodies_of
from .chain import Chain, chains
from .decide import Availability, Plan, Terms, decide, declined, unread
from .guarded import PassError
from .higher_order import body_of
from .match import Match, Miss, find
from .options import Options
from .replacement import body_made, rewritten
from .report import Declined, Fused, Report, alike_ones, places
from .values import value_of
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
    """The graph with its chains and those of the bodies below it fused, and what was done. With nothing to fuse, the very same graph object.

    Its module and the bodies stay as they are: what the graph reads of them, and new bodies, the `owning_module` of the result has (see
    `bodies.adopt`).

    graph: nodes carry fake tensors as `meta["example_value"]` or `meta["val"]`. timer: measures candidates instead of predicting them.
    Each chain is looked for once, in the graph as it is given: what a replacement is made of is not looked at again.
    Raises NotFusedError under `options.strict` if a candidate is declined whose nodes no other chain fuses, PassError if the reason is a mistake in its chain.
    """
    report, terms = Report(graphs=1), Terms(options, unavailable, timer)
    on = _chains_on(options)
    plans = {body: plan(body, on, terms, report) for body in bodies_of(graph)}
    if options.strict and _left(report, plans):
        raise NotFusedError(report)
    return _rewritten(graph, plans, options, report), report


def plan(body: Body, on: Sequence[Chain], terms: Terms, report: Report) -> list[Plan]:
    """Chooses for every candidate in one graph of every chain that is on; what is declined goes into the report. A node serves one plan at
    most: that of the chain that comes first."""
    plans: list[Plan] = []
    taken: dict[fx.Node, str] = {}
    inner, terms = Report(), replace(terms, around=partial(body_safety.refusal, body))
    with body.state():
        for view, found in _candidates(body, on, terms.options, inner):
            decision = _decision(body, view, found, terms, taken)
            if isinstance(decision, Plan):
                plans.append(decision)
                taken |= dict.fromkeys(decision.match.nodes, decision.match.chain.name)
            else:
                inner.declined.append(decision)
    report.declined += [replace(record, body=body.name) for record in inner.declined]
    order = {node: index for index, node in enumerate(body.graph.nodes)}
    return sorted(plans, key=lambda p: order[p.match.anchor.node])


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


def _candidates(body: Body, on: Sequence[Chain], options: Options, report: Report) -> Iterator[tuple[GraphView, Match | Miss]]:
    """Every candidate of every chain, with the chain's view of the graph; a chain that cannot read the graph is declined."""
    views = Views(body.graph, body.same_storage)
    for chain in on:
        try:
            view = views.of(chain)
        except PassError as error:
            report.declined.append(_mistaken(error, unread(chain, error), options))
            continue
        for found in find(view, chain):
            yield view, found


def _decision(body: Body, view: GraphView, found: Match | Miss, terms: Terms, taken: Mapping[fx.Node, str]) -> Plan | Declined:
    if body.other_op:
        node = found.call.node if isinstance(found, Miss) else found.anchor.node
        return declined(found, node, f"it is in the body of {body.other_op}, which fxfuse leaves as it is; call the chain outside of it")
    try:
        return decide(view, found, terms, taken)
    except PassError as error:
        return _mistaken(error, declined(found, found.anchor.node, str(error)), terms.options)


def _left(report: Report, plans: Mapping[Body, list[Plan]]) -> list[Declined]:
    """The declined candidates that really stay as they are: the nodes of others are all fused, as another chain, or begin none."""
    fused = {(body.name, node.name) for body, of_body in plans.items() for p in of_body for node in p.match.in_order}
    begun = (record for record in report.declined if not record.is_parted)
    return [record for record in begun if not fused.issuperset((record.body, name) for name in record.nodes)]


def _rewritten(graph: fx.Graph, plans: Mapping[Body, list[Plan]], options: Options, report: Report) -> fx.Graph:
    """The rewritten graph, which reads rewritten bodies, from the innermost out. Neither the original nor a body of its is touched."""
    made: dict[fx.GraphModule, fx.GraphModule] = {}
    fused: list[list[Fused]] = []
    result = graph
    for body, of_body in reversed(plans.items()):
        read = {node.target: made[inner] for node in body.graph.find_nodes(op="get_attr") if (inner := body_of(node)) in made}
        with body.state():
            result, done = _rewritten_one(body, of_body, read, options, report)
            fused.append([replace(p.fused(), body=body.name, calls=body.calls) for p in done])
        if body.module is not None and result is not body.graph:
            made[body.module] = body_made(result, body.name, body.graph.owning_module)
    report.fused += [record for records in reversed(fused) for record in records]
    return result


def _rewritten_one(
    body: Body, plans: list[Plan], read: Mapping[str, fx.GraphModule], options: Options, report: Report
) -> tuple[fx.Graph, list[Plan]]:
    """A graph rewritten, and the plans that it came of: one whose replacement is no good is declined, and the others are made anew."""
    while plans or read:
        try:
            return rewritten(body.graph, [(p.match, p.weighed.taken.replace) for p in plans], read), plans
        except PassError as error:
            record = _mistaken(error, declined(error.match, error.match.anchor.node, str(error)), options)
            report.declined.append(replace(record, body=body.name))
            plans = [p for p in plans if p.match is not error.match]
    return body.graph, plans


def _mistaken(error: PassError, record: Declined, options: Options) -> Declined:
    """The record of a candidate that a mistake in its chain left alone; it is raised under `fxfuse.strict`."""
    if options.strict:
        raise error
    log.error("fxfuse: %s", error, exc_info=error.__cause__)
    return record
