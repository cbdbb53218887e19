"""A record of every compiled graph: a folder under `fxfuse.dump`, and artifacts in torch's structured trace (`TORCH_TRACE`, for tlparse).

    <dump>/0003-pid4711/        the fourth graph of process 4711; of rank 1: 0003-rank1-pid4711
        before.py, after.py     the graph as Dynamo captured it, and as fxfuse handed it to Inductor
        report.json             see `fxfuse.document`
        report.html             the same to look at: see `fxfuse.page`
        repro_0_<chain>.py ...  one script for each fused and each declined chain

A folder appears as a whole or not at all. Nothing here makes a compilation fail, under `fxfuse.strict` neither.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import fx

from . import folder, page, torch_private
from .document import Repro, devices_of, document
from .options import Options
from .report import Report
from .repro import repros

log = logging.getLogger(__name__)

_numbers = itertools.count()


def _never_raises(step: Callable[..., None]) -> Callable[..., None]:
    """A step of a record that, where it fails, is a line in the log."""

    @functools.wraps(step)
    def guarded(self: Record, *args: Any) -> None:
        try:
            step(self, *args)
        except Exception:
            log.exception("fxfuse: the graph could not be recorded; it is compiled all the same. Please report this.")

    return guarded


class Record:
    """What is noted of one graph while it is compiled. Texts are made before Inductor sees the graph, which it changes in place."""

    def __init__(self, gm: fx.GraphModule, options: Options, inductor: Mapping[str, Any]) -> None:
        self._gm, self._options, self._inductor = gm, options, inductor
        self._graph = gm.graph
        self._wanted = options.dump is not None or torch_private.tracing()
        self._report = Report(graphs=1)
        self._repros: list[Repro] = []
        self._files: dict[str, str] = {}
        self._pictures: dict[str, page.Picture] = {}
        self.begin()
        self._draw("before", self._graph)

    @_never_raises
    def begin(self) -> None:
        """Notes the graph before rewriting."""
        if self._wanted:
            self._devices = devices_of(self._graph)
            self._listing("before", self._graph)

    @_never_raises
    def rewritten(self, report: Report) -> None:
        """Notes the graph behind rewriting, and the chains of the report, which may still change."""
        self._report = report
        if not self._wanted:
            return
        self._listing("after", self._gm.graph)
        # Of a graph that fails to compile no chain is fused in the end: the scripts stay, for they show it.
        self._chains = Report(fused=list(report.fused), declined=list(report.declined))
        if self._options.dump is not None:
            self._repros = repros(self._graph, report, self._options, self._inductor)
            self._files.update({repro.file: repro.text for repro in self._repros if repro.file})
        self._draw("after", self._gm.graph)

    @_never_raises
    def finish(self, error: Exception | None = None) -> None:
        """Writes everything. error: what compiling raised."""
        if not self._wanted:
            return
        number = next(_numbers)  # a capture that Dynamo starts anew takes none
        told = document(self._report, self._options, self._devices, inductor=self._inductor, repros=self._scripts(), number=number)
        told["stopped"] = told["stopped"] or (error and f"{type(error).__name__}: {error}")
        self._write_page(told)
        told["files"] = sorted(self._files)
        text = json.dumps(told, indent=1, default=str) + "\n"
        torch_private.trace_artifact("fxfuse_report", "json", lambda: text)
        if self._options.dump is not None:
            part = f"rank{told['rank']}-" if told["rank"] is not None else ""
            folder.write(Path(self._options.dump), f"{number:04d}-{part}pid{told['pid']}", {**self._files, "report.json": text})

    def _scripts(self) -> list[Repro]:
        """The scripts of the chains that the report holds now."""
        records = [*self._report.fused, *self._report.declined]
        if not self._repros:
            return [Repro()] * len(records)
        made = dict(zip(map(id, (*self._chains.fused, *self._chains.declined)), self._repros))
        return [made.get(id(record), Repro()) for record in records]

    @_never_raises
    def _draw(self, name: str, graph: fx.Graph) -> None:
        """Notes what the page shows of a graph."""
        if self._options.dump is not None:
            self._pictures[name] = page.picture(graph)

    @_never_raises
    def _write_page(self, told: Mapping[str, Any]) -> None:
        """Adds the page to the files, where there is a graph to draw."""
        if "before" in self._pictures:
            after = self._pictures.get("after", self._pictures["before"])  # an exception inside fxfuse leaves the graph as it was
            self._files["report.html"] = page.html(told, [(self._pictures["before"], after)])

    def _listing(self, name: str, graph: fx.Graph) -> None:
        text = f"{torch_private.imports_of(graph)}\n\n\n{torch_private.readable(graph)}"
        self._files[f"{name}.py"] = text
        torch_private.trace_artifact(f"fxfuse_graph_{name}", "string", lambda: text)


@contextlib.contextmanager
def recorded(gm: fx.GraphModule, options: Options, inductor: Mapping[str, Any]) -> Iterator[Record]:
    """Records the compilation of a graph within it, one that fails too; not one that Dynamo starts anew."""
    record = Record(gm, options, inductor)
    try:
        yield record
    except torch_private.Restart:
        raise
    except Exception as error:
        if isinstance(getattr(error, "report", None), Report):
            record.rewritten(error.report)
        record.finish(error)
        raise
    record.finish()
