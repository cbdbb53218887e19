"""What only other processes show: the string backend without an import, caches cold and warm, what an import costs, fork and spawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compiler

# A user's program that never imports fxfuse. Both chains, with ops around them for Inductor to compile.
PROGRAM = """
import json, sys
import torch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
volumes = nn.Sequential(nn.Conv3d(2, 4, 3), nn.LayerNorm((6,)), nn.AvgPool3d(2), nn.GELU(), nn.ReLU())
images = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Tanh())
volume, image = torch.randn(2, 2, 5, 6, 8), torch.randn(2, 2, 8, 8)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.volumes, self.images = volumes, images

    def forward(self, volume, image):
        return self.volumes(volume), self.images(image)

imported_before = "fxfuse" in sys.modules
with torch.no_grad():
    model = Model()
    results = torch.compile(model, backend="fxfuse", options={"fxfuse.select": "always"})(volume, image)
    for result, expected in zip(results, model(volume, image)):
        torch.testing.assert_close(result, expected)
print(json.dumps({
    "imported_before": imported_before,
    "values": [result.tolist() for result in results],
    "fused": counters["fxfuse"],
    "declined": counters["fxfuse_declined"],
    "cache_hits": counters["inductor"]["fxgraph_cache_hit"],
}))
"""


def run(program: str, directory: Path, **env: str) -> Any:
    """The JSON that a Python program prints last, run from another directory with no fxfuse variables of the shell's but where libraries lie."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FXFUSE_") or name in ("FXFUSE_CACHE_DIR", "FXFUSE_LIBRARY_DIR")}
    done = subprocess.run([sys.executable, "-c", program], cwd=directory, env={**kept, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_string_backend_with_cold_and_warm_cache(tmp_path):
    cold, warm = (run(PROGRAM, tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor")) for _ in range(2))
    assert not cold["imported_before"]
    assert cold["fused"] == {"conv_norm_pool_gelu": 1, "conv_gelu_pool": 1} and not cold["declined"]
    assert (cold["cache_hits"], warm["cache_hits"]) == (0, 1)
    assert {**warm, "cache_hits": 0} == cold, "a warm cache changed the counts or the values"


def test_import_is_light_and_touches_no_device(tmp_path):
    report = run(
        """
import json, sys
import torch
before = set(sys.modules)
import fxfuse
print(json.dumps({"new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
""",
        tmp_path,
    )
    assert not report["cuda"]
    heavy = [name for name in report["new"] if not name.startswith("fxfuse") and name.split(".")[0] not in sys.stdlib_module_names]
    assert not heavy, "beyond torch itself, an import loads the standard library only"
    assert not {"fxfuse.build", "fxfuse.library", "fxfuse.passes", "subprocess"} & set(report["new"])


def test_the_import_needs_no_torch(tmp_path):
    assert run('import json, sys, fxfuse; print(json.dumps("torch" in sys.modules))', tmp_path) is False


def test_importing_every_module_loads_no_library_and_touches_no_device(tmp_path):
    program = """
import json, pkgutil, importlib
import fxfuse, fxfuse.passes, torch
for package in (fxfuse, fxfuse.passes):
    for module in pkgutil.iter_modules(package.__path__[:1]):
        if module.name != "__main__" and not module.ispkg:
            importlib.import_module(f"{package.__name__}.{module.name}")
print(json.dumps({"cuda": torch.cuda.is_initialized(), "libraries": list(torch.ops.loaded_libraries)}))
"""
    assert run(program, tmp_path) == {"cuda": False, "libraries": []}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_can_use_it(tmp_path, method):
    """Imported in the parent, used in a worker: a DataLoader's are forked or spawned. One thread: OpenMP's do not survive a fork."""
    program = f"""
import json, multiprocessing, sys
import torch
import fxfuse

def work(_):
    torch.set_num_threads(1)
    with torch.no_grad():
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.GELU(), torch.nn.AdaptiveAvgPool2d(1))
        x = torch.randn(1, 2, 5, 5)
        gm, report = fxfuse.rewrite(torch.fx.symbolic_trace(model), x, select="always")
        torch.testing.assert_close(gm(x), model(x))
    return [fused.op for fused in report.fused], torch.cuda.is_initialized()

if __name__ == "__main__":
    fxfuse.reports()
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        print(json.dumps(pool.map(work, range(2))))
"""
    script = tmp_path / "worker.py"
    script.write_text(program)
    assert run(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", tmp_path) == [[["gelu_pool"], False]] * 2
