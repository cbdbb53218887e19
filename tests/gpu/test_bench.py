"""`fxfuse bench` on a GPU: GPU times, from a CUDA graph where a call can be captured, and peak memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fxfuse.bench.timing import EVENTS, GRAPH
from fxfuse.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.large]

MODEL = """
import torch
from torch import nn

class Syncs(nn.Module):
    def forward(self, x):
        return x * x.sum().item()

def factory():
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1))
    return model.cuda(), (torch.randn(8, 8, 64, 64, device="cuda"),)

def syncs():
    return Syncs(), (torch.randn(100, device="cuda"),)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "on_gpu.py").write_text(MODEL)
    return tmp_path / "on_gpu.py"


def measured(model: Path, factory: str, names: str, *more: str) -> list[dict[str, Any]]:
    file = model.with_suffix(".json")
    assert main(["bench", f"{model}:{factory}", "--contenders", names, "--rounds", "3", "--precision", "ieee", "--json", str(file), *more]) == 0
    return json.loads(file.read_text())["rows"]


def test_gpu_times_and_peak_memory(model: Path) -> None:
    for row in measured(model, "factory", "eager,inductor,inductor-max-autotune,inductor channels_last,fxfuse,fxfuse always"):
        assert row["failed"] is None and row["timed_by"] == GRAPH and 0 < row["gpu_ms"]
        assert row["peak_mb"] >= row["output_mb"] > 0 and row["error"] < 1e-5
        assert 0 < row["bytes_share"] < 1.5


def test_a_call_that_cannot_be_captured_is_timed_by_events(model: Path) -> None:
    (row,) = measured(model, "syncs", "eager")
    assert row["timed_by"] == EVENTS and row["gpu_ms"] > 0
    # A failed capture leaves nothing behind.
    assert measured(model, "factory", "eager")[0]["timed_by"] == GRAPH


@pytest.mark.parametrize("more", [(), ("--input-gradient",)], ids=["parameters", "inputs too"])
def test_training_steps(model: Path, more: tuple[str, ...]) -> None:
    for row in measured(model, "factory", "eager,inductor,inductor channels_last,fxfuse,fxfuse always", "--training", *more):
        assert row["failed"] is None and row["timed_by"] == GRAPH and 0 < row["gpu_ms"] and row["training"]
        assert row["peak_mb"] >= row["output_mb"] > 0 and row["peak_over_best_inductor"] > 0 and row["over_best_inductor"][1] > 0
        assert row["error"] < 1e-5 and row["errors"].keys() == {"0.weight", "0.bias", *(("input 0",) if more else ())}
