"""What is printed: tables that fit the screen, in characters that standard output has, and sentences that say the same told once.

No torch is imported here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable, Iterable, Sequence

# What differs between sentences that say the same of different nodes: the counts behind nodes' names, and numbers or symbolic sizes.
NAME_COUNT = re.compile(r"_\d+(?![A-Za-z0-9])")
NUMBER = re.compile(r"(?<![A-Za-z0-9_])[su]?\d+(\.\d+)?(e[+-]?\d+)?(?![A-Za-z_])")


def printable(text: str) -> str:
    """The text as standard output can show it: characters that its encoding lacks come as escapes, such as "\\xe9"."""
    # What is captured, as by pytest, is printed in the end on the stream that was there before.
    for encoding in (getattr(stream, "encoding", None) for stream in (sys.stdout, sys.__stdout__)):
        if encoding:
            text = text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def one_line(text: str) -> str:
    """The text on one line that any encoding of Unicode holds: line ends, control characters and lone surrogates (of a file name that is not
    UTF-8) come as Python's escapes."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def times(number: int) -> str:
    """`39 ×`, with a letter x where standard output has no such sign."""
    return f"{number} {'×' if printable('×') == '×' else 'x'}"


def wrapped(
    rows: Iterable[Sequence[object]], headers: Sequence[str], widths: Sequence[int | None], aligned: Sequence[str] | None = None
) -> str:
    """A table whose columns are at most so wide, drawn in characters that standard output has. aligned: "left" or "right" for each column, by
    default left."""
    from tabulate import tabulate

    cells = [[printable(str(cell)) for cell in row] for row in rows]
    style = "simple_grid" if printable("─") == "─" else "grid"
    # A module's path such as "1.10" is no number.
    return tabulate(cells, headers=headers, tablefmt=style, maxcolwidths=list(widths), colalign=aligned, disable_numparse=True)


def fitting(rows: Sequence[Sequence[object]], headers: Sequence[str], widths: Sequence[int | None], lines: int) -> tuple[str, int]:
    """The table of as many of the rows as so many lines have room for, the first at least, and how many they are."""
    # No row has less than a line and a rule.
    for count in range(min(len(rows), lines // 2), 1, -1):
        table = wrapped(rows[:count], headers, widths)
        if height(table) <= lines:
            return table, count
    return wrapped(rows[:1], headers, widths), 1


def height(text: str) -> int:
    """How many lines a text has."""
    return text.count("\n") + 1


def alike(sentence: str) -> str:
    """What a sentence has in common with those that differ from it in numbers, or in which of equal nodes (`add`, `add_3`) they name."""
    return NUMBER.sub("#", NAME_COUNT.sub("", sentence))


def likeness(chain: str, got_to: str, told: Iterable[str]) -> tuple[str, ...]:
    """What candidates that share a row have in common: the chain, its op or how far the match got, what the sentences say."""
    return chain, got_to, *map(alike, told)


def folded(keys: Iterable[Hashable]) -> list[list[int]]:
    """The positions of each key, those of the commonest key first."""
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return sorted(groups.values(), key=len, reverse=True)
