"""Which tensors a node writes to: every way to write that a graph can hold, and look-alikes that write to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import dynamo_graph, fake_mode, traced_graph
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxfuse.values import name_of
from fxfuse.writes import written

aten = torch.ops.aten


@torch.library.custom_op("fxfuse_tests::scale_all", mutates_args=("tensors",))
def scale_all(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(2)


def set_item(x, y):
    x[0] = 1


def times_assign(x, y):
    x *= 2


WRITES = {
    "x.add_": (lambda x, y: x.add_(y), "x"),
    "x.copy_": (lambda x, y: x.copy_(y), "x"),
    "x.index_put_": (lambda x, y: x.index_put_((y.long(),), y), "x"),
    "x *= 2": (times_assign, "x"),
    "x[0] = 1": (set_item, "x"),
    "x.__imul__": (lambda x, y: x.__imul__(2), "x"),
    "torch.relu_": (lambda x, y: torch.relu_(x), "x"),
    "F.relu(inplace=True)": (lambda x, y: F.relu(x, inplace=True), "x"),
    "F.relu(x, True)": (lambda x, y: F.relu(x, True), "x"),
    "F.hardsigmoid(x, True)": (lambda x, y: F.hardsigmoid(x, True), "x"),
    "F.alpha_dropout(x, p, training, True)": (lambda x, y: F.alpha_dropout(x, 0.5, True, True), "x"),
    "out=": (lambda x, y: torch.mul(y, 2, out=x), "x"),
    "out=, a pair": (lambda x, y: torch.sort(y, out=(x, y.long())), "x long"),
    "torch._foreach_mul_": (lambda x, y: torch._foreach_mul_([x, y], 2.0), "x y"),
    "aten.add_": (lambda x, y: aten.add_.Tensor(x, y), "x"),
    "aten.mul.out": (lambda x, y: aten.mul.out(y, y, out=x), "x"),
    "aten._foreach_mul_": (lambda x, y: aten._foreach_mul_.Scalar([x, y], 2.0), "x y"),
    "custom op, a list": (lambda x, y: scale_all([x, y]), "x y"),
    "custom op, by its packet": (lambda x, y: torch.ops.fxfuse_tests.scale_all([x, y]), "x y"),
    "custom op, by its packet, keyword": (lambda x, y: torch.ops.fxfuse_tests.scale_all(tensors=[x]), "x"),
    "aten.add_, packet": (lambda x, y: aten.add_(x, y), "x"),
    "aten.native_batch_norm": (lambda x, y: aten.native_batch_norm(x.expand(4, 8), None, None, x, y, True, 0.1, 1e-5), "x y"),
    "aten._native_batch_norm_legit": (lambda x, y: aten._native_batch_norm_legit(x.expand(4, 8), None, None, x, y, True, 0.1, 1e-5), "x y"),
    "torch.native_batch_norm": (lambda x, y: torch.native_batch_norm(x.expand(4, 8), None, None, x, y, True, 0.1, 1e-5), "x y"),
    "aten.batch_norm": (lambda x, y: aten.batch_norm.default(x.expand(4, 8), None, None, x, y, True, 0.1, 1e-5, False), "x y"),
    "aten.instance_norm": (lambda x, y: aten.instance_norm.default(x.expand(2, 8, 8), None, None, x, y, True, 0.1, 1e-5, False), "x y"),
    "aten.embedding_renorm_": (lambda x, y: aten.embedding_renorm_.default(x.view(2, 4), y.long(), 1.0, 2.0), "view"),
    "aten._fused_dropout": (lambda x, y: aten.rrelu_with_noise.default(x, y, 0.1, 0.3, True), "y"),
    "F.batch_norm": (lambda x, y: F.batch_norm(x.expand(4, 8), y, x, training=True), "x y"),
    "F.batch_norm, keywords": (lambda x, y: F.batch_norm(x.expand(4, 8), running_var=x, running_mean=y, training=True), "x y"),
    "F.embedding(max_norm=)": (lambda x, y: F.embedding(y.long(), x.expand(2, 8), max_norm=1.0), "expand"),
    "checkpoint": (lambda x, y: checkpoint(lambda x: x.mul_(2), x, use_reentrant=False), "x"),
    "x.add": (lambda x, y: x.add(y), ""),
    "x.__add__": (lambda x, y: x.__add__(y), ""),
    "F.relu(x)": (lambda x, y: F.relu(x), ""),
    "F.dropout(x, 0.5, True)": (lambda x, y: F.dropout(x, 0.5, True), ""),
    "aten.add": (lambda x, y: aten.add.Tensor(x, y), ""),
    "torch.sort": (lambda x, y: torch.sort(y), ""),
    "view": (lambda x, y: x.view(-1), ""),
}


@pytest.mark.parametrize(("run", "expected"), WRITES.values(), ids=WRITES)
def test_written(run: Callable[..., Any], expected: str) -> None:
    with fake_mode(), torch.no_grad():
        gm = dynamo_graph(lambda x, y: (run(x, y), x + y), torch.zeros(8), torch.zeros(8))
    found = {target.name.removeprefix("l_").strip("_") for node in gm.graph.nodes for target in written(node)}
    assert found == set(expected.split())


def test_module_calls_write_to_their_input_and_buffers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.plain, self.norm = nn.ReLU(inplace=True), nn.ReLU(), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.plain(self.relu(x)))

    gm = traced_graph(Model(), torch.zeros(4, 8))
    found = {node.name: [name_of(target) for target in written(node)] for node in gm.graph.nodes}
    assert found["relu"] == ["x"]
    assert found["plain"] == []
    assert found["norm"] == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
