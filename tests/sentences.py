"""The sentences with which a chain is declined, as templates with … for each value: those of the code, and those that fxfuse/why_not.md explains."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fxfuse
import fxfuse.passes
from fxfuse.report import Fused, Report

PAGE = Path(fxfuse.__file__).parent / "why_not.md"
SOURCES = [path for package in (fxfuse, fxfuse.passes) for path in sorted(Path(package.__file__).parent.glob("*.py"))]

# Where sentences are in the code: behind the truth or the node that these generators yield, at this position of these calls, and in what
# these functions return.
GENERATORS = ("Iterator[Condition]", "Iterator[Refusal]")
CALLS = {"declined": 2, "super().__init__": 0, "Choice": 1, "Weighed": 1, "BuildError": 0, "passed_over.append": 0}
FUNCTIONS = ("_stopped", "_mismatch", "_uncaptured")
# First arguments of such calls that say yes.
TAKEN = ("True", "fastest")

# What the sentences of implementations are wrapped in, and what stands in front of a prediction where timing was asked for.
WRAPPED = re.compile(r"(left to Inductor: )?(not timed \(.*\); )?")


def of_the_code() -> list[str]:
    """The template of every sentence in the sources, in their order; one that two places share comes twice."""
    found = (template for path in SOURCES for place in _places(ast.parse(path.read_text())) for template in _templates(place))
    return [template for template in found if re.search(r"\w", template)]


def of_the_page() -> list[str]:
    """The template of every row of the page's tables."""
    return re.findall(r"^\| `(.+?)` \| .+ \|$", PAGE.read_text(), re.MULTILINE)


def matching(sentence: str, templates: list[str]) -> list[str]:
    """The templates that a sentence is made from: one, if they are kept apart."""
    return [template for template in templates if re.fullmatch(".*".join(map(re.escape, template.split("…"))), sentence, re.DOTALL)]


def told_by(report: Report) -> list[str]:
    """Every sentence of a report: of a candidate's implementations where it came to weighing them by the rule, else its reason."""
    told = [] if report.stopped is None else [report.stopped]
    for record in (*report.fused, *report.declined):
        verdicts = [WRAPPED.sub("", candidate.verdict, count=1) for candidate in record.candidates]
        weighed = verdicts and not any(candidate.measured for candidate in record.candidates)
        told += verdicts if weighed or isinstance(record, Fused) else [record.reason]
    return told


def _places(module: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) in GENERATORS:
            yielded = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Yield))
            yield from (pair.elts[1] for pair in yielded if isinstance(pair, ast.Tuple))
        elif isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
            yield from (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return))
        elif isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "report.stopped":
            yield node.value
        elif isinstance(node, ast.keyword) and node.arg == "stopped":
            yield node.value


def _of_call(call: ast.Call) -> Iterator[ast.expr]:
    index = CALLS.get(ast.unparse(call.func))
    if index is not None and index < len(call.args) and ast.unparse(call.args[0]) not in TAKEN:
        yield call.args[index]


def _templates(place: ast.expr) -> Iterator[str]:
    """The templates of an expression: of both branches of a conditional one, none of a name."""
    if isinstance(place, ast.IfExp):
        yield from (*_templates(place.body), *_templates(place.orelse))
    elif isinstance(place, ast.Constant) and isinstance(place.value, str):
        yield place.value
    elif isinstance(place, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in place.values)
        yield re.sub("…+", "…", "".join(parts))
