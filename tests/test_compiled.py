"""Both chains end to end: `torch.compile(backend="fxfuse")` with Inductor on the CPU, against eager and fp64."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, ConvNormPoolGelu
from reference import assert_within_contract
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code


pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("compiles")]

ALWAYS = {"fxfuse.select": "always"}
STRICT = {"fxfuse.strict": True, **ALWAYS}
BOTH = {"conv_norm_pool_gelu": 1, "conv_gelu_pool": 1}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Both(nn.Module):
    """Both chains between ops that Inductor compiles: batch norm in front, relu behind (behind a flatten for the pooled pixel, whose strides
    are contiguous and channels_last at once, and come out of Inductor's relu other than out of eager's)."""

    def __init__(self) -> None:
        super().__init__()
        norm_pool = ConvNormPoolGelu()
        norm_pool.conv, norm_pool.norm = nn.ConvTranspose3d(4, 8, 3, padding=1), nn.LayerNorm((12,))
        self.norm_pool = nn.Sequential(nn.BatchNorm3d(4), norm_pool, nn.ReLU())
        self.pool = nn.Sequential(nn.BatchNorm2d(4), ConvGeluPool(), nn.Flatten(), nn.ReLU())

    def forward(self, volume: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm_pool(volume), self.pool(image)


def volume(batch: int = 2, depth: int = 6, height: int = 6) -> torch.Tensor:
    return torch.randn(batch, 4, depth, height, 12)


def image(batch: int = 2, height: int = 8, width: int = 9) -> torch.Tensor:
    return torch.randn(batch, 4, height, width)


def channels_last(value: Any) -> Any:
    """A tensor or a model in channels_last or channels_last_3d, by the number of dimensions of each tensor."""
    if isinstance(value, nn.Module):
        value = copy.deepcopy(value)
        for parameter in value.parameters():
            parameter.data = channels_last(parameter.data)
        return value
    return value.to(memory_format=CHANNELS_LAST[value.dim()]) if value.dim() in CHANNELS_LAST else value


def wide(value: Any) -> Any:
    return copy.deepcopy(value).double() if isinstance(value, nn.Module) else value.double()


def assert_same(results: Any, eager: Any, reference: Any, dtype: torch.dtype = torch.float32) -> None:
    """dtype, shape and strides of eager's, values within the contract."""
    for result, expected, ref64 in zip(results, eager, reference, strict=True):
        assert (result.dtype, result.shape, result.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert_within_contract(result, ref64, expected, dtype)


def check(compiled: Callable[..., Any], model: nn.Module, *inputs: torch.Tensor) -> None:
    assert_same(compiled(*inputs), model(*inputs), wide(model)(*map(wide, inputs)))


@dataclass
class Compiled:
    """One compilation of both chains: what came out, what eager gives, Inductor's wrapper code, and the counts."""

    results: Any
    eager: Any
    reference: Any
    code: str
    counts: dict[str, dict[str, int]]


@pytest.fixture(scope="module", params=["contiguous", "channels_last"])
def compiled_in(request: pytest.FixtureRequest) -> Compiled:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, inputs = Both().eval(), (volume(), image())
    if request.param == "channels_last":
        model, inputs = channels_last(model), tuple(map(channels_last, inputs))
    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        results, codes = run_and_get_code(torch.compile(model, backend="fxfuse", options=ALWAYS), *inputs)
        reference = wide(model)(*map(wide, inputs))
        return Compiled(results, model(*inputs), reference, "\n".join(codes), {name: dict(counters[name]) for name in ("fxfuse", "fxfuse_declined")})


def test_results_are_eagers(compiled_in: Compiled) -> None:
    assert_same(compiled_in.results, compiled_in.eager, compiled_in.reference)
    assert compiled_in.counts == {"fxfuse": BOTH, "fxfuse_declined": {}}


def test_nothing_comes_between_convolution_and_tail(compiled_in: Compiled) -> None:
    """No layout copy and no bias pass: what the tail op reads is what the convolution wrote, and the convolution gets no bias."""
    wrapper = compiled_in.code[compiled_in.code.index("def call(") :]
    calls = re.findall(r"(\w+) = (extern_kernels\.convolution|torch\.ops\.fxfuse\.\w+)[.\w]*\((\w+),(.*)", wrapper)
    written = {buffer: arguments for buffer, function, _, arguments in calls if "convolution" in function}
    tails = [(function, read) for _, function, read, _ in calls if "fxfuse" in function]
    assert sorted(function for function, _ in tails) == ["torch.ops.fxfuse.gelu_pool", "torch.ops.fxfuse.norm_pool_gelu"], wrapper
    for function, read in tails:
        assert read in written and "bias=None" in written[read], f"{function} reads {read}, which is no convolution's output\n{wrapper}"
        kernels = [line for line in wrapper.splitlines() if re.match(r"\s+\w*cpp_fused\w*\(", line) and re.search(rf"\b{read}\b", line)]
        assert not kernels, f"{kernels} touches the convolution's output\n{wrapper}"


@pytest.fixture
def cold() -> Iterator[None]:
    """No compilation is found in a cache: whatever makes Inductor restart the capture happens."""
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        yield


# torch 2.11's own avg_pool3d is compiled once for even and once for odd sizes, whatever the backend.
SIZES = (6, 8, 10, 12, 16) if torch.__version__ < "2.12" else (6, 7, 9, 12, 16)


# In the first call no two sizes are equal, or Dynamo takes them for one. Strict: nothing is declined, on no attempt.
def test_one_compilation_serves_every_batch_and_every_spatial_size(cold: None) -> None:
    model = Both().eval()
    compiled = torch.compile(model, backend="fxfuse", options=STRICT, dynamic=True)
    with torch.no_grad():
        # Sizes that differ from one another: Dynamo takes equal sizes of the first call for one symbol, whatever the backend.
        for batch in (2, 3, 5, 8, 13):
            check(compiled, model, volume(batch, 6, 7), image(batch, 6, 8))
        for size in SIZES:
            check(compiled, model, volume(3, size, size + 1), image(3, size, size + 2))
    assert dict(counters["fxfuse"]) == BOTH and not counters["fxfuse_declined"], "compiled again for another size"


def test_one_compilation_serves_every_size_in_channels_last(cold: None) -> None:
    model = channels_last(Both().eval())
    compiled = torch.compile(model, backend="fxfuse", options=STRICT, dynamic=True)
    with torch.no_grad():
        for batch, size in zip((2, 3, 5, 8, 13), SIZES):
            check(compiled, model, channels_last(volume(batch, size, size + 1)), channels_last(image(batch + 1, size + 2, size + 3)))
    assert dict(counters["fxfuse"]) == BOTH and not counters["fxfuse_declined"], "compiled again for another size"


def test_sizes_that_become_dynamic_by_themselves() -> None:
    model = ConvGeluPool(output_size=(2, None))
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS)
    with torch.no_grad():
        for batch, size in ((2, 8), (3, 9), (4, 10), (5, 11)):
            x = image(batch, size, size)
            assert_same([compiled(x)], [model(x)], [wide(model)(wide(x))])
    assert counters["fxfuse"]["conv_gelu_pool"] == 2


def test_with_and_without_grad_in_turn() -> None:
    model, inputs = Both().eval(), (volume(), image())  # eval() does not turn gradients off
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS)
    with torch.no_grad():
        check(compiled, model, *inputs)
    assert dict(counters["fxfuse"]) == BOTH and not counters["fxfuse_declined"]
    results, expected = compiled(*inputs), model(*inputs)
    twice = {name: 2 for name in BOTH}
    assert dict(counters["fxfuse"]) == twice and not counters["fxfuse_declined"]
    parameters = dict(model.named_parameters())
    gradients, right = (torch.autograd.grad(sum(r.square().sum() for r in of), parameters.values()) for of in (results, expected))
    for name, gradient, expected_gradient in zip(parameters, gradients, right, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-4, msg=lambda text: f"gradient of {name}: {text}")
    with torch.no_grad():
        check(compiled, model, *inputs)
    assert dict(counters["fxfuse"]) == twice, "compiled again"


def test_inference_mode_and_frozen_parameters() -> None:
    model, inputs = Both().eval(), (volume(), image())
    with torch.inference_mode():
        check(torch.compile(model, backend="fxfuse", options=ALWAYS), model, *inputs)
    assert dict(counters["fxfuse"]) == BOTH
    torch._dynamo.reset()
    model = ConvGeluPool().requires_grad_(False)
    x = image()
    assert_same([torch.compile(model, backend="fxfuse", options=ALWAYS)(x)], [model(x)], [wide(model)(wide(x))])
    assert counters["fxfuse"]["conv_gelu_pool"] == 2, "nothing needs a gradient here, whatever the grad mode"


class Autocast(nn.Module):
    """A model under an autocast region of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*inputs)


@pytest.mark.parametrize("inside", [False, True], ids=("outside", "inside"))
def test_autocast(inside: bool) -> None:
    model, inputs = Both().eval(), (volume(), image())
    compiled = torch.compile(Autocast(model) if inside else model, backend="fxfuse", options=ALWAYS)
    with torch.no_grad():
        if inside:
            results = compiled(*inputs)
        else:
            with torch.autocast("cpu", torch.bfloat16):
                results = compiled(*inputs)
        assert_same(results, Autocast(model)(*inputs), wide(model)(*map(wide, inputs)), torch.bfloat16)
    assert counters["fxfuse"]["conv_gelu_pool"] == 1
    assert sum(counters["fxfuse"].values()) + sum(counters["fxfuse_declined"].values()) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    model, x = ConvGeluPool().to(dtype), image().to(dtype)
    with torch.no_grad():
        result = torch.compile(model, backend="fxfuse", options=ALWAYS)(x)
        assert_same([result], [model(x)], [wide(model)(wide(x))], dtype)
    assert counters["fxfuse"]["conv_gelu_pool"] == 1


def test_low_precision_where_eager_has_no_kernel() -> None:
    """Eager on a CPU has no avg_pool3d in bfloat16; the chain computes what float32 gives, rounded once."""
    model, x = ConvNormPoolGelu().bfloat16(), volume().bfloat16()
    with torch.no_grad():
        result = torch.compile(model, backend="fxfuse", options=ALWAYS)(x)
        expected = copy.deepcopy(model).float()(x.float()).bfloat16()
        assert_same([result], [expected], [wide(model)(wide(x))], torch.bfloat16)


def test_unbatched_and_empty_batches() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_pool, self.pool = ConvNormPoolGelu(), ConvGeluPool()

        def forward(self, volume: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.norm_pool(volume), self.pool(image)

    model = Plain()
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS, dynamic=False)
    with torch.no_grad():
        for inputs in ((volume()[0], image()[0]), (volume(0), image(0))):
            check(compiled, model, *inputs)
    assert dict(counters["fxfuse"]) == {name: 2 for name in BOTH}


class Deep(nn.Module):
    """Three chains with batch norm in training mode around them; the second reads what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.BatchNorm2d(4), ConvGeluPool(output_size=(5, 6)), nn.BatchNorm2d(8))
        self.body = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, stride=2), nn.GELU(), nn.AdaptiveAvgPool2d((8, 9)), nn.BatchNorm2d(8))
        self.head = nn.Sequential(nn.Conv2d(8, 6, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).add_(1))


def test_several_chains_with_batch_norm_between() -> None:
    model, x = Deep(), image()
    eager, reference = copy.deepcopy(model), wide(model)
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS)
    with torch.no_grad():
        assert_same([compiled(x)], [eager(x)], [reference(wide(x))])
    assert counters["fxfuse"]["conv_gelu_pool"] == 3
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, eager.state_dict()[name], msg=lambda text: f"{name}: {text}")


def test_the_model_can_be_copied_and_pickled_afterwards() -> None:
    model, x = ConvGeluPool(), image()
    with torch.no_grad():
        expected = torch.compile(model, backend="fxfuse", options=ALWAYS)(x)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert list(copied.state_dict()) == list(model.state_dict())
            torch.testing.assert_close(copied(x), expected)


def test_numbers_that_vary_from_call_to_call(cold: None) -> None:
    """A float that becomes an input of the graph makes Inductor restart the capture: that is no failure, and no compilation that counts."""

    def run(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        return F.adaptive_avg_pool2d(F.gelu(torch.conv2d(x, weight)), 1) * scale

    compiled = torch.compile(run, backend="fxfuse", options=ALWAYS)
    x, weight = image(), torch.randn(8, 4, 3, 3)
    with torch.no_grad():
        for scale in (1.5, 2.5, 3.5):
            torch.testing.assert_close(compiled(x, weight, scale), run(x, weight, scale))
    assert dict(counters["fxfuse"]) == {"conv_gelu_pool": 2}


def test_a_profile_shows_the_ops_with_their_shapes() -> None:
    model, inputs = Both().eval(), (volume(), image())
    compiled = torch.compile(model, backend="fxfuse", options=STRICT)
    with torch.no_grad():
        compiled(*inputs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            compiled(*inputs)
    shapes = {event.name: event.input_shapes[0] for event in profile.events() if event.name.startswith("fxfuse::")}
    assert shapes == {"fxfuse::norm_pool_gelu": [2, 8, 6, 6, 12], "fxfuse::gelu_pool": [2, 8, 6, 7]}
