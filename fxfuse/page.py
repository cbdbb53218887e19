"""`report.html`: the report of one compilation or one `explain` to look at, with its graphs before and after. One file, no network.

What is shown is the document (see `fxfuse.document`) and, for each graph, what `picture` reads off its nodes; the files in `page_files/` draw it
in the browser. Everything that stems from the user's code travels as JSON in a script element that no browser runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import torch_private
from .bodies import graphs_below
from .emitter import STANDS_FOR
from .higher_order import body_of
from .places import location_of, stack_of
from .printing import folded, likeness
from .values import attribute_of, value_of

# What belongs to the page: marks in template.html and the files that take their place.
PARTS = {
    "style": ("page.css",),
    "library": ("vendor/dagre.min.js", "layout.js"),
    "script": ("data.js", "view.js", "paint.js", "panel.js", "page.js"),
    "license": ("vendor/LICENSE",),
}
SHOWN_ARGUMENTS = 400

Picture = dict[str, Any]


def picture(graph: fx.Graph) -> Picture:
    """What the page shows of a graph: {"nodes": [...], "stacks": [...], "bodies": {name: picture}}, plain JSON.

    Nodes come in graph order. kind: "input", "state" (a parameter, buffer or constant), "call" or "output". target: what it calls. values: a
    dict with dtype, shape, stride, device as text for each tensor in its value, or text for anything else. inputs: names of the nodes
    that it reads. at: file:line. stack: index into the stacks, -1 for none. body: whether it is the body of a higher-order op. stands_for:
    names of the chain's nodes that it was put in the place of. Bodies of higher-order ops are pictures of their own, by the attribute that holds
    them; a rewritten one under the name of the one that it took the place of.
    """
    below = {_name_before(name, inner): _nodes(inner) for name, inner in graphs_below(graph).items() if name}
    return {**_nodes(graph), "bodies": below}


def _name_before(name: str, body: fx.Graph) -> str:
    return body.owning_module.meta.get(STANDS_FOR, name)


def _nodes(graph: fx.Graph) -> Picture:
    stacks: dict[str, int] = {}
    return {"nodes": [_node(node, stacks) for node in graph.nodes], "stacks": list(stacks)}


def html(document: Mapping[str, Any], graphs: Sequence[tuple[Picture, Picture]]) -> str:
    """The page. graphs: of each graph the picture before and after rewriting."""
    pictures = [{"before": before, "after": after} for before, after in graphs]
    data = {"report": document, "graphs": pictures, "folds": _folds(document.get("fused", ()), document.get("declined", ()))}
    folder = Path(__file__).parent / "page_files"
    parts = {name: "\n".join((folder / file).read_text(encoding="utf-8") for file in files) for name, files in PARTS.items()}
    # ASCII only: a name may hold what UTF-8 does not encode. "<" is escaped, as "</script>" or "<!--" would end or change the element.
    parts["data"] = json.dumps(data, default=str, separators=(",", ":")).replace("<", "\\u003c")
    template = (folder / "template.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template)


def _folds(fused: Sequence[Mapping[str, Any]], declined: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The records that share a row of the table, as in the printed one: positions among all fused, then all declined."""
    verdicts = [[f"{way['op']}: {way['verdict']}" for way in record["candidates"]] for record in fused]
    done = folded(likeness(record["chain"], record["op"], [record["choice"], *told]) for record, told in zip(fused, verdicts))
    left = folded(likeness(record["chain"], record["reached"], [record["reason"]]) for record in declined)
    return done + [[len(fused) + position for position in group] for group in left]


def _node(node: fx.Node, stacks: dict[str, int]) -> dict[str, Any]:
    trace = stack_of(node)
    held = attribute_of(node) if node.op == "get_attr" else None
    body = body_of(node) is not None
    value = held if isinstance(held, torch.Tensor) and value_of(node) is None else value_of(node)
    return {
        "name": node.name,
        "kind": "call" if body else _kind(node),
        "target": _target(node),
        "arguments": _arguments(node),
        "values": [_value(item) for item in _items(value)],
        "inputs": [source.name for source in node.all_input_nodes],
        "at": location_of(node),
        "stack": stacks.setdefault(trace, len(stacks)) if trace else -1,
        "body": body,
        "stands_for": list(node.meta.get(STANDS_FOR, ())),
    }


def _kind(node: fx.Node) -> str:
    if torch_private.is_state(node):
        return "state"
    return {"placeholder": "input", "output": "output"}.get(node.op, "call")


def _target(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if hasattr(node.target, "namespace"):
        return f"{node.target.namespace}::{node.target.__name__.removesuffix('.default')}"
    return getattr(node.target, "__name__", str(node.target))


def _arguments(node: fx.Node) -> str:
    if node.op == "placeholder":
        return ""
    text = ", ".join([*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())])
    return text if len(text) <= SHOWN_ARGUMENTS else f"{text[:SHOWN_ARGUMENTS]} ..."


def _items(value: Any) -> list[Any]:
    """The leaves of a value; nothing where the graph knows none."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if leaf is not None and not isinstance(leaf, torch.nn.Module)]


def _value(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"text": str(value)}
    strided = value.layout is torch.strided
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(map(str, value.shape)),
        "stride": list(map(str, value.stride())) if strided else [str(value.layout)],
        "device": str(value.device),
    }
