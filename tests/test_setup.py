"""What an installation compiles ahead, by FXFUSE_BUILD and by what is there, and what it says; nothing is compiled here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.compiler

SETUP = Path(__file__).parents[1] / "setup.py"
# setup.py up to the build itself; hidden: modules that the build does not see.
SCRIPT = """
import importlib.util, runpy, sys, setuptools
find, hidden = importlib.util.find_spec, sys.argv[2:]
importlib.util.find_spec = lambda name, package=None: None if name in hidden else find(name, package)
setuptools.setup = lambda **arguments: None
made = runpy.run_path(sys.argv[1])["recipes"]()
print("kinds:", *(recipe.kind for recipe in made))
print("architectures:", *(name for recipe in made for name in recipe.architectures))
"""


@pytest.fixture
def nvcc(tmp_path: Path) -> str:
    """An nvcc for torch's CUDA that says its release and does nothing else."""
    release = torch.version.cuda or "13.0"
    script = tmp_path / "nvcc"
    script.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n", encoding="utf-8")
    script.chmod(0o755)
    return str(script)


def run(*hidden: str, **env: str) -> subprocess.CompletedProcess:
    if not SETUP.exists():
        pytest.skip("needs the checkout")
    kept = {name: value for name, value in os.environ.items() if name != "FXFUSE_BUILD"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(SETUP), *hidden]
    return subprocess.run(command, env={**kept, **env}, capture_output=True, encoding="utf-8")


@pytest.mark.parametrize("asked", [{}, {"FXFUSE_BUILD": ""}, {"FXFUSE_BUILD": "1"}], ids=str)
def test_nothing_is_compiled_for_cuda_unless_asked_for(nvcc: str, asked: dict[str, str]) -> None:
    done = run(CUDACXX=nvcc, **asked)
    assert "kinds: cpu\n" in done.stdout, done.stderr
    assert "compiling the cpu kernels for baseline" in done.stdout and "FXFUSE_BUILD=0 leaves it to first use" in done.stdout
    assert "the CUDA kernels are compiled at first use; FXFUSE_BUILD=cuda compiles them into the wheel" in done.stdout


def test_cuda_is_compiled_for_every_generation_where_asked_for(nvcc: str) -> None:
    done = run(CUDACXX=nvcc, FXFUSE_BUILD="cuda")
    assert "kinds: cpu cuda\n" in done.stdout, done.stderr
    assert "sm_80 sm_90a sm_100 sm_120 compute_80\n" in done.stdout and "compiling the cuda kernels for sm_80" in done.stdout


def test_zero_compiles_nothing(nvcc: str) -> None:
    done = run(CUDACXX=nvcc, FXFUSE_BUILD="0")
    assert "kinds:\n" in done.stdout and "a pure wheel, which builds at first use" in done.stdout


def test_build_that_sees_no_torch_compiles_nothing() -> None:
    done = run("torch")
    assert "kinds:\n" in done.stdout and "torch is not installed where this build looks" in done.stdout


@pytest.mark.parametrize(
    ("hidden", "env", "sentence"),
    [
        (("torch",), {"FXFUSE_BUILD": "cuda"}, "FXFUSE_BUILD=cuda needs torch where the build looks; run: pip install torch"),
        ((), {"FXFUSE_BUILD": "cuda", "CUDACXX": "/nowhere"}, "the cuda library cannot be built: CUDACXX=/nowhere is not a program"),
        ((), {"FXFUSE_BUILD": "cuda", "CXX": "no-such-compiler"}, "the cpu library cannot be built: CXX=no-such-compiler is not a program"),
        ((), {"FXFUSE_BUILD": "all"}, "FXFUSE_BUILD is 'all', but a build takes 0 (compile nothing), 1 (the CPU library) and cuda"),
    ],
    ids=["no torch", "no nvcc", "no compiler", "another word"],
)
def test_what_was_asked_for_and_cannot_be_built_is_an_error(hidden: tuple[str, ...], env: dict[str, str], sentence: str) -> None:
    done = run(*hidden, **env)
    assert done.returncode == 1 and sentence in done.stderr


def test_missing_compiler_is_left_to_first_use() -> None:
    done = run(CXX="no-such-compiler")
    assert "kinds:\n" in done.stdout and "the wheel gets no cpu library, which is built at first use: CXX=no-such-compiler" in done.stdout
