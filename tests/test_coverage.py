"""Pattern coverage: every way to write a chain, and the twins that look like one, each with its verdict. Needs no GPU and no compiler.

A row that is not said to be declined is fused, and its rewritten graph is held against the one it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import spellings_conv_gelu_pool
import spellings_conv_norm_pool_gelu
import torch
from models import dynamo_graph, fuse, fused_nodes, traced_graph
from spellings import NO_CANDIDATE, Row
from torch import fx

OPS = {"conv_norm_pool_gelu": "norm_pool_gelu", "conv_gelu_pool": "gelu_pool"}
ROWS = [*spellings_conv_norm_pool_gelu.ROWS, *spellings_conv_gelu_pool.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.chain}-{row.name}")
def test_verdict(row: Row, cover: Callable[..., None]) -> None:
    gm = row.graph()
    before = str(gm.graph)
    with row.around():
        # The tail ops: a convolution is taken into the kernel where there is a GPU, and this table is the same everywhere.
        graph, report = fuse(gm, select="tail")
    own = [record for record in (*report.fused, *report.declined) if record.chain == row.chain]
    verdict = " | ".join(record.op if record in report.fused else record.reason for record in own) or NO_CANDIDATE
    cover(row.chain, _captured_by(row), row.name, verdict, _in_training(row, gm))
    assert str(gm.graph) == before, "the graph that was given has changed"
    if row.declined:
        assert not report.fused and graph is gm.graph
        assert row.declined in verdict
    else:
        assert verdict == OPS[row.chain]
        check_rewrite(gm.graph, graph, report.fused[0].nodes)


def check_rewrite(old: fx.Graph, new: fx.Graph, names: tuple[str, ...]) -> None:
    """One op has taken the place of the chain `names`: valid, annotated like the chain's end, the graph's results of the same kind."""
    new.lint()
    (fused,) = fused_nodes(new)
    last = next(node for node in old.nodes if node.name == names[-1])
    for key in ("stack_trace", "nn_module_stack"):
        assert fused.meta.get(key) == last.meta.get(key)
    assert kinds(output_values(new)) == kinds(output_values(old))
    words = {node.target for node in old.nodes if node.name in names[1:]}
    left = [node for node in new.nodes if node.target in words and node.op != "placeholder"]
    assert len(left) == sum(node.target in words for node in old.nodes if node.name not in names[1:]), "a node of the chain is still there"
    assert all(value_of(node) is not None for node in new.nodes if node.op == "get_attr" or node.target is fused.target)


def output_values(graph: fx.Graph) -> list[Any]:
    return [value_of(node) for node in next(iter(graph.find_nodes(op="output"))).all_input_nodes]


def kinds(values: list[Any]) -> list[tuple[Any, ...]]:
    return [(value.shape, value.dtype, value.device, value.stride()) for value in values]


def value_of(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _in_training(row: Row, inference: fx.GraphModule) -> str:
    """The op that a fused row becomes where its result needs a gradient; empty for rows that have a grad mode, or an exporter's, of their own."""
    if row.declined or row.capture is not dynamo_graph or row.around is not torch.no_grad:
        return ""
    # Autograd asks the device of a tensor that needs a gradient for its streams: not of one that is not there.
    devices = {value.device.type for value in map(value_of, inference.graph.nodes) if isinstance(value, torch.Tensor)}
    if "cuda" in devices and not torch.cuda.is_available():
        return "(needs a GPU)"
    gm = row.graph(needs_gradient=True)
    graph, report = fuse(gm, select="auto", backward="save")
    assert len(report.fused) == 1, [record.reason for record in report.declined]
    check_rewrite(gm.graph, graph, report.fused[0].nodes)
    (node,) = fused_nodes(graph)
    assert node.target.name() == f"fxfuse::{OPS[row.chain]}_training" and value_of(node).requires_grad
    return node.target.name().removeprefix("fxfuse::")


def _captured_by(row: Row) -> str:
    if row.capture is dynamo_graph:
        return "Dynamo"
    return "symbolic_trace" if row.capture is traced_graph else "export"


def test_rows_have_names_of_their_own() -> None:
    names = [(row.chain, row.name) for row in ROWS]
    assert len(names) == len(set(names))
