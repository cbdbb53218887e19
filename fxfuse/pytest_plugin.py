"""The pytest plugin: the fixture `assert_fused`, and `--fxfuse-coverage`. Importing it imports neither torch nor the rest of fxfuse.

`--fxfuse-coverage` shows at the end of the run, for every chain, its candidates in all graphs that the tests compiled through
`backend="fxfuse"` in pytest's own processes (those of pytest-xdist too) or explained with `assert_fused`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .coverage import Coverage

KEY = "fxfuse_coverage"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("fxfuse").addoption(
        "--fxfuse-coverage",
        action="store_true",
        help='show what fxfuse fused and declined in all graphs that the tests compile through backend="fxfuse" or explain with assert_fused',
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fxfuse-coverage"):
        from .coverage import Coverage

        config.pluginmanager.register(_Counting(Coverage()), KEY)


@pytest.fixture
def assert_fused() -> Callable[..., Any]:
    """`fxfuse.testing.assert_fused(model, args, {"conv_gelu_pool": 2}, *, kwargs=None, options=None, dynamic=False)`."""
    from .testing import assert_fused

    return assert_fused


class _Counting:
    """Registered where `--fxfuse-coverage` is given: counts in this process, and adds up what the workers of pytest-xdist counted."""

    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.lost = 0

    def pytest_sessionstart(self) -> None:
        from . import listeners

        listeners.add(self.coverage.add)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from . import listeners

        listeners.remove(self.coverage.add)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[KEY] = self.coverage.as_dict()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist has ended; one that crashed brings nothing."""
        counted = getattr(node, "workeroutput", {}).get(KEY)
        if counted is None:
            self.lost += 1
        else:
            self.coverage.merge(counted)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_sep("=", "fxfuse coverage")
        terminalreporter.write_line(str(self.coverage))
        if "torch" in sys.modules and not self.coverage.graphs.total() and not self.coverage.stopped:
            self._write_why_none(terminalreporter)
        if self.lost:
            workers = f"{self.lost} pytest-xdist worker{'' if self.lost == 1 else 's'}"
            terminalreporter.write_line(f"{workers} crashed: what they counted is missing")

    def _write_why_none(self, terminalreporter: pytest.TerminalReporter) -> None:
        """With Dynamo off no compilation reaches fxfuse, which could count it."""
        from . import torch_private

        if off := torch_private.turned_off():
            terminalreporter.write_line(f"{off} turns torch.compile off")
