"""The pipeline over one graph: view, find, check, choose, rewrite. It knows no chain and never leaves a graph half rewritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx
from torch._dynamo.utils import counters

from . import library
from .chain import Chain, chains, first_failure
from .match import Match, Miss, find
from .options import Options
from .report import Declined, Fused, Report, location_of, text_of
from .replacement import rewritten
from .safety import refusal
from .values import attribute_of, value_of
from .view import GraphView, read
from .weigh import Timer, Weighed, weigh

# Whether the kernels for a device ("cpu", "cuda:0") can be used: None, or the sentence why not.
Availability = Callable[[str], "str | None"]


class NotFusedError(RuntimeError):
    """Under `fxfuse.strict`, a candidate was not fused. report: what was found; nothing was rewritten."""

    def __init__(self, report: Report) -> None:
        super().__init__("; ".join(f"{d.chain} at {d.location or d.node}: {d.reason}" for d in report.declined))
        self.report = report


@dataclass(frozen=True)
class Plan:
    """A match and what came of weighing its implementations: one of them was taken."""

    match: Match
    weighed: Weighed


def fuse(
    graph: fx.Graph, options: Options, unavailable: Availability = library.unavailable, timer: Timer | None = None
) -> tuple[fx.Graph, Report]:
    """The graph with its chains fused, and what was done. With nothing to fuse, the very same graph object.

    graph: nodes carry fake tensors as `meta["example_value"]` or `meta["val"]`. timer: measures candidates instead of predicting them.
    Raises NotFusedError under `options.strict` if a candidate is declined.
    """
    report = Report(graphs=1)
    view = GraphView(graph)
    plans = plan(view, options, unavailable, timer, report)
    decline_nested(graph, options, report)
    if options.strict and report.declined:
        raise NotFusedError(report)
    if not plans:
        return graph, report
    result = rewritten(graph, [(p.match, p.weighed.taken.replace) for p in plans])
    report.fused += [_fused(p) for p in plans]
    return result, report


def plan(view: GraphView, options: Options, unavailable: Availability, timer: Timer | None, report: Report) -> list[Plan]:
    """Chooses for every candidate of every chain that is on; what is declined goes into the report. A node serves one plan at most."""
    plans: list[Plan] = []
    taken: set[fx.Node] = set()
    for chain in _chains_on(options):
        for found in find(view, chain):
            decision = _decide(view, found, options, unavailable, timer, taken)
            if isinstance(decision, Plan):
                plans.append(decision)
                taken |= decision.match.nodes
            else:
                report.declined.append(decision)
    return sorted(plans, key=lambda p: view.order[p.match.anchor.node])


def decline_nested(graph: fx.Graph, options: Options, report: Report, path: str = "") -> None:
    """Declines the candidates in the bodies of higher-order ops (checkpoint, cond): only the graph itself is rewritten."""
    bodies = {f"{path}{node.target}": attribute_of(node) for node in graph.nodes if node.op == "get_attr"}
    for name, body in bodies.items():
        if not isinstance(body, fx.GraphModule):
            continue
        view = GraphView(body.graph)
        for chain in _chains_on(options):
            for found in find(view, chain):
                call = found.call if isinstance(found, Miss) else found.anchor
                declined = _declined(found, call.node, "it is in the body of a higher-order op (checkpoint, cond)")
                report.declined.append(replace(declined, body=name))
        decline_nested(body.graph, options, report, f"{name}.")


def count(report: Report) -> None:
    """Adds a compiled graph's report to Dynamo's counters."""
    for fused in report.fused:
        counters["fxfuse"][fused.chain] += 1
    for declined in report.declined:
        counters["fxfuse_declined"][declined.chain] += 1


def _chains_on(options: Options) -> list[Chain]:
    return [chain for chain in chains() if options.passes is None or chain.name in options.passes]


def _decide(
    view: GraphView, found: Match | Miss, options: Options, unavailable: Availability, timer: Timer | None, taken: set[fx.Node]
) -> Plan | Declined:
    if isinstance(found, Miss):
        return _declined(found, found.call.node, found.reason)
    overlap = next((node for node in found.in_order if node in taken), None)
    if overlap is not None:
        return _declined(found, overlap, f"{overlap.name} already belongs to another fused chain")
    unsafe = refusal(view, found)
    if unsafe is not None:
        return _declined(found, *unsafe)
    reason = first_failure(found.chain.requires(**found.calls))
    if reason is not None:
        return _declined(found, found.anchor.node, reason)
    if options.select == "never":
        return _declined(found, found.anchor.node, 'fxfuse.select is "never"')
    missing = unavailable(str(found.anchor.value.device))
    if missing is not None:
        return _declined(found, found.anchor.node, missing)
    weighed = weigh(found, options, timer)
    if weighed.taken is None:
        return replace(_declined(found, found.anchor.node, weighed.why), candidates=weighed.candidates)
    return Plan(found, weighed)


def _declined(found: Match | Miss, node: fx.Node, reason: str) -> Declined:
    reached = found.reached if isinstance(found, Miss) else list(found.calls)[-1]
    nodes = tuple(inner.name for inner in found.in_order)
    return Declined(found.chain.name, reached, node.name, reason, location_of(node), nodes)


def _fused(plan: Plan) -> Fused:
    match, weighed = plan.match, plan.weighed
    values = (match.anchor.tensor("input"), match.anchor.value, match.last.value)
    shapes = " -> ".join(text_of(value.shape) for value in values)
    names = tuple(node.name for node in match.in_order)
    return Fused(match.chain.name, weighed.taken.op, names, shapes, weighed.why, location_of(match.anchor.node), weighed.candidates)


def needs_values(graph: fx.Graph) -> bool:
    """Whether any op that a chain could hold lacks an example value, so that shapes must be propagated before `fuse`."""
    return any(value_of(node) is None for node in graph.nodes if read(node) is not None)
