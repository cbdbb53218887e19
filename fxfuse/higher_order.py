"""Calls of higher-order ops: the graphs that are their bodies, and what a call gives for a body's placeholders."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .values import attribute_of

INVOKE_SUBGRAPH = "invoke_subgraph"
SET_GRAD, AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"
# How these call their bodies is known: once, or not at all, with the operands in the order of the body's placeholders.
KNOWN = ("tag_activation_checkpoint", "cond", INVOKE_SUBGRAPH, SET_GRAD, AUTOCAST)


def body_of(argument: Any) -> fx.GraphModule | None:
    """The body that a get_attr node reads; None for any other argument."""
    held = attribute_of(argument) if isinstance(argument, fx.Node) and argument.op == "get_attr" else None
    return held if isinstance(held, fx.GraphModule) else None


def op_of(call: fx.Node) -> str:
    """The name of what a node calls, without the namespace of higher-order ops."""
    if isinstance(call.target, torch._ops.HigherOrderOperator):
        return call.target.name()
    return call.target if isinstance(call.target, str) else getattr(call.target, "__name__", str(call.target))


def calls_op(node: fx.Node, *names: str) -> bool:
    """Whether a node calls one of the higher-order ops of these names."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in names


def operands(call: fx.Node, body: fx.GraphModule) -> list[Any] | None:
    """What the call gives for each placeholder of `body`, one of its bodies; None where that is not known."""
    if not calls_op(call, *KNOWN):
        return None
    last = max(index for index, argument in enumerate(call.args) if body_of(argument) is not None)
    # Behind the body of an invoke_subgraph stands its identifier.
    behind = last + (2 if calls_op(call, INVOKE_SUBGRAPH) else 1)
    given = torch.utils._pytree.tree_leaves(list(call.args[behind:]))
    return given if len(given) == len(body.graph.find_nodes(op="placeholder")) else None
