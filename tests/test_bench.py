"""`fxfuse bench` on a CPU: its table, its file, its exit codes and sentences, and what its workloads cover."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import re
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxfuse.bench import chart, checks, contenders, counts, results, rows, table, workloads
from fxfuse.bench.sweep import shapes
from fxfuse.cli import main
from fxfuse.headline import ConvNormPoolGelu

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x, scale):
        y = nn.functional.gelu(self.conv(x))
        return {"pooled": nn.functional.adaptive_avg_pool2d(y, 1), "more": [x.mean() * scale]}

def factory():
    torch.manual_seed(0)
    return Model(), (torch.randn(2, 3, 12, 12), 2.0)

def raises():
    raise ValueError("no weights here" + chr(10) + "second line")

def returns_a_model():
    return Model()

number = 3
"""
# Two workloads of the sweep that a CPU does at once.
TINY = ["sweep", "--only", "k3 512 ", "--contenders", "eager", "--rounds", "2"]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU, and with the module path as it was once a test has imported a user's module."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


def load(path: Path) -> dict[str, Any]:
    """The file, which holds nothing that is not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.compiler
def test_a_model_of_the_users(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = model.with_name("out.json")
    assert main(["bench", f"{model}:factory", "--contenders", "eager,inductor,fxfuse always,fxfuse", "--rounds", "3", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "[1/1] mine.py:factory float32 contiguous: compiling 4 contenders" in err
    for text in ("workload", "wall ms", "/ inductor", "error", "became", "fxfuse always", "gelu_pool", "ceilings: a copy"):
        assert text in out
    result = load(file)
    assert set(result) == set(results.header("model", torch.device("cpu"), 3, ""))
    assert (result["schema"], result["suite"], result["complete"], result["torch"]) == (results.SCHEMA, "model", True, torch.__version__)
    assert result["command"].startswith("fxfuse bench ") and result["ceilings"]["bytes_per_s"] > 0
    assert [row["contender"] for row in result["rows"]] == ["eager", "inductor", "fxfuse always", "fxfuse"]
    for row in result["rows"]:
        assert set(row) == {field.name for field in dataclasses.fields(rows.Row)}
        assert row["wall_ms"] > 0 and row["gpu_ms"] is None and row["failed"] is None
        assert row["error"] < 1e-5 and row["flops"] == 2 * 2 * 8 * 100 * 27 and len(row["over_inductor"]) == 3
    always = result["rows"][2]
    assert (always["op"], always["why"]) == ("gelu_pool", 'select="always"')
    assert result["rows"][3]["auto"]["rival"] == "inductor" and result["rows"][0]["auto"] is None


def test_a_module_by_its_dotted_name(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (model.parent / "own_package").mkdir()
    model.rename(model.parent / "own_package" / "own.py")
    monkeypatch.chdir(model.parent)
    assert main(["bench", "own_package.own:factory", "--contenders", "eager", "--rounds", "1"]) == 0
    assert "own_package.own:factory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{model}:nothing"], "has no attribute 'nothing'"),
        (["{model}:number"], "cannot be called"),
        (["{model}:raises"], "raises ValueError: no weights here"),
        (["{model}:returns_a_model"], "returns Model, not (model, tuple of example inputs)"),
        (["{model}x.py:factory"], "there is no file"),
        (["no_such.module:factory"], "there is no module 'no_such.module'"),
        (["everything"], "'everything' is none of headline, sweep, tails"),
        (["{model}:factory", "--dtype", "float16"], "measured as it is"),
        (["--contenders", "eager,nobody"], "'nobody' is no contender; they are eager, "),
        (["--only", "no such workload"], "nothing of headline on cpu fits"),
        (["--precision", "tf32"], "nothing of headline on cpu fits"),
        (["tails", "--contenders", "eager"], "neither contenders nor a precision"),
        (["--rounds", "0"], "--rounds 0"),
        (["--resume"], "--resume needs --json"),
        (["--json", "{model}/no/folder.json"], "there is no folder"),
        (["--chart", "chart.pdf"], "must end in .svg or .png"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *(text.format(model=model) for text in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fxfuse bench: ") and sentence in err and err.count("\n") == 1


def test_a_contender_that_fails_is_a_row(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def backend(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate much.")

    failing = {**contenders.CONTENDERS, "inductor": contenders.Contender({"backend": backend}), "fxfuse": contenders.Contender({"backend": "nobody"})}
    for module in (contenders, checks):
        monkeypatch.setattr(module, "CONTENDERS", failing)
    file = model.with_name("out.json")
    assert main(["bench", f"{model}:factory", "--contenders", "inductor,fxfuse,eager", "--rounds", "2", "--json", str(file)]) == 0
    memory, unknown, eager = load(file)["rows"]
    assert memory["failed"] == "out of memory" and memory["wall_ms"] is None
    assert "nobody" in unknown["failed"] and eager["failed"] is None and eager["wall_ms"] > 0
    assert "failed: out of memory" in capsys.readouterr().out


def test_exit_code_1_if_nothing_could_be_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CONTENDERS", {"eager": contenders.Contender({"backend": "nobody"})})
    assert main(["bench", f"{model}:factory", "--contenders", "eager", "--rounds", "1"]) == 1


def test_a_reference_that_does_not_fit_the_memory_is_left_out(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "free_bytes", lambda device: 1000)
    file = model.with_name("out.json")
    assert main(["bench", f"{model}:factory", "--contenders", "eager", "--rounds", "1", "--json", str(file)]) == 0
    (row,) = load(file)["rows"]
    assert row["error"] is None and row["wall_ms"] > 0 and row["no_error"].startswith("no fp64 reference: it takes about")
    assert "no fp64 reference" in capsys.readouterr().out


def interrupt_second(measure: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[Any] = []

    def measured(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    return measured


def test_an_interrupted_run_keeps_its_rows_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    with monkeypatch.context() as patch:
        patch.setattr(rows, "measure", interrupt_second(rows.measure))
        assert main(["bench", *TINY, "--json", str(file)]) == 130
    out, err = capsys.readouterr()
    first = load(file)
    assert len(first["rows"]) == 1 and not first["complete"] and "n1 c32-64 k3 512" in out and "interrupted" in err
    assert main(["bench", *TINY, "--json", str(file), "--resume"]) == 0
    second = load(file)
    assert second["complete"] and second["rows"][0] == first["rows"][0] and len(second["rows"]) == 2
    assert "[1/1] conv_gelu_pool n1 c32-64 k3 512 bfloat16" in capsys.readouterr().err
    assert main(["bench", *TINY, "--json", str(file), "--resume", "--rounds", "3"]) == 2
    assert "its rounds is 2, now it is 3" in capsys.readouterr().err
    assert main(["bench", *TINY, "--json", str(file), "--resume", "--contenders", "eager,fxfuse"]) == 2
    assert "fxfuse was not measured in it; give --contenders as then" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_an_interrupt_that_python_drops_ends_the_run_after_the_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = rows.measure

    def measured(*args: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):  # as a weak reference's callback does
            signal.raise_signal(signal.SIGINT)
        return measure(*args)

    monkeypatch.setattr(rows, "measure", measured)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["bench", *TINY, "--json", str(tmp_path / "out.json")]) == 130
    assert len(load(tmp_path / "out.json")["rows"]) == 1 and signal.getsignal(signal.SIGINT) is handler


def test_a_time_limit_starts_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *TINY, "--seconds", "0", "--json", str(tmp_path / "out.json")]) == 1
    out, err = capsys.readouterr()
    assert out == "nothing was measured\n" and "out of time: 2 of 2 workloads are left out" in err
    assert load(tmp_path / "out.json")["rows"] == []


@pytest.mark.compiler
def test_sweep_and_its_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "sweep.svg"
    only = ["--only", "conv_gelu_pool n1 c1-8 k3", "--rounds", "3", "--json", str(tmp_path / "sweep.json"), "--chart", str(drawn)]
    assert main(["bench", "sweep", "--dtype", "float32", "--layout", "contiguous", *only]) == 0
    out = capsys.readouterr().out
    assert "auto within 1.02x of the faster of inductor and tail: " in out and "fxfuse tail ms" in out
    result = load(tmp_path / "sweep.json")
    assert [row["contender"] for row in result["rows"]] == list(contenders.DEFAULTS["sweep"])
    assert [row["op"] for row in result["rows"]][2:] == ["gelu_pool", "gelu_pool"]
    first = drawn.read_text()
    chart.draw(result, drawn)
    assert drawn.read_text() == first and "<svg" in first


@pytest.mark.compiler
def test_headline_and_its_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn, file = tmp_path / "headline.png", tmp_path / "headline.json"
    only = ["--only", "conv_gelu_pool float32 contiguous", "--contenders", "eager,fxfuse", "--rounds", "2"]
    assert main(["bench", *only, "--json", str(file), "--chart", str(drawn)]) == 0
    assert [(row["chain"], row["contender"]) for row in load(file)["rows"]] == [("conv_gelu_pool", "eager"), ("conv_gelu_pool", "fxfuse")]
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    assert main(["bench", "--chart", "headline.svg"]) == 2
    assert "pip install 'fxfuse[chart]'" in capsys.readouterr().err


@pytest.mark.compiler
def test_tails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tails", "--only", " float32 contiguous", "--rounds", "2", "--json", str(tmp_path / "tails.json")]) == 0
    assert re.search(r"norm_pool_gelu .* \d+%", capsys.readouterr().out)
    assert [row["op"] for row in load(tmp_path / "tails.json")["rows"]] == ["norm_pool_gelu", "gelu_pool"]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["bench", "--help"])
    assert leave.value.code == 0
    out = capsys.readouterr().out
    for text in ("module.py:factory", "error against fp64", "exit code", "--json FILE", "fxfuse max-autotune", "peak memory"):
        assert text in out


def test_the_sweep_covers_what_it_claims() -> None:
    every = list(shapes())
    assert len({shape.name for shape in every}) == len(every) >= 64

    def span(values: list[int]) -> tuple[int, int]:
        return min(values), max(values)

    assert span([shape.n for shape in every]) == (1, 256) and span([shape.c_in for shape in every]) == (1, 256)
    assert span([shape.c_out for shape in every]) == (8, 512) and span([size for shape in every for size in shape.spatial]) == (7, 512)
    pooled = [shape for shape in every if shape.chain == "conv_gelu_pool"]
    normed = [shape for shape in every if shape.chain == "conv_norm_pool_gelu"]
    assert {shape.kernel for shape in pooled} == set(range(1, 8)) and {shape.kernel for shape in normed} == set(range(1, 6))
    assert {(len(shape.spatial), shape.transposed) for shape in pooled} == {(dims, transposed) for dims in (1, 2, 3) for transposed in (False, True)}
    assert len({shape.output_size for shape in pooled}) >= 4 and {shape.pool for shape in normed} == {1, 2, 3, 4}
    assert {shape.norm_ndim for shape in normed} == {1, 2} and {shape.addend for shape in normed} == {"scalar", "channel", "number", "none"}
    assert {shape.transposed for shape in normed} == {False, True} and max(shape.between[-1] for shape in normed) == 512
    assert any(size % 2 for shape in normed for size in shape.spatial)
    assert 0.9e9 < max(4 * math.prod(shape.between) for shape in every) < 1.1e9
    assert max(4 * math.prod(shape.for_cpu().between) for shape in every) <= 2**24


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kind_occurs_often(device: str) -> None:
    kinds = workloads.kinds(torch.device(device))
    dealt = workloads.sweep(torch.device(device))
    assert len({str(workload) for workload in dealt}) == len(dealt)
    assert all(count >= 8 for count in Counter(workload.kind for workload in dealt).values())
    assert {workload.kind for workload in dealt} == set(kinds) and len(workloads.headline(torch.device(device))) == 2 * len(kinds)
    numbers = {(kind.dtype, kind.precision) for kind in kinds}
    expected = {("float32", "tf32"), ("float32", "ieee"), ("bfloat16", ""), ("float16", "")} if device == "cuda" else {("float32", ""), ("bfloat16", "")}
    assert numbers == expected


def test_shapes_are_those_of_the_models() -> None:
    for shape in (shape.for_cpu() for shape in shapes()):
        model = shape.make().to("meta")
        assert model.conv(torch.empty(shape.input, device="meta")).shape == shape.between, shape.name
        assert counts.count(shape.make(), (torch.empty(shape.input),)).largest >= math.prod(shape.between)


def test_counts_of_a_headline_model() -> None:
    x = torch.empty(2, 32, 8, 16, 32)
    counted = counts.count(ConvNormPoolGelu(), (x,))
    # A transposed convolution multiplies each input voxel with every tap.
    assert counted.flops == 2 * x.numel() * 27 * 64
    assert counted.output_bytes == 4 * 2 * 64 * 8 * 16 * 32 and counted.input_bytes == x.nbytes
    assert counted.bytes == x.nbytes + counted.output_bytes + 4 * (32 * 64 * 27 + 64 + 1 + 64 + 64)


def test_precision_is_switched_and_put_back() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    for precision in ("ieee", "tf32"):
        with workloads.switched(precision):
            assert cudnn.conv.fp32_precision == precision and cudnn.allow_tf32 == (precision == "tf32")
    assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == before


def test_channels_last_contenders_only_where_they_differ() -> None:
    names = ["inductor", "inductor channels_last"]
    flat, image = torch.empty(2, 3, 4), torch.empty(2, 3, 4, 5)
    given = workloads.Kind("float32", "", "contiguous")
    assert contenders.applicable(names, given, (image,)) == names
    assert contenders.applicable(names, given, (flat,)) == names[:1]
    assert contenders.applicable(names, workloads.Kind("float32", "", "channels_last"), (image,)) == names[:1]


def test_table_of_gpu_rows() -> None:
    row = dataclasses.asdict(rows.Row("chain", "chain", "float32", "tf32", "contiguous", [[1]], "inductor", gpu_ms=1.5, wall_ms=2.0, peak_mb=8.0, output_mb=1.25))
    row |= {"error": 3e-4, "eager_error": 2e-4, "tf32_error": 1e-4, "timed_by": "events around plain calls", "bytes_per_s": 2e12, "bytes_share": 0.5, "flops_per_s": 1e14, "flops_share": 0.25}
    failed = {**row, "contender": "fxfuse", "failed": "out of memory", "gpu_ms": None}
    result = {"suite": "headline", "rows": [row, failed], "ceilings": {"bytes_per_s": 4e12, "flops_per_s": {"float32 tf32": 4e14}}}
    text = table.text(result)
    for cell in ("GPU ms", "1.500", "peak MB", "2 (50%)", "100 (25%)", "1.2", "3.0e-04", "2.0e-04", "1.0e-04", "inductor (events)", "failed: out of memory", "4,000 GB/s"):
        assert cell in text


@pytest.mark.compiler
def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "quickstart.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("1 fused, 0 declined in 1 graph") == 2 and out.count("equal to eager's result") == 2
