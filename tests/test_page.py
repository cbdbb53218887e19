"""The report page without a browser: what it shows, that it needs no network, that no name breaks it, that it is written whole or not at all."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, ConvNormPoolGelu, dynamo_graph, fake_mode, gelu_pool
from pages import DATA, data_of, named
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxfuse import api, command, dump, engine, page
from fxfuse.cli import main
from fxfuse.document import document
from fxfuse.options import Options

pytestmark = pytest.mark.usefixtures("explains")

NASTY = "x</script><img src=x onerror=alert(1)>\"'&é{{script}}"

MODEL = """
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(3)

    def forward(self, x):
        x = self.norm(x)
        torch._dynamo.graph_break()
        y = F.adaptive_avg_pool2d(F.gelu(self.first(x)), 1)
        return y, F.gelu(self.second(x)).amax((2, 3))  # "</script><!-- é

def factory():
    return Model().eval(), (torch.randn(2, 3, 12, 12),)
"""


def explained(model: Any, *args: torch.Tensor, dynamic: bool = False, select: str = "always") -> dict[str, Any]:
    """What the page of an explain shows."""
    drawn = []
    options = Options(select=select)
    report = api.explained(model, args, {}, options, dynamic, lambda *graphs: drawn.append(tuple(map(page.picture, graphs))))
    return data_of(page.html(document(report, options, [torch.device("cpu")]), drawn))


def written(directory: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """The page and the JSON of `fxfuse explain` on MODEL in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "mine.py").write_text(MODEL)
    files = directory / "page.html", directory / "report.json"
    target = f"{directory / 'mine.py'}:factory"
    assert main(["explain", target, "--select", "always", "--html", str(files[0]), "--json", str(files[1]), *arguments]) == 0
    return files[0].read_text(), json.loads(files[1].read_text())


def test_the_command_writes_both_graphs_and_the_report(tmp_path: Path) -> None:
    text, told = written(tmp_path)
    data = data_of(text)
    assert data["report"] == told
    assert (told["graphs"], len(data["graphs"]), len(told["fused"]), len(told["declined"])) == (2, 2, 1, 1)
    assert [record["graph"] for record in (*told["fused"], *told["declined"])] == [1, 1]
    for record in (*told["fused"], *told["declined"]):
        assert set(record["nodes"]) <= set(named(data["graphs"][1]["before"]))
    assert named(data["graphs"][1]["before"])[told["declined"][0]["node"]]["at"] == told["declined"][0]["location"]


def test_a_node_has_everything_that_the_graph_knows() -> None:
    data = explained(ConvGeluPool().eval(), torch.randn(2, 4, 8, 8))
    (picture,) = [graph["before"] for graph in data["graphs"]]
    nodes = named(picture)
    conv = next(node for node in nodes.values() if node["target"] == "conv2d")
    assert conv["values"] == [{"dtype": "float32", "shape": ["2", "8", "6", "6"], "stride": ["288", "36", "6", "1"], "device": "cpu"}]
    assert [nodes[name]["kind"] for name in conv["inputs"]] == ["input", "state", "state"]
    assert "models.py:" in conv["at"] and "self.conv(x)" in picture["stacks"][conv["stack"]]
    # Nothing of what explain wraps around the model.
    assert not any("functional_call" in stack for stack in picture["stacks"])
    assert len(picture["stacks"]) < len(nodes) and list(nodes.values())[-1]["kind"] == "output"


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_and_buffers_are_state(compiled: bool) -> None:
    model, x = nn.Sequential(nn.BatchNorm2d(4), ConvGeluPool()).eval(), torch.randn(2, 4, 8, 8)
    picture = page.picture(dynamo_graph(model, x).graph) if compiled else explained(model, x)["graphs"][0]["before"]
    kinds = [node["kind"] for node in picture["nodes"]]
    assert (kinds.count("state"), kinds.count("input"), kinds.count("call"), kinds.count("output")) == (6, 1, 4, 1)


@pytest.mark.parametrize(
    ("model", "shape", "op"), [(ConvNormPoolGelu, (2, 4, 6, 6, 12), "norm_pool_gelu"), (ConvGeluPool, (2, 4, 8, 8), "gelu_pool")]
)
def test_what_took_a_chains_place_names_it(model: type[nn.Module], shape: tuple[int, ...], op: str) -> None:
    data = explained(model(), torch.randn(shape))
    (fused,), after = data["report"]["fused"], data["graphs"][0]["after"]
    stands = [node for node in after["nodes"] if node["stands_for"]]
    assert stands[-1]["target"] == f"fxfuse::{op}" and all(node["stands_for"] == fused["nodes"] for node in stands)
    assert not any(node["stands_for"] for node in data["graphs"][0]["before"]["nodes"])


def test_sizes_that_vary_are_text() -> None:
    data = explained(ConvGeluPool(), torch.randn(3, 4, 8, 8), dynamic=True)
    shapes = [value.get("shape", []) for node in data["graphs"][0]["before"]["nodes"] for value in node["values"]]
    sizes = [size for shape in shapes for size in shape]
    assert all(isinstance(size, str) for size in sizes) and any(size.startswith("s") for size in sizes)


def test_values_that_are_no_dense_tensor() -> None:
    graph = fx.Graph()
    with fake_mode():
        values = {"several": (torch.empty(2), [torch.empty(3), 4]), "number": 2.5, "sparse": torch.empty(2, 2).to_sparse(), "unknown": None}
    for name, value in values.items():
        graph.placeholder(name).meta["example_value"] = value
    shown = {name: node["values"] for name, node in named(page.picture(graph)).items()}
    assert [len(shown[name]) for name in values] == [3, 1, 1, 0]
    assert shown["several"][2] == {"text": "4"} and shown["number"] == [{"text": "2.5"}]
    assert shown["sparse"][0]["stride"] == ["torch.sparse_coo"]


def test_bodies_are_pictures_of_their_own_before_and_after() -> None:
    model = ConvGeluPool()
    data = explained(lambda x: checkpoint(lambda x: model(x).relu(), x, use_reentrant=False), torch.randn(2, 4, 8, 8))
    (fused,), (graph,) = data["report"]["fused"], data["graphs"]
    assert [(node["target"], node["kind"]) for node in graph["before"]["nodes"] if node["body"]] == [(fused["body"], "call")]
    before, after = graph["before"]["bodies"][fused["body"]], graph["after"]["bodies"][fused["body"]]
    assert set(fused["nodes"]) <= set(named(before)) and "relu" in named(before) and "relu" in named(after)
    stands = [node for node in after["nodes"] if node["stands_for"]]
    assert stands[-1]["target"] == "fxfuse::gelu_pool" and all(node["stands_for"] == fused["nodes"] for node in stands)
    assert not any(node["stands_for"] for node in before["nodes"])


class Many(nn.Module):
    """Four equal near misses, another, and three equal chains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.heads = (nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(count)) for count in (4, 3))
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = torch.sin(F.gelu(block(x)))
        return [gelu_pool(head(x)) for head in self.heads], torch.cos(F.gelu(self.last(x)))


def test_like_candidates_share_a_row_and_every_one_is_in_the_report() -> None:
    data = explained(Many(), torch.randn(2, 4, 8, 8))
    records = [*data["report"]["fused"], *data["report"]["declined"]]
    assert [record["module"] for record in records] == [*(f"heads.{at}" for at in range(3)), *(f"blocks.{at}" for at in range(4)), "last"]
    assert data["folds"] == [[0, 1, 2], [3, 4, 5, 6], [7]]
    nodes = named(data["graphs"][0]["before"])
    assert len({record["node"] for record in data["report"]["declined"]} & set(nodes)) == 5, "each is marked in the graph"


def test_predicted_times_are_numbers() -> None:
    data = explained(ConvGeluPool(), torch.randn(2, 4, 8, 8), select="auto")
    (declined,) = data["report"]["declined"]
    (way,) = [way for way in declined["candidates"] if way["us"] is not None]
    assert (way["op"], way["kernel"], way["measured"]) == ("gelu_pool", "tail", False)
    assert way["verdict"] == f"left to Inductor: predicted {way['us']:.0f} us, Inductor at least {way['inductor_us']:.0f} us"


def test_measured_times_are_numbers() -> None:
    times = {"gelu_pool": 0.5, "inductor": 0.75}
    gm = dynamo_graph(ConvGeluPool(), torch.randn(2, 4, 8, 8))
    _, report = engine.fuse(gm.graph, Options(), unavailable=lambda device: None, timer=lambda match, implementations: times)
    ways = {way.op: way for way in report.fused[0].candidates if way.us is not None}
    assert {op: (way.us, way.inductor_us, way.measured, way.kernel) for op, way in ways.items()} == {
        "gelu_pool": (500.0, 750.0, True, "tail"),
        "inductor": (750.0, 750.0, True, ""),
    }


def test_nothing_is_fetched(tmp_path: Path) -> None:
    text, _ = written(tmp_path)
    frame = DATA.sub("", text)
    # The icon is an empty data: address, which keeps browsers from asking for favicon.ico.
    for mark in ("http:", "https:", "src=", "url(", "@import", "import(", "fetch(", "XMLHttpRequest", "sourceMappingURL"):
        assert mark not in frame, mark
    assert frame.count("href=") == 1 and 'href="data:,"' in frame and "default-src 'none'" in frame
    assert "Copyright (c) 2012-2014 Chris Pettitt" in frame


def test_names_of_the_users_break_nothing(tmp_path: Path) -> None:
    text, told = written(tmp_path / NASTY)
    assert NASTY in told["target"] and data_of(text)["report"] == told
    frame, plain = DATA.sub("", text), DATA.sub("", written(tmp_path / "plain")[0])
    assert frame == plain
    inside = DATA.search(text)[1]
    assert "<" not in inside and inside.isascii()
    assert any("</script><!-- é" in stack for stack in data_of(text)["graphs"][1]["before"]["stacks"])


def test_a_name_that_utf8_does_not_encode() -> None:
    graph = fx.Graph()
    graph.placeholder("x").meta["stack_trace"] = '  File "/home/\udcff/m.py", line 3, in forward\n    x\u2028\n'
    picture = page.picture(graph)
    text = page.html({}, [(picture, picture)])
    assert text.encode() and data_of(text)["graphs"][0]["before"] == picture
    assert picture["nodes"][0]["at"] == "/home/\udcff/m.py:3"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ConvGeluPool(), nn.Conv2d(4, 8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x), F.gelu(self.second(x)).amax((2, 3))


def compile_dumped(directory: Path) -> Path:
    """The folder of a compiled graph with one fused chain and one near miss."""
    options = {"fxfuse.select": "always", "fxfuse.dump": str(directory)}
    torch.compile(Two(), backend="fxfuse", options=options)(torch.randn(2, 4, 8, 8))
    (made,) = directory.iterdir()
    return made


@pytest.mark.compiler
def test_a_dump_holds_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    made = compile_dumped(tmp_path)
    told = json.loads((made / "report.json").read_text())
    data = data_of((made / "report.html").read_text())
    assert "report.html" in told.pop("files") and data["report"].pop("files") is not None
    assert data["report"] == told and (len(told["fused"]), len(told["declined"]), told["graphs"]) == (1, 1, 1)
    assert data["graphs"][0]["before"] != data["graphs"][0]["after"]
    assert all((made / record["repro"]).is_file() for record in (*told["fused"], *told["declined"]))


@pytest.mark.compiler
@pytest.mark.parametrize("broken", ["html", "picture"])
def test_a_failure_to_draw_costs_the_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(dump, "_numbers", itertools.count())
    monkeypatch.setattr(page, broken, None)
    made = compile_dumped(tmp_path)
    assert sorted(path.name for path in made.iterdir())[:3] == ["after.py", "before.py", "report.json"] and len(list(made.iterdir())) == 5
    assert "could not be recorded" in caplog.text
    monkeypatch.undo()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    command.write_text("first", file)
    with pytest.raises(UnicodeEncodeError):
        command.write_text("second\udcff", file)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"] and file.read_text() == "first"


def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MODEL)

    def full(text: str, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("fxfuse.explain_command.write_text", full)
    assert main(["explain", f"{tmp_path / 'mine.py'}:factory", "--html", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert error == f"fxfuse explain: {tmp_path / 'page.html'} cannot be written: No space left on device\n"


def test_a_long_list_of_arguments_is_cut() -> None:
    gm = fx.symbolic_trace(lambda x: torch.cat([gelu_pool(x)] * 300))
    cat = next(node for node in page.picture(gm.graph)["nodes"] if node["target"] == "cat")
    assert len(cat["arguments"]) < 450 and cat["arguments"].endswith("...")
