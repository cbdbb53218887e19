"""A library that is linked with a libstdc++ of its own, as some vendors' toolchains do, and tests run on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxfuse.recipe import library_name
from fxfuse.toolchain import find_cxx

HERE = Path(__file__).parent


def built(kind: str, folder: Path) -> Path:
    """The library of a kind, built into a folder by a compiler that links libstdc++ statically; skips where there is no libstdc++.a."""
    cxx = find_cxx(os.environ).path
    archive = subprocess.run([cxx, "-print-file-name=libstdc++.a"], capture_output=True, encoding="utf-8", check=True).stdout.strip()
    if not os.path.isabs(archive):
        pytest.skip(f"{cxx} has no libstdc++.a")
    wrapper = folder / "static-c++"
    wrapper.write_text(f'#!/bin/sh\nexec "{cxx}" -static-libstdc++ "$@"\n', encoding="utf-8")
    wrapper.chmod(0o755)
    env = {**os.environ, "CXX": str(wrapper), "FXFUSE_CACHE_DIR": str(folder / "cache")}
    run(env, "-m", "fxfuse.build", f"--{kind}", "--out", str(folder))
    library = folder / library_name(kind)
    assert "libstdc++" not in needed(library), "the compiler linked libstdc++ as a shared library"
    return library


def run_tests_twice(library: Path, *arguments: str) -> int:
    """Runs pytest on a library, each test twice in the one process, and returns the number of tests that passed."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "FXFUSE_LIBRARY_DIR": str(library.parent), "FXFUSE_BUILD": "0"}
    out = run(env, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "twice", *arguments)
    return int(out.rpartition(" passed")[0].split()[-1])


def exported(library: Path) -> str:
    """What a library offers to others, as nm lists it."""
    return _tool("nm", "-D", "--defined-only", str(library))


def needed(library: Path) -> str:
    """The libraries that a library asks the loader for, as readelf lists them."""
    return "\n".join(line for line in _tool("readelf", "-d", str(library)).splitlines() if "(NEEDED)" in line)


def _tool(*command: str) -> str:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} was not found; it comes with binutils")
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()


def run(env: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=1800)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    return done.stdout
