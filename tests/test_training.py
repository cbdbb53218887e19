"""Gradients of the training ops on a CPU: against fp64 autograd of the chain in torch's own ops, which eager's error is measured against too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import ADAPTIVE_POOLS, EAGER_FACTOR, FLOOR

from fxfuse import fused, library, recompute, training
from fxfuse.chain import chains

pytestmark = pytest.mark.compiler

CONVS = {False: (F.conv1d, F.conv2d, F.conv3d), True: (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
Arguments = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def ops() -> None:
    chains()
    library.load("cpu")


def op(name: str) -> Any:
    return getattr(torch.ops.fxfuse, name).default


def gelu_pool(a: Arguments) -> torch.Tensor:
    dims = len(a["output_size"])
    y = a["input"] if a["bias"] is None else a["input"] + a["bias"].view(-1, *[1] * dims)
    size = [given if own == -1 else own for given, own in zip(y.shape[-dims:], a["output_size"])]
    out = ADAPTIVE_POOLS[dims - 1](F.gelu(y, approximate=a["approximate"]), size)
    return out if a["keepdim"] else out.flatten(-dims).squeeze(-1)


def conv_gelu_pool(a: Arguments) -> torch.Tensor:
    dims = a["weight"].dim() - 2
    y = CONVS[False][dims - 1](a["input"], a["weight"], None, a["stride"], a["padding"], a["dilation"])
    return gelu_pool({**a, "input": y, "output_size": [1] * dims})


def norm_pool_gelu(a: Arguments) -> torch.Tensor:
    y = a["input"] if a["bias"] is None else a["input"] + a["bias"].view(-1, 1, 1, 1)
    y = y if a["addend"] is None else y + a["addend_scale"] * a["addend"]
    y = F.layer_norm(y + a["addend_value"], y.shape[y.dim() - a["norm_ndim"] :], a["norm_weight"], a["norm_bias"], a["eps"])
    window = (a["kernel_size"], a["stride"], a["padding"], a["ceil_mode"], a["count_include_pad"], a["divisor_override"])
    wide = y.to(torch.promote_types(y.dtype, torch.float32))  # torch has no avg_pool3d of 16 bits on a CPU
    return F.gelu(F.avg_pool3d(wide, *window).to(y.dtype), approximate=a["approximate"])


def conv_norm_pool_gelu(a: Arguments) -> torch.Tensor:
    given = (a["stride"], a["padding"], *((a["output_padding"],) if a["transposed"] else ()))
    y = CONVS[a["transposed"]][2](a["input"], a["weight"], None, *given)
    pool = {"kernel_size": a["pool_size"], "stride": a["pool_size"], "padding": 0, "ceil_mode": False, "count_include_pad": True}
    return norm_pool_gelu({**a, **pool, "input": y, "norm_ndim": 1, "divisor_override": None})


CHAINS: dict[str, Callable[[Arguments], torch.Tensor]] = {
    "gelu_pool": gelu_pool, "conv_gelu_pool": conv_gelu_pool, "norm_pool_gelu": norm_pool_gelu, "conv_norm_pool_gelu": conv_norm_pool_gelu,
}  # fmt: skip


def of_gelu_pool(shape: tuple[int, ...] = (5, 3, 9, 7), size: tuple[int, ...] = (1, 1), **changed: Any) -> Arguments:
    defaults = {"output_size": list(size), "keepdim": True, "approximate": "none", "out_dtype": None}
    return {"input": torch.randn(shape), "bias": torch.randn(shape[-len(size) - 1]), **defaults, **changed}


def of_conv_gelu_pool(shape: tuple[int, ...] = (5, 3, 9, 8), kernel: tuple[int, ...] = (3, 2), **changed: Any) -> Arguments:
    dims = len(kernel)
    geometry = {"stride": [1] * dims, "padding": [1] * dims, "dilation": [1] * dims}
    defaults = {**geometry, "keepdim": True, "approximate": "none", "precision": "ieee", "out_dtype": None}
    return {"input": torch.randn(shape), "weight": torch.randn(6, shape[-dims - 1], *kernel) / 3, "bias": torch.randn(6), **defaults, **changed}


def of_norm_pool_gelu(shape: tuple[int, ...] = (3, 4, 5, 6, 7), norm_ndim: int = 1, **changed: Any) -> Arguments:
    normed = shape[len(shape) - norm_ndim :]
    parameters = {"bias": torch.randn(shape[-4]), "addend": torch.randn(()), "norm_weight": torch.randn(normed), "norm_bias": torch.randn(normed)}
    pool = {"kernel_size": [2, 2, 2], "stride": [2, 2, 2], "padding": [0, 0, 0], "ceil_mode": False, "count_include_pad": True}
    defaults = {"addend_scale": 1.0, "addend_value": 0.0, "norm_ndim": norm_ndim, "eps": 1e-5, **pool, "divisor_override": None}
    return {"input": torch.randn(shape), **parameters, **defaults, "approximate": "none", "out_dtype": None, **changed}


def of_conv_norm_pool_gelu(shape: tuple[int, ...] = (3, 4, 3, 4, 5), width: int = 10, **changed: Any) -> Arguments:
    parameters = {"bias": torch.randn(6), "addend": torch.randn(6, 1, 1, 1), "norm_weight": torch.randn(width), "norm_bias": torch.randn(width)}
    geometry = {"transposed": True, "stride": [2] * 3, "padding": [1] * 3, "output_padding": [1] * 3}
    defaults = {**geometry, "addend_scale": 1.0, "addend_value": 0.0, "eps": 1e-5, "pool_size": [2, 2, 2], "approximate": "none"}
    weight = torch.randn(shape[-4], 6, 3, 3, 3) / 5
    return {"input": torch.randn(shape), "weight": weight, **parameters, **defaults, "precision": "ieee", "out_dtype": None, **changed}


# Elements of the convolution's output for a sample, of the two below.
INNER = {"conv_gelu_pool": 6 * 9 * 9, "conv_norm_pool_gelu": 6 * 6 * 8 * 10}

BARE = {"bias": None, "addend": None, "norm_weight": None, "norm_bias": None}
CASES = {
    "gelu_pool": [
        of_gelu_pool, lambda: of_gelu_pool(bias=None, approximate="tanh"), lambda: of_gelu_pool(keepdim=False),
        lambda: of_gelu_pool(size=(3, 2)), lambda: of_gelu_pool(size=(-1, 2)), lambda: of_gelu_pool((3, 9, 7)),
        lambda: of_gelu_pool((4, 3, 11), (1,)), lambda: of_gelu_pool((4, 3, 11), (4,)), lambda: of_gelu_pool((2, 3, 4, 5, 6), (2, 2, 2)),
        lambda: of_gelu_pool((2, 3, 4, 5, 6), (1, 1, 1)), lambda: of_gelu_pool((0, 3, 4, 5)),
    ],
    "conv_gelu_pool": [
        of_conv_gelu_pool, lambda: of_conv_gelu_pool(bias=None, approximate="tanh", keepdim=False), lambda: of_conv_gelu_pool((3, 9, 8)),
        lambda: of_conv_gelu_pool((4, 3, 20), (5,), stride=[3], dilation=[2]), lambda: of_conv_gelu_pool((2, 3, 5, 6, 7), (3, 1, 2), stride=[2, 1, 1]),
        lambda: of_conv_gelu_pool((0, 3, 9, 8)),
    ],
    "norm_pool_gelu": [
        of_norm_pool_gelu, lambda: of_norm_pool_gelu(**BARE, addend_value=1.5, approximate="tanh"), lambda: of_norm_pool_gelu((4, 5, 6, 7)),
        lambda: of_norm_pool_gelu(norm_ndim=2, addend=torch.randn(4, 1, 1, 1), addend_scale=-2.0), lambda: of_norm_pool_gelu(norm_ndim=5),
        lambda: of_norm_pool_gelu(addend=torch.randn(3, 4, 5, 6, 7)), lambda: of_norm_pool_gelu(addend=torch.randn(1, 1, 5, 1, 7)),
        lambda: of_norm_pool_gelu(kernel_size=[3, 2, 3], stride=[2, 1, 2], padding=[1, 0, 1], ceil_mode=True, count_include_pad=False),
        lambda: of_norm_pool_gelu(divisor_override=3),
    ],
    "conv_norm_pool_gelu": [
        of_conv_norm_pool_gelu, lambda: of_conv_norm_pool_gelu(**BARE, approximate="tanh"), lambda: of_conv_norm_pool_gelu((4, 3, 4, 5)),
        lambda: of_conv_norm_pool_gelu(
            (3, 4, 5, 6, 9), 5, transposed=False, output_padding=[0] * 3, weight=torch.randn(6, 4, 3, 3, 3) / 5, pool_size=[1, 3, 2]
        ),
    ],
}  # fmt: skip
EVERY = [pytest.param(name, make, id=f"{name}-{index}") for name, cases in CASES.items() for index, make in enumerate(cases)]


def gradients(function: Callable[[Arguments], torch.Tensor], arguments: Arguments, asked: tuple[str, ...], dtype: Any = None) -> list[torch.Tensor]:
    """Of a fixed random combination of the results, with respect to the arguments asked for."""
    given = {name: value.detach().to(dtype or value.dtype) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    for name in asked:
        given[name].requires_grad_()
    out = function(given)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return list(torch.autograd.grad(out, [given[name] for name in asked], grad))


def check(name: str, arguments: Arguments, asked: tuple[str, ...] | None = None) -> None:
    """Every gradient is as close to fp64's as twice eager's, and strides and dtype are the argument's."""
    asked = asked or tuple(key for key, value in arguments.items() if isinstance(value, torch.Tensor))
    dtype = arguments["input"].dtype
    training_op, chain = op(f"{name}_training"), CHAINS[name]
    found = gradients(lambda a: training_op(*a.values()), arguments, asked)
    exact, eagers = (gradients(chain, arguments, asked, kind) for kind in (torch.float64, dtype))
    # A gradient that is 0 in exact arithmetic (of what the norm takes away) is noise in both: it is held against what was summed up.
    scale = max((value.norm().item() for value in exact), default=1.0)
    for key, ours, want, eager in zip(asked, found, exact, eagers):
        assert ours.dtype == arguments[key].dtype and ours.shape == want.shape and ours.stride() == torch.empty_like(arguments[key]).stride()
        is_noise = want.norm().item() < 1e-12 * scale
        allowed = max(EAGER_FACTOR * (eager.double() - want).norm().item(), FLOOR[dtype] * (scale if is_noise else want.norm().item()))
        error = (ours.double() - want).norm().item()
        assert error <= allowed, f"{key}: error {error:.2e}, allowed {allowed:.2e}, of {want.norm():.2e}"


@pytest.fixture(params=[None, 4096], ids=["one piece", "pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch at once, and in pieces of a sample or two."""
    if request.param:
        monkeypatch.setattr(training, "PIECE_BYTES", request.param)


@pytest.mark.parametrize(("name", "make"), EVERY)
def test_gradients(name: str, make: Callable[[], Arguments], pieces: None) -> None:
    torch.manual_seed(0)
    check(name, make())


@pytest.mark.parametrize("name", CHAINS)
def test_every_subset_of_what_is_asked_for(name: str) -> None:
    torch.manual_seed(0)
    arguments = CASES[name][0]()
    tensors = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
    for count in range(1, len(tensors) + 1):
        for asked in itertools.combinations(tensors, count):
            check(name, arguments, asked)


@pytest.mark.parametrize("layout", ["channels_last", "sliced", "expanded"])
@pytest.mark.parametrize("name", CHAINS)
def test_layouts(name: str, layout: str, pieces: None) -> None:
    torch.manual_seed(0)
    arguments = CASES[name][0]()
    x = arguments["input"]
    x = {
        "channels_last": lambda: x.contiguous(memory_format=CHANNELS_LAST[x.dim()]),
        "sliced": lambda: torch.stack([x, x], -1)[..., 0],
        "expanded": lambda: x[:1].expand(x.shape),
    }[layout]()
    check(name, {**arguments, "input": x})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_16_bits(name: str, dtype: torch.dtype, pieces: None) -> None:
    torch.manual_seed(0)
    arguments = CASES[name][0]()
    check(name, {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()})


@pytest.mark.parametrize("name", CHAINS)
def test_repeats_bit_for_bit(name: str, pieces: None) -> None:
    torch.manual_seed(0)
    arguments = CASES[name][0]()
    asked = tuple(key for key, value in arguments.items() if isinstance(value, torch.Tensor))
    first, *others = [gradients(lambda a: op(f"{name}_training")(*a.values()), arguments, asked) for _ in range(5)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


@pytest.mark.parametrize("name", CHAINS)
def test_forward_is_the_ops(name: str) -> None:
    arguments = CASES[name][0]()
    assert torch.equal(op(f"{name}_training")(*arguments.values()), op(name)(*arguments.values()))


@pytest.mark.parametrize("name", CHAINS)
def test_opcheck(name: str) -> None:
    arguments = {key: value.requires_grad_() if isinstance(value, torch.Tensor) else value for key, value in CASES[name][0]().items()}
    torch.library.opcheck(op(f"{name}_training"), tuple(arguments.values()))


def test_saves_its_arguments_alone() -> None:
    """No value of the size of the convolution's output waits for the backward."""
    arguments = of_conv_gelu_pool()
    arguments["weight"].requires_grad_()
    out = op("conv_gelu_pool_training")(*arguments.values())
    saved = [tensor.data_ptr() for tensor in out.grad_fn.saved_tensors if tensor is not None]
    assert set(saved) <= {value.data_ptr() for value in arguments.values() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["conv_gelu_pool", "conv_norm_pool_gelu"])
def test_the_convolution_comes_again_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = {"conv_gelu_pool": lambda: of_conv_gelu_pool((5, 3, 9, 8)), "conv_norm_pool_gelu": lambda: of_conv_norm_pool_gelu((5, 4, 3, 4, 5))}[name]
    arguments, sizes = make(), []
    weight = arguments["weight"].requires_grad_()
    out = op(f"{name}_training")(*arguments.values())

    def convolution(*given: Any) -> torch.Tensor:
        result = fused.convolution(*given)
        sizes.extend([len(result)] if result.device.type == "cpu" else [])
        return result

    monkeypatch.setattr(recompute, "convolution", convolution)
    monkeypatch.setattr(training, "PIECE_BYTES", 2 * 4 * INNER[name])
    torch.autograd.grad(out.sum(), weight)
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("name", CHAINS)
def test_second_derivative_is_refused(name: str) -> None:
    arguments = CASES[name][0]()
    x = arguments["input"].requires_grad_()
    (grad,) = torch.autograd.grad(op(f"{name}_training")(*arguments.values()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"fxfuse::{name} has a first derivative only"):
        grad.sum().backward()
