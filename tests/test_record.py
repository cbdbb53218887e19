"""A library of which a part is missing or changed is never opened: built anew in the cache, refused with a sentence elsewhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_package import cpu_recipe, env_in, fake_recipe, loader, package_in, said, write_library

from fxfuse import doctor
from fxfuse.build import copy
from fxfuse.library import search
from fxfuse.record import is_built, read_record
from fxfuse.recipe import library_name, record_path
from fxfuse.toolchain import BuildError


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return package_in(tmp_path)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return env_in(tmp_path)


def flip(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def changed(**values: Any) -> Callable[[Path, Path], None]:
    """Another value in the record; without the entry where it is `...`."""

    def change(library: Path, record: Path) -> None:
        entries = {**json.loads(record.read_text(encoding="utf-8")), **values}
        record.write_text(json.dumps({name: value for name, value in entries.items() if value is not ...}), encoding="utf-8")

    return change


# Of a library and its record, with what is told of it.
DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "truncated": (lambda library, record: os.truncate(library, 5000), "is damaged (it has 5000 bytes and was built with "),
    "of no length": (lambda library, record: os.truncate(library, 0), "is damaged (it has 0 bytes and was built with "),
    "longer": (lambda library, record: os.truncate(library, 1 << 20), "is damaged (it has 1048576 bytes"),
    "one bit changed": (lambda library, record: flip(library), "is damaged (its content is not what was built)"),
    "no record": (lambda library, record: record.unlink(), "has no record beside it that can be read (No such file or directory)"),
    "record cut short": (lambda library, record: os.truncate(record, 40), "has no record beside it that can be read ("),
    "record of no length": (lambda library, record: os.truncate(record, 0), "has no record beside it that can be read ("),
    "record of no text": (lambda library, record: record.write_bytes(b"\xff\xfe"), "has no record beside it that can be read ("),
    "record of a list": (lambda library, record: record.write_text("[]", encoding="utf-8"), "(it is a list, not a table)"),
    "record without size": (changed(size=...), "(it says no size)"),
    "record without hash": (changed(sha256=...), "(it says no sha256)"),
    "size of another type": (changed(size="large"), "(its size is 'large')"),
    "architectures of another type": (changed(architectures="avx2"), "(its architectures is 'avx2')"),
    "torch of another type": (changed(oldest_torch=["2", "11"]), "(its oldest_torch is ['2', '11'])"),
    "kind of another type": (changed(kind=None), "(its kind is None)"),
}
GONE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no library": (lambda library, record: library.unlink(), "is damaged (No such file or directory)"),
    "a folder as library": (lambda library, record: (library.unlink(), library.mkdir()), "is damaged ("),
}


def damage(folder: Path, name: str) -> str:
    """Damages the library in a folder and returns what is to be told of it."""
    change, sentence = {**DAMAGES, **GONE}[name]
    change(folder / library_name("cpu"), record_path(folder, "cpu"))
    return sentence


@pytest.mark.compiler
@pytest.mark.parametrize("name", [*DAMAGES, *GONE])
def test_damaged_library_in_the_cache_is_built_anew(package: Path, env: dict[str, str], capfd: pytest.CaptureFixture, name: str) -> None:
    folder, _ = said(cpu_recipe(package, env), env)
    sentence = damage(folder, name)
    shared = loader(package, env)
    assert shared.load("cpu", build=False).source == "buildable"
    found = shared.load("cpu")
    assert found.source == "built" and len(found.passed_over) == 1 and sentence in found.passed_over[0]
    told = capfd.readouterr().err
    assert f"{found.passed_over[0]} and is built anew\n" in told and told.count("building") == 1
    assert is_built(folder, "cpu", pytest.fail)
    assert loader(package, env).load("cpu").source == "cache"


@pytest.mark.compiler
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("place", ["override", "wheel"])
def test_damaged_library_elsewhere_is_refused(package: Path, env: dict[str, str], tmp_path: Path, place: str, name: str) -> None:
    folder = package / "lib" if place == "wheel" else tmp_path / "elsewhere"
    copy(said(cpu_recipe(package, env), env)[0], "cpu", folder)
    sentence = damage(folder, name)
    if place == "wheel":
        found = search("cpu", env, package)
        assert found.source == "cache" and sentence in found.passed_over[0]
        return
    with pytest.raises(BuildError) as refusal:
        search("cpu", {**env, "FXFUSE_LIBRARY_DIR": str(folder)}, package)
    assert sentence in refusal.value.sentence and "unset FXFUSE_LIBRARY_DIR" in refusal.value.mend


@pytest.mark.compiler
def test_damaged_library_that_cannot_be_built_anew_is_told_with_the_reason(package: Path, env: dict[str, str]) -> None:
    folder, _ = said(cpu_recipe(package, env), env)
    sentence = damage(folder, "truncated")
    told = loader(package, {**env, "FXFUSE_BUILD": "0"}).unavailable("cpu")
    assert sentence in told and "FXFUSE_BUILD=0 forbids" in told
    with pytest.raises(BuildError, match="no C\\+\\+ compiler was found"):
        search("cpu", {**env, "PATH": "/nowhere"}, package)


@pytest.mark.compiler
@pytest.mark.parametrize("build", [False, True])
def test_doctor_tells_of_a_damaged_library(package: Path, env: dict[str, str], build: bool) -> None:
    folder, _ = said(cpu_recipe(package, env), env)
    sentence = damage(folder, "truncated")
    row = dict(doctor.run(loader(package, env), env, build)[0])["cpu"]
    assert row.startswith("chains are fused") and sentence in row


@pytest.mark.parametrize("architectures", [["sm_90a", "avx2"], ["90"], [""]], ids=str)
def test_record_of_architectures_that_are_none_is_refused(package: Path, tmp_path: Path, architectures: list[str]) -> None:
    write_library(tmp_path / "lib", fake_recipe(package, tmp_path, "cuda", ("sm_90a",)), architectures=architectures)
    with pytest.raises(BuildError, match="its architectures are"):
        read_record(tmp_path / "lib", "cuda")


def test_library_of_another_kind_under_this_name_is_refused(package: Path, tmp_path: Path) -> None:
    """Both files are whole, and the library is not what its name says."""
    folder = tmp_path / "lib"
    write_library(folder, fake_recipe(package, tmp_path, "cuda", ("sm_90a",)))
    (folder / library_name("cuda")).rename(folder / library_name("cpu"))
    record_path(folder, "cuda").rename(record_path(folder, "cpu"))
    with pytest.raises(BuildError, match="its kind is 'cuda'"):
        search("cpu", {"CXX": sys.executable, "FXFUSE_LIBRARY_DIR": str(folder)}, package)
