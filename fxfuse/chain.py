"""What a chain is: its structure, its conditions, its implementations. `passes/` holds one file a chain; the engine knows none of them.

Conditions, costs and replacements receive the matched calls by the names of the chain's steps, and nothing else passes between them:

    CHAIN = Chain(
        name="conv_gelu_pool",
        steps=(Step("conv", "conv"), Step("gelu", "gelu"), Step("pool", "adaptive_avg_pool", "mean")),
        requires=requires,                  # requires(conv, gelu, pool) yields (holds, sentence)
        implementations=(Implementation(op="gelu_pool", takes=..., replace=..., cost=..., description="what it takes, for people"),),
        description="what the chain is, for people",
    )

A chain that lies outside this package is written in the same way and added with `fxfuse.register` (see `fxfuse.registry`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import words
from .cost import BackwardCost, Cost
from .ops import NAMESPACE
from .sources import hash_of_sources
from .vocabulary import Vocabulary, Word

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

    op: the op's name as the report shows it: "namespace::name", or the name alone of an op of fxfuse's own, in the `fxfuse` namespace. Where
    the chain's result needs a gradient `<op>_training`, an op of the same arguments that autograd knows, takes its place; without such an op
    the chain is left alone there.
    takes: yields (holds, sentence); the first that does not hold is why this implementation is passed over.
    replace: replace(emit, ...) emits the replacement with `emit(op, *args)` (see `fxfuse.Emitter`) and returns the node whose value is the
    chain's result, of the same shape, dtype and device.
    cost: the `Cost`: bytes, kernels and operations of this implementation and of what Inductor would do instead. Without one the
    implementation is taken wherever it can be, under `fxfuse.select="auto"` too.
    description: what it takes, as `fxfuse passes` shows it.
    backward_cost: backward_cost(training, ...) returns the `BackwardCost`, what a training step adds to the cost, for a `Training` that names the
    tensors that need a gradient. Without one the cost of the forward alone decides in training too.
    """

    op: str
    takes: Callable[..., Iterable[Condition]]
    replace: Callable[..., fx.Node]
    cost: Callable[..., Cost] | None = None
    description: str = ""
    backward_cost: Callable[..., BackwardCost] | None = None

    @property
    def qualified(self) -> str:
        """The op's name with its namespace."""
        return self.op if "::" in self.op else f"{NAMESPACE}::{self.op}"

    @property
    def is_own(self) -> bool:
        """Whether the op is one of fxfuse's, whose kernels are in its library."""
        return self.qualified.startswith(f"{NAMESPACE}::")


@dataclass(frozen=True)
class Chain:
    """A chain: `steps` in the order the value flows, the first being the anchor; conditions; implementations, best first.

    dims: numbers of spatial dimensions of the anchor convolution that can start this chain at all; None: any, or no convolution.
    description: what the chain is, as `fxfuse passes` shows it.
    words: what the steps accept beside the words that every chain knows (`fxfuse/words.py`). They hold for this chain alone.
    version: raise it when what the op computes changes in files other than those of the chain's functions, as in a C++ library: compilation
    caches know an op by its name, and this and the content of those files are what tells a new one from an old one.
    """

    name: str
    steps: tuple[Step, ...]
    requires: Callable[..., Iterable[Condition]]
    implementations: tuple[Implementation, ...]
    dims: tuple[int, ...] | None = None
    description: str = ""
    words: tuple[Word, ...] = ()
    version: str = ""

    @property
    def vocabulary(self) -> Vocabulary:
        """The words by which this chain reads a graph."""
        return words.vocabulary(self.words)

    @property
    def over(self) -> str:
        """The convolution's dimensions, for people: " over 1, 2 or 3 dims"; empty where they do not matter."""
        if self.dims is None:
            return ""
        *others, last = map(str, self.dims)
        return f" over {', '.join(others)} or {last} dims" if others else f" over {last} dims"

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells this chain from another version of it: a hash of `version` and of the files that its functions are written in."""
        of_each = ((i.takes, i.replace, i.cost, i.backward_cost) for i in self.implementations)
        return f"{self.name} {hash_of_sources((self.requires, *itertools.chain(*of_each)), self.version)}"


def first_failure(conditions: Iterable[Condition]) -> str | None:
    """The sentence of the first condition that does not hold; None if all hold. Later conditions may rely on earlier ones."""
    return next((sentence for holds, sentence in conditions if not holds), None)


def chains() -> tuple[Chain, ...]:
    """Every chain, in the order in which they are looked for: registered ones, the latest first; then those of `fxfuse.passes` by file name."""
    from .registry import registered

    return (*registered(), *builtin_chains())


def builtin_chains() -> tuple[Chain, ...]:
    """The chains of `fxfuse.passes`."""
    return importlib.import_module("fxfuse.passes").CHAINS


def chain_names() -> tuple[str, ...]:
    """Names of all chains, as the option `fxfuse.passes` and the counters use them."""
    return tuple(chain.name for chain in chains())
