"""The canonical view: who reads which value once in-place ops are followed, and what is known about storages and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import dynamo_graph, fake_mode, traced_graph
from torch import fx, nn

from fxfuse.view import GraphView


def view_of(run: Callable[..., Any], *args: torch.Tensor) -> GraphView:
    with fake_mode(), torch.no_grad():
        return GraphView(dynamo_graph(run, *args).graph)


def named(view: GraphView, name: str) -> fx.Node:
    return next(node for node in view.nodes if node.name == name)


def test_later_reads_of_a_value_written_in_place_read_what_was_written_last() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.gelu(x)
        before = y.relu()
        y.add_(1)
        y.sub_(2)
        return before, y.tanh(), y

    view = view_of(run, torch.zeros(4))
    readers = {name: [node.name for node in view.readers[named(view, name)]] for name in ("y", "add_", "sub_")}
    assert readers == {"y": ["before", "add_"], "add_": ["sub_"], "sub_": ["tanh", "output"]}


def test_a_value_flows_by_the_argument_that_holds_it() -> None:
    view = view_of(lambda x, w: (w + F.gelu(x)) * 2, torch.zeros(4), torch.zeros(4))
    gelu = next(view.anchors("gelu"))
    (add,) = view.readers[gelu.result]
    flow = view.flows(gelu.result, add)
    assert (flow.word, flow.by, flow.self.name, flow.alpha) == ("add", "other", "l_w_", 1)
    (mul,) = view.readers[add]
    assert view.flows(add, mul) is None
    with pytest.raises(AttributeError, match="add has no argument gamma; it has self, other, alpha"):
        flow.gamma  # noqa: B018


def test_the_getitem_of_native_layer_norm_holds_its_value() -> None:
    view = view_of(lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5)[0].relu(), torch.zeros(2, 4))
    (call,) = view.anchors("layer_norm")
    assert call.result.target.__name__ == "getitem" and call.node in call.result.args
    assert call.nodes == (call.node, call.result)
    assert call.value.shape == (2, 4)


def test_a_write_through_a_view_is_a_write_to_the_storage() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.gelu(x)
        w[0].add_(1)
        return y.relu()

    view = view_of(run, torch.zeros(4), torch.zeros(4))
    first, last = view.order[named(view, "y")], view.order[named(view, "relu")]
    assert view.write_between(named(view, "l_w_"), first, last).name == "add_"
    assert view.write_between(named(view, "l_x_"), first, last) is None
    assert view.write_between(named(view, "l_w_"), last, len(view.nodes)) is None


def test_arguments_that_share_a_storage_are_known_to() -> None:
    def run(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        y = F.gelu(x)
        part.add_(1)
        return y.relu()

    x = torch.zeros(4, 4)
    with torch.no_grad():
        view = GraphView(dynamo_graph(run, x, x[1]).graph)
    assert view.write_between(named(view, "l_x_"), 0, len(view.nodes)).name == "add_"


def test_a_parameter_is_one_storage_for_modules_and_get_attr_nodes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            self.conv.weight.mul_(2)
            return y.relu()

    with torch.no_grad():
        view = GraphView(traced_graph(Model(), torch.zeros(1, 2, 3)).graph)
    (conv,) = view.anchors("conv")
    assert view.write_between(conv.weight, 0, len(view.nodes)).name == "mul_"
    assert view.write_between(conv.bias, 0, len(view.nodes)) is None


def test_a_write_to_who_knows_where_may_be_a_write_to_anything() -> None:
    gm = traced_graph(lambda x, w: (w.add_(1), F.gelu(x)), torch.zeros(4), torch.zeros(4))
    for node in gm.graph.find_nodes(op="placeholder", target="w"):
        node.meta.clear()
    view = GraphView(gm.graph)
    assert view.write_between(named(view, "x"), 0, len(view.nodes)).name == "add_"


def test_state_changes_and_transforms() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x.relu()
        return torch.func.vmap(torch.tanh)(y)

    view = view_of(run, torch.zeros(4, 4))
    names = [view.nodes[position].target.__name__ for position in view.state_changes]
    assert names == ["_enter_autocast", "_exit_autocast", "_vmap_increment_nesting", "_vmap_decrement_nesting"]
    assert view.transform_depth == [0, 0, 0, 1, 0]
