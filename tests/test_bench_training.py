"""`fxfuse bench --training` on a CPU: what a step is, which gradients its error is of, its rows and table, and what its sweep covers."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxfuse.bench import chart, checks, contenders, results, row, table, workloads
from fxfuse.bench.work import Step, Training
from fxfuse.cli import main
from fxfuse.headline import ConvGeluPool, ConvNormPoolGelu
from fxfuse.measure import relative_error
from fxfuse.options import Options

MODEL = """
import torch
from torch import nn

def factory():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1)), (torch.randn(2, 3, 12, 12),)

def frozen():
    model, inputs = factory()
    return model.requires_grad_(False), inputs
"""
NEEDS_OPTION = ("fxfuse recompute", "fxfuse save")
HAS_OPTION = "backward" in {field.name for field in dataclasses.fields(Options)}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.manual_seed(0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "trained.py"
    path.write_text(MODEL)
    return path


def measured(model: Path, *arguments: str, factory: str = "factory") -> dict[str, Any]:
    file = model.with_suffix(".json")
    assert main(["bench", f"{model}:{factory}", "--training", "--rounds", "2", "--json", str(file), *arguments]) == 0
    return json.loads(file.read_text())


@pytest.mark.compiler
def test_a_model_of_the_users(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "eager,inductor,inductor channels_last,fxfuse,fxfuse always"
    result = measured(model, "--contenders", names)
    assert set(result) == set(results.header("model", torch.device("cpu"), 2, "")) and result["training"] and not result["input_gradient"]
    assert [own["contender"] for own in result["rows"]] == names.split(",")
    for own in result["rows"]:
        assert set(own) == {field.name for field in dataclasses.fields(row.Row)} and own["training"] and own["failed"] is None
        assert own["wall_ms"] > 0 and own["flops"] is None and own["errors"].keys() == {"0.weight", "0.bias"} and own["zeros"] == []
        assert 0 < own["error"] == max(own["errors"].values()) < 1e-5 and 0 < own["eager_error"] < 1e-5
        assert own["best_inductor"].startswith("inductor") and len(own["over_best_inductor"]) == 3
    assert result["rows"][4]["op"] == "gelu_pool"
    out = capsys.readouterr().out
    assert "/ best inductor" in out and "fxfuse always" in out


def test_gradients_of_inputs(model: Path) -> None:
    (own,) = measured(model, "--contenders", "eager", "--input-gradient")["rows"]
    assert own["errors"].keys() == {"0.weight", "0.bias", "input 0"}


@pytest.mark.compiler
@pytest.mark.skipif(not HAS_OPTION, reason="there is no option fxfuse.backward")
def test_both_ways_of_the_backward(model: Path) -> None:
    found = measured(model, "--contenders", ",".join(NEEDS_OPTION))["rows"]
    assert [own["contender"] for own in found] == list(NEEDS_OPTION) and all(own["failed"] is None and own["error"] < 1e-5 for own in found)


def test_a_model_without_gradients_says_so(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{model}:frozen", "--training", "--contenders", "eager", "--rounds", "1"]) == 1
    assert "no result of the model needs a gradient" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tails", "--training"], "the tail ops alone have no training step"),
        (["headline", "--input-gradient"], "--input-gradient needs --training"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_steps_and_calls_do_not_share_a_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(model, "--contenders", "eager")
    assert (
        main(["bench", f"{model}:factory", "--contenders", "eager", "--rounds", "2", "--json", str(model.with_suffix(".json")), "--resume"])
        == 2
    )
    assert "its training is True, now it is False" in capsys.readouterr().err


def test_a_step_is_autograds_and_leaves_nothing_behind() -> None:
    model, x = ConvGeluPool(3, 8), torch.randn(2, 3, 9, 9)
    step = Step(model, (x,), input_gradient=True)
    first, second = step(), step()
    given = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(given), [*model.parameters(), given], step.grads)
    assert list(first) == ["conv.weight", "conv.bias", "input 0"]
    for found in (first, second):
        assert all(torch.equal(found[name], gradient) for name, gradient in zip(found, expected))
    assert x.grad is None and all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_fails_leaves_no_gradient_to_the_next_one() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_post_accumulate_grad_hook(lambda weight: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Step(model, (torch.ones(1, 2),), False)()
    assert model.weight.grad is None and model.bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_gets_the_same_gradient(dtype: torch.dtype) -> None:
    wide, narrow = (Step(nn.Linear(4, 300, dtype=kind), (torch.randn(100, 4, dtype=kind),), False) for kind in (torch.float64, dtype))
    wide(), narrow()
    assert torch.equal(wide.grads[0], narrow.grads[0].double()) and wide.grads[0].std() > 0.9


def test_zero_gradients_are_in_no_error() -> None:
    """The norm takes away what is the same along W: of the convolution's bias and of the sum's weight all have rounding only."""
    model, inputs = ConvNormPoolGelu(4, 8, 16), (torch.rand(3, 4, 4, 6, 8),)
    work = Training()
    exact = work.reference(model, inputs)
    assert sorted(work.zeros(exact)) == ["conv_transpose.bias", "sum_weight"]
    errors = work.errors(work.call(model, inputs)(), exact)
    assert errors.keys() == {"conv_transpose.weight", "norm.weight", "norm.bias"} and max(errors.values()) < 1e-5


def test_a_wrong_gradient_is_the_worst_error() -> None:
    work, exact = Training(), {"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(4, dtype=torch.float64)}
    errors = work.errors({"a": torch.ones(3), "b": torch.full((4,), 1.5)}, exact)
    assert errors == {"a": 0, "b": 0.5} and checks.worst(errors) == 0.5
    assert str(checks.worst({"a": 1.0, "b": float("nan"), "c": 2.0})) == "nan"
    with pytest.raises(ValueError, match="there is no gradient of b"):
        work.errors({"a": torch.ones(3)}, exact)


def test_tf32_rounds_what_both_directions_multiply() -> None:
    """On values that TF32 holds, only the gradient of the convolution's output is rounded."""
    conv, x = nn.Conv2d(2, 4, 3), torch.randn(2, 2, 6, 6).mul(8).round() / 8
    with torch.no_grad():
        conv.weight.copy_(conv.weight.mul(64).round() / 64)
    work = Training(input_gradient=True)
    exact, rounded = (of(conv, (x,)) for of in (work.reference, work.tf32))
    assert relative_error(rounded, exact) == 0
    model = nn.Sequential(conv, nn.GELU())
    exact, rounded = (of(model, (x,)) for of in (work.reference, work.tf32))
    assert all(2**-14 < relative_error(rounded[name], exact[name]) < 2**-10 for name in ("0.weight", "input 0"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_sweep_is_of_every_kind_and_of_the_inferences_workloads(device: str) -> None:
    swept = workloads.training_sweep(torch.device(device))
    assert 20 <= len(swept) <= 40 and {str(workload) for workload in swept} <= {
        str(workload) for workload in workloads.sweep(torch.device(device))
    }
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert device == "cpu" or f"fp32, {len(swept)} workloads on a GPU" in readme
    assert {workload.kind for workload in swept} == set(workloads.kinds(torch.device(device)))
    assert all(count >= 12 for count in Counter(workload.chain for workload in swept).values())


def test_tables_of_gpu_rows() -> None:
    blank = row.Row("chain", "chain", "float32", "tf32", "contiguous", [[1]], "inductor", training=True)
    inductor = dataclasses.replace(
        blank, gpu_ms=2.0, peak_mb=400.0, error=1e-3, eager_error=2e-3, over_best_inductor=(1, 1, 1), peak_over_best_inductor=1
    )
    saved = dataclasses.replace(
        inductor, contender="fxfuse save", gpu_ms=1.5, peak_mb=100.0, over_best_inductor=(0.7, 0.75, 0.8), peak_over_best_inductor=0.25
    )
    kept = [dataclasses.asdict(own) for own in (inductor, saved)]
    ceilings = {"bytes_per_s": 4e12, "flops_per_s": {}}
    text = table.text({"suite": "headline", "rows": kept, "ceilings": ceilings})
    for cell in ("/ best inductor", "peak / its", "1.500", "0.75", "0.25", "100.0", "1.0e-03", "2.0e-03"):
        assert cell in text
    text = table.text({"suite": "sweep", "rows": kept, "ceilings": ceilings})
    for cell in ("inductor ms, MB", "2.0000, 400", "1.5000, 100", "auto within 1.02x of inductor: 0 of 0"):
        assert cell in text


def test_an_error_above_the_bound_is_listed() -> None:
    blank = row.Row("chain", "chain", "bfloat16", "", "contiguous", [[1]], "fxfuse save", training=True, eager_error=1e-3)
    errors = {"weight": 3e-3, "bias": 1e-3}
    kept = [
        dataclasses.asdict(dataclasses.replace(blank, contender=name, error=3e-3, errors=errors)) for name in ("inductor", "fxfuse save")
    ]
    kept += [dataclasses.asdict(dataclasses.replace(blank, contender="fxfuse", error=1.9e-3, errors={"weight": 1.9e-3}))]
    text = table.text({"suite": "headline", "rows": kept, "ceilings": {"bytes_per_s": 4e12, "flops_per_s": {}}})
    assert (
        "chain bfloat16 contiguous: fxfuse save's gradient of weight errs by 3.0e-03, above 2.0e-03" in text and text.count("errs by") == 1
    )


def test_chart_of_time_and_of_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    blank = row.Row("chain", "chain", "float32", "tf32", "contiguous", [[1]], "inductor", training=True, wall_ms=2.0, peak_mb=400.0)
    kept = [dataclasses.asdict(own) for own in (blank, dataclasses.replace(blank, contender="fxfuse save", gpu_ms=1.5, peak_mb=None))]
    chart.draw({"suite": "headline", "rows": kept, "device": "a GPU", "torch": "2"}, tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    for label in ("GPU ms a training step", "peak MB of a training step", "fxfuse save"):
        assert f"<!-- {label}" in drawn
    chart.draw(
        {"suite": "headline", "rows": [{**own, "peak_mb": None} for own in kept], "device": "a CPU", "torch": "2"}, tmp_path / "time.svg"
    )
    assert "peak MB" not in (tmp_path / "time.svg").read_text()
    fewer = [own for own in kept if own["contender"] != "fxfuse save"]
    chart.draw({"suite": "headline", "rows": fewer, "device": "a GPU", "torch": "2"}, tmp_path / "fewer.svg")
    assert "<!-- fxfuse save -->" in drawn and "<!-- fxfuse save -->" not in (tmp_path / "fewer.svg").read_text()


def test_a_memory_estimate_of_a_step_is_larger(monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 x 8 x 10 x 10 values, six of them at once in fp64."""
    monkeypatch.setattr(checks, "free_bytes", lambda device: 8 * 1600 * 6)
    (own,) = measured(model, "--contenders", "eager")["rows"]
    assert own["no_error"].startswith("no fp64 reference") and own["error"] is None and own["errors"] is None and own["zeros"] is None


@pytest.mark.compiler
def test_sweep_and_headline(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    given = ["--training", "--contenders", "eager,fxfuse", "--rounds", "2", "--json", str(file)]
    assert main(["bench", "sweep", *given, "--only", "n8 c8-48 k2 100x100"]) == 0
    assert [own["contender"] for own in json.loads(file.read_text())["rows"]] == ["eager", "fxfuse"]
    assert main(["bench", "headline", *given, "--only", "conv_gelu_pool float32 contiguous"]) == 0
    assert [(own["chain"], own["contender"]) for own in json.loads(file.read_text())["rows"]] == [
        ("conv_gelu_pool", "eager"),
        ("conv_gelu_pool", "fxfuse"),
    ]


def test_every_default_is_a_contender() -> None:
    assert {name for names in contenders.TRAINING_DEFAULTS.values() for name in names} <= contenders.CONTENDERS.keys()
    assert contenders.chosen(None, "sweep", training=True) == ["inductor", "fxfuse", "fxfuse always", *NEEDS_OPTION]
