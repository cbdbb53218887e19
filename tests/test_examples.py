"""Every example runs to its end, as its own docstring says to run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# quickstart compiles, and the others' kernels count as available where they could be built.
pytestmark = pytest.mark.compiler


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    assert f"python examples/{example.name}" in example.read_text()
    assert run(tmp_path, str(example))


def test_coverage_test_under_pytest_with_the_table(tmp_path: Path) -> None:
    output = run(tmp_path, "-m", "pytest", "--fxfuse-coverage", str(EXAMPLES / "coverage_test.py"))
    assert "3 passed" in output and "3 graphs: 3 explained" in output
    assert re.search(r"conv_gelu_pool\s+│\s+3 │\s+2 │\s+1 │ 1 x gelu is followed by", output)
