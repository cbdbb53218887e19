"""Coverage: for every chain, its candidates over many reports, and the reasons of those that were declined. No torch is imported here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .printing import alike, printable, wrapped

if TYPE_CHECKING:
    from .listeners import How
    from .report import Report

SHOWN_REASONS = 10


class Coverage:
    """Counts of all reports that were added: graphs by how they came (compiled, explained), and by chain what was fused and declined."""

    def __init__(self) -> None:
        self.graphs: Counter[str] = Counter()
        self.fused: Counter[str] = Counter()
        self.reasons: dict[str, Counter[str]] = {}
        self.stopped: Counter[str] = Counter()

    def add(self, report: Report, how: How) -> None:
        """Counts a report."""
        from .chain import chain_names

        declined = ((record.chain, record.reason, 1) for record in report.declined)
        self._count({how: report.graphs}, Counter(record.chain for record in report.fused), chain_names(), declined)
        if report.stopped:
            self.stopped[report.stopped] += 1

    def merge(self, other: Mapping[str, Any]) -> None:
        """Adds the counts of another process, as its `as_dict` gave them."""
        declined = ((chain, reason, times) for chain, reasons in other["reasons"].items() for reason, times in reasons.items())
        self._count(other["graphs"], other["fused"], other["reasons"], declined)
        self.stopped.update(other["stopped"])

    def as_dict(self) -> dict[str, Any]:
        """The counts as plain dicts, for another process."""
        reasons = {chain: dict(counts) for chain, counts in self.reasons.items()}
        return {"graphs": dict(self.graphs), "fused": dict(self.fused), "reasons": reasons, "stopped": dict(self.stopped)}

    def __str__(self) -> str:
        """The table; a sentence where there was no graph. Then what stopped fxfuse."""
        stopped = [f"stopped, {times} time{'' if times == 1 else 's'}: {sentence}" for sentence, times in sorted(self.stopped.items())]
        if not self.graphs.total():
            return printable("\n".join(['no graph was compiled through backend="fxfuse" or explained with assert_fused', *stopped]))
        rows = [self._row(chain) for chain in sorted(self.reasons)]
        headers = ("chain", "candidates", "fused", "declined", "reasons")
        ways = ", ".join(f"{count} {how}" for how, count in sorted(self.graphs.items()) if count)
        total = self.graphs.total()
        table = wrapped(rows, headers, (None, None, None, None, 72), ("left", "right", "right", "right", "left"))
        return printable("\n".join([f"{total} graph{'' if total == 1 else 's'}: {ways}", table, *stopped]))

    def _row(self, chain: str) -> tuple[Any, ...]:
        reasons = self.reasons[chain]
        declined, fused = reasons.total(), self.fused[chain]
        ordered = sorted(_folded(reasons).items(), key=lambda item: (-item[1], item[0]))
        lines = [f"{times} x {reason}" for reason, times in ordered[:SHOWN_REASONS]]
        rest = ordered[SHOWN_REASONS:]
        lines += [f"{sum(times for _, times in rest)} x {len(rest)} other reasons"] if rest else []
        return chain, fused + declined, fused, declined, "\n".join(lines)

    def _count(
        self, graphs: Mapping[str, int], fused: Mapping[str, int], chains: Iterable[str], declined: Iterable[tuple[str, str, int]]
    ) -> None:
        self.graphs.update(graphs)
        self.fused.update(fused)
        for chain in chains:
            self.reasons.setdefault(chain, Counter())
        for chain, reason, times in declined:
            self.reasons.setdefault(chain, Counter())[reason] += times


def _folded(reasons: Mapping[str, int]) -> Counter[str]:
    """The reasons of which a reader need be told one only, as a report folds them, under the commonest of them."""
    shown: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason, times in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        counts[shown.setdefault(alike(reason), reason)] += times
    return counts
