"""The words that every chain knows, and the vocabulary of a chain that adds some of its own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .values import value_of
from .vocabulary import Args, Spelling, Vocabulary, Word, expand

aten = torch.ops.aten
CONV_ATTRIBUTES = ("weight", "bias", "stride", "padding", "dilation", "groups")
AVG_POOL_ATTRIBUTES = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


@functools.lru_cache(maxsize=64)
def vocabulary(own: tuple[Word, ...] = ()) -> Vocabulary:
    """The words below, and `own` beside them. Raises ValueError where those are contradictory: the words below cannot be changed."""
    return Vocabulary((*_words(), *own))


def _words() -> Iterator[Word]:
    yield Word("conv", *_convs(), through=("input",))
    yield Word("add", *_adds(), through=("self", "other"))
    yield Word(
        "layer_norm",
        Spelling(
            aten.layer_norm.default,
            F.layer_norm,
            torch.layer_norm,
            modules={nn.LayerNorm: ("normalized_shape", "weight", "bias", "eps")},
            adapt=_layer_norm,
        ),
        Spelling(aten.native_layer_norm.default, torch.native_layer_norm, adapt=_layer_norm),
        through=("input",),
    )
    yield Word("avg_pool3d", Spelling(aten.avg_pool3d.default, F.avg_pool3d, modules={nn.AvgPool3d: AVG_POOL_ATTRIBUTES}, adapt=_avg_pool3d))
    yield Word("adaptive_avg_pool", *_adaptive_pools())
    yield Word(
        "gelu",
        Spelling(aten.gelu.default, F.gelu, modules={nn.GELU: ("approximate",)}),
        Spelling(aten.gelu_.default, torch._C._nn.gelu_),
    )
    yield Word(
        "mean",
        Spelling(aten.mean.dim, torch.mean, methods=("mean",), adapt=_mean),
        Spelling(aten.mean.default, adapt=_mean),
    )


def _convs() -> Iterator[Spelling]:
    for dims in (1, 2, 3):
        forward, backward = functools.partial(_conv, dims=dims), functools.partial(_conv, dims=dims, transposed=True)
        modules = {getattr(nn, f"Conv{dims}d"): CONV_ATTRIBUTES}
        yield Spelling(getattr(aten, f"conv{dims}d").default, getattr(torch, f"conv{dims}d"), modules=modules, adapt=forward)
        yield Spelling(getattr(aten, f"conv{dims}d").padding, adapt=forward)
        packet, modules = getattr(aten, f"conv_transpose{dims}d"), {getattr(nn, f"ConvTranspose{dims}d"): (*CONV_ATTRIBUTES, "output_padding")}
        overload = packet.default if dims == 1 else packet.input
        yield Spelling(overload, getattr(torch, f"conv_transpose{dims}d"), modules=modules, adapt=backward)
    yield Spelling(aten.convolution.default, torch.convolution, adapt=_convolution)


def _adaptive_pools() -> Iterator[Spelling]:
    for dims in (1, 2, 3):
        adapt, modules = functools.partial(_adaptive, dims=dims), {getattr(nn, f"AdaptiveAvgPool{dims}d"): ("output_size",)}
        overload, function = getattr(aten, f"adaptive_avg_pool{dims}d").default, getattr(F, f"adaptive_avg_pool{dims}d")
        yield Spelling(overload, function, modules=modules, adapt=adapt)
        if dims > 1:
            yield Spelling(getattr(aten, f"_adaptive_avg_pool{dims}d").default, getattr(torch._C._nn, f"adaptive_avg_pool{dims}d"), adapt=adapt)


def _adds() -> Iterator[Spelling]:
    yield Spelling(aten.add.Tensor, operator.add, torch.add, methods=("add", "__add__", "__radd__"))
    yield Spelling(aten.add_.Tensor, operator.iadd, methods=("add_", "__iadd__"))
    yield Spelling(aten.add.Scalar)
    yield Spelling(aten.add_.Scalar)
    yield Spelling(aten.sub.Tensor, operator.sub, torch.sub, torch.subtract, methods=("sub", "subtract", "__sub__"), adapt=_sub)
    yield Spelling(aten.sub_.Tensor, operator.isub, methods=("sub_", "subtract_", "__isub__"), adapt=_sub)
    yield Spelling(aten.sub.Scalar, adapt=_sub)
    yield Spelling(aten.sub_.Scalar, adapt=_sub)
    yield Spelling(aten.rsub.Tensor, torch.rsub, methods=("__rsub__",), adapt=_rsub)


def _conv(args: Args, *, dims: int, transposed: bool = False) -> Args:
    geometry = ("stride", "padding", "dilation", "output_padding")
    args = {"transposed": transposed, "output_padding": 0, **args, "dims": dims}
    return {**args, **{name: expand(args[name], dims) for name in geometry}}


def _convolution(args: Args) -> Args:
    """Its lists may have one entry for all dimensions, so the number of dimensions is the weight's to say."""
    weight = value_of(args["weight"])
    return _conv(args, dims=weight.dim() - 2 if isinstance(weight, torch.Tensor) else len(args["stride"]))


def _sub(args: Args) -> Args:
    return {**args, "alpha": -args["alpha"]}


def _rsub(args: Args) -> Args:
    return {"self": args["other"], "other": args["self"], "alpha": -args["alpha"]}


def _layer_norm(args: Args) -> Args:
    return {**args, "normalized_shape": expand(args["normalized_shape"], 1)}


def _avg_pool3d(args: Args) -> Args:
    stride = args["stride"]
    default_stride = stride is None or (isinstance(stride, (tuple, list)) and not stride)
    stride = args["kernel_size"] if default_stride else stride
    expanded = {name: expand(value, 3) for name, value in {**args, "stride": stride}.items() if name in ("kernel_size", "stride", "padding")}
    return {**args, **expanded}


def _adaptive(args: Args, *, dims: int) -> Args:
    return {**args, "output_size": expand(args["output_size"], dims), "dims": dims}


def _mean(args: Args) -> Args:
    dim: Any = args.get("dim")
    return {"keepdim": False, **args, "dim": None if dim is None else expand(dim, 1)}
