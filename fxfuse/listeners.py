"""Who hears of every report, however many there are: `fxfuse.reports()` keeps the latest alone. Importing this module does not import torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .report import Report

# Of a graph that was compiled through the backend, or of a model that `fxfuse.testing` explained.
How = Literal["compiled", "explained"]
Listener = Callable[["Report", How], None]

_listeners: list[Listener] = []
_lock = threading.Lock()


def add(listener: Listener) -> None:
    """From now on `listener` is called with each report, by one thread at a time."""
    with _lock:
        _listeners.append(listener)


def remove(listener: Listener) -> None:
    """Takes a listener away again."""
    with _lock:
        _listeners.remove(listener)


def tell(report: Report, how: How) -> None:
    """Calls every listener."""
    with _lock:
        for listener in _listeners:
            listener(report, how)
