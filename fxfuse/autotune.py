"""Timing, for `mode="max-autotune"`: each way to compute a match, and Inductor's, on tensors of the real shapes. Results are kept on disk.

A candidate is the chain cut out of the graph, with or without its replacement, compiled by Inductor as the whole graph will be.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import precision, torch_private
from .build import build_hash
from .chain import Implementation
from .cut import cut_out, inputs_of, sizes_vary
from .gradients import is_needed
from .match import Match, find
from .measure import medians, paired_times
from .replacement import rewritten
from .toolchain import cache_dir, unusable
from .values import value_of
from .view import GraphView
from .weigh import INDUCTOR, Timer

log = logging.getLogger(__name__)

ROUNDS = 15
# Of the free memory that candidates may take; they run one after the other, but a captured call keeps its buffers.
MEMORY_SHARE = 0.8

Inductor = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def timer(mode: str | None, rest: Mapping[str, Any]) -> Timer | None:
    """What times candidates under this Inductor mode and these options of Inductor's; None if they do not ask for timing."""
    if not (mode or "").startswith("max-autotune") and not rest.get("max_autotune"):
        return None
    # Calls are timed in CUDA graphs of their own.
    rest = {**rest, "triton.cudagraphs": False}
    inductor = torch_private.inductor("max-autotune-no-cudagraphs" if mode == "max-autotune" else mode, rest)

    def times(match: Match, implementations: Sequence[Implementation]) -> Mapping[str, float] | str:
        if is_needed(match):
            # A backward is compiled when it is first run, which torch refuses inside the compilation of another graph.
            return "the result needs a gradient"
        gm = _alone(match)
        if isinstance(gm, str):
            return gm
        path = _kept_at(gm, match, implementations, f"{mode} {sorted(rest.items(), key=str)}")
        if kept := _kept(path, {INDUCTOR, *(implementation.op for implementation in implementations)}):
            return kept
        needed, free = _memory(gm, len(implementations) + 1), _free_memory(match.anchor.value.device)
        if needed > MEMORY_SHARE * free:
            return f"timing needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        try:
            measured = _measured(gm, match, implementations, inductor)
        except Exception as error:
            log.exception("fxfuse: candidates could not be timed; the rule decides. Please report this.")
            return f"{type(error).__name__}, see the log"
        _keep(path, measured)
        return measured

    return times


def _alone(match: Match) -> fx.GraphModule | str:
    """The match as a graph module of its own; a sentence if it cannot be one of known sizes."""
    graph = cut_out(match.in_order)
    if isinstance(graph, str):
        return graph
    module = match.anchor.node.graph.owning_module
    return "sizes vary" if sizes_vary(graph) else fx.GraphModule(module if module is not None else torch.nn.Module(), graph)


def _measured(gm: fx.GraphModule, match: Match, implementations: Sequence[Implementation], inductor: Inductor) -> dict[str, float]:
    with torch_private.outside_compilation():
        inputs = [_random(value) for value in inputs_of(gm.graph)]
        calls = {INDUCTOR: inductor(_copy(gm, gm.graph), inputs)}
        for implementation in implementations:
            own = next(found for found in find(GraphView(gm.graph, match.chain), match.chain) if isinstance(found, Match))
            calls[implementation.op] = inductor(_copy(gm, rewritten(gm.graph, [(own, implementation.replace)])), inputs)
        contenders = {name: lambda call=call: call(*inputs) for name, call in calls.items()}
        return medians(paired_times(contenders, inputs[0].device, ROUNDS))


def _copy(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return fx.GraphModule(gm, copied)


def _random(value: torch.Tensor) -> torch.Tensor:
    real = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return real.normal_() if real.is_floating_point() else real.zero_()


def _memory(gm: fx.GraphModule, candidates: int) -> int:
    """Bytes: the inputs once, and for each candidate every intermediate result."""
    sizes = {True: 0, False: 0}
    for node in gm.graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.Tensor):
            sizes[node.op == "placeholder"] += value.numel() * value.element_size()
    return sizes[True] + candidates * sizes[False]


def _free_memory(device: torch.device) -> float:
    if device.type != "cuda":
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _kept_at(gm: fx.GraphModule, match: Match, implementations: Sequence[Implementation], setting: str) -> Path:
    """Where the times of this chain on this device, torch and fxfuse are kept."""
    device = match.anchor.value.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    layouts = [(value.shape, value.stride(), value.dtype) for value in map(value_of, gm.graph.nodes) if isinstance(value, torch.Tensor)]
    ops = [implementation.op for implementation in implementations]
    state = (name, torch.__version__, build_hash(device.type), precision.current(), autocast, setting, match.chain.fingerprint, ops, gm.code, layouts)
    return cache_dir() / "autotune" / f"{hashlib.sha256(repr(state).encode()).hexdigest()[:32]}.json"


def _kept(path: Path, names: Collection[str]) -> dict[str, float] | None:
    """The times in a file, of all these names; None where there is no such file, or one that is damaged or may not be read."""
    try:
        times = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_whole = isinstance(times, dict) and times.keys() == set(names) and all(isinstance(time, (int, float)) for time in times.values())
    return times if is_whole else None


def _keep(path: Path, times: Mapping[str, float]) -> None:
    """Writes atomically; a cache that cannot be written costs the next process its time, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(dict(times), file)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("fxfuse: measured times are not kept: %s", unusable(cache_dir(), error).summary)
