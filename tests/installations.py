"""Installations, machines and settings without usable kernels: each piece of a sentence with what triggers it. Nothing is compiled."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from fxfuse import build, library, toolchain
from fxfuse.library import Library, check_device, search
from fxfuse.recipe import ISA_FLAGS, Recipe, beside, library_name, ninja_file, recipe, record_path
from fxfuse.record import write_record
from fxfuse.toolchain import Compiler, Torch, cuda_major, find_cxx, find_ninja, find_nvcc, installed_torch

NOWHERE = {"PATH": "/nowhere"}


def fake_recipe(package: Path, tmp_path: Path, kind: str = "cpu", architectures: tuple[str, ...] = tuple(ISA_FLAGS)) -> Recipe:
    """What a library would be made from, with compilers that do not exist."""
    nvcc = Compiler(Path("/cuda/bin/nvcc"), "nvcc 13.0.88", "13.0") if kind == "cuda" else None
    return Recipe(kind, package / "csrc", architectures, Torch("2.13.0", tmp_path / "torch", None), Compiler(Path("/g++"), "g++ 12"), nvcc)


def write_library(folder: Path, made: Recipe, **changes: Any) -> None:
    """A library file that is never opened, with its record, in which something is changed."""
    folder.mkdir(exist_ok=True)
    (folder / library_name(made.kind)).write_bytes(b"a library")
    write_record(folder, made)
    path = record_path(folder, made.kind)
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def empty_package(tmp_path: Path) -> Path:
    (tmp_path / "fxfuse" / "csrc").mkdir(parents=True)
    return tmp_path / "fxfuse"


def made_elsewhere(tmp_path: Path, **changes: Any) -> None:
    """A CUDA library whose record says something else, where FXFUSE_LIBRARY_DIR points."""
    package = empty_package(tmp_path)
    write_library(tmp_path / "lib", fake_recipe(package, tmp_path, "cuda", ("sm_120",)), **{"cuda": cuda_major(torch.version.cuda), **changes})
    search("cuda", {"FXFUSE_LIBRARY_DIR": str(tmp_path / "lib")}, package)


def without_code_for_this_gpu(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(library, "gpu_architectures", lambda: ("sm_90a",))
    made_elsewhere(tmp_path)


def broken_library(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libfxfuse_cpu.so").write_bytes(b"no library")
    library._opened(Library(tmp_path / "libfxfuse_cpu.so", "cpu", "cache", (), ""))


def old_torch(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(torch, "__version__", "2.9.1")
    installed_torch()


def cuda_device(patch: pytest.MonkeyPatch, tmp_path: Path, **cuda: Any) -> None:
    """check_device, with torch.cuda's functions returning these values."""
    patch.setattr(torch.version, "cuda", cuda.pop("version", "13.0"))
    for name, value in cuda.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)
    check_device("cuda:0")


def compiler_that_fails(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\nexit 3\n")
    compiler.chmod(0o755)
    find_cxx({"CXX": str(compiler)})


def no_nvcc(patch: pytest.MonkeyPatch, torch_cuda: str | None) -> None:
    patch.setattr(toolchain, "_pypi_nvcc", lambda: ())
    find_nvcc(NOWHERE, torch_cuda, [])


def no_ninja(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(importlib.util, "find_spec", lambda name: None)
    find_ninja(NOWHERE)


def not_on_linux(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setattr(sys, "platform", "darwin")
    recipe("cpu")


def built_into(cache: Path, tmp_path: Path) -> None:
    package = empty_package(tmp_path)
    (package / "csrc" / "answer.cpp").touch()
    build.ensure(fake_recipe(package, tmp_path), cache, NOWHERE, say=lambda text: None)


def cache_is_a_file(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    built_into(tmp_path / "cache", tmp_path)


def sources_that_do_not_compile(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ninja = tmp_path / "ninja"
    ninja.write_text("#!/bin/sh\necho 'answer.cpp:1: error: expected ;'\nexit 1\n")
    ninja.chmod(0o755)
    patch.setattr(build, "find_ninja", lambda env: ninja)
    built_into(tmp_path, tmp_path)


def another_process_builds(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = empty_package(tmp_path)
    patch.setattr(build, "_LOCK_TIMEOUT_S", 0)
    made = fake_recipe(package, tmp_path)
    with FileLock(tmp_path / f"cpu-{made.key}.lock"):
        build.ensure(made, tmp_path, NOWHERE, say=lambda text: None)


# fmt: off
CASES: dict[str, Callable[[pytest.MonkeyPatch, Path], object]] = {
    "no kernels for device type 'xpu'": lambda patch, tmp_path: check_device("xpu:0"),
    "is built without CUDA": lambda patch, tmp_path: cuda_device(patch, tmp_path, version=None),
    "torch sees no CUDA device": lambda patch, tmp_path: cuda_device(patch, tmp_path, is_available=False),
    "Tesla T4 is sm_75 and the kernels need sm_80 or newer": lambda patch, tmp_path: cuda_device(
        patch, tmp_path, is_available=True, get_device_capability=(7, 5), get_device_name="Tesla T4"
    ),
    "torch 2.9.1 is installed and the kernels need 2.11": old_torch,

    "holds no readable libfxfuse_cpu.so": lambda patch, tmp_path: search("cpu", {**NOWHERE, "FXFUSE_LIBRARY_DIR": str(tmp_path)}, empty_package(tmp_path)),
    "is for pdp11 and this machine is": lambda patch, tmp_path: made_elsewhere(tmp_path, machine="pdp11"),
    "needs torch 99.0 and": lambda patch, tmp_path: made_elsewhere(tmp_path, oldest_torch=[99, 0]),
    "was built from other kernel sources": lambda patch, tmp_path: made_elsewhere(tmp_path, sources="others"),
    "is for CUDA 11 and torch is built": lambda patch, tmp_path: made_elsewhere(tmp_path, cuda="11"),
    "is for sm_120 and has no code for sm_90a": without_code_for_this_gpu,
    "has no record beside it that can be read": lambda patch, tmp_path: made_elsewhere(tmp_path, architectures=None),
    "libfxfuse_cuda.so is damaged": lambda patch, tmp_path: made_elsewhere(tmp_path, size=5000),
    "libfxfuse_cpu.so cannot be loaded": broken_library,
    "is not built yet and FXFUSE_BUILD=0 forbids": lambda patch, tmp_path: search(
        "cpu", {"CXX": sys.executable, "FXFUSE_BUILD": "0", "FXFUSE_CACHE_DIR": str(tmp_path / "cache")}, empty_package(tmp_path)
    ),

    "no C++ compiler was found": lambda patch, tmp_path: find_cxx(NOWHERE),
    "CXX=no-such-compiler is not a program": lambda patch, tmp_path: find_cxx({"CXX": "no-such-compiler"}),
    "CUDACXX=/nowhere is not a program": lambda patch, tmp_path: find_nvcc({"CUDACXX": "/nowhere"}, None, []),
    "broken-c++ does not run": compiler_that_fails,
    "no nvcc for CUDA 12 was found": lambda patch, tmp_path: no_nvcc(patch, "12.8"),
    "nvcc was not found": lambda patch, tmp_path: no_nvcc(patch, None),
    "ninja was not found": no_ninja,
    "built on Linux only and this is darwin": not_on_linux,
    "'9.0' is no CUDA architecture": lambda patch, tmp_path: recipe("cuda", ["9.0"], empty_package(tmp_path), {"CXX": sys.executable}),
    "the folder csrc is missing": lambda patch, tmp_path: beside("csrc", tmp_path / "site-packages" / "fxfuse"),
    "holds no cpu sources": lambda patch, tmp_path: ninja_file(fake_recipe(empty_package(tmp_path), tmp_path)),
    "cannot be used": cache_is_a_file,
    "the cpu kernels do not compile with g++ 12: answer.cpp:1: error": sources_that_do_not_compile,
    "another process has held": another_process_builds,
}
# fmt: on
