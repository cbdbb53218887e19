"""Spellings and the canonical arguments that they are read as. Which spellings make a chain is in test_coverage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import traced_graph
from torch import fx, nn
from torch.nn.utils import prune

from fxfuse.values import ModuleParameter
from fxfuse import words
from fxfuse.view import Call, GraphView
from fxfuse.vocabulary import expand

aten = torch.ops.aten
X, W = torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3)
X3, W3 = torch.zeros(2, 4, 8, 8, 8), torch.zeros(4, 8, 3, 3, 3)


def last_call(run: Callable[..., Any], *args: torch.Tensor) -> fx.Node:
    return [node for node in traced_graph(run, *args).graph.nodes if node.op.startswith("call_")][-1]


def read(node: fx.Node) -> Call | None:
    return GraphView(node.graph).calls.get(node)


def spelled(run: Callable[..., Any], *args: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """The word and the arguments that are no nodes."""
    call = read(last_call(run, *args))
    assert call is not None
    return call.word, {name: value for name, value in call.args.items() if not isinstance(value, fx.Node)}


PLAIN_CONV = dict(bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, dims=2, transposed=False, output_padding=(0, 0))
PLAIN_POOL = dict(
    kernel_size=(2, 2, 2), stride=(2, 2, 2), padding=(0, 0, 0), ceil_mode=False, count_include_pad=True, divisor_override=None
)
ALL_OF_POOL = dict(kernel_size=(3, 3, 3), stride=(2, 2, 1), padding=(1, 1, 1), ceil_mode=True, count_include_pad=False, divisor_override=5)
CANONICAL = {
    "conv2d": (lambda x, w: torch.conv2d(x, w), "conv", PLAIN_CONV),
    "conv2d, keywords": (lambda x, w: F.conv2d(weight=w, input=x, stride=(2, 1)), "conv", {**PLAIN_CONV, "stride": (2, 1)}),
    "conv2d, string padding": (lambda x, w: F.conv2d(x, w, padding="same"), "conv", {**PLAIN_CONV, "padding": "same"}),
    "aten.conv2d.padding": (lambda x, w: aten.conv2d.padding(x, w, None, [1], "valid"), "conv", {**PLAIN_CONV, "padding": "valid"}),
    "convolution, lists of one": (lambda x, w: torch.convolution(x, w, None, [1], [0], [1], False, [0], 1), "conv", PLAIN_CONV),
    "y - a is an add": (lambda x, w: x - 1, "add", dict(other=1, alpha=-1)),
    "y.sub(a, alpha=3)": (lambda x, w: x.sub(1, alpha=3), "add", dict(other=1, alpha=-3)),
    "1 - y adds y to 1": (lambda x, w: 1 - x, "add", dict(self=1, alpha=-1)),
    "rsub(y, 1)": (lambda x, w: torch.rsub(x, 1, alpha=2), "add", dict(self=1, alpha=-2)),
    "layer_norm": (
        lambda x, w: F.layer_norm(x, [8]),
        "layer_norm",
        dict(normalized_shape=(8,), weight=None, bias=None, eps=1e-5, cudnn_enable=True),
    ),
    "gelu": (lambda x, w: F.gelu(x), "gelu", dict(approximate="none")),
    "adaptive pool, an int": (lambda x, w: F.adaptive_avg_pool2d(x, 1), "adaptive_avg_pool", dict(output_size=(1, 1), dims=2)),
    "adaptive pool, None": (lambda x, w: F.adaptive_avg_pool2d(x, (None, 1)), "adaptive_avg_pool", dict(output_size=(None, 1), dims=2)),
    "mean": (lambda x, w: x.mean(-1), "mean", dict(dim=(-1,), keepdim=False, dtype=None)),
    "mean of all": (lambda x, w: x.mean(), "mean", dict(dim=None, keepdim=False, dtype=None)),
    "mean, numpy's words": (lambda x, w: torch.mean(x, axis=(2, 3), keepdims=True), "mean", dict(dim=(2, 3), keepdim=True, dtype=None)),
}  # fmt: skip
CANONICAL_3D = {
    "conv_transpose3d": (
        lambda x, w: F.conv_transpose3d(x, w, None, 2, 1, 1),
        "conv",
        dict(bias=None, stride=(2,) * 3, padding=(1,) * 3, output_padding=(1,) * 3, dilation=(1,) * 3, groups=1, dims=3, transposed=True),
    ),
    "avg_pool3d": (lambda x, w: F.avg_pool3d(x, 2), "avg_pool3d", PLAIN_POOL),
    "avg_pool3d, empty stride": (lambda x, w: F.avg_pool3d(x, (2,), []), "avg_pool3d", PLAIN_POOL),
    "avg_pool3d, all positional": (lambda x, w: F.avg_pool3d(x, 3, (2, 2, 1), 1, True, False, 5), "avg_pool3d", ALL_OF_POOL),
}


@pytest.mark.parametrize(("run", "word", "expected"), CANONICAL.values(), ids=CANONICAL)
def test_arguments_are_bound_and_expanded(run: Callable[..., Any], word: str, expected: dict[str, Any]) -> None:
    assert spelled(run, X, W) == (word, expected)


@pytest.mark.parametrize(("run", "word", "expected"), CANONICAL_3D.values(), ids=CANONICAL_3D)
def test_arguments_are_bound_and_expanded_in_3d(run: Callable[..., Any], word: str, expected: dict[str, Any]) -> None:
    assert spelled(run, X3, W3) == (word, expected)


NOT_WORDS = {
    "out=": lambda x, w: torch.add(x, 1, out=w),
    "mul": lambda x, w: x * 2,
    "adaptive_max_pool2d": lambda x, w: F.adaptive_max_pool2d(x, 1),
    "sum": lambda x, w: x.sum(-1),
}


@pytest.mark.parametrize("run", NOT_WORDS.values(), ids=NOT_WORDS)
def test_other_calls_are_no_words(run: Callable[..., Any]) -> None:
    assert read(last_call(run, X, X.clone())) is None


MODULES = {
    nn.Conv2d: (nn.Conv2d(4, 8, 3, padding="same"), "conv"),
    nn.ConvTranspose2d: (nn.ConvTranspose2d(4, 8, 3, 2, output_padding=1), "conv"),
    nn.LayerNorm: (nn.LayerNorm(8), "layer_norm"),
    nn.GELU: (nn.GELU("tanh"), "gelu"),
    nn.AdaptiveAvgPool2d: (nn.AdaptiveAvgPool2d((1, None)), "adaptive_avg_pool"),
    nn.AvgPool3d: (nn.AvgPool3d(2), "avg_pool3d"),
}


class Holder(nn.Module):
    def __init__(self, module: nn.Module, by_name: bool = False) -> None:
        super().__init__()
        self.inner, self.by_name = module, by_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(input=x) if self.by_name else self.inner(x)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("module", "word"), MODULES.values(), ids=lambda value: type(value).__name__)
def test_a_module_reads_as_the_function_it_runs(module: nn.Module, word: str, by_name: bool) -> None:
    call = read(last_call(Holder(module, by_name), X))
    assert call is not None and call.word == word
    parameters = {value.path: value.value for value in call.args.values() if isinstance(value, ModuleParameter)}
    assert parameters == {f"inner.{name}": value for name, value in module.named_parameters()}


class Scaled(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Leaf(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return True


def call_of(module: nn.Module) -> fx.Node:
    """The node that calls `module`, in the graph of a module that holds it."""
    root = Holder(module)
    (node,) = fx.GraphModule(root, Leaf().trace(root)).graph.find_nodes(op="call_module")
    return node


MODULES_THAT_DO_MORE = {
    "padding of another kind": lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"),
    "a subclass": lambda: Scaled(4, 8, 3),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 3)),
    "weight_norm by a hook": lambda: nn.utils.weight_norm(nn.Conv2d(4, 8, 3)),
    "spectral_norm by a hook": lambda: nn.utils.spectral_norm(nn.Conv2d(4, 8, 3)),
    "pruned": lambda: prune.l1_unstructured(nn.Conv2d(4, 8, 3), "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("make", MODULES_THAT_DO_MORE.values(), ids=MODULES_THAT_DO_MORE)
def test_modules_that_do_more_are_no_words(make: Callable[[], nn.Module]) -> None:
    assert read(call_of(make())) is None


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` times 2, which looks like it."""
    return functools.wraps(function)(lambda *args, **kwargs: 2 * function(*args, **kwargs))


def on_the_module(name: str) -> Callable[..., None]:
    return lambda patch, module: setattr(module, name, doubled(getattr(module, name)))


def on_the_class(kind: type[nn.Module], name: str) -> Callable[..., None]:
    return lambda patch, module: patch.setattr(kind, name, doubled(getattr(kind, name)))


def hooked(register: str, hook: Callable[..., Any], **how: bool) -> Callable[..., Any]:
    return lambda patch, module: getattr(module, register)(hook, **how)


def all_hooked(register: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda patch, module: getattr(nn.modules.module, register)(hook)


# What changes a call of a module of torch's; a handle that takes the change away again, where there is one.
CHANGES = {
    "forward of the module": on_the_module("forward"),
    "_conv_forward of the module": on_the_module("_conv_forward"),
    "_call_impl of the module": on_the_module("_call_impl"),
    "forward of the class": on_the_class(nn.Conv2d, "forward"),
    "_conv_forward of the class": on_the_class(nn.Conv2d, "_conv_forward"),
    "__call__ of every module": on_the_class(nn.Module, "__call__"),
    "_call_impl of every module": on_the_class(nn.Module, "_call_impl"),
    "compile()": lambda patch, module: module.compile(backend="eager"),
    "forward hook": hooked("register_forward_hook", lambda module, args, result: 2 * result),
    "forward hook with kwargs": hooked("register_forward_hook", lambda module, args, kwargs, result: 2 * result, with_kwargs=True),
    "forward hook, always called": hooked("register_forward_hook", lambda module, args, result: 2 * result, always_call=True),
    "pre-hook": hooked("register_forward_pre_hook", lambda module, args: 2 * args[0]),
    "pre-hook with kwargs": hooked("register_forward_pre_hook", lambda module, args, kwargs: (2 * args[0], kwargs), with_kwargs=True),
    "backward hook": hooked("register_full_backward_hook", lambda module, given, result: (2 * given[0],)),
    "backward pre-hook": hooked("register_full_backward_pre_hook", lambda module, result: (2 * result[0],)),
    "forward hook of every module": all_hooked("register_module_forward_hook", lambda module, args, result: 2 * result),
    "pre-hook of every module": all_hooked("register_module_forward_pre_hook", lambda module, args: 2 * args[0]),
    "backward hook of every module": all_hooked("register_module_full_backward_hook", lambda module, given, result: (2 * given[0],)),
    "backward pre-hook of every module": all_hooked("register_module_full_backward_pre_hook", lambda module, result: (2 * result[0],)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_module_whose_call_is_changed_is_no_word(change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    node = call_of(nn.Conv2d(4, 8, 3))
    assert read(node).word == "conv"
    with monkeypatch.context() as patch:
        handle = change(patch, node.graph.owning_module.inner)
        assert read(node) is None
    if handle is not None:
        handle.remove()
        assert read(node).word == "conv"


def test_methods_that_a_call_does_not_run_may_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Conv2d, "reset_parameters", lambda self: None)
    module = nn.Conv2d(4, 8, 3)
    module.train = lambda mode=True: module
    assert read(call_of(module)).word == "conv"


def test_expand() -> None:
    assert [expand(value, 2) for value in (3, [3], (3,), (3, 4), [3, 4], "same")] == [(3, 3), (3, 3), (3, 3), (3, 4), (3, 4), "same"]


def test_every_row_names_the_arguments_that_a_value_flows_through() -> None:
    for word in words.vocabulary().words.values():
        for spelling in word.spellings:
            names = {argument.name for argument in spelling.overload._schema.arguments}
            assert set(word.through) <= names, spelling.overload
