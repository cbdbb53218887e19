"""What a chain is: its structure, its conditions, its implementations. `passes/` holds one file a chain; the engine knows none of them.

Conditions, costs and replacements receive the matched calls by the names of the chain's steps, and nothing else passes between them:

    CHAIN = Chain(
        name="conv_gelu_pool",
        steps=(Step("conv", "conv"), Step("gelu", "gelu"), Step("pool", "adaptive_avg_pool", "mean")),
        requires=requires,                  # requires(conv, gelu, pool) yields (holds, sentence)
        implementations=(Implementation(op="gelu_pool", takes=..., replace=..., cost=..., description="what it takes, for people"),),
        description="what the chain is, for people",
    )
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .choose import Cost

if TYPE_CHECKING:
    from torch import fx

Condition = tuple[bool, str]


@dataclass(frozen=True)
class Step:
    """One step of a chain: the name under which the pass sees it, and the words that it accepts."""

    name: str
    words: tuple[str, ...]
    optional: bool = False

    def __init__(self, name: str, *words: str, optional: bool = False) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "optional", optional)


@dataclass(frozen=True)
class Implementation:
    """One way to compute a chain.

    op: the op's name in the `fxfuse` namespace, which the report shows.
    takes: yields (holds, sentence); the first that does not hold is why this implementation is passed over.
    replace: emits the replacement and returns the node whose value is the chain's result.
    cost: bytes, kernels and operations of this implementation and of what Inductor would do instead.
    description: what it takes, as `fxfuse passes` shows it.
    """

    op: str
    takes: Callable[..., Iterable[Condition]]
    replace: Callable[..., fx.Node]
    cost: Callable[..., Cost]
    description: str = ""


@dataclass(frozen=True)
class Chain:
    """A chain: `steps` in the order the value flows, the first being the anchor; conditions; implementations, best first.

    dims: numbers of spatial dimensions of the anchor convolution that can start this chain at all.
    description: what the chain is, as `fxfuse passes` shows it.
    """

    name: str
    steps: tuple[Step, ...]
    requires: Callable[..., Iterable[Condition]]
    implementations: tuple[Implementation, ...]
    dims: tuple[int, ...] = (1, 2, 3)
    description: str = ""

    @property
    def over(self) -> str:
        """The convolution's dimensions, for people: "over 1, 2 or 3 dims"."""
        *others, last = map(str, self.dims)
        return f"over {', '.join(others)} or {last} dims" if others else f"over {last} dims"


def first_failure(conditions: Iterable[Condition]) -> str | None:
    """The sentence of the first condition that does not hold; None if all hold. Later conditions may rely on earlier ones."""
    return next((sentence for holds, sentence in conditions if not holds), None)


def chains() -> tuple[Chain, ...]:
    """Every chain in `fxfuse.passes`, by file name."""
    return importlib.import_module("fxfuse.passes").CHAINS


def chain_names() -> tuple[str, ...]:
    """Names of all chains, as `fxfuse.passes` and the counters use them."""
    return tuple(chain.name for chain in chains())
