"""Dumps: the folder of every compiled graph, its report and scripts; the artifacts in torch's trace; fxfuse's loggers."""

from __future__ import annotations

import ast
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, ConvNormPoolGelu
from pages import data_of
from test_processes import PROGRAM, run
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import fxfuse
from fxfuse import compare, dump, folder
from fxfuse.report import Candidate, Declined, Fused

pytestmark = pytest.mark.compiler

# What two processes that do the same may tell differently.
VARYING = ("pid", "time")


class Several(nn.Module):
    """Chain A, a chain B whose inner value is read twice, and one that stops at its second step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = ConvNormPoolGelu(), ConvGeluPool(3), ConvGeluPool(3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.b.gelu(self.b.conv(x))
        return self.a(x), self.b.pool(y), y.relu(), self.c.gelu(self.c.conv(x)).tanh()


def volume() -> torch.Tensor:
    return torch.randn(2, 4, 6, 6, 12)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(dump, "_numbers", itertools.count())
    monkeypatch.setattr(folder, "_unwritable", set())
    with torch.no_grad():
        yield


def dumped(directory: Path, model: Any, *args: torch.Tensor, dynamic: bool | None = None, **options: Any) -> list[Path]:
    """The folders that a compiled call leaves, whose result is eager's."""
    own = {"fxfuse.select": "always", "fxfuse.dump": directory, **{f"fxfuse.{name}": value for name, value in options.items()}}
    result = torch.compile(model, backend="fxfuse", options=own, dynamic=dynamic)(*args)
    torch.testing.assert_close(result, model(*args))
    return sorted(directory.iterdir())


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def rerun(script: Path) -> subprocess.CompletedProcess[str]:
    # torch warns where NumPy is missing.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"}
    return subprocess.run([sys.executable, script], env=environment, cwd=script.parent, capture_output=True, text=True, timeout=300)


def names(record: type) -> set[str]:
    return set(record.__dataclass_fields__)


def test_a_folder_holds_the_graph_the_report_and_the_scripts(tmp_path: Path) -> None:
    (made,) = dumped(tmp_path, Several(), volume())
    assert made.name == f"0000-pid{os.getpid()}"
    report = told(made)
    assert sorted(path.name for path in made.iterdir()) == sorted([*report["files"], "report.json"])
    before, after = ((made / name).read_text() for name in ("before.py", "after.py"))
    for text in (before, after):
        ast.parse(text)
        assert '"f32[2, 4, 6, 6, 12][1728, 432, 72, 12, 1]cpu"' in text
    assert "models.py:" in before and "test_dump.py:" in before
    assert "torch.nn.functional.layer_norm" in before and "torch.ops.fxfuse" not in before
    assert "torch.ops.fxfuse.norm_pool_gelu" in after and "torch.nn.functional.layer_norm" not in after


def test_the_report_holds_everything(tmp_path: Path) -> None:
    (made,) = dumped(tmp_path, Several(), volume())
    report, kept = told(made), fxfuse.reports()[-1]
    assert (report["schema"], report["number"], report["pid"], report["rank"], report["stopped"]) == (2, 0, os.getpid(), None, None)
    assert (report["torch"], report["cuda"], report["fxfuse"]) == (torch.__version__, torch.version.cuda, fxfuse.__version__)
    assert report["time"].endswith("+00:00") and report["compile_id"].endswith("/0")
    assert [device["device"] for device in report["devices"]] == ["cpu"] and "threads" in report["devices"][0]["name"]
    expected = {"select": "always", "strict": False, "passes": None, "mode": None, "dump": str(tmp_path), "backward": "auto", "inductor": {}}
    assert report["options"] == expected
    (fused,) = report["fused"]
    assert set(fused) == names(Fused) | {"repro", "no_repro"} and set(fused["candidates"][0]) == names(Candidate)
    assert fused["nodes"] == list(kept.fused[0].nodes) and fused["repro"] == "repro_0_conv_norm_pool_gelu.py"
    read_twice, stopped = report["declined"]
    assert set(stopped) == names(Declined) | {"repro", "no_repro"}
    assert [record["reason"] for record in report["declined"]] == [record.reason for record in kept.declined]
    assert (len(read_twice["nodes"]), len(stopped["nodes"]), stopped["reached"]) == (3, 2, "gelu")
    assert stopped["repro"] == "repro_2_conv_gelu_pool.py"


def test_the_scripts_run(tmp_path: Path) -> None:
    (made,) = dumped(tmp_path, Several(), volume())
    scripts = sorted(made.glob("repro_*.py"))
    outputs = [rerun(script) for script in scripts]
    # What torch itself says there (of a CUDA toolkit without a GPU, say) is not the script's.
    said = [[line for line in done.stderr.splitlines() if "torch/" not in line] for done in outputs]
    assert [(done.returncode, lines) for done, lines in zip(outputs, said)] == [(0, [])] * 3
    for done in outputs:
        rows = [line.split() for line in done.stdout.splitlines()[2:5]]
        assert [row[0] for row in rows] == ["eager", "inductor", "fxfuse"]
        assert all(float(ms) > 0 and float(error) < 1e-5 for _, ms, error in rows)
    assert "1 fused, 0 declined" in outputs[0].stdout and "norm_pool_gelu" in outputs[0].stdout
    assert "0 fused, 1 declined" in outputs[1].stdout and "0 fused, 1 declined" in outputs[2].stdout


def test_a_wrong_result_is_exit_code_1(tmp_path: Path) -> None:
    """The script is given an op that answers with its negative."""
    (made,) = dumped(tmp_path, ConvGeluPool(), torch.randn(2, 4, 8, 8))
    (script,) = made.glob("repro_*.py")
    wrong = (
        "import fxfuse.compare as c\n"
        "made = c._contenders\n"
        "c._contenders = lambda chain, setting: {**made(chain, setting), 'fxfuse': lambda *x: (-chain(*x)[0],)}\n"
    )
    head, rest = script.read_text().split("import sys\n", 1)
    script.write_text(f"{head}import sys\n{wrong}{rest}")
    done = rerun(script)
    assert done.returncode == 1 and "fxfuse errs by 2.0e+00, more than the allowed" in done.stderr


def test_a_wrong_gradient_is_exit_code_1(tmp_path: Path) -> None:
    """The script is given an op whose gradients are twice too large."""
    with torch.enable_grad():
        (made,) = dumped(tmp_path, ConvGeluPool(), torch.randn(2, 4, 8, 8), backward="save")
    (script,) = made.glob("repro_*.py")
    wrong = (
        "import fxfuse.compare as c\n"
        "made = c._contenders\n"
        "def double(x): return x.detach() + 2 * (x - x.detach())\n"
        "c._contenders = lambda chain, setting: {**made(chain, setting), 'fxfuse': lambda *x: (double(chain(*x)[0]),)}\n"
    )
    head, rest = script.read_text().split("import sys\n", 1)
    assert rerun(script).returncode == 0
    script.write_text(f"{head}import sys\n{wrong}{rest}")
    done = rerun(script)
    assert done.returncode == 1 and "fxfuse errs by 1.0e+00, more than the allowed" in done.stderr


def test_sizes_that_vary_are_the_examples_in_a_script(tmp_path: Path) -> None:
    (made,) = dumped(tmp_path, ConvNormPoolGelu(), volume(), dynamic=True)
    assert "s" in told(made)["fused"][0]["shapes"] and "Sym(" in (made / "before.py").read_text()
    (script,) = made.glob("repro_*.py")
    assert "tensor((2, 4, 6, 6, 12), (1728, 432, 72, 12, 1), torch.float32, 'cpu')" in script.read_text()
    done = rerun(script)
    assert done.returncode == 0, done.stderr
    assert "1 fused" in done.stdout


def test_a_script_keeps_strides_offset_dtype_autocast_and_grad(tmp_path: Path) -> None:
    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.adaptive_avg_pool2d(F.gelu(F.conv2d(x, weight)), 1)

    x = torch.randn(2, 9, 9, 4)[:, 1:, 1:].permute(0, 3, 1, 2)
    with torch.enable_grad():
        (made,) = dumped(tmp_path, model, x, torch.randn(8, 4, 3, 3, requires_grad=True), select="auto", backward="save")
    (script,) = made.glob("repro_*.py")
    text = script.read_text()
    assert "tensor((2, 4, 8, 8), (324, 1, 36, 4), torch.float32, 'cpu', offset=40)" in text
    assert "requires_grad=True" in text and "grad=True," in text and "autocast=[('cpu', 'bfloat16', True)]," in text
    done = rerun(script)
    assert done.returncode == 0 and "UserWarning" not in done.stderr, done.stderr
    assert "1 fused, 0 declined" in done.stdout, "the op with a gradient is not taken in the script"
    assert "A training step: forward, and the gradients of 1 of 2 inputs." in done.stdout


@torch.compiler.nested_compile_region
def region(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def test_a_chain_in_a_body_has_a_script_too(tmp_path: Path) -> None:
    model = ConvGeluPool()
    (made,) = dumped(tmp_path, lambda x: checkpoint(lambda x: region(model, x) + region(model, x * 2), x, use_reentrant=False), torch.randn(2, 4, 8, 8))
    (fused,) = told(made)["fused"]
    assert (fused["body"], fused["calls"]) == ("wrap_body_0.subgraph_0", 2) and fused["repro"]
    before, after = ((made / f"{name}.py").read_text() for name in ("before", "after"))
    assert before.count("# self.subgraph_0\n") == 1 and "fxfuse" not in before
    assert after.count("# self.subgraph_0_fused\n") == 1 and after.count("torch.ops.fxfuse.gelu_pool") == 1
    done = rerun(made / fused["repro"])
    assert done.returncode == 0, done.stderr
    assert "1 fused, 0 declined" in done.stdout


def test_a_graph_with_nothing_to_fuse_is_dumped(tmp_path: Path) -> None:
    (made,) = dumped(tmp_path, nn.ReLU(), torch.randn(3))
    report = told(made)
    assert report["fused"] == report["declined"] == [] and report["files"] == ["after.py", "before.py", "report.html"]
    assert (made / "before.py").read_text() == (made / "after.py").read_text()


def test_recompilations_are_numbered(tmp_path: Path) -> None:
    for batch in (1, 2):
        dumped(tmp_path, ConvGeluPool(), torch.randn(batch, 4, 8, 8), dynamic=False)
    assert [path.name[:5] for path in sorted(tmp_path.iterdir())] == ["0000-", "0001-"]


def test_strict_dumps_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(BackendCompilerFailed):
        dumped(tmp_path, Several(), volume(), strict=True)
    (made,) = tmp_path.iterdir()
    assert told(made)["stopped"].startswith("NotFusedError: ") and len(told(made)["declined"]) == 2


@pytest.mark.parametrize("strict", [False, True])
def test_an_unwritable_directory_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: bool) -> None:
    (tmp_path / "file").write_text("")
    for size in (8, 9):
        own = {"fxfuse.dump": str(tmp_path / "file" / "dump"), "fxfuse.strict": strict, "fxfuse.select": "always"}
        torch.compile(ConvGeluPool(), backend="fxfuse", options=own)(torch.randn(1, 4, size, size))
    (record,) = [record for record in caplog.records if record.name.startswith("fxfuse")]
    assert record.levelno == logging.WARNING and "graphs are not dumped" in record.message
    assert fxfuse.reports()[-1].fused


def test_a_failure_to_record_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "repros", None)
    (made,) = dumped(tmp_path, ConvGeluPool(), torch.randn(2, 4, 8, 8), strict=True)
    assert "could not be recorded" in caplog.text
    assert told(made)["fused"][0]["no_repro"]


def test_names_that_are_taken_are_left_alone(tmp_path: Path) -> None:
    for text in "ab":
        folder.write(tmp_path, "0000-pid1", {"file": text})
    assert [(path.name, (path / "file").read_text()) for path in sorted(tmp_path.iterdir())] == [("0000-pid1", "a"), ("0000-pid1-2", "b")]


def test_the_rank_is_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    (made,) = dumped(tmp_path, nn.ReLU(), torch.randn(3))
    assert made.name == f"0000-rank3-pid{os.getpid()}" and told(made)["rank"] == 3


def test_a_warm_cache_gives_the_same_report(tmp_path: Path) -> None:
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "FXFUSE_DUMP": str(tmp_path / "dump")}
    assert [run(PROGRAM, tmp_path, **variables)["cache_hits"] for _ in range(2)] == [0, 1]
    cold, warm = (tmp_path / "dump").iterdir()
    left, right = ({name: value for name, value in told(made).items() if name not in VARYING} for made in (cold, warm))
    assert left == right and len(left["fused"]) == 2
    for name in set(left["files"]) - {"report.html"}:
        assert (cold / name).read_text() == (warm / name).read_text()
    assert data_of((cold / "report.html").read_text())["graphs"] == data_of((warm / "report.html").read_text())["graphs"]


def test_two_processes_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "FXFUSE_DUMP": str(tmp_path / "dump")}
    both = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    made = list((tmp_path / "dump").iterdir())
    assert {told(one)["pid"] for one in made} == {process.pid for process in both} and len(made) == 2


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a process's structured trace."""
    directory = tmp_path_factory.mktemp("trace")
    run(PROGRAM, directory, TORCH_TRACE=str(directory / "trace"))
    return directory / "trace"


def test_the_trace_holds_the_artifacts(trace: Path) -> None:
    (file,) = trace.iterdir()
    lines = file.read_text().splitlines()
    payloads = {}
    for index, line in enumerate(lines):
        if '"artifact"' in line and '"fxfuse_' in line:
            metadata = json.loads(line[line.index("{") :])
            payload = itertools.takewhile(lambda text: text.startswith("\t"), lines[index + 1 :])
            payloads[metadata["artifact"]["name"]] = (metadata, "\n".join(text[1:] for text in payload))
    assert set(payloads) == {"fxfuse_report", "fxfuse_graph_before", "fxfuse_graph_after"}
    assert all(metadata["frame_id"] == 0 for metadata, _ in payloads.values())
    report = json.loads(payloads["fxfuse_report"][1])
    assert [fused["chain"] for fused in report["fused"]] == ["conv_norm_pool_gelu", "conv_gelu_pool"] and report["compile_id"] == "0/0"
    assert "layer_norm" in payloads["fxfuse_graph_before"][1] and "torch.ops.fxfuse" in payloads["fxfuse_graph_after"][1]


def test_tlparse_shows_the_artifacts(trace: Path, tmp_path: Path) -> None:
    tlparse = shutil.which("tlparse")
    if tlparse is None:
        pytest.skip("tlparse is not installed")
    (file,) = trace.iterdir()
    subprocess.run([tlparse, "--no-browser", "-o", tmp_path / "out", file], check=True, capture_output=True, timeout=100)
    shown = sorted(path.name.rsplit("_", 1)[0] + path.suffix for path in tmp_path.glob("out/*_0_0_0/fxfuse_*"))
    assert shown == ["fxfuse_graph_after.txt", "fxfuse_graph_before.txt", "fxfuse_report.json"]
    assert "fxfuse_report" in (tmp_path / "out" / "index.html").read_text()


LOGGED = """
import torch
with torch.no_grad():
    torch.compile(torch.nn.ReLU(), backend="fxfuse")(torch.ones(3))
"""


@pytest.mark.parametrize("variables", [{"FXFUSE_LOG": "info"}, {"TORCH_LOGS": "+fxfuse"}, {"FXFUSE_LOG": "debug", "TORCH_LOGS": "+fxfuse"}])
def test_loggers_show_the_report_once(tmp_path: Path, variables: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOGGED], env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("graph 0/0: 0 fused, 0 declined in 1 graph") == 1


def test_an_unknown_level_is_a_warning(tmp_path: Path) -> None:
    program = "import fxfuse"
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "FXFUSE_LOG": "loud"}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "fxfuse: FXFUSE_LOG='loud' is not one of debug, info, warning, error\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64])
def test_random_inputs_have_the_layout_asked_for(dtype: torch.dtype) -> None:
    made = compare.tensor((2, 3), (1, 0), dtype, "cpu", offset=5)
    assert (made.shape, made.stride(), made.dtype, made.storage_offset()) == ((2, 3), (1, 0), dtype, 5)
    assert compare.tensor((0, 3), (3, 1), dtype, "cpu").numel() == 0
