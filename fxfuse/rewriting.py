"""`rewrite` step by step: example values, the engine, and the guards of what it made."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import engine, guards, torch_private
from .options import Options
from .report import Report
from .rewritten import Rewritten
from .values import attribute_of


def rewritten(gm: fx.GraphModule, example_inputs: tuple[Any, ...], options: Options) -> tuple[fx.GraphModule, Report]:
    """`gm` with its chains fused and guarded, and the report; `gm` itself where nothing is fused."""
    if "forward" in vars(gm):
        return gm, Report(graphs=1, stopped="the module's forward is not its graph's, but a function that was set on it; set it on the rewritten module instead")
    annotated = _annotated(gm, example_inputs)
    graph, report = engine.fuse(annotated.graph, options)
    if graph is annotated.graph:
        return gm, report
    chains = tuple(dict.fromkeys(record.chain for record in report.fused))
    # A graph that was captured with its sizes has guards of its own, or its caller has.
    is_fixed = _fixed_sizes(gm, example_inputs, dataclasses.replace(options, passes=chains)) if engine.needs_values(gm.graph) else _none_is
    return Rewritten(gm, graph, guards.of(annotated.graph, graph, is_fixed), _bodies(gm, graph)), report


def _bodies(gm: fx.GraphModule, graph: fx.Graph) -> dict[str, fx.GraphModule]:
    """The rewritten bodies that the graph reads, which `gm` does not have."""
    return {node.target: attribute_of(node) for node in graph.find_nodes(op="get_attr") if not hasattr(gm, node.target.partition(".")[0])}


def _annotated(gm: fx.GraphModule, example_inputs: tuple[Any, ...]) -> fx.GraphModule:
    """`gm`, or a copy whose nodes have the example values that it lacks."""
    # Without inputs there is nothing to propagate: a chain whose shapes are not known is declined with that reason.
    needs_values = engine.needs_values(gm.graph) and bool(example_inputs)
    needs_gradient = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(example_inputs))
    if not needs_values and not needs_gradient:
        return gm
    annotated = fx.GraphModule(gm, torch_private.copy_of(gm.graph))
    if needs_values:
        mode = torch_private.fake_mode_of(example_inputs)
        torch_private.annotate(annotated, torch_private.faked(example_inputs, mode), mode)
    if needs_gradient:
        _mark_inputs(annotated.graph)
    return annotated


def _mark_inputs(graph: fx.Graph) -> None:
    """Lets the values of a graph's inputs, which tracing detaches, say that they need gradients: all, as inputs may be nested."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            node.meta["val"] = value.detach().requires_grad_()


def _fixed_sizes(gm: fx.GraphModule, example_inputs: tuple[Any, ...], options: Options) -> Callable[[fx.Node, int], bool]:
    """Which sizes of the inputs are fixed: with twice the size the pass would make another graph, or the model cannot be run.

    A traced graph may hold sizes as numbers (`y.sum() / 49`, `layer_norm(y, (10,))`), so that what is fused for one size is not for another.
    """
    # What is predicted to pay is another question, whose answer may change with the size.
    options = dataclasses.replace(options, strict=False, select="always" if options.select == "auto" else options.select)
    mode = torch_private.new_fake_mode()
    leaves, spec = pytree.tree_flatten(torch_private.faked(example_inputs, mode))

    def made(*doubled: tuple[int, int]) -> str | None:
        changed = list(leaves)
        try:
            with mode, torch.no_grad():
                for index, dim in doubled:
                    changed[index] = torch.cat([leaves[index]] * 2, dim).requires_grad_(leaves[index].requires_grad)
            return str(engine.fuse(_annotated(gm, pytree.tree_unflatten(changed, spec)).graph, options)[0])
        except Exception:  # whatever a model raises on sizes that it is not made for
            return None

    expected = made()
    free = {place for places in _together(leaves) if made(*places) == expected for place in places}
    order = gm.graph.process_inputs(*pytree.tree_unflatten(range(len(leaves)), spec))
    index_of = dict(zip((node.target for node in gm.graph.find_nodes(op="placeholder")), order))
    return lambda node, dim: (index_of.get(node.target), dim) not in free


def _together(leaves: Sequence[Any]) -> list[list[tuple[int, int]]]:
    """(Leaf, dimension) of all sizes; those of one dimension that are equal belong together, as the batch of two inputs does."""
    places: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        for dim, size in enumerate(leaf.shape if isinstance(leaf, torch.Tensor) else ()):
            places[dim, size].append((index, dim))
    return list(places.values())


def _none_is(node: fx.Node, dim: int) -> bool:
    return False
