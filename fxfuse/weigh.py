"""Weighing the ways to compute a match: which are possible, what each would take, and the one to take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from . import gradients
from .chain import Implementation, first_failure
from .choose import decide, demand, rates_of
from .cost import BackwardCost, Cost, Training
from .guarded import Guarded
from .match import Match
from .options import Options
from .report import Candidate

INDUCTOR = "inductor"
# The commonest call of all trains nothing and needs gradients all the same.
FOR_INFERENCE = (
    "for inference call the model under torch.no_grad() or torch.inference_mode() (model.eval() alone does not turn gradients off); to train with "
    'it fused all the same set options={"fxfuse.backward": "save"} or "recompute"'
)

T = TypeVar("T")

# Measured milliseconds by op name, and of Inductor under INDUCTOR; or the sentence why nothing was timed.
Timer = Callable[[Match, Sequence[Implementation]], "Mapping[str, float] | str"]


@dataclass(frozen=True)
class Weighed:
    """The implementation to take, None to leave the match to Inductor; why; and everything that was weighed, in the chain's order."""

    taken: Implementation | None
    why: str
    candidates: tuple[Candidate, ...]


def weigh(match: Match, options: Options, timer: Timer | None, missing: str | None = None) -> Weighed:
    """Weighs a match's implementations by measured times where there is a timer and no option says which to take, else by the rule.

    missing: why the ops of fxfuse's own cannot be used, if they cannot. Raises PassError for a mistake in the chain.
    """
    reasons = {i.op: _reason(match, i, missing) for i in match.chain.implementations}
    possible = [i for i in match.chain.implementations if reasons[i.op] is None]
    impossible = [Candidate(op, reason) for op, reason in reasons.items() if reason is not None]
    training = gradients.training_of(match)
    asked = demand(options.select, None if training is None else options.backward)
    if timer is None or asked or not possible:
        return _by_rule(match, options, training, possible, impossible)
    times = timer(match, possible)
    if isinstance(times, str):
        return _by_rule(match, options, training, possible, impossible, f"not timed ({times}); ")
    return _by_times(match, times, possible, impossible)


def _reason(match: Match, implementation: Implementation, missing: str | None) -> str | None:
    if missing is not None and implementation.is_own:
        return missing
    taken = Guarded(match.chain.name, "takes", implementation.takes).conditions(**match.calls)
    return first_failure(itertools.chain(taken, gradients.conditions(match, implementation.qualified)))


def _cost(match: Match, implementation: Implementation, training: Training | None = None) -> Cost | None:
    """training: None too where the cost of the forward is enough."""
    if implementation.cost is None:
        return None
    cost = _stated(match, "cost", implementation.cost, Cost)
    if training is None or implementation.backward_cost is None:
        return cost
    return replace(cost, backward=_stated(match, "backward_cost", implementation.backward_cost, BackwardCost, training))


def _stated(match: Match, role: str, function: Callable[..., Any], kind: type[T], *args: Any) -> T:
    guarded, expected = Guarded(match.chain.name, role, function), f"it should return a fxfuse.{kind.__name__}"
    stated = guarded(expected, *args, **match.calls)
    if not isinstance(stated, kind):
        raise guarded.mistake(f"returns {stated!r}", expected)
    return stated


def _by_rule(
    match: Match, options: Options, training: Training | None, possible: list[Implementation], impossible: list[Candidate], note: str = ""
) -> Weighed:
    rates, backward = rates_of(match.anchor.value.device), None if training is None else options.backward
    costs = {i: _cost(match, i, training) for i in possible}
    choices = {i: decide(cost, rates, options.select, backward) for i, cost in costs.items()}

    def candidate(i: Implementation, verdict: str) -> Candidate:
        return Candidate(i.op, verdict, choices[i].us, choices[i].inductor_us, kernel=_kernel(costs[i]))

    taken = next((i for i, choice in choices.items() if choice.taken), None)
    if taken is None:
        left = [candidate(i, f"left to Inductor: {note}{choice.why}") for i, choice in choices.items()]
        way_out = f"; {FOR_INFERENCE}" if training is not None and left else ""
        return Weighed(None, _sentence(impossible + left) + way_out, tuple(impossible + left))
    by_rule = not demand(options.select, backward)
    weighed = [candidate(i, choice.why) for i, choice in choices.items() if i is taken or by_rule or not choice.taken]
    return Weighed(taken, note + choices[taken].why, tuple(impossible + weighed))


def _by_times(match: Match, times: Mapping[str, float], possible: list[Implementation], impossible: list[Candidate]) -> Weighed:
    fastest = min(possible, key=lambda implementation: times[implementation.op])
    kernels = {i.op: _kernel(_cost(match, i)) for i in possible}
    theirs = times[INDUCTOR] * 1e3
    measured = [Candidate(op, f"measured {ms * 1e3:.0f} us", ms * 1e3, theirs, True, kernels.get(op, "")) for op, ms in times.items()]
    candidates = (*impossible, *measured)
    if times[fastest.op] > times[INDUCTOR]:
        return Weighed(None, f"Inductor is the fastest: {_sentence(candidates)}", candidates)
    return Weighed(fastest, f"measured {times[fastest.op] * 1e3:.0f} us, the fastest", candidates)


def _kernel(cost: Cost | None) -> str:
    """What the report calls the implementation: nothing where its cost does not tell."""
    if cost is None:
        return ""
    return "fused" if cost.op.flops else "tail"


def _sentence(candidates: Sequence[Candidate]) -> str:
    """What is said of each op, once for those of which the same is said."""
    ops: dict[str, list[str]] = {}
    for candidate in candidates:
        ops.setdefault(candidate.verdict, []).append(candidate.op)
    return "; ".join(f"{', '.join(names)}: {verdict}" for verdict, names in ops.items())
