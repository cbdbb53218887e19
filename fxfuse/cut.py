"""Cutting a chain out of its graph, as a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from . import torch_private
from .values import attribute_of, value_of


def cut_out(nodes: Sequence[fx.Node], example_sizes: bool = False) -> fx.Graph | str:
    """The nodes alone: what they read becomes placeholders `input_0`, ...; results are what the rest of the graph reads, and the last node.

    nodes: in the order the value flows. example_sizes: sizes and numbers that the nodes read become literals, by their example values.
    Returns a sentence where it cannot be done.
    """
    graph, copied = fx.Graph(), {}
    chosen = set(nodes)
    for node in nodes[-1].graph.nodes:
        if node not in chosen:
            continue
        for source in (source for source in node.all_input_nodes if source not in copied):
            value = value_of(source) if value_of(source) is not None else attribute_of(source)
            if isinstance(value, torch.Tensor):
                copied[source] = graph.placeholder(f"input_{len(graph.find_nodes(op='placeholder'))}")
                # The name of a parameter in the graph's code: a node, such as a Sequential's, may have had the one asked for.
                copied[source].target = copied[source].name
                copied[source].meta = {**source.meta, "example_value": value}
            elif example_sizes and (number := torch_private.example_of(value)) is not None:
                copied[source] = number
            else:
                return f"{source.name} is not a tensor"
        copied[node] = graph.node_copy(node, copied.__getitem__)
    read = [node for node in copied if node in chosen and any(user not in chosen for user in node.users)]
    graph.output(tuple(copied[node] for node in dict.fromkeys([*read, nodes[-1]])))
    return graph


def inputs_of(graph: fx.Graph) -> list[torch.Tensor]:
    """The example values of a graph's placeholders."""
    return [value_of(node) for node in graph.find_nodes(op="placeholder")]


def sizes_vary(graph: fx.Graph) -> bool:
    """Whether any tensor in the graph has a symbolic size."""
    shapes: list[Any] = [value_of(node).shape for node in graph.nodes if isinstance(value_of(node), torch.Tensor)]
    return any(not isinstance(size, int) for shape in shapes for size in shape)
