"""Times of all contenders of a workload, in turn and in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..command import in_a_word
from ..measure import Timer, events_timer, graph_timer, in_turn, paired_wall_times

GRAPH, EVENTS = "cuda graph", "events around plain calls"


@dataclass
class Times:
    """Milliseconds of every round, by contender. gpu: empty on a CPU. timed_by: how the GPU's were taken. failed: sentences, for those that
    could not be timed."""

    gpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    timed_by: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def compared(self) -> dict[str, list[float]]:
        """The times that contenders are compared by: the GPU's where there are any."""
        return self.gpu or self.wall


def timed(calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int) -> Times:
    """GPU times on CUDA, and wall times, of every call that runs."""
    times = Times()
    if device.type == "cuda":
        times.gpu = in_turn(_gpu_timers(calls, times), rounds)
    times.wall = paired_wall_times({name: call for name, call in calls.items() if name not in times.failed}, rounds)
    return times


def _gpu_timers(calls: Mapping[str, Callable[[], Any]], times: Times) -> dict[str, Timer]:
    timers: dict[str, Timer] = {}
    pool = torch.cuda.graph_pool_handle()
    for name, call in calls.items():
        try:
            timers[name], times.timed_by[name] = graph_timer(call, pool), GRAPH
            continue
        except RuntimeError:  # of capturing: a call that syncs, or memory
            torch.cuda.synchronize()
            pool = torch.cuda.graph_pool_handle()  # the old one may be left recording
        try:
            timers[name], times.timed_by[name] = events_timer(call), EVENTS
        except RuntimeError as error:
            times.failed[name] = in_a_word(error)
    return timers
