"""Training on several ranks, each a process of its own, against eager on the whole batch in one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

DDP = 'wrapped = torch.compile(nn.parallel.DistributedDataParallel(model), backend="fxfuse", options=STRICT)'
FSDP = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh(device.type, (world,))
for part in (model.volume, model.head): fully_shard(part, mesh=mesh)
fully_shard(model, mesh=mesh)
wrapped = torch.compile(model, backend="fxfuse", options={"fxfuse.select": "always"})
"""
PROGRAM = """
import copy, os, sys, torch, torch.distributed as dist
from torch import nn
sys.path.insert(0, {tests!r})
from test_training_compiled import Net, STRICT, volume
torch.manual_seed(0)
rank, world, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device({device!r})
if device.type == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.backends.cudnn.allow_tf32 = False
dist.init_process_group({backend!r})
model = Net().eval()
model.volume.sum_weight = nn.Parameter(torch.ones(1))  # fully_shard takes no scalars
model = model.to(device)
twin = copy.deepcopy(model)
x = [volume(2).to(device) for _ in range(world)]
twin(torch.cat(x)).square().sum().div(world).backward()
{parallel}
wrapped(x[rank]).square().sum().backward()
for (name, p), q in zip(model.named_parameters(), twin.parameters()):
    grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    if name not in ("volume.conv.bias", "volume.sum_weight"):
        torch.testing.assert_close(grad, q.grad, rtol=1e-3, atol=1e-4, msg=lambda m: name + ": " + m)
import fxfuse
print("fused", sum(len(report.fused) for report in fxfuse.reports()))
dist.destroy_process_group()
"""


def assert_gradients_are_eagers(parallel: str, backend: str, device: str, world: int = 2) -> None:
    """parallel: DDP or FSDP. backend: of torch.distributed. device: "cpu" or "cuda", whose GPUs the ranks take in turn. world: number of ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = PROGRAM.format(tests=os.path.dirname(__file__), parallel=parallel, backend=backend, device=device)
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "".join(text[-3000:] for text in printed)
    assert all("fused 2" in text for text in printed), printed[0][-3000:]
