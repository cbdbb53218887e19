"""The CUDA library with a libstdc++ of its own beside torch's: ops, captured graphs and refusals, each twice in one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import static_libstdcxx

from fxfuse import library
from fxfuse.toolchain import BuildError, find_nvcc

# A build of every kernel for the GPU at hand: a minute on 16 cores.
pytestmark = [pytest.mark.gpu, pytest.mark.compiler, pytest.mark.large]

HERE = Path(__file__).parent
FILES = ("gelu_pool", "norm_pool_gelu", "conv_gelu_pool", "conv_norm_pool_gelu", "gradients", "conv_gelu_pool_gradient", "refusals")
CHOSEN = "refus or test_taken or test_empty or graph or op_with_the_convolution or left_alone"


@pytest.fixture(scope="module")
def static_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        find_nvcc(os.environ)
    except BuildError as error:
        pytest.skip(error.sentence)
    return static_libstdcxx.built("cuda", tmp_path_factory.mktemp("static"))


def test_libraries_export_nothing(static_library: Path) -> None:
    assert static_libstdcxx.exported(library.load("cuda").path) == ""
    assert static_libstdcxx.exported(static_library) == ""


def test_every_op_and_every_refusal_twice_beside_torchs_libstdcxx(static_library: Path) -> None:
    chosen = [str(HERE / f"test_{name}.py") for name in FILES]
    assert static_libstdcxx.run_tests_twice(static_library, "-k", f"({CHOSEN}) and not large", *chosen) > 150
