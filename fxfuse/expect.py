"""Expectations: how often each chain must be fused in a model, and what is said of one that does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .chain import Chain, chain_names, chains
from .options import Options
from .report import Declined, Fused, Report, alike_ones, places


@dataclass(frozen=True)
class Unmet:
    """An expectation that does not hold, with the chain's records. absent: why there is no declined candidate to show; else empty.
    looked: whether any graph was there to look at: an expectation of a model of which nothing was captured never holds."""

    chain: str
    expected: int
    fused: tuple[Fused, ...]
    declined: tuple[Declined, ...]
    absent: str
    looked: bool = True

    @property
    def headline(self) -> str:
        """What was expected and what was found."""
        wanted = f"to be fused {_times(self.expected)}" if self.expected else "not to be fused"
        counts = f"it fused {_times(len(self.fused))} and declined {_times(len(self.declined))}" if self.looked else "no graph"
        return f"expected {self.chain} {wanted}, found {counts}" + (f": {self.absent}" if self.absent else "")

    def __str__(self) -> str:
        """The headline with the records of the chain, like ones folded: where it was fused, where it was declined and why."""
        found = [f"fused at {places(group)}" for group in alike_ones(self.fused)]
        found += [f"declined at {places(group)} behind {group[0].reached}: {group[0].reason}" for group in alike_ones(self.declined)]
        return "; ".join([self.headline, *found])


def check(expected: Mapping[str, int]) -> None:
    """Raises ValueError for a chain that does not exist or a number of times that cannot be, TypeError where `expected` is no mapping."""
    if not isinstance(expected, Mapping):
        raise TypeError(f"expected {expected!r} is no mapping; give how often each chain is fused, such as {{'conv_gelu_pool': 1}}")
    for name, times in expected.items():
        if name not in chain_names():
            raise ValueError(f"{name!r} is no chain; the chains are {', '.join(chain_names())}")
        if isinstance(times, bool) or not isinstance(times, int) or times < 0:
            raise ValueError(f"{name}={times!r}: a chain is expected a number of times, 0 or more")


def unmet(report: Report, expected: Mapping[str, int], options: Options) -> list[Unmet]:
    """The expectations that do not hold; chains that are not named in `expected` are not looked at."""
    found = (_found(report, chain, expected[chain.name], options) for chain in chains() if chain.name in expected)
    return [one for one in found if len(one.fused) != one.expected or not one.looked]


def _found(report: Report, chain: Chain, times: int, options: Options) -> Unmet:
    fused = tuple(record for record in report.fused if record.chain == chain.name)
    declined = tuple(record for record in report.declined if record.chain == chain.name)
    looked = report.graphs > 0
    missing = not looked or (len(fused) < times and not declined)
    return Unmet(chain.name, times, fused, declined, _absent(report, chain, bool(fused), options) if missing else "", looked)


def _absent(report: Report, chain: Chain, some: bool, options: Options) -> str:
    """Why no candidate was there to decline."""
    if report.graphs and options.passes is not None and chain.name not in options.passes:
        return "fxfuse.passes leaves it out"
    if report.stopped:
        return f"stopped: {report.stopped}"
    following = chain.steps[1:]
    until = next((i for i, step in enumerate(following) if not step.optional), 0)
    words = [word for step in following[: until + 1] for word in step.words]
    anchor = " or ".join(chain.steps[0].words)
    return f"no {'other ' if some else ''}{anchor}{chain.over} is followed by {' or '.join(words)}"


def _times(number: int) -> str:
    return f"{number} time{'' if number == 1 else 's'}"
