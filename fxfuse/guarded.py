"""Calling what a chain brings: its functions are somebody else's code, and what is wrong with one of them is said in a sentence that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import fx

from . import torch_private
from .sources import place

if TYPE_CHECKING:
    from .chain import Condition
    from .match import Match

# A function that yields more conditions than this is taken for one that never ends.
MOST_CONDITIONS = 1000

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
        try:
            return self._function(*args, **kwargs)
        except (PassError, *torch_private.Restart):
            raise
        except Exception as error:
            raise self._raised(error, expected) from error

    def conditions(self, **calls: Any) -> Iterator[Condition]:
        """The pairs that the function yields."""
        yielded = self(PAIRS, **calls)
        if not isinstance(yielded, Iterable):
            raise self.mistake(f"returns {yielded!r}", PAIRS)
        iterator = iter(yielded)
        for _ in range(MOST_CONDITIONS):
            try:
                condition = next(iterator)
            except StopIteration:
                return
            except torch_private.Restart:
                raise
            except Exception as error:
                raise self._raised(error, PAIRS) from error
            yield self._checked(condition)
        raise self.mistake(f"yields more than {MOST_CONDITIONS} conditions", "it should come to an end")

    def mistake(self, did: str, expected: str, error: BaseException | None = None) -> PassError:
        """What to raise. error: what it raised, if it did: its line is the one that is named."""
        return PassError(self._chain, self._role, place(self._function, error), did, expected)

    def _raised(self, error: Exception, expected: str) -> PassError:
        return self.mistake(f"raises {in_a_line(error)}", expected, error)

    def _checked(self, condition: Any) -> Condition:
        pair = isinstance(condition, (tuple, list)) and len(condition) == 2
        if pair and type(condition[0]).__name__ == "SymBool":
            sizes = "it should ask torch.fx.experimental.symbolic_shapes.statically_known_true"
            raise self.mistake(f"yields {condition[0]}, which depends on sizes that vary", sizes)
        if not pair or not isinstance(condition[0], bool) or not isinstance(condition[1], str):
            raise self.mistake(f"yields {condition!r}", PAIRS)
        if not condition[0] and not condition[1].strip():
            raise self.mistake("yields False with an empty sentence", "it should say why the chain is not taken and what to do")
        return condition


def in_a_line(error: BaseException) -> str:
    """An exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
