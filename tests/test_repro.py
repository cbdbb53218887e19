"""Repro scripts are Python whatever the user's code is named, lies in and looks like, and compute what the chain computes."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, dynamo_graph, fake_mode, fuse
from torch import fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxfuse import folder, torch_private
from fxfuse.cut import cut_out
from fxfuse.options import Options
from fxfuse.report import Declined, Fused, Report
from fxfuse.repro import repros

# What a path, a reason or a name may hold and a Python literal, comment or UTF-8 file may not.
TEXTS = {
    "plain": "plain",
    "escape": r"C:\Users\x\N{",
    "backslash at the end": "end\\",
    "docstring end": 'a"""b',
    "quotes": '"\'"',
    "quotes at the end": 'end""',
    "line end": "a\nb",
    "carriage return": "a\rimport b",
    "form feed": "a\x0cb",
    "line separator": "a\u2028b\x85c",
    "not UTF-8": os.fsdecode(b"caf\xe9"),
    "not ASCII": "café 图",
    "fields": "{title} {0} %s",
    "definition": "def forward(self, x)",
}

# Sources of a `model` with both a fused chain and one that is not: the tanh stops it.
HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n\n"
BEGIN = """class Model(nn.Module):
    def __init__(self): super().__init__(); self.conv = nn.Conv2d(4, 8, 3)
    def stop(self, x): return F.gelu(self.conv(x)).tanh()
"""
CHAIN = "F.adaptive_avg_pool2d(F.gelu(self.conv(x)), 1), self.stop(x)"
SOURCES = {
    "one line": f"{HEAD}{BEGIN}    def forward(self, x): return {CHAIN}\n",
    "one line of defaults": f"{HEAD}{BEGIN}    def forward(  self , x , y = 'def forward(self)' ) : return {CHAIN}\n",
    "quotes a definition": f"{HEAD}{BEGIN}    def forward(self, x):\n        return {CHAIN}  # def forward(self, x): def forward(self):\n",
    "quotes a docstring end": f'{HEAD}{BEGIN}    def forward(self, x):\n        return {CHAIN}  # """ \\U \\N{{ \\\n',
    "form feed and tab": f"{HEAD}{BEGIN}    def forward(self, x):\n        return {CHAIN}  # a\x0cb\tc\x1cd\n",
    "carriage returns": f"{HEAD}{BEGIN}    def forward(self, x): return {CHAIN}\n".replace("\n", "\r\n"),
    "Latin-1": f"# coding: latin-1\n{HEAD}{BEGIN}    def forward(self, x): return {CHAIN}  # café\n",
}


def model_in(directory: Path, source: str) -> nn.Module:
    """The model of a module that lies in that directory."""
    directory.mkdir(parents=True)
    path = directory / "model.py"
    path.write_bytes(source.encode("latin-1"))
    spec = importlib.util.spec_from_file_location("model_of_test_repro", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model()


def written(gm: fx.GraphModule, report: Report, directory: Path, inductor: dict[str, Any] | None = None) -> list[str]:
    """The texts of the scripts of all chains, as they are read from a dump's folder."""
    made = repros(gm.graph, report, Options(select="always"), inductor or {})
    assert made and all(repro.missing is None for repro in made)
    folder.write(directory, "dump", {str(repro.file): repro.text for repro in made})
    texts = [(directory / "dump" / str(repro.file)).read_bytes().decode("utf-8") for repro in made]
    # A carriage return would be a line end to Python.
    assert texts == [repro.text for repro in made] and "\r" not in "".join(texts)
    return texts


def loaded(script: str) -> dict[str, Any]:
    """The names of the script, which is compiled and imported and not run."""
    scope: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "script", "exec"), scope)
    return scope


@contextmanager
def untraced() -> Iterator[None]:
    """torch's structured trace, to which pytest's capture of logs listens, cannot hold a path that is not UTF-8; torch compiles it without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._logging._internal.trace_log, "handlers", [])
        yield


def captured(model: Any, *args: torch.Tensor) -> tuple[fx.GraphModule, Report]:
    with untraced():
        gm = dynamo_graph(model, *args)
    return gm, fuse(gm)[1]


def told(report: Report) -> list[Fused | Declined]:
    return [*report.fused, *report.declined]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_scripts_of_every_folder_are_python(text: str, tmp_path: Path) -> None:
    gm, report = captured(model_in(tmp_path / text, SOURCES["one line"]), torch.randn(2, 4, 8, 8))
    assert (len(report.fused), len(report.declined)) == (1, 1)
    for script, record in zip(written(gm, report, tmp_path), told(report), strict=True):
        docstring = ast.get_docstring(ast.parse(script))
        assert docstring is not None and f"Where it stands: {record.location or 'not known'}" in docstring
        # A stack trace with a line end in a path cannot be taken apart.
        assert text in record.location or "\n" in text
        assert callable(loaded(script)["chain"])


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_scripts_of_every_source_are_python(source: str, tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", source)
    x = torch.randn(2, 4, 8, 8)
    gm, report = captured(model, x)
    assert (len(report.fused), len(report.declined)) == (1, 1)
    for script in written(gm, report, tmp_path):
        (chain, inputs) = (node for node in ast.parse(script).body if isinstance(node, ast.FunctionDef))
        assert (chain.name, [argument.arg for argument in chain.args.args]) == ("chain", ["input_0", "input_1", "input_2"])
        assert "# File: " in script and inputs.name == "inputs"
        names = loaded(script)
        assert names["chain"](*names["inputs"]())[-1].isfinite().all()
    # What a comment quotes is the user's line.
    assert "one line" not in source or "def forward(self, x): return" in script
    for text in (torch_private.readable(gm.graph), torch_private.readable(fuse(gm)[0])):
        assert ast.parse(text) and text.encode() and "\r" not in text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_docstring_says_what_the_report_says(text: str, tmp_path: Path) -> None:
    gm, report = captured(ConvGeluPool(), torch.randn(2, 4, 8, 8))
    (fused,) = report.fused
    declined = Declined("conv_gelu_pool", "gelu", "gelu", text, text, fused.nodes[:2])
    odd = Report(fused=[dataclasses.replace(fused, choice=text, location=text)], declined=[declined])
    for script, verdict in zip(written(gm, odd, tmp_path), (f"became {fused.op}: {text}.", f"was not fused: {text}."), strict=True):
        (docstring, *_) = ast.parse(script).body
        assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
        assert docstring.value.value.startswith(f"conv_gelu_pool {verdict}\n\nWhere it stands: {text}.\nRebuilds")
        assert loaded(script)["SETTING"].select == "always"


class Odd:
    """An annotation whose repr is a text of its own."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_annotations_and_traces_stay_in_their_comments(text: str, tmp_path: Path) -> None:
    gm, report = captured(ConvGeluPool(), torch.randn(2, 4, 8, 8))
    for node in gm.graph.nodes:
        node.meta["custom"] = {text: Odd(text)}
        node.meta["stack_trace"] = f'  File "/{text}.py", line 3, in {text}\n    {text}'
    before = [dict(node.meta) for node in gm.graph.nodes]
    (script,) = written(gm, report, tmp_path)
    assert "Annotation: {" in script and callable(loaded(script)["chain"])
    listing = torch_private.readable(gm.graph)
    assert ast.parse(listing) and listing.encode()
    assert [dict(node.meta) for node in gm.graph.nodes] == before


# Names that the script, fxfuse's placeholders or Python have as well.
NAMES = (
    ("input_0", "input_1", "input_2", "input_3", "input_4"),
    ("input_2", "input_1", "input_0", "input_4", "input_3"),
    ("tensor", "inputs", "chain", "compare", "Setting"),
    ("torch", "sys", "self", "forward", "SETTING"),
    ("getattr", "device", "inf", "_operator", "__name__"),
    ("input", "input_3", "input_0_1", "input_1_1", "input_3_1"),
)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_names_of_values_change_nothing(names: tuple[str, ...], tmp_path: Path) -> None:
    """Chain A, whose layer_norm reads its parameters when values of the chain are there already."""
    x, weight, scale = torch.randn(2, 4, 6, 6, 12), torch.randn(8, 4, 3, 3, 3), torch.randn(10)
    graph = fx.Graph()
    given = [graph.create_node("placeholder", f"{name}_given", name=f"{name}_given") for name in names[:2]]
    conv = graph.create_node("call_function", torch.conv3d, tuple(given), name=names[0])
    last = graph.create_node("placeholder", "last", name=names[1])
    norm = graph.create_node("call_function", F.layer_norm, (conv, (10,), last), name=names[2])
    pool = graph.create_node("call_function", F.avg_pool3d, (norm, 2), name=names[3])
    graph.output(graph.create_node("call_function", F.gelu, (pool,), name=names[4]))
    gm = fx.GraphModule(nn.Module(), graph)
    mode = fake_mode()
    FakeTensorProp(gm, mode).propagate(*map(mode.from_tensor, (x, weight, scale)))
    report = fuse(gm)[1]
    assert [fused.chain for fused in report.fused] == ["conv_norm_pool_gelu"]
    (script,) = written(gm, report, tmp_path)
    (result,) = loaded(script)["chain"](x, weight, scale)
    cut = cut_out([node for node in graph.nodes if node.name in report.fused[0].nodes])
    assert isinstance(cut, fx.Graph)
    torch.testing.assert_close(fx.GraphModule(nn.Module(), cut)(x, weight, scale)[0], result)
    torch.testing.assert_close(result, F.gelu(F.avg_pool3d(F.layer_norm(torch.conv3d(x, weight), (10,), scale), 2)))


class Level(enum.IntEnum):
    HIGH = 1


def test_options_that_are_no_literals_are_left_out(tmp_path: Path) -> None:
    gm, report = captured(ConvGeluPool(), torch.randn(2, 4, 8, 8))
    odd = {"a": float("inf"), "b": float("nan"), "c": Level.HIGH, "d": print, "e": torch.ones(2)}
    kept = {"f": 0.5, "g": None, "h": 'a"""\n', "i": [1, (2, "x")], "j": True}
    (script,) = written(gm, report, tmp_path, {**odd, **kept})
    assert loaded(script)["SETTING"].inductor == kept


@pytest.mark.compiler
def test_a_script_of_an_odd_folder_runs(tmp_path: Path) -> None:
    """In a Sequential Dynamo names the values `input_1`, ...; folders are those of the model and of the dump."""
    # Inductor compiles no script that lies in a folder that is not UTF-8.
    odd = tmp_path / "".join(text for name, text in TEXTS.items() if name != "not UTF-8")
    layers = "nn.Conv3d(4, 6, 3), nn.LayerNorm(10), nn.AvgPool3d(2), nn.GELU()"
    source = f"{HEAD}class Model(nn.Sequential):\n    def __init__(self): super().__init__({layers})\n"
    model = model_in(odd / TEXTS["not UTF-8"], f"{source}    def forward(self, input): return super().forward(input)\n")
    x = torch.randn(2, 4, 6, 6, 12)
    with torch.no_grad(), untraced():
        torch._dynamo.reset()
        torch.compile(model, backend="fxfuse", options={"fxfuse.select": "always", "fxfuse.dump": odd / "dump"})(x)
    (script,) = odd.glob("dump/*/repro_*.py")
    assert {path.name for path in script.parent.iterdir()} == {"before.py", "after.py", "report.json", "report.html", script.name}
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning", "PYTHONIOENCODING": "utf-8:backslashreplace"}
    done = subprocess.run([sys.executable, script], env=environment, cwd=script.parent, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert "1 fused, 0 declined" in done.stdout
