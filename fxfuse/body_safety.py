"""What must hold besides before a chain in the body of a higher-order op may be replaced: what the body itself does not show."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from . import gradients
from .bodies import Body
from .match import Match
from .safety import Refusal, written_behind


def refusal(body: Body, match: Match) -> Refusal | None:
    """The first reason why replacing a match in a body would not be safe, or None."""
    checks = (transforms, writes_behind_calls, selective_checkpoints)
    return next((found for check in checks for found in check(body, match)), None)


def transforms(body: Body, match: Match) -> Iterator[Refusal]:
    """A transform that is open around a call of the body."""
    for site in (site for outer in body.around for site in outer.sites):
        view = site.outer.view
        if view.transform_depth[bisect_right(view.state_changes, view.order[site.node])]:
            yield match.anchor.node, "the chain is inside a torch.func transform (vmap, grad, jvp), for which the fused ops have no rules"


def writes_behind_calls(body: Body, match: Match) -> Iterator[Refusal]:
    """As `safety.writes_behind`, for what is written behind a call of the body to what was given for the chain's inputs."""
    if not gradients.is_needed(match):
        return
    pending: list[tuple[Body, Any]] = [(body, argument) for argument in match.inputs]
    for inner, argument in pending:
        storage = inner.view.storage_of(argument)
        for site in inner.sites if storage is not None else ():
            given = [operand for placeholder, operand in inner.given(site) if inner.view.storage_of(placeholder) == storage]
            for operand in given:
                yield from written_behind(site.outer.view, operand, site.outer.view.order[site.node])
            pending += [(site.outer, operand) for operand in given]


def selective_checkpoints(body: Body, match: Match) -> Iterator[Refusal]:
    """A policy that saves what an op of the chain gives: the fused op has no such value."""
    for saved in body.saved:
        if isinstance(saved, str):
            yield match.anchor.node, f"the policy of the selective checkpoint around it cannot be asked ({saved}); call the chain outside of it"
            continue
        for node in match.in_order:
            if node.name in saved:
                yield node, (
                    f"the policy of the selective checkpoint around it saves the result of {saved[node.name]}, which a fused op does not have; "
                    "let it recompute that, or call the chain outside of it"
                )
