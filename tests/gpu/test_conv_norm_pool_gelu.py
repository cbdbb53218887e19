"""fxfuse::conv_norm_pool_gelu on a GPU: values against fp64, both kernels, special values, sizes that broke other kernels."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

# Input dtype and precision.
KINDS = ((torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "tf32"), (torch.float16, "tf32"))


@pytest.fixture(params=["portable", "chosen"])
def path(request, monkeypatch):
    """The portable kernel, and the one that the device gets."""
    monkeypatch.setenv("FXFUSE_PORTABLE", "1" if request.param == "portable" else "0")
    return request.param


@dataclass(frozen=True)
class Chain:
    """One call's geometry. shape: [N, C, D, H, W] of the input."""

    shape: tuple[int, ...]
    out_channels: int
    kernel: tuple[int, int, int] = (3, 3, 3)
    transposed: bool = True
    stride: tuple[int, int, int] = (2, 2, 2)
    padding: tuple[int, int, int] = (1, 1, 1)
    output_padding: tuple[int, int, int] = (1, 1, 1)
    pool: tuple[int, int, int] = (2, 2, 2)
    eps: float = 1e-5
    approximate: str = "none"
    addend_scale: float = 1.0
    addend_value: float = 0.0

    def conv_size(self) -> list[int]:
        sizes = zip(self.shape[2:], self.kernel, self.stride, self.padding, self.output_padding)
        if self.transposed:
            return [(i - 1) * s - 2 * p + k + o for i, k, s, p, o in sizes]
        return [(i + 2 * p - k) // s + 1 for i, k, s, p, o in sizes]

    def fits(self) -> bool:
        size = self.conv_size()
        return all(n >= p for n, p in zip(size, self.pool)) and 2 <= size[2] <= 256


def plain(shape, out_channels, kernel=(3, 3, 3), stride=(1, 1, 1), padding=(1, 1, 1), pool=(2, 2, 2), **rest) -> Chain:
    return Chain(shape, out_channels, kernel, False, stride, padding, (0, 0, 0), pool, **rest)


HEADLINE = Chain((32, 32, 16, 32, 32), 64)  # rows of 32, a multiple of 4 of them: the Hopper kernel's class


def inputs(c: Chain, dtype, layout="contiguous", addend="0-dim", param_dtype=None, bias=True, norm=True, scale=1.0):
    """x, weight, bias, addend, norm_weight, norm_bias."""
    param_dtype = param_dtype or dtype

    def randn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    x = (torch.randn(c.shape, device="cuda") * scale).to(dtype)
    channels = (c.shape[1], c.out_channels) if c.transposed else (c.out_channels, c.shape[1])
    weight = (torch.randn(*channels, *c.kernel, device="cuda") / math.sqrt(c.shape[1] * math.prod(c.kernel))).to(dtype)
    if layout == "channels_last":
        x, weight = (t.contiguous(memory_format=torch.channels_last_3d) for t in (x, weight))
    elif layout == "offset":
        x = torch.cat([randn(3), x.flatten()])[3:].view(c.shape)
    elif layout == "sliced":
        x = torch.stack([x, x], 2)[:, :, 0]
    elif layout == "channels of channels_last":
        x = torch.cat([x[:, :3], x, x[:, :5]], 1).contiguous(memory_format=torch.channels_last_3d)[:, min(3, c.shape[1]) :][:, : c.shape[1]]
    width = c.conv_size()[2]
    addends = {
        None: lambda: None,
        "0-dim": lambda: randn(),
        "cpu": lambda: randn().cpu(),
        "channel": lambda: randn(c.out_channels, 1, 1, 1, dtype=param_dtype),
        "batched": lambda: randn(1, c.out_channels, 1, 1, 1),
    }
    return (
        x,
        weight,
        randn(c.out_channels, dtype=param_dtype) if bias else None,
        addends[addend](),
        randn(width, dtype=param_dtype) if norm else None,
        randn(width, dtype=param_dtype) if norm else None,
    )


def run(c: Chain, tensors, precision="tf32", out_dtype=None):
    """The op, on an output buffer that last held nan: an element that no thread writes is seen."""
    poison = torch.full((4 * c.shape[0] * c.out_channels * math.prod(c.conv_size()) // math.prod(c.pool) + 4096,), math.nan, device="cuda")
    del poison
    return torch.ops.fxfuse.conv_norm_pool_gelu(
        *tensors, c.transposed, c.stride, c.padding, c.output_padding, c.addend_scale, c.addend_value, c.eps, c.pool, c.approximate,
        precision, out_dtype,
    )  # fmt: skip


def eager(c: Chain, tensors, dtype):
    x, weight, bias, addend, norm_weight, norm_bias = (None if t is None else t.to(dtype) for t in tensors)
    if c.transposed:
        y = F.conv_transpose3d(x, weight, bias, c.stride, c.padding, c.output_padding)
    else:
        y = F.conv3d(x, weight, bias, c.stride, c.padding)
    if addend is not None:
        y = y + c.addend_scale * addend
    y = F.layer_norm(y + c.addend_value, (y.shape[-1],), norm_weight, norm_bias, c.eps)
    return F.gelu(F.avg_pool3d(y, c.pool), approximate=c.approximate)


def rounded_to_tf32(x):
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def check(c: Chain, tensors, precision="tf32", out_dtype=None):
    """Error at most twice that of the fp64 chain on TF32 operands, 2e-6 in ieee, twice eager's in 16 bits; no element ten times further off."""
    dtype = tensors[0].dtype
    out, reference = run(c, tensors, precision, out_dtype), eager(c, tensors, torch.float64)
    assert out.shape == reference.shape and out.dtype == (out_dtype or dtype) and out.is_contiguous()
    norm = reference.norm()
    if dtype != torch.float32:
        # Below half an ulp lies the rounding of the output alone.
        bound = max(2 * ((eager(c, tensors, dtype).double() - reference).norm() / norm).item(), torch.finfo(dtype).eps / 2)
    elif precision == "tf32":
        rounded = (*(rounded_to_tf32(t) for t in tensors[:2]), *tensors[2:])
        bound = max(2 * ((eager(c, rounded, torch.float64) - reference).norm() / norm).item(), 2e-6)
    else:
        bound = 2e-6
    difference = (out.double() - reference).abs()
    error, worst = (difference.norm() / norm).item(), difference.argmax()
    where = f"out {out.flatten()[worst].item():.9g}, reference {reference.flatten()[worst].item():.9g} at {worst.item()}"
    assert error <= bound, f"relative error {error:.3g}, bound {bound:.3g}; {where}"
    assert difference.max() <= 10 * bound * reference.abs().max(), f"one element is far off: {where}"
    return out


@pytest.mark.parametrize("dtype, precision", KINDS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channels of channels_last", "offset", "sliced"])
@pytest.mark.parametrize(
    "c",
    [
        replace(HEADLINE, shape=(48, 32, 4, 8, 32)),
        replace(HEADLINE, shape=(80, 32, 3, 6, 32)),  # an odd number of planes, rows that do not fill a tile
        replace(HEADLINE, shape=(70, 19, 1, 5, 32), out_channels=41),  # channels padded inside
        replace(HEADLINE, shape=(2, 32, 4, 8, 32)),  # too few columns for the Hopper kernel
        Chain((2, 7, 3, 5, 9), 3, (1, 2, 5), stride=(2, 1, 2), padding=(0, 1, 2), output_padding=(1, 0, 1), pool=(1, 3, 4)),
        Chain((1, 40, 4, 6, 64), 33, (4, 4, 4), padding=(1, 1, 1), output_padding=(0, 0, 0)),
        Chain((1, 16, 3, 4, 127), 17, pool=(3, 3, 3)),  # windows that begin at both phases of the stride
        plain((2, 16, 6, 8, 32), 48),
        plain((1, 64, 8, 16, 100), 128, (5, 5, 5), (2, 2, 2), (2, 2, 2), (4, 4, 4)),
        plain((1, 3, 5, 7, 256), 8, pool=(1, 1, 1)),  # the widest row
        plain((1, 256, 4, 8, 32), 64),  # K of 6912: sums of the tensor cores alone are 1e-5 off
        plain((2, 5, 4, 6, 3), 1, (1, 1, 1), padding=(0, 0, 0)),
    ],
    ids=str,
)
def test_values(c, layout, dtype, precision, path):
    check(c, inputs(c, dtype, layout), precision)


@pytest.mark.parametrize("dtype, precision", KINDS, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
def test_arguments(dtype, precision, approximate, out_dtype, path):
    for base in (replace(HEADLINE, shape=(48, 32, 4, 8, 32)), plain((2, 12, 5, 7, 20), 24)):
        for addend in (None, "0-dim", "cpu", "channel", "batched"):
            c = replace(base, approximate=approximate, addend_scale=-0.5, addend_value=0.7, eps=1e-3)
            check(c, inputs(c, dtype, addend=addend, param_dtype=torch.float32), precision, out_dtype)
        check(base, inputs(base, dtype, addend=None, bias=False, norm=False), precision, out_dtype)


@pytest.mark.parametrize("dtype, precision", KINDS, ids=str)
def test_unbatched(dtype, precision):
    c = plain((1, 12, 5, 7, 20), 24)
    tensors = inputs(c, dtype, addend="channel")
    out = run(c, (tensors[0][0], *tensors[1:]), precision)
    assert torch.equal(out, run(c, tensors, precision)[0])


def random_chain(draw: random.Random) -> Chain:
    while True:
        transposed = draw.random() < 0.6
        kernel = tuple(draw.choice((1, 2, 3, 3, 4, 5)) for _ in range(3))
        stride = tuple(draw.choice((1, 2)) for _ in range(3))
        c = Chain(
            (draw.randint(1, 3), draw.choice((1, 3, 5, 8, 16, 17, 32, 40)), draw.randint(1, 7), draw.randint(1, 11),
             draw.choice((3, 7, 8, 13, 16, 31, 32, 33, 50, 64, 65, 100, 127, 128))),
            draw.choice((1, 3, 8, 16, 17, 32, 33, 64, 70, 96)),
            kernel,
            transposed,
            stride,
            tuple(draw.randint(0, min(2, k - 1)) for k in kernel),
            tuple(draw.randint(0, s - 1) if transposed else 0 for s in stride),
            tuple(draw.randint(1, 4) for _ in range(3)),
            approximate=draw.choice(("none", "tanh")),
        )  # fmt: skip
        if c.fits() and all(k >= s for k, s in zip(c.kernel, c.stride)):  # else rows of zeros: nothing to compare
            return c


@pytest.mark.parametrize("index", range(300))
def test_random_shapes(index):
    draw = random.Random(index)
    c = random_chain(draw)
    dtype, precision = draw.choice(KINDS)
    layout = draw.choice(("contiguous", "channels_last", "channels of channels_last", "offset", "sliced"))
    check(c, inputs(c, dtype, layout, draw.choice((None, "0-dim", "channel", "batched")), draw.choice((None, torch.float32))), precision)


@pytest.mark.parametrize("scale, value", [(1e-15, 0), (1e-3, 0), (1e3, 0), (1e15, 0), (1, 1e4)])
def test_magnitudes(scale, value, path):
    """The constant 1e4 drops out of the norm; in eager's sum it costs 5e-4."""
    c = replace(HEADLINE, shape=(48, 32, 4, 8, 32), addend_value=float(value))
    check(c, inputs(c, torch.float32, scale=scale), "ieee")


@pytest.mark.parametrize("dtype, precision", KINDS, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nan_and_inf(value, dtype, precision, path):
    for c in (replace(HEADLINE, shape=(48, 32, 4, 8, 32)), plain((2, 12, 5, 7, 20), 24)):
        for where in (0, 1, 2):  # input, weight, bias
            tensors = inputs(c, dtype)
            tensors[where].flatten()[-3] = value
            expected = eager(c, tensors, torch.float32)
            assert torch.equal(run(c, tensors, precision).isnan(), expected.isnan())


@pytest.mark.parametrize("offset", [3, 30])
def test_norm_of_an_offset(offset, path):
    """The norm takes away what all columns have in common, and magnifies what rounding left of it: no more than in eager."""
    c = replace(HEADLINE, shape=(48, 32, 4, 8, 32))
    tensors = inputs(c, torch.float32)
    tensors[0].add_(offset)
    reference, out = eager(c, tensors, torch.float64), run(c, tensors, "ieee")
    error, eagers = ((y.double() - reference).norm() / reference.norm() for y in (out, eager(c, tensors, torch.float32)))
    assert error <= 2 * eagers, f"relative error {error:.3g}, eager's {eagers:.3g}"


def test_largest_finite_values(path):
    """Rounding to TF32 must not make inf of them."""
    c = replace(HEADLINE, shape=(48, 32, 4, 8, 32))
    tensors = inputs(c, torch.float32)
    tensors[0][0, 0, 0, 0, 0] = torch.finfo(torch.float32).max
    tensors[1].mul_(1e-25)  # so that squares of the sums stay finite
    check(c, tensors, "ieee")
    assert not run(c, tensors, "tf32").isnan().any()


def test_deterministic(path):
    for c in (HEADLINE, plain((4, 40, 6, 20, 50), 70)):
        for dtype, precision in KINDS:
            tensors = inputs(c, dtype)
            first = run(c, tensors, precision)
            for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    assert all(torch.equal(first, run(c, tensors, precision)) for _ in range(20))


def test_runs_on_the_current_stream():
    c, stream = HEADLINE, torch.cuda.Stream()
    tensors = inputs(c, torch.float32)
    expected = run(c, (tensors[0] + 1, *tensors[1:]))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = tensors[0]
        for _ in range(16):
            late = late + 1 / 16
        out = run(c, (late, *tensors[1:]))
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


def test_graph_capture(path):
    c, graph = replace(HEADLINE, shape=(48, 32, 4, 8, 32)), torch.cuda.CUDAGraph()
    tensors = inputs(c, torch.float32, addend="channel")
    run(c, tensors)
    with torch.cuda.graph(graph):
        out = torch.ops.fxfuse.conv_norm_pool_gelu(
            *tensors, c.transposed, c.stride, c.padding, c.output_padding, 1.0, 0.0, c.eps, c.pool, "none", "tf32", None
        )
    tensors[0].normal_()
    tensors[1].normal_()
    graph.replay()
    assert torch.equal(out, run(c, tensors))


def test_empty_batch():
    c = replace(HEADLINE, shape=(0, 32, 4, 8, 32))
    assert run(c, inputs(c, torch.float32)).shape == (0, 64, 4, 8, 32)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"kernel": (3, 3, 6)}, "sizes from 1 to 5"),
        ({"stride": (3, 2, 2)}, "1 and 2 are supported"),
        ({"pool": (2, 2, 5)}, "sizes from 1 to 4"),
        ({"pool": (4, 4, 4), "shape": (1, 32, 1, 8, 32)}, "does not fit"),
        ({"shape": (1, 32, 2, 2, 200)}, "at most 256"),
        ({"output_padding": (2, 1, 1)}, "smaller than stride"),
        ({"out_channels": 4096, "shape": (1, 256, 2, 2, 32)}, "bytes of workspace"),
        ({"approximate": "sigmoid"}, "'none' \\(exact\\) and 'tanh'"),
    ],
)
def test_refusals(change, sentence):
    c = replace(HEADLINE, **{"shape": (1, 32, 2, 2, 32), **change})
    with pytest.raises(RuntimeError, match=sentence):
        run(c, inputs(c, torch.float32))
