"""Which tensors a node writes to: every way to write that a graph can hold, and look-alikes that write to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import dynamo_graph, fake_mode, traced_graph
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxfuse.values import name_of
from fxfuse.writes import returned_argument, written

aten = torch.ops.aten


@torch.library.custom_op("fxfuse_tests::scale_all", mutates_args=("tensors",))
def scale_all(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(2)


def extension(x):
    """Stands for a function that an extension brings: built in, and of no module that is known here."""
    return x.mul_(2)


extension.__module__ = "an_extension._C"


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
    "torch._fused_sgd_": (
        lambda x, y: torch._fused_sgd_(
            [x], [y], [], weight_decay=0, momentum=0, lr=1, dampening=0, nesterov=False, maximize=False, is_first_step=False
        ),
        "x y",
    ),
    "torch._C._nn.rrelu_with_noise": (lambda x, y: torch._C._nn.rrelu_with_noise(x, y, 0.1, 0.3, True), "y"),
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


def traced(target: Any, *args: Any, op: str = "call_function", **kwargs: Any) -> fx.Node:
    """A node of a graph with inputs x and y, which arguments name; neither has an example value."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in "xy"}
    given, named = fx.node.map_aggregate((args, kwargs), lambda value: inputs.get(value, value) if isinstance(value, str) else value)
    return graph.create_node(op, target, tuple(given), dict(named))


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        pytest.param(traced(nn.init.constant_, tensor="x", val=0.5), "x", id="nn.init, by keyword"),
        pytest.param(traced(aten.add_.Tensor, self="x", other="y"), "x", id="aten.add_, by keyword"),
        pytest.param(traced(torch.fill_, input="x", value="y"), "x y", id="torch.fill_, by keyword: any of them"),
        pytest.param(traced(aten.mul_.Scalar, self="x", other=2), "x", id="aten.mul_, by keyword"),
        pytest.param(traced(F.relu, input="x", inplace=True), "x", id="F.relu, by keyword"),
        pytest.param(traced(F.normalize, "x", 2.0, 1, 1e-12, "y"), "y", id="F.normalize, out by position"),
        pytest.param(traced(torch.sort, "x"), "", id="torch.sort is not aten::sort of a list"),
        pytest.param(traced(extension, "x", ["y"]), "x y", id="a function of an extension"),
        pytest.param(traced(torch.ops.fxfuse_tests.scale_all.default, "x"), "x", id="a custom op, its list as one value"),
        pytest.param(traced("fill_", "x", 0, op="call_method"), "x", id="a method of what is no tensor"),
    ],
)
def test_written_by_nodes_that_dynamo_does_not_make(node: fx.Node, expected: str) -> None:
    assert {target.name for target in written(node)} == set(expected.split())


@pytest.mark.parametrize("value", [torch.zeros(2).untyped_storage(), (torch.zeros(2), torch.zeros(2))])
def test_storages_and_tuples_of_tensors_are_memory(value: Any) -> None:
    node = traced("fill_", "x", 0, op="call_method")
    node.args[0].meta["val"] = value
    assert written(node) == [node.args[0]]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: None)
    return module


def patched(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.ReLU(inplace=True), "x"),
        (nn.ReLU(), ""),
        (nn.Linear(8, 8), ""),
        (nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), "x"),
        (nn.Sequential(nn.Identity(), nn.Linear(8, 8)), ""),
        (nn.Embedding(4, 8, max_norm=1.0), "m.weight"),
        (nn.Embedding(4, 8), ""),
        (Own(), "x m.scale"),
        (nn.Sequential(Own()), "x m.0.scale"),
        (hooked(nn.Identity()), "x"),
        (patched(nn.Linear(8, 8)), "x m.weight m.bias"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False)), "x m.parametrizations.weight.original0 m.parametrizations.weight.original1"),
    ],
)
def test_written_by_a_module(module: nn.Module, expected: str) -> None:
    node = traced("m", "x", op="call_module")
    node.graph.owning_module = nn.ModuleDict({"m": module})
    assert [name_of(target) for target in written(node)] == expected.split()


@pytest.mark.parametrize(
    "node",
    [traced(F.dropout, "x", 0.5, False), traced(torch.dropout, "x", 0.5, False), traced(aten.dropout.default, "x", 0.5, False)],
)
def test_what_may_return_its_argument(node: fx.Node) -> None:
    assert returned_argument(node) is node.args[0]
    x = torch.zeros(3)
    assert node.target(x, 0.5, False) is x, "eager returns a copy now"
