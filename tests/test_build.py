"""The builder and the loader, on a package of one tiny source: what is built, where it is looked for, and each sentence when it fails."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fxfuse import build
from fxfuse.build import build_hash, copy, ensure, ptxas_table
from fxfuse.library import Loader, search
from fxfuse.recipe import AHEAD_ARCHITECTURES, ISA_FLAGS, Recipe, covers, library_name, ninja_file, recipe, record_path
from fxfuse.toolchain import BuildError, Compiler, Torch, cache_dir, find_cxx, find_nvcc

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'
SIMD_SOURCE = """
#define NAME2(isa) level_##isa
#define NAME(isa) NAME2(isa)
extern "C" __attribute__((visibility("default"))) int NAME(FXFUSE_ISA)() { return 1; }
"""


@pytest.fixture
def package(tmp_path):
    """A package folder as a wheel installs it, under a path that shells and ninja would split."""
    package = tmp_path / "a folder: x" / "fxfuse"
    for folder in ("csrc", "passes", "lib"):
        (package / folder).mkdir(parents=True)
    (package / "csrc" / "answer.cpp").write_text(SOURCE % 42)
    (package / "csrc" / "level.simd.cpp").write_text(SIMD_SOURCE)
    (package / "csrc" / "shared.h").write_text("// shared\n")
    (package / "csrc" / "other.cu").write_text("__global__ void nothing() {}\n")
    (package / "passes" / "chain.py").write_text("CHAIN = 1\n")
    return package


@pytest.fixture
def env(tmp_path):
    return {"PATH": os.environ["PATH"], "FXFUSE_CACHE_DIR": str(tmp_path / "cache dir")}


def cpu_recipe(package, env):
    return recipe("cpu", csrc=package / "csrc", env=env)


def loader(package, env):
    return Loader(env, package, declare=lambda: None)


def said(made, env):
    """Builds and returns the folder and what the user is told."""
    texts = []
    return ensure(made, cache_dir(env), env, texts.append), "".join(texts)


def compiler_script(tmp_path, before):
    """A C++ compiler that runs `before`, a line of shell, first. It answers --version like the real one."""
    script = tmp_path / "slow-c++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) {before} ;; esac\nexec c++ "$@"\n')
    script.chmod(0o755)
    return str(script)


def in_process(package, env, **options):
    """A process of its own that builds the package's CPU library into the cache."""
    code = (
        "import sys, os; from pathlib import Path; from fxfuse.build import ensure; from fxfuse.recipe import recipe;"
        "from fxfuse.toolchain import cache_dir;"
        "print(ensure(recipe('cpu', csrc=Path(sys.argv[1]) / 'csrc'), cache_dir()))"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(package)], env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, **options)


# Building


@pytest.mark.compiler
def test_first_use_builds_and_second_finds(package, env):
    made = cpu_recipe(package, env)
    folder, told = said(made, env)
    assert ctypes.CDLL(str(folder / "libfxfuse_cpu.so")).answer() == 42
    assert told.count("\n") == 1 and f"into {folder}" in told and made.cxx.version in told and told.rstrip().endswith(" s")
    assert json.loads(record_path(folder, "cpu").read_text())["key"] == made.key
    assert said(made, env) == (folder, "")
    assert not list(folder.parent.glob("*.tmp-*"))


@pytest.mark.compiler
def test_simd_source_is_compiled_once_for_each_level(package, env):
    made = cpu_recipe(package, env)
    library = ctypes.CDLL(str(said(made, env)[0] / "libfxfuse_cpu.so"))
    assert all(getattr(library, f"level_{level}")() == 1 for level in made.architectures)


def fake_recipe(package, tmp_path, kind="cpu", architectures=tuple(ISA_FLAGS)):
    nvcc = Compiler(Path("/cuda/bin/nvcc"), "nvcc 13.0.88", "13.0") if kind == "cuda" else None
    return Recipe(kind, package / "csrc", architectures, Torch("2.13.0", tmp_path / "torch", None), Compiler(Path("/g++"), "g++ 12"), nvcc)


def test_link_takes_shared_inline_functions_from_the_baseline(package, tmp_path):
    """The linker keeps the first copy of an inline function: it must not be one compiled for AVX-512."""
    link = next(line for line in ninja_file(fake_recipe(package, tmp_path)).splitlines() if line.startswith("build libfxfuse_cpu.so"))
    assert link.split()[3:] == ["answer.cpp.o", "level.simd.cpp.baseline.o", "level.simd.cpp.avx2.o", "level.simd.cpp.avx512.o"]


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
@pytest.mark.skipif(not (shutil.which("nvcc") and shutil.which("readelf")), reason="needs nvcc and readelf")
def test_cuda_library_needs_torchs_cuda_library(package, env):
    made = recipe("cuda", ["sm_90a"], package / "csrc", env)
    folder, _ = said(made, env)
    dynamic = subprocess.run(["readelf", "-d", folder / "libfxfuse_cuda.so"], capture_output=True, text=True, check=True).stdout
    assert "[libtorch_cuda.so]" in dynamic and "[libtorch_cpu.so]" in dynamic and "libcudart" not in dynamic
    assert "nothing" in ptxas_table((folder / "libfxfuse_cuda.log").read_text())


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
    (package / "csrc" / "answer.cpp").write_text("int answer( { return 42; }\n")
    with pytest.raises(BuildError, match=r"answer.cpp:1:.*error") as caught:
        said(cpu_recipe(package, env), env)
    log = Path(caught.value.mend.rpartition(" in ")[2])
    assert "answer.cpp:1:" in log.read_text()
    assert {path.suffix for path in log.parent.iterdir()} == {".log", ".lock"}


@pytest.mark.compiler
def test_unwritable_cache_is_a_sentence(package, env, tmp_path):
    (tmp_path / "file").touch()
    env["FXFUSE_CACHE_DIR"] = str(tmp_path / "file" / "cache")
    with pytest.raises(BuildError, match=r"cache directory .*file/cache cannot be written .*; set FXFUSE_CACHE_DIR"):
        said(cpu_recipe(package, env), env)
    assert "cannot be written" in loader(package, env).unavailable("cpu", build=False)


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
    commands = (tmp_path / "compilations").read_text().count("build")
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
    (package / "csrc" / "shared.h").write_text("// changed\n")
    keys.add(made.key)
    (package / "csrc" / "answer.cpp").write_text(SOURCE % 43)
    keys.add(made.key)
    assert len(keys) == 6
    (package / "csrc" / "other.cu").write_text("// changed\n")
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
    (package / "passes" / "chain.py").write_text("CHAIN = 2\n")
    after_pass = build_hash.__wrapped__("cpu", package)
    (package / "training.py").write_text("TRACED = True\n")
    after_training = build_hash.__wrapped__("cpu", package)
    (package / "csrc" / "answer.cpp").write_text(SOURCE % 43)
    assert len({before, after_pass, after_training, build_hash.__wrapped__("cpu", package)}) == 4


# Searching and loading


@pytest.mark.compiler
def test_order_of_the_search(package, env, tmp_path):
    assert search("cpu", env, package).source == "buildable"
    folder, _ = said(cpu_recipe(package, env), env)
    assert search("cpu", env, package).source == "cache"
    copy(folder, "cpu", package / "lib")
    assert search("cpu", env, package).source == "wheel"
    env["FXFUSE_LIBRARY_DIR"] = str(tmp_path / "elsewhere")
    assert "holds no libfxfuse_cpu.so" in search("cpu", env, package).passed_over[0]
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
    (package / "csrc" / "answer.cpp").write_text(SOURCE % 43)
    found = search("cpu", env, package)
    assert found.source == "buildable" and "other kernel sources" in found.passed_over[0]
    env["FXFUSE_LIBRARY_DIR"] = str(package / "lib")
    assert "other kernel sources" in loader(package, env).unavailable("cpu")


@pytest.mark.compiler
def test_broken_library_is_a_sentence_and_not_tried_again(package, env):
    folder, _ = said(cpu_recipe(package, env), env)
    (folder / "libfxfuse_cpu.so").write_bytes(b"no library")
    shared = loader(package, env)
    sentence = shared.unavailable("cpu")
    assert "libfxfuse_cpu.so cannot be loaded" in sentence and "\n" not in sentence
    shutil.rmtree(folder)
    assert shared.unavailable("cpu") == sentence


def write_library(folder, made, **changes):
    """A library file that is never opened, with its record."""
    folder.mkdir(exist_ok=True)
    (folder / library_name(made.kind)).touch()
    record_path(folder, made.kind).write_text(json.dumps({**made.record(), "key": made.key, **changes}))


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


# Finding compilers


def fake_nvcc(folder, release):
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return nvcc


def test_nvcc_of_torchs_cuda_is_preferred_to_the_first_on_the_path(tmp_path):
    old, new = fake_nvcc(tmp_path / "old", "12.4"), fake_nvcc(tmp_path / "new", "13.0")
    env = {"PATH": str(old.parent)}
    assert find_nvcc(env, "13.0", [tmp_path / "new"]).path == new
    assert find_nvcc(env, None, [tmp_path / "new"]).path == old
    assert find_nvcc({**env, "CUDA_HOME": str(tmp_path / "new")}, None, []).path == new
    assert find_nvcc({**env, "CUDACXX": str(new)}, None, []) == Compiler(new, "nvcc 13.0.1", "13.0")


def test_missing_nvcc_is_a_sentence_for_torchs_cuda(tmp_path):
    old = fake_nvcc(tmp_path / "old", "11.8")
    with pytest.raises(BuildError, match=r"no nvcc for CUDA 12 was found, which torch is built for \(.*is of CUDA 11.8"):
        find_nvcc({"PATH": str(old.parent)}, "12.8", [])
    with pytest.raises(BuildError, match="CUDACXX=/nowhere is not a program"):
        find_nvcc({"CUDACXX": "/nowhere"}, None, [])


def test_compiler_that_does_not_run_is_a_sentence(tmp_path):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(BuildError, match="broken-c\\+\\+ does not run"):
        find_cxx({"CXX": str(broken)})


def test_cache_directory_follows_the_environment(tmp_path):
    assert cache_dir({"FXFUSE_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": "/xdg"}) == tmp_path
    assert cache_dir({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/user"}) == Path("/xdg/fxfuse")
    assert cache_dir({"HOME": "/home/user"}) == Path("/home/user/.cache/fxfuse")


def test_importing_the_loader_is_light():
    code = "import sys, fxfuse, fxfuse.library; print([m for m in ('torch', 'fxfuse.build', 'filelock', 'ninja', 'tabulate') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_command_builds_into_a_directory_and_says_why_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert build.main(["--cpu", "--out", str(tmp_path / "out")]) == 1
    assert "no C++ compiler was found" in capsys.readouterr().err
