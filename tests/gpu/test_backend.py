"""Both chains end to end through torch.compile on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from fxfuse.headline import ConvGeluPool, ConvNormPoolGelu
from fxfuse.measure import fp64_result, relative_error, tf32_result
from fxfuse.report import reports

pytestmark = pytest.mark.gpu

ALWAYS = {"fxfuse.select": "always"}
CHAINS = {
    "conv_norm_pool_gelu": (lambda: ConvNormPoolGelu(8, 16, 32), (2, 8, 4, 8, 16)),
    "conv_gelu_pool": (lambda: ConvGeluPool(8, 16), (4, 8, 31, 33)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield


def make(chain: str, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """A small model of the chain and an input for it, on the GPU."""
    torch.manual_seed(0)
    build, shape = CHAINS[chain]
    model, x = build().to("cuda", dtype).eval(), torch.randn(shape, device="cuda", dtype=dtype)
    if channels_last:
        memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model, x = model.to(memory_format=memory_format), x.contiguous(memory_format=memory_format)
    return model, x


def assert_as_eager(out: torch.Tensor, model: nn.Module, *inputs: torch.Tensor) -> None:
    """Shape, dtype and strides of eager's result, and an error against fp64 of at most twice eager's."""
    eager = model(*inputs)
    assert (out.shape, out.dtype, out.stride()) == (eager.shape, eager.dtype, eager.stride())
    reference = fp64_result(model, *inputs)
    # With TF32 allowed the fused op rounds fp32 operands to it, which eager's own choice of algorithm may or may not do.
    rounded = relative_error(tf32_result(model, *inputs), reference) if inputs[0].dtype == torch.float32 else 0.0
    assert relative_error(out, reference) <= max(2 * relative_error(eager, reference), 2 * rounded, 1e-6)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_as_eager(chain: str, dtype: torch.dtype, channels_last: bool) -> None:
    model, x = make(chain, dtype, channels_last)
    out = torch.compile(model, backend="fxfuse", options=ALWAYS)(x)
    assert counters["fxfuse"] == {chain: 1}
    assert_as_eager(out, model, x)


@pytest.mark.parametrize("keepdim", [False, True], ids=["dropped", "keepdim"])
def test_mean_over_the_spatial_dimensions(keepdim: bool) -> None:
    model, x = make("conv_gelu_pool")

    def chain(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(model.conv(x)).mean((2, 3), keepdim=keepdim)

    out, eager = torch.compile(chain, backend="fxfuse", options=ALWAYS)(x), chain(x)
    assert reports()[-1].fused[0].op == "conv_gelu_pool"
    assert (out.shape, out.stride()) == (eager.shape, eager.stride())
    torch.testing.assert_close(out, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chain", CHAINS)
def test_unbatched(chain: str) -> None:
    model, x = make(chain)
    forward = model if chain == "conv_norm_pool_gelu" else lambda x: F.adaptive_avg_pool2d(F.gelu(model.conv(x)), 1)
    out, eager = torch.compile(forward, backend="fxfuse", options=ALWAYS)(x[0]), forward(x[0])
    assert counters["fxfuse"] == {chain: 1}
    assert (out.shape, out.stride()) == (eager.shape, eager.stride())
    torch.testing.assert_close(out, eager, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chain", CHAINS)
def test_dynamic_shapes_compile_once(chain: str) -> None:
    model, x = make(chain)
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS, dynamic=True)
    for batch in (2, 3, 5, 6, 9):
        inputs = torch.randn(batch, *x.shape[1:], device="cuda")
        assert_as_eager(compiled(inputs), model, inputs)
    assert counters["fxfuse"] == {chain: 1}


def tail_only(chain: str, channels_last: bool) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    """The chain in a form that the fused convolutions do not take: a norm over two dimensions, a pool that is not global."""
    model, x = make(chain, torch.float16, channels_last)
    if chain == "conv_norm_pool_gelu":
        model.norm = nn.LayerNorm((16, 32), device="cuda", dtype=torch.float16)
        return model, x
    return lambda x: F.adaptive_avg_pool2d(F.gelu(model.conv(x)), 2), x


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("chain", CHAINS)
def test_nothing_runs_between_convolution_and_tail(chain: str, channels_last: bool) -> None:
    """No copy to another layout and no pass for the bias."""
    model, x = tail_only(chain, channels_last)
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS)
    torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    assert reports()[-1].fused[0].op == chain.removeprefix("conv_")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    tail = next(i for i, name in enumerate(kernels) if "fxfuse" in name)
    # What runs last before the tail must be the convolution's own kernel: not Inductor's (a copy, a bias), not ATen's.
    assert tail > 0 and not kernels[tail - 1].startswith("triton_") and "at::native" not in kernels[tail - 1], kernels


@pytest.mark.parametrize("chain", CHAINS)
def test_fused_convolution_launches_nothing_else(chain: str) -> None:
    model, x = make(chain)
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS)
    compiled(x)
    assert reports()[-1].fused[0].op == chain
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(x)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels and all("fxfuse" in name for name in kernels), kernels


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("chain", CHAINS)
def test_inductor_modes(chain: str, mode: str) -> None:
    model, x = make(chain)
    compiled = torch.compile(model, backend="fxfuse", options={**ALWAYS, "fxfuse.mode": mode})
    for _ in range(4):
        inputs = torch.randn_like(x)
        assert_as_eager(compiled(inputs).clone(), model, inputs)
    assert counters["fxfuse"] == {chain: 1}


@pytest.mark.parametrize("chain", CHAINS)
def test_captured_cuda_graph(chain: str) -> None:
    model, x = make(chain)
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compiled(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        assert_as_eager(out, model, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_autocast_around_the_call(chain: str, dtype: torch.dtype) -> None:
    model, x = make(chain)
    with torch.autocast("cuda", dtype):
        eager = model(x)
        out = torch.compile(model, backend="fxfuse", options=ALWAYS)(x)
    assert counters["fxfuse"] == {chain: 1}
    assert (out.dtype, out.stride()) == (eager.dtype, eager.stride())
    reference = fp64_result(model, x)
    assert relative_error(out, reference) <= 2 * relative_error(eager, reference)


def test_cpu_scalar_as_addend() -> None:
    model, x = make("conv_norm_pool_gelu")
    weight = torch.tensor(0.5)

    def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return model.gelu(model.avg_pool(model.norm(model.conv_transpose(x) + weight)))

    out = torch.compile(chain, backend="fxfuse", options=ALWAYS)(x, weight)
    assert counters["fxfuse"] == {"conv_norm_pool_gelu": 1}
    torch.testing.assert_close(out, chain(x, weight), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("chain", CHAINS)
def test_tf32_switch_is_followed_at_the_call(chain: str, dynamic: bool) -> None:
    model, x = make(chain)
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS, dynamic=dynamic)
    compiled(x)
    reference, before = fp64_result(model, x), torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = False
        assert relative_error(compiled(x), reference) < 2e-6
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_device_than_the_current_one() -> None:
    model, x = make("conv_gelu_pool")
    model, x = model.to("cuda:1"), x.to("cuda:1")
    assert_as_eager(torch.compile(model, backend="fxfuse", options=ALWAYS)(x), model, x)


def test_bitwise_equal_runs() -> None:
    for chain in CHAINS:
        model, x = make(chain)
        compiled = torch.compile(model, backend="fxfuse", options=ALWAYS)
        first = compiled(x)
        assert all(torch.equal(first, compiled(x)) for _ in range(3))
