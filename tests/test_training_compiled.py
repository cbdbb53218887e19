"""Training through `torch.compile(backend="fxfuse")` on the CPU: gradients as eager's, alone and together with what training code uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from models import ConvGeluPool, ConvNormPoolGelu
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fxfuse
from fxfuse.testing import assert_fused

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("compiles")]

STRICT = {"fxfuse.strict": True, "fxfuse.select": "always"}


class Net(nn.Module):
    """Both chains between ops that Inductor compiles: [N, 4, 6, 6, 12] -> [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.volume, self.norm = ConvNormPoolGelu(), nn.BatchNorm3d(8)
        self.head, self.linear = ConvGeluPool(3), nn.Linear(8, 10)
        self.head.conv = nn.Conv3d(8, 8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.head(self.norm(self.volume(x))).flatten(1))


def volume(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 4, 6, 6, 12)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-4) -> None:
    """Of what the layer norm takes away (the convolution's bias, the sum's weight) both sides have nothing but rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        noise = name.endswith(("volume.conv.bias", "volume.sum_weight"))
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol if noise else rtol * value.abs().max().item(), msg=lambda m, n=name: f"{n}: {m}")


def both(model: nn.Module, step: Callable[[Callable[..., Any]], Any], rtol: float = 1e-4, **options: Any) -> tuple[Any, Any]:
    """Runs `step` with eager and with the compiled model, and compares gradients; what it returned for each."""
    twin = copy.deepcopy(model)
    expected = step(twin)
    found = step(torch.compile(model, backend="fxfuse", options=STRICT, **options))
    assert_same(gradients(model), gradients(twin), rtol)
    return found, expected


def backward(model: Callable[..., Any], x: torch.Tensor | None = None) -> torch.Tensor:
    torch.manual_seed(1)
    out = model(volume() if x is None else x)
    out.square().sum().backward()
    return out.detach()


def test_gradients_are_eagers() -> None:
    found, expected = both(Net(), backward)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert [fused.op for fused in fxfuse.reports()[-1].fused] == ["norm_pool_gelu", "gelu_pool"]


@pytest.mark.parametrize("kept", ["recompute", "save"])
def test_what_waits_for_the_backward(kept: str) -> None:
    """On a CPU the tail op is all there is to take, and it is taken whatever the rule says."""
    model = Net()
    twin = copy.deepcopy(model)
    backward(torch.compile(model, backend="fxfuse", options={"fxfuse.strict": True, "fxfuse.backward": kept}))
    backward(twin)
    assert_same(gradients(model), gradients(twin))
    assert [(fused.op, fused.choice) for fused in fxfuse.reports()[-1].fused] == [
        ("norm_pool_gelu", f'backward="{kept}"'), ("gelu_pool", f'backward="{kept}"')
    ]  # fmt: skip


def test_auto_leaves_what_is_small_for_its_time() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    backward(torch.compile(model, backend="fxfuse"))
    backward(twin)
    assert_same(gradients(model), gradients(twin))
    assert ["in a training step, Inductor at least" in declined.reason for declined in fxfuse.reports()[-1].declined] == [True, True]


def test_eval_mode_without_no_grad() -> None:
    both(Net().eval(), backward)


def test_gradient_of_the_input() -> None:
    x = volume()

    def step(model: Callable[..., Any]) -> torch.Tensor:
        own = x.clone().requires_grad_()
        model(own).square().sum().backward()
        return own.grad

    found, expected = both(Net(), step)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_batches_of_every_size_by_one_compilation() -> None:
    model = Net()
    compiled = torch.compile(model, backend="fxfuse", options=STRICT, dynamic=True)
    for batch in (2, 3, 5):
        model.zero_grad()
        twin = copy.deepcopy(model)
        x = volume(batch)
        backward(compiled, x), backward(twin, x)
        assert_same(gradients(model), gradients(twin))
    assert dict(counters["fxfuse"]) == {"conv_norm_pool_gelu": 1, "conv_gelu_pool": 1}


def test_channels_last() -> None:
    model = Net().to(memory_format=torch.channels_last_3d)
    x = volume().contiguous(memory_format=torch.channels_last_3d)
    both(model, lambda m: backward(m, x))


def test_gradients_add_up() -> None:
    def step(model: Callable[..., Any]) -> None:
        for batch in (2, 3):
            torch.manual_seed(batch)
            model(volume(batch)).square().mean().backward()

    both(Net(), step, dynamic=True)


@pytest.mark.parametrize("frozen", ["volume.conv.weight", "head", "volume"])
def test_frozen_parameters(frozen: str) -> None:
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    both(model, backward)


def test_hooks_on_parameters_and_results() -> None:
    def step(model: Any) -> list[str]:
        seen: list[str] = []
        model.volume.conv.weight.register_hook(lambda grad: seen.append("gradient") or grad * 2)
        model.head.conv.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated"))
        out = model(x)
        out.register_hook(lambda grad: seen.append("result") or grad * 3)
        out.sum().backward()
        return seen

    x = volume()
    found, expected = both(Net(), step)
    assert sorted(found) == sorted(expected) == ["accumulated", "gradient", "result"]


def test_an_optimizer_in_the_compiled_step() -> None:
    losses = {}
    for kind in ("eager", "fxfuse"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, x = Net(), volume()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step() -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = step if kind == "eager" else torch.compile(step, backend="fxfuse", options={"fxfuse.select": "always"})
        losses[kind] = [run().item() for _ in range(8)]
    assert losses["fxfuse"] == pytest.approx(losses["eager"], rel=1e-4) and losses["eager"][-1] < losses["eager"][0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_the_compiled_model(reentrant: bool) -> None:
    """It runs the compiled forward twice."""
    model = Net()
    twin = copy.deepcopy(model)
    x = volume().requires_grad_()
    backward(lambda x: checkpoint(twin, x, use_reentrant=reentrant), x)
    compiled = torch.compile(model, backend="fxfuse", options=STRICT)
    backward(lambda x: checkpoint(compiled, x, use_reentrant=reentrant), x)
    assert_same(gradients(model), gradients(twin))


class Around(nn.Module):
    """Net with its chains in the body of a higher-order op."""

    def __init__(self, around: Callable[[Callable[..., Any], torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net, self.around = Net(), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(self.net, x)


@torch.compiler.nested_compile_region
def region(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net.volume(x)


def two_of_a_region(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net.linear(net.head(net.norm(region(net, x) + region(net, x * 2))).flatten(1))


def branches(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The branch that is not taken has no chain; both give results of the same strides, as torch.cond asks."""
    y = torch.cond(x.sum() > -1e9, net.volume, lambda x: x[..., :2, :2, :5].repeat(1, 2, 1, 1, 1).relu(), (x,))
    return net.linear(net.head(net.norm(y)).flatten(1))


def blocks(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A checkpoint for each block, as models are trained."""
    y = checkpoint(net.volume, x, use_reentrant=False)
    return net.linear(checkpoint(lambda y: net.head(net.norm(y)), y, use_reentrant=False).flatten(1))


AROUND = {
    "checkpoint": (lambda net, x: checkpoint(net, x, use_reentrant=False), [("wrap_body_0", 1)] * 2),
    "checkpoints": (blocks, [("wrap_body_0", 1), ("wrap_body_1", 1)]),
    "nested_compile_region": (two_of_a_region, [("", 1), ("subgraph_0", 2)]),
    "cond": (branches, [("", 1), ("cond_true_0", 1)]),
}


@pytest.mark.parametrize(("around", "bodies"), AROUND.values(), ids=AROUND)
def test_bodies_of_higher_order_ops(around: Callable[..., torch.Tensor], bodies: list[tuple[str, int]]) -> None:
    model = Around(around)
    x = volume().requires_grad_()
    # Statistics of the batch are computed twice where eager recomputes, once where the compiled step does.
    model.net.norm.eval()
    assert_fused(model, (x,), {"conv_norm_pool_gelu": 1, "conv_gelu_pool": 1}, options=STRICT)

    def step(run: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
        own = x.detach().clone().requires_grad_()
        return backward(run, own), own.grad

    found, expected = both(model, step)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [(fused.body, fused.calls) for fused in fxfuse.reports()[-1].fused] == bodies
    assert dict(counters["fxfuse"]) == {"conv_norm_pool_gelu": 1, "conv_gelu_pool": 1}


def test_a_checkpoint_draws_the_same_random_numbers_again_and_keeps_no_more() -> None:
    """Against Inductor, which has random numbers of its own."""
    found = {}
    for backend, options in (("inductor", {}), ("fxfuse", STRICT)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Net(), volume().requires_grad_()
        kept: list[int] = []
        body = lambda x, model=model: F.dropout(model.head(model.volume(F.dropout(x, 0.4))), 0.3)  # noqa: E731
        run = torch.compile(lambda x, body=body: checkpoint(body, x, use_reentrant=False).sin(), backend=backend, options=options)
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.untyped_storage().nbytes()) or t, lambda t: t):
            out = run(x)
        out.square().sum().backward()
        found[backend] = (out.detach(), x.grad, gradients(model), sum(kept))
    (out, grad, of_model, kept), (expected_out, expected_grad, expected_of_model, expected_kept) = found["fxfuse"], found["inductor"]
    torch.testing.assert_close((out, grad), (expected_out, expected_grad), rtol=1e-4, atol=1e-5)
    assert_same(of_model, expected_of_model)
    assert 0 < kept <= expected_kept


BUDGET = getattr(torch.autograd.graph, "region_activation_memory_budget", None)


@pytest.mark.skipif(BUDGET is None, reason="this torch has no region_activation_memory_budget")
def test_a_region_with_a_memory_budget() -> None:
    found = {}
    for backend, options in (("inductor", {}), ("fxfuse", STRICT)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = ConvGeluPool(), torch.randn(2, 4, 8, 8, requires_grad=True)

        def run(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            with BUDGET(0.5):
                return model(x.sin()).tanh()

        torch.compile(run, backend=backend, options=options)(x).square().sum().backward()
        found[backend] = {"x": x.grad, **gradients(model)}
    assert_same(found["fxfuse"], found["inductor"])
    assert fxfuse.reports()[-1].stopped is None and len(fxfuse.reports()[-1].fused) == 1


def test_torch_func_over_a_functional_call() -> None:
    """Under a torch.func transform chains are left alone, and say so."""
    model, x = Net().eval(), volume()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    expected = torch.func.grad(loss)(parameters)
    found = torch.compile(torch.func.grad(loss), backend="fxfuse", options={"fxfuse.select": "always"})(parameters)
    assert_same(dict(found), dict(expected))
    assert all("torch.func transform" in declined.reason for declined in fxfuse.reports()[-1].declined)


def test_a_second_derivative_is_an_error() -> None:
    model, x = Net(), volume().requires_grad_()
    compiled = torch.compile(model, backend="fxfuse", options=STRICT)
    with pytest.raises(RuntimeError, match="double backward|create_graph=False"):
        (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        grad.sum().backward()


def test_compiled_autograd() -> None:
    def step(model: Callable[..., Any]) -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            backward(model)

    both(Net(), step)


@pytest.mark.parametrize("where", ["outside", "inside", "disabled inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_autocast(where: str, dtype: torch.dtype) -> None:
    """Dtypes are eager's, and values to what 16 bits resolve."""
    model = Net()
    forward = model.forward

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            if where == "inside":
                return forward(x)
            with torch.autocast("cpu", enabled=False):
                y = model.volume(x)
            return model.linear(model.head(model.norm(y)).flatten(1))

    run = {"outside": lambda x: model(x), "inside": inside, "disabled inside": inside}[where]

    def step(run: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype, enabled=where == "outside"):
            out = run(volume())
        out.float().square().sum().backward()
        return out.detach(), {name: grad.clone() for name, grad in gradients(model).items()}

    out, expected = step(run)
    compiled_out, found = step(torch.compile(run, backend="fxfuse", options={"fxfuse.select": "always"}))
    assert compiled_out.dtype == out.dtype and {n: g.dtype for n, g in found.items()} == {n: g.dtype for n, g in expected.items()}
    torch.testing.assert_close(compiled_out, out, rtol=5e-2, atol=5e-2)
    for name, value in expected.items():
        if name not in ("volume.conv.bias", "volume.sum_weight"):
            assert (found[name] - value).norm() <= 5e-2 * value.norm(), name
    assert len(fxfuse.reports()[-1].fused) == 2


@pytest.mark.parametrize("parallel", [ranks.DDP, ranks.FSDP], ids=["DDP", "FSDP2"])
def test_two_ranks(parallel: str) -> None:
    ranks.assert_gradients_are_eagers(parallel, backend="gloo", device="cpu")
