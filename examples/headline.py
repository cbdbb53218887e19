"""Tail ops: bandwidth beside a copy's; both headline models through torch.compile beside eager and Inductor.

    python examples/headline.py --out examples/results/headline_h200.json

On the GPU if there is one, else on the CPU with smaller tensors, in fp32. Every contender of a row is timed in turn in the same run; figures
are medians, of GPU times of captured calls or of wall times; a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import fxfuse
from fxfuse import library
from fxfuse.headline import HEADLINES, Headline
from fxfuse.measure import fp64_result, medians, paired_times, ratio, relative_error
from fxfuse.report import reports

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ((torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "tf32"), (torch.float16, "tf32"))
LAYOUTS = ("contiguous", "channels_last")
CONV_OUTPUTS = {
    "cuda": {"norm_pool_gelu": (32, 64, 32, 64, 64), "gelu_pool": (128, 64, 254, 254)},
    "cpu": {"norm_pool_gelu": (4, 64, 16, 32, 64), "gelu_pool": (8, 64, 126, 126)},
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in channels_last or channels_last_3d, by its rank, or contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.dim()]) if layout == "channels_last" else tensor.contiguous()


def call_tail(op: str, y: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The tail op with the headline model's arguments."""
    if op == "gelu_pool":
        return torch.ops.fxfuse.gelu_pool(y, bias, [1, 1], True, "none", None)
    window = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
    return torch.ops.fxfuse.norm_pool_gelu(y, bias, weight[0], weight, bias, 1.0, 0.0, 1, 1e-5, *window, False, True, None, "none", None)


def bandwidths(rounds: int) -> Iterator[dict[str, Any]]:
    """Each tail op alone: bytes read and written once, a microsecond, over what a copy of the same tensor reaches."""
    for (op, shape), dtype, layout in itertools.product(CONV_OUTPUTS[DEVICE.type].items(), DTYPES, LAYOUTS):
        y = in_layout(torch.randn(shape, device=DEVICE, dtype=dtype), layout)
        bias, weight = torch.randn(2, 64, device=DEVICE, dtype=dtype)
        target = torch.empty_like(y)
        contenders = {"copy": lambda: target.copy_(y), "op": lambda: call_tail(op, y, bias, weight)}
        times = medians(paired_times(contenders, y.device, rounds))
        out = call_tail(op, y, bias, weight)
        moved = y.numel() * y.element_size() + out.numel() * out.element_size()
        copied = 2 * y.numel() * y.element_size()
        rates = {"op": moved / times["op"] / 1e9, "copy": copied / times["copy"] / 1e9}
        yield {
            "op": op,
            "dtype": str(dtype).removeprefix("torch."),
            "layout": layout,
            "op_ms": times["op"],
            "op_tb_s": rates["op"],
            "copy_tb_s": rates["copy"],
            "fraction": rates["op"] / rates["copy"],
        }


def models(rounds: int) -> Iterator[dict[str, Any]]:
    """Each headline model through torch.compile; fp32 with cuDNN's TF32 allowed (torch's default) and not."""
    for headline, (dtype, precision), layout in itertools.product(HEADLINES, KINDS if DEVICE.type == "cuda" else KINDS[:1], LAYOUTS):
        print(f"{headline.chain} {dtype} {precision} {layout}", file=sys.stderr, flush=True)
        torch.backends.cudnn.conv.fp32_precision = precision
        yield {"precision": precision if dtype == torch.float32 else "", **model_row(headline, dtype, layout, rounds)}


def model_row(headline: Headline, dtype: torch.dtype, layout: str, rounds: int) -> dict[str, Any]:
    """Times and errors of one headline model in one dtype and layout."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = headline.make().to(DEVICE, dtype)
    x = in_layout(torch.rand(headline.shape(DEVICE), device=DEVICE, dtype=dtype), layout)
    if layout == "channels_last":
        model = model.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    contenders = {
        "eager": model,
        "inductor": torch.compile(model, backend="inductor"),
        "always": torch.compile(model, backend="fxfuse", options={"fxfuse.select": "always"}),
        "auto": torch.compile(model, backend="fxfuse"),
    }
    reference = fp64_result(model, x)
    errors = {name: relative_error(contender(x), reference) for name, contender in contenders.items()}
    del reference
    torch.cuda.empty_cache()
    times = paired_times({name: lambda c=c: c(x) for name, c in contenders.items()}, DEVICE, rounds)
    fused = {"always": reports()[-2].fused, "auto": reports()[-1].fused}
    return {
        "chain": headline.chain,
        "dtype": str(dtype).removeprefix("torch."),
        "layout": layout,
        "ms": medians(times),
        "error": errors,
        "op": {name: [f.op for f in records] for name, records in fused.items()},
        "always_over_inductor": ratio(times, "always", "inductor"),
        "auto_over_inductor": ratio(times, "auto", "inductor"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of paired calls")
    arguments = parser.parse_args()
    library.load(DEVICE.type)
    with torch.no_grad():
        tails = list(bandwidths(arguments.rounds))
        print(tabulate([list(row.values()) for row in tails], headers=list(tails[0]), floatfmt=".3f"), flush=True)
        rows = list(models(arguments.rounds))
    table = [
        (r["chain"], f"{r['dtype']} {r['precision']}", r["layout"], *r["ms"].values(), r["always_over_inductor"], r["auto_over_inductor"], r["error"]["eager"],
         r["error"]["always"], ",".join(r["op"]["auto"]) or "inductor")
        for r in rows
    ]  # fmt: skip
    headers = ("chain", "dtype", "layout", "eager", "inductor", "always", "auto", "always/ind", "auto/ind", "err eager", "err fxfuse", "auto took")
    print(tabulate(table, headers=headers, floatfmt=(*[""] * 3, *[".3f"] * 6, ".1e", ".1e")))
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{torch.backends.cpu.get_cpu_capability()} CPU, {torch.get_num_threads()} threads"
    state = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "fxfuse": fxfuse.__version__}
    arguments.out.write_text(json.dumps({**state, "tails": tails, "models": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
