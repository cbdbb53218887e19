"""What `fxfuse doctor` reports and returns, for machines that have everything and for machines that lack something."""

import os
import subprocess
import sys

import pytest
import torch

from fxfuse import doctor
from fxfuse.library import Loader

@pytest.fixture
def package(tmp_path):
    package = tmp_path / "fxfuse"
    for folder in ("csrc", "passes"):
        (package / folder).mkdir(parents=True)
    (package / "csrc" / "answer.cpp").write_text("int answer() { return 42; }\n")
    return package


@pytest.fixture
def env(tmp_path):
    return {"PATH": os.environ["PATH"], "FXFUSE_CACHE_DIR": str(tmp_path / "cache")}


def report(package, env, build=False):
    """The rows as a dictionary, and the verdict."""
    rows, fuses = doctor.run(Loader(env, package, declare=lambda: None), env, build)
    return dict(rows), fuses


def test_names_versions_tools_and_variables(package, env):
    rows, _ = report(package, env)
    assert torch.__version__ in rows["torch"] and rows["cache"] == env["FXFUSE_CACHE_DIR"]
    assert rows["variables"] == f"FXFUSE_CACHE_DIR={env['FXFUSE_CACHE_DIR']}"
    assert "FXFUSE_SELEC=always" in report(package, {**env, "FXFUSE_SELEC": "always"})[0]["variables"], "a misspelt one is not shown"
    assert {"fxfuse", "Python", "cpu device", "C++ compiler", "nvcc", "ninja", "cpu", "cuda"} <= set(rows)


@pytest.mark.compiler
@pytest.mark.parametrize("build", [False, True])
def test_builds_only_when_asked_to(package, env, build):
    rows, fuses = report(package, env, build)
    expected = "chains are fused; library built just now, for" if build else "chains are fused; the library for"
    assert rows["cpu"].startswith(expected)
    assert os.path.exists(env["FXFUSE_CACHE_DIR"]) == build
    assert fuses or torch.cuda.is_available()


def test_missing_compiler_is_named_with_the_command_that_mends_it(package, env):
    rows, fuses = report(package, {**env, "PATH": "/nowhere"})
    assert rows["cpu"].startswith("chains are left to Inductor: no C++ compiler was found")
    assert rows["C++ compiler"].startswith("none: no C++ compiler was found")
    assert "apt-get install g++" in rows["to mend"] or torch.cuda.is_available()
    assert not fuses


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_said_and_needs_no_mending(package, env):
    rows, _ = report(package, env)
    assert rows["cuda"].startswith("chains are left to Inductor: torch ")
    assert "CUDA" not in rows.get("to mend", "")


@pytest.mark.compiler
def test_exit_code_tells_whether_chains_can_be_fused(tmp_path):
    def exit_code(**env):
        hidden = {"CUDA_VISIBLE_DEVICES": "", "FXFUSE_CACHE_DIR": str(tmp_path / "cache"), "FXFUSE_LIBRARY_DIR": ""}
        command = subprocess.run([sys.executable, "-m", "fxfuse", "doctor"], env={**os.environ, **hidden, **env}, cwd=tmp_path, capture_output=True, text=True)
        assert "cpu" in command.stdout, command.stderr
        return command.returncode

    assert exit_code() == 0
    assert exit_code(FXFUSE_BUILD="0") == (0 if _wheel_has_library() else 1)


def _wheel_has_library():
    import fxfuse

    return os.path.exists(os.path.join(os.path.dirname(fxfuse.__file__), "lib", "libfxfuse_cpu.so"))
