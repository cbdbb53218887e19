"""Every sentence with which a chain is declined: a case triggers it, and fxfuse/why_not.md says what to change.

Sentences are collected from the sources and compared as templates; the cases are `near_misses`, `installations`, the twins of the spellings
and the convolutions that the fused ops refuse.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import installations
import near_misses
import pytest
import sentences
import spellings_conv_gelu_pool
import spellings_conv_norm_pool_gelu
import torch
from convolutions import H200, REFUSED, graph_of
from models import fuse
from spellings import NO_CANDIDATE, Row

from fxfuse import fused
from fxfuse.toolchain import BuildError

ROWS = [*spellings_conv_norm_pool_gelu.ROWS, *spellings_conv_gelu_pool.ROWS]
TWINS = [row for row in ROWS if row.declined not in ("", NO_CANDIDATE)]


@cache
def told_of_near_miss(piece: str) -> list[str]:
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "gpu_of", lambda device: H200 if device.type == "cuda" else None)
        return sentences.told_by(near_misses.CASES[piece](patch))


@cache
def told_of_installation(piece: str) -> str:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder, pytest.raises(BuildError) as error:
        installations.CASES[piece](patch, Path(folder))
    assert error.value.mend
    return error.value.sentence


def told_of_twin(row: Row) -> list[str]:
    gm = row.graph()
    with row.around():
        return sentences.told_by(fuse(gm)[1])


def told_of_refused(name: str) -> list[str]:
    run, _, *shapes = REFUSED[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "gpu_of", lambda device: H200)
        return sentences.told_by(fuse(graph_of(run, *shapes))[1])


@pytest.mark.parametrize("piece", near_misses.CASES)
def test_near_miss(piece: str) -> None:
    assert any(piece in sentence for sentence in told_of_near_miss(piece))


@pytest.mark.parametrize("piece", installations.CASES)
def test_installation(piece: str) -> None:
    assert piece in told_of_installation(piece)


def test_the_page_has_one_row_for_each_sentence() -> None:
    code, rows = set(sentences.of_the_code()), sentences.of_the_page()
    assert len(code) > 80
    assert code - set(rows) == set(), "sentences without a row"
    assert set(rows) - code == set(), "rows whose sentence is gone"
    assert len(rows) == len(set(rows)), "two rows for a sentence"


def test_every_sentence_has_a_case() -> None:
    told = [sentence for piece in near_misses.CASES for sentence in told_of_near_miss(piece)]
    told += [told_of_installation(piece) for piece in installations.CASES]
    told += [sentence for row in TWINS for sentence in told_of_twin(row)]
    told += [sentence for name in REFUSED for sentence in told_of_refused(name)]
    templates = sorted(set(sentences.of_the_code()))
    made_from = {sentence: sentences.matching(sentence, templates) for sentence in told if sentence != 'select="always"'}
    assert {sentence: found for sentence, found in made_from.items() if len(found) != 1} == {}, "sentences that are not collected, or not told apart"
    assert set(templates) - {found[0] for found in made_from.values()} == set(), "no case triggers these"
