"""Scripts that rebuild one chain of a compiled graph alone: same ops, shapes, dtypes, strides, devices and state, random data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import precision, registry, torch_private
from .bodies import bodies_of
from .cut import cut_out, inputs_of
from .document import Repro
from .options import Options
from .printing import one_line
from .report import Declined, Fused, Report

SCRIPT = '''"""{title}

Where it stands: {where}.
Rebuilds this chain alone, with random data in the shapes, dtypes and strides that it had (sizes that vary: those of the example inputs),
and compares eager, Inductor and fxfuse: time, and error against fp64. Exit code 1 if fxfuse's error is too large.
"""

import sys

{imports}
from fxfuse.compare import Setting, compare, tensor


{code}

def inputs():
    """Fresh inputs, the same at every call."""
    torch.manual_seed(0)
    return [
{tensors}
    ]


SETTING = Setting(
{setting}
)

if __name__ == "__main__":
    sys.exit(compare(chain, inputs, SETTING))
'''


@dataclass(frozen=True)
class State:
    """What rules how ops run and is no part of the graph: read while it is compiled."""

    grad: bool
    tf32: bool
    autocast: Mapping[str, torch.dtype]


def state() -> State:
    """The state of the compilation that is going on."""
    types = [type for type in ("cuda", "cpu") if torch.is_autocast_enabled(type)]
    return State(torch.is_grad_enabled(), precision.current() == "tf32", {type: torch.get_autocast_dtype(type) for type in types})


def repros(graph: fx.Graph, report: Report, options: Options, inductor: Mapping[str, Any]) -> list[Repro]:
    """A script for each fused chain of `graph`, which is what its module was before rewriting, then one for each declined chain."""
    made, by_name = [], {body.name: body for body in bodies_of(graph)}
    for record in (*report.fused, *report.declined):
        body = by_name[record.body]
        with body.state():
            text = script(body.graph, record, options, inductor)
        made.append(Repro(f"repro_{len(made)}_{record.chain}.py", None, text[0]) if text[0] else Repro(None, text[1]))
    return made


def script(graph: fx.Graph, record: Fused | Declined, options: Options, inductor: Mapping[str, Any]) -> tuple[str, str | None]:
    """The script's text, or an empty one and the sentence why there is none."""
    by_name = {node.name: node for node in graph.nodes}
    nodes = [by_name[name] for name in record.nodes]
    if any(node.op == "call_module" for node in nodes):
        return "", "the chain calls modules, which a script does not hold"
    cut = cut_out(nodes, example_sizes=True)
    if isinstance(cut, str):
        return "", cut
    unknown = next((chain.name for chain in registry.registered() if registry.source_of(chain) is None), None)
    if unknown is not None:
        return "", f"the chain {unknown} is written in no file that a script could load"
    if not all(torch_private.is_plain(value) and value.layout is torch.strided for value in inputs_of(cut)):
        return "", "an input is not a plain dense tensor"
    fields = {
        "title": in_docstring(_title(record)),
        "where": in_docstring(record.location or "not known, the graph holds no stack trace"),
        "imports": torch_private.imports_of(cut),
        "code": _code(cut),
        "tensors": "\n".join(f"        {_tensor(node)}," for node in cut.find_nodes(op="placeholder")),
        "setting": "\n".join(f"    {name}={value!r}," for name, value in _setting(nodes[0], options, inductor).items()),
    }
    return SCRIPT.format(**{name: value.rstrip("\n") + "\n" * (name == "code") for name, value in fields.items()}), None


def in_docstring(text: str) -> str:
    """The text as it stands on one line of a docstring, which then says just that text: a path or a reason may hold any character."""
    return one_line(text.replace("\\", "\\\\").replace('"', '\\"'))


def _title(record: Fused | Declined) -> str:
    verdict = f"became {record.op}: {record.choice}" if isinstance(record, Fused) else f"was not fused: {record.reason}"
    return f"{record.chain} {verdict}."


def _code(cut: fx.Graph) -> str:
    """The graph as a function `chain`."""
    # Only the definition begins at column 0: a comment in its body may quote a user's line that looks like one.
    return re.sub(r"^def forward\(\s*self,?\s*", "def chain(\n    ", torch_private.readable(cut), count=1, flags=re.MULTILINE)


def _tensor(node: fx.Node) -> str:
    value = node.meta["example_value"]
    shape, stride = (tuple(map(torch_private.hint, sizes)) for sizes in (value.shape, value.stride()))
    given = [repr(shape), repr(stride), str(value.dtype), repr(str(value.device))]
    offset = torch_private.hint(value.storage_offset())
    given += [f"offset={offset}"] if offset else []
    given += ["requires_grad=True"] if value.requires_grad else []
    return f"tensor({', '.join(given)})"


def _setting(anchor: fx.Node, options: Options, inductor: Mapping[str, Any]) -> dict[str, Any]:
    now = state()
    known = {name: value for name, value in inductor.items() if _is_literal(value)}
    return {
        "select": options.select,
        "backward": options.backward,
        "passes": options.passes,
        "mode": options.mode,
        "inductor": known,
        "grad": now.grad,
        "tf32": now.tf32,
        "chains": {chain.name: registry.source_of(chain) for chain in registry.registered()},
        "autocast": [(type, _short(dtype), True) for type, dtype in now.autocast.items()] + list(_regions(anchor)),
    }


def _is_literal(value: Any) -> bool:
    """Whether Python reads the value's repr as that value; not that of an infinite number, an enum's member or a function."""
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, TypeError):
        return False


def _regions(anchor: fx.Node) -> Iterator[tuple[str, str | None, bool]]:
    """The autocast regions of the graph that are open where the chain begins, outermost first."""
    opened: dict[fx.Node, Sequence[Any]] = {}
    for node in anchor.graph.nodes:
        if node is anchor:
            break
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            opened[node] = node.args
        elif name == "_exit_autocast":
            opened.pop(node.args[0], None)
    for type, dtype, enabled, *_ in opened.values():
        yield type, None if dtype is None else _short(dtype), enabled


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
