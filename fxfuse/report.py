"""What fxfuse did to a model and why: records of fused and declined chains, and the tables that show them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from . import listeners, torch_private
from .places import relative, short
from .printing import fitting, folded, height, likeness, printable, times, wrapped

KEPT_REPORTS = 64
# What to change, for every sentence.
WHY_NOT = os.path.join(os.path.dirname(__file__), "why_not.md")
# Of a row of several candidates whose sentences are alike, not equal.
DIFFER = "(of the first; others differ in numbers or names)"
# Lines that a report may have to be seen at once, on a screen of 140 columns.
SCREEN = 50


@dataclass(frozen=True)
class Candidate:
    """One way to compute a chain: an op (with its namespace if that is not fxfuse's), or "inductor" where it was timed; its predicted or measured
    time, or why it cannot be.

    us, inductor_us: its microseconds, and those of Inductor instead (predicted: at least); None where there is no figure.
    measured: they were timed, not predicted. kernel: "fused" with the convolution inside, "tail" behind it, "" where it cannot be or is Inductor's.
    """

    op: str
    verdict: str
    us: float | None = None
    inductor_us: float | None = None
    measured: bool = False
    kernel: str = ""


@dataclass(frozen=True)
class Fused:
    """A chain that was replaced.

    shapes: "input -> convolution output -> result" (of another anchor its output), each as [N, C, ...]; symbolic sizes by name.
    choice: why this implementation was taken. candidates: every way that was weighed, this one included.
    location: file:line of the anchor in the user's model. module: the path of its module there ("blocks.2.conv"). Both are empty where the
    graph does not say. graph: number of its graph within the report.
    body: the attribute that holds their graph, if it is the body of a higher-order op. calls: how often one run of the module calls that graph.
    """

    chain: str
    op: str
    nodes: tuple[str, ...]
    shapes: str
    choice: str
    location: str
    candidates: tuple[Candidate, ...] = ()
    graph: int = 0
    body: str = ""
    calls: int = 1
    module: str = ""


@dataclass(frozen=True)
class Declined:
    """A candidate that was left as it was: how far the match got, the node where it stopped, and a sentence to act on.

    nodes: the chain's nodes as far as the match got. body: the attribute that holds their graph, if it is the body of a higher-order op.
    location: file:line, in the user's model, of the node where it stopped. module: the path of the anchor's module ("blocks.2.conv"). Both are
    empty where the graph does not say. candidates: every way that was weighed, where it came to that. graph: number of its graph within the
    report. is_parted: whether other ops stand where the chain's second op should, and the rest of the chain behind them: `fxfuse.strict` lets such
    a one pass.
    """

    chain: str
    reached: str
    node: str
    reason: str
    location: str
    nodes: tuple[str, ...] = ()
    body: str = ""
    candidates: tuple[Candidate, ...] = ()
    graph: int = 0
    module: str = ""
    is_parted: bool = False


Record = TypeVar("Record", Fused, Declined)


@dataclass
class Report:
    """What happened in one compilation, or in all graphs of one `explain`.

    graphs: number of FX graphs seen. stopped: why it did not go to the end (data that explain does not have, an exception); else None.
    before, after: each graph as readable code before and after rewriting (the same text where nothing was fused); only kept by `explain`.
    """

    fused: list[Fused] = field(default_factory=list)
    declined: list[Declined] = field(default_factory=list)
    graphs: int = 0
    stopped: str | None = None
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    def extend(self, other: Report) -> None:
        """Adds the records of another report to this one, whose graphs are numbered on."""
        self.fused += [replace(record, graph=self.graphs + record.graph) for record in other.fused]
        self.declined += [replace(record, graph=self.graphs + record.graph) for record in other.declined]
        self.graphs += other.graphs
        self.before += other.before
        self.after += other.after

    def __str__(self) -> str:
        """One screen: what was fused and what was not, equal rows folded, the commonest first. Whole: `full`."""
        room = SCREEN - height(self._text("", ""))
        fused, declined = self._fused(None), self._declined(None)
        if height(fused) + height(declined) > room:
            # Each may have half of the room, and what the other leaves.
            fused = self._fused(max(room // 2, room - height(declined)))
            declined = self._declined(room - height(fused))
        return self._text(fused, declined)

    def full(self) -> str:
        """Every candidate in a row of its own, in the order of the graphs."""
        return self._text(self._fused(None, fold=False), self._declined(None, fold=False))

    def _text(self, fused: str, declined: str) -> str:
        summary = f"{len(self.fused)} fused, {len(self.declined)} declined in {_counting(self.graphs, 'graph')}"
        parts = [summary]
        if self.fused:
            parts.append(fused)
        if self.declined:
            parts.append(f"{declined}\nwhat to change, sentence by sentence: {relative(WHY_NOT)}")
        if self.stopped:
            parts.append(f"stopped: {self.stopped}")
        return printable("\n\n".join(parts))

    def _fused(self, lines: int | None, fold: bool = True) -> str:
        return fused_table(self.fused, lines, fold) if self.fused else ""

    def _declined(self, lines: int | None, fold: bool = True) -> str:
        return declined_table(self.declined, lines, fold) if self.declined else ""


def fused_table(fused: Sequence[Fused], lines: int | None = None, fold: bool = True) -> str:
    """What was fused, where, and why by this op. fold: equal ones in one row. lines: how many there is room for; None: for all."""
    groups = alike_ones(fused) if fold else [[record] for record in fused]
    return _table(groups, _fused_row, ("fused chain", "op", "shapes", "where", "why"), (24, 19, 21, 30, 30), lines)


def declined_table(declined: Sequence[Declined], lines: int | None = None, fold: bool = True) -> str:
    """The why-not: how far each declined candidate got, where, and the sentence why. fold, lines: as for `fused_table`."""
    groups = alike_ones(declined) if fold else [[record] for record in declined]
    return _table(groups, _declined_row, ("declined chain", "got to", "where", "why"), (24, 12, 36, 55), lines)


def alike_ones(records: Sequence[Record]) -> list[list[Record]]:
    """Records that share a row: of the same chain, with the same op or as far as each other, whose sentences differ at most in numbers and in
    which of equal nodes they name. The commonest first."""
    keys = (likeness(record.chain, _got_to(record), _told(record)) for record in records)
    return [[records[position] for position in group] for group in folded(keys)]


def places(group: Sequence[Record]) -> str:
    """Where candidates are, for a sentence: "model.py:30 (blocks.2.conv) and 11 more"; the first's node where the graph knows no place."""
    place, *at = reversed(_place(group[0]))
    return ", ".join([place + "".join(f" ({module})" for module in at), *_body(group[0])]) + "".join(f" {more}" for more in _more(group))


def _place(record: Fused | Declined) -> list[str]:
    node = record.node if isinstance(record, Declined) else record.nodes[0]
    return list(filter(None, (record.module, short(record.location)))) or [node]


def _body(record: Fused | Declined) -> list[str]:
    calls = record.calls if isinstance(record, Fused) else 1
    return [f"in {record.body}" + (f", called {calls} times" if calls > 1 else "")] if record.body else []


def _table(groups: list[list[Record]], row: Callable[..., Any], headers: Sequence[str], widths: Sequence[int], lines: int | None) -> str:
    rows = [row(group) for group in groups]
    table = wrapped(rows, headers, widths)
    if lines is None or height(table) <= lines:
        return table
    table, shown = fitting(rows, headers, widths, lines - 1)
    left = groups[shown:]
    told = f"{_counting(len(left), 'row')} more, of {_counting(sum(map(len, left)), 'candidate')}"
    return f"{table}\nleft out: {told}; `fxfuse explain --all`, or report.full(), shows every candidate"


def _counting(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _fused_row(group: list[Fused]) -> tuple[str, ...]:
    first, others = group[0], len({record.shapes for record in group}) - 1
    shapes = first.shapes + (f"\nand {others} other{'' if others == 1 else 's'}" if others else "")
    return _counted(group), first.op, shapes, _where(group), _why(group)


def _declined_row(group: list[Declined]) -> tuple[str, ...]:
    return _counted(group), group[0].reached, _where(group), _why(group)


def _counted(group: list[Record]) -> str:
    return f"{times(len(group))} {group[0].chain}" if len(group) > 1 else group[0].chain


def _where(group: list[Record]) -> str:
    return "\n".join([*_place(group[0]), *_body(group[0]), *_more(group)])


def _more(group: Sequence[Record]) -> list[str]:
    return [f"and {len(group) - 1} more"] if len(group) > 1 else []


def _why(group: list[Record]) -> str:
    told, *others = [_told(record) for record in group]
    return "\n".join([*told, *([DIFFER] if any(other != told for other in others) else [])])


def _got_to(record: Fused | Declined) -> str:
    return record.op if isinstance(record, Fused) else record.reached


def _told(record: Fused | Declined) -> list[str]:
    """Why a chain was declined; why the op was taken, and of each other candidate why not."""
    if isinstance(record, Declined):
        return [record.reason]
    return [record.choice, *(f"{other.op}: {other.verdict}" for other in record.candidates if other.op != record.op)]


def text_of(shape: Sequence[int | torch.SymInt]) -> str:
    """A shape for people: a symbolic size by its name, a compound expression by its example value."""
    return "[" + ", ".join(_size(size) for size in shape) + "]"


def _size(size: int | torch.SymInt) -> str:
    text = str(size)
    return text if text.isalnum() else f"~{torch_private.hint(size)}"


_reports: deque[Report] = deque(maxlen=KEPT_REPORTS)
_lock = threading.Lock()


def keep(report: Report) -> None:
    """Files the report of a real compilation; the oldest of more than KEPT_REPORTS is dropped."""
    with _lock:
        _reports.append(report)
    listeners.tell(report, "compiled")


def reports() -> list[Report]:
    """Reports of the latest compilations through `backend="fxfuse"` in this process, oldest first, at most KEPT_REPORTS."""
    with _lock:
        return list(_reports)
