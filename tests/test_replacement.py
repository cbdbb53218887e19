"""What a rewrite puts into the graph: the op's arguments, the convolution without bias, metadata, and nothing into the user's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import (
    ConvGeluPool, ConvNormPoolGelu, arguments, dynamo_graph, fake_mode, fuse, fused_nodes, gelu_pool, norm_pool_gelu, traced_graph,
)  # fmt: skip
from torch import fx, nn

import fxfuse.passes.conv_gelu_pool as conv_gelu_pool
from fxfuse import torch_private
from fxfuse.match import find
from fxfuse.guarded import PassError
from fxfuse.replacement import rewritten
from fxfuse.view import GraphView

W, X3, W3, B = (8, 4, 3, 3), (2, 4, 6, 6, 12), (8, 4, 3, 3, 3), (8,)


def rewrite(run: Callable[..., Any], *tensors: tuple[int, ...] | torch.Tensor) -> tuple[fx.Graph, fx.Graph]:
    with fake_mode(), torch.no_grad():
        gm = dynamo_graph(run, *(torch.zeros(tensor) if isinstance(tensor, tuple) else tensor for tensor in tensors))
        graph, report = fuse(gm)
    assert report.fused and not report.declined
    return gm.graph, graph


def bound(run: Callable[..., Any], *tensors: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of the only fused op, nodes by name."""
    (node,) = fused_nodes(rewrite(run, *tensors)[1])
    return {name: value.name if isinstance(value, fx.Node) else value for name, value in arguments(node).items()}


def test_every_argument_of_norm_pool_gelu() -> None:
    def run(x, w, b, a, lw, lb):
        y = F.layer_norm(torch.sub(torch.conv3d(x, w, b), a, alpha=0.5), (4, 10), lw, lb, 1e-12)
        return F.gelu(F.avg_pool3d(y, (1, 2, 3), (1, 2, 1), (0, 1, 1), True, False, -7), approximate="tanh")

    assert bound(run, X3, W3, B, (8, 1, 1, 1), (4, 10), (4, 10)) == {
        "input": "conv3d_1",
        "bias": "l_b_",
        "addend": "l_a_",
        "norm_weight": "l_lw_",
        "norm_bias": "l_lb_",
        "addend_scale": -0.5,
        "addend_value": 0.0,
        "norm_ndim": 2,
        "eps": 1e-12,
        "kernel_size": [1, 2, 3],
        "stride": [1, 2, 1],
        "padding": [0, 1, 1],
        "ceil_mode": True,
        "count_include_pad": False,
        "divisor_override": -7,
        "approximate": "tanh",
        "out_dtype": None,
    }


def test_defaults_of_norm_pool_gelu() -> None:
    given = bound(lambda x, w: norm_pool_gelu(torch.conv3d(x, w)), X3, W3)
    assert [given[name] for name in ("bias", "addend", "norm_weight", "norm_bias", "addend_scale", "addend_value")] == [None] * 4 + [
        1.0,
        0.0,
    ]
    assert [given[name] for name in ("kernel_size", "stride", "padding")] == [[2] * 3, [2] * 3, [0] * 3]
    assert [given[name] for name in ("ceil_mode", "count_include_pad", "divisor_override", "eps")] == [False, True, None, 1e-5]


NUMBERS = {
    "y + 1.5": (lambda y: y + 1.5, 1.5),
    "2 + y": (lambda y: 2 + y, 2.0),
    "y - 3": (lambda y: y - 3, -3.0),
    "y.add(2, alpha=0.25)": (lambda y: y.add(2, alpha=0.25), 0.5),
    "y.sub(2, alpha=3)": (lambda y: y.sub(2, alpha=3), -6.0),
    "y + True": (lambda y: y + True, 1.0),
    "torch.rsub(2, y)": (lambda y: torch.rsub(torch.full((), 2.0), y), None),
}


@pytest.mark.parametrize(("add", "value"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_is_passed_as_a_number(add: Callable[[torch.Tensor], torch.Tensor], value: float | None) -> None:
    given = bound(lambda x, w: norm_pool_gelu(add(torch.conv3d(x, w))), X3, W3)
    if value is None:  # a 0-dim tensor is never read back to the host
        assert given["addend"] is not None and (given["addend_scale"], given["addend_value"]) == (-1.0, 0.0)
    else:
        assert (given["addend"], given["addend_scale"], given["addend_value"]) == (None, 1.0, value)


POOLS = {
    "1": (lambda y: F.adaptive_avg_pool2d(y, 1), [1, 1], True),
    "(2, 3)": (lambda y: F.adaptive_avg_pool2d(y, (2, 3)), [2, 3], True),
    "(None, 1)": (lambda y: F.adaptive_avg_pool2d(y, (None, 1)), [-1, 1], True),
    "mean": (lambda y: y.mean((2, 3)), [1, 1], False),
}


@pytest.mark.parametrize(("pool", "size", "keepdim"), POOLS.values(), ids=POOLS)
def test_arguments_of_gelu_pool(pool: Callable[[torch.Tensor], torch.Tensor], size: list[int], keepdim: bool) -> None:
    given = bound(lambda x, w, b: pool(F.gelu(torch.conv2d(x, w, b))), (2, 4, 8, 8), (8, 4, 3, 3), B)
    assert given.pop("output_size") in (size, [6 if n == -1 else n for n in size])  # Dynamo may have filled in None itself
    assert given == {"input": "conv2d_1", "bias": "l_b_", "keepdim": keepdim, "approximate": "none", "out_dtype": None}


def test_out_dtype_where_autocast_raises_the_chain_to_float32() -> None:
    def run(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return norm_pool_gelu(torch.conv3d(x, w, b))

    old, new = rewrite(run, X3, W3, B)
    (node,) = fused_nodes(new)
    gelu = next(node for node in old.nodes if node.target is F.gelu)
    convolution = arguments(node)["input"].meta["example_value"]
    assert convolution.dtype == torch.bfloat16
    assert node.meta["example_value"].dtype == gelu.meta["example_value"].dtype
    assert arguments(node)["out_dtype"] == (None if gelu.meta["example_value"].dtype == torch.bfloat16 else torch.float32)


CONVS = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1, 2, 2), (2, 4, 9), (8, 2, 3), torch.conv1d, ((2,), (1,), (2,), 2)),
    "conv2d, same": (
        lambda x, w, b: F.conv2d(x, w, b, padding="same"),
        (2, 4, 9, 9),
        (8, 4, 3, 3),
        torch.conv2d,
        ((1, 1), "same", (1, 1), 1),
    ),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, (2, 3), 1, (1, 2), 1, 2),
        *((2, 4, 9, 9), (4, 8, 3, 3), torch.conv_transpose2d, ((2, 3), (1, 1), (1, 2), 1, (2, 2))),
    ),
    "conv_transpose3d": (
        lambda x, w, b: F.conv_transpose3d(x, w, b, stride=2, groups=4),
        *((2, 4, 5, 5, 5), (4, 2, 3, 3, 3), torch.conv_transpose3d, ((2,) * 3, (0,) * 3, (0,) * 3, 4, (1,) * 3)),
    ),
    "convolution": (
        lambda x, w, b: torch.convolution(x, w, b, [2], [1], [1], True, [1], 1),
        *((2, 4, 9, 9), (4, 8, 3, 3), torch.conv_transpose2d, ((2, 2), (1, 1), (1, 1), 1, (1, 1))),
    ),
}


@pytest.mark.parametrize(("conv", "x", "w", "target", "geometry"), CONVS.values(), ids=CONVS)
def test_the_convolution_is_called_without_its_bias(conv, x, w, target, geometry) -> None:
    def run(x, w, b):
        y = F.gelu(conv(x, w, b))
        return y.mean(tuple(range(2, y.dim())))

    with fake_mode(), torch.no_grad():
        bias = torch.zeros(conv(torch.zeros(x), torch.zeros(w), None).shape[1])
        old, new = rewrite(run, x, w, bias)
        (node,) = fused_nodes(new)
        plain = arguments(node)["input"]
        assert (plain.target, plain.args[2:]) == (target, (None, *geometry))
        # Run again with the new node's own arguments: its annotation is what it gives.
        inputs = [argument.meta["example_value"] for argument in plain.args[:2]]
        result = target(*inputs, *plain.args[2:])
    given = plain.meta["example_value"]
    assert (result.shape, result.dtype, result.stride()) == (given.shape, given.dtype, given.stride())
    was = next(node for node in old.nodes if node.op == "call_function")
    assert (given.shape, given.dtype) == (was.meta["example_value"].shape, was.meta["example_value"].dtype)


def test_a_convolution_without_bias_stays_where_it_is() -> None:
    old, new = rewrite(lambda x, w: gelu_pool(torch.conv2d(x, w)), (2, 4, 8, 8), (8, 4, 3, 3))
    (node,) = fused_nodes(new)
    assert arguments(node)["input"].name == next(node.name for node in old.nodes if node.target is torch.conv2d)


def test_new_nodes_carry_the_origin_of_what_they_stand_for() -> None:
    with torch.no_grad():
        model = ConvGeluPool()
        gm = dynamo_graph(model, torch.zeros(2, 4, 8, 8))
        new, _ = fuse(gm)
    old = {node.target: node for node in gm.graph.nodes}
    (fused,) = fused_nodes(new)
    pairs = [(fused, old[F.adaptive_avg_pool2d]), (arguments(fused)["input"], old[torch.conv2d])]
    for node, origin in pairs:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            assert node.meta[key] == origin.meta[key], key
        assert node.meta["example_value"].dtype == torch.float32
    assert fused.meta["nn_module_stack"] != arguments(fused)["input"].meta["nn_module_stack"]


# What an earlier pass or a region of the user's code marks nodes with, whatever torch copies from node to node.
ANNOTATIONS = [name for name in fx.proxy._COPY_META_FIELDS if name not in torch_private.PROVENANCE]


def marked(name: str, *values: Any) -> fx.GraphModule:
    """A chain whose nodes are marked so, in its order; None: not at all."""
    with fake_mode(), torch.no_grad():
        gm = dynamo_graph(lambda x, w, b: gelu_pool(torch.conv2d(x, w, b)), *(torch.zeros(shape) for shape in ((2, 4, 8, 8), W, B)))
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node, value in zip(calls, values, strict=True):
        if value is not None:
            node.meta[name] = value
    return gm


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_annotations_go_to_every_new_node(name: str) -> None:
    value = {"mark": 1}
    gm = marked(name, value, value, value)
    graph, report = fuse(gm)
    assert len(report.fused) == 1
    made = [node for node in graph.nodes if node.op == "call_function"]
    assert len(made) == 2 and all(node.meta[name] == value for node in made)
    assert not any(name in node.meta for node in graph.nodes if node.op != "call_function")


@pytest.mark.parametrize("name", ANNOTATIONS)
@pytest.mark.parametrize("values", [(1, None, None), (None, None, 1), (1, 2, 1), (1, 1, 2)])
def test_nodes_that_are_annotated_otherwise_are_left_alone(name: str, values: tuple[Any, ...]) -> None:
    graph, report = fuse(marked(name, *values))
    (declined,) = report.declined
    assert not report.fused and f"{declined.node} is annotated otherwise ({name}=" in declined.reason


@pytest.mark.parametrize("name", torch_private.PROVENANCE)
def test_where_nodes_come_from_may_differ(name: str) -> None:
    one, other = ({"0": ("one", nn.Conv2d)}, {"0": ("other", nn.GELU)}) if name == "nn_module_stack" else (1, 2)
    _, report = fuse(marked(name, one, other, None))
    assert len(report.fused) == 1


def test_modules_become_get_attr_nodes_of_the_copy_only() -> None:
    model = ConvNormPoolGelu()
    state = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        gm = traced_graph(model, torch.zeros(2, 4, 6, 6, 12))
        before = gm.code
        new, report = fuse(gm)
    assert report.fused and gm.code == before
    assert {node.target for node in new.find_nodes(op="get_attr")} == {"conv.weight", "conv.bias", "sum_weight", "norm.weight", "norm.bias"}
    assert not list(new.find_nodes(op="call_module"))
    assert all("val" in node.meta for node in new.find_nodes(op="get_attr"))
    fx.GraphModule(gm, new).graph.lint()
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is state[name][0] and torch.equal(value, state[name][1])


def test_chains_that_feed_each_other() -> None:
    def run(x, w, w2, b, x3, w3):
        first = gelu_pool(torch.conv2d(x, w))
        second = gelu_pool(torch.conv2d(first, w2, b))
        return norm_pool_gelu(torch.conv3d(x3, w3, b) + second[:, :, None])

    _, new = rewrite(run, (2, 4, 8, 8), W, (8, 8, 1, 1), B, X3, W3)
    new.lint()
    first, second, third = fused_nodes(new)
    assert arguments(second)["input"].args[0] is first
    assert second in arguments(third)["addend"].all_input_nodes


def test_an_addend_from_a_chain_whose_convolution_comes_later() -> None:
    def run(x, w3, w):
        y = torch.conv3d(x, w3)
        scalar = gelu_pool(torch.conv2d(x[0], w))
        return norm_pool_gelu(y + scalar[0])

    _, new = rewrite(run, X3, W3, (1, 6, 3, 3))
    new.lint()
    assert [node.target.__name__ for node in fused_nodes(new)] == ["gelu_pool.default", "norm_pool_gelu.default"]


def test_a_replacement_that_does_not_stand_for_its_chain_is_refused() -> None:
    with fake_mode(), torch.no_grad():
        gm = dynamo_graph(lambda x, w: gelu_pool(torch.conv2d(x, w)), torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3))
    (match,) = find(GraphView(gm.graph), conv_gelu_pool.CHAIN)

    def wrong(emit: Any, conv: Any, gelu: Any, pool: Any) -> fx.Node:
        return emit(torch.relu, conv.node)

    before = str(gm.graph)
    with pytest.raises(PassError, match=r"its replace at .*test_replacement.py:\d+ gives torch.float32.* by .*relu.*; the chain gives torch.float32"):
        rewritten(gm.graph, [(match, wrong)])
    assert str(gm.graph) == before
