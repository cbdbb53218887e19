"""Finding compilers and the cache directory: which one is taken, and each sentence when none is."""

from pathlib import Path

import pytest

from fxfuse.toolchain import BuildError, Compiler, cache_dir, find_cxx, find_nvcc


def fake_nvcc(folder, release):
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n", encoding="utf-8")
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
    broken.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    broken.chmod(0o755)
    with pytest.raises(BuildError, match="broken-c\\+\\+ does not run"):
        find_cxx({"CXX": str(broken)})


def test_cache_directory_follows_the_environment(tmp_path):
    assert cache_dir({"FXFUSE_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": "/xdg"}) == tmp_path
    assert cache_dir({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/user"}) == Path("/xdg/fxfuse")
    assert cache_dir({"HOME": "/home/user"}) == Path("/home/user/.cache/fxfuse")
