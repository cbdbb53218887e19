"""Training with both chains: a classifier of small volumes learns the same in eager, Inductor and fxfuse.

    python examples/train.py                  # --steps N, --batch N, --size N, --dtype bfloat16, --json FILE

The data is made here: balls, boxes, shells and rods of random size and place, in noise. Each way to run the model is a process of its own, whose
steps a second (of what comes behind the data) and peak memory are printed. How far two loss curves may be apart is not obvious, since rounding grows with every step: the
yardstick is a second eager run that sees each batch in another order, so that it adds up the same numbers differently.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import fxfuse

# Steps in which the model is compiled and the device gets warm: they are not timed.
WARM_UP = 3
# The side of a volume of which both blocks leave the last convolution a pixel.
LEAST = 12
SHAPES = ("ball", "box", "shell", "rod")
# "always": under "auto" chains this small are left to Inductor for their time. Strict: one that is not fused would be an error.
RUNS = {
    "eager": None,
    "eager, batches in another order": None,
    "inductor": {"backend": "inductor"},
    "fxfuse": {"backend": "fxfuse", "options": {"fxfuse.select": "always", "fxfuse.strict": True}},
}


class Block(nn.Module):
    """conv -> add -> layer_norm over W -> avg_pool3d -> gelu: halves each side."""

    def __init__(self, channels_in: int, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels_in, channels, 3, padding=1)
        self.shift = nn.Parameter(torch.zeros(()))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.avg_pool3d(self.norm(self.conv(x) + self.shift), 2))


class Classifier(nn.Module):
    """[N, 1, size, size, size] -> [N, 4]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 16, size), Block(16, 32, size // 2))
        self.conv, self.linear = nn.Conv3d(32, 64, 3), nn.Linear(64, len(SHAPES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.adaptive_avg_pool3d(F.gelu(self.conv(self.blocks(x))), 1).flatten(1))


def volumes(count: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Volumes and what is in them."""
    labels = torch.randint(len(SHAPES), (count,), generator=generator)
    axis = torch.linspace(-1, 1, size)
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"))
    middle, radius = torch.rand(count, 3, 1, 1, 1, generator=generator) - 0.5, torch.rand(count, 1, 1, 1, generator=generator) * 0.25 + 0.3
    offset = (grid - middle).abs()
    distance, largest = offset.norm(dim=1), offset.amax(1)
    rod = (offset[:, 0] < radius / 3) & (offset[:, 1] < radius / 3)
    every = torch.stack([distance < radius, largest < radius * 0.8, (distance - radius).abs() < 0.12, rod])
    chosen = every[labels, torch.arange(count)].float()
    return (chosen + 0.3 * torch.randn(chosen.shape, generator=generator)).unsqueeze(1), labels


@dataclass(frozen=True)
class Trained:
    """What a run came to. losses: of every step. peak_mb: see _peak_bytes. fused: chains."""

    losses: list[float]
    steps_per_s: float
    peak_mb: float
    fused: int


def train(name: str, arguments: argparse.Namespace) -> Trained:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if arguments.dtype == "tf32" else getattr(torch, arguments.dtype)
    # It rounds what is multiplied, and which convolutions take it is up to each way: loss curves would show that more than the order of sums.
    torch.backends.cudnn.allow_tf32 = arguments.dtype == "tf32"
    torch.manual_seed(0)
    model = Classifier(arguments.size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = torch.compile(model, **RUNS[name]) if RUNS[name] else model
    data = torch.Generator().manual_seed(1)
    losses: list[torch.Tensor] = []
    seconds = 0.0
    for step in range(arguments.steps):
        if step == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        x, label = (value.to(device) for value in volumes(arguments.batch, arguments.size, data))
        if "another order" in name:
            x, label = x.flip(0), label.flip(0)
        start = _now(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(run(x), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seconds += _now(device) - start if step >= WARM_UP else 0.0
        losses.append(loss.detach())
    fused = sum(len(report.fused) for report in fxfuse.reports())
    return Trained([float(loss) for loss in losses], (arguments.steps - WARM_UP) / seconds, _peak_bytes(device) / 1e6, fused)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_bytes(device: torch.device) -> int:
    """Of the tensors on a GPU since the warm-up, of the whole process on a CPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _apart(left: Trained, right: Trained) -> float:
    """The largest distance of two loss curves."""
    return max(abs(a - b) for a, b in zip(left.losses, right.losses))


def _as_json(arguments: argparse.Namespace, runs: dict[str, Trained]) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    given = {key: value for key, value in vars(arguments).items() if key != "json"}
    return {"device": device, "torch": torch.__version__, **given, "runs": {name: asdict(run) for name, run in runs.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="at least 4: the first three are not timed (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="volumes a step (default: %(default)s)")
    parser.add_argument("--size", type=int, default=16, help=f"of a volume in each dimension, at least {LEAST} (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "tf32", "bfloat16", "float16"), default="float32", help="autocast's; float32, tf32: none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every loss, steps a second, peak MB and chains fused to this file")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps {arguments.steps} is not at least {WARM_UP + 1}")
    if arguments.batch < 1 or arguments.size < LEAST:
        parser.error(f"--batch {arguments.batch} and --size {arguments.size} are not at least 1 and {LEAST}")
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no such directory")
    runs = {}
    for name in RUNS:
        print(f"training: {name}", file=sys.stderr)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            runs[name] = pool.apply(train, (name, arguments))
    eager = runs["eager"]
    shown = sorted({0, *range(9, arguments.steps, max(10, arguments.steps // 6)), arguments.steps - 1})
    print(tabulate([[step + 1, *(run.losses[step] for run in runs.values())] for step in shown], ("step", *runs), floatfmt=".5f"))
    rows = [(name, f"{run.steps_per_s:.1f}", f"{run.peak_mb:.0f}", f"{_apart(run, eager):.1e}", run.fused) for name, run in runs.items()]
    print("\n" + tabulate(rows, ("", "steps/s", "peak MB", "furthest from eager's loss", "chains fused")))
    if arguments.json:
        arguments.json.write_text(json.dumps(_as_json(arguments, runs), indent=1) + "\n")
    assert runs["fxfuse"].fused == 3, "the model has three chains"
    assert arguments.steps < 60 or eager.losses[-1] < 0.8 * eager.losses[0], "the model learns nothing"


if __name__ == "__main__":
    main()
