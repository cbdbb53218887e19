"""A registered chain through the backend and the commands: compiled, cached, counted, recorded and listed as a built-in one is."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from chains import CONV_RELU, Net, conv_relu
from torch import fx
from torch._dynamo.utils import counters

import fxfuse
from fxfuse import library, listeners, registry
from fxfuse.chain import Chain
from fxfuse.cli import main
from fxfuse.coverage import Coverage
from fxfuse.testing import assert_fused

EXAMPLE = Path(__file__).parent.parent / "examples/new_chain.py"
pytestmark = pytest.mark.usefixtures("nothing_registered")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No gradients, nothing compiled or counted before, and no library of fxfuse's."""
    monkeypatch.setattr(library, "unavailable", lambda device, build=True: "no library")
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield


def script(file: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(file)], env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


def image() -> torch.Tensor:
    return torch.randn(2, 4, 8, 8)


@pytest.mark.compiler
def test_compiled_it_gives_eagers_result_and_is_counted(tmp_path: Path) -> None:
    model, x, coverage = Net(), image(), Coverage()
    listeners.add(coverage.add)
    try:
        with fxfuse.register(CONV_RELU):
            compiled = torch.compile(model, backend="fxfuse", options={"fxfuse.strict": True, "fxfuse.dump": str(tmp_path)})
            torch.testing.assert_close(compiled(x), model(x))
    finally:
        listeners.remove(coverage.add)
    assert dict(counters["fxfuse"]) == {"conv_relu": 1} and not counters["fxfuse_declined"]
    assert [fused.op for fused in fxfuse.reports()[-1].fused] == ["fxfuse_tests::relu"]
    assert coverage.fused == Counter(conv_relu=1)
    torch.testing.assert_close(compiled(x), model(x))  # compiled once, it does not need the registration
    (folder,) = tmp_path.iterdir()
    told = json.loads((folder / "report.json").read_text())
    assert [record["chain"] for record in told["fused"]] == ["conv_relu"]
    assert "fxfuse_tests.relu" in (folder / "after.py").read_text() and (folder / "report.html").exists()
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.path.dirname(__file__)]))
    done = script(folder / "repro_0_conv_relu.py", PYTHONPATH=path)
    assert done.returncode == 0 and "fxfuse_tests::relu" in done.stdout, done.stdout + done.stderr
    (folder / "chains.py").write_text("")
    done = script(folder / "repro_0_conv_relu.py", PYTHONPATH=path)
    assert done.returncode == 1 and "chains does not hold the chain conv_relu, which was registered" in done.stderr


@pytest.mark.compiler
def test_a_fake_that_the_op_does_not_keep_to_is_named_at_the_first_call() -> None:
    """Inductor's own check of sizes and strides; of dtypes it has none."""

    @torch.library.custom_op("fxfuse_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])

    twice.register_fake(torch.empty_like)

    def replace(emit: Any, conv: Any, relu: Any) -> fx.Node:
        return emit(twice, conv.result)

    with fxfuse.register(conv_relu(replace=replace)), pytest.raises(AssertionError, match=r"expected size 4==2(.|\n)*fxfuse_tests.twice"):
        torch.compile(Net(), backend="fxfuse")(image())


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What joins Inductor's cache key at each compilation; the graph is run eagerly."""
    found: list[str] = []

    def compile_fx(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        found.append(torch.compiler.config.cache_key_tag)
        return gm.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    return found


def test_the_cache_key_holds_the_chains_version_and_files_and_nothing_where_it_is_not_used(keys: list[str]) -> None:
    def compile_with(chain: Chain) -> None:
        torch._dynamo.reset()
        with fxfuse.register(chain):
            torch.compile(Net(), backend="fxfuse")(image())

    def elsewhere(**calls: Any) -> Iterator[tuple[bool, str]]:
        yield True, ""

    compile_with(conv_relu())
    compile_with(conv_relu())
    compile_with(dataclasses.replace(conv_relu(), version="2"))
    compile_with(dataclasses.replace(conv_relu(), requires=elsewhere))
    compile_with(dataclasses.replace(conv_relu(), dims=(3,)))
    first, again, raised, other_file, unused = keys
    assert first == again and len({first, raised, other_file}) == 3 and "conv_relu" in first
    assert "conv_relu" not in unused


def test_explain_and_assert_fused_know_it() -> None:
    with fxfuse.register(CONV_RELU):
        assert [fused.chain for fused in fxfuse.explain(Net(), image()).fused] == ["conv_relu"]
        assert_fused(Net(), image(), {"conv_relu": 1})
        with pytest.raises(AssertionError, match="expected conv_relu to be fused 1 time, .* no conv is followed by relu"):
            assert_fused(torch.nn.Conv2d(4, 8, 3), image(), {"conv_relu": 1})
        with pytest.raises(AssertionError, match="conv_relu to be fused 1 time, found it fused 0 times and declined 1 time"):
            assert_fused(lambda x: F.relu(y := F.conv2d(x, torch.ones(8, 4, 3, 3))) + y, image(), {"conv_relu": 1})
    with pytest.raises(ValueError, match="'conv_relu' is no chain"):
        assert_fused(Net(), image(), {"conv_relu": 1})


MINE = """
import fxfuse
from chains import CONV_RELU, Net
import torch

fxfuse.register(CONV_RELU)

def factory():
    return Net(), (torch.ones(2, 4, 8, 8),)
"""


def test_explain_looks_for_the_chains_that_the_factorys_module_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    assert main(["explain", "mine.py:factory", "--expect", "conv_relu=1", "--passes", "conv_relu"]) == 0
    assert "fxfuse_tests::relu" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_passes_lists_the_chains_of_a_module_registered_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    for module in (str(tmp_path / "mine.py"), "chains"):
        registry._registrations = ()
        assert main(["passes", module]) == 0
        out = capsys.readouterr().out
        assert out.index("conv_relu") < out.index("conv_gelu_pool") and "fxfuse_tests::relu" in out and "relu: relu" in out
        assert [chain.name for chain in registry.registered()] == ["conv_relu"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "neither registers a chain with fxfuse.register nor holds a fxfuse.Chain"),
        ("raise KeyError(3)", "raises KeyError: 3"),
        ("from fxfuse import Chain; C = Chain('a b', (), None, ())", "mine.py: the chain 'a b' cannot be registered: its name is no Python identifier"),
    ],
)
def test_a_module_without_a_good_chain_is_one_line(text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(text)
    assert main(["passes", str(tmp_path / "mine.py")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and sentence in err and err.count("\n") == 1


@pytest.mark.compiler
@pytest.mark.skipif(not EXAMPLE.exists(), reason="an sdist has no examples")
def test_the_repro_of_a_chain_in_a_script_loads_it_from_its_file(tmp_path: Path) -> None:
    ran = script(EXAMPLE, FXFUSE_DUMP=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    (repro,) = tmp_path.glob("*/repro_0_conv_relu_max_pool.py")
    done = script(repro)
    assert done.returncode == 0 and "new_chain::relu_max" in done.stdout, done.stdout + done.stderr
