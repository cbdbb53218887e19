"""The precision of fp32 convolutions: what the switches say at a call, and graphs whose fused ops follow them.

A fused op takes its precision as an argument, "tf32" or "ieee", so a compiled graph is right for one state of the switches. Dynamo guards
the switch of matrix products but not cuDNN's: the compiled callable looks at each call and keeps one compiled variant for each state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from . import torch_private
from .bodies import graphs_below
from .higher_order import INVOKE_SUBGRAPH, body_of, calls_op
from .values import value_of

ARGUMENT = "precision"
Compile = Callable[[Sequence[Any]], Callable[..., Any]]


def current() -> str:
    """ "tf32" if cuDNN convolutions may round fp32 inputs to TF32, else "ieee". Never raises, however old and new switches are mixed."""
    return "tf32" if torch.backends.cudnn.conv.fp32_precision == "tf32" else "ieee"


def switched(precision: str) -> AbstractContextManager[None]:
    """cuDNN's fp32 convolutions in "tf32" or "ieee" within it."""
    before = torch.backends.cudnn.conv.fp32_precision
    return nullcontext() if before == precision else _switched(precision, before)


@contextmanager
def _switched(precision: str, before: str) -> Iterator[None]:
    torch.backends.cudnn.conv.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def calls(graph: fx.Graph) -> list[tuple[fx.Node, int]]:
    """Calls of fused ops on fp32 CUDA inputs, whose result depends on the switches, and where they take their precision; those in bodies too."""
    found = []
    for node in (node for below in graphs_below(graph).values() for node in below.nodes):
        if getattr(node.target, "namespace", None) == "fxfuse" and _follows_switch(node):
            names = [argument.name for argument in node.target._schema.arguments]
            if ARGUMENT in names:
                found.append((node, names.index(ARGUMENT)))
    return found


def compiled(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile) -> Callable[..., Any]:
    """`compile_graph(example_inputs)`, which compiles `gm` as it stands; where fused ops in it follow the switches, a callable that does."""
    following, regions = calls(gm.graph), _regions(gm.graph)
    if not following:
        return compile_graph(example_inputs)

    def variant(precision: str, inputs: Sequence[Any]) -> Callable[..., Any]:
        for node, index in following:
            node.update_arg(index, precision)
        for call, identifier in regions.items():
            call.update_arg(1, f"{identifier}_{precision}")
        for graph in graphs_below(gm.graph).values():
            graph.owning_module.recompile()
        return compile_graph(inputs)

    variants = {current(): variant(current(), example_inputs)}
    # For a later variant: fake tensors, which hold no memory, and the compilation's state, in which their sizes have a meaning.
    fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    restored = torch_private.compile_context()

    def follow(*args: Any) -> Any:
        precision = current()
        if precision not in variants:
            with restored():
                variants[precision] = variant(precision, fakes)
        return variants[precision](*args)

    return follow


def _regions(graph: fx.Graph) -> dict[fx.Node, str]:
    """Calls of invoke_subgraph whose bodies hold such calls, and their identifiers, by which AOTAutograd would take one variant for another."""
    nodes = [node for below in graphs_below(graph).values() for node in below.nodes if calls_op(node, INVOKE_SUBGRAPH)]
    return {node: node.args[1] for node in nodes if calls(body_of(node.args[0]).graph)}


def _follows_switch(node: fx.Node) -> bool:
    value = value_of(node.args[0])
    return value.dtype == torch.float32 and value.device.type == "cuda"
