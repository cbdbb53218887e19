"""Every example runs to its end, as a program of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

pytestmark = [pytest.mark.compiler, pytest.mark.skipif(not EXAMPLES, reason="an sdist has no examples")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
