"""The record beside a library: what it was built from, and the size and hash of its content.

Opening a library of which a part is missing ends the process with SIGBUS, so both are compared before it is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .recipe import Recipe, is_architecture, library_name, record_path
from .toolchain import BuildError

REBUILD = "delete its folder"


@dataclass(frozen=True)
class Record:
    """What a library's record says of it; see Recipe.record. size: bytes. sha256: hexadecimal, of the whole file."""

    kind: str
    machine: str
    architectures: tuple[str, ...]
    sources: str
    oldest_torch: tuple[int, ...]
    cuda: str | None
    key: str
    size: int
    sha256: str


def write_record(folder: Path, made: Recipe) -> None:
    """Writes the record of the library that was built into a folder."""
    library = folder / library_name(made.kind)
    record = {**made.record(), "key": made.key, "size": library.stat().st_size, "sha256": _sha256(library)}
    record_path(folder, made.kind).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path, kind: str, mend: str = REBUILD) -> Record:
    """The record of the library in a folder; raises BuildError if it is not there, no JSON, or not what a builder writes."""
    try:
        return _record(json.loads(record_path(folder, kind).read_text(encoding="utf-8")), kind)
    except (OSError, ValueError) as error:
        raise BuildError(f"{folder / library_name(kind)} has no record beside it that can be read ({_why(error)})", mend) from error


def check_whole(path: Path, record: Record, mend: str = REBUILD) -> None:
    """Raises BuildError if a library is not, byte for byte, what its record was written for."""
    try:
        size = path.stat().st_size
        if size != record.size:
            raise ValueError(f"it has {size} bytes and was built with {record.size}")
        if _sha256(path) != record.sha256:
            raise ValueError("its content is not what was built")
    except (OSError, ValueError) as error:
        raise BuildError(f"{path} is damaged ({_why(error)})", mend) from error


def is_built(folder: Path, kind: str, tell: Callable[[str], object]) -> bool:
    """Whether a folder of the cache holds a whole library. `tell` gets the sentence about one that must be built anew.

    Raises OSError if the folder may not be read.
    """
    try:
        check_whole(folder / library_name(kind), read_record(folder, kind))
    except BuildError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, (FileNotFoundError, IsADirectoryError)):
            raise error.__cause__ from None
        if os.path.lexists(folder):
            tell(error.sentence)
        return False
    return True


def _record(found: Any, kind: str) -> Record:
    """A record from its JSON; raises ValueError where something else stands in it."""
    if not isinstance(found, Mapping):
        raise ValueError(f"it is a {type(found).__name__}, not a table")
    expected = {
        "kind": lambda value: value == kind,
        **dict.fromkeys(("machine", "sources", "key", "sha256"), lambda value: isinstance(value, str)),
        "architectures": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "oldest_torch": lambda value: isinstance(value, list) and all(isinstance(number, int) for number in value),
        "cuda": lambda value: value is None or isinstance(value, str),
        "size": lambda value: isinstance(value, int),
    }
    for name, is_right in expected.items():
        if name not in found:
            raise ValueError(f"it says no {name}")
        if not is_right(found[name]):
            raise ValueError(f"its {name} is {found[name]!r}")
    if kind == "cuda" and not all(map(is_architecture, found["architectures"])):
        raise ValueError(f"its architectures are {found['architectures']}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items() if name in expected}
    return Record(**values)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
