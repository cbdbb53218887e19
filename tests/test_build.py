"""The builder, on a package of one tiny source: what is built, what the user is told, and each sentence when it fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_package import answer, compiler_script, cpu_recipe, fake_recipe, loader, said, source_of
from static_libstdcxx import exported, needed

from fxfuse import build, recipe as recipes
from fxfuse.build import build_hash, ptxas_table
from fxfuse.recipe import AHEAD_ARCHITECTURES, ninja_file, recipe, record_path
from fxfuse.toolchain import BuildError, Compiler


def in_process(package, env, **options):
    """A process of its own that builds the package's CPU library into the cache."""
    code = (
        "import sys, os; from pathlib import Path; from fxfuse.build import ensure; from fxfuse.recipe import recipe;"
        "from fxfuse.toolchain import cache_dir;"
        "print(ensure(recipe('cpu', csrc=Path(sys.argv[1]) / 'csrc'), cache_dir()))"
    )
    command = [sys.executable, "-c", code, str(package)]
    return subprocess.Popen(command, env={**os.environ, **env}, encoding="utf-8", stdout=subprocess.PIPE, **options)


# Building


@pytest.mark.compiler
def test_first_use_builds_and_second_finds(package, env):
    made = cpu_recipe(package, env)
    folder, told = said(made, env)
    assert answer(folder / "libfxfuse_cpu.so") == "42" and exported(folder / "libfxfuse_cpu.so") == ""
    assert told.count("\n") == 1 and f"into {folder}" in told and made.cxx.version in told and told.rstrip().endswith(" s")
    assert json.loads(record_path(folder, "cpu").read_text(encoding="utf-8"))["key"] == made.key
    assert said(made, env) == (folder, "")
    assert not list(folder.parent.glob("*.tmp-*"))


@pytest.mark.compiler
def test_simd_source_is_compiled_once_for_each_level(package, env):
    made = cpu_recipe(package, env)
    library = said(made, env)[0] / "libfxfuse_cpu.so"
    assert all(answer(library, f"LEVEL_{level}") == "1" for level in made.architectures)


def test_link_takes_shared_inline_functions_from_the_baseline(package, tmp_path):
    """The linker keeps the first copy of an inline function: it must not be one compiled for AVX-512."""
    link = next(line for line in ninja_file(fake_recipe(package, tmp_path)).splitlines() if line.startswith("build libfxfuse_cpu.so"))
    objects = link.partition(" | ")[0].split()[3:]
    assert objects == ["answer.cpp.o", "level.simd.cpp.baseline.o", "level.simd.cpp.avx2.o", "level.simd.cpp.avx512.o"]


def test_cuda_build_names_every_architecture_and_a_stub_for_a_torch_without_cuda(package, tmp_path):
    made = fake_recipe(package, tmp_path, "cuda", AHEAD_ARCHITECTURES)
    text = ninja_file(made)
    for target in ("80,code=sm_80", "90a,code=sm_90a", "100,code=sm_100", "120,code=sm_120", "80,code=compute_80"):
        assert f"-gencode arch=compute_{target}" in text
    assert "build libtorch_cuda.so: run stub.cpp" in text and "| libtorch_cuda.so" in text
    (made.torch.lib).mkdir(parents=True)
    (made.torch.lib / "libtorch_cuda.so").touch()
    assert "stub.cpp" not in ninja_file(made)


@pytest.mark.compiler
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_cuda_library_needs_torchs_cuda_library(package, env):
    made = recipe("cuda", ["sm_90a"], package / "csrc", env)
    folder, _ = said(made, env)
    libraries = needed(folder / "libfxfuse_cuda.so")
    assert "[libtorch_cuda.so]" in libraries and "[libtorch_cpu.so]" in libraries and "libcudart" not in libraries
    assert exported(folder / "libfxfuse_cuda.so") == ""
    assert "nothing" in ptxas_table((folder / "libfxfuse_cuda.log").read_text(encoding="utf-8"))


def test_unknown_architecture_is_refused(package, env):
    with pytest.raises(BuildError, match="'9.0' is no CUDA architecture; give names such as sm_90a"):
        recipe("cuda", ["9.0"], package / "csrc", {**env, "CXX": sys.executable})


def test_ptxas_table_shows_spills_first():
    log = textwrap.dedent("""
        ptxas info    : Compiling entry function '_Z4calmPf' for 'sm_80'
        ptxas info    : Function properties for _Z4calmPf
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas info    : Used 10 registers, used 1 barriers, 128 bytes smem, 360 bytes cmem[0]
        ptxas info    : Compiling entry function '_Z5spillPf' for 'sm_90a'
        ptxas info    : Function properties for _Z5spillPf
            8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
        ptxas info    : Used 255 registers, used 0 barriers
    """)
    rows = ptxas_table(log).splitlines()[2:]
    assert rows[0].split()[1:] == ["sm_90a", "255", "16", "24", "0"] and rows[1].split()[1:] == ["sm_80", "10", "0", "0", "128"]
    assert rows[-1] == "2 kernels, 1 of them spill"


# Failing


def test_missing_compiler_is_a_sentence(package, env):
    with pytest.raises(BuildError, match="no C\\+\\+ compiler was found.*; run: apt-get install g\\+\\+"):
        cpu_recipe(package, {**env, "PATH": "/nowhere"})
    with pytest.raises(BuildError, match="CXX=no-such-compiler is not a program"):
        cpu_recipe(package, {**env, "CXX": "no-such-compiler"})


@pytest.mark.compiler
def test_failing_source_shows_the_compilers_error(package, env):
    (package / "csrc" / "answer.cpp").write_text("int answer( { return 42; }\n", encoding="utf-8")
    with pytest.raises(BuildError, match=r"answer.cpp:1:.*error") as caught:
        said(cpu_recipe(package, env), env)
    log = Path(caught.value.mend.rpartition(" in ")[2])
    assert "answer.cpp:1:" in log.read_text(encoding="utf-8")
    assert {path.suffix for path in log.parent.iterdir()} == {".log", ".lock"}


@pytest.mark.compiler
def test_unwritable_cache_is_a_sentence(package, env, tmp_path):
    (tmp_path / "file").touch()
    env["FXFUSE_CACHE_DIR"] = str(tmp_path / "file" / "cache")
    with pytest.raises(BuildError, match=r"cache directory .*file/cache cannot be used .*; set FXFUSE_CACHE_DIR"):
        said(cpu_recipe(package, env), env)
    assert "cannot be used" in loader(package, env).unavailable("cpu", build=False)


@pytest.mark.compiler
def test_killed_build_leaves_no_lock(package, env, tmp_path):
    stuck = tmp_path / "stuck"
    stuck.touch()
    env["CXX"] = compiler_script(tmp_path, f"touch '{tmp_path}/started'; while [ -e '{stuck}' ]; do sleep 0.1; done")
    victim = in_process(package, env, start_new_session=True)
    _wait_for(tmp_path / "started")
    os.kill(victim.pid, signal.SIGKILL)  # ninja and the compiler live on, as they do when a shell or a scheduler kills Python only
    victim.wait()
    stuck.unlink()
    folder, told = said(cpu_recipe(package, env), env)
    assert "waiting" not in told and (folder / "libfxfuse_cpu.so").exists()


@pytest.mark.compiler
def test_of_two_processes_one_builds_and_the_other_waits(package, env, tmp_path):
    env["CXX"] = compiler_script(tmp_path, f"echo build >> '{tmp_path}/compilations'; sleep 0.2")
    processes = [in_process(package, env, stderr=subprocess.PIPE) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert len({out for out, _ in results}) == 1 and all(process.returncode == 0 for process in processes), results
    commands = (tmp_path / "compilations").read_text(encoding="utf-8").count("build")
    assert commands == len(cpu_recipe(package, env).architectures) + 2  # each object and the link, once


def _wait_for(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear in {seconds} s"
        time.sleep(0.05)


# Hashes


def test_key_follows_everything_that_decides_the_library(package, tmp_path):
    made = fake_recipe(package, tmp_path)
    keys = {
        made.key,
        replace(made, cxx=Compiler(Path("/g++"), "g++ 13")).key,
        replace(made, torch=replace(made.torch, version="2.14.0")).key,
        replace(made, architectures=("baseline",)).key,
    }
    (package / "csrc" / "shared.h").write_text("// changed\n", encoding="utf-8")
    keys.add(made.key)
    (package / "csrc" / "answer.cpp").write_text(source_of(43), encoding="utf-8")
    keys.add(made.key)
    assert len(keys) == 6
    (package / "csrc" / "other.cu").write_text("// changed\n", encoding="utf-8")
    assert made.key in keys, "a CUDA source is no part of the CPU library"


def test_key_holds_no_paths(package, tmp_path):
    made = fake_recipe(package, tmp_path)
    moved = tmp_path / "moved"
    shutil.copytree(package, moved)
    assert replace(made, csrc=moved / "csrc").key == made.key and str(tmp_path) not in json.dumps(made.record())


@pytest.mark.compiler
def test_sources_given_by_a_relative_path_are_found(package, env, monkeypatch):
    monkeypatch.chdir(package)
    folder, _ = said(recipe("cpu", csrc=Path("csrc"), env=env), env)
    assert (folder / "libfxfuse_cpu.so").exists()


def test_build_hash_follows_kernels_passes_and_training(package):
    before = build_hash.__wrapped__("cpu", package)
    assert before == build_hash.__wrapped__("cpu", package)
    (package / "passes" / "chain.py").write_text("CHAIN = 2\n", encoding="utf-8")
    after_pass = build_hash.__wrapped__("cpu", package)
    (package / "training.py").write_text("TRACED = True\n", encoding="utf-8")
    after_training = build_hash.__wrapped__("cpu", package)
    (package / "csrc" / "answer.cpp").write_text(source_of(43), encoding="utf-8")
    assert len({before, after_pass, after_training, build_hash.__wrapped__("cpu", package)}) == 4


@pytest.mark.parametrize(("name", "value"), [("VERSION_SCRIPT", ("exports.map", "{ global: *; };\n")), ("LINKER_FLAGS", ())])
def test_key_follows_the_link(package, tmp_path, monkeypatch, name, value):
    made = fake_recipe(package, tmp_path)
    before = made.key
    monkeypatch.setattr(recipes, name, value)
    assert made.key != before


# The command


def test_command_builds_into_a_directory_and_says_why_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert build.main(["--cpu", "--out", str(tmp_path / "out")]) == 1
    assert "no C++ compiler was found" in capsys.readouterr().err
