"""Two copies of libstdc++ in one process, torch's and one linked into the library: our sources stream nothing, our libraries export nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import static_libstdcxx

from fxfuse import library
from fxfuse.recipe import beside

HERE = Path(__file__).parent
# What reads or sets up the locale of the process, and the headers that bring it.
HEADERS = (
    "iostream|ostream|istream|sstream|fstream|iomanip|ios|iosfwd|streambuf|syncstream|spanstream|strstream|"
    "locale|clocale|locale.h|codecvt|regex|format|print|chrono|filesystem|complex"
)
NAMES = r"(?:basic_)?[io]?(?:string|f|span)?stream|cout|cerr|clog|cin|locale|setlocale|regex|format|print(?:ln)?|chrono|filesystem|put_time"
STREAMS = re.compile(rf"#\s*include\s*[<\"](?:{HEADERS})[>\"]|\bstd::(?:{NAMES})\b|\bsetlocale\s*\(")


def streams_of(source: str) -> list[str]:
    """What a C++ source includes or names of streams and locales, comments aside."""
    return STREAMS.findall(re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL))


def test_our_sources_use_no_streams_and_no_locale() -> None:
    sources = [path for path in beside("csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert len(sources) > 80
    assert {path.name: found for path in sources if (found := streams_of(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "#include <sstream>",
        "# include <iomanip>",
        '#include "locale.h"',
        "std::ostringstream text;",
        "std::basic_ostream<char>& out",
        "std::cerr << 1;",
        "auto t = std::format(x);",
        'setlocale(LC_ALL, "C");',
    ],
)
def test_a_stream_in_a_source_is_seen(line: str) -> None:
    assert streams_of(f"int x; // before\n{line}\n")
    assert not streams_of(f"// {line}\n/* {line} */ std::string text;")


@pytest.mark.compiler
def test_library_exports_nothing() -> None:
    assert static_libstdcxx.exported(library.load("cpu").path) == ""


@pytest.fixture(scope="module")
def static_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return static_libstdcxx.built("cpu", tmp_path_factory.mktemp("static"))


@pytest.mark.compiler
def test_library_with_its_own_libstdcxx_exports_nothing(static_library: Path) -> None:
    assert static_libstdcxx.exported(static_library) == ""


@pytest.mark.compiler
def test_every_op_and_every_refusal_twice_beside_torchs_libstdcxx(static_library: Path) -> None:
    assert static_libstdcxx.run_tests_twice(static_library, str(HERE / "test_refusals.py")) > 100
