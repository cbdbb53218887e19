"""Measuring: contenders in turn in the same run, and errors against fp64."""

from __future__ import annotations

import copy
import functools
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
Timer = Callable[[], float]  # runs and returns milliseconds
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Of GPU work between two events, and calls that make it up.
SHORTEST_MS, MOST_CALLS = 0.3, 50


def paired_times(contenders: Mapping[str, Contender], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call, by contender. Each round times every contender once, so that drift of the machine hits all alike, and in an
    order of its own, so that none always follows the same other one.

    On CUDA: GPU time, of calls captured in a CUDA graph, so that the host's time is not in it. Else wall time.
    """
    if device.type != "cuda":
        return paired_wall_times(contenders, rounds)
    pool = torch.cuda.graph_pool_handle()
    return in_turn({name: graph_timer(contender, pool) for name, contender in contenders.items()}, rounds)


def paired_times_of_plain_calls(contenders: Mapping[str, Contender], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """As `paired_times`, but of calls that are not captured, for contenders that keep the GPU busy longer than the host takes to call them.

    A copy in a CUDA graph is the copy engine's, which reaches 2.8 TB/s on an H200 where the kernel of a plain copy reaches 4.3. On a CPU: for
    contenders that share their threads, so that no pause between them is needed, in which a core would slow down.
    """
    timer = events_timer if device.type == "cuda" else _warm_timer
    return in_turn({name: timer(contender) for name, contender in contenders.items()}, rounds)


def paired_wall_times(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of wall time of every call, by contender, until the device is done, in turn as in `paired_times`."""
    return in_turn({name: functools.partial(_wall_ms, contender) for name, contender in contenders.items()}, rounds)


def in_turn(timers: Mapping[str, Timer], rounds: int) -> dict[str, list[float]]:
    """What each timer returns in every round, in turn and in an order of the round's own."""
    for timer in timers.values():
        timer()
        timer()
    times: dict[str, list[float]] = {name: [] for name in timers}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(timers), len(timers)):
            times[name].append(timers[name]())
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Median of each contender's times."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: Mapping[str, list[float]], of: str, over: str) -> float:
    """Median over the rounds of one contender's time over another's."""
    return ratio_quartiles(times, of, over)[1]


def ratio_quartiles(times: Mapping[str, list[float]], of: str, over: str) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile over the rounds of one contender's time over another's."""
    ratios = [a / b for a, b in zip(times[of], times[over])]
    if len(ratios) < 2:
        return (ratios[0],) * 3
    low, _, high = statistics.quantiles(ratios, n=4)
    return low, statistics.median(ratios), high


@dataclass(frozen=True)
class Captured:
    """`calls` calls of a contender in one CUDA graph."""

    graph: torch.cuda.CUDAGraph
    calls: int


def captured(contender: Contender, pool: Any = None) -> Captured:
    """The contender in a CUDA graph: as many calls as keep the GPU busy for longer than a launch takes.

    pool: a handle of `torch.cuda.graph_pool_handle()`; graphs that share one share their memory, as none's results are read.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            contender()
    torch.cuda.current_stream().wait_stream(side)
    one = _capture(contender, 1, pool)
    _graph_ms(one)
    calls = _calls(_graph_ms(one))
    return one if calls == 1 else _capture(contender, calls, pool)


def graph_timer(contender: Contender, pool: Any = None) -> Timer:
    """Times replays of the contender captured in a CUDA graph (see `captured`); raises RuntimeError where it cannot be captured."""
    # A capture that fails leaves its stream behind as the current one, and the random generator in the belief that it is being captured.
    with torch.cuda.stream(torch.cuda.current_stream()):
        try:
            return functools.partial(_graph_ms, captured(contender, pool))
        except RuntimeError:
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise


def events_timer(contender: Contender) -> Timer:
    """Times plain calls between two events, for what a CUDA graph cannot capture: where the host is slower than the GPU, its time is in it."""

    def timed(calls: int) -> float:
        contender()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            contender()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    timed(1)
    return functools.partial(timed, _calls(timed(1)))


def _calls(milliseconds: float) -> int:
    """How many calls of so long make up SHORTEST_MS."""
    return math.ceil(SHORTEST_MS / max(milliseconds, SHORTEST_MS / MOST_CALLS))


def _capture(contender: Contender, calls: int, pool: Any) -> Captured:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
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


def _warm_timer(contender: Contender) -> Timer:
    """Wall time of a call right behind another one."""

    def timed() -> float:
        contender()
        start = time.perf_counter()
        contender()
        return (time.perf_counter() - start) * 1e3

    return timed


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


def fp64_result(model: nn.Module, *inputs: Any) -> Any:
    """The model's result in fp64, on a copy of the model; parameters and inputs as they are, only widened."""
    return copy.deepcopy(model).double()(*torch.utils._pytree.tree_map_only(torch.Tensor, widened, inputs))


def widened(x: torch.Tensor) -> torch.Tensor:
    """In fp64, where it is a floating-point tensor."""
    return x.double() if x.is_floating_point() else x


def tf32_result(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """The fp64 result of the model whose convolution's fp32 operands are first rounded to TF32: the error that TF32 stands for."""
    model, inputs = tf32_operands(model, inputs)
    return fp64_result(model, *inputs)


@torch.no_grad()
def tf32_operands(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A copy of the model with its convolution's fp32 weight rounded to TF32, and the inputs rounded alike."""
    model = copy.deepcopy(model)
    weight = first_convolution(model).weight
    weight.copy_(rounded_to_tf32(weight))
    return model, tuple(map(rounded_to_tf32, inputs))


def first_convolution(model: nn.Module) -> nn.Module:
    """The model's convolution, of a model that has one."""
    return next(module for module in model.modules() if isinstance(module, CONVOLUTIONS))


def rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to TF32's 10 bits of mantissa, to nearest, ties away from zero, as cvt.rna.tf32 does."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@torch.no_grad()
def relative_error(out: Any, reference: Any) -> float:
    """||out - reference|| / ||reference|| in fp64; nan where `out` holds one that the reference does not.

    Of nested results the floating-point tensors count, taken together.
    """
    pairs = list(zip(_floating(out), _floating(reference), strict=True))
    if len(pairs) == 1:
        (own, expected), = pairs
        return float((own.double() - expected).norm() / expected.norm())
    squares = [((own.double() - expected).square().sum(), expected.square().sum()) for own, expected in pairs]
    return math.sqrt(float(sum(error for error, _ in squares)) / float(sum(size for _, size in squares)))


def _floating(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
