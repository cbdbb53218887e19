"""What the commands share: bad input as one line, and the files that they write. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, NoReturn


class CommandError(Exception):
    """Something that was asked for cannot be done; the message is one line for the user. code: the command's exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, without the usage before it."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        """Nothing stays unknown: a command would leave it to the parser above it, which names its own --help."""
        known, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def in_a_word(error: BaseException) -> str:
    """One line that says what went wrong; "out of memory" for that, which torch says at length."""
    import torch

    error = getattr(error, "inner_exception", error)  # Dynamo's wrapper around what a backend raised
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def check_file(option: str, path: Path | None) -> None:
    """Raises CommandError if the file that `option` names cannot be written."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise CommandError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise CommandError(f"{option} {path} is a folder")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"{option} {path}: the folder cannot be written to")


def write_json(result: dict[str, Any], path: Path) -> None:
    """Writes the file as a whole or not at all."""
    write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Writes the file as a whole or not at all; raises OSError where it cannot."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
