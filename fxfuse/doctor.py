"""`fxfuse doctor`: the whole state on one page, what will happen on each device and why, and the command that mends what is missing.

It loads the libraries that are there, and builds none unless asked to.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from .library import Library, Loader, check_device
from .recipe import KINDS
from .toolchain import BuildError, Compiler, cache_dir, find_cxx, find_ninja, find_nvcc, obstacle

# Beside all that begin with FXFUSE_, misspelt ones among them.
VARIABLES = ("CXX", "CUDACXX", "CUDA_HOME", "MAX_JOBS")
_ORIGIN = {"override": "of FXFUSE_LIBRARY_DIR", "wheel": "of the wheel", "cache": "of the cache", "built": "built just now"}

Rows = list[tuple[str, str]]


class Outlook(NamedTuple):
    """What will happen to chains on one device type. mend: the command that changes a bad outlook."""

    fuses: bool
    text: str
    mend: str | None = None


def run(loader: Loader | None = None, env: Mapping[str, str] = os.environ, build: bool = False) -> tuple[Rows, bool]:
    """The report as (label, text) rows, and whether chains can be fused on the best device found: a GPU, else the CPU.

    build: build what is missing, as the first use would.
    """
    loader = loader or Loader(env)
    outlooks = {kind: _outlook(kind, loader, build) for kind in KINDS}
    gpus = _gpus()
    rows = [*_versions(), *gpus, *_tools(env), *((kind, outlook.text) for kind, outlook in outlooks.items())]
    # What is missing for a device that is not there needs no mending.
    present = [outlook for kind, outlook in outlooks.items() if kind == "cpu" or gpus]
    rows += [("to mend", outlook.mend) for outlook in present if outlook.mend]
    return rows, present[-1].fuses


def main(build: bool = False) -> int:
    """Prints the report; 0 if chains can be fused on the best device found, else 1."""
    from tabulate import tabulate

    rows, fuses = run(build=build)
    print(tabulate(rows, tablefmt="plain", disable_numparse=True))
    return 0 if fuses else 1


def _versions() -> Rows:
    import torch

    from . import __file__, __version__

    return [
        ("fxfuse", f"{__version__} in {os.path.dirname(__file__)}"),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, " + (f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")),
        ("cpu device", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
    ]


def _gpus() -> Rows:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    from .fused import gpu_of, path_of

    devices = [(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)) for index in range(count)]
    return [
        (f"cuda:{index}", f"{name}, sm_{major}{minor}; kernels of fused convolutions: {path_of(gpu_of(torch.device('cuda', index)))}")
        for index, (name, (major, minor)) in enumerate(devices)
    ]


def _tools(env: Mapping[str, str]) -> Rows:
    import torch

    names = [*sorted(name for name in env if name.startswith("FXFUSE_")), *VARIABLES]
    variables = [f"{name}={env[name]}" for name in names if env.get(name)]
    return [
        ("C++ compiler", _found(lambda: find_cxx(env))),
        ("nvcc", _found(lambda: find_nvcc(env, torch.version.cuda))),
        ("ninja", _found(lambda: find_ninja(env))),
        ("cache", _cache(cache_dir(env))),
        ("variables", ", ".join(variables) or "none set"),
    ]


def _cache(folder: Path) -> str:
    why = obstacle(folder)
    return f"{folder}, which cannot be written: {why}" if why else str(folder)


def _found(find: Callable[[], object]) -> str:
    try:
        tool = find()
    except BuildError as error:
        return f"none: {error.sentence}"
    return f"{tool.version} at {tool.path}" if isinstance(tool, Compiler) else str(tool)


def _outlook(kind: str, loader: Loader, build: bool) -> Outlook:
    try:
        check_device(kind)
        library = loader.load(kind, build)
    except BuildError as error:
        return Outlook(False, f"chains are left to Inductor: {error.sentence}", error.mend)
    text = f"chains are fused; {_described(library)}"
    return Outlook(True, "; ".join([text, *(f"passed over: {sentence}" for sentence in library.passed_over)]))


def _described(library: Library) -> str:
    architectures = ", ".join(library.architectures)
    if library.source == "buildable":
        return f"the library for {architectures} is built at first use, into {library.path.parent}"
    return f"library {_ORIGIN[library.source]}, for {architectures}: {library.path}"
