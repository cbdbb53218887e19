"""The builder of both op libraries, for both moments: ahead of time into a wheel, and at first use into a cache.

A build is one directory `<cache>/<kind>-<key>`: the library, its record (JSON) and the compilers' log. ninja compiles in a temporary
directory that is renamed when it is complete. `python -m fxfuse.build` builds by hand, also for GPUs that this machine does not have.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from .recipe import KINDS, PACKAGE, Recipe, beside, build_files, digest, gpu_architectures, hash_files, library_name, recipe, record_path, source_hash
from .record import is_built, write_record
from .toolchain import BuildError, cache_dir, find_ninja, unusable

_LOCK_TIMEOUT_S = 3600
_ERROR = re.compile(r"\berror\b|\bfatal\b|undefined reference|cannot find|No space left|Killed", re.IGNORECASE)


@functools.cache
def build_hash(kind: str, package: Path = PACKAGE) -> str:
    """Hash of all that a compiled graph relies on when it calls an op: the kernels, the schemas and fakes in passes, and what traces their gradients.

    It is the same before and after a library is loaded, so a warm Inductor cache is found again.
    """
    passes = hash_files(beside("passes", package), lambda path: path.suffix == ".py")
    return digest(source_hash(kind, beside("csrc", package)), passes, hash_files(package, lambda path: path == package / "training.py"))


def say(text: str) -> None:
    """Progress for the user, who would otherwise look at a compilation that stands still for minutes."""
    print(text, end="", file=sys.stderr, flush=True)


def ensure(made: Recipe, cache: Path, env: Mapping[str, str] = os.environ, say: Callable[[str], None] = say) -> Path:
    """The directory that holds the recipe's library, built now unless it is there and whole.

    Of several processes one builds and the others wait; a killed build leaves nothing behind that the next one trips over.
    """
    final = cache / f"{made.kind}-{made.key}"
    try:
        if is_built(final, made.kind, lambda damage: None):
            return final
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{final.name}.lock", say):
            if not is_built(final, made.kind, lambda damage: say(f"fxfuse: {damage} and is built anew\n")):
                _build(made, final, env, say)
    except OSError as error:
        raise unusable(cache, error) from error
    return final


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)  # held by an open file, so that it ends with the process that holds it
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"fxfuse: waiting for another process that builds {path.stem}\n")
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except Timeout:
            raise BuildError(f"another process has held {path} for {_LOCK_TIMEOUT_S} s", "end that process") from None
    try:
        yield
    finally:
        lock.release()


def _build(made: Recipe, final: Path, env: Mapping[str, str], say: Callable[[str], None]) -> None:
    for leftover in final.parent.glob(f"{final.name}.tmp-*"):  # a killed build's: its lock is ours now
        shutil.rmtree(leftover, ignore_errors=True)
    say(f"fxfuse: building the {made.kind} kernels for {', '.join(made.architectures)} with {made.compilers} into {final} ... ")
    start = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=f"{final.name}.tmp-", dir=final.parent))
    try:
        log = _compile(made, work, env)
        result = work / final.name
        result.mkdir()
        os.replace(work / library_name(made.kind), result / library_name(made.kind))
        write_record(result, made)
        log_path(result, made.kind).write_text(log, encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        os.rename(result, final)
    except BaseException:
        say(f"failed after {time.monotonic() - start:.1f} s\n")
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{time.monotonic() - start:.1f} s\n")


def _compile(made: Recipe, work: Path, env: Mapping[str, str]) -> str:
    """Runs ninja in `work` and returns what the compilers said. $MAX_JOBS bounds the compilers that run at a time."""
    for name, text in build_files(made).items():
        (work / name).write_bytes(os.fsencode(text))  # paths byte for byte as the file system has them, whatever the locale
    ninja = find_ninja(env)
    jobs = ["-j", env["MAX_JOBS"]] if env.get("MAX_JOBS") else []
    try:
        done = subprocess.run(
            [ninja, *jobs],
            cwd=work,
            env={**env, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"{ninja} does not run: {error}", "run: pip install --force-reinstall ninja") from error
    if done.returncode:
        whole = work.parent / f"{made.kind}-{made.key}.failed.log"
        whole.write_text(done.stdout, encoding="utf-8")
        errors = _first_errors(done.stdout)
        raise BuildError(f"the {made.kind} kernels do not compile with {made.compilers}: {errors[0]}", f"all errors are in {whole}", errors[1:])
    return done.stdout


def _first_errors(log: str) -> list[str]:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and not line.startswith("FAILED:")]
    return (errors or lines[-5:] or ["no output"])[:5]


def log_path(folder: Path, kind: str) -> Path:
    return (folder / library_name(kind)).with_suffix(".log")


def copy(built: Path, kind: str, folder: Path) -> None:
    """A built library and its record, put into a folder such as a wheel's `fxfuse/lib` or a $FXFUSE_LIBRARY_DIR."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (record_path(built, kind), built / library_name(kind)):
        temporary = folder / f"{source.name}.tmp"
        shutil.copyfile(source, temporary)
        os.replace(temporary, folder / source.name)


def ptxas_table(log: str) -> str:
    """What ptxas said in a build's log, a row for each kernel and architecture, those that spill first."""
    from tabulate import tabulate

    found = re.findall(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)", log, re.S
    )
    names = _demangled([kernel for kernel, *_ in found])
    rows = [
        (names[kernel], arch, int(registers), int(stores), int(loads), int((re.search(r"(\d+) bytes smem", rest) or [0, 0])[1]))
        for kernel, arch, stores, loads, registers, rest in found
    ]
    rows.sort(key=lambda row: (-row[3] - row[4], row[0], row[1]))
    table = tabulate(rows, headers=("kernel", "architecture", "registers", "spill stores, B", "spill loads, B", "static smem, B"))
    return f"{table}\n{len(rows)} kernels, {sum(row[3] + row[4] > 0 for row in rows)} of them spill"


def _demangled(names: Sequence[str]) -> dict[str, str]:
    if not names or not shutil.which("c++filt"):
        return {name: name for name in names}
    done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, encoding="utf-8", check=True)
    return dict(zip(names, done.stdout.splitlines(), strict=True))


def _kinds(args: argparse.Namespace) -> list[str]:
    asked = [kind for kind in KINDS if getattr(args, kind)]
    if args.arch and "cuda" not in asked:
        asked.append("cuda")
    return asked or ["cpu"] + ["cuda"] * bool(gpu_architectures())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fxfuse.build", description="Builds the op libraries ahead of their first use.")
    parser.add_argument("--cpu", action="store_true", help="the CPU library; without a choice, this one and, where a GPU is, the CUDA one")
    parser.add_argument("--cuda", action="store_true", help="the CUDA library, for the GPUs here, else for a wheel's architectures")
    parser.add_argument("--arch", nargs="+", default=(), metavar="NAME", help="CUDA architectures: sm_90a (machine code), compute_80 (PTX)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="copy the libraries there too, for FXFUSE_LIBRARY_DIR on another machine")
    parser.add_argument("--ptxas", action="store_true", help="print each kernel's registers, spills and shared memory")
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path with letters that the terminal's encoding does not have
    try:
        for kind in _kinds(args):
            built = ensure(recipe(kind, args.arch), cache_dir())
            print(built / library_name(kind))
            if args.out:
                copy(built, kind, args.out)
            if args.ptxas and kind == "cuda":
                print(ptxas_table(log_path(built, kind).read_text(encoding="utf-8")))
    except (BuildError, OSError) as error:  # OSError: DIR cannot be written
        print(f"fxfuse: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
