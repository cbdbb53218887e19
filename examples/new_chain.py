"""A chain of your own, from outside fxfuse: conv2d -> relu -> max_pool2d, whose relu and pool become one op that reads the convolution once.

    python examples/new_chain.py
    fxfuse passes examples/new_chain.py

The file has the parts of any chain: the words it adds, the op with its fake, the conditions, the replacement. The op is a Triton kernel on a
GPU and plain torch elsewhere; one from a C++ library would be named in the same way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse
from fxfuse.vocabulary import Args, expand

aten = torch.ops.aten
HAS_TRITON = importlib.util.find_spec("triton") is not None


def max_pool2d_arguments(args: Args) -> Args:
    """Sizes as pairs, whatever the spelling; the stride that is left out."""
    pairs = {name: expand(args[name], 2) for name in ("kernel_size", "padding", "dilation")}
    return {**args, **pairs, "stride": expand(args["stride"], 2) if args["stride"] else pairs["kernel_size"]}


# `also` names arguments that PyTorch's functions take beside those of the aten op, and the values with which they are the same op.
RELU = fxfuse.Word(
    "relu",
    fxfuse.Spelling(
        aten.relu.default, F.relu, torch.relu, methods=("relu",), modules={nn.ReLU: ("inplace",)}, also={"inplace": (False, True)}
    ),
    fxfuse.Spelling(aten.relu_.default, torch.relu_, methods=("relu_",)),
)
MAX_POOL2D = fxfuse.Word(
    "max_pool2d",
    fxfuse.Spelling(
        aten.max_pool2d.default,
        F.max_pool2d,
        torch.max_pool2d,
        modules={nn.MaxPool2d: ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")},
        adapt=max_pool2d_arguments,
        also={"return_indices": (False,)},
    ),
)


@torch.library.custom_op("new_chain::relu_max_pool", mutates_args=(), device_types="cpu")
def relu_max_pool(input: torch.Tensor, bias: torch.Tensor | None, size: list[int]) -> torch.Tensor:
    """max_pool2d(relu(input + bias[c]), size) with windows side by side. Bias and relu keep the order, so that they can come last."""
    pooled = F.max_pool2d(input, size)
    return torch.relu(pooled if bias is None else pooled + bias[:, None, None])


@relu_max_pool.register_fake
def _(input: torch.Tensor, bias: torch.Tensor | None, size: list[int]) -> torch.Tensor:
    return torch.empty_like(F.max_pool2d(input, size))


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def relu_max_pool_kernel(
        x, bias, y, total, C, H, W, xn, xc, xh, xw, yn, yc, yh, yw, KH: tl.constexpr, KW: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """A lane for each element of the result, [N, C, H, W] with any strides; input and result are float32."""
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < total
        w, h, c, n = i % W, i // W % H, i // (W * H) % C, i // (W * H * C)
        window = x + n * xn + c * xc + h * KH * xh + w * KW * xw
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for row in tl.static_range(KH):
            for column in tl.static_range(KW):
                value = tl.load(window + row * xh + column * xw, inside)
                largest = tl.maximum(largest, value, propagate_nan=tl.PropagateNan.ALL)
        if BIAS:
            largest += tl.load(bias + c, inside)
        largest = tl.maximum(largest, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + n * yn + c * yc + h * yh + w * yw, largest, inside)

    def launch(x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, size: list[int], block: int = 256) -> None:
        grid, sizes = (triton.cdiv(y.numel(), block),), (y.numel(), *y.shape[1:])
        relu_max_pool_kernel[grid](x, bias, y, *sizes, *x.stride(), *y.stride(), *size, bias is not None, block)

    @relu_max_pool.register_kernel("cuda")
    def _(input: torch.Tensor, bias: torch.Tensor | None, size: list[int]) -> torch.Tensor:
        x = input if input.dim() == 4 else input[None]
        y = torch.empty_like(F.max_pool2d(x.to("meta"), size), device=x.device)
        if y.numel():
            with torch.cuda.device_of(x):
                launch(x, bias, y, size)
        return y if input.dim() == 4 else y[0]


Conditions = Iterator[tuple[bool, str]]


def requires(conv: fxfuse.Call, relu: fxfuse.Call, pool: fxfuse.Call) -> Conditions:
    """What the chain must be; each sentence is what a report says of a model that is not."""
    yield conv.value.dtype == torch.float32, f"the convolution's result is {conv.value.dtype}; the op takes torch.float32"
    yield pool.stride == pool.kernel_size, f"the pool's stride {pool.stride} is not its kernel size {pool.kernel_size}"
    plain = pool.padding == (0, 0) and pool.dilation == (1, 1) and pool.ceil_mode is False
    yield plain, f"the pool has padding {pool.padding}, dilation {pool.dilation}, ceil_mode {pool.ceil_mode}; the op has none of them"


def takes(conv: fxfuse.Call, relu: fxfuse.Call, pool: fxfuse.Call) -> Conditions:
    """What this implementation takes of that."""
    yield HAS_TRITON or conv.value.device.type == "cpu", "the op's kernel for a GPU needs Triton: pip install triton"


def replace(emit: fxfuse.Emitter, conv: fxfuse.Call, relu: fxfuse.Call, pool: fxfuse.Call) -> fx.Node:
    """conv without bias -> relu_max_pool."""
    return emit(relu_max_pool, emit.conv_without_bias(conv), conv.bias, list(pool.kernel_size))


CHAIN = fxfuse.Chain(
    name="conv_relu_max_pool",
    steps=(fxfuse.Step("conv", "conv"), fxfuse.Step("relu", "relu"), fxfuse.Step("pool", "max_pool2d")),
    requires=requires,
    # A `cost` is left out: the op is taken wherever it can be, and the report says so.
    implementations=(fxfuse.Implementation("new_chain::relu_max_pool", takes, replace, description="relu and pool behind the convolution"),),
    dims=(2,),
    description="The max pool, windows side by side, of the relu of a 2-d convolution in float32.",
    words=(RELU, MAX_POOL2D),
)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2)).to(device).eval()
    x = torch.randn(8, 3, 66, 66, device=device)
    with fxfuse.register(CHAIN), torch.no_grad():
        result = torch.compile(model, backend="fxfuse", options={"fxfuse.strict": True})(x)
        report, expected = fxfuse.reports()[-1], model(x)
    print(report)
    assert [fused.op for fused in report.fused] == ["new_chain::relu_max_pool"], "the chain was not fused"
    difference = float((result - expected).norm() / expected.norm())
    # On a GPU torch allows convolutions to round fp32 operands to TF32, and each of the two may.
    assert difference < 2e-3, f"the result differs from eager's by {difference:.1e}"
    assert result.stride() == expected.stride(), "the result has other strides than eager's"
    print(f"equal to eager's result: the relative difference is {difference:.1e}")


if __name__ == "__main__":
    main()
