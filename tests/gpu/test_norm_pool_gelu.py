"""fxfuse::norm_pool_gelu on a GPU: values against fp64 beside eager's error, every argument, strides, special values, odd sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "channels_last")
INF, NAN = math.inf, math.nan


@dataclass
class Tail:
    """The op's arguments beside its input, and the same chain in eager."""

    bias: torch.Tensor | None = None
    addend: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    scale: float = 1.0
    value: float = 0.0
    norm_ndim: int = 1
    eps: float = 1e-5
    kernel: tuple[int, int, int] = (2, 2, 2)
    stride: tuple[int, int, int] | None = None
    padding: tuple[int, int, int] = (0, 0, 0)
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None
    approximate: str = "none"
    out_dtype: torch.dtype | None = None

    def pool(self) -> tuple:
        return list(self.kernel), list(self.stride or self.kernel), list(self.padding), self.ceil_mode, self.count_include_pad, self.divisor

    def op(self, x: torch.Tensor) -> torch.Tensor:
        """The op, on an output buffer that last held nan: an element that no thread writes is seen."""
        poison = torch.full((x.numel() + 4096,), NAN, device="cuda", dtype=x.dtype)
        del poison
        return torch.ops.fxfuse.norm_pool_gelu(
            x, self.bias, self.addend, self.weight, self.shift, self.scale, self.value, self.norm_ndim, self.eps, *self.pool(),
            self.approximate, self.out_dtype,
        )  # fmt: skip

    def eager(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The chain by torch's own kernels, all in `dtype`."""

        def cast(t):
            return None if t is None else t.to("cuda", dtype)

        y = x.to(dtype)
        if self.bias is not None:
            y = y + cast(self.bias).view(-1, 1, 1, 1)
        if self.addend is not None:
            y = y + self.scale * cast(self.addend)
        if self.value:
            y = y + self.value
        y = F.layer_norm(y.contiguous(), y.shape[y.dim() - self.norm_ndim :], cast(self.weight), cast(self.shift), self.eps)
        return F.gelu(F.avg_pool3d(y, *self.pool()), approximate=self.approximate)


def assert_accurate(out: torch.Tensor, from_eager: torch.Tensor, reference: torch.Tensor) -> None:
    """Error at most twice eager's in the norm (1e-6 in fp32 where eager is better than that), no element ten times further off."""
    assert out.shape == reference.shape
    finite = reference.isfinite()
    odd = (out.double()[~finite], reference[~finite])
    assert torch.equal(*(t.nan_to_num(nan=7.0, posinf=8.0, neginf=9.0) for t in odd)), f"not eager's nan and inf: {odd}"
    out, from_eager, reference = out.double()[finite], from_eager.double()[finite], reference[finite]
    norm = reference.norm()
    if norm == 0:
        assert out.abs().sum() < 1e-6
        return
    eps = 1e-6 if from_eager.dtype == torch.float32 else 2e-3 / min(reference.numel(), 16) ** 0.5
    bound = max(2 * ((from_eager - reference).norm() / norm).item(), eps)
    difference = (out - reference).abs()
    error, worst = (difference.norm() / norm).item(), difference.argmax()
    where = f"out {out[worst].item():.9g}, reference {reference[worst].item():.9g} at {worst.item()} of the finite ones"
    assert error <= bound, f"relative error {error:.3g}, bound {bound:.3g}; {where}"
    assert difference.max() <= 10 * bound * reference.abs().max(), f"one element is far off: {where}"


def check(x: torch.Tensor, tail: Tail) -> torch.Tensor:
    out, from_eager = tail.op(x), tail.eager(x, x.dtype)
    assert out.dtype == (tail.out_dtype or x.dtype)
    assert (out.shape, out.stride()) == (from_eager.shape, from_eager.stride())
    assert_accurate(out, from_eager, tail.eager(x, torch.float64))
    return out


def randn(shape, dtype=torch.float32, layout="contiguous", scale=1.0, shift=0.0) -> torch.Tensor:
    x = torch.randn(shape, device="cuda").mul_(scale).add_(shift).to(dtype)
    if layout == "contiguous":
        return x
    if x.dim() == 4:
        return x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    return x.contiguous(memory_format=torch.channels_last_3d)


def full_tail(x: torch.Tensor, **arguments) -> Tail:
    """Every tensor argument present, in the input's dtype unless given."""
    tail = Tail(**arguments)
    channels, normalised = x.shape[-4], x.shape[x.dim() - tail.norm_ndim :]
    filled = {
        "bias": randn((channels,), x.dtype),
        "addend": randn((), x.dtype),
        "weight": randn(normalised, x.dtype, shift=1.0),
        "shift": randn(normalised, x.dtype),
    }
    return replace(tail, **{name: value for name, value in filled.items() if getattr(tail, name) is None})


def kernel_for(width: int) -> tuple[int, int, int]:
    return (2, 2, 2 if width > 1 else 1)


# Around every power of two (lanes and vectors half full), multiples of a vector that leave lanes idle, even ones for accesses of two
# elements, odd ones for single elements, and widths past what a warp's registers hold (256 in channels_last, 512 to 1024 contiguous).
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 30, 31, 32, 33, 40, 48, 56, 62, 63, 64, 65, 72, 96, 100, 127, 128, 129, 136, 192, 254, 255, 256, 257,
          320, 384, 510, 511, 512, 513, 640, 1000, 1022, 1023, 1024, 1025, 1536, 2000)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_width(width, dtype, layout):
    x = randn((2, 3, 4, 6, width), dtype, layout)
    check(x, full_tail(x, kernel=kernel_for(width)))
    check(x, full_tail(x, kernel=(3, 1, min(3, width)), stride=(1, 2, min(2, width))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", (30_000, 70_001))
def test_width_beyond_a_block(width, layout):
    x = randn((1, 2, 2, 3, width), layout=layout)
    check(x, full_tail(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", (1, 2, 3, 31, 32, 33, 63, 64, 66, 100, 130))
def test_channels_last_channels(channels, dtype):
    x = randn((2, channels, 4, 4, 20), dtype, "channels_last")
    check(x, full_tail(x))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 64, 4, 4, 64), (1, 33, 7, 9, 24), (2, 5, 3, 3, 11), (300, 3, 2, 2, 4), (1, 1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("norm_ndim", (1, 2, 3, 4, 5))
def test_norm_ndim(norm_ndim, shape, dtype, layout):
    x = randn(shape, dtype, layout)
    check(x, full_tail(x, norm_ndim=norm_ndim))
    check(x, Tail(norm_ndim=norm_ndim, kernel=(2, 1, 2), padding=(1, 0, 1)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm_ndim", (2, 3, 4, 5))
def test_norm_groups_in_chunks(norm_ndim, layout):
    x = randn((2, 5, 18, 70, 90), layout=layout, scale=3.0, shift=5.0)
    check(x, full_tail(x, norm_ndim=norm_ndim))


POOLS = (
    dict(kernel=(1, 1, 1)), dict(kernel=(1, 2, 2)), dict(kernel=(2, 1, 1)), dict(kernel=(1, 1, 3)), dict(kernel=(3, 3, 3)), dict(kernel=(2, 2, 4)),
    dict(kernel=(5, 6, 7)), dict(kernel=(3, 3, 3), stride=(2, 2, 2)), dict(kernel=(3, 3, 3), stride=(1, 1, 1), padding=(1, 1, 1)),
    dict(kernel=(2, 2, 2), stride=(3, 3, 3)), dict(kernel=(2, 2, 2), stride=(2, 2, 2), padding=(1, 1, 1)), dict(kernel=(2, 3, 4), stride=(3, 1, 2), padding=(1, 0, 2)),
    dict(kernel=(3, 3, 3), stride=(5, 5, 5), padding=(1, 1, 1)), dict(kernel=(2, 2, 2), stride=(1, 1, 1)), dict(kernel=(4, 2, 2), stride=(2, 2, 2), padding=(2, 0, 0)),
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("shape, norm_ndim", [((2, 3, 5, 7, 9), 1), ((2, 3, 6, 6, 16), 1), ((2, 3, 5, 7, 9), 2), ((1, 2, 6, 7, 8), 3), ((2, 2, 5, 6, 7), 4)])
def test_pool(shape, norm_ndim, pool, layout):
    x = randn(shape, layout=layout)
    for ceil_mode in (False, True):
        for count_include_pad in (False, True):
            for divisor in (None, 3, -2):
                tail = full_tail(x, norm_ndim=norm_ndim, ceil_mode=ceil_mode, count_include_pad=count_include_pad, divisor=divisor, **pool)
                check(x, tail)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, norm_ndim", [((2, 5, 4, 6, 16), 1), ((2, 5, 4, 6, 13), 1), ((2, 5, 4, 6, 600), 1), ((2, 5, 4, 6, 9), 2), ((2, 5, 4, 6, 9), 4)])
def test_addend(shape, norm_ndim, dtype, layout):
    x = randn(shape, dtype, layout)
    n, c, d, h, w = shape
    shapes = [(), (1,), (w,), (1, c, 1, 1, 1), (c, 1, 1, 1), (n, 1, 1, 1, 1), (n, 1, d, 1, 1), (h, 1), (1, 1, 1, h, w), shape]
    for addend_shape in shapes:
        for addend_dtype in {dtype, torch.float32}:
            check(x, full_tail(x, norm_ndim=norm_ndim, addend=randn(addend_shape, addend_dtype), scale=-1.5, value=0.25))
    check(x, full_tail(x, norm_ndim=norm_ndim, addend=randn(shape, dtype, "channels_last")))
    check(x, full_tail(x, norm_ndim=norm_ndim, addend=randn((w, h), dtype).t()))
    check(x, full_tail(x, norm_ndim=norm_ndim, addend=torch.randn((), dtype=dtype), scale=2.0))
    check(x, Tail(norm_ndim=norm_ndim, value=3.0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_optional_arguments(dtype, layout):
    x = randn((2, 34, 4, 4, 32), dtype, layout)
    full = full_tail(x)
    check(x, full)
    for name in ("bias", "addend", "weight", "shift"):
        check(x, replace(full, **{name: None}))
        check(x, Tail(**{name: getattr(full, name)}))
        check(x, replace(full, **{name: getattr(full, name).float()}))
    check(x, Tail())
    for eps in (0.0, 1e-12, 1.0):
        check(x, replace(full, eps=eps))
    check(x, replace(full, approximate="tanh"))
    check(x, replace(full, out_dtype=torch.float32))
    check(x, replace(full, out_dtype=torch.float32, kernel=(1, 2, 3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (64, 20))
def test_any_strides(width, dtype):
    """Dense layouts are read in place, whatever their offset; the others are copied."""
    base = randn((4, 32, 4, 6, width), dtype)
    flat = randn((base.numel() + 1,), dtype)
    unaligned = flat[1:].view(base.shape)
    unaligned_last = flat[1:].view(4, 4, 6, width, 32).permute(0, 4, 1, 2, 3)
    views = [base[:, ::2], base[1:3], base[..., ::2], base.transpose(2, 3), base[:1].expand(3, -1, -1, -1, -1), base.flip(4)]
    views += [unaligned, unaligned_last, base[:, :1], base[:, :, :1], base[:, :1].to(memory_format=torch.channels_last_3d)]
    for x in views:
        kernel = tuple(min(2, size) for size in x.shape[2:])
        check(x, full_tail(x, kernel=kernel))
    aligned = full_tail(unaligned)
    shifted = {name: randn((width + 1,), dtype)[1:] for name in ("weight", "shift")}
    check(unaligned, replace(aligned, **shifted))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_ndim", (1, 2, 3, 4))
def test_unbatched(norm_ndim, dtype, layout):
    x = randn((6, 4, 6, 16), dtype, layout)
    check(x, full_tail(x, norm_ndim=norm_ndim))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, norm_ndim", [((2, 33, 4, 6, 64), 1), ((2, 3, 4, 6, 63), 1), ((2, 3, 4, 6, 700), 1), ((2, 3, 4, 6, 30), 2), ((2, 3, 4, 6, 30), 4)])
def test_far_from_zero(shape, norm_ndim, dtype, layout):
    """E[x^2] - E[x]^2 would leave nothing here; nor may fp16's squares overflow."""
    x = randn(shape, layout=layout, shift=1e4 if dtype != torch.float16 else 3e3)
    if dtype != torch.float32:
        x = x.sub_(1e4 if dtype == torch.bfloat16 else 3e3).mul_(300).add_(1e4).to(dtype)
    check(x, Tail(norm_ndim=norm_ndim))
    check(x, full_tail(x, norm_ndim=norm_ndim))
    check(torch.full_like(x, 7.0), full_tail(x, norm_ndim=norm_ndim))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", (-5.0, -3.0, 8.0))
def test_gelu_far_from_zero(shift, dtype, layout):
    x = randn((2, 33, 4, 6, 64), dtype, layout)
    check(x, Tail(weight=randn((64,), dtype, scale=0.1), shift=randn((64,), dtype, scale=0.1, shift=shift)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, norm_ndim", [((2, 35, 4, 6, 64), 1), ((2, 3, 4, 6, 13), 1), ((2, 3, 4, 6, 700), 1), ((2, 3, 4, 6, 30), 2), ((2, 3, 4, 6, 30), 4)])
def test_nan_and_inf(shape, norm_ndim, dtype, layout):
    for value in (NAN, INF, -INF):
        x = randn(shape, dtype, layout)
        x[1, 1, 2, 3, 5] = value
        check(x, full_tail(x, norm_ndim=norm_ndim))
        check(x, Tail(norm_ndim=norm_ndim, padding=(1, 1, 1)))
        x = randn(shape, dtype, layout)
        full = full_tail(x, norm_ndim=norm_ndim)
        full.bias[2] = value
        check(x, full)
        check(x, replace(full, kernel=(3, 3, 3), padding=(1, 1, 1)))
        full = full_tail(x, norm_ndim=norm_ndim)
        full.weight.view(-1)[3] = NAN  # inf times the summed window is inf where eager may have inf - inf
        full.shift.view(-1)[5] = value
        check(x, full)
        check(x, full_tail(x, norm_ndim=norm_ndim, addend=torch.full((), value, device="cuda", dtype=dtype)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape, norm_ndim", [((3, 64, 8, 8, 64), 1), ((3, 30, 8, 8, 50), 1), ((3, 8, 8, 20, 30), 2), ((3, 8, 8, 20, 30), 4), ((3, 8, 8, 20, 30), 5)])
def test_deterministic(shape, norm_ndim, layout):
    x = randn(shape, layout=layout)
    tail = full_tail(x, norm_ndim=norm_ndim)
    first = tail.op(x)
    for _ in range(5):
        assert torch.equal(first, tail.op(x))


def test_current_stream():
    x = torch.zeros((16, 64, 16, 32, 64), device="cuda")
    tail, side = Tail(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(torch.arange(64.0, device="cuda").expand_as(x))
        out = tail.op(x)
    side.synchronize()
    assert_accurate(out[:1], tail.eager(x[:1], torch.float32), tail.eager(x[:1], torch.float64))


def test_cuda_graph():
    x = randn((2, 8, 4, 4, 32))
    tail = full_tail(x)
    out = tail.op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.fxfuse.norm_pool_gelu(
            x, tail.bias, tail.addend, tail.weight, tail.shift, 1.0, 0.0, 1, 1e-5, *tail.pool(), "none", None
        )
    for _ in range(2):
        x.copy_(randn(x.shape))
        graph.replay()
        assert torch.equal(out, tail.op(x))


@pytest.mark.parametrize("norm_ndim", (1, 3, 5))
def test_empty_batch(norm_ndim):
    x = torch.empty((0, 3, 4, 6, 8), device="cuda")
    out = Tail(norm_ndim=norm_ndim).op(x)
    assert (out.shape, out.stride()) == ((0, 3, 2, 3, 4), (72, 24, 12, 4, 1))
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "shape, arguments, sentence",
    [
        ((2, 0, 4, 4, 8), {}, "only the batch may be empty"),
        ((2, 3, 4, 0, 8), {}, "only the batch may be empty"),
        ((2, 3, 8), {}, "is needed"),
        ((2, 3, 4, 4, 8), {"norm_ndim": 0}, "norm_ndim is 0"),
        ((2, 3, 4, 4, 8), {"norm_ndim": 6}, "norm_ndim is 6"),
        ((2, 3, 4, 4, 8), {"kernel": (5, 2, 2)}, "kernel_size"),
        ((2, 3, 4, 4, 8), {"padding": (2, 0, 0)}, "padding"),
        ((2, 3, 4, 4, 8), {"divisor": 0}, "divisor_override is 0"),
        ((2, 3, 4, 4, 8), {"approximate": "sigmoid"}, "'sigmoid'"),
        ((2, 3, 4, 4, 8), {"out_dtype": torch.float64}, "out_dtype is float64"),
        ((2, 3, 4, 4, 8), {"bias": torch.zeros(3, dtype=torch.float64)}, "bias is float64"),
        ((2, 3, 4, 4, 8), {"bias": torch.zeros(4)}, "bias has shape"),
        ((2, 3, 4, 4, 8), {"weight": torch.zeros(4)}, "norm_weight has shape"),
        ((2, 3, 4, 4, 8), {"addend": torch.zeros(5, 2, 3, 4, 4, 8)}, "does not broadcast"),
        ((2, 3, 4, 4, 8), {"addend": torch.zeros(7)}, "does not broadcast"),
    ],
    ids=str,
)
def test_refusals(shape, arguments, sentence):
    on_gpu = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    with pytest.raises(RuntimeError, match=sentence):
        Tail(**on_gpu).op(torch.zeros(shape, device="cuda"))


def test_refuses_tensors_elsewhere_and_other_dtypes():
    with pytest.raises(RuntimeError, match="different devices"):
        Tail(bias=torch.zeros(3)).op(torch.zeros((2, 3, 4, 4, 8), device="cuda"))
    with pytest.raises(RuntimeError, match="float64"):
        Tail().op(torch.zeros((2, 3, 4, 4, 8), device="cuda", dtype=torch.float64))


# Past 2^31 elements, rows and outputs: the samples at both ends have to come out as they do alone.
@pytest.mark.large
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape, arguments",
    [
        ((35, 64, 16, 128, 512), {}),
        ((9, 64, 64, 256, 256), {"kernel": (1, 1, 1)}),
        ((35, 64, 16, 128, 512), {"norm_ndim": 2}),
        ((5, 64, 1 << 10, 1 << 13, 1), {"kernel": (1, 1, 1), "norm_ndim": 2}),
        ((9, 2, 1 << 13, 1 << 14, 2), {"kernel": (1, 1, 1)}),
    ],
    ids=str,
)
def test_past_31_bits(shape, arguments, layout):
    assert math.prod(shape) > 2**31
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * 2 * math.prod(shape) + (4 << 30):
        pytest.skip(f"needs {3 * 2 * math.prod(shape) >> 30} GB of GPU memory")
    memory_format = torch.contiguous_format if layout == "contiguous" else torch.channels_last_3d
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16, memory_format=memory_format).normal_()
    tail = Tail(bias=randn(shape[1:2]), weight=None, **arguments)
    call = (1.0, 0.0, tail.norm_ndim, tail.eps, *tail.pool(), "none", None)
    out = torch.ops.fxfuse.norm_pool_gelu(x, tail.bias, None, None, None, *call)
    for sample in (0, shape[0] // 2, shape[0] - 1):
        alone = torch.ops.fxfuse.norm_pool_gelu(x[sample : sample + 1], tail.bias, None, None, None, *call)
        torch.testing.assert_close(out[sample : sample + 1], alone)  # how statistics are cut into chunks depends on the batch
        if sample == shape[0] - 1:
            corner = x[sample : sample + 1, -1:]
            corner_tail = replace(tail, bias=tail.bias[-1:])
            reference = corner_tail.eager(corner[:, :, -2:], torch.float64)
            assert_accurate(alone[:, -1:, -reference.shape[2] :], corner_tail.eager(corner[:, :, -2:], torch.bfloat16), reference)
