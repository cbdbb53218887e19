"""Tests of a model that fail, and say why, as soon as a chain in it is no longer fused. No kernel runs and nothing is compiled.

    pytest --fxfuse-coverage examples/coverage_test.py        # or: python examples/coverage_test.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxfuse import testing

# The model alone decides, on every machine alike; without it, also what pays on the device at these sizes.
ALWAYS = {"fxfuse.select": "always"}


class Head(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 3)
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.conv(x))
        if self.dropout is not None:
            y = self.dropout(y)
        return F.adaptive_avg_pool2d(y, 1).flatten(1)


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    with torch.no_grad():  # as in inference: with gradients on, other ops take the chains' place
        yield torch.randn(2, 8, 32, 32)


def test_the_head_is_fused(x: torch.Tensor) -> None:
    testing.assert_fused(Head(), (x,), {"conv_gelu_pool": 1}, options=ALWAYS)


def test_the_same_by_the_fixture_for_every_size(x: torch.Tensor, assert_fused) -> None:
    assert_fused(Head(), (x,), {"conv_gelu_pool": 1}, options=ALWAYS, dynamic=True)


def test_what_is_said_when_somebody_parts_the_chain(x: torch.Tensor) -> None:
    with pytest.raises(AssertionError) as failure:
        testing.assert_fused(Head(dropout=0.1), (x,), {"conv_gelu_pool": 1}, options=ALWAYS)
    print(failure.value)
    sentence = "expected conv_gelu_pool to be fused 1 time, found it fused 0 times and declined 1 time"
    assert str(failure.value).startswith(sentence) and "gelu is followed by" in str(failure.value)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-s", "--fxfuse-coverage", "-W", "ignore::pytest.PytestAssertRewriteWarning"]))
