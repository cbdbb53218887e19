"""The commands: what `explain` and `passes` print and write, exit codes, `--help`, and that bad input is one line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxfuse
from fxfuse import document, library
from fxfuse.bench.results import device_name
from fxfuse.chain import chains
from fxfuse.cli import main
from fxfuse.report import Candidate, Declined, Fused

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = F.adaptive_avg_pool2d(F.gelu(self.first(x)), 1)
        return y, F.gelu(self.second(x)).amax((2, 3))  # near miss

def factory():
    return Model(), (torch.randn(2, 3, 12, 12),)

def wrong_input():
    return Model(), (torch.randn(2, 5, 12, 12),)

def raises():
    raise ValueError("no weights here")

def takes_arguments(size):
    return Model(), (torch.randn(2, 3, size, size),)
"""
REPRO = {"repro", "no_repro"}
COMMANDS = ("demo", "doctor", "explain", "passes", "bench")


@pytest.fixture(autouse=True)
def as_if_every_library_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda device, build=True: None)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`mine.py`, and the working directory that it is in."""
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "imports.py").write_text("import torch\nimport no_such_module\n")
    (tmp_path / "no_python.py").write_text("def factory(:\n")
    monkeypatch.chdir(tmp_path)
    return "mine.py:factory"


def line_of(text: str) -> int:
    """The line of MODEL that holds the text."""
    return 1 + next(index for index, line in enumerate(MODEL.splitlines()) if text in line)


def explain(*arguments: str) -> int:
    return main(["explain", *arguments])


def test_explain_names_the_line_that_has_to_change(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(model, "--select", "always") == 0
    out, err = capsys.readouterr()
    assert out.startswith("1 fused, 1 declined in 1 graph\n") and err == ""
    assert f"mine.py:{line_of('self.first(x)')} " in out and f"mine.py:{line_of('# near miss')} " in out
    assert "gelu is followed by amax; the chain goes on with" in out


def test_explain_by_a_dotted_name_and_with_gradients(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("nested").mkdir()
    Path("mine.py").rename("nested/theirs.py")
    assert explain("nested.theirs:factory", "--grad") == 0
    out = capsys.readouterr().out
    assert out.startswith("0 fused, 2 declined") and "in a training step" in " ".join(out.split()) and "torch.no_grad()" in out
    assert explain("nested.theirs:factory", "--grad", "--backward", "save") == 0
    assert capsys.readouterr().out.startswith("1 fused, 1 declined")
    assert explain("nested.theirs:factory", "--grad", "--select", "always") == 0
    assert capsys.readouterr().out.startswith("1 fused, 1 declined")


def test_expectations_that_hold(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(model, "--select", "always", "--expect", "conv_gelu_pool=1", "--expect", "conv_norm_pool_gelu=0") == 0
    assert "expected" not in capsys.readouterr().out


def test_expectations_that_do_not_hold(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(model, "--select", "always", "--expect", "conv_gelu_pool=2", "--expect", "conv_norm_pool_gelu=1") == 1
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first == (
        f"expected conv_gelu_pool to be fused 2 times, found it fused 1 time and declined 1 time; "
        f"fused at mine.py:{line_of('self.first(x)')} (first); declined at mine.py:{line_of('# near miss')} (second) behind gelu: gelu is followed by amax; the chain goes on with adaptive_avg_pool or mean"
    )
    assert second.startswith("expected conv_norm_pool_gelu to be fused 1 time, found it fused 0 times and declined 0 times: no conv over 3 dims")
    assert explain(model, "--select", "always", "--expect", "conv_gelu_pool=0") == 1
    assert "expected conv_gelu_pool not to be fused, found it fused 1 time" in capsys.readouterr().out


@pytest.mark.parametrize("times", [0, 1])
def test_without_a_graph_no_expectation_holds(model: str, times: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    off = "TORCHDYNAMO_DISABLE=1 turns torch.compile off, so no graph was captured: run without it"
    assert explain(model, "--expect", f"conv_gelu_pool={times}", "--json", "out.json") == 1
    wanted = "to be fused 1 time" if times else "not to be fused"
    assert capsys.readouterr().out == (
        f"0 fused, 0 declined in 0 graphs\n\nstopped: {off}\n\nexpected conv_gelu_pool {wanted}, found no graph: stopped: {off}\n"
    )
    result = json.loads(Path("out.json").read_text())
    assert (result["graphs"], result["stopped"], len(result["unmet"])) == (0, off, 1)


def test_options(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FXFUSE_SELECT", "always")
    assert explain(model, "--expect", "conv_gelu_pool=1") == 0
    assert explain(model, "--select", "never", "--expect", "conv_gelu_pool=0") == 0
    assert explain(model, "--passes", "conv_norm_pool_gelu", "--expect", "conv_gelu_pool=1") == 1
    assert capsys.readouterr().out.endswith("declined 0 times: fxfuse.passes leaves it out\n")


def test_the_file(model: str) -> None:
    assert explain(model, "--select", "always", "--dynamic", "--expect", "conv_gelu_pool=2", "--json", "out.json") == 1
    result = json.loads(Path("out.json").read_text())
    assert set(result) <= set(document.__doc__.replace(",", " ").split()), "a field is not documented"
    expected: dict[str, Any] = {
        "schema": document.SCHEMA,
        "fxfuse": fxfuse.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [{"device": "cpu", "name": device_name(torch.device("cpu"))}],
        "target": model,
        "grad": False,
        "dynamic": True,
        "options": {"select": "always", "strict": False, "passes": None, "mode": None, "dump": None, "backward": "auto", "inductor": {}},
        "graphs": 1,
        "stopped": None,
        "expected": {"conv_gelu_pool": 2},
    }
    assert {name: result[name] for name in expected} == expected
    (fused,), (declined,), (unmet,) = result["fused"], result["declined"], result["unmet"]
    for record, kind, more in ((fused, Fused, REPRO), (declined, Declined, REPRO), (fused["candidates"][0], Candidate, set())):
        assert set(record) == {field.name for field in dataclasses.fields(kind)} | more
    assert (fused["op"], fused["choice"], len(fused["nodes"])) == ("gelu_pool", 'select="always"', 3)
    assert [candidate["op"] for candidate in fused["candidates"]] == ["conv_gelu_pool", "gelu_pool"]
    assert fused["shapes"].startswith("[s") and declined["reached"] == "gelu"
    assert declined["location"] == f"{Path('mine.py').resolve()}:{line_of('# near miss')}"
    assert unmet.startswith("expected conv_gelu_pool to be fused 2 times")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mine.py"], "'mine.py' is neither module.py:factory nor package.module:factory"),
        (["mine.py:nothing"], "has no attribute 'nothing'"),
        (["none.py:factory"], "there is no file none.py"),
        (["no_such.module:factory"], "there is no module 'no_such.module'"),
        (["mine.py:factori"], "mine.py has no attribute 'factori'; the nearest is 'factory'"),
        (["mine.py:raises"], f"raises ValueError: no weights here at {{}}mine.py:{line_of('no weights here')}\n"),
        (["mine.py:takes_arguments"], "raises TypeError: takes_arguments() missing 1 required positional argument: 'size'\n"),
        (["imports.py:factory"], "importing imports.py raises ModuleNotFoundError: No module named 'no_such_module' at {}imports.py:2\n"),
        (["no_python.py:factory"], "importing no_python.py raises SyntaxError: invalid syntax (no_python.py, line 1)\n"),
        (["mine.py:Model"], "returns Model, not (model, tuple of example inputs)"),
        (["mine.py:wrong_input"], f"raises RuntimeError: Given groups=1, weight of size [8, 3, 3, 3], expected input[2, 5, 12, 12] {{}}mine.py:{line_of('self.first(x)')}"),
        (["mine.py:factory", "--expect", "conv=1"], "--expect: 'conv' is no chain; the chains are conv_gelu_pool, "),
        (["mine.py:factory", "--expect", "conv_gelu_pool=1", "--expect", "conv_gelu_pool=2"], "names a chain twice"),
        (["mine.py:factory", "--passes", "conv"], "fxfuse.passes names 'conv', which is no chain"),
        (["mine.py:factory", "--backward", "save"], "--backward says something of a training step only: give --grad too"),
        (["mine.py:factory", "--json", "no/folder.json"], "--json no/folder.json: there is no folder no"),
        (["mine.py:factory", "--html", "no/page.html"], "--html no/page.html: there is no folder no"),
        (["mine.py:factory", "--html", "."], "--html . is a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model: str, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fxfuse explain: ") and err.count("\n") == 1
    assert all(part in err for part in sentence.split("{}"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "fxfuse: the following arguments are required: command; see fxfuse --help"),
        (["fuse"], "fxfuse: argument command: invalid choice: 'fuse'"),
        (["explain", "mine.py:factory", "--dinamic"], "fxfuse explain: unrecognized arguments: --dinamic; see fxfuse explain --help"),
        (["explain"], "fxfuse explain: the following arguments are required: module.py:factory; see fxfuse explain --help"),
        (["explain", "mine.py:factory", "--expect", "conv_gelu_pool"], "'conv_gelu_pool' is not CHAIN=N, such as conv_gelu_pool=2"),
        (["explain", "mine.py:factory", "--expect", "conv_gelu_pool=-1"], "is not CHAIN=N"),
        (["explain", "mine.py:factory", "--select", "often"], "invalid choice: 'often'"),
        (["passes", "--all"], "unrecognized arguments: --all"),
        (["doctor", "--rebuild"], "unrecognized arguments: --rebuild"),
        (["bench", "--rounds", "many"], "fxfuse bench: argument --rounds: invalid int value: 'many'"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(arguments)
    out, err = capsys.readouterr()
    assert leave.value.code == 2 and out == "" and sentence in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["demo"], ["bench"], ["explain", "math:sqrt"]])
def test_a_variable_that_makes_no_sense(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FXFUSE_SELECT", "often")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"fxfuse {arguments[0]}: FXFUSE_SELECT='often' is not one of auto, always, tail, never\n"


def test_passes_lists_what_every_chain_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    out = capsys.readouterr().out
    cells = " ".join(out.replace("│", " ").split())
    for chain in chains():
        assert f"{chain.name}: {chain.description}" in out.splitlines() and chain.description
        for step in chain.steps:
            assert f"{step.name}: {' or '.join(step.words)}" in out
        for implementation in chain.implementations:
            assert f"fxfuse::{implementation.op} " in out and implementation.description
            assert all(word in cells for word in implementation.description.split())
    assert "conv: conv over 1, 2 or 3 dims" in out and "conv: conv over 3 dims" in out and "add: add, or none" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert leave.value.code == 0 and "Prints " in out and ("xit code" in out or command == "passes")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["--version"])
    assert leave.value.code == 0 and capsys.readouterr().out == f"fxfuse {fxfuse.__version__}\n"


def test_help_lists_the_commands_without_importing_torch() -> None:
    program = "import sys; from fxfuse.cli import main\ntry: main(['--help'])\nexcept SystemExit: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"\n    {command} " in done.stdout for command in COMMANDS)


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as gone:
        # Without NumPy torch warns as it is imported.
        command = [sys.executable, "-W", "ignore", "-m", "fxfuse", "passes"]
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_file_with_the_name_of_an_imported_module(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").rename("json.py")
    assert explain("json.py:factory", "--select", "always", "--expect", "conv_gelu_pool=1") == 0
    assert f"json.py:{line_of('self.first(x)')} " in capsys.readouterr().out
