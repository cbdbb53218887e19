"""`FXFUSE_LOG`: the level of fxfuse's loggers, which are named like its modules, for programs that do not set up logging themselves."""

from __future__ import annotations

import logging

LEVELS = ("debug", "info", "warning", "error")


class LastResort(logging.StreamHandler):
    """Prints to stderr what no other handler would: a program that sets up logging later sees each line once."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints the record, unless somebody else does."""
        others = [*logging.getLogger().handlers, *(h for h in logging.getLogger("fxfuse").handlers if h is not self)]
        if not others:
            super().emit(record)


def set_level(value: str) -> None:
    """Sets the level that `FXFUSE_LOG` names; anything else is a warning, for an import should not fail."""
    log = logging.getLogger("fxfuse")
    if value.lower() not in LEVELS:
        log.warning("fxfuse: FXFUSE_LOG=%r is not one of %s", value, ", ".join(LEVELS))
        return
    log.setLevel(value.upper())
    if any(handler.name == __name__ for handler in log.handlers):
        return
    handler = LastResort()
    handler.name = __name__
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
    log.addHandler(handler)
