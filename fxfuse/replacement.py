"""Rewriting: matched nodes are replaced in a copy of the graph, which takes the original's place only once it is whole and lints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import torch_private
from .conditions import same_shape
from .match import Match
from .values import ModuleParameter, value_of
from .view import Call

# What debuggers, profilers and later passes read off a node; a replacement inherits it from the node it stands for.
INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node")

# Under this key a node's meta holds the names of the chain's nodes, in chain order.
STANDS_FOR = "fxfuse_stands_for"


class RewriteError(RuntimeError):
    """A replacement does not stand for the chain it replaces (a defect in a pass, not in the user's model)."""


class Emitter:
    """Emits a match's replacement in front of its last node. Arguments may be nodes of the original graph or module parameters."""

    def __init__(self, graph: fx.Graph, copied: Mapping[fx.Node, fx.Node], match: Match) -> None:
        self._graph = graph
        self._copied = copied
        self._match = match
        self._last = copied[match.last.result]
        self._kept: set[fx.Node] = set()

    def __call__(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """A call of `target`, with its example value computed on fake tensors."""
        args = self._own(args)
        node = self._create("call_function", target, args)
        values = fx.map_arg(args, value_of)
        with torch_private.fake_mode_of(values):
            self._annotate(node, target(*values))
        return node

    def conv_without_bias(self, conv: Call) -> fx.Node:
        """The convolution with its bias left out; the node itself where it has none. The fused tail adds the bias."""
        if conv.bias is None:
            self._kept.add(conv.node)
            return self._copied[conv.node]
        geometry = [conv.stride, conv.padding, conv.dilation]
        if conv.transposed:
            target = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[conv.dims - 1]
            geometry = [conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation]
        else:
            target = (torch.conv1d, torch.conv2d, torch.conv3d)[conv.dims - 1]
            geometry.append(conv.groups)
        node = self._create("call_function", target, self._own((conv.input, conv.weight, None, *geometry)), like=self._copied[conv.node])
        # Same shape, dtype and layout with or without bias: no need to run it, and autocast has already had its say.
        self._annotate(node, conv.value)
        return node

    def finish(self, result: fx.Node) -> None:
        """Puts `result` in the last node's place and erases the chain. Raises RewriteError if shape or dtype differ."""
        old, new = value_of(self._last), value_of(result)
        if not same_shape(old, new) or old.dtype != new.dtype:
            raise RewriteError(f"{result.target} gives {new.dtype}{list(new.shape)} for a chain that gives {old.dtype}{list(old.shape)}")
        self._last.replace_all_uses_with(result)
        for call in reversed(self._match.present):
            for node in reversed(call.nodes):
                self._erase(node)

    def _erase(self, node: fx.Node) -> None:
        if node not in self._kept:
            self._graph.erase_node(self._copied[node])

    def _own(self, value: Any) -> Any:
        """`value` with nodes of the original graph and module parameters turned into nodes of the copy."""
        if isinstance(value, ModuleParameter):
            node = self._create("get_attr", value.path, ())
            self._annotate(node, value.value)
            return node
        if isinstance(value, (tuple, list)):
            return type(value)(self._own(item) for item in value)
        return self._copied.get(value, value) if isinstance(value, fx.Node) else value

    def _create(self, kind: str, target: Any, args: Sequence[Any], like: fx.Node | None = None) -> fx.Node:
        """A new node in front of the chain's last, with the provenance of `like` (the last node by default)."""
        meta = (like or self._last).meta
        with self._graph.inserting_before(self._last):
            node = self._graph.create_node(kind, target, tuple(args))
        node.meta = {key: copy.copy(meta[key]) for key in INHERITED if key in meta}
        node.meta[STANDS_FOR] = tuple(replaced.name for replaced in self._match.in_order)
        return node

    def _annotate(self, node: fx.Node, value: torch.Tensor) -> None:
        node.meta.update({key: value for key in ("example_value", "val") if key in self._last.meta})


def rewritten(graph: fx.Graph, replacements: Sequence[tuple[Match, Callable[..., fx.Node]]]) -> fx.Graph:
    """A copy of `graph` with each match replaced by what its `replace(emit, **calls)` emits. The original is not touched."""
    duplicate = copy.deepcopy(graph)
    copied = dict(zip(graph.nodes, duplicate.nodes, strict=True))
    for old, new in copied.items():
        # Dynamo marks placeholders with attributes of its own (`_dynamo_source`), which AOTAutograd asks for and a copy lacks.
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
    for match, replace in replacements:
        emit = Emitter(duplicate, copied, match)
        result = replace(emit, **match.calls)
        emit.finish(result)
        copied[match.last.result] = result
    duplicate.lint()
    return duplicate
