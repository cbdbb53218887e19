"""Weighing the ways to compute a match: which are possible, what each would take, and the one to take."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import gradients
from .chain import Implementation, first_failure
from .choose import Cost, decide, rates_of
from .guarded import Guarded
from .match import Match
from .options import Options
from .report import Candidate

INDUCTOR = "inductor"

# Measured milliseconds by op name, and of Inductor under INDUCTOR; or the sentence why nothing was timed.
Timer = Callable[[Match, Sequence[Implementation]], "Mapping[str, float] | str"]


@dataclass(frozen=True)
class Weighed:
    """The implementation to take, None to leave the match to Inductor; why; and everything that was weighed, in the chain's order."""

    taken: Implementation | None
    why: str
    candidates: tuple[Candidate, ...]


def weigh(match: Match, options: Options, timer: Timer | None, missing: str | None = None) -> Weighed:
    """Weighs a match's implementations by measured times where there is a timer and `fxfuse.select` is "auto", else by the rule.

    missing: why the ops of fxfuse's own cannot be used, if they cannot. Raises PassError for a mistake in the chain.
    """
    reasons = {i.op: _reason(match, i, options, missing) for i in match.chain.implementations}
    possible = [i for i in match.chain.implementations if reasons[i.op] is None]
    impossible = [Candidate(op, reason) for op, reason in reasons.items() if reason is not None]
    if timer is None or options.select != "auto" or not possible:
        return _by_rule(match, options, possible, impossible)
    times = timer(match, possible)
    if isinstance(times, str):
        return _by_rule(match, options, possible, impossible, f"not timed ({times}); ")
    return _by_times(match, times, possible, impossible)


def _reason(match: Match, implementation: Implementation, options: Options, missing: str | None) -> str | None:
    if missing is not None and implementation.is_own:
        return missing
    taken = Guarded(match.chain.name, "takes", implementation.takes).conditions(**match.calls)
    return first_failure(itertools.chain(taken, gradients.conditions(match, implementation.qualified, options.select)))


def _cost(match: Match, implementation: Implementation) -> Cost | None:
    if implementation.cost is None:
        return None
    guarded, expected = Guarded(match.chain.name, "cost", implementation.cost), "it should return a fxfuse.Cost"
    cost = guarded(expected, **match.calls)
    if not isinstance(cost, Cost):
        raise guarded.mistake(f"returns {cost!r}", expected)
    return cost


def _by_rule(match: Match, options: Options, possible: list[Implementation], impossible: list[Candidate], note: str = "") -> Weighed:
    rates = rates_of(match.anchor.value.device)
    costs = {i: _cost(match, i) for i in possible}
    choices = {i: decide(cost, rates, options.select) for i, cost in costs.items()}

    def candidate(i: Implementation, verdict: str) -> Candidate:
        return Candidate(i.op, verdict, choices[i].us, choices[i].inductor_us, kernel=_kernel(costs[i]))

    taken = next((i for i, choice in choices.items() if choice.taken), None)
    if taken is None:
        left = [candidate(i, f"left to Inductor: {note}{choice.why}") for i, choice in choices.items()]
        return Weighed(None, _sentence(impossible + left), tuple(impossible + left))
    weighed = [candidate(i, choice.why) for i, choice in choices.items() if i is taken or options.select == "auto" or not choice.taken]
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
