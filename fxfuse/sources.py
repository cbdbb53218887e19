"""Where a function is written: its line, and a hash of its file."""

from __future__ import annotations

import functools
import hashlib
import inspect
import marshal
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def place(function: Any, error: BaseException | None = None) -> str:
    """file:line of a function; of the innermost line in its file that led to `error`. Empty for one that is not written in Python."""
    code = _code_of(function)
    if code is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"


def file_of(function: Any) -> str | None:
    """The file of a function; None for one that is in none, as in a notebook."""
    code = _code_of(function)
    return code.co_filename if code is not None and Path(code.co_filename).is_file() else None


def hash_of_sources(functions: Iterable[Any], version: str) -> str:
    """A hash of a version and of the files of functions (of the compiled code of one that is in no file, as in a notebook)."""
    digest = hashlib.sha256(version.encode())
    contents = [Path(file_of(f)).read_bytes() if file_of(f) else marshal.dumps(_code_of(f)) for f in functions if _code_of(f) is not None]
    for content in dict.fromkeys(contents):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def unwrapped(function: Any) -> Any:
    """The function behind partials and decorators."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function) if callable(function) else function


def _code_of(function: Any) -> Any:
    function = unwrapped(function)
    return getattr(function, "__code__", None) or getattr(getattr(type(function), "__call__", None), "__code__", None)
