"""Loading the op libraries: which file serves a device type, from where, and the sentence when none does.

Searched in this order: $FXFUSE_LIBRARY_DIR (built elsewhere), `fxfuse/lib` (a wheel's), the cache, a build now ($FXFUSE_BUILD=0 forbids it).
Importing this module touches no device and starts no process.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .recipe import KINDS, PACKAGE, beside, covers, gpu_architectures, library_name, recipe, source_hash
from .record import REBUILD, Record, check_whole, is_built, read_record
from .toolchain import BuildError, Torch, cache_dir, cuda_major, find_ninja, installed_torch, obstacle, unusable

OLDEST_CAPABILITY = (8, 0)
# What to do about a library that is refused, by where it was found.
_MEND = {
    "override": "unset FXFUSE_LIBRARY_DIR, or build it again with: python -m fxfuse.build --cpu --cuda --out DIR",
    "wheel": "run: pip install --force-reinstall --no-deps --no-binary fxfuse fxfuse",
    "cache": REBUILD,
    "built": REBUILD,
}


@dataclass(frozen=True)
class Library:
    """A library file for one device type.

    source: "override", "wheel", "cache" or "built"; "buildable" for one that is not there yet, whose path is where it would be.
    passed_over: sentences about libraries that were found earlier in the search and refused.
    """

    path: Path
    kind: str
    source: str
    architectures: tuple[str, ...]
    hash: str
    passed_over: tuple[str, ...] = ()


class Loader:
    """Loads each library at most once a process and remembers a failure, so that it is not tried again for each graph.

    env: the environment, read at each search. package: the folder that holds `lib` and `csrc`.
    declare: declares the schemas of the ops, to which a library adds its kernels; by default those of every chain.
    """

    def __init__(
        self,
        env: Mapping[str, str] = os.environ,
        package: Path = PACKAGE,
        declare: Callable[[], object] | None = None,
    ):
        self._env, self._package, self._declare = env, package, declare or _declare_ops
        self._lock = threading.Lock()
        self._results: dict[str, Library | BuildError] = {}
        if hasattr(os, "register_at_fork"):  # another thread may hold the lock at a fork, and nobody would release it in the child
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def load(self, kind: str, build: bool = True) -> Library:
        """Loads the library for a device type, "cpu" or "cuda", and returns it; raises BuildError with the sentence why not.

        build: whether it may be built now. If not, and it would have to be, a Library with source "buildable" comes back unloaded.
        """
        with self._lock:
            result = self._results.get(kind)
            if result is None:
                try:
                    result = self._loaded(kind, build)
                except BuildError as error:
                    result = error
                if isinstance(result, BuildError) or result.source != "buildable":
                    self._results[kind] = result
        if isinstance(result, BuildError):
            raise result.with_traceback(None)
        return result

    def unavailable(self, device: str, build: bool = True) -> str | None:
        """None if the kernels for a device ("cpu", "cuda", "cuda:1") can be used, else the sentence why not. See `load` for `build`."""
        try:
            check_device(device)
            self.load(device.partition(":")[0], build)
        except BuildError as error:
            return error.summary
        return None

    def _loaded(self, kind: str, build: bool) -> Library:
        found = search(kind, self._env, self._package)
        if found.source == "buildable":
            if not build:
                return found
            found = self._built(found)
        self._declare()
        return _opened(found)

    def _built(self, found: Library) -> Library:
        from .build import ensure

        folder = ensure(recipe(found.kind, csrc=beside("csrc", self._package), env=self._env), cache_dir(self._env), self._env)
        return replace(found, path=folder / library_name(found.kind), source="built")


def _declare_ops() -> None:
    from .chain import chains

    chains()


def check_device(device: str) -> None:
    """Raises BuildError if the kernels do not run on a device, whatever libraries there are."""
    kind, _, index = device.partition(":")
    if kind not in KINDS:
        raise BuildError(f"there are no kernels for device type {kind!r}", f"move the model to one of {', '.join(KINDS)}")
    if kind == "cpu":
        return
    import torch

    if torch.version.cuda is None:
        raise BuildError(f"torch {torch.__version__} is built without CUDA", "install a CUDA build of torch")
    if not torch.cuda.is_available():
        raise BuildError("torch sees no CUDA device", "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES")
    indices = [int(index)] if index else range(torch.cuda.device_count())
    newest = max(indices, key=torch.cuda.get_device_capability)
    capability = torch.cuda.get_device_capability(newest)
    if capability < OLDEST_CAPABILITY:
        name, oldest = torch.cuda.get_device_name(newest), "sm_{}{}".format(*OLDEST_CAPABILITY)
        raise BuildError(f"{name} is sm_{capability[0]}{capability[1]} and the kernels need {oldest} or newer", "run on a newer GPU")


def search(kind: str, env: Mapping[str, str] = os.environ, package: Path = PACKAGE) -> Library:
    """The library that would serve a device type, without building or loading anything; raises BuildError if there is none."""
    torch, csrc, name = installed_torch(), beside("csrc", package), library_name(kind)
    passed_over: list[str] = []
    if override := env.get("FXFUSE_LIBRARY_DIR"):
        if os.path.exists(Path(override) / name):
            return _prebuilt(Path(override), kind, "override", csrc, torch)  # asked for by name: refused rather than passed over
        passed_over.append(f"FXFUSE_LIBRARY_DIR={override} holds no readable {name}")
    if os.path.exists(package / "lib" / name):
        try:
            return replace(_prebuilt(package / "lib", kind, "wheel", csrc, torch), passed_over=tuple(passed_over))
        except BuildError as error:
            passed_over.append(error.sentence)
    try:
        found = _cached_or_buildable(kind, env, csrc, torch, passed_over)
    except BuildError as error:
        raise BuildError("; ".join([*passed_over, error.sentence]), error.mend, error.errors) from error
    return replace(found, passed_over=tuple(passed_over))


def _cached_or_buildable(kind: str, env: Mapping[str, str], csrc: Path, torch: Torch, passed_over: list[str]) -> Library:
    cache, name = cache_dir(env), library_name(kind)
    try:
        made = recipe(kind, csrc=csrc, env=env, torch=torch)
    except BuildError:
        # Without a compiler the key is unknown; a library that one built here before is as good.
        for folder in sorted(cache.glob(f"{kind}-*/")):
            with contextlib.suppress(BuildError):
                return _prebuilt(folder, kind, "cache", csrc, torch)
        raise
    folder = cache / f"{kind}-{made.key}"
    try:
        if is_built(folder, kind, passed_over.append):
            return Library(folder / name, kind, "cache", made.architectures, made.key)
    except OSError as error:
        raise unusable(cache, error) from error
    if env.get("FXFUSE_BUILD") == "0":
        raise BuildError(f"{name} is not built yet and FXFUSE_BUILD=0 forbids to build it at first use", "unset FXFUSE_BUILD")
    find_ninja(env)
    if why := obstacle(cache):
        raise unusable(cache, why)
    return Library(folder / name, kind, "buildable", made.architectures, made.key)


def _prebuilt(folder: Path, kind: str, source: str, csrc: Path, torch: Torch) -> Library:
    """The library in a folder, if its record says that it fits this fxfuse, this torch and these devices, and it is whole."""
    path, mend = folder / library_name(kind), _MEND[source]
    record = read_record(folder, kind, mend)
    if mismatch := _mismatch(path, kind, record, csrc, torch):
        raise BuildError(mismatch, mend)
    check_whole(path, record, mend)
    return Library(path, kind, source, record.architectures, record.key)


def _mismatch(path: Path, kind: str, record: Record, csrc: Path, torch: Torch) -> str | None:
    if record.machine != platform.machine():
        return f"{path} is for {record.machine} and this machine is {platform.machine()}"
    if record.oldest_torch > torch.release:
        return f"{path} needs torch {'.'.join(map(str, record.oldest_torch))} and {torch.version} is installed"
    if record.sources != source_hash(kind, csrc):
        return f"{path} was built from other kernel sources than those of this fxfuse"
    if kind == "cuda" and record.cuda != cuda_major(torch.cuda):
        return f"{path} is for CUDA {record.cuda} and torch is built {f'for CUDA {torch.cuda}' if torch.cuda else 'without CUDA'}"
    missing = [name for name in (gpu_architectures() if kind == "cuda" else ()) if not covers(record.architectures, name)]
    if missing:
        return f"{path} is for {', '.join(record.architectures)} and has no code for {', '.join(missing)}"
    return None


def _opened(found: Library) -> Library:
    import torch

    try:
        torch.ops.load_library(str(found.path))
    except OSError as error:
        raise BuildError(f"{found.path} cannot be loaded ({error.__cause__ or error})", _MEND[found.source]) from error
    return found


_loader = Loader()
load = _loader.load
unavailable = _loader.unavailable
