"""What a chain's `replace` emits its replacement with, and what is checked before that takes the chain's place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import gradients, torch_private
from .command import in_a_word
from .conditions import same_shape
from .guarded import Guarded
from .match import Match
from .values import ModuleParameter, value_of
from .view import Call
from .vocabulary import NONE

# What debuggers, profilers and later passes read off a node; a replacement inherits it from the node it stands for.
INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node")

# Under this key a node's meta holds the names of the chain's nodes, in chain order.
STANDS_FOR = "fxfuse_stands_for"

# And under this one the chain's fingerprint (see `Chain.fingerprint`).
FINGERPRINT = "fxfuse_fingerprint"


class Emitter:
    """What a chain's `replace` is given as `emit`: each call adds a node in front of the chain's last one and returns it.

    Arguments may be nodes of the graph, as calls hold them (`conv.input`, and results of the chain's own steps such as `conv.result`, which
    are then kept), module parameters, numbers, lists of them, and nodes that `emit` returned. Raises PassError for a mistake.
    """

    def __init__(self, graph: fx.Graph, copied: Mapping[fx.Node, fx.Node], match: Match, guarded: Guarded) -> None:
        self._graph = graph
        self._copied = copied
        self._match = match
        self._guarded = guarded
        self._last = copied[match.last.result]
        self._is_trained = gradients.is_needed(match)

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of `target`, an op such as `torch.ops.mine.op.default` or a function of torch's, with its example value computed on fake
        tensors by the op's fake. Where the chain's result needs a gradient, the op's twin `<op>_training` takes its place, if there is one.
        An op that writes to its arguments is refused."""
        target = torch_private.overload_of(target)
        if isinstance(target, torch._ops.OpOverload) and self._is_trained:
            target = gradients.twin_of(target.name().partition(".")[0]) or target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            raise self._guarded.mistake(f"emits {target}, which writes to its arguments", "it should emit ops that return new tensors")
        args, kwargs = self._own(args), {name: self._own(value) for name, value in kwargs.items()}
        values, named = fx.map_arg(args, value_of), fx.map_arg(kwargs, value_of)
        try:
            # Autograd would hand what it saves to the hooks of an activation checkpoint around the compilation.
            with torch_private.fake_mode_of((values, named)), torch.no_grad():
                value = target(*values, **named)
        except torch_private.Restart:
            raise
        except Exception as error:
            raise self._guarded.mistake(f"emits {target}, which raises {in_a_word(error)}", "its fake should take these arguments", error) from error
        if self._is_trained and isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
        node = self._create("call_function", target, args, kwargs)
        self._annotate(node, value)
        return node

    def conv_without_bias(self, conv: Call) -> fx.Node:
        """The convolution with its bias left out; the node itself where it has none. The fused tail adds the bias."""
        if conv.bias is None:
            return self._copied[conv.node]
        geometry = [conv.stride, conv.padding, conv.dilation]
        if conv.transposed:
            target = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[conv.dims - 1]
            geometry = [conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation]
        else:
            target = (torch.conv1d, torch.conv2d, torch.conv3d)[conv.dims - 1]
            geometry.append(conv.groups)
        node = self._create("call_function", target, self._own((conv.input, conv.weight, None, *geometry)), {}, self._copied[conv.node])
        # Same shape, dtype and layout with or without bias: no need to run it, and autocast has already had its say.
        self._annotate(node, conv.value)
        return node

    def finish(self, result: Any) -> None:
        """Puts `result` in the last node's place and erases the chain, but for what the replacement reads. Raises PassError, with the graph
        as it was, if it does not stand for the chain."""
        self._check(result)
        self._last.replace_all_uses_with(result)
        for call in reversed(self._match.path):
            for node in (self._copied[own] for own in reversed(call.nodes)):
                if not node.users:
                    self._graph.erase_node(node)

    def _check(self, result: Any) -> None:
        expected = "it should return the node that stands for the chain, as emit(...) returned it"
        if not isinstance(result, fx.Node):
            raise self._guarded.mistake(f"returns {result!r}", expected)
        if result.graph is not self._graph:
            raise self._guarded.mistake(f"returns {result.name}, a node of another graph", expected)
        old, new = value_of(self._last), value_of(result)
        if not isinstance(new, torch.Tensor):
            raise self._guarded.mistake(f"returns {result.name}, whose value is a {type(new).__name__}", "it should be a tensor")
        if not same_shape(old, new) or (old.dtype, old.device) != (new.dtype, new.device):
            raise self._guarded.mistake(f"gives {_text(new)} by {result.target}", f"the chain gives {_text(old)}")

    def _own(self, value: Any) -> Any:
        """`value` with nodes of the original graph and module parameters turned into nodes of the copy."""
        if isinstance(value, ModuleParameter):
            node = self._create("get_attr", value.path, ())
            self._annotate(node, value.value)
            return node
        if isinstance(value, (tuple, list)):
            return type(value)(self._own(item) for item in value)
        if isinstance(value, fx.Node) and value.graph is not self._graph and value not in self._copied:
            raise self._guarded.mistake(f"emits an op that reads {value.name}, a node of another graph", "it should take nodes from the calls and from emit")
        return self._copied.get(value, value) if isinstance(value, fx.Node) else value

    def _create(self, kind: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = NONE, like: fx.Node | None = None) -> fx.Node:
        """A new node in front of the chain's last, with the provenance of `like` (the last node by default) and the chain's annotations."""
        meta = (like or self._last).meta
        with self._graph.inserting_before(self._last):
            node = self._graph.create_node(kind, target, tuple(args), dict(kwargs))
        node.meta = {key: copy.copy(meta[key]) for key in INHERITED if key in meta}
        # The same for every node of the chain: `safety.annotations` sees to that.
        node.meta |= torch_private.annotations(like or self._last)
        node.meta[STANDS_FOR] = tuple(replaced.name for replaced in self._match.in_order)
        node.meta[FINGERPRINT] = self._match.chain.fingerprint
        return node

    def _annotate(self, node: fx.Node, value: torch.Tensor) -> None:
        node.meta.update({key: value for key in ("example_value", "val") if key in self._last.meta})


def _text(value: torch.Tensor) -> str:
    return f"{value.dtype}{list(value.shape)} on {value.device}"
