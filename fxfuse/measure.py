"""Measuring: contenders in turn in the same run, and errors against fp64."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Contender = Callable[[], Any]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def paired_times(contenders: Mapping[str, Contender], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call, by contender. Each round calls every contender once, so that drift of the machine hits all alike, and in an
    order of its own, so that none always follows the same other one.

    On CUDA: GPU time between events on the current stream; else wall time.
    """
    timed = _cuda_ms if device.type == "cuda" else _wall_ms
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


def _cuda_ms(contender: Contender) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # A first call keeps the GPU busy while the host queues the one that is timed; else the host's time would be in it.
    contender()
    start.record()
    contender()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _wall_ms(contender: Contender) -> float:
    # Eager's OpenMP threads and those of Inductor's own runtime spin for a while after a call, on the cores that the next one needs.
    time.sleep(0.01)
    start = time.perf_counter()
    contender()
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
