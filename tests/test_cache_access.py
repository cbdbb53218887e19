"""A cache directory that may not be read, searched or written, or is none: everywhere the one sentence, and no exception of Python's."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_package import cpu_recipe, loader, package_in, said

from fxfuse import build, doctor
from fxfuse.recipe import library_name, record_path
from fxfuse.toolchain import BuildError, cache_dir

pytestmark = pytest.mark.compiler

NOBODY = 65534
MEND = "set FXFUSE_CACHE_DIR to a directory that can be written"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user may enter (pytest's own is one user's alone), with a package in it."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a fork of a process that uses CUDA may not
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        package_in(Path(folder))
        yield Path(folder)


def told(place: Path, **env: str) -> dict[str, str]:
    """What users of the cache are told: the loader in a compilation, with and without building; doctor; the builder; the command."""
    package, env = place / "fxfuse", {"PATH": os.environ["PATH"], **env}
    rows, fuses = doctor.run(loader(package, env), env)
    found = {
        "loader": str(loader(package, env).unavailable("cpu")),
        "explain": str(loader(package, env).unavailable("cpu", build=False)),
        "doctor": f"{rows}, {fuses}",
    }
    try:
        build.ensure(cpu_recipe(package, env), cache_dir(env), env)
    except BuildError as error:
        found["builder"] = error.summary
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        for name in ("FXFUSE_CACHE_DIR", "HOME"):
            patch.setenv(name, env.get(name, ""))
        patch.setattr(build, "recipe", lambda kind, architectures: cpu_recipe(package, env))
        found["command"] = f"{build.main(['--cpu'])} {errors.getvalue()}"
    return found


def told_to_nobody(place: Path, **env: str) -> dict[str, str]:
    """The same for another user: what it imports is imported by the one who may."""
    told(place, FXFUSE_CACHE_DIR=str(place / "other cache"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer = told(place, **env)
        except BaseException:
            answer = {"failed": traceback.format_exc()}
        with open(writer, "w", encoding="utf-8") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        answer = json.load(file)
    os.waitpid(child, 0)
    assert "failed" not in answer, answer["failed"]
    return answer


def assert_told(answer: dict[str, str], cache: Path) -> None:
    sentence = f"the cache directory {cache} cannot be used ("
    for who in ("loader", "explain", "builder"):
        assert answer[who].startswith(sentence) and answer[who].endswith(MEND), f"{who}: {answer[who]}"
    assert f"chains are left to Inductor: {sentence}" in answer["doctor"] and f"('to mend', '{MEND}')" in answer["doctor"]
    assert answer["command"].startswith(f"1 fxfuse: {sentence}") and answer["command"].count("\n") == 1


def a_file(cache: Path) -> None:
    cache.touch()


def a_link_to_nothing(cache: Path) -> None:
    cache.symlink_to(cache.with_name("nothing"))


def below_a_file(cache: Path) -> None:
    cache.parent.touch()


def a_link_to_itself(cache: Path) -> None:
    cache.symlink_to(cache)


@pytest.mark.parametrize("make", [a_file, a_link_to_nothing, below_a_file, a_link_to_itself], ids=lambda make: make.__name__)
def test_something_else_is_in_its_place(place: Path, make: Callable[[Path], None]) -> None:
    cache = place / "parent" / "cache" if make is below_a_file else place / "cache"
    make(cache)
    assert_told(told(place, FXFUSE_CACHE_DIR=str(cache)), cache)


def is_closed(folder: Path, of: Path) -> None:
    folder.chmod(0o700)



def is_closed_above(folder: Path, of: Path) -> None:
    folder.parent.chmod(0o700)


def library_is_closed(folder: Path, of: Path) -> None:
    of.chmod(0o700)


def record_is_closed(folder: Path, of: Path) -> None:
    record_path(of, "cpu").chmod(0o600)


def library_file_is_closed(folder: Path, of: Path) -> None:
    (of / library_name("cpu")).chmod(0o600)


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    shut = next((folder for folder in Path(sys.prefix).resolve().parents if not folder.stat().st_mode & stat.S_IXOTH), None)
    if shut is not None:
        pytest.skip(f"another user cannot import from {sys.prefix}: {shut} is shut")


def built_into(cache: Path, place: Path) -> Path:
    folder, _ = said(cpu_recipe(place / "fxfuse", {"PATH": os.environ["PATH"]}), {"PATH": os.environ["PATH"], "FXFUSE_CACHE_DIR": str(cache)})
    for path in (cache.parent, cache, folder):
        path.chmod(0o755)
    return folder


CLOSED = [is_closed, is_closed_above, library_is_closed, record_is_closed, library_file_is_closed]


@pytest.mark.parametrize("close", CLOSED, ids=lambda close: close.__name__)
def test_another_user_may_not_read_it(place: Path, root: None, close: Callable[[Path, Path], None]) -> None:
    cache = place / "home" / "cache"
    close(cache, built_into(cache, place))
    assert_told(told_to_nobody(place, FXFUSE_CACHE_DIR=str(cache)), cache)


def test_another_user_may_read_and_not_write_it(place: Path, root: None) -> None:
    cache = place / "cache"
    cache.mkdir(mode=0o755)
    assert_told(told_to_nobody(place, FXFUSE_CACHE_DIR=str(cache)), cache)
    built_into(cache, place)
    answer = told_to_nobody(place, FXFUSE_CACHE_DIR=str(cache))
    assert answer["loader"] == answer["explain"] == "None" and "builder" not in answer, "a library that may be read serves"


def test_home_of_another_user(place: Path, root: None) -> None:
    """HOME=/root as another uid, as under `docker --user`."""
    home = place / "root"
    home.mkdir(mode=0o700)
    assert_told(told_to_nobody(place, HOME=str(home)), home / ".cache" / "fxfuse")
