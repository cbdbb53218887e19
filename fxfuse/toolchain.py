"""What a build needs from the machine: a C++ compiler, nvcc, ninja, torch's headers and a cache directory, and the sentence when one is missing.

Nothing here compiles. Each function takes the environment it reads, and raises BuildError with the command that mends what is missing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

OLDEST_TORCH = (2, 11)
TOOLKITS = (Path("/usr/local/cuda"),)


class BuildError(RuntimeError):
    """A library cannot be built or loaded. sentence: why; errors: the compiler's first error lines; mend: what to run or change."""

    def __init__(self, sentence: str, mend: str, errors: Iterable[str] = ()):
        self.sentence, self.mend, self.errors = sentence, mend, tuple(errors)
        super().__init__("\n  ".join([self.summary, *self.errors]))

    @property
    def summary(self) -> str:
        """One line: why, and what to do."""
        return f"{self.sentence}; {self.mend}"


@dataclass(frozen=True)
class Compiler:
    """A compiler that was found and answered `--version`. cuda: nvcc's CUDA release such as "13.0", None for a host compiler."""

    path: Path
    version: str
    cuda: str | None = None


@dataclass(frozen=True)
class Torch:
    """The torch that a library is compiled against. cuda: the CUDA release it was built for, None for a CPU-only torch."""

    version: str
    root: Path
    cuda: str | None

    @property
    def release(self) -> tuple[int, ...]:
        """(2, 13) of "2.13.0+cpu"."""
        return tuple(int(number) for number in re.match(r"(\d+)\.(\d+)", self.version).groups())

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def lib(self) -> Path:
        return self.root / "lib"


def installed_torch() -> Torch:
    """The importable torch, refused when it is older than the stable ABI that the kernels are compiled for."""
    import torch

    found = Torch(str(torch.__version__), Path(torch.__file__).parent, torch.version.cuda)
    if found.release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise BuildError(f"torch {found.version} is installed and the kernels need {oldest} or newer", f"run: pip install 'torch>={oldest}'")
    return found


def cuda_major(release: str | None) -> str | None:
    """ "13" of "13.0"."""
    return release.split(".", 1)[0] if release else None


def find_cxx(env: Mapping[str, str] = os.environ) -> Compiler:
    """The C++ compiler: $CXX, else the first of g++, clang++ and c++ on $PATH."""
    if named := env.get("CXX"):
        if path := shutil.which(named, path=env.get("PATH")):
            return Compiler(Path(path), _first_line(Path(path)))
        raise BuildError(f"CXX={named} is not a program that can be run", "set CXX to one C++20 compiler, such as g++, or unset it")
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name, path=env.get("PATH")):
            return Compiler(Path(path), _first_line(Path(path)))
    raise BuildError("no C++ compiler was found (looked for CXX, g++, clang++ and c++)", "run: apt-get install g++, or set CXX")


def find_nvcc(env: Mapping[str, str] = os.environ, torch_cuda: str | None = None, toolkits: Iterable[Path] = TOOLKITS) -> Compiler:
    """The first nvcc of torch's CUDA major version: $CUDACXX, $CUDA_HOME, $CUDA_PATH, $PATH, /usr/local/cuda, then the PyPI packages.

    torch_cuda: `torch.version.cuda`; with None, a CPU-only torch, any nvcc serves.
    """
    named = env.get("CUDACXX")
    if named and not shutil.which(named, path=env.get("PATH")):
        raise BuildError(f"CUDACXX={named} is not a program that can be run", "set CUDACXX to an nvcc, or unset it")
    wanted, refused = cuda_major(torch_cuda), []
    for path in _nvcc_paths(env, toolkits):
        try:
            release = re.search(r"release (\d+\.\d+), V([\d.]+)", _version(path))
        except BuildError as error:
            refused.append(error.sentence)
            continue
        if release and wanted in (None, cuda_major(release[1])):
            return Compiler(path, f"nvcc {release[2]}", release[1])
        refused.append(f"{path} is of CUDA {release[1]}" if release else f"{path} is no nvcc")
    tried = f" ({'; '.join(refused)})" if refused else ""
    raise BuildError(
        f"no nvcc for CUDA {wanted} was found, which torch is built for{tried}" if wanted else f"nvcc was not found{tried}", nvcc_advice(wanted)
    )


def nvcc_advice(wanted: str | None) -> str:
    """How to get an nvcc of that CUDA major version; PyPI has one from CUDA 13 on."""
    if wanted in (None, "13"):
        return "run: pip install 'fxfuse[nvcc]', or set CUDA_HOME to a CUDA 13 toolkit"
    return f"set CUDA_HOME to a CUDA {wanted} toolkit"


def find_ninja(env: Mapping[str, str] = os.environ) -> Path:
    """The binary of the ninja package, else a ninja on $PATH."""
    if importlib.util.find_spec("ninja"):
        import ninja

        binary = Path(ninja.BIN_DIR) / "ninja"
        if os.path.isfile(binary):  # unlike Path's, it does not raise where one may not look
            return binary
    if path := shutil.which("ninja", path=env.get("PATH")):
        return Path(path)
    raise BuildError("ninja was not found", "run: pip install ninja")


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where built libraries and measured times are kept: $FXFUSE_CACHE_DIR, else $XDG_CACHE_HOME/fxfuse, else ~/.cache/fxfuse."""
    if named := env.get("FXFUSE_CACHE_DIR"):
        return Path(os.path.expanduser(named)).absolute()
    if base := env.get("XDG_CACHE_HOME"):
        return Path(base).absolute() / "fxfuse"
    home = env.get("HOME") or os.path.expanduser("~")
    # A user whom the system does not know has no home, and ~ stays what it is.
    return Path("/" if home == "~" else home).absolute() / ".cache" / "fxfuse"


def obstacle(folder: Path) -> str | None:
    """Why a folder cannot be written or, where it does not exist, made; None if it can."""
    while not os.path.lexists(folder):  # nor does one that may not be looked into
        folder = folder.parent
    if not os.path.isdir(folder):
        return "it is a link to nothing" if folder.is_symlink() else f"{folder} is not a directory"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write into {folder}"


def unusable(cache: Path, why: OSError | str) -> BuildError:
    """The one sentence about a cache directory that may not be read, searched or written, or is none."""
    reason = (why.strerror or why) if isinstance(why, OSError) else why
    return BuildError(f"the cache directory {cache} cannot be used ({reason})", "set FXFUSE_CACHE_DIR to a directory that can be written")


def _nvcc_paths(env: Mapping[str, str], toolkits: Iterable[Path]) -> Iterator[Path]:
    if named := env.get("CUDACXX"):
        yield Path(shutil.which(named, path=env.get("PATH")) or named)
    homes = [Path(env[name]) for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    on_path = shutil.which("nvcc", path=env.get("PATH"))
    candidates = [home / "bin" / "nvcc" for home in homes] + ([Path(on_path)] if on_path else [])
    candidates += [toolkit / "bin" / "nvcc" for toolkit in toolkits] + list(_pypi_nvcc())
    yield from filter(os.path.isfile, candidates)


def _pypi_nvcc() -> Iterator[Path]:
    """nvcc of the PyPI packages, which install into site-packages/nvidia/cu<major>/."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("cu*/bin/nvcc"), reverse=True)


def _first_line(path: Path) -> str:
    return _version(path).split("\n", 1)[0]


@functools.cache
def _version(path: Path) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{path} does not run: {error}", "install a working compiler, or name another with CXX or CUDACXX") from error
    return done.stdout.strip()
