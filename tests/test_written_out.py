"""Words that are written out in other ops. Which spellings make a chain is in test_coverage, their values in test_coverage_values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import dynamo_graph, fuse
from torch import nn

from fxfuse.view import Call, GraphView
from fxfuse.written_out import gelu, spatial_mean, whole_plane_pool

X = (2, 4, 6, 5)


def read(reader: Callable[..., Call | None], run: Callable[..., Any], x: torch.Tensor | None = None, dims: int = 2) -> Call | None:
    """What the reader makes of the nodes behind sin(x)."""
    with torch.no_grad():
        gm = dynamo_graph(lambda x: run(x.sin()), torch.zeros(X) if x is None else x)
    view = GraphView(gm.graph)
    return reader(view, next(node for node in gm.graph.nodes if node.target == "sin"), dims)


@pytest.mark.parametrize(
    ("run", "form"),
    [
        (lambda y: y * 0.5 * (1 + torch.erf(y * math.sqrt(0.5))), "none"),
        (lambda y: (y + y * torch.erf(y / 2**0.5)) / 2, "none"),
        (lambda y: 0.5 * (y - y * torch.erf(-y / 2**0.5)), "none"),
        (lambda y: 0.5 * y * torch.tanh(0.79788456 * y * (1 + 0.044715 * y.square())) + 0.5 * y, "tanh"),
        (lambda y: 0.5 * y * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y * y * y))), "tanh"),
    ],
)
def test_gelu_in_any_order(run: Callable[..., Any], form: str) -> None:
    call = read(gelu, run)
    assert (call.word, call.approximate) == ("gelu", form)
    assert call.nodes[-1] is call.result and call.node is call.nodes[0]


@pytest.mark.parametrize(
    "run",
    [
        lambda y: y * 0.5 * (1 + torch.erf(y * 0.7072)),
        lambda y: y * 0.5 * (1 + torch.erf(y.cos() * math.sqrt(0.5))),
        lambda y: y * 0.5 * (1 + torch.erf(torch.tanh(y))),
        lambda y: y * 0.5 * (1 + torch.erf(y * math.sqrt(0.5)).round()),
        lambda y: y * 0.5 * (1 + torch.erf(y.double() * math.sqrt(0.5))),
        lambda y: y * 0.5 * (1 + torch.erf(y[:1] * math.sqrt(0.5))),
        lambda y: torch.add(y, y * torch.erf(y / 2**0.5), alpha=2) / 2,
        lambda y: y.erf() * y.tanh() * 0.5 + 0.5 * y,
        lambda y: torch.div(y * (1 + torch.erf(y / 2**0.5)), 2, rounding_mode="floor"),
    ],
)
def test_what_is_not_proven_to_be_gelu_is_none(run: Callable[..., Any]) -> None:
    assert read(gelu, run) is None


def test_the_formula_holds_every_node_of_its_own_and_no_other() -> None:
    def run(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        other = y * 3
        return (0.5 * y * (1 + torch.erf(y / 2**0.5))).sum(), other

    assert [node.name for node in read(gelu, run).nodes] == ["mul_1", "truediv", "erf", "add", "mul_2"]


@pytest.mark.parametrize(
    ("run", "kept"),
    [
        (lambda y: y.mean(-1).mean(-1), 0),
        (lambda y: y.flatten(-2).mean(2), 0),
        (lambda y: y.reshape(2, 4, 30).mean(2, keepdim=True), 1),
        (lambda y: y.sum(2, keepdim=True).sum(3, keepdim=True) / 30, 2),
        (lambda y: y.unflatten(2, (2, 3)).flatten(2).mean(-1), None),
        (lambda y: y.mean(-1).sum(-1) / 6, 0),
        (lambda y: F.avg_pool1d(y.flatten(2), 30).squeeze(-1), 1),
        (lambda y: y.clone().sum((-1, -2)).div(30.0), 0),
        (lambda y: y.mean((2, 3)), None),  # the word itself
        (lambda y: y.mean(-1).mean(0), None),
        (lambda y: y.sum(-1).sum(-1) / 5, None),
        (lambda y: y.mean(-1).mean(-1).sum(), 0),
        (lambda y: y.permute(1, 0, 2, 3).flatten(2).mean(-1), None),
        (lambda y: y.flatten(2).amax(-1), None),
        (lambda y: y.flatten(2), None),
    ],
)
def test_a_mean_over_space_in_steps(run: Callable[..., Any], kept: int | None) -> None:
    call = read(spatial_mean, run)
    assert (call is None) == (kept is None)
    if call is not None:
        assert (call.word, call.dim, call.value.dim(), call.by) == ("mean", (2, 3), 2 + kept, "self")


def test_a_transposed_square_is_not_taken_for_itself() -> None:
    """Batch and channels are of the same size here: shapes alone would not tell."""
    assert read(spatial_mean, lambda y: y.transpose(0, 1).flatten(2).mean(-1), torch.zeros(4, 4, 6, 5)) is None


def test_ones_in_the_way_of_a_mean() -> None:
    assert read(spatial_mean, lambda y: y.flatten(2).mean(-1), torch.zeros(1, 4, 1, 5)).dim == (2, 3)
    assert read(spatial_mean, lambda y: y.flatten(1).mean(-1), torch.zeros(2, 1, 6, 5)) is None


def test_sums_say_in_which_dtype_they_were() -> None:
    assert read(spatial_mean, lambda y: y.sum((2, 3)) / 30).summed == (torch.float32,)
    half = torch.zeros(X, dtype=torch.float16)
    assert read(spatial_mean, lambda y: y.sum((2, 3)) / 30, half).summed == (torch.float16,)
    assert read(spatial_mean, lambda y: y.sum((2, 3), dtype=torch.float32) / 30, half).summed == (torch.float32,)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_pool_of_the_whole_plane_is_the_adaptive_pool_of_the_same_strides(layout: torch.memory_format) -> None:
    x = torch.zeros(X).to(memory_format=layout)
    call = read(whole_plane_pool, lambda y: F.avg_pool2d(y, (6, 5)), x)
    assert (call.word, call.output_size, call.dims) == ("adaptive_avg_pool", (1, 1), 2)
    assert call.value.stride() == F.adaptive_avg_pool2d(x, 1).stride()


@pytest.mark.parametrize("arguments", [((6, 4),), ((3, 5),), ((6, 5), 1, (1, 0)), ((6, 5), None, 0, False, True, 7)])
def test_other_pools_are_none(arguments: tuple[Any, ...]) -> None:
    assert read(whole_plane_pool, lambda y: F.avg_pool2d(y, *arguments)) is None


class Varying(nn.Module):
    """The chain of a weight that is the module's, so that the input's sizes alone vary."""

    def __init__(self, tail: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.tail = nn.Parameter(torch.zeros(8, 4, 3, 3)), tail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(torch.conv2d(x, self.weight))


@pytest.mark.parametrize(
    "tail",
    [
        lambda y: F.gelu(y).flatten(2).mean(-1),
        lambda y: F.gelu(y).view(y.shape[0], 8, -1).mean(2),
        lambda y: F.gelu(y).sum((2, 3)) / (y.shape[2] * y.shape[3]),
        lambda y: F.gelu(F.dropout(y, 0.1, False).contiguous()).mean((2, 3)),
        lambda y: (0.5 * y * (1 + torch.erf(y / 2**0.5))).mean((2, 3)),
    ],
)
def test_sizes_that_vary_are_read_without_a_guard(tail: Callable[..., torch.Tensor]) -> None:
    x = torch.zeros(2, 4, 9, 9)
    torch._dynamo.reset()
    for dim in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, dim)
    with torch.no_grad():
        gm = dynamo_graph(Varying(tail), x)
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    shape_env = next(value.fake_mode.shape_env for value in values if hasattr(value, "fake_mode"))
    before = len(shape_env.guards)
    assert len(fuse(gm)[1].fused) == 1
    assert len(shape_env.guards) == before
