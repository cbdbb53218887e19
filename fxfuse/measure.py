"""Measuring: contenders in turn in the same run, and errors against fp64."""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Contender = Callable[[], Any]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Of GPU work between two events, and calls that make it up.
SHORTEST_MS, MOST_CALLS = 0.3, 50


def paired_times(contenders: Mapping[str, Contender], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call, by contender. Each round times every contender once, so that drift of the machine hits all alike, and in an
    order of its own, so that none always follows the same other one.

    On CUDA: GPU time, of calls captured in a CUDA graph, so that the host's time is not in it. Else wall time.
    """
    timed = _wall_ms
    if device.type == "cuda":
        contenders, timed = {name: captured(contender) for name, contender in contenders.items()}, _graph_ms
    return _in_turn(contenders, timed, rounds)


def paired_wall_times(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of wall time of every call, by contender, until the device is done, in turn as in `paired_times`."""
    return _in_turn(contenders, _wall_ms, rounds)


def _in_turn(contenders: Mapping[str, Any], timed: Callable[[Any], float], rounds: int) -> dict[str, list[float]]:
    for contender in contenders.values():
        timed(contender)
        timed(contender)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(contenders), len(contenders)):
            times[name].append(timed(contenders[name]))
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Median of each contender's times."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: Mapping[str, list[float]], of: str, over: str) -> float:
    """Median over the rounds of one contender's time over another's."""
    return statistics.median(a / b for a, b in zip(times[of], times[over]))


@dataclass(frozen=True)
class Captured:
    """`calls` calls of a contender in one CUDA graph."""

    graph: torch.cuda.CUDAGraph
    calls: int


def captured(contender: Contender) -> Captured:
    """The contender in a CUDA graph: as many calls as keep the GPU busy for longer than a launch takes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            contender()
    torch.cuda.current_stream().wait_stream(side)
    one = _capture(contender, 1)
    _graph_ms(one)
    calls = math.ceil(SHORTEST_MS / max(_graph_ms(one), SHORTEST_MS / MOST_CALLS))
    return one if calls == 1 else _capture(contender, calls)


def _capture(contender: Contender, calls: int) -> Captured:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            contender()
    return Captured(graph, calls)


def _graph_ms(contender: Captured) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # A first replay keeps the GPU busy while the host queues the one that is timed.
    contender.graph.replay()
    start.record()
    contender.graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / contender.calls


def _wall_ms(contender: Contender) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    else:
        # Eager's OpenMP threads and those of Inductor's own runtime spin for a while after a call, on the cores that the next one needs.
        time.sleep(0.01)
    start = time.perf_counter()
    contender()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def fp64_result(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """The model's result in fp64, on a copy of the model; parameters and inputs as they are, only widened."""
    return copy.deepcopy(model).double()(*(x.double() for x in inputs))


def tf32_result(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """The fp64 result of the model whose convolution's fp32 operands are first rounded to TF32: the error that TF32 stands for."""
    model = copy.deepcopy(model)
    convolution = next(module for module in model.modules() if isinstance(module, CONVOLUTIONS))
    convolution.weight.copy_(_tf32(convolution.weight))
    return fp64_result(model, *map(_tf32, inputs))


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to TF32's 10 bits of mantissa, to nearest, ties away from zero, as cvt.rna.tf32 does."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| in fp64; nan where `out` holds one that the reference does not."""
    return float((out.double() - reference).norm() / reference.norm())
