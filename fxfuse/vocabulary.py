"""The vocabulary: every spelling of the ops that chains are made of, read as one canonical form.

`torch.conv2d`, `nn.Conv2d`, `aten.conv2d.default`, `aten.conv2d.padding` and `aten.convolution.default` all become the word `conv` with the
same argument names, so that a chain is written once. A spelling is a row of a table: the word, the aten schema that names and
orders its arguments, and a function that turns the bound arguments into the word's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .values import value_of

Args = dict[str, Any]
aten = torch.ops.aten


@dataclass(frozen=True)
class Spelling:
    """One way to write a word: `schema` binds the arguments, `adapt` brings them to the word's argument names."""

    word: str
    schema: torch._C.FunctionSchema
    adapt: Callable[[Args], Args]

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, Args] | None:
        """The word and its arguments, or None where the call does not fit the schema (an `out=` form, say)."""
        bound = bind(self.schema, args, kwargs)
        return None if bound is None else (self.word, self.adapt(bound))


# By which arguments a value can flow through a word; the first one for every word not listed.
THROUGH: Mapping[str, tuple[str, ...]] = {"add": ("self", "other")}
FIRST: Mapping[str, str] = {"conv": "input", "layer_norm": "input"}


def through(word: str) -> tuple[str, ...]:
    """Names of the arguments by which a value can flow along a chain through `word`."""
    return THROUGH.get(word, (FIRST.get(word, "self"),))


def expand(value: Any, dims: int) -> Any:
    """An int or a one-element sequence as a tuple of `dims` entries; strings and full tuples as they are."""
    value = _entries(value)
    if isinstance(value, str):
        return value
    if not isinstance(value, (tuple, list)):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _entries(value: Any) -> Any:
    """The sizes that a node stands for: `y.shape[-2:]` with sizes that vary is a node that makes a torch.Size of others."""
    if not isinstance(value, fx.Node):
        return value
    if value.target is torch.Size:
        return value.args[0]
    known = value_of(value)
    return known if isinstance(known, tuple) and all(isinstance(size, int) for size in known) else value


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
    dim = args.get("dim")
    return {"keepdim": False, **args, "dim": None if dim is None else expand(dim, 1)}


def _same(args: Args) -> Args:
    return args


@functools.cache
def functions() -> Mapping[Any, Spelling]:
    """Spellings by call target: Python functions, operators and aten overloads."""
    table: dict[Any, Spelling] = {}

    def row(word: str, overload: Any, adapt: Callable[[Args], Args], *targets: Any) -> None:
        spelling = Spelling(word, overload._schema, adapt)
        table.update({target: spelling for target in (overload, *targets)})
        table.setdefault(overload.overloadpacket, spelling)

    for dims in (1, 2, 3):
        forward, backward = functools.partial(_conv, dims=dims), functools.partial(_conv, dims=dims, transposed=True)
        adaptive = functools.partial(_adaptive, dims=dims)
        row("conv", getattr(aten, f"conv{dims}d").default, forward, getattr(torch, f"conv{dims}d"))
        row("conv", getattr(aten, f"conv{dims}d").padding, forward)
        transposed = getattr(aten, f"conv_transpose{dims}d")
        row("conv", transposed.default if dims == 1 else transposed.input, backward, getattr(torch, f"conv_transpose{dims}d"))
        row("adaptive_avg_pool", getattr(aten, f"adaptive_avg_pool{dims}d").default, adaptive, getattr(F, f"adaptive_avg_pool{dims}d"))
    row("conv", aten.convolution.default, _convolution, torch.convolution)
    for dims in (2, 3):
        overload = getattr(aten, f"_adaptive_avg_pool{dims}d").default
        row("adaptive_avg_pool", overload, functools.partial(_adaptive, dims=dims), getattr(torch._C._nn, f"adaptive_avg_pool{dims}d"))
    row("add", aten.add.Tensor, _same, operator.add, torch.add)
    row("add", aten.add_.Tensor, _same, operator.iadd)
    row("add", aten.add.Scalar, _same)
    row("add", aten.add_.Scalar, _same)
    row("add", aten.sub.Tensor, _sub, operator.sub, torch.sub, torch.subtract)
    row("add", aten.sub_.Tensor, _sub, operator.isub)
    row("add", aten.sub.Scalar, _sub)
    row("add", aten.sub_.Scalar, _sub)
    row("add", aten.rsub.Tensor, _rsub, torch.rsub)
    row("layer_norm", aten.layer_norm.default, _layer_norm, F.layer_norm, torch.layer_norm)
    row("layer_norm", aten.native_layer_norm.default, _layer_norm, torch.native_layer_norm)
    row("avg_pool3d", aten.avg_pool3d.default, _avg_pool3d, F.avg_pool3d)
    row("gelu", aten.gelu.default, _same, F.gelu)
    row("gelu", aten.gelu_.default, _same, torch._C._nn.gelu_)
    row("mean", aten.mean.dim, _mean, torch.mean)
    row("mean", aten.mean.default, _mean)
    return table


@functools.cache
def methods() -> Mapping[str, Spelling]:
    """Spellings by Tensor method name."""
    by_function = functions()
    rows = {
        aten.add.Tensor: ("add", "__add__", "__radd__"),
        aten.add_.Tensor: ("add_", "__iadd__"),
        aten.sub.Tensor: ("sub", "subtract", "__sub__"),
        aten.sub_.Tensor: ("sub_", "subtract_", "__isub__"),
        aten.rsub.Tensor: ("__rsub__",),
        aten.mean.dim: ("mean",),
    }
    return {name: by_function[overload] for overload, names in rows.items() for name in names}


# nn modules as calls of the function they run: (functional target, attribute names passed by keyword). Exact types only: a subclass may
# compute something else.
_CONV = ("weight", "bias", "stride", "padding", "dilation", "groups")
MODULES: Mapping[type[nn.Module], tuple[Callable[..., Any], tuple[str, ...]]] = {
    nn.Conv1d: (torch.conv1d, _CONV),
    nn.Conv2d: (torch.conv2d, _CONV),
    nn.Conv3d: (torch.conv3d, _CONV),
    nn.ConvTranspose1d: (torch.conv_transpose1d, (*_CONV, "output_padding")),
    nn.ConvTranspose2d: (torch.conv_transpose2d, (*_CONV, "output_padding")),
    nn.ConvTranspose3d: (torch.conv_transpose3d, (*_CONV, "output_padding")),
    nn.LayerNorm: (F.layer_norm, ("normalized_shape", "weight", "bias", "eps")),
    nn.AvgPool3d: (F.avg_pool3d, ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")),
    nn.GELU: (F.gelu, ("approximate",)),
    nn.AdaptiveAvgPool1d: (F.adaptive_avg_pool1d, ("output_size",)),
    nn.AdaptiveAvgPool2d: (F.adaptive_avg_pool2d, ("output_size",)),
    nn.AdaptiveAvgPool3d: (F.adaptive_avg_pool3d, ("output_size",)),
}


def bind(schema: torch._C.FunctionSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Args | None:
    """Arguments by the schema's names with its defaults filled in, or None where the call does not fit the schema.

    Functional and torch-level spellings call the first argument `input`, aten calls it `self`; `axis` and `keepdims` are numpy's words.
    """
    names = [argument.name for argument in schema.arguments]
    if len(args) > len(names):
        return None
    bound = dict(zip(names, args))
    for name, value in kwargs.items():
        name = {"input": "self", "axis": "dim", "keepdims": "keepdim"}.get(name, name) if name not in names else name
        if name not in names or name in bound:
            return None
        bound[name] = value
    for argument in schema.arguments:
        if argument.name in bound:
            continue
        # The Python spellings default these to None where the aten schema has no default.
        if not argument.has_default_value() and argument.name not in ("weight", "bias", "dim"):
            return None
        bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound
