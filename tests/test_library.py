"""Searching and loading, on a package of one tiny source: where a library is looked for, and each sentence when none serves."""

import shutil
import subprocess
import sys
import threading

import pytest
from small_package import cpu_recipe, fake_recipe, loader, said, source_of, write_library

from fxfuse import library
from fxfuse.build import copy
from fxfuse.library import search
from fxfuse.recipe import AHEAD_ARCHITECTURES, covers
from fxfuse.toolchain import BuildError, cache_dir


@pytest.mark.compiler
def test_order_of_the_search(package, env, tmp_path):
    assert search("cpu", env, package).source == "buildable"
    folder, _ = said(cpu_recipe(package, env), env)
    assert search("cpu", env, package).source == "cache"
    copy(folder, "cpu", package / "lib")
    assert search("cpu", env, package).source == "wheel"
    env["FXFUSE_LIBRARY_DIR"] = str(tmp_path / "elsewhere")
    assert "holds no readable libfxfuse_cpu.so" in search("cpu", env, package).passed_over[0]
    copy(folder, "cpu", tmp_path / "elsewhere")
    found = search("cpu", env, package)
    assert found.source == "override" and found.path.parent == tmp_path / "elsewhere" and found.hash == cpu_recipe(package, env).key


@pytest.mark.compiler
def test_cached_library_serves_where_no_compiler_is(package, env):
    folder, _ = said(cpu_recipe(package, env), env)
    assert search("cpu", {**env, "PATH": "/nowhere"}, package).path == folder / "libfxfuse_cpu.so"


@pytest.mark.compiler
def test_loads_once_also_from_two_threads(package, env, capfd):
    shared, results = loader(package, env), []
    threads = [threading.Thread(target=lambda: results.append(shared.load("cpu"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] is results[1] and results[0].source == "built"
    assert capfd.readouterr().err.count("building") == 1
    assert loader(package, env).load("cpu").source == "cache"


@pytest.mark.compiler
def test_without_build_nothing_is_built(package, env):
    assert loader(package, env).load("cpu", build=False).source == "buildable"
    assert not cache_dir(env).exists()
    sentence = loader(package, {**env, "FXFUSE_BUILD": "0"}).unavailable("cpu")
    assert sentence == "libfxfuse_cpu.so is not built yet and FXFUSE_BUILD=0 forbids to build it at first use; unset FXFUSE_BUILD"


@pytest.mark.compiler
def test_library_of_other_sources_is_not_loaded(package, env):
    copy(said(cpu_recipe(package, env), env)[0], "cpu", package / "lib")
    (package / "csrc" / "answer.cpp").write_text(source_of(43), encoding="utf-8")
    found = search("cpu", env, package)
    assert found.source == "buildable" and "other kernel sources" in found.passed_over[0]
    env["FXFUSE_LIBRARY_DIR"] = str(package / "lib")
    assert "other kernel sources" in loader(package, env).unavailable("cpu")


@pytest.mark.parametrize("forbidden", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")], ids=str)
def test_cache_that_may_not_be_read_is_a_sentence(package, env, monkeypatch, forbidden):
    def refuse(*_):
        raise forbidden

    monkeypatch.setattr(library, "is_built", refuse)
    with pytest.raises(BuildError, match=f"the cache directory .*cache dir cannot be used \\({forbidden.strerror}\\)"):
        search("cpu", {**env, "CXX": sys.executable}, package)


@pytest.mark.compiler
def test_library_that_does_not_open_is_a_sentence_and_not_tried_again(package, env):
    made = cpu_recipe(package, env)
    folder = cache_dir(env) / f"cpu-{made.key}"
    folder.parent.mkdir()
    write_library(folder, made)
    shared = loader(package, env)
    sentence = shared.unavailable("cpu")
    assert "libfxfuse_cpu.so cannot be loaded" in sentence and "\n" not in sentence
    shutil.rmtree(folder)
    assert shared.unavailable("cpu") == sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cuda": "12"}, "is for CUDA 12 and torch is built (without CUDA|for CUDA 13)"),
        ({"machine": "pdp11"}, "is for pdp11 and this machine is"),
        ({"oldest_torch": [99, 0]}, "needs torch 99.0 and"),
        ({"architectures": None}, "has no record beside it that can be read"),
    ],
)
def test_library_that_does_not_fit_is_refused(package, env, tmp_path, changes, sentence):
    write_library(tmp_path / "elsewhere", fake_recipe(package, tmp_path, "cuda", ("compute_80",)), **changes)
    env["FXFUSE_LIBRARY_DIR"] = str(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match=sentence) as caught:
        search("cuda", env, package)
    assert "python -m fxfuse.build" in caught.value.mend


def test_devices_without_kernels_are_a_sentence(package, env):
    assert "no kernels for device type 'xpu'" in loader(package, env).unavailable("xpu:0")


@pytest.mark.parametrize(
    ("architectures", "device", "covered"),
    [
        (AHEAD_ARCHITECTURES, "sm_80", True),
        (AHEAD_ARCHITECTURES, "sm_89", True),
        (AHEAD_ARCHITECTURES, "sm_90a", True),
        (AHEAD_ARCHITECTURES, "sm_103", True),
        (AHEAD_ARCHITECTURES, "sm_130", True),
        (("sm_90a",), "sm_100", False),
        (("sm_90a",), "sm_80", False),
        (("sm_86",), "sm_80", False),
        (("sm_80",), "sm_90a", False),
        (("compute_90a",), "sm_100", False),
    ],
)
def test_which_devices_code_runs_on(architectures, device, covered):
    assert covers(architectures, device) == covered


def test_importing_the_loader_is_light():
    code = "import sys, fxfuse, fxfuse.library; print([m for m in ('torch', 'fxfuse.build', 'filelock', 'ninja', 'tabulate') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True).stdout == "[]\n"
