"""A pytest plugin, `-p guards`: tensors between guard bands (see guards.cu). A test during which a band was overwritten fails."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxfuse.toolchain import find_nvcc

SOURCE = Path(__file__).with_name("guards.cu")


def install() -> ctypes.CDLL:
    """Builds the allocator and makes it torch's own, before the first allocation of the process."""
    path = os.path.join(tempfile.mkdtemp(), "libguards.so")
    subprocess.run([find_nvcc(os.environ).path, "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", SOURCE, "-o", path], check=True)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "guarded_malloc", "guarded_free")
    torch.cuda.memory.change_current_allocator(allocator)
    library = ctypes.CDLL(path)
    library.guarded_allocations.restype = library.guarded_violations.restype = ctypes.c_int64
    return library


def pytest_configure(config: pytest.Config) -> None:
    config.guards = install()


@pytest.fixture(autouse=True)
def bands_are_intact(request: pytest.FixtureRequest) -> Iterator[None]:
    guards = request.config.guards
    before = guards.guarded_violations()
    yield
    gc.collect()
    assert guards.guarded_violations() == before, "a kernel wrote outside a tensor"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(f"guards: {config.guards.guarded_allocations()} allocations, {config.guards.guarded_violations()} violations")
