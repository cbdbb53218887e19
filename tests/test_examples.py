"""Every example runs to its end, as a program of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

# Some compile, and the kernels of those that only explain count as available where they could be built.
pytestmark = [pytest.mark.compiler, pytest.mark.skipif(not EXAMPLES, reason="an sdist has no examples")]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path) -> None:
    assert f"python examples/{example.name}" in example.read_text(), "its docstring does not say how it is run"
    assert run(str(example))


def test_coverage_test_under_pytest_with_the_table() -> None:
    output = run("-m", "pytest", "--fxfuse-coverage", next(str(path) for path in EXAMPLES if path.stem == "coverage_test"))
    assert "3 passed" in output and "3 graphs: 3 explained" in output
    assert re.search(r"conv_gelu_pool\s+│\s+3 │\s+2 │\s+1 │ 1 x gelu is followed by", output)
