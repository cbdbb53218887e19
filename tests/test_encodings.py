"""Text is read and written in an encoding that the source names, so that a legacy locale or a folder with other letters changes nothing."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_package import answer, package_in

import fxfuse
from fxfuse.recipe import beside, library_name

PACKAGE = Path(fxfuse.__file__).parent
SETUP = Path(__file__).parents[1] / "setup.py"
# Calls that open text unless a mode with b says otherwise, with the position of the mode, and those that always do.
OPENERS = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0}
METHODS = ("read_text", "write_text")


def nameless(source: str) -> list[str]:
    """The calls of a Python source that read or write text, in a file or a process, and do not name the encoding."""
    return [ast.unparse(call) for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call) and _is_text(call) and not _is_named(call)]


def _is_named(call: ast.Call) -> bool:
    return any(keyword.arg == "encoding" for keyword in call.keywords)


def _is_text(call: ast.Call) -> bool:
    on = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in METHODS:
        return on is not None
    if name in OPENERS and not (isinstance(on, ast.Name) and (on.id, name) == ("os", "open")):
        # A path's own open() has the mode in front.
        default = "w+b" if name in ("NamedTemporaryFile", "TemporaryFile") else "r"
        return "b" not in _mode(call, OPENERS[name] if on is None or name != "open" or ast.unparse(on) == "io" else 0, default)
    return any(keyword.arg in ("text", "universal_newlines") for keyword in call.keywords)


def _mode(call: ast.Call, position: int, default: str) -> str:
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[position : position + 1]
    return modes[0].value if modes and isinstance(modes[0], ast.Constant) else default


def sources() -> Iterator[Path]:
    for folder in (PACKAGE, beside("passes")):
        yield from folder.rglob("*.py")
    if SETUP.exists():
        yield SETUP


def test_every_call_names_its_encoding() -> None:
    files = list(sources())
    assert len(files) > 70
    assert {path.name: calls for path in files if (calls := nameless(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "call",
    [
        "path.read_text()",
        "path.write_text(text)",
        "open(path)",
        "open(path, 'w')",
        "open(path, mode='a')",
        "path.open()",
        "path.open('w')",
        "io.open(path, 'r')",
        "os.fdopen(descriptor, 'w')",
        "tempfile.NamedTemporaryFile('w', dir=folder)",
        "subprocess.run(command, capture_output=True, text=True)",
        "subprocess.Popen(command, universal_newlines=True)",
    ],
)
def test_a_call_without_an_encoding_is_seen(call: str) -> None:
    assert nameless(call) == [call]
    assert not nameless(call.removesuffix(")") + ("" if call.endswith("()") else ", ") + "encoding='utf-8')")


@pytest.mark.parametrize(
    "call", ["open(path, 'rb')", "path.open('rb')", "path.read_bytes()", "os.open(path, os.O_WRONLY)", "write_text(text, path)", "NamedTemporaryFile(dir=a)"]
)
def test_calls_that_need_none_are_left_alone(call: str) -> None:
    assert not nameless(call)


LETTERS = "Größe 大 é"
USE = """
import os, sys
from pathlib import Path
import fxfuse
from fxfuse import build, doctor
from fxfuse.library import Loader
package = Path(fxfuse.__file__).parents[1] / "small" / "fxfuse"
assert sys.flags.utf8_mode == 0
found = Loader(package=package, declare=lambda: None).load("cpu")
assert found.source == "built" and found.path.exists(), found
assert Loader(package=package, declare=lambda: None).load("cpu").source == "cache"
rows, fuses = doctor.run(Loader(package=package, declare=lambda: None))
assert "library of the cache" in dict(rows)["cpu"], rows
build.build_hash("cpu", package)
build.recipe = lambda kind, architectures, make=build.recipe: make(kind, csrc=package / "csrc")
sys.exit(build.main(["--cpu", "--out", str(package / "out")]))
"""
LOCALES = {
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "C, ascii streams": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    "C.UTF-8, ascii streams": {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    "ISO-8859-1": {"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0"},
}


def made_locale(folder: Path, name: str) -> dict[str, str]:
    """The variable by which a process finds a locale that is made here; skips where it cannot be."""
    language, charmap = name.split(".", 1)
    command = ["localedef", "-i", language, "-f", charmap, str(folder / name)]
    if not shutil.which("localedef") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"localedef makes no {name} here")
    return {"LOCPATH": str(folder)}


@pytest.mark.compiler
@pytest.mark.parametrize("locale", LOCALES)
def test_builds_and_loads_in_a_folder_with_other_letters(tmp_path: Path, locale: str) -> None:
    """fxfuse, a package of kernels, the cache and the output, all below the folder."""
    folder = tmp_path / LETTERS
    for name, source in (("fxfuse", PACKAGE), ("passes", beside("passes"))):
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "lib", "csrc"))
    package_in(folder / "small")
    env = {**os.environ, **LOCALES[locale], **(made_locale(tmp_path, "de_DE.ISO-8859-1") if locale == "ISO-8859-1" else {}), "PYTHONPATH": str(folder), "FXFUSE_CACHE_DIR": str(folder / "cache"), "FXFUSE_LIBRARY_DIR": ""}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", USE], env=env, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert (folder / "small" / "fxfuse" / "out" / library_name("cpu")).is_file()
    (library,) = (folder / "cache").glob("cpu-*/*.so")
    assert answer(library) == "42"
