"""What is printed, in any encoding of the output: reports, every command, the message of an assertion, the coverage summary."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_pytest_plugin import PLUGIN
from torch import nn

import fxfuse
from fxfuse.report import Declined, Report


class Odd(nn.Module):
    """A module whose name is not ASCII."""

    def __init__(self) -> None:
        super().__init__()
        self.größe = nn.ModuleList([nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.größe[1](F.gelu(self.größe[0](x)).sin())).sin()


ENCODINGS = {"utf-8": "größe.0", "latin-1": "größe.0", "ascii": r"gr\xf6\xdfe.0", None: "größe.0"}


@pytest.mark.usefixtures("explains")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_report_is_in_characters_that_the_output_has(encoding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    report = fxfuse.explain(Odd(), torch.ones(2, 4, 9, 9))
    stream = io.StringIO() if encoding is None else io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "__stdout__", None)
        print(report, report.full())
        stream.seek(0)
        text = stream.read()
    assert ENCODINGS[encoding] in text and "gelu is followed by sin" in text
    boxes = encoding in ("utf-8", None)
    assert ("┌" in text) == boxes and ("+---" in text) != boxes
    assert ("2 × conv_gelu_pool" in text) == (encoding != "ascii") and ("2 x conv_gelu_pool" in text) == (encoding == "ascii")


def test_what_is_captured_is_printed_by_the_stream_that_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "__stdout__", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        text = str(Report(declined=[Declined("conv_gelu_pool", "gelu", "gelu", "größer", "")] * 2))
    assert text.isascii() and r"gr\xf6\xdfer" in text and "2 x conv_gelu_pool" in text


COMMANDS = """
import contextlib, sys
from fxfuse import library
from fxfuse.cli import main
library.unavailable = lambda device, build=True: None
target = sys.argv[1]
print(main(["explain", target, "--select", "always", "--expect", "conv_gelu_pool=0", "--all"]))
print(main(["passes"]), main(["doctor"]) in (0, 1), main(["explain", target + "ä"]))
with contextlib.suppress(SystemExit):
    main(["explain", "--hilfe-für", target])
import fxfuse, torch
from mine import factory
model, inputs = factory()
sys.stdout.reconfigure(errors="strict")
print(fxfuse.explain(model, *inputs))
"""
MINE = """
import torch
from torch import nn

class Größe(nn.Module):
    def __init__(self):
        super().__init__()
        self.größe = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return torch.sin(nn.functional.gelu(self.größe(x))), nn.functional.gelu(self.größe(x)).mean((2, 3))

def factory():
    return Größe(), (torch.ones(2, 4, 9, 9),)
"""
LOCALES = {
    "ascii streams": {"PYTHONIOENCODING": "ascii"},
    "the locale C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("locale", LOCALES)
def test_commands_print_in_any_locale(locale: str, tmp_path: Path) -> None:
    """explain, passes, doctor, errors and reports, of a model in a folder and with names that are not ASCII."""
    folder = tmp_path / "Größe 大"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name not in ("LANG", "PYTHONIOENCODING")} | LOCALES[locale]
    env |= {
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "FXFUSE_CACHE_DIR": str(folder / "cache"),
    }
    (tmp_path / "commands.py").write_text(COMMANDS, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "commands.py", f"{folder / 'mine.py'}:factory"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=300)
    out, err = done.stdout.decode("ascii"), done.stderr.decode("ascii")
    assert done.returncode == 0, err
    # A file name of another encoding than the locale's has surrogates.
    assert (
        r"gr\xf6\xdfe" in out
        and (r"Gr\xf6\xdfe" in out or r"Gr\udcc3\udcb6" in out)
        and "| fused chain" in out
        and "| declined chain" in out
        and "\\u25" not in out
    )
    assert "gelu is followed by sin" in out and "expected conv_gelu_pool not to be fused, found it fused 1 time" in out
    assert "| chain" in out and "C++ compiler" in out and "0 True 2" in out and "cache" in out
    assert (
        r"has no attribute 'factory\xe4'" in err
        and r"unrecognized arguments: --hilfe-f\xfcr" in err
        and "Error" not in err.replace("AttributeError", "")
    )


def test_the_coverage_summary_prints_in_ascii(tmp_path: Path) -> None:
    """And the message of an assertion, though pytest captures in UTF-8."""
    (tmp_path / "test_own.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def test_größe(assert_fused):\n    with torch.no_grad():\n"
        "        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.ReLU())\n"
        '        assert_fused(model, torch.ones(2, 2, 8, 8), {"conv_gelu_pool": 1})\n',
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, "--fxfuse-coverage", "--show-capture=no", "test_own.py"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, cwd=tmp_path, capture_output=True, timeout=300)
    out = done.stdout.decode("ascii")
    assert done.returncode == 1, out
    assert "| 1 x gelu is followed by relu" in out and "| declined chain" in out and "\\u25" not in out
