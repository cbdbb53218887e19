"""What is built: a Recipe holds everything that decides what a library will be, its hash names the build, and `ninja_file` spells it out."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .toolchain import OLDEST_TORCH, BuildError, Compiler, Torch, cuda_major, find_cxx, find_nvcc, installed_torch

PACKAGE = Path(__file__).parent
KINDS = ("cpu", "cuda")

_TARGET = f"-DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02X}{OLDEST_TORCH[1]:02X}000000000000"
# Hidden visibility: two copies of a library in one process must not share each other's inline functions and statics.
CXX_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", _TARGET)
NVCC_FLAGS = ("-O3", "-std=c++20", "-DUSE_CUDA", _TARGET, "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v")
# torch finds the ops through a library's initialisers, so it needs no symbol of ours; one that we exported, such as those of a libstdc++
# that was linked in, would be taken for torch's own, or torch's for ours, in the middle of a call.
VERSION_SCRIPT = ("exports.map", "{ local: *; };\n")
LINKER_FLAGS = (f"--version-script={VERSION_SCRIPT[0]}",)
# In link order: a standard library function that was compiled into several objects is taken from the first, which runs everywhere.
ISA_FLAGS: Mapping[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
}
# A wheel's: machine code for each generation's first member, and PTX from which the driver makes the rest.
AHEAD_ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_80")
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_OTHER_KIND = {"cpu": (".cu", ".cuh"), "cuda": (".cpp",)}
_SOURCE_SUFFIXES = (".h", ".hpp", ".inc", ".cpp", ".cu", ".cuh")


@dataclass(frozen=True)
class Recipe:
    """One library to build. architectures: ISA names for the CPU; for CUDA `sm_90a` (machine code) or `compute_80` (PTX)."""

    kind: str
    csrc: Path
    architectures: tuple[str, ...]
    torch: Torch
    cxx: Compiler
    nvcc: Compiler | None = None

    @property
    def compilers(self) -> str:
        return f"{self.nvcc.version} and {self.cxx.version}" if self.nvcc else self.cxx.version

    def record(self) -> dict[str, object]:
        """What is written beside the library, and what `key` hashes. Holds no path: a library may move."""
        flags = CXX_FLAGS if self.nvcc is None else NVCC_FLAGS
        return {
            "kind": self.kind,
            "machine": platform.machine(),
            "architectures": list(self.architectures),
            "sources": source_hash(self.kind, self.csrc),
            "flags": [*flags, *(flag for name in self.architectures for flag in ISA_FLAGS.get(name, ()))],
            "link": [*LINKER_FLAGS, VERSION_SCRIPT[1]],
            "torch": self.torch.version,
            "oldest_torch": list(OLDEST_TORCH),
            "cuda": cuda_major(self.nvcc.cuda) if self.nvcc else None,
            "compilers": self.compilers,
        }

    @property
    def key(self) -> str:
        return digest(json.dumps(self.record(), sort_keys=True))


def recipe(
    kind: str, architectures: Sequence[str] = (), csrc: Path | None = None, env: Mapping[str, str] = os.environ, torch: Torch | None = None
) -> Recipe:
    """The recipe for this machine: every ISA level for the CPU; for CUDA `architectures`, else those of the GPUs here, else a wheel's.

    Raises BuildError if a compiler is missing.
    """
    csrc, torch = (csrc or beside("csrc")).absolute(), torch or installed_torch()  # ninja runs elsewhere
    if sys.platform != "linux":
        raise BuildError(f"the kernels are built on Linux only and this is {sys.platform}", "run on Linux")
    cxx = find_cxx(env)
    if kind == "cpu":
        levels = tuple(ISA_FLAGS) if platform.machine() == "x86_64" else ("baseline",)
        return Recipe(kind, csrc, levels, torch, cxx)
    chosen = tuple(architectures) or gpu_architectures() or AHEAD_ARCHITECTURES
    for name in chosen:
        if not is_architecture(name):
            raise BuildError(f"{name!r} is no CUDA architecture", "give names such as sm_90a (machine code) or compute_80 (PTX)")
    return Recipe(kind, csrc, chosen, torch, cxx, find_nvcc(env, torch.cuda))


def is_architecture(name: str) -> bool:
    """Whether a name is one of CUDA's for machine code or PTX, such as sm_90a or compute_80."""
    return _ARCHITECTURE.fullmatch(name) is not None


def gpu_architectures() -> tuple[str, ...]:
    """The architectures of the GPUs that this process sees; () where there is none."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    capabilities = sorted({torch.cuda.get_device_capability(index) for index in range(count)})
    # wgmma and setmaxnreg exist in sm_90a only. A GPU too old for the kernels is no reason not to build for the others.
    return tuple(f"sm_{major}{minor}{'a' * ((major, minor) == (9, 0))}" for major, minor in capabilities if major >= 8)


def covers(architectures: Iterable[str], wanted: str) -> bool:
    """Whether code for these CUDA architectures runs on a device of architecture `wanted`.

    Machine code runs on later minor versions of its major version, PTX on anything later, and code with the suffix a only on its own.
    """
    device = _version(wanted)
    for name in architectures:
        built = _version(name)
        later = built <= device and (name.startswith("compute_") or built[0] == device[0])
        if built == device or (later and not name.endswith("a")):
            return True
    return False


def _version(architecture: str) -> tuple[int, int]:
    _, major, minor, _ = _ARCHITECTURE.fullmatch(architecture).groups()
    return int(major), int(minor)


def beside(name: str, package: Path = PACKAGE) -> Path:
    """The folder `csrc` or `passes`: inside the package where it was installed, next to it in a checkout or an editable install."""
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise BuildError(f"the folder {name} is missing from {package}", "install fxfuse again")


def source_hash(kind: str, csrc: Path) -> str:
    """Hash of one library's sources: its own files and the headers that both libraries share."""
    return hash_files(csrc, lambda path: path.suffix in _SOURCE_SUFFIXES and path.suffix not in _OTHER_KIND[kind])


def hash_files(root: Path, wanted: Callable[[Path], bool]) -> str:
    """Hash of the names and contents of the wanted files under a folder."""
    files = sorted(path for path in root.rglob("*") if wanted(path) and path.is_file())
    return digest(*(f"{path.relative_to(root).as_posix()} {digest(path.read_text(encoding='utf-8'))}" for path in files))


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def library_name(kind: str) -> str:
    return f"libfxfuse_{kind}.so"


def record_path(folder: Path, kind: str) -> Path:
    """The record that lies beside a library in its folder."""
    return (folder / library_name(kind)).with_suffix(".json")


def build_files(made: Recipe) -> dict[str, str]:
    """What ninja's working directory starts with, by name: build.ninja and what it names there. The outputs join them."""
    return {"build.ninja": ninja_file(made), VERSION_SCRIPT[0]: VERSION_SCRIPT[1], "stub.cpp": ""}


def ninja_file(made: Recipe) -> str:
    """The build.ninja of a recipe, for a working directory that holds `build_files`."""
    objects = list(_cuda_objects(made) if made.nvcc else _cpu_objects(made))
    if not objects:
        raise BuildError(f"{made.csrc} holds no {made.kind} sources", "install fxfuse again")
    edges = [_edge(name, [str(source)], command) for name, source, command in objects]
    link, stubs = _cuda_link(made) if made.nvcc else (_cpu_link(made), [])
    edges += [_edge(stub, ["stub.cpp"], [str(made.cxx.path), "-shared", f"-Wl,-soname,{stub}"]) for stub in stubs]
    edges.append(_edge(library_name(made.kind), [name for name, _, _ in objects], *link, after=[*stubs, VERSION_SCRIPT[0]]))
    return "rule run\n  command = $tool $in -o $out $libraries\n  description = $out\n" + "".join(edges)


def _cpu_objects(made: Recipe) -> Iterator[tuple[str, Path, list[str]]]:
    command = [str(made.cxx.path), "-c", *CXX_FLAGS, *_includes(made)]
    sources = sorted(made.csrc.glob("*.cpp"))
    for source in sources:
        if not source.name.endswith(".simd.cpp"):
            yield f"{source.name}.o", source, command
    for level in made.architectures:
        for source in sources:
            if source.name.endswith(".simd.cpp"):
                yield f"{source.name}.{level}.o", source, [*command, *ISA_FLAGS[level], f"-DFXFUSE_ISA={level}"]


def _cuda_objects(made: Recipe) -> Iterator[tuple[str, Path, list[str]]]:
    targets = [word for name in made.architectures for word in ("-gencode", f"arch={name.replace('sm_', 'compute_')},code={name}")]
    for source in sorted(made.csrc.glob("*.cu")):
        yield f"{source.name}.o", source, [*_nvcc(made), "-c", *NVCC_FLAGS, *targets, *_includes(made)]


def _cpu_link(made: Recipe) -> tuple[list[str], list[str]]:
    command = [str(made.cxx.path), "-shared", *(f"-Wl,{flag}" for flag in LINKER_FLAGS)]
    return command, [f"-L{made.torch.lib}", "-Wl,--no-as-needed", "-ltorch_cpu"]


def _cuda_link(made: Recipe) -> tuple[tuple[list[str], list[str]], list[str]]:
    """The link command with its libraries, and the stubs it needs: a CPU-only torch has no libtorch_cuda.so to name as NEEDED."""
    stubs = [] if os.path.isfile(made.torch.lib / "libtorch_cuda.so") else ["libtorch_cuda.so"]
    toolkit = made.nvcc.path.parent.parent / "lib"  # nvcc of the PyPI packages looks in lib64, which they do not have
    folders = [f"-L{folder}" for folder in ([toolkit] if os.path.isdir(toolkit) else []) + [".", made.torch.lib]]
    command = [*_nvcc(made), "-shared", "-cudart", "static", *(word for flag in LINKER_FLAGS for word in ("-Xlinker", flag))]
    return (command, [*folders, "-Xlinker", "--no-as-needed", "-ltorch_cuda", "-ltorch_cpu"]), stubs


def _nvcc(made: Recipe) -> list[str]:
    return [str(made.nvcc.path), "-ccbin", str(made.cxx.path)]


def _includes(made: Recipe) -> list[str]:
    return ["-I", str(made.csrc), "-isystem", str(made.torch.include)]


def _edge(output: str, inputs: Sequence[str], command: Sequence[str], libraries: Sequence[str] = (), after: Sequence[str] = ()) -> str:
    escaped = [re.sub(r"([$ :])", r"$\1", name) for name in inputs]
    order = f" | {' '.join(after)}" if after else ""
    variables = "".join(f"  {name} = {shlex.join(words).replace('$', '$$')}\n" for name, words in (("tool", command), ("libraries", libraries)))
    return f"build {output}: run {' '.join(escaped)}{order}\n{variables}"
