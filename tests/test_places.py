"""Where a node comes from: the path of its module, however the graph was captured, and the nearest line of the user's model."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import dynamo_graphs
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxfuse import api, places
from fxfuse.options import Options
from fxfuse.places import Frame, location_of, module_of, nearest, short

HERE = Path(__file__)
X = torch.ones(2, 4, 9, 9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.conv(x))  # the line of a block


class Net(nn.Module):
    """Convolutions in every kind of container, in one whose name is no identifier, one called twice, and one that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(nn.Sequential(Block(), Block()), Block())
        self.listed = nn.ModuleList([Block()])
        self.named = nn.ModuleDict({"left side": Block(), "right": Block()})
        self.add_module("with-dash", Block())
        self.twice = nn.Conv2d(4, 4, 1)
        self.model = Block()
        self.weight = nn.Parameter(torch.ones(4, 4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.listed[0](self.stages(x))
        x = self.named["left side"](x) + self.named["right"](x)
        x = self.twice(self.twice(getattr(self, "with-dash")(x)))
        return F.conv2d(self.model(x), self.weight)  # the line of the net


PATHS = [
    "stages.0.0.conv",
    "stages.0.1.conv",
    "stages.1.conv",
    "listed.0.conv",
    "named.left side.conv",
    "named.right.conv",
    "with-dash.conv",
    "twice",
    "twice",
    "model.conv",
    "",
]


def explained(model: Callable[..., Any], *args: Any) -> list[fx.Graph]:
    graphs: list[fx.Graph] = []
    api.explained(model, args, {}, Options(), False, lambda before, after: graphs.append(before))
    return graphs


def compiled(model: Callable[..., Any], *args: Any) -> list[fx.Graph]:
    return [gm.graph for gm in dynamo_graphs(model, *args)]


def in_a_function(model: nn.Module, x: torch.Tensor) -> list[fx.Graph]:
    return compiled(lambda x: model(x), x)


CAPTURES: dict[str, Callable[[nn.Module, torch.Tensor], list[fx.Graph]]] = {
    "compiled": compiled,
    "compiled twice": lambda model, x: compiled(torch.compile(model), x),
    "a method": lambda model, x: compiled(model.forward, x),
    "a function": in_a_function,
    "exported": lambda model, x: [torch.export.export(model, (x,)).module().graph],
    "exported, strict": lambda model, x: [torch.export.export(model, (x,), strict=True).module().graph],
    "exported, decomposed": lambda model, x: [torch.export.export(model, (x,)).run_decompositions().module().graph],
    "traced": lambda model, x: [fx.symbolic_trace(model).graph],
    "explained": explained,
    "explained, compiled": lambda model, x: explained(torch.compile(model), x),
    "explained, a function": lambda model, x: explained(lambda x: model(x), x),
    "explained, a method": lambda model, x: explained(model.forward, x),
}


def convolutions(graphs: list[fx.Graph]) -> list[fx.Node]:
    """The nodes that convolve, those in bodies of higher-order ops too."""
    bodies = [module.graph for graph in graphs for module in graph.owning_module.modules() if isinstance(module, fx.GraphModule)]
    nodes = [node for graph in dict.fromkeys([*graphs, *bodies]) for node in graph.nodes if node.op.startswith("call_")]
    return [node for node in nodes if "conv" in str(node.target) or str(node.target) == "twice"]


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
def test_paths_are_those_of_named_modules(capture: Callable[..., list[fx.Graph]]) -> None:
    model = Net().eval()
    with torch.no_grad():
        found = [module_of(node) for node in convolutions(capture(model, X))]
    assert found == PATHS and set(found) <= set(dict(model.named_modules()))


class Wrapped(nn.Module):
    """Blocks in what users wrap around them."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        self.compiled = nn.Sequential(torch.compile(Block()))
        self.checkpointed = checkpoint_wrapper(Block())
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.checkpointed(self.compiled(x))
        torch._dynamo.graph_break()
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("capture", [compiled, explained])
def test_what_is_wrapped_around_a_module_is_not_in_its_path(capture: Callable[..., list[fx.Graph]]) -> None:
    found = convolutions(capture(Wrapped(), X))
    assert {module_of(node) for node in found} == {"compiled.0.conv", "checkpointed.conv", "inner.conv"}
    assert {location_of(node) for node in found} == {f"{HERE}:{line('the line of a block')}"}


def test_models_that_a_function_is_given_keep_their_names() -> None:
    def run(nets: dict[str, list[nn.Module]], x: torch.Tensor) -> torch.Tensor:
        return nets["right"][1](nets["left"][0](x))

    found = convolutions(compiled(run, {"left": [Block()], "right": [Block(), Block()]}, X))
    assert [module_of(node) for node in found] == ["nets.left.0.conv", "nets.right.1.conv"]


@pytest.mark.parametrize("capture", [compiled, explained, CAPTURES["exported"]])
def test_the_line_is_the_innermost_of_the_users(capture: Callable[..., list[fx.Graph]]) -> None:
    with torch.no_grad():
        lines = [location_of(node) for node in convolutions(capture(Net().eval(), X))]
    assert lines[0] == f"{HERE}:{line('the line of a block')}" and lines[-1] == f"{HERE}:{line('the line of the net')}"


def line(text: str) -> int:
    return 1 + next(at for at, found in enumerate(HERE.read_text(encoding="utf-8").splitlines()) if found.endswith(f"# {text}"))


PACKAGE = {
    "nets/layers/activations.py": """
import functools
import torch.nn.functional as F
from torch import nn

class Act(nn.Module):
    def forward(self, x):
        return F.gelu(x)

class ConvAct(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(4, 4, 3, padding=1), Act()

    def forward(self, x):
        return self.act(self.conv(x))

def checked(forward):
    @functools.wraps(forward)
    def wrapper(self, *args):
        return forward(self, *args)
    return wrapper
""",
    "nets/models/net.py": """
from torch import nn
from nets.layers.activations import ConvAct, checked

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = ConvAct()

    def forward(self, x):
        return self.layer(x)  # block

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block = ConvAct(), Block()

    @checked
    def forward(self, x):
        x = self.stem(x)  # stem
        return self.forward_features(x)

    def forward_features(self, x):
        return self.block(x).mean((2, 3))
""",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of an installed package of models: layers are in files of their own, and a decorator of theirs is around a forward."""
    folder = tmp_path_factory.mktemp("lib") / "site-packages"
    for name, source in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


CAPTURED = {name: CAPTURES[name] for name in ("compiled", "explained", "exported")}


@pytest.mark.parametrize("capture", CAPTURED.values(), ids=CAPTURED)
def test_of_an_installed_model_the_line_is_in_the_models_own_file(capture: Callable[..., list[fx.Graph]], installed: Path) -> None:
    model = importlib.import_module("nets.models.net").Net().eval()
    file = installed / "nets/models/net.py"
    lines = file.read_text(encoding="utf-8").splitlines()
    with torch.no_grad():
        graphs = capture(model, X)
    found = convolutions(graphs) + [node for graph in graphs for node in graph.nodes if "gelu" in str(node.target)]
    wanted = [f"{file}:{1 + next(at for at, text in enumerate(lines) if text.endswith(mark))}" for mark in ("# stem", "# block")]
    assert [location_of(node) for node in found] == wanted * 2
    assert short(wanted[0]).startswith("nets/models/net.py:")


@pytest.mark.parametrize("capture", CAPTURED.values(), ids=CAPTURED)
def test_of_an_installed_model_within_the_users_the_line_is_the_users(capture: Callable[..., list[fx.Graph]], installed: Path) -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = importlib.import_module("nets.models.net").Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.backbone(x)  # where the backbone is called

    with torch.no_grad():
        found = convolutions(capture(Mine().eval(), X))
    assert {location_of(node) for node in found} == {f"{HERE}:{line('where the backbone is called')}"}
    assert [module_of(node) for node in found] == ["backbone.stem.conv", "backbone.block.layer.conv"]


STDLIB, SITE = sysconfig.get_path("stdlib"), "/env/lib/python3.12/site-packages"
MINE, MODEL, LAYER = (
    Frame("/home/me/mine.py", 3, "run"),
    Frame(f"{SITE}/nets/net.py", 7, "forward"),
    Frame(f"{SITE}/nets/layers.py", 9, "forward"),
)
TORCH = Frame(f"{places.TORCH}nn/modules/conv.py", 5, "forward")


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [
        ([MINE, MODEL, LAYER, TORCH], MINE),
        ([MODEL, LAYER, TORCH], MODEL),
        ([MODEL, LAYER, MINE, TORCH], MINE),
        ([MODEL, LAYER, MODEL._replace(line=8), LAYER], MODEL._replace(line=8)),
        ([LAYER._replace(function="wrapper"), MODEL, LAYER], MODEL),
        (
            [LAYER._replace(function="wrapper"), MODEL._replace(function="torch_dynamo_resume_in_forward_at_5"), LAYER],
            MODEL._replace(function="torch_dynamo_resume_in_forward_at_5"),
        ),
        ([MODEL._replace(function="apply"), LAYER._replace(function="gelu")], MODEL._replace(function="apply")),
        ([MINE, Frame(f"{STDLIB}/functools.py", 1, "wrapper")], MINE),
        ([MINE, Frame("/usr/lib/python3/dist-packages/nets/net.py", 1, "forward")], MINE),
        ([MINE, Frame("<eval_with_key>.3", 1, "forward")], MINE),
        ([Frame("relative.py", 1, "forward"), LAYER], Frame("relative.py", 1, "forward")),
        ([Frame("/tmp/ipykernel_7/1.py", 1, "forward"), LAYER], Frame("/tmp/ipykernel_7/1.py", 1, "forward")),
        ([TORCH, TORCH._replace(line=6)], TORCH._replace(line=6)),
    ],
)
def test_the_nearest_frame(frames: list[Frame], wanted: Frame) -> None:
    assert nearest(frames) == wanted


def test_a_node_of_which_the_graph_knows_nothing() -> None:
    node = fx.Graph().placeholder("x")
    assert (module_of(node), location_of(node), places.stack_of(node)) == ("", "", "")


def test_a_location_for_reading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert short(f"{tmp_path}/site-packages/mine.py:3") == "site-packages/mine.py:3"
    assert short(f"{SITE}/nets/net.py:7") == "nets/net.py:7" and short("/elsewhere/mine.py:3") == "/elsewhere/mine.py:3"
    assert places.relative(f"{SITE}/fxfuse/why_not.md") == f"{SITE}/fxfuse/why_not.md"
