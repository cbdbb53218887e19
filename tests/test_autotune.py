"""Timing under `mode="max-autotune"`: what is timed, what is kept, what happens where nothing can be timed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse import autotune, choose
from fxfuse.report import Report

pytestmark = pytest.mark.compiler

OPS = {"conv_norm_pool_gelu": "norm_pool_gelu", "conv_gelu_pool": "gelu_pool"}


class Normed(nn.Module):
    """conv_transpose3d, an addition in place, layer_norm, avg_pool3d, gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(4, 8, 3, stride=2, padding=1, output_padding=1)
        self.norm = nn.LayerNorm((16,))
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y += self.weight
        return F.gelu(F.avg_pool3d(self.norm(y), 2))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(F.gelu(self.conv(x)), 1)


MODELS = {"conv_norm_pool_gelu": (Normed, (2, 4, 4, 6, 8)), "conv_gelu_pool": (Pooled, (2, 3, 12, 12))}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where times are kept: a directory of this test's."""
    monkeypatch.setattr(autotune, "cache_dir", lambda: tmp_path)
    torch._dynamo.reset()
    with torch.no_grad():
        yield tmp_path / "autotune"


def compiled(chain: str = "conv_gelu_pool", shape: tuple[int, ...] | None = None, dynamic: bool = False, **options: Any) -> Report:
    """The report of a model compiled under max-autotune, whose result is eager's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, usual = MODELS[chain]
    model, x = make(), torch.randn(shape or usual)
    own = {"fxfuse.mode": "max-autotune", **{f"fxfuse.{name}": value for name, value in options.items()}}
    out = torch.compile(model, backend="fxfuse", options=own, dynamic=dynamic)(x)
    torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-5)
    return fxfuse.reports()[-1]


def given(monkeypatch: pytest.MonkeyPatch, op: float, inductor: float) -> None:
    """Lets the clock say that an op and Inductor take so many milliseconds."""
    times = {"inductor": inductor, "gelu_pool": op}
    monkeypatch.setattr(autotune, "paired_times", lambda contenders, *_: {name: [times[name]] for name in contenders})


@pytest.mark.parametrize("chain", MODELS)
def test_candidates_are_timed_and_kept(chain: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = compiled(chain)
    (kept,) = fresh.glob("*.json")
    times = json.loads(kept.read_text())
    assert set(times) == {"inductor", OPS[chain]} and all(ms > 0 for ms in times.values())
    told = [f"measured {ms * 1e3:.0f} us" for ms in times.values()]
    if report.fused:
        assert {c.verdict for c in report.fused[0].candidates} >= set(told) and "the fastest" in report.fused[0].choice
    else:
        assert all(text in report.declined[0].reason for text in told)

    monkeypatch.setattr(autotune, "paired_times", None)  # whatever is timed again fails
    again = compiled(chain)
    assert (again.fused, again.declined) == (report.fused, report.declined)


def test_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, op=0.004, inductor=0.005)
    (fused,) = compiled().fused
    assert fused.op == "gelu_pool" and fused.choice == "measured 4 us, the fastest"
    assert "inductor: measured 5 us" in str(fxfuse.reports()[-1])


def test_inductor_is_left_what_it_does_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, op=0.006, inductor=0.005)
    (declined,) = compiled().declined
    assert "Inductor is the fastest" in declined.reason and "gelu_pool: measured 6 us" in declined.reason


def test_other_shapes_are_timed_for_themselves(fresh: Path) -> None:
    compiled()
    compiled(shape=(3, 3, 12, 12))
    assert len(list(fresh.glob("*.json"))) == 2


@pytest.mark.parametrize("select", ["always", "tail", "never"])
def test_only_auto_times(select: str, fresh: Path) -> None:
    compiled(select=select)
    assert not fresh.exists()


def test_sizes_that_vary_are_not_timed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "RATES", {})
    (fused,) = compiled("conv_norm_pool_gelu", dynamic=True).fused
    assert fused.choice.startswith("not timed (sizes vary); not measured on this device") and not fresh.exists()


def test_candidates_that_do_not_fit_the_memory_are_not_timed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_free_memory", lambda device: 100.0)
    report = compiled("conv_norm_pool_gelu")
    told = [f.choice for f in report.fused] + [d.reason for d in report.declined]
    assert "not timed (timing needs 0.0 GB, 0.0 GB are free); " in told[0] and not fresh.exists()


def test_a_training_step_is_not_timed(fresh: Path) -> None:
    with torch.enable_grad():
        report = compiled()
    told = [f.choice for f in report.fused] + [d.reason for d in report.declined]
    assert "not timed (the result needs a gradient); predicted" in told[0] and "in a training step" in told[0] and not fresh.exists()


def test_a_failure_to_time_leaves_the_choice_to_the_rule(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(autotune, "paired_times", None)
    with caplog.at_level(logging.ERROR, "fxfuse"):
        report = compiled()
    told = [f.choice for f in report.fused] + [d.reason for d in report.declined]
    assert "not timed (TypeError, see the log); predicted" in told[0]
    assert "could not be timed" in caplog.text and "Traceback" in caplog.text


def test_times_that_cannot_be_kept_are_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(autotune, "cache_dir", lambda: tmp_path / "file")
    given(monkeypatch, op=0.004, inductor=0.005)
    assert compiled().fused[0].op == "gelu_pool"
    assert f"measured times are not kept: the cache directory {tmp_path / 'file'} cannot be used" in caplog.text and "FXFUSE_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"inductor": 0.005}', '{"inductor": 0.005, "gelu_pool": null}', '{"inductor": 1.0, "others": 2.0}'])
def test_times_that_are_damaged_are_measured_again(fresh: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    given(monkeypatch, op=0.004, inductor=0.005)
    compiled()
    (kept,) = fresh.iterdir()
    whole = kept.read_text(encoding="utf-8")
    kept.write_text(content, encoding="utf-8")
    torch._dynamo.reset()
    assert compiled().fused[0].op == "gelu_pool" and kept.read_text(encoding="utf-8") == whole


def test_times_that_may_not_be_read_are_measured_again(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fresh.symlink_to(fresh)
    given(monkeypatch, op=0.004, inductor=0.005)
    assert compiled().fused[0].op == "gelu_pool"
    assert "measured times are not kept" in caplog.text
