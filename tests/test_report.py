"""The printed report: what shares a row, what a row shows, and that a model of 150 layers is one screen."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxfuse import expect
from fxfuse.cli import main
from fxfuse.engine import NotFusedError
from fxfuse.options import Options
from fxfuse.printing import alike
from fxfuse.report import SCREEN, Candidate, Declined, Fused, Report, alike_ones, places

COLUMNS = 140


def declined(reason: str, at: int = 0, chain: str = "conv_gelu_pool", reached: str = "gelu", **more: object) -> Declined:
    return Declined(chain, reached, f"gelu_{at}", reason, f"/models/net.py:{30 + at}", module=f"blocks.{at}.conv", **more)


def fused(
    at: int = 0,
    shapes: str = "[2, 4] -> [2, 4]",
    choice: str = "predicted 9 us, Inductor at least 12 us",
    verdict: str = "the convolution is transposed",
) -> Fused:
    candidates = (Candidate("conv_gelu_pool", verdict), Candidate("gelu_pool", choice))
    return Fused(
        "conv_gelu_pool", "gelu_pool", (f"conv_{at}",), shapes, choice, f"/models/net.py:{30 + at}", candidates, module=f"blocks.{at}.conv"
    )


def cells(text: str) -> list[list[str]]:
    """The rows of a report's tables, headers left out: of each cell its lines, joined."""
    rows = []
    for block in re.split(r"^[├└┌+].*$", text, flags=re.MULTILINE):
        lines = [re.split(r"[│|]", line)[1:-1] for line in block.splitlines() if line[:1] in ("│", "|")]
        if lines and not lines[0][0].strip().endswith(" chain"):
            rows.append([" ".join(filter(None, map(str.strip, column))) for column in zip(*lines, strict=True)])
    return rows


LIKE = {
    "equal sentences": ("gelu is followed by mul", "gelu is followed by mul"),
    "predicted times": (
        "left to Inductor: predicted 12 us, Inductor at least 9 us",
        "left to Inductor: predicted 1.5e+03 us, Inductor at least 800 us",
    ),
    "nodes of one name": ("the result of gelu is also used by add", "the result of gelu_12 is also used by add_3"),
    "parameters of equal layers": ("l_blocks_0_weight_ is on cuda:0", "l_blocks_11_weight_ is on cuda:0"),
    "symbolic sizes": ("the pool's output size [s27, 2] is not global", "the pool's output size [s53, 4] is not global"),
    "lines": ("add may write to x at /models/net.py:12; move it", "add may write to x at /models/net.py:7; move it"),
}
UNLIKE = {
    "other ops": ("gelu is followed by mul", "gelu is followed by add"),
    "dtypes": ("the kernels take it as torch.float32", "the kernels take it as torch.float16"),
    "ops of other dimensions": ("conv2d is followed by mul", "conv3d is followed by mul"),
    "files": ("add may write to x at /models/a.py:1", "add may write to x at /models/b.py:1"),
    "numbers of sizes": ("the stride [1, 2] is not", "the stride [1, 2, 2] is not"),
}


@pytest.mark.parametrize("pair", LIKE.values(), ids=LIKE)
def test_sentences_that_say_the_same(pair: tuple[str, str]) -> None:
    assert alike(pair[0]) == alike(pair[1])
    (group,) = alike_ones([declined(sentence) for sentence in pair])
    assert [record.reason for record in group] == list(pair)


@pytest.mark.parametrize("pair", UNLIKE.values(), ids=UNLIKE)
def test_sentences_that_say_something_else(pair: tuple[str, str]) -> None:
    assert len(alike_ones([declined(sentence) for sentence in pair])) == 2


def test_candidates_of_another_chain_or_reach_or_op_have_rows_of_their_own() -> None:
    assert len(alike_ones([declined("a"), declined("a", chain="other"), declined("a", reached="pool")])) == 3
    assert len(alike_ones([fused(), dataclasses.replace(fused(), op="conv_gelu_pool"), fused(choice="else"), fused(verdict="else")])) == 4


def test_a_row_of_many_shows_the_first_and_how_many_more_the_commonest_row_first() -> None:
    report = Report(
        declined=[declined("gelu is followed by add"), *(declined("gelu is followed by mul", at) for at in range(39))], graphs=1
    )
    assert cells(str(report)) == [
        ["39 × conv_gelu_pool", "gelu", "blocks.0.conv /models/net.py:30 and 38 more", "gelu is followed by mul"],
        ["conv_gelu_pool", "gelu", "blocks.0.conv /models/net.py:30", "gelu is followed by add"],
    ]
    assert str(report).startswith("0 fused, 40 declined in 1 graph\n") and "left out" not in str(report)
    assert [row[2] for row in cells(report.full())] == [f"{record.module} {record.location}" for record in report.declined]


def test_that_sentences_differ_is_said() -> None:
    row = cells(str(Report(declined=[declined(f"predicted {us} us, Inductor at least 9 us") for us in (12, 15)])))[0]
    assert row[3] == "predicted 12 us, Inductor at least 9 us (of the first; others differ in numbers or names)"


def test_fused_chains_share_a_row_too() -> None:
    report = Report(fused=[fused(at, shapes=f"[{2 + at // 2}, 4] -> [2, 4]") for at in range(6)])
    (row,) = cells(str(report))
    assert row == [
        "6 × conv_gelu_pool",
        "gelu_pool",
        "[2, 4] -> [2, 4] and 2 others",
        "blocks.0.conv /models/net.py:30 and 5 more",
        "predicted 9 us, Inductor at least 12 us conv_gelu_pool: the convolution is transposed",
    ]


def test_a_place_in_a_body_says_so() -> None:
    inside = dataclasses.replace(fused(), body="wrap_body_0", calls=3)
    report = Report(fused=[inside], declined=[declined("a", body="wrap_body_1")])
    (made, left) = cells(str(report))
    assert made[3] == "blocks.0.conv /models/net.py:30 in wrap_body_0, called 3 times"
    assert left[2] == "blocks.0.conv /models/net.py:30 in wrap_body_1"
    assert places([inside]) == "/models/net.py:30 (blocks.0.conv), in wrap_body_0, called 3 times"


def test_a_place_that_the_graph_does_not_know_is_the_node() -> None:
    bare = dataclasses.replace(declined("a"), location="", module="")
    assert cells(str(Report(declined=[bare])))[0][2] == places([bare]) == "gelu_0"
    assert places([dataclasses.replace(bare, module="blocks.0")]) == "blocks.0"
    assert cells(str(Report(declined=[dataclasses.replace(bare, module="1.10")])))[0][2] == "1.10"
    assert places([dataclasses.replace(bare, location="/models/net.py:3"), bare]) == "/models/net.py:3 and 1 more"


def test_errors_tell_like_candidates_once() -> None:
    report = Report(declined=[declined("gelu is followed by mul", at) for at in range(39)], graphs=1)
    assert str(NotFusedError(report)) == "conv_gelu_pool at /models/net.py:30 (blocks.0.conv) and 38 more: gelu is followed by mul"
    (unmet,) = expect.unmet(report, {"conv_gelu_pool": 1}, Options())
    assert str(unmet).endswith(
        "declined 39 times; declined at /models/net.py:30 (blocks.0.conv) and 38 more behind gelu: gelu is followed by mul"
    )


def letters(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


@pytest.mark.parametrize(("num_fused", "num_declined"), [(0, 60), (60, 0), (60, 60), (2, 60), (60, 2), (1, 1)])
@pytest.mark.parametrize("long", [False, True], ids=["short sentences", "long sentences"])
def test_any_report_is_one_screen_and_says_what_it_leaves_out(num_fused: int, num_declined: int, long: bool) -> None:
    more = " and a long reason to read" * (6 if long else 0)
    report = Report(graphs=1)
    for at in range(num_fused):
        report.fused += [fused(at, choice=f"chosen as {letters(at)}{more}")] * (1 + at)
    for at in range(num_declined):
        report.declined += [declined(f"gelu is followed by {letters(at)}{more}", at)] * (1 + at)
    text = str(report)
    assert len(text.splitlines()) <= SCREEN and max(map(len, text.splitlines())) <= COLUMNS
    shown = cells(text)
    rows = {"fused": [row for row in shown if len(row) == 5], "declined": [row for row in shown if len(row) == 4]}
    left = [
        tuple(map(int, pair))
        for pair in re.findall(r"^left out: (\d+) rows? more, of (\d+) candidates?; `fxfuse explain --all`, or", text, re.MULTILINE)
    ]
    for kind, records in (("fused", report.fused), ("declined", report.declined)):
        groups = alike_ones(records)
        assert bool(rows[kind]) == bool(groups), "something of each is shown"
        counts = [int(row[0].split(" × ")[0]) if "×" in row[0] else 1 for row in rows[kind]]
        assert counts == [len(group) for group in groups[: len(counts)]], "the commonest rows come first"
        rest = groups[len(counts) :]
        assert ((len(rest), sum(map(len, rest))) in left) == bool(rest)
    assert len(cells(report.full())) == len(report.fused) + len(report.declined)


NETS = {
    "nets/layers.py": """
import torch
import torch.nn.functional as F
from torch import nn

class GammaAct(nn.Module):
    def forward(self, x):
        return F.gelu(x) * 1.7

class StdConv2d(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)

class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.expand = StdConv2d(width, width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        y = F.gelu(self.conv(x)).mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.expand(y))
""",
    "nets/models/nfnet.py": """
import torch
from torch import nn
from nets.layers import Gate, GammaAct, StdConv2d

class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (StdConv2d(width, width, kernel, padding=kernel // 2) for kernel in (1, 3, 1))
        self.act1, self.act2 = GammaAct(), nn.GELU()
        self.drop, self.gate = nn.Dropout(dropout), Gate(width)

    def forward(self, x):
        y = self.act1(self.conv1(x))
        y = self.drop(self.act2(self.conv2(y)))
        return x + self.gate(self.conv3(y))

class Net(nn.Module):
    def __init__(self, depths=(6, 12, 8, 4), widths=(8, 16, 24, 32)):
        super().__init__()
        self.stem = StdConv2d(3, widths[0], 3, stride=2)
        self.stages = nn.Sequential()
        for depth, width, following in zip(depths, widths, (*widths[1:], widths[-1])):
            blocks = [Block(width, 0.1 * (width > 8)) for _ in range(depth)]
            self.stages.append(nn.Sequential(*blocks, StdConv2d(width, following, 1)))
        self.act, self.pool = nn.GELU(), nn.AdaptiveAvgPool2d(1)

    def forward_features(self, x):
        return self.stages(self.stem(x))

    def forward(self, x):
        return self.pool(self.act(self.forward_features(x))).flatten(1)

def factory():
    return Net().eval(), (torch.randn(1, 3, 32, 32),)
""",
}


def forget_nets() -> None:
    """Another test's package has the same name."""
    for name in [name for name in sys.modules if name.split(".")[0] == "nets"]:
        del sys.modules[name]


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with a model of 155 convolutions, in the style of image models; its layers are in a file of their own."""
    folder = tmp_path / "site-packages"
    for name, source in NETS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    forget_nets()
    yield folder / "nets/models/nfnet.py"
    forget_nets()


@pytest.mark.usefixtures("explains")
@pytest.mark.parametrize("select", ["always", "auto"])
def test_a_model_of_150_layers_is_one_screen(nets: Path, capsys: pytest.CaptureFixture[str], select: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert main(["explain", "nets.models.nfnet:factory", "--select", select, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    told = json.loads(file.read_text(encoding="utf-8"))
    assert len(told["fused"]) + len(told["declined"]) >= 90, "the file holds every candidate"
    lines = out.splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= COLUMNS
    assert "left out" not in out and "× conv_gelu_pool" in out
    # Places are the model's own: every conv's module, and lines of its file rather than those of the layers.
    assert "nets/layers.py" not in out and {record["location"].rsplit(":", 1)[0] for record in (*told["fused"], *told["declined"])} == {
        str(nets)
    }
    modules = {record["module"] for record in (*told["fused"], *told["declined"])}
    assert {"stages.0.0.conv1", "stages.3.3.conv2", "stages.1.11.gate.conv", "stages.3.4"} <= modules
    assert "stages.0.0.conv1" in out and re.search(r"nets/models/nfnet.py:\d+ ", out)
    assert main(["explain", "nets.models.nfnet:factory", "--select", select, "--all"]) == 0
    whole = capsys.readouterr().out
    assert len(cells(whole)) == len(told["fused"]) + len(told["declined"]) and "×" not in whole
