"""Calling what a chain brings: its functions are somebody else's code, and what is wrong with one of them is said in a sentence that names it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from . import torch_private
from .command import in_a_word
from .sources import place

if TYPE_CHECKING:
    from .chain import Condition
    from .match import Match

# A function that yields more conditions than this is taken for one that never ends.
MOST_CONDITIONS = 1000

_END = object()

PAIRS = "it should yield pairs of a bool and the sentence for when it is False"


class PassError(RuntimeError):
    """A mistake in a chain (in its pass, not in the user's model): which function, where it stands, what it did and what it should.

    match: the match that it was called for, where it is known. node: the node that it was called for, where there is no match yet.
    """

    def __init__(self, chain: str, role: str, at: str, did: str, expected: str) -> None:
        super().__init__(f"a mistake in the chain {chain}: its {role}{f' at {at}' if at else ''} {did}; {expected}")
        self.match: Match | None = None
        self.node: fx.Node | None = None


class Guarded:
    """A chain's function: called as it is, but what is wrong with it is raised as PassError. role: what it is to the chain ("requires")."""

    def __init__(self, chain: str, role: str, function: Callable[..., Any]) -> None:
        self._chain, self._role, self._function = chain, role, function

    def __call__(self, expected: str, *args: Any, **kwargs: Any) -> Any:
        """What the function returns. expected: what it should do, for the sentence where it raises."""
        return self._result_of(self._function, expected, *args, **kwargs)

    def conditions(self, **calls: Any) -> Iterator[Condition]:
        """The pairs that the function yields."""
        yielded = self(PAIRS, **calls)
        if not isinstance(yielded, Iterable):
            raise self.mistake(f"returns {reprlib.repr(yielded)}", PAIRS)
        iterator = iter(yielded)
        for _ in range(MOST_CONDITIONS):
            condition = self._result_of(next, PAIRS, iterator, _END)
            if condition is _END:
                return
            yield self._checked(condition)
        raise self.mistake(f"yields more than {MOST_CONDITIONS} conditions", "it should come to an end")

    def mistake(self, did: str, expected: str, error: BaseException | None = None) -> PassError:
        """What to raise. error: what it raised, if it did: its line is the one that is named."""
        return PassError(self._chain, self._role, place(self._function, error), did, expected)

    def _result_of(self, function: Callable[..., Any], expected: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (PassError, *torch_private.Restart):
            raise
        except Exception as error:
            raise self.mistake(f"raises {in_a_word(error)}", expected, error) from error

    def _checked(self, condition: Any) -> Condition:
        pair = isinstance(condition, (tuple, list)) and len(condition) == 2
        if pair and isinstance(condition[0], torch.SymBool):
            sizes = "it should ask torch.fx.experimental.symbolic_shapes.statically_known_true"
            raise self.mistake(f"yields {condition[0]}, which depends on sizes that vary", sizes)
        if not pair or not isinstance(condition[0], bool) or not isinstance(condition[1], str):
            raise self.mistake(f"yields {reprlib.repr(condition)}", PAIRS)
        if not condition[0] and not condition[1].strip():
            raise self.mistake("yields False with an empty sentence", "it should say why the chain is not taken and what to do")
        return condition
