"""The graphs of a module whose chains are fused: its own, and those of the bodies of higher-order ops, with what rules there from outside.

A body is planned once, however many calls it has, and never changed: the calls of the rewritten graph read a new one under a new name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from . import gradients, selective, torch_private
from .higher_order import AUTOCAST, SET_GRAD, body_of, calls_op, op_of, operands
from .values import value_of
from .view import GraphView


@dataclass(frozen=True)
class Site:
    """A node that a body is given to: the graph it stands in, and what it gives for each of the body's placeholders; None where not known."""

    outer: Body
    node: fx.Node
    given: list[Any] | None


@dataclass(eq=False)
class Body:
    """A graph, and where it is called; the module's own has no name and no sites.

    name: the attribute that holds it, dotted where that is one of another body. module: what holds the graph, None for the module's own.
    graph: the module's; where only the operands say what needs a gradient, a copy of it whose placeholders say so too.
    """

    name: str
    graph: fx.Graph
    module: fx.GraphModule | None = None
    sites: list[Site] = field(default_factory=list)

    @cached_property
    def calls(self) -> int:
        """How often the graph is called in one run of the module: for each call of what calls it once more."""
        return sum(site.outer.calls for site in self.sites) if self.sites else 1

    @cached_property
    def view(self) -> GraphView:
        """The graph in the words that every chain knows."""
        return GraphView(self.graph, same_storage=self.same_storage)

    @cached_property
    def other_op(self) -> str:
        """The op around the body of which it is not known how it calls it; empty if there is none."""
        unknown = (op_of(site.node) for site in self.sites if site.given is None)
        return next((op for op in (*unknown, *(site.outer.other_op for site in self.sites)) if op), "")

    @cached_property
    def around(self) -> list[Body]:
        """The body itself, and those that it is called in."""
        return list(dict.fromkeys([self, *(outer for site in self.sites for outer in site.outer.around)]))

    @cached_property
    def saved(self) -> list[Mapping[str, str] | str]:
        """What the policies of selective checkpoints around the body save in it (see `selective.saved`)."""
        modules = [outer.module for outer in self.around if outer.module is not None]
        return [selective.saved(policy, self.module) for module in modules for policy in torch_private.policies_of(module)]

    @cached_property
    def same_storage(self) -> Mapping[int, int]:
        """One storage for all placeholders for which any call gives tensors of one storage (see `GraphView`)."""
        joined: dict[int, int] = {}
        for site in self.sites:
            first: dict[int, int] = {}
            for placeholder, operand in self.given(site):
                storage, outer = torch_private.storage_of(value_of(placeholder)), site.outer.view.storage_of(operand)
                if storage is not None and outer is not None:
                    _join(joined, storage, first.setdefault(outer, storage))
        return {storage: _root(joined, storage) for storage in joined}

    def given(self, site: Site) -> Iterator[tuple[fx.Node, Any]]:
        """Each placeholder with what a call gives for it."""
        return zip(self.graph.find_nodes(op="placeholder"), site.given or ())

    @contextmanager
    def state(self) -> Iterator[None]:
        """Grad mode and autocast as an exported graph's ops set them around the body. Other captures' values have them in already."""
        if not self.sites:
            yield
            return
        site = self.sites[0]
        with site.outer.state(), _state_of(site.node):
            yield


def bodies_of(graph: fx.Graph) -> list[Body]:
    """The graph itself and all bodies below it, each behind all that call it."""
    found = {id(graph.owning_module): Body("", graph)}
    ordered: list[fx.GraphModule | None] = []
    _collect(graph, "", found, ordered)
    bodies = [found[id(graph.owning_module)], *(found[id(module)] for module in reversed(ordered))]
    for body in bodies:
        _mark(body)
        for node in body.graph.nodes:
            for inner in dict.fromkeys(map(body_of, node.all_input_nodes)):
                if inner is not None:
                    found[id(inner)].sites.append(Site(body, node, operands(node, inner)))
    return bodies


def graphs_below(graph: fx.Graph) -> dict[str, fx.Graph]:
    """The graph itself, under no name, and those of all bodies below it, by the dotted attribute that holds them."""
    found = {id(graph.owning_module): Body("", graph)}
    _collect(graph, "", found, [])
    return {body.name: body.graph for body in found.values()}


def adopt(gm: fx.GraphModule, graph: fx.Graph) -> None:
    """Gives a module its rewritten graph, and the new bodies that it reads."""
    for node in graph.find_nodes(op="get_attr"):
        new = body_of(node)
        if new is not None and not hasattr(gm, node.target):
            gm.add_submodule(node.target, new)
    gm.graph = graph


def _collect(graph: fx.Graph, path: str, found: dict[int, Body], ordered: list[Any]) -> None:
    """Finds the bodies below a graph; puts each behind those that it calls itself, and the first that the graph reads last."""
    for node in reversed(graph.find_nodes(op="get_attr")):
        body = body_of(node)
        if body is not None and id(body) not in found:
            found[id(body)] = Body(f"{path}{node.target}", body.graph, body)
            _collect(body.graph, f"{path}{node.target}.", found, ordered)
            ordered.append(body)


def _mark(body: Body) -> None:
    """Lets the placeholders of a body say whether they need a gradient where the capture leaves that to what is given for them."""
    trained = []
    for site in body.sites:
        for index, (placeholder, operand) in enumerate(body.given(site)):
            value = placeholder.meta.get("val")
            detached = "example_value" not in placeholder.meta and isinstance(value, torch.Tensor) and value.is_floating_point()
            if detached and isinstance(operand, fx.Node) and gradients.is_trained(operand):
                trained.append(index)
    if not trained:
        return
    body.graph = fx.GraphModule(body.module, torch_private.copy_of(body.graph)).graph
    placeholders = body.graph.find_nodes(op="placeholder")
    for index in trained:
        placeholders[index].meta["val"] = placeholders[index].meta["val"].detach().requires_grad_()


def _state_of(call: fx.Node) -> Any:
    if calls_op(call, SET_GRAD):
        return torch.set_grad_enabled(call.args[0])
    if calls_op(call, AUTOCAST):
        return torch.autocast(*call.args[:4])
    return nullcontext()


def _root(joined: dict[int, int], storage: int) -> int:
    while joined.get(storage, storage) != storage:
        storage = joined[storage]
    return storage


def _join(joined: dict[int, int], one: int, other: int) -> None:
    joined[_root(joined, one)] = _root(joined, other)
