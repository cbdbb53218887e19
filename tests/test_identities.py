"""What hands a value on as it is: proven, or not, by each way to write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import dynamo_graph, exported_graph, traced_graph
from torch import fx, nn

from fxfuse.identities import is_identity, why_not

CHANNELS_LAST = torch.channels_last
IDENTITIES = {
    "dropout in eval": lambda y: F.dropout(y, 0.5, training=False),
    "dropout by keywords": lambda y: F.dropout(input=y, p=0.5, training=False),
    "dropout of p=0": lambda y: F.dropout(y, 0.0, training=True),
    "dropout in place": lambda y: F.dropout(y, 0.5, False, inplace=True),
    "torch.dropout": lambda y: torch.dropout(y, 0.5, False),
    "dropout2d": lambda y: F.dropout2d(y, 0.5, False),
    "feature_alpha_dropout": lambda y: F.feature_alpha_dropout(y, 0.5, False),
    "clone": lambda y: y.clone(),
    "clone, preserving": lambda y: torch.clone(y, memory_format=torch.preserve_format),
    "contiguous": lambda y: y.contiguous(),
    "to its dtype": lambda y: y.to(torch.float32),
    "to another tensor's": lambda y: y.to(y),
    "to its device": lambda y: y.to("cpu", torch.float32),
    "to, a copy": lambda y: y.to(torch.float32, copy=True),
    "float": lambda y: y.float(),
    "type": lambda y: y.type(torch.float32),
    "type_as": lambda y: y.type_as(y),
    "cpu": lambda y: y.cpu(),
    "view": lambda y: y.view(2, 4, 6, 6),
    "view of a size": lambda y: y.view(y.size()),
    "reshape": lambda y: torch.reshape(y, (2, 4, 6, -1)),
    "flatten of one": lambda y: y.flatten(2, 2),
    "squeeze of nothing": lambda y: y.squeeze(1),
    "expand": lambda y: y.expand(2, -1, -1, -1),
    "permute of nothing": lambda y: y.permute(0, 1, 2, 3),
    "index of everything": lambda y: y[..., :, :],
    "narrow of everything": lambda y: y.narrow(1, 0, 4),
    "aten.alias": lambda y: torch.ops.aten.alias.default(y),
}
OTHERS = {
    "dropout in training": (lambda y: F.dropout(y, 0.25), "p=0.25, in training"),
    "torch.dropout in training": (lambda y: torch.dropout(y, 0.25, True), "p=0.25, in training"),
    "feature_dropout in training": (lambda y: torch.feature_dropout(y, 0.25, True), "p=0.25, in training"),
    "contiguous of another layout": (lambda y: y.contiguous(memory_format=CHANNELS_LAST), "from strides [144, 36, 6, 1] to [144, 1, 24, 4]"),
    "clone of another layout": (lambda y: y.clone(memory_format=CHANNELS_LAST), "from strides [144, 36, 6, 1] to [144, 1, 24, 4]"),
    "another dtype": (lambda y: y.bfloat16(), "from torch.float32 to torch.bfloat16"),
    "another device": (lambda y: y.to("meta"), "from cpu to meta"),
    "another shape": (lambda y: y.view(4, 2, 6, 6), ""),
    "transposed": (lambda y: y.transpose(2, 3), ""),
    "a part": (lambda y: y[:, 1:], ""),
    "rows by an index": (lambda y: y[torch.tensor([1, 0])], ""),
    "one over": (lambda y: y.flip(1), ""),
    "detach": (lambda y: y.detach(), ""),
    "relu": (lambda y: y.relu(), ""),
    "times one": (lambda y: y * 1, ""),
    "softmax": (lambda y: y.softmax(1), ""),
}


def node_behind_sin(run: Callable[..., Any], capture: Callable[..., fx.GraphModule] = dynamo_graph) -> fx.Node:
    with torch.no_grad():
        gm = capture(lambda x: run(torch.sin(x)), torch.zeros(2, 4, 6, 6))
    sin = next(node for node in gm.graph.nodes if node.target is torch.sin)
    return list(sin.users)[0]


@pytest.mark.parametrize("capture", [dynamo_graph, traced_graph])
@pytest.mark.parametrize("name", IDENTITIES)
def test_identities(name: str, capture: Callable[..., fx.GraphModule]) -> None:
    if capture is traced_graph and name == "view of a size":
        pytest.skip("symbolic_trace makes the size a node in front")
    node = node_behind_sin(IDENTITIES[name], capture)
    assert is_identity(node), node.format_node()
    assert why_not(node) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    run, does = OTHERS[name]
    node = node_behind_sin(run)
    assert not is_identity(node) and why_not(node) == does


def test_a_transposed_square_of_one_pixel_is_itself_and_one_of_equal_strides_too() -> None:
    with torch.no_grad():
        gm = dynamo_graph(lambda x: torch.sin(x).transpose(2, 3), torch.zeros(2, 4, 1, 1))
    (node,) = [node for node in gm.graph.nodes if node.target == "transpose"]
    assert is_identity(node) == (node.meta["example_value"].stride() == node.args[0].meta["example_value"].stride())


def test_a_view_of_a_tensor_with_ones_that_is_not_contiguous() -> None:
    """Eager's view has other strides there than its fake: [1, 2, 6, 6] in channels_last becomes (2, 1, 12, 2) of (72, 1, 12, 2)."""
    for batch, proven in ((1, False), (2, True)):
        x = torch.zeros(batch, 2, 6, 6).to(memory_format=CHANNELS_LAST)
        with torch.no_grad():
            gm = dynamo_graph(lambda x: torch.sin(x).view(x.shape), x)
        (node,) = [node for node in gm.graph.nodes if node.target == "view"]
        assert is_identity(node) == proven


@pytest.mark.parametrize("capture", [traced_graph, exported_graph])
@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5)], ids=lambda module: type(module).__name__)
def test_modules_in_eval_and_in_training(module: nn.Module, capture: Callable[..., fx.GraphModule]) -> None:
    for training in (False, True):
        model = nn.Sequential(nn.Conv2d(4, 4, 3), module, nn.ReLU()).train(training)
        gm = capture(model, torch.zeros(2, 4, 6, 6))
        (output,) = gm.graph.find_nodes(op="output")
        behind = output.all_input_nodes[0].args[0]
        is_conv = behind.name in ("_0", "conv2d")  # export leaves nn.Identity out
        assert is_conv or is_identity(behind) == (not training or isinstance(module, nn.Identity))
        assert not is_conv or isinstance(module, nn.Identity)


def test_a_subclass_or_a_module_with_a_hook_is_none() -> None:
    class Doubling(nn.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    hooked = nn.Identity()
    hooked.register_forward_hook(lambda module, args, out: out * 2)
    for module in (Doubling(), hooked):
        tracer = fx.Tracer()
        tracer.is_leaf_module = lambda m, name: True
        model = nn.Sequential(nn.ReLU(), module)
        gm = fx.GraphModule(model, tracer.trace(model))
        node = next(node for node in gm.graph.nodes if node.target == "1")
        node.args[0].meta["val"] = node.meta["val"] = torch.zeros(2)
        assert not is_identity(node)


def test_a_graph_without_values_proves_nothing() -> None:
    gm = fx.symbolic_trace(lambda x: torch.sin(x).contiguous())
    assert not any(map(is_identity, gm.graph.nodes))
