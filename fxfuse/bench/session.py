"""The run: which workloads, one after the other, with progress on stderr and the file written anew after each."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import library
from ..command import write_json
from ..toolchain import BuildError
from . import BenchError, ceilings, rows, tails, user, workloads
from .work import Inference, Training, Work

Say = Callable[[str], None]
# Measures one workload.
Item = Callable[[ceilings.Ceilings, Say], list[dict[str, Any]]]


def prepared(arguments: argparse.Namespace, suite: str, names: Sequence[str]) -> tuple[torch.device, dict[str, Item]]:
    """The device and what is measured on it, by name; raises BenchError if that is nothing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if suite == "model":
        found, device = user.workload(arguments.what, arguments.precision)
        every: list[Any] = [found]
    else:
        swept = workloads.training_sweep if arguments.training else workloads.sweep
        every = {"headline": workloads.headline, "sweep": swept, "tails": tails.tails}[suite](device)
    wanted = [item for item in every if suite == "model" or _wanted(item, arguments)]
    if not wanted:
        raise BenchError(f"nothing of {suite} on {device.type} fits these options; there are, for example, {every[0]} and {every[-1]}")
    if suite == "tails":
        _load(device)
        return device, {str(tail): functools.partial(_tail, tail, device, arguments.rounds) for tail in wanted}
    work: Work = Training(arguments.input_gradient) if arguments.training else Inference()
    return device, {str(workload): functools.partial(_workload, workload, work, names, device, arguments.rounds) for workload in wanted}


def _wanted(item: Any, arguments: argparse.Namespace) -> bool:
    kind = item.kind
    return (
        arguments.dtype in (None, kind.dtype)
        and arguments.layout in (None, kind.layout)
        and arguments.precision in (None, kind.precision)
        and (arguments.only or "") in str(item)
    )


def _load(device: torch.device) -> None:
    try:
        library.load(device.type)
    except BuildError as error:
        raise BenchError(f"the tail ops cannot be measured: {error.summary}; {error.mend}", code=1) from error


def _tail(tail: tails.Tail, device: torch.device, rounds: int, _: ceilings.Ceilings, say: Say) -> list[dict[str, Any]]:
    return tails.measure(tail, device, rounds, say)


def _workload(
    workload: workloads.Workload, work: Work, names: Sequence[str], device: torch.device, rounds: int, most: ceilings.Ceilings, say: Say
) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows.measure(workload, work, names, device, rounds, most, say)]


def measured(result: dict[str, Any], items: Mapping[str, Item], device: torch.device, path: Path | None, deadline: float | None) -> bool:
    """Measures every item into `result` and the file at `path`, until `deadline` (of time.monotonic()). False after Ctrl-C.

    What was measured until then is in `result`, and in the file.
    """
    try:
        with _remembered_interrupts() as interrupts:
            return _each(result, items, device, path, deadline, interrupts)
    except KeyboardInterrupt:
        _say("interrupted: what was measured until now is kept")
        return False


def _each(
    result: dict[str, Any], items: Mapping[str, Item], device: torch.device, path: Path | None, deadline: float | None, interrupts: list[int]
) -> bool:
    most = _ceilings(result, device)
    _save(result, path)
    for index, (name, item) in enumerate(items.items()):
        if interrupts:
            raise KeyboardInterrupt
        if deadline is not None and time.monotonic() > deadline:
            _say(f"out of time: {len(items) - index} of {len(items)} workloads are left out")
            return True
        result["rows"] += item(most, lambda text: _say(f"[{index + 1}/{len(items)}] {name}: {text}"))
        _save(result, path)
    result["complete"] = True
    _save(result, path)
    return True


@contextmanager
def _remembered_interrupts() -> Iterator[list[int]]:
    """Ctrl-C raises KeyboardInterrupt as ever, and is remembered in the list: Python drops one that comes in a weak reference's callback."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _ceilings(result: dict[str, Any], device: torch.device) -> ceilings.Ceilings:
    if result["ceilings"] is None:
        _say(f"measuring what a copy and matrix products reach on {result['device']}")
        result["ceilings"] = ceilings.measured(device).as_json()
    return ceilings.Ceilings(**result["ceilings"])


def _save(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        write_json(result, path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
