"""What the CPU ops do not take: each call raises a RuntimeError with its sentence, and every sentence of their sources has a call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from refusals import REFUSED, TAKEN

from fxfuse import library
from fxfuse.recipe import beside

pytestmark = pytest.mark.compiler

# Files of the CPU library that refuse calls, and the one sentence that takes a tensor of another device.
SOURCES = ("common/args.h", "conv_gelu_pool.h", "gelu_pool.cpp", "norm_pool_gelu.cpp", "conv_gelu_pool.cpp", "conv_norm_pool_gelu.cpp")
NEEDS_A_GPU = "… and input are on different devices: move them to one."


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    library.load("cpu")


def told(op: str, arguments: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as refusal:
        getattr(torch.ops.fxfuse, op)(*{**TAKEN[op], **arguments}.values())
    return str(refusal.value)


@pytest.mark.parametrize("op", TAKEN)
def test_taken(op: str) -> None:
    assert getattr(torch.ops.fxfuse, op)(*TAKEN[op].values()).isfinite().all()


@pytest.mark.parametrize(("op", "arguments", "sentence"), REFUSED, ids=[f"{op}: {sentence}" for op, _, sentence in REFUSED])
def test_refused(op: str, arguments: dict[str, Any], sentence: str) -> None:
    assert sentence in told(op, arguments)


def test_every_sentence_has_a_call() -> None:
    templates = [template for source in SOURCES for template in sentences((beside("csrc") / source).read_text(encoding="utf-8"))]
    assert len(templates) > 30
    messages = all_told()
    missing = [template for template in templates if not any(matches(template, message) for message in messages)]
    assert set(missing) == {NEEDS_A_GPU}


@cache
def all_told() -> list[str]:
    return [told(op, arguments) for op, arguments, _ in REFUSED]


def matches(template: str, message: str) -> bool:
    return re.search(".*".join(map(re.escape, template.split("…"))), message, re.DOTALL) is not None


def sentences(source: str) -> Iterator[str]:
    """The template of every `require(condition, part, …);` of a C++ source, with … for each part that is no string."""
    for call in re.finditer(r"\brequire\(", source):
        parts = list(_arguments(source, call.end()))[1:]
        yield re.sub("…+", "…", "".join(part.strip('"') if part.startswith('"') else "…" for part in parts))


def _arguments(source: str, begin: int) -> Iterator[str]:
    """The arguments of a call, from behind its opening parenthesis on."""
    depth, start = 0, begin
    for token in re.finditer(r'"(?:\\.|[^"\\])*"|[()\[\]{},]', source[begin:]):
        if depth == 0 and token[0] in (",", ")"):
            yield source[start : begin + token.start()].strip()
            start = begin + token.end()
            if token[0] == ")":
                return
        depth += (token[0] in "([{") - (token[0] in ")]}")
