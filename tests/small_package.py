"""A package of one tiny source, as the builder and the loader see fxfuse's own; its library leaves a mark where it is loaded."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from installations import fake_recipe, write_library

from fxfuse.build import ensure
from fxfuse.library import Loader
from fxfuse.recipe import Recipe, recipe
from fxfuse.toolchain import cache_dir

__all__ = ("answer", "compiler_script", "cpu_recipe", "env_in", "fake_recipe", "loader", "package_in", "said", "source_of", "write_library")

# A library exports nothing: what it registers when it is loaded is all that is seen of it.
SOURCE = '#include <stdlib.h>\nstatic int registered = setenv("FXFUSE_TEST_ANSWER", "%d", 1);\n'
SIMD_SOURCE = """
#include <stdlib.h>
#define TEXT2(isa) #isa
#define TEXT(isa) TEXT2(isa)
static int registered = setenv("FXFUSE_TEST_LEVEL_" TEXT(FXFUSE_ISA), "1", 1);
"""


def source_of(answer: int) -> str:
    return SOURCE % answer


def package_in(folder: Path) -> Path:
    """A package as a wheel installs it."""
    package = folder / "fxfuse"
    for name in ("csrc", "passes", "lib"):
        (package / name).mkdir(parents=True)
    files = {
        "csrc/answer.cpp": source_of(42),
        "csrc/level.simd.cpp": SIMD_SOURCE,
        "csrc/shared.h": "// shared\n",
        "csrc/other.cu": "__global__ void nothing() {}\n",
        "passes/chain.py": "CHAIN = 1\n",
    }
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    return package


def env_in(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "FXFUSE_CACHE_DIR": str(folder / "cache dir")}


def cpu_recipe(package: Path, env: dict[str, str]) -> Recipe:
    return recipe("cpu", csrc=package / "csrc", env=env)


def loader(package: Path, env: dict[str, str]) -> Loader:
    return Loader(env, package, declare=lambda: None)


def said(made: Recipe, env: dict[str, str]) -> tuple[Path, str]:
    """Builds and returns the folder and what the user is told."""
    texts: list[str] = []
    return ensure(made, cache_dir(env), env, texts.append), "".join(texts)


def answer(library: Path, name: str = "ANSWER") -> str | None:
    """Loads a library and returns what it registered."""
    ctypes.CDLL(str(library))
    found = ctypes.CDLL(None).getenv
    found.restype = ctypes.c_char_p
    value = found(f"FXFUSE_TEST_{name}".encode())
    return None if value is None else value.decode()


def compiler_script(folder: Path, before: str) -> str:
    """A C++ compiler that runs `before`, a line of shell, first. It answers --version like the real one."""
    script = folder / "slow-c++"
    script.write_text(f'#!/bin/sh\n[ "$*" = --version ] || {{ {before}; }}\nexec c++ "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)
