"""No op writes outside its tensors: the ops' tests of random and odd shapes once more, with every tensor between guard bands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fxfuse.toolchain import BuildError, find_nvcc

pytestmark = [pytest.mark.gpu, pytest.mark.large]

HERE = Path(__file__).parent
# Of each op's tests, those that draw or list shapes. A CUDA graph cannot be captured where every tensor is a cudaMalloc.
CHOSEN = {
    "conv_gelu_pool": "random_convolutions or test_shapes",
    "conv_gelu_pool_gradient": "random_convolutions",
    "conv_norm_pool_gelu": "random_shapes or test_values",
    "conv_norm_pool_gelu_gradient": "random_shapes",
    "gelu_pool": "test_global or test_adaptive",
    "gradients": "test_norm_width or test_norm_windows or test_norm_addend or test_gelu",
    "norm_pool_gelu": "test_width or test_pool or test_norm_ndim or test_addend",
}


@pytest.fixture(scope="module", autouse=True)
def nvcc() -> None:
    try:
        find_nvcc(os.environ)
    except BuildError as error:
        pytest.skip(error.sentence)


def run(*arguments: str) -> str:
    """Standard output of a Python process that finds the plugin."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("op", CHOSEN)
def test_nothing_is_written_outside(op: str) -> None:
    chosen = ["-k", f"({CHOSEN[op]}) and not large", str(HERE / f"test_{op}.py")]
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "guards", *chosen)
    allocations, violations = map(int, re.search(r"guards: (\d+) allocations, (\d+) violations", out).groups())
    assert violations == 0 and allocations > 1000


def test_a_write_outside_is_seen() -> None:
    script = (
        "import guards, torch; library = guards.install(); x = torch.empty(1000, device='cuda'); assert x.isnan().all();"
        "library.guarded_overrun(guards.ctypes.c_void_p(x.data_ptr()), guards.ctypes.c_ssize_t(4000)); del x; print(library.guarded_violations())"
    )
    assert run("-c", script).split() == ["1"]
