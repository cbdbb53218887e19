"""What the test run shows at its end (the pattern coverage table) and what it leaves out where a GPU or a compiler is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_package import env_in, package_in
from torch._dynamo.utils import counters

from fxfuse import library, registry
from fxfuse.toolchain import BuildError, find_cxx

COVERAGE = pytest.StashKey[list[tuple[str, ...]]]()
HEADERS = ("chain", "captured by", "spelling", "verdict", "in training")
OPTION_VARIABLES = ("FXFUSE_SELECT", "FXFUSE_STRICT", "FXFUSE_PASSES", "FXFUSE_MODE", "FXFUSE_BACKWARD", "FXFUSE_DUMP", "FXFUSE_LOG")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COVERAGE] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {"gpu": None if torch.cuda.is_available() else "needs a CUDA GPU", "compiler": _no_compiler()}
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[COVERAGE]
    if rows:
        from tabulate import tabulate

        terminalreporter.section(f"pattern coverage: {len(rows)} spellings")
        terminalreporter.write_line(tabulate(rows, headers=HEADERS, tablefmt="simple", maxcolwidths=[None, None, 44, 72, None]))


@pytest.fixture
def cover(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Adds a row (chain, captured by, spelling, verdict, in training) to the coverage table."""
    return lambda *row: request.config.stash[COVERAGE].append(row)


@pytest.fixture(autouse=True)
def no_options_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see the options that they set, not those of the shell they were started from."""
    for variable in OPTION_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone behind it."""
    monkeypatch.setattr(registry, "_registrations", ())


@pytest.fixture
def explains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Explaining as at a first inference, as if every kernel library were there: no kernel runs."""
    monkeypatch.setattr(library, "unavailable", lambda device, build=True: None)
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def compiles(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Compiling as at first; fxfuse has nothing to complain of."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    assert not [record for record in caplog.get_records("call") if record.name.startswith("fxfuse")]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of one tiny source, under a path that shells and ninja would split."""
    return package_in(tmp_path / "a folder: x")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a build that keeps its libraries in a folder of the test's."""
    return env_in(tmp_path)


def _no_compiler() -> str | None:
    try:
        find_cxx(os.environ)
    except BuildError:
        return "needs a C++ compiler"
    return None
