"""What an op is called, whatever it is spelled as, for ops that are no words of a chain's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from . import torch_private
from .writes import is_known

# The functions that modules call, by exact type (a subclass may compute something else), and the attributes that they hand to them.
MODULES: Mapping[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Identity: ("identity", ()),
    nn.Flatten: ("flatten", ("start_dim", "end_dim")),
    **{
        module: ("dropout", ("p", "training", "inplace"))
        for module in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    },
    **{getattr(nn, f"AdaptiveAvgPool{dims}d"): (f"adaptive_avg_pool{dims}d", ("output_size",)) for dims in (1, 2, 3)},
    nn.AvgPool1d: ("avg_pool1d", ("kernel_size", "stride", "padding")),
    nn.AvgPool2d: ("avg_pool2d", ("kernel_size", "stride", "padding", "divisor_override")),
    nn.AvgPool3d: ("avg_pool3d", ("kernel_size", "stride", "padding", "divisor_override")),
}
# One name for what has several; dunders and the suffix of in-place forms are taken off before.
ALIASES = {
    "multiply": "mul",
    "rmul": "mul",
    "radd": "add",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "subtract": "sub",
    "negative": "neg",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_ndtr": "ndtr",
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"), "dropout"),
    **dict.fromkeys(("type", "type_as", "float", "half", "bfloat16", "double", "cuda", "cpu", "_to_copy"), "to"),
    **dict.fromkeys(("view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel", "_unsafe_view"), "reshape"),
}


def op_name(node: fx.Node) -> str:
    """The name of the torch or Python op that a node calls, in-place forms by that of the others; empty for anything else."""
    if node.op == "call_method":
        return _plain(node.target)
    if node.op == "call_module":
        module = node.graph.owning_module.get_submodule(node.target)
        return _plain(MODULES[type(module)][0]) if type(module) in MODULES and torch_private.calls_own_forward(module) else ""
    if node.op != "call_function" or not is_known(node.target):
        return ""
    packet = getattr(node.target, "overloadpacket", node.target)
    return _plain(getattr(packet, "__name__", ""))


def source_of(node: fx.Node) -> fx.Node | None:
    """The node given as an op's first argument."""
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return first if isinstance(first, fx.Node) else None


def arguments_of(node: fx.Node, *names: str) -> dict[str, Any]:
    """An op's arguments by name, with a Python function's defaults. names: of its positional arguments, for an op without a signature."""
    if node.op == "call_module":
        module = node.graph.owning_module.get_submodule(node.target)
        given = {name: getattr(module, name, None) for name in MODULES[type(module)][1]}
        return {**dict(zip(names, node.args)), **given, **node.kwargs}
    known, defaults = _signature(node.target) if callable(node.target) else ((), {})
    return {**defaults, **dict(zip(known or names, node.args)), **node.kwargs}


@functools.cache
def _signature(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    if isinstance(target, torch._ops.OpOverload):
        arguments = target._schema.arguments
        return tuple(a.name for a in arguments), {a.name: a.default_value for a in arguments if a.has_default_value()}
    if not inspect.isfunction(target):
        return (), {}
    parameters = inspect.signature(target).parameters.values()
    return tuple(p.name for p in parameters), {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _plain(name: str) -> str:
    name = name.strip("_") if name.startswith("__") else name.removesuffix("_")
    return ALIASES.get(name, name)
