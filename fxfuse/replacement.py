"""Rewriting: matched nodes are replaced in a copy of the graph, which takes the original's place only once it is whole and lints."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from . import torch_private
from .emitter import STANDS_FOR, Emitter
from .guarded import Guarded, PassError
from .higher_order import INVOKE_SUBGRAPH, calls_op
from .match import Match
from .vocabulary import NONE

# What a replacement does, for the sentence about one that raises.
EMITS = "it should call emit(op, ...) for each op and return the last node"


def rewritten(
    graph: fx.Graph, replacements: Sequence[tuple[Match, Callable[..., fx.Node]]], bodies: Mapping[str, fx.GraphModule] = NONE
) -> fx.Graph:
    """A copy of `graph` with each match replaced by what its `replace(emit, **calls)` emits. The original is not touched.

    bodies: for attributes that hold the bodies of higher-order ops, by name, what takes their place. The copy belongs to the same module as the
    original, or where it reads new bodies to one of its own, which has all else in common with that.
    Raises PassError, with the match, for the first replacement that is no good.
    """
    duplicate = torch_private.copy_of(graph)
    copied = dict(zip(graph.nodes, duplicate.nodes, strict=True))
    for old, new in copied.items():
        # Dynamo marks placeholders with attributes of its own (`_dynamo_source`), which AOTAutograd asks for and a copy lacks.
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
    for match, replace in replacements:
        try:
            copied[match.last.result] = _replaced(graph, duplicate, copied, match, replace)
        except PassError as error:
            error.match = match
            raise
    duplicate.lint()
    duplicate.owning_module = graph.owning_module
    if bodies:
        _give_bodies(duplicate, bodies)
    return duplicate


def body_made(graph: fx.Graph, name: str, body: fx.GraphModule) -> fx.GraphModule:
    """The body of a higher-order op that a rewritten graph becomes, with the meta of the one that it takes the place of. name: that one's."""
    module = graph.owning_module if graph.owning_module is not body else _module(graph, body, {})
    module.meta[STANDS_FOR] = name
    return module


def _give_bodies(duplicate: fx.Graph, bodies: Mapping[str, fx.GraphModule]) -> None:
    owner = duplicate.owning_module
    fresh = {name: _fresh(owner, f"{name.replace('.', '_')}_fused") for name in bodies}
    for node in duplicate.find_nodes(op="get_attr"):
        if node.target in bodies:
            node.target = fresh[node.target]
            for call in list(node.users):
                _rename_region(call)
    _module(duplicate, owner, {fresh[name]: body for name, body in bodies.items()})


def _module(graph: fx.Graph, owner: fx.GraphModule, bodies: Mapping[str, fx.GraphModule]) -> fx.GraphModule:
    held = {node.target for node in graph.nodes if node.op in ("get_attr", "call_module") and node.target not in bodies}
    module = fx.GraphModule({**{name: operator.attrgetter(name)(owner) for name in held}, **bodies}, graph)
    module.meta, module.training = dict(owner.meta), owner.training
    return module


def _fresh(owner: fx.GraphModule, name: str) -> str:
    return next(fresh for fresh in itertools.chain((name,), (f"{name}_{number}" for number in itertools.count(1))) if not hasattr(owner, fresh))


def _rename_region(call: fx.Node) -> None:
    """By its identifier AOTAutograd knows the body of an invoke_subgraph again, in all that is compiled for one graph of Dynamo's."""
    if calls_op(call, INVOKE_SUBGRAPH):
        call.update_arg(1, f"{call.args[1]}_fused")


def _replaced(
    graph: fx.Graph, duplicate: fx.Graph, copied: Mapping[fx.Node, fx.Node], match: Match, replace: Callable[..., fx.Node]
) -> fx.Node:
    guarded = Guarded(match.chain.name, "replace", replace)
    emit = Emitter(duplicate, copied, match, guarded)
    try:
        result = guarded(EMITS, emit, **match.calls)
    finally:
        strangers = [node for node in graph.nodes if node not in copied] if len(graph.nodes) > len(copied) else []
        for node in reversed(strangers):
            graph.erase_node(node)
    if strangers:
        raise guarded.mistake(f"adds {strangers[0].name} to the model's own graph", EMITS)
    emit.finish(result)
    return result
