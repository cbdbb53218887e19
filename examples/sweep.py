"""A sweep over shapes, dtypes and layouts of both chains: Inductor beside fxfuse with `select="always"`; the rule of `auto` is fitted to it.

    python examples/sweep.py --out examples/results/sweep_h200.json

GPU time of captured calls (CPU: wall time), contenders in turn in the same run, medians; the spread is the interquartile range of the ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import fxfuse
from fxfuse.measure import paired_times
from fxfuse.report import reports

Case = tuple[str, Callable[[], nn.Module], tuple[int, ...]]


class Pooled(nn.Module):
    """conv -> gelu -> adaptive average pool."""

    def __init__(self, conv: nn.Module, output_size: int = 1) -> None:
        super().__init__()
        self.conv, self.output_size = conv, output_size
        self.pool = {3: F.adaptive_avg_pool1d, 4: F.adaptive_avg_pool2d, 5: F.adaptive_avg_pool3d}[conv.weight.dim()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(F.gelu(self.conv(x)), self.output_size)


class Normed(nn.Module):
    """conv -> add -> layer_norm over the last dim -> avg_pool3d -> gelu."""

    def __init__(self, conv: nn.Module, width: int, pool: int = 2) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = conv, nn.LayerNorm((width,)), pool
        self.addend = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.avg_pool3d(self.norm(self.conv(x) + self.addend), self.pool))


def transposed(c_in: int, c_out: int) -> nn.Module:
    """The headline's kind of transposed convolution: doubles every size."""
    return nn.ConvTranspose3d(c_in, c_out, 3, stride=2, padding=1, output_padding=1)


def cases(device: str) -> list[Case]:
    """Chains of many sizes: name, model, input shape; from a few microseconds to the headline's size."""
    pooled = [
        (1, 1, 8, 3, 7), (1, 16, 64, 3, 28), (8, 3, 32, 7, 112), (1, 64, 512, 1, 56), (16, 64, 128, 3, 56), (64, 16, 64, 3, 64),
        (32, 256, 512, 1, 14), (4, 8, 64, 5, 512), (256, 32, 96, 3, 32), (128, 8, 64, 3, 129),
    ]  # fmt: skip
    normed = [
        (1, 4, 8, 4, 8, 16), (1, 16, 32, 8, 16, 32), (2, 32, 64, 8, 16, 32), (4, 16, 16, 16, 32, 64), (8, 8, 32, 8, 24, 24), (16, 32, 64, 8, 16, 16),
        (2, 8, 16, 9, 17, 33), (1, 64, 128, 8, 16, 64),
    ]  # fmt: skip
    if device == "cpu":
        pooled, normed = [case for case in pooled if case[0] <= 16], [case for case in normed if case[0] <= 4]
    found: list[Case] = []
    for n, c_in, c_out, kernel, size in pooled:
        found.append((f"B n{n} c{c_in}-{c_out} k{kernel} {size}", lambda a=(c_in, c_out, kernel): Pooled(nn.Conv2d(*a)), (n, c_in, size, size)))
    found.append(("B adaptive 7", lambda: Pooled(nn.Conv2d(16, 64, 3), 7), (16, 16, 58, 58)))
    found.append(("B 1d", lambda: Pooled(nn.Conv1d(16, 64, 5)), (32, 16, 4096)))
    found.append(("B 3d", lambda: Pooled(nn.Conv3d(8, 32, 3)), (4, 8, 16, 48, 48)))
    for n, c_in, c_out, d, h, w in normed:
        found.append((f"A n{n} c{c_in}-{c_out} {d}x{h}x{w}", lambda a=(c_in, c_out), w=w: Normed(transposed(*a), 2 * w), (n, c_in, d, h, w)))
    found.append(("A conv3d pool 3", lambda: Normed(nn.Conv3d(8, 32, 3, padding=1), 48, 3), (2, 8, 24, 48, 48)))
    return found


def measure(case: Case, dtype: torch.dtype, channels_last: bool, device: torch.device, rounds: int) -> dict[str, Any]:
    """One row of the sweep."""
    name, make, shape = case
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = make().to(device, dtype), torch.randn(shape, device=device, dtype=dtype)
    if channels_last and x.dim() > 3:
        memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model, x = model.to(memory_format=memory_format), x.contiguous(memory_format=memory_format)
    contenders = {
        "inductor": torch.compile(model, backend="inductor", dynamic=False),
        "always": torch.compile(model, backend="fxfuse", dynamic=False, options={"fxfuse.select": "always"}),
    }
    calls = {name: lambda c=contender: c(x) for name, contender in contenders.items()}
    for call in calls.values():
        call()
    always, auto = reports()[-1], fxfuse.explain(model, x)
    times = paired_times(calls, device, rounds)
    ratios = [a / b for a, b in zip(times["always"], times["inductor"])]
    quartiles = statistics.quantiles(ratios, n=4)
    output = model.conv(x)
    return {
        "case": name,
        "chain": "conv_norm_pool_gelu" if name.startswith("A") else "conv_gelu_pool",
        "dtype": str(dtype).removeprefix("torch."),
        "channels_last": channels_last,
        "conv_output_bytes": output.numel() * output.element_size(),
        **{f"{key}_us": statistics.median(values) * 1e3 for key, values in times.items()},
        "always_over_inductor": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "fused_by_auto": bool(auto.fused),
        "why": (auto.fused[0].choice if auto.fused else auto.declined[0].reason),
        "fused_by_always": bool(always.fused),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of paired calls")
    parser.add_argument("--seconds", type=float, default=500, help="stop starting new rows after this time")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start, rows = time.monotonic(), []
    with torch.no_grad():
        for dtype, channels_last, case in itertools.product((torch.float32, torch.bfloat16), (False, True), cases(device.type)):
            if time.monotonic() - start > arguments.seconds:
                print("out of time: the rest of the sweep is left out", file=sys.stderr)
                break
            rows.append(measure(case, dtype, channels_last, device, arguments.rounds))
            print(f"{rows[-1]['case']} {dtype} {channels_last}: {rows[-1]['always_over_inductor']:.2f}", file=sys.stderr, flush=True)
    keys = ("case", "dtype", "channels_last", "conv_output_bytes", "inductor_us", "always_us", "always_over_inductor", "fused_by_auto")
    print(tabulate([[row[key] for key in keys] for row in rows], headers=keys, floatfmt=".2f"))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    state = {"device": name, "torch": torch.__version__, "fxfuse": fxfuse.__version__}
    arguments.out.write_text(json.dumps({**state, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
