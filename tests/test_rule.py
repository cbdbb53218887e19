"""`auto`'s rule against measurements: replayed on every shape of the committed sweeps, it takes nothing that was measured to be slower, and
on a GPU leaves no tail op that is faster.

`python tests/test_rule.py sweep.json` prints, for every shape of a sweep, what was measured and what the rule would take: to fit it by.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from convolutions import training_step
from torch import fx

from fxfuse import fused, precision, weigh
from fxfuse.bench import workloads
from fxfuse.chain import chains
from fxfuse.choose import RATES
from fxfuse.headline import HEADLINES, Headline
from fxfuse.match import Match, find
from fxfuse.options import Options
from fxfuse.view import GraphView

RESULTS = Path(__file__).parent.parent / "examples/results"
GPUS = {"NVIDIA H200": fused.Gpu(major=9, num_processors=132, shared_bytes=232448)}
TAILS, FUSED = ("gelu_pool", "norm_pool_gelu"), ("conv_gelu_pool", "conv_norm_pool_gelu")
CONTENDERS = {None: "inductor", **dict.fromkeys(TAILS, "fxfuse tail"), **dict.fromkeys(FUSED, "fxfuse always")}
TRAINING_CONTENDERS = {None: "inductor", **dict.fromkeys(TAILS, "fxfuse save"), **dict.fromkeys(FUSED, "fxfuse recompute")}
# What the rule may lose on a shape: the noise of a CPU that other things run on is larger.
SLOWER = {"cuda": 1.02, "cpu": 1.1}
# What it may leave: a share of the tail's time, and what calls of 15 us differ by from one run of the sweep to the next.
LEFT, LEFT_MS = 1.05, 0.0015

Key = tuple[str, str, str, str]
Rows = dict[str, dict[str, Any]]


class Captured(Exception):
    """Ends a call as soon as its graph is known."""


def graph_of(model: Callable[..., Any], inputs: tuple[torch.Tensor, ...], device: str) -> fx.GraphModule:
    """Dynamo's graph of the call, with example values as if they were on the device; nothing runs."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)

        def stop(*args: Any) -> Any:
            raise Captured

        return stop

    torch._dynamo.reset()
    with pytest.raises(Captured):
        torch.compile(model, backend=backend, dynamic=False)(*inputs)
    for node in graphs[0].graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            with value.fake_mode:
                like = {"dtype": value.dtype, "device": device, "requires_grad": value.requires_grad}
                node.meta["example_value"] = torch.empty_strided(value.shape, value.stride(), **like)
    return graphs[0]


def replayed(result: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[tuple[Key, Rows, weigh.Weighed]]:
    """What was measured for each workload of a sweep, and what the rule decides for it today, on the device of the sweep."""
    measured: dict[Key, Rows] = {}
    for row in result["rows"]:
        measured.setdefault((row["workload"], row["dtype"], row["precision"], row["layout"]), {})[row["contender"]] = row
    device = "cuda" if result["cuda"] else "cpu"
    patch.setattr(torch, "randn", torch.empty)
    patch.setattr(fused, "gpu_of", lambda device: GPUS.get(result["device"]))
    patch.setattr(weigh, "rates_of", lambda device: RATES.get(result["device"], RATES["cpu"]))
    sweep, trained = (workloads.training_sweep if result.get("training") else workloads.sweep), result.get("training", False)
    for workload in sweep(torch.device(device)):
        key = (workload.name, workload.kind.dtype, workload.kind.precision, workload.kind.layout)
        if key not in measured:
            continue
        patch.setattr(precision, "current", lambda kind=workload.kind: kind.precision or "tf32")
        model, inputs = workload.build(torch.device("cpu"))
        model.requires_grad_(trained)
        inputs = tuple(value.requires_grad_(result.get("input_gradient", False)) for value in inputs)
        view = GraphView(graph_of(model, inputs, device).graph)
        (match,) = [found for chain in chains() for found in find(view, chain) if isinstance(found, Match)]
        reason = next((text for holds, text in match.chain.requires(**match.calls) if not holds), None)
        if reason is None:
            yield key, measured[key], weigh.weigh(match, Options(select="auto"), None)


def milliseconds(rows: Rows) -> dict[str, float]:
    return {name: row["gpu_ms"] or row["wall_ms"] for name, row in rows.items() if row["failed"] is None}


def contender(weighed: weigh.Weighed, training: bool = False) -> str:
    return (TRAINING_CONTENDERS if training else CONTENDERS)[weighed.taken.op if weighed.taken else None]


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*sweep_*.json")), ids=lambda path: path.stem)
def test_nothing_slower_than_inductor_is_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = json.loads(file.read_text())
    slower, replays = [], 0
    for key, rows, weighed in replayed(result, monkeypatch):
        taken = rows[contender(weighed, result.get("training", False))]
        if taken["failed"] or rows["inductor"]["failed"]:  # Inductor fails on one
            continue
        replays += 1
        # Beyond the noise: even the lower quartile of the ratio over the rounds.
        if taken["contender"] != "inductor" and taken["over_inductor"][0] > SLOWER["cuda" if result["cuda"] else "cpu"]:
            slower.append((key, taken["contender"], taken["over_inductor"]))
    assert replays >= (30 if result.get("training") else 60) and not slower


@pytest.mark.parametrize("file", sorted(RESULTS.glob("sweep_h200.json")), ids=lambda path: path.stem)
def test_no_faster_tail_is_left(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    for key, rows, weighed in replayed(json.loads(file.read_text()), monkeypatch):
        times = milliseconds(rows)
        if times[contender(weighed)] > LEFT * times["fxfuse tail"] + LEFT_MS:
            left.append((key, times))
    assert not left


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "gpu_of", lambda device: GPUS["NVIDIA H200"])
    monkeypatch.setattr(weigh, "rates_of", lambda device: RATES["NVIDIA H200"])


NUMBERS = [(torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "tf32"), (torch.float16, "tf32")]
EACH = pytest.mark.parametrize("model", HEADLINES, ids=lambda model: model.chain)


@EACH
@pytest.mark.parametrize("of_input", [False, True], ids=["weights", "input too"])
@pytest.mark.parametrize(("dtype", "multiplied"), NUMBERS, ids=str)
def test_training_steps_of_the_headline_models(
    model: Headline, dtype: torch.dtype, multiplied: str, of_input: bool, h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "current", lambda: multiplied)
    match = training_step(model, model.gpu_shape, dtype, of_input)
    recompute, save = match.chain.implementations
    auto = weigh.weigh(match, Options(), None)
    assert auto.taken is recompute or (of_input and auto.taken is save)
    assert all(re.match(r"predicted \d+ us in a training step, Inductor at least \d+ us", one.verdict) for one in auto.candidates)
    for backward, taken in (("recompute", recompute), ("save", save)):
        weighed = weigh.weigh(match, Options(backward=backward), None)
        assert (weighed.taken, weighed.why) == (taken, f'backward="{backward}"')


@EACH
def test_tiny_training_steps_are_left_for_their_time(model: Headline, h200: None) -> None:
    _, channels, *rest = model.gpu_shape
    match = training_step(model, (1, channels, *(4 for _ in rest[1:]), rest[-1]))
    weighed = weigh.weigh(match, Options(), None)
    assert weighed.taken is None and "in a training step, Inductor at least" in weighed.why


@EACH
def test_training_steps_on_a_device_that_was_not_measured(model: Headline, h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weigh, "rates_of", lambda device: None)
    match = training_step(model, model.gpu_shape)
    weighed = weigh.weigh(match, Options(), None)
    assert weighed.taken is match.chain.implementations[1]
    assert re.match(r"not measured on this device: moves [\d,]+ bytes after the convolution in a training step, Inductor", weighed.why)


def main(path: str) -> None:
    from tabulate import tabulate

    table, result = [], json.loads(Path(path).read_text())
    tail, whole = ("fxfuse save", "fxfuse recompute") if result.get("training") else ("fxfuse tail", "fxfuse always")
    with pytest.MonkeyPatch.context() as patch:
        for key, rows, weighed in replayed(result, patch):
            times = milliseconds(rows)
            if "inductor" not in times:
                continue
            took = contender(weighed, result.get("training", False))
            best = min(times["inductor"], times[tail])
            verdicts = "; ".join(f"{c.op}: {c.verdict}" for c in weighed.candidates)
            shown = [f"{times[name] * 1e3:.1f}" if name in times else "" for name in ("inductor", tail, whole)]
            table.append((" ".join(key), *shown, took, f"{times[took] / best:.2f}", f"{times[took] / min(times.values()):.2f}", verdicts))
    print(tabulate(table, headers=("workload", "inductor us", f"{tail} us", f"{whole} us", "taken", "/ best of two", "/ best", "why"), tablefmt="plain"))


if __name__ == "__main__":
    main(sys.argv[1])
