"""The pytest plugin in runs of its own: the fixture, and the coverage table with cold and warm caches, many reports, and workers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fxfuse import pytest_plugin, report
from fxfuse.coverage import SHOWN_REASONS, Coverage
from fxfuse.report import Declined, Fused, Report

# An installation knows the plugin by its entry point; a checkout that was installed before there was one is told.
INSTALLED = any(entry.name == "fxfuse" for entry in importlib.metadata.entry_points(group="pytest11"))
PLUGIN = [] if INSTALLED else ["-p", "fxfuse.pytest_plugin"]
SECTION = "fxfuse coverage"

TESTS = """
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

OPTIONS = {"fxfuse.select": "always"}

@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield

def model(pool=True):
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1) if pool else nn.ReLU(), nn.Flatten(), nn.Tanh())

def test_explained(assert_fused):
    assert_fused(model(), torch.ones(2, 2, 8, 8), {"conv_gelu_pool": 1}, options=OPTIONS)

def test_not_fused(assert_fused):
    assert_fused(model(pool=False), torch.ones(2, 2, 8, 8), {"conv_gelu_pool": 1}, options=OPTIONS)

@pytest.mark.parametrize("pool", [True, False])
def test_compiled(pool):
    torch.compile(model(pool), backend="fxfuse", options=OPTIONS)(torch.ones(2, 2, 8, 8))
    print("hits:", counters["inductor"]["fxgraph_cache_hit"])
"""


def run(folder: Path, tests: str, *arguments: str, **env: str) -> str:
    """What pytest prints for a file of tests."""
    (folder / "test_own.py").write_text(tests)
    kept = {name: value for name, value in os.environ.items() if name not in ("FXFUSE_SELECT", "FXFUSE_STRICT", "FXFUSE_PASSES", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, *arguments, "test_own.py"]
    done = subprocess.run(command, cwd=folder, env={**kept, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def section(output: str) -> list[str]:
    """The lines of the coverage section."""
    lines = output.splitlines()
    start = next(index for index, line in enumerate(lines) if SECTION in line)
    end = next(index for index, line in enumerate(lines) if index > start and line.startswith("==="))
    return lines[start + 1 : end]


def counts(lines: list[str]) -> dict[str, list[str]]:
    """The table's cells by chain; lines of a wrapped cell have none."""
    rows = ([cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│"))
    return {chain: cells for chain, *cells in rows if chain.startswith("conv")}


@pytest.mark.compiler
def test_the_table_with_cold_and_warm_caches(tmp_path: Path) -> None:
    cold, warm = (run(tmp_path, TESTS, "-rP", "--fxfuse-coverage", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor")) for _ in range(2))
    assert [re.findall(r"hits: (\d)", output)[0] for output in (cold, warm)] == ["0", "1"]
    lines = section(cold)
    assert section(warm) == lines, "a warm cache changed the counts"
    assert lines[0] == "4 graphs: 2 compiled, 2 explained"
    table = counts(lines)
    assert table["conv_gelu_pool"][:3] == ["4", "2", "2"] and table["conv_norm_pool_gelu"] == ["0", "0", "0", ""]
    assert table["conv_gelu_pool"][3].startswith("2 x gelu is followed by relu; the chain goes on with")
    assert "3 passed" in cold and "1 failed" in cold
    # The fixture's message, at the test's own line.
    assert re.search("E +AssertionError: expected conv_gelu_pool to be fused 1 time, found it fused 0 times and declined 1 time\n", cold)
    line = 1 + next(index for index, text in enumerate(TESTS.splitlines()) if "assert_fused(model(pool=False)" in text)
    assert "declined chain" in cold and f"\ntest_own.py:{line}: AssertionError" in cold


def test_without_the_option_there_is_no_section_and_torch_is_not_imported(tmp_path: Path) -> None:
    tests = "import sys\ndef test(): assert not {'torch', 'fxfuse.report', 'fxfuse.coverage'} & set(sys.modules)"
    output = run(tmp_path, tests)
    assert "1 passed" in output and SECTION not in output
    tests = "import sys\ndef test(): assert 'torch' not in sys.modules"
    output = run(tmp_path, tests, "--fxfuse-coverage")
    assert "1 passed" in output and section(output) == ['no graph was compiled through backend="fxfuse" or explained with assert_fused']


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_with_dynamo_off_the_section_says_so(tmp_path: Path, variable: str) -> None:
    none = 'no graph was compiled through backend="fxfuse" or explained with assert_fused'
    output = run(tmp_path, TESTS, "--fxfuse-coverage", **{variable: "1"})
    assert "2 failed, 2 passed" in output
    assert section(output) == [none, f"stopped, 2 times: {variable}=1 turns torch.compile off, so no graph was captured: run without it"]
    output = run(tmp_path, TESTS, "--fxfuse-coverage", "-k", "compiled", **{variable: "1"})
    assert section(output) == [none, f"{variable}=1 turns torch.compile off"]


def test_help(tmp_path: Path) -> None:
    output = run(tmp_path, "", "--help")
    assert "--fxfuse-coverage" in output and "fused and declined" in output


def made(fused: int, *reasons: str) -> Report:
    """A report of one graph."""
    done = [Fused("conv_gelu_pool", "gelu_pool", (), "", "", "")] * fused
    return Report(done, [Declined("conv_gelu_pool", "gelu", "node", reason, "") for reason in reasons], graphs=1)


def test_more_reports_than_are_kept() -> None:
    counting = pytest_plugin._Counting(Coverage())
    counting.pytest_sessionstart()
    try:
        for _ in range(2 * report.KEPT_REPORTS):
            report.keep(made(1, "a reason"))
    finally:
        counting.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))
    report.keep(made(1))  # after the session
    lines = str(counting.coverage).splitlines()
    assert lines[0] == f"{2 * report.KEPT_REPORTS} graphs: {2 * report.KEPT_REPORTS} compiled"
    assert counts(lines)["conv_gelu_pool"] == [str(4 * report.KEPT_REPORTS), *[str(2 * report.KEPT_REPORTS)] * 2, f"{2 * report.KEPT_REPORTS} x a reason"]


def test_many_reasons_and_graphs_that_stopped() -> None:
    coverage = Coverage()
    letters = string.ascii_lowercase[: SHOWN_REASONS + 3]
    coverage.add(made(0, *(f"reason {letter}" for letter in letters), "reason f"), "compiled")
    coverage.add(Report(graphs=1, stopped="an exception inside fxfuse"), "compiled")
    text = str(coverage)
    assert counts(text.splitlines())["conv_gelu_pool"][3] == "2 x reason f", "the most frequent comes first"
    assert "3 x 3 other reasons" in text and text.endswith("stopped, 1 time: an exception inside fxfuse")


def test_reasons_that_differ_in_numbers_are_one() -> None:
    coverage = Coverage()
    for us in (12, 9, 12):
        coverage.add(made(0, f"predicted {us} us, Inductor at least 8 us", "gelu is followed by mul"), "compiled")
    other = Coverage()
    other.merge(coverage.as_dict())
    for counted in (coverage, other):
        rows = [line.split("│")[5].strip() for line in str(counted).splitlines() if " x " in line]
        assert rows == ["3 x gelu is followed by mul", "3 x predicted 12 us, Inductor at least 8 us"]


class Terminal:
    """Stands in for pytest's terminal reporter."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write_sep(self, sep: str, title: str) -> None:
        self.lines.append(title)

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def test_what_workers_counted_is_added_up_and_a_crash_is_said() -> None:
    worker = pytest_plugin._Counting(Coverage())
    worker.pytest_sessionstart()
    report.keep(made(2, "a reason"))
    config = SimpleNamespace(workeroutput={})
    worker.pytest_sessionfinish(SimpleNamespace(config=config))
    main, terminal = pytest_plugin._Counting(Coverage()), Terminal()
    for output in (config.workeroutput, config.workeroutput, {}):
        main.pytest_testnodedown(SimpleNamespace(workeroutput=output))
    main.pytest_testnodedown(SimpleNamespace())
    main.pytest_terminal_summary(terminal)
    title, text, lost = terminal.lines
    assert title == SECTION and text.startswith("2 graphs: 2 compiled")
    assert counts(text.splitlines()) == {"conv_gelu_pool": ["6", "4", "2", "2 x a reason"], "conv_norm_pool_gelu": ["0", "0", "0", ""]}
    assert lost == "2 pytest-xdist workers crashed: what they counted is missing"


@pytest.mark.compiler
@pytest.mark.skipif(not importlib.util.find_spec("xdist"), reason="needs pytest-xdist")
def test_workers_of_xdist(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    alone = section(run(tmp_path, TESTS, "--fxfuse-coverage", **env))
    assert section(run(tmp_path, TESTS, "--fxfuse-coverage", "-n", "2", **env)) == alone
