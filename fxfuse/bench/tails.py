"""The tail ops alone, beside a copy of the same tensor: how near to the memory's bandwidth they come."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..command import in_a_word
from ..fused import CHANNELS_LAST
from ..measure import medians, paired_times_of_plain_calls
from .workloads import LAYOUTS, Kind

DTYPES = ("float32", "bfloat16", "float16")
CONV_OUTPUTS = {
    "cuda": {"norm_pool_gelu": (32, 64, 32, 64, 64), "gelu_pool": (128, 64, 254, 254)},
    "cpu": {"norm_pool_gelu": (4, 64, 16, 32, 64), "gelu_pool": (8, 64, 126, 126)},
}


@dataclass(frozen=True)
class Tail:
    """A tail op on a convolution output of the headline models' kind."""

    op: str
    shape: tuple[int, ...]
    kind: Kind

    def __str__(self) -> str:
        return f"{self.op} {self.kind}"


def tails(device: torch.device) -> list[Tail]:
    """Both ops in every dtype and layout."""
    found = itertools.product(CONV_OUTPUTS[device.type].items(), DTYPES, LAYOUTS)
    return [Tail(op, shape, Kind(dtype, "", layout)) for (op, shape), dtype, layout in found]


def measure(tail: Tail, device: torch.device, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row: the op's time and a copy's, and the share that bytes read and written once, a second, are of the copy's rate."""
    say("beside a copy")
    row = {"op": tail.op, "dtype": tail.kind.dtype, "layout": tail.kind.layout, "input": list(tail.shape), "failed": None}
    try:
        with torch.no_grad():
            return [{**row, **_measured(tail, device, rounds)}]
    except Exception as error:
        return [{**row, "failed": in_a_word(error)}]
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(tail: Tail, device: torch.device, rounds: int) -> dict[str, Any]:
    dtype = getattr(torch, tail.kind.dtype)
    y = torch.randn(tail.shape, device=device, dtype=dtype)
    if tail.kind.layout == "channels_last":
        y = y.contiguous(memory_format=CHANNELS_LAST[y.dim()])
    bias, weight = torch.randn(2, 64, device=device, dtype=dtype)
    target = torch.empty_like(y)
    contenders = {"copy": lambda: target.copy_(y), "op": lambda: _call(tail.op, y, bias, weight)}
    times = medians(paired_times_of_plain_calls(contenders, device, rounds))
    out = _call(tail.op, y, bias, weight)
    rates = {"op": (y.nbytes + out.nbytes) / times["op"] * 1e3, "copy": 2 * y.nbytes / times["copy"] * 1e3}
    return {"ms": times["op"], "copy_ms": times["copy"], "bytes_per_s": rates["op"], "copy_bytes_per_s": rates["copy"], "share": rates["op"] / rates["copy"]}


def _call(op: str, y: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The op with the headline model's arguments."""
    if op == "gelu_pool":
        return torch.ops.fxfuse.gelu_pool(y, bias, [1, 1], True, "none", None)
    window = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
    return torch.ops.fxfuse.norm_pool_gelu(y, bias, weight[0], weight, bias, 1.0, 0.0, 1, 1e-5, *window, False, True, None, "none", None)
