"""Rewriting: matched nodes are replaced in a copy of the graph, which takes the original's place only once it is whole and lints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from . import torch_private
from .emitter import Emitter
from .guarded import Guarded, PassError
from .match import Match

# What a replacement does, for the sentence about one that raises.
EMITS = "it should call emit(op, ...) for each op and return the last node"


def rewritten(graph: fx.Graph, replacements: Sequence[tuple[Match, Callable[..., fx.Node]]]) -> fx.Graph:
    """A copy of `graph` with each match replaced by what its `replace(emit, **calls)` emits. The original is not touched.

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
    return duplicate


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
