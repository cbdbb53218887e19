"""The tail ops' gradients on a GPU: the kernels against fp64 autograd beside eager's error, in place, special values, and how training calls them."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from reference import assert_within_contract, gelu_pool_reference, norm_pool_gelu_reference

from fxfuse import training
from fxfuse.passes import conv_gelu_pool_gradients, conv_norm_pool_gelu_gradients

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "channels_last")
INF, NAN = math.inf, math.nan
# What a sum of float32 values may be off by, of the sum of their magnitudes.
SUM_FLOOR = 1e-6
Arguments = dict[str, Any]


def randn(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous", shift: float = 0.0) -> torch.Tensor:
    x = torch.randn(shape, device=DEVICE).add_(shift).to(dtype)
    return x if layout == "contiguous" else x.movedim(1, -1).contiguous().movedim(-1, 1)


def poisoned(*shape: int) -> torch.Tensor:
    """What a kernel is to fill: an element that no thread writes is seen."""
    return torch.full(shape, NAN, device=DEVICE)


def of_norm(x: torch.Tensor, pool: tuple[int, int, int] = (2, 2, 2), **changed: Any) -> Arguments:
    """Arguments of norm_pool_gelu, every tensor present."""
    parameters = {"bias": randn(x.shape[1]), "addend": randn(x.shape[1], 1, 1, 1, dtype=x.dtype)}
    affine = {"norm_weight": randn(x.shape[-1], shift=1.0), "norm_bias": randn(x.shape[-1], dtype=x.dtype)}
    window = {"kernel_size": list(pool), "stride": list(pool), "padding": [0] * 3, "ceil_mode": False, "count_include_pad": True}
    before = {"addend_scale": -1.5, "addend_value": 0.25, "norm_ndim": 1, "eps": 1e-5}
    rest = {**before, **window, "divisor_override": None, "approximate": "none", "out_dtype": None}
    return {"input": x, **parameters, **affine, **rest, **changed}


def of_gelu(x: torch.Tensor, size: tuple[int, ...], **changed: Any) -> Arguments:
    """Arguments of gelu_pool."""
    return {"input": x, "bias": randn(x.shape[1]), "output_size": list(size), "keepdim": True, "approximate": "none", "out_dtype": None, **changed}


def references(function: Any, arguments: Arguments, grad: torch.Tensor, names: tuple[str, ...]) -> list[tuple[torch.Tensor, ...]]:
    """The gradients of the tensors named, in fp64 and in the input's dtype, of contiguous tensors: torch's adaptive pools fail on some others."""
    found = []
    for dtype in (torch.float64, arguments["input"].dtype):
        given = {name: value.detach().to(dtype).contiguous() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
        leaves = [given[name].requires_grad_() for name in names if given[name] is not None]
        out = function(*given.values(), dtype=dtype)
        found.append(torch.autograd.grad(out, leaves, grad.to(dtype)))
    return found


def norm_kernel(grad: torch.Tensor, a: Arguments, in_place: bool = False, sums: bool = True) -> tuple[torch.Tensor, ...]:
    """of_input, of_channels and of_norm as the kernel leaves them."""
    x = a["input"].clone()
    of_input = x if in_place else torch.full_like(x, NAN)
    of_channels, of_rows = (poisoned(*x.shape[:2]), poisoned(2, x.shape[-1])) if sums else (None, None)
    given = [a[name] for name in ("bias", "addend", "norm_weight", "norm_bias", "addend_scale", "addend_value", "eps", "kernel_size", "approximate")]
    conv_norm_pool_gelu_gradients.norm_pool_gelu_input_gradient(grad, x, *given, of_input, of_channels, of_rows)
    assert in_place or torch.equal(x.nan_to_num(), a["input"].nan_to_num())
    return of_input, of_channels, of_rows


def gelu_kernel(grad: torch.Tensor, a: Arguments, in_place: bool = False, sums: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """of_input and of_channels as the kernel leaves them."""
    x = a["input"].clone()
    of_input, of_channels = x if in_place else torch.full_like(x, NAN), poisoned(*x.shape[:2]) if sums else None
    conv_gelu_pool_gradients.gelu_pool_input_gradient(grad, x, a["bias"], a["output_size"], a["approximate"], of_input, of_channels)
    return of_input, of_channels


def assert_sums(of_channels: torch.Tensor, of_input: torch.Tensor) -> None:
    """of_channels is the sum of the fp64 gradient, within fp32's rounding of its terms."""
    error, magnitude = (of_channels - of_input.flatten(2).sum(2)).abs().max(), 1 + of_input.flatten(2).abs().sum(2).max()
    assert error <= SUM_FLOOR * magnitude, f"a channel's sum is off by {error:.2e}, of terms that add up to {magnitude:.2e}"


def check_norm(a: Arguments, grad_dtype: torch.dtype | None = None, in_place: bool = False, sums: bool = True) -> None:
    x = a["input"]
    out = [size // window for size, window in zip(x.shape[2:], a["kernel_size"])]
    grad = randn(*x.shape[:2], *out, dtype=grad_dtype or x.dtype)
    of_input, of_channels, of_rows = norm_kernel(grad, a, in_place)
    assert of_input.stride() == x.stride()
    exact, eager = references(norm_pool_gelu_reference, a, grad, ("input", "norm_weight", "norm_bias"))
    if x.shape[-1] == 1:  # one value is its own mean, and all that is left is 0
        assert of_input.abs().max() <= 1e-4 * grad.abs().max()
        return
    assert_within_contract(of_input, exact[0], eager[0], x.dtype)
    for mine, want, other in zip(of_rows if a["norm_weight"] is not None else (), exact[1:], eager[1:]):
        allowed = max(2 * (other.double() - want).norm(), SUM_FLOOR * grad.double().abs().sum())
        assert (mine - want).norm() <= allowed, f"a parameter's gradient is off by {(mine - want).norm():.2e}, {allowed:.2e} are allowed"
    if sums and x.shape[-1] > 4:  # rows of a few values may be almost equal, and their gradients' terms large beside the gradients
        assert_sums(of_channels, exact[0])
    assert torch.equal(of_input, norm_kernel(grad, a, not in_place, sums=False)[0])


def check_gelu(a: Arguments, grad_dtype: torch.dtype | None = None, in_place: bool = False) -> None:
    x = a["input"]
    grad = randn(*x.shape[:2], *a["output_size"], dtype=grad_dtype or x.dtype)
    of_input, of_channels = gelu_kernel(grad, a, in_place)
    assert of_input.stride() == x.stride()
    exact, eager = references(gelu_pool_reference, a, grad, ("input",))
    assert_within_contract(of_input, exact[0], eager[0], x.dtype)
    assert_sums(of_channels, exact[0])
    assert torch.equal(of_input, gelu_kernel(grad, a, not in_place, sums=False)[0])


# One element, single elements, a vector or two that leave lanes idle, rows that fill a warp's registers.
WIDTHS = (1, 3, 7, 8, 12, 32, 33, 64, 100, 128, 256, 300, 512, 1000, 1024)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_width(width: int, dtype: torch.dtype, layout: str) -> None:
    for pool in ((2, 2, 2), (1, 1, 3), (1, 2, 1), (1, 1, 2)):
        window = (*pool[:2], min(pool[2], width))
        if layout == "channels_last" and window[0] * window[1] * width > conv_norm_pool_gelu_gradients.LARGEST_WINDOW:
            continue
        check_norm(of_norm(randn(2, 5, 4, 4, width, dtype=dtype, layout=layout), window))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool", [(2, 2, 2), (3, 3, 3), (4, 4, 4), (1, 1, 1), (5, 6, 7), (2, 1, 4)], ids=str)
def test_norm_windows_that_leave_a_rest(pool: tuple[int, int, int], dtype: torch.dtype, layout: str) -> None:
    check_norm(of_norm(randn(2, 24, 5, 7, 18, dtype=dtype, layout=layout), pool), in_place=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(40))
def test_norm_random(seed: int, layout: str) -> None:
    pick = random.Random(seed)
    dtype, width = pick.choice(DTYPES), pick.choice([*WIDTHS, pick.randint(2, 200)])
    window = [pick.randint(1, 3) for _ in range(3)]
    pool = (*window[:2], min(window[2], width))
    if layout == "channels_last":
        width = min(width, conv_norm_pool_gelu_gradients.LARGEST_WINDOW // (pool[0] * pool[1]))
    x = randn(pick.randint(1, 3), pick.choice([1, 3, 8, 24, 33, 64]), pick.randint(3, 9), pick.randint(3, 9), width, dtype=dtype, layout=layout)
    left_out = {name: None for name in ("bias", "addend") if pick.random() < 0.5}
    bare = {"norm_weight": None, "norm_bias": None} if pick.random() < 0.3 else {}
    a = of_norm(x, pool, **left_out, **bare, approximate=pick.choice(["none", "tanh"]), eps=pick.choice([1e-5, 0.1]))
    check_norm(a, grad_dtype=pick.choice([None, torch.float32]), in_place=pick.random() < 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (8, 33, 300, 1024))
def test_norm_addend_within_a_channel(width: int, dtype: torch.dtype) -> None:
    x = randn(2, 3, 4, 4, width, dtype=dtype)
    for shape in ((width,), (4, 1), (2, 1, 4, 1, width), (2, 3, 4, 4, width), (1, 3, 1, 4, 1)):
        check_norm(of_norm(x, addend=randn(*shape, dtype=dtype)), in_place=True)
    check_norm(of_norm(x, addend=randn(width, 4, dtype=dtype).t()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", (12, 64, 100))
def test_norm_far_from_zero(width: int, layout: str) -> None:
    x = randn(2, 16, 4, 6, width, layout=layout, shift=1e4)
    check_norm(of_norm(x, bias=None, addend=None, addend_value=0.0), sums=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", (NAN, INF, -INF), ids=str)
def test_norm_nan_and_inf(value: float, dtype: torch.dtype, layout: str) -> None:
    for width, pool in ((64, (2, 2, 2)), (9, (2, 2, 3)), (12, (4, 2, 2))):
        x = randn(2, 24, 4, 6, width, dtype=dtype, layout=layout)
        grad = randn(2, 24, 4 // pool[0], 6 // pool[1], width // pool[2])
        whole = of_norm(x, pool)
        for name, index in (("input", (1, 2, 1, 3, 5)), ("bias", 3), ("norm_bias", 3)):
            a = {**whole, name: whole[name].clone()}
            a[name][index] = value
            of_input, _, of_rows = norm_kernel(grad, a)
            exact, _ = references(norm_pool_gelu_reference, a, grad, ("input", "norm_weight", "norm_bias"))
            assert torch.equal(of_input.isnan(), exact[0].isnan())
            assert torch.equal(of_rows.isnan(), torch.stack(exact[1:]).isnan())


SPATIAL = [
    ((1,), (1,)), ((11,), (4,)), ((11,), (17,)), ((5000,), (3,)), ((9, 7), (1, 1)), ((70, 71), (1, 1)), ((33, 70), (7, 7)), ((64, 64), (2, 2)),
    ((3, 4), (7, 9)), ((14, 14), (7, 7)), ((30, 31), (30, 31)), ((5, 6, 7), (1, 1, 1)), ((5, 6, 7), (3, 2, 4)), ((16, 16, 16), (2, 2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("spatial", "size"), SPATIAL, ids=str)
def test_gelu(spatial: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    for channels in (3, 16):
        check_gelu(of_gelu(randn(2, channels, *spatial, dtype=dtype, layout=layout), size))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(40))
def test_gelu_random(seed: int, layout: str) -> None:
    pick = random.Random(seed)
    dims = pick.randint(1, 3)
    spatial = [pick.randint(1, (20_000, 120, 20)[dims - 1]) for _ in range(dims)]
    size = [1] * dims if pick.random() < 0.3 else [pick.randint(1, 9) for _ in range(dims)]
    x = randn(pick.randint(1, 3), pick.choice([1, 5, 8, 64, 300, 2100 if dims == 3 else 16]), *spatial, dtype=pick.choice(DTYPES), layout=layout)
    a = of_gelu(x, tuple(size), approximate=pick.choice(["none", "tanh"]), **({"bias": None} if pick.random() < 0.3 else {}))
    check_gelu(a, grad_dtype=pick.choice([None, torch.float32]), in_place=pick.random() < 0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gelu_rows_that_start_anywhere(layout: str) -> None:
    for dtype in DTYPES:
        flat = randn(4 * 8 * 30 * 32 + 1, dtype=dtype)[1:]
        x = flat.view(4, 8, 30, 32) if layout == "contiguous" else flat.view(4, 30, 32, 8).movedim(-1, 1)
        check_gelu(of_gelu(x, (1, 1)))
        check_gelu(of_gelu(x, (4, 3)), in_place=True)


@pytest.mark.parametrize("approximate", ("none", "tanh"))
def test_gelu_special_values(approximate: str) -> None:
    """0 below, 1 above, and nan for inf as eager has it; FLT_MAX too, where eager's tanh form overflows to nan."""
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([NAN, INF, -INF, largest, -largest, 1e30, -1e30, 30.0, -30.0, 0.0], device=DEVICE).view(1, 1, -1)
    of_input, _ = gelu_kernel(torch.full((1, 1, 1), 10.0, device=DEVICE), of_gelu(x, (1,), bias=None, approximate=approximate))
    assert of_input[0, 0, :3].isnan().all()
    assert of_input[0, 0, 3:].tolist() == [1, 0, 1, 0, 1, 0, 0.5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits_again(layout: str) -> None:
    norm = of_norm(randn(3, 64, 8, 8, 64, layout=layout))
    gelu = of_gelu(randn(3, 64, 70, 70, layout=layout), (1, 1))
    for kernel, a, shape in ((norm_kernel, norm, (3, 64, 4, 4, 32)), (gelu_kernel, gelu, (3, 64, 1, 1))):
        grad = randn(*shape)
        first, *others = [kernel(grad, a) for _ in range(5)]
        assert all(torch.equal(one, other) for again in others for one, other in zip(first, again))


TWINS = {"norm_pool_gelu": (norm_pool_gelu_reference, conv_norm_pool_gelu_gradients), "gelu_pool": (gelu_pool_reference, conv_gelu_pool_gradients)}


def twin_arguments(name: str, x: torch.Tensor) -> Arguments:
    return of_norm(x) if name == "norm_pool_gelu" else of_gelu(x, (1, 1, 1))


def twin_gradients(name: str, a: Arguments, names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    given = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in a.items()}
    leaves = [given[key].requires_grad_() for key in names]
    out = getattr(torch.ops.fxfuse, f"{name}_training")(*given.values())
    return torch.autograd.grad(out, leaves, torch.ones_like(out))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of every call of a kernel: its batch, and whether it works in place."""
    seen: list[tuple[int, bool]] = []
    for name, (_, module) in TWINS.items():
        kernel, place = getattr(module, f"{name}_input_gradient"), {"norm_pool_gelu": 11, "gelu_pool": 5}[name]

        def counted(grad: torch.Tensor, x: torch.Tensor, *rest: Any, kernel: Any = kernel, place: int = place) -> None:
            seen.append((len(x), rest[place - 2].data_ptr() == x.data_ptr()))
            kernel(grad, x, *rest)

        counted.name = kernel.name
        monkeypatch.setattr(module, f"{name}_input_gradient", counted)
    return seen


@pytest.mark.parametrize("layout", [*LAYOUTS, "sliced", "expanded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TWINS)
def test_tail_op(name: str, dtype: torch.dtype, layout: str, calls: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients, by one call of the kernel for the whole batch, which leaves the input alone."""
    monkeypatch.setattr(training, "PIECE_BYTES", 4096)
    x = randn(4, 6, 4, 6, 20, dtype=dtype, layout="channels_last" if layout == "channels_last" else "contiguous")
    x = {"sliced": torch.stack([x, x], -1)[..., 0], "expanded": x[:1].expand(x.shape)}.get(layout, x)
    a = twin_arguments(name, x)
    names = tuple(key for key, value in a.items() if isinstance(value, torch.Tensor))
    before = x.clone()
    found = twin_gradients(name, a, names)
    assert [batch for batch, _ in calls] == [4] and torch.equal(x, before)
    grad = torch.ones_like(getattr(torch.ops.fxfuse, name)(*a.values()))
    exact, eager = references(TWINS[name][0], a, grad, names)
    scale = max(value.norm() for value in exact)
    for key, mine, want, other in zip(names, found, exact, eager):
        assert mine.stride() == torch.empty_like(a[key]).stride() and mine.dtype == a[key].dtype
        if want.norm() < 1e-12 * scale:  # what the norm takes away: rounding in both
            assert (mine.double() - want).norm() <= max(2 * (other.double() - want).norm(), SUM_FLOOR * scale)
        else:
            assert_within_contract(mine, want, other, mine.dtype if mine.dtype != torch.float32 else dtype)


@pytest.mark.parametrize("name", ("conv_norm_pool_gelu", "conv_gelu_pool"))
def test_op_with_the_convolution(name: str, calls: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution's output is computed again a piece at a time, and its gradient takes its place."""
    x, weight = randn(4, 8, 6, 6, 20), randn(8, 8, 3, 3, 3) / 15
    geometry = ([1] * 3, [1] * 3)
    if name == "conv_gelu_pool":
        given = (x, weight, randn(8), *geometry, [1] * 3, True, "none", "ieee", None)
    else:
        given = (x, weight, randn(8), None, randn(20), randn(20), False, *geometry, [0] * 3, 1.0, 0.0, 1e-5, [2] * 3, "none", "ieee", None)
    op = getattr(torch.ops.fxfuse, f"{name}_training")
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    whole = torch.autograd.grad(op(*given).sum(), leaves)
    assert calls == [(4, True)]
    monkeypatch.setattr(training, "PIECE_BYTES", 4 * 8 * 6 * 6 * 20)
    pieces = torch.autograd.grad(op(*given).sum(), leaves)
    assert calls[1:] == [(1, True)] * 4
    for one, other in zip(whole, pieces):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * one.abs().max().item())


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"grad": torch.zeros(2, 3, 2, 2, 5)}, "grad has shape"), ({"of_input": torch.zeros(2, 3, 4, 4, 9)}, "of_input must have"),
        ({"of_norm": torch.zeros(2, 9)}, "of_norm has shape"), ({"of_channels": torch.zeros(3, 3)}, "of_channels has shape"),
        ({"input": torch.zeros(2, 3, 4, 4, 16)[..., ::2]}, "neither contiguous nor channels_last_3d"), ({"kernel_size": [2, 5, 2]}, "kernel_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_norm_refusals(changed: Arguments, sentence: str) -> None:
    x = torch.zeros(2, 3, 4, 4, 8)
    given = {"grad": torch.zeros(2, 3, 2, 2, 4), "input": x, "bias": None, "addend": None, "norm_weight": None, "norm_bias": None}
    given |= {"addend_scale": 1.0, "addend_value": 0.0, "eps": 1e-5, "kernel_size": [2, 2, 2], "approximate": "none"}
    given |= {"of_input": torch.zeros_like(x), "of_channels": None, "of_norm": None, **changed}
    values = [value.cuda() if isinstance(value, torch.Tensor) and value.is_contiguous() else value for value in given.values()]
    values = [value.repeat_interleave(2, -1).cuda()[..., ::2] if isinstance(value, torch.Tensor) and not value.is_cuda else value for value in values]
    with pytest.raises(RuntimeError, match=sentence):
        torch.ops.fxfuse.norm_pool_gelu_input_gradient(*values)


@pytest.mark.large
@pytest.mark.parametrize("layout", LAYOUTS)
def test_past_31_bits(layout: str) -> None:
    """The samples at both ends come out as they do alone."""
    shape = (35, 64, 16, 128, 512)
    free, _ = torch.cuda.mem_get_info()
    if free < 4 * math.prod(shape) + (4 << 30):
        pytest.skip(f"needs {4 * math.prod(shape) >> 30} GB of GPU memory")
    memory_format = torch.contiguous_format if layout == "contiguous" else torch.channels_last_3d
    x = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16, memory_format=memory_format).normal_()
    a = {**of_norm(x[:1, :, :1, :2, :2]), "bias": None, "addend": None, "norm_weight": None, "norm_bias": None, "kernel_size": [1, 2, 2]}
    grad = randn(35, 64, 16, 64, 256, dtype=torch.bfloat16)
    given = [a[name] for name in ("bias", "addend", "norm_weight", "norm_bias", "addend_scale", "addend_value", "eps", "kernel_size", "approximate")]
    ends = {sample: (x[sample : sample + 1].clone(), grad[sample : sample + 1].clone()) for sample in (0, 34)}
    torch.ops.fxfuse.norm_pool_gelu_input_gradient(grad, x, *given, x, None, None)
    for sample, (alone, its_grad) in ends.items():
        torch.ops.fxfuse.norm_pool_gelu_input_gradient(its_grad, alone, *given, alone, None, None)
        assert torch.equal(x[sample : sample + 1], alone)
