"""What makes a complete chain unsafe to replace, where a spelling cannot show it: aliases, writes, streams, values that the graph lacks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, dynamo_graph, fake_mode, fuse, gelu_pool, norm_pool_gelu, reasons, traced_graph
from torch import fx
from torch.utils.checkpoint import checkpoint

X, W, B = (2, 4, 8, 8), (8, 4, 3, 3), (8,)


@torch.library.custom_op("fxfuse_tests::double_all", mutates_args=("tensors",))
def double_all(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(2)


def captured(run: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    with fake_mode(), torch.no_grad():
        return dynamo_graph(run, *(torch.zeros(shape) for shape in shapes))


def only_reason(gm: fx.GraphModule) -> str:
    with torch.no_grad():
        graph, report = fuse(gm)
    assert graph is gm.graph and not report.fused
    (reason,) = reasons(report)
    return reason


def is_fused(gm: fx.GraphModule) -> bool:
    with torch.no_grad():
        _, report = fuse(gm)
    return bool(report.fused)


@torch._dynamo.allow_in_graph
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


WRITES = {
    "_foreach_mul_": lambda x: torch._foreach_mul_([x], 2.0),
    "custom op over a list": lambda x: double_all([x]),
    "inplace by position": lambda x: F.hardsigmoid(x, True),
    "inside a checkpoint": lambda x: checkpoint(lambda x: x.mul_(2), x, use_reentrant=False),
    "out=, through a view": lambda x: torch.mul(x[0], 2, out=x[1]),
    "transposed view": lambda x: x.mT.mul_(2),
    "flattened view": lambda x: x.view(-1).zero_(),
    "real part": lambda x: x.real.zero_(),
    "detached": lambda x: x.detach().zero_(),
    "data": lambda x: x.data.zero_(),
    "unbind": lambda x: x.unbind(0)[0].zero_(),
    "as_strided": lambda x: torch.as_strided(x, (3,), (1,)).zero_(),
    "other dtype": lambda x: x.view(torch.int32).zero_(),
    "numpy operator": lambda x: operator.imul(x.numpy(), 2),
    "numpy method": lambda x: x.numpy().fill(0),
    "function that nobody knows": opaque,
}
NEEDS_NUMPY = pytest.mark.skipif(find_spec("numpy") is None, reason="needs NumPy, which torch does not install")
WRITE_ROWS = [pytest.param(write, id=name, marks=NEEDS_NUMPY if name.startswith("numpy") else ()) for name, write in WRITES.items()]


@pytest.mark.parametrize("write", WRITE_ROWS)
def test_a_write_to_an_input_between_the_ends_of_a_chain(write: Callable[[torch.Tensor], object]) -> None:
    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(x, w, b)
        write(x)
        return gelu_pool(y)

    assert "may write to l_x_ between the convolution and adaptive_avg_pool at " in only_reason(captured(run, X, W, B))


@pytest.mark.parametrize("write", WRITE_ROWS)
def test_the_same_write_before_or_after_the_chain_is_safe(write: Callable[[torch.Tensor], object]) -> None:
    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        write(x)
        out = gelu_pool(torch.conv2d(x, w, b))
        write(x)
        return out

    assert is_fused(captured(run, X, W, B))


def test_a_write_to_running_statistics_that_are_the_addend() -> None:
    def run(x, w, mean, var, z):
        y = torch.conv3d(x, w) + mean
        F.batch_norm(z, mean, var, training=True)
        return norm_pool_gelu(y)

    gm = captured(run, (2, 4, 6, 6, 12), (8, 4, 3, 3, 3), (10,), (10,), (5, 10))
    assert "batch_norm may write to l_mean_ between the convolution and gelu" in only_reason(gm)


def test_two_inputs_that_share_a_storage() -> None:
    def run(x, view, w):
        y = torch.conv2d(x, w)
        view.mul_(2)
        return gelu_pool(y)

    x = torch.zeros(X)
    with torch.no_grad():
        assert "mul_ may write to l_x_" in only_reason(dynamo_graph(run, x, x[0], torch.zeros(W)))
        assert is_fused(dynamo_graph(run, x, torch.zeros(X)[0], torch.zeros(W)))


def test_a_write_to_a_module_parameter() -> None:
    class Model(ConvGeluPool):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            self.conv.weight.mul_(0.5)
            return self.pool(self.gelu(y))

    with torch.no_grad():
        gm = traced_graph(Model(), torch.zeros(X))
    assert "mul_ may write to conv.weight between" in only_reason(gm)


def test_a_write_to_a_sparse_tensor_is_no_write_to_a_dense_one() -> None:
    def run(x, w):
        y = torch.conv2d(x, w)
        x.to_sparse().mul_(2)
        return gelu_pool(y)

    with torch.no_grad():
        gm = traced_graph(run, torch.zeros(X), torch.zeros(W))
        fuse(gm)  # fused or declined: it must not raise


def inserted_before_gelu(gm: fx.GraphModule, target: Any, *args: Any) -> fx.GraphModule:
    gelu = next(node for node in gm.graph.nodes if node.target is F.gelu)
    with gm.graph.inserting_before(gelu):
        gm.graph.call_function(target, args)
    return gm


def test_a_stream_or_device_change_inside_the_chain() -> None:
    import torch._dynamo.variables.streams  # noqa: F401, defines torch.ops.streams

    def run(x, w):
        return gelu_pool(torch.conv2d(x, w))

    for target, args in (
        (torch.ops.streams.fork.default, (0, 1)),
        (torch.ops.streams.wait_event.default, (0, 1)),
        (torch.cuda.set_stream, (None,)),
    ):
        gm = inserted_before_gelu(captured(run, X, W), target, *args)
        assert "changes how ops run between the convolution and adaptive_avg_pool" in only_reason(gm)


def test_a_deterministic_region_that_ends_inside_the_chain() -> None:
    def run(x, w):
        torch.use_deterministic_algorithms(True)
        y = torch.conv2d(x, w)
        torch.use_deterministic_algorithms(False)
        return gelu_pool(y)

    assert "_set_deterministic_algorithms changes how ops run" in only_reason(captured(run, X, W))


def test_values_that_the_graph_does_not_hold() -> None:
    def run(x, w):
        return gelu_pool(torch.conv2d(x, w))

    gm = fx.symbolic_trace(run)
    assert "holds no example value for the result of conv; pass example inputs" in only_reason(gm)
    gm = captured(run, X, W)
    next(iter(gm.graph.find_nodes(op="placeholder"))).meta.clear()
    assert "no example value for l_" in only_reason(gm)


def test_tensors_that_are_not_dense() -> None:
    gm = captured(lambda x, w, a: norm_pool_gelu(torch.conv3d(x, w) + a), (2, 4, 6, 6, 12), (8, 4, 3, 3, 3), (2, 8, 4, 4, 10))
    addend = next(node for node in gm.graph.find_nodes(op="placeholder") if node.name == "l_a_")
    addend.meta["example_value"] = torch.zeros(2, 8, 4, 4, 10).to_sparse()
    assert "l_a_ is a torch.sparse_coo tensor; the kernels read dense strided tensors" in only_reason(gm)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="torch checks a fake cuda:1 against the GPUs there are: needs two, or none")
def test_devices() -> None:
    def run(x, w, b):
        return gelu_pool(torch.conv2d(x, w, b))

    with fake_mode(), torch.no_grad():
        cuda = [torch.zeros(shape, device="cuda") for shape in (X, W, B)]
        assert is_fused(dynamo_graph(run, *cuda))
        gm = dynamo_graph(run, *cuda)
        bias = next(node for node in gm.graph.find_nodes(op="placeholder") if node.name == "l_b_")
        bias.meta["example_value"] = torch.zeros(B, device="cuda:1")
    assert "l_b_ is on cuda:1, the convolution on cuda:0" in only_reason(gm)
