"""What fxfuse did to a model and why: records of fused and declined chains, and the tables that show them."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from . import listeners, torch_private

KEPT_REPORTS = 64
# What to change, for every sentence.
WHY_NOT = os.path.join(os.path.dirname(__file__), "why_not.md")
TORCH = os.path.dirname(torch.__file__) + os.sep
# What `explain` wraps around a model.
WRAPPERS = (f"{TORCH}nn/utils/stateless.py", f"{TORCH}_functorch/functional_call.py", os.path.join(os.path.dirname(__file__), "api.py"))


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
    location: file:line of the anchor in the user's code. graph: number of its graph within the report.
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


@dataclass(frozen=True)
class Declined:
    """A candidate that was left as it was: how far the match got, the node where it stopped, and a sentence to act on.

    nodes: the chain's nodes as far as the match got. body: the attribute that holds their graph, if it is the body of a higher-order op.
    candidates: every way that was weighed, where it came to that. graph: number of its graph within the report.
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
        summary = f"{len(self.fused)} fused, {len(self.declined)} declined in {self.graphs} graph{'' if self.graphs == 1 else 's'}"
        parts = [summary]
        if self.fused:
            parts.append(fused_table(self.fused))
        if self.declined:
            parts.append(f"{declined_table(self.declined)}\nwhat to change, sentence by sentence: {short(WHY_NOT)}")
        if self.stopped:
            parts.append(f"stopped: {self.stopped}")
        return "\n\n".join(parts)


def fused_table(fused: Sequence[Fused]) -> str:
    """What was fused, where, and why by this op."""
    rows = [(f.chain, f.op, f.shapes, short(f.location), _weighed(f)) for f in fused]
    return wrapped(rows, ("fused chain", "op", "shapes", "where", "why"), (20, 20, 30, 30, 40))


def declined_table(declined: Sequence[Declined]) -> str:
    """The why-not: how far each declined candidate got, where, and the sentence why."""
    rows = [(d.chain, d.reached, d.node, short(d.location), d.reason) for d in declined]
    return wrapped(rows, ("declined chain", "got to", "node", "where", "why"), (20, 12, 20, 30, 48))


def wrapped(rows: Sequence[Sequence[object]], headers: Sequence[str], widths: Sequence[int]) -> str:
    """A table whose columns are at most so wide."""
    from tabulate import tabulate

    return tabulate(rows, headers=headers, tablefmt="simple_grid", maxcolwidths=list(widths))


def _weighed(fused: Fused) -> str:
    """Why the op was taken, and a line for each other candidate."""
    return "\n".join([fused.choice, *(f"{other.op}: {other.verdict}" for other in fused.candidates if other.op != fused.op)])


def short(location: str) -> str:
    """A location relative to the working directory where it lies below it."""
    here = os.getcwd() + os.sep
    return location.removeprefix(here)


def location_of(node: fx.Node) -> str:
    """`file:line` of the user's code that made the node; empty where the graph holds no stack trace."""
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if frame[0] not in WRAPPERS]
    # torch.export traces through nn.Module.forward: the frame to show is the innermost one outside torch.
    own = [frame for frame in frames if not frame[0].startswith(TORCH)] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def stack_of(node: fx.Node) -> str:
    """The stack trace of the user's code that made the node, as Python prints it; empty where the graph holds none."""
    frames = re.split(r'^(?=  File ")', node.meta.get("stack_trace") or "", flags=re.MULTILINE)
    return "".join(frame for frame in frames if not frame.startswith(tuple(f'  File "{file}"' for file in WRAPPERS)))


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
