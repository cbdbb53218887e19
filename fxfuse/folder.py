"""Folders that appear as a whole or not at all, whoever else writes beside them."""

from __future__ import annotations

import itertools
import logging
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

_unwritable: set[Path] = set()


def write(directory: Path, name: str, files: Mapping[str, str]) -> None:
    """Writes `directory/name` with these texts; `name-2`, ... where that is there already (of a process with the same pid elsewhere).

    Where nothing can be written, that is one warning a directory.
    """
    partial = directory / f".{name}-{uuid.uuid4().hex}.partial"
    try:
        partial.mkdir(parents=True)
        for file, text in files.items():
            (partial / file).write_text(text, encoding="utf-8", errors="backslashreplace")
        _rename(partial, directory / name)
    except OSError as error:
        if directory not in _unwritable:
            _unwritable.add(directory)
            log.warning("fxfuse: graphs are not dumped, %s cannot be written: %s", directory, error)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, target: Path) -> None:
    for free in itertools.chain([target], (target.with_name(f"{target.name}-{n}") for n in itertools.count(2))):
        if free.exists():
            continue
        try:
            partial.rename(free)
            return
        except OSError:
            if not free.exists():  # not taken by another process just now: a real failure
                raise
