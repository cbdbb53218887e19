"""Training through torch.compile on a GPU: gradients against fp64, and what a step holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import EAGER_FACTOR, FLOOR
from torch import nn
from torch._dynamo.utils import counters

from fxfuse.bench.work import Step, Training
from fxfuse.bench.workloads import CHANNELS_LAST, switched, to_channels_last
from fxfuse.headline import ConvGeluPool, ConvNormPoolGelu
from fxfuse.measure import relative_error
from fxfuse.report import reports

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ALWAYS = {"fxfuse.select": "always"}
CHAINS = {
    "conv_norm_pool_gelu": (lambda: ConvNormPoolGelu(8, 16, 32), (3, 8, 4, 8, 16)),
    "conv_gelu_pool": (lambda: ConvGeluPool(8, 16), (5, 8, 31, 33)),
}
# Convolution outputs of half a GB in fp32.
LARGE = {
    "conv_norm_pool_gelu": (ConvNormPoolGelu, (16, 32, 16, 32, 32)),
    "conv_gelu_pool": (ConvGeluPool, (128, 8, 128, 128)),
}
KINDS = [(torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, ""), (torch.float16, "")]
# With TF32 off the parts of fp32 values that a fused op multiplies leave 2^-20 of a product. With TF32 on, cuDNN chooses by layout and size whether
# it makes use of that, and cuts operands off rather than round them: eager may be lucky.
SMALLEST = {**FLOOR, torch.float32: 2e-6}
SMALLEST_TF32 = 1e-3
# Of Inductor's peak memory: it holds the convolution's output and its gradient, recomputing holds a few pieces (`PIECE_BYTES`).
SAVING = 0.5


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield


def make(chain: str, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> tuple[nn.Module, torch.Tensor]:
    """A small model of the chain and an input for it, on the GPU."""
    build, shape = CHAINS[chain]
    model, x = build().to(DEVICE, dtype), torch.randn(shape, device=DEVICE, dtype=dtype)
    if layout == "channels_last":
        model, (x,) = to_channels_last(model, (x,))
    return model, x


def compiled(model: Callable[..., Any], backward: str = "auto") -> Callable[..., Any]:
    return torch.compile(model, backend="fxfuse", options={**ALWAYS, "fxfuse.backward": backward})


def assert_gradients(model: nn.Module, x: torch.Tensor, tf32: bool = False, backward: str = "auto") -> None:
    """Of parameters and input: dtype and strides are eager's, the error against fp64 at most twice eager's (or what TF32 stands for).

    Of what the norm takes away, 0 in exact arithmetic, there may be no more than twice eager's rounding, or that of the largest gradient.
    """
    work, dtype = Training(input_gradient=True), x.dtype
    found, eager = work.call(compiled(model, backward), (x,))(), work.call(model, (x,))()
    exact = work.reference(model, (x,))
    rounded = work.errors(work.tf32(model, (x,)), exact) if tf32 else {}
    errors, eager_errors = work.errors(found, exact), work.errors(eager, exact)
    for name, error in errors.items():
        allowed = max(EAGER_FACTOR * eager_errors[name], EAGER_FACTOR * rounded.get(name, 0.0), SMALLEST_TF32 if tf32 else SMALLEST[dtype])
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}, eager's {eager_errors[name]:.2e}"
    largest = max(float(gradient.norm()) for gradient in exact.values())
    for name in work.zeros(exact):
        assert float(found[name].norm()) <= max(EAGER_FACTOR * float(eager[name].norm()), SMALLEST[dtype] * largest), name
    assert found.keys() == eager.keys()
    for name, gradient in found.items():
        assert (gradient.dtype, gradient.stride()) == (eager[name].dtype, eager[name].stride()), name


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_gradients(chain: str, dtype: torch.dtype, precision: str, layout: str) -> None:
    model, x = make(chain, dtype, layout)
    with switched(precision):
        assert_gradients(model, x, tf32=precision == "tf32")
    assert counters["fxfuse"] == {chain: 1} and reports()[-1].fused[0].op == chain


@pytest.mark.parametrize("backward", ["recompute", "save"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_of_no_whole_number_of_16_bytes(dtype: torch.dtype, backward: str) -> None:
    """Inductor stops at gradients that are not aligned, as the second of two that lie behind each other would be."""
    with switched("ieee"):
        assert_gradients(ConvNormPoolGelu(8, 16, 10).to(DEVICE, dtype), torch.randn((3, 8, 4, 8, 5), device=DEVICE, dtype=dtype), backward=backward)


@pytest.mark.parametrize("backward", ["recompute", "save"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_results_that_become_part_of_another_tensor(chain: str, dtype: torch.dtype, backward: str) -> None:
    """Their gradients lie in another one's memory, at any offset."""
    model, x = make(chain, dtype)
    with switched("ieee"):
        found = Step(nn.Sequential(compiled(model, backward), _Behind()), (x,), True)()
        eager = Step(nn.Sequential(model, _Behind()), (x,), True)()
    # Of the largest: what the norm takes away is noise in both.
    share = {torch.float32: 1e-3, torch.float16: 2e-2}[dtype]
    noise = share * max(float(gradient.abs().max()) for gradient in eager.values())
    for name, gradient, want in zip(eager, found.values(), eager.values(), strict=True):
        torch.testing.assert_close(gradient, want, rtol=share, atol=noise, msg=lambda text, name=name: f"{name}: {text}")


class _Behind(nn.Module):
    """Puts one number in front of all others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.new_ones(1), x.flatten()])


@pytest.mark.parametrize("chain", CHAINS)
def test_gradients_of_large_convolution_outputs(chain: str) -> None:
    """The batch comes in several pieces."""
    build, shape = CHAINS[chain]
    model, x = build().to(DEVICE), torch.randn(shape[0], shape[1], *(4 * size for size in shape[2:]), device=DEVICE)
    if chain == "conv_norm_pool_gelu":
        model.norm = nn.LayerNorm(4 * 32, device=DEVICE)
    with switched("ieee"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxfuse.training.PIECE_BYTES", 1 << 20)
        assert_gradients(model, x)


@pytest.mark.parametrize("chain", CHAINS)
def test_dynamic_shapes_compile_once(chain: str) -> None:
    model, x = make(chain)
    run = torch.compile(model, backend="fxfuse", options=ALWAYS, dynamic=True)
    with switched("ieee"):
        for batch in (2, 3, 5):
            given = (torch.randn(batch, *x.shape[1:], device=DEVICE),)
            found, eager = Step(run, given, True)(), Step(model, given, True)()
            # What the norm takes away is noise in both, which the largest gradient sets the size of.
            noise = 1e-5 * max(float(gradient.abs().max()) for gradient in eager.values())
            for name, gradient in eager.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=noise, msg=lambda text, name=name: f"{name}: {text}")
    assert counters["fxfuse"] == {chain: 1}


@pytest.mark.parametrize("chain", CHAINS)
def test_repeats_bit_for_bit(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # cuDNN's own choice for a convolution's weight gradient may add atomically.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model, x = make(chain)
    step = Step(compiled(model), (x,), True)
    first, *others = [step() for _ in range(5)]
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def trained(model: nn.Module, run: Callable[..., Any], x: torch.Tensor, scaled: bool = True) -> tuple[dict[str, torch.Tensor], float]:
    """What three steps add to the parameters, and the scale that is left. scaled: under fp16 autocast, with a scaled loss."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled=scaled)
    for _ in range(3):
        with torch.autocast(DEVICE, torch.float16, enabled=scaled):
            out = run(x)
        scaler.scale((out.to(x.dtype) - 1).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}, scaler.get_scale()


@pytest.mark.parametrize("chain", CHAINS)
def test_autocast_with_a_scaled_loss(chain: str) -> None:
    model, x = make(chain)
    twin, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    exact, _ = trained(wide, wide, x.double(), scaled=False)
    eager, scale = trained(twin, twin, x)
    found, found_scale = trained(model, compiled(model), x)
    assert counters["fxfuse"] == {chain: 1} and found_scale == scale
    for name, update in exact.items():
        if name not in ("conv_transpose.bias", "sum_weight"):
            errors = [relative_error(updates[name], update) for updates in (found, eager)]
            assert errors[0] <= max(EAGER_FACTOR * errors[1], SMALLEST[torch.float16]), (name, errors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_autocast_around_the_call(chain: str, dtype: torch.dtype) -> None:
    model, x = make(chain)
    with torch.autocast(DEVICE, dtype):
        found, eager = Step(compiled(model), (x,), True)(), Step(model, (x,), True)()
    work = Training(input_gradient=True)
    exact = work.reference(model, (x,))
    errors, eager_errors = work.errors(found, exact), work.errors(eager, exact)
    assert counters["fxfuse"] == {chain: 1} and {name: g.dtype for name, g in found.items()} == {name: g.dtype for name, g in eager.items()}
    assert all(error <= max(EAGER_FACTOR * eager_errors[name], SMALLEST[dtype]) for name, error in errors.items()), (errors, eager_errors)


@pytest.mark.parametrize("chain", CHAINS)
def test_torch_func_is_left_alone_and_right(chain: str) -> None:
    """A gradient for each sample: vmap over grad."""
    model, x = make(chain)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (sample.unsqueeze(0),)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    with switched("ieee"):
        expected, found = each(parameters, x), compiled(each)(parameters, x)
    assert not counters["fxfuse"]
    noise = 1e-5 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=noise, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("chain", CHAINS)
def test_a_captured_step_repeats(chain: str) -> None:
    """In a CUDA graph, with a new input at each replay."""
    model, x = make(chain)
    step = Step(compiled(model), (x,), False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = {name: gradient.clone() for name, gradient in found.items()}
        expected = step()
        noise = 1e-5 * max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            torch.testing.assert_close(replayed[name], gradient, rtol=1e-3, atol=noise, msg=lambda text, name=name: f"{name}: {text}")


def peak_bytes(run: Callable[..., Any], x: torch.Tensor) -> int:
    """Of a warm step, beyond what was there before."""
    step = Step(run, (x,), False)
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.large
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("chain", LARGE)
def test_recomputing_holds_less_than_inductor(chain: str, layout: str) -> None:
    build, shape = LARGE[chain]
    model, x = build().to(DEVICE), torch.rand(shape, device=DEVICE)
    if layout == "channels_last":
        model, x = model.to(memory_format=CHANNELS_LAST[x.dim()]), x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    inductors = peak_bytes(torch.compile(model, backend="inductor"), x)
    ours = peak_bytes(compiled(model, "recompute"), x)
    assert ours <= SAVING * inductors, f"{ours / 1e6:.0f} MB, Inductor {inductors / 1e6:.0f} MB"
