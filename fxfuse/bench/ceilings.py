"""What the device reaches at best, measured in the same run: bytes a second of a copy, operations a second of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..measure import medians, paired_times_of_plain_calls

COPY_BYTES = {"cuda": 10**9, "cpu": 64 * 2**20}
SIZE = {"cuda": 8192, "cpu": 512}
PRODUCTS = {
    "cuda": (("float32", "tf32"), ("float32", "ieee"), ("bfloat16", ""), ("float16", "")),
    "cpu": (("float32", ""), ("bfloat16", "")),
}


@dataclass(frozen=True)
class Ceilings:
    """bytes_per_s: read and written by a copy. flops_per_s: of torch.mm, by `number`."""

    bytes_per_s: float
    flops_per_s: dict[str, float]

    def shares(self, bytes_per_s: float | None, flops_per_s: float | None, number: str) -> tuple[float | None, float | None]:
        """The shares of the ceilings that rates reach; None where a rate or its ceiling is not known."""
        most = self.flops_per_s.get(number)
        return (bytes_per_s and bytes_per_s / self.bytes_per_s, flops_per_s / most if flops_per_s is not None and most else None)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def number(dtype: str, precision: str) -> str:
    """How an operand is called: "float32 tf32", "bfloat16"."""
    return f"{dtype} {precision}".strip() if dtype == "float32" else dtype


def measured(device: torch.device, rounds: int = 11) -> Ceilings:
    """Measures the ceilings of a device."""
    copied = _copy(device, rounds)
    products = {number(dtype, precision): _product(getattr(torch, dtype), precision, device, rounds) for dtype, precision in PRODUCTS[device.type]}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Ceilings(copied, products)


def _copy(device: torch.device, rounds: int) -> float:
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), device, rounds)


def _product(dtype: torch.dtype, precision: str, device: torch.device, rounds: int) -> float:
    size = SIZE[device.type]
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    with _matmul(precision):
        return 2 * size**3 / _seconds(lambda: a @ b, device, rounds)


def _seconds(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    return medians(paired_times_of_plain_calls({"call": call}, device, rounds))["call"] / 1e3


@contextmanager
def _matmul(precision: str) -> Iterator[None]:
    """Matrix products of fp32 in "tf32" or "ieee" within it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
