"""The `torch.compile` backend: options, then the engine's pipeline over Dynamo's graph, then Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from . import autotune, bodies, dump, engine, precision, torch_private
from .build import build_hash
from .chain import chain_names
from .emitter import FINGERPRINT
from .options import Options, split
from .report import Report, keep
from .values import value_of
from .weigh import Timer

log = logging.getLogger(__name__)


def fxfuse(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph with its chains fused. Registered as `torch.compile(model, backend="fxfuse")`.

    mode, options: as `torch.compile` passes them on; `fxfuse.*` keys are fxfuse's own (see `fxfuse.options`), the rest goes to Inductor.
    Raises OptionError for a bad `fxfuse.*` option, RuntimeError (Inductor's) for any other bad option or mode, and, only under
    `fxfuse.strict`, NotFusedError for a candidate that is left alone and whatever an exception inside fxfuse is.
    """
    own, rest = split(options, chain_names())
    own = replace(own, mode=mode or own.mode)
    with dump.recorded(gm, own, rest) as record:
        report, compiled = _fused_and_compiled(gm, example_inputs, own, rest, record)
    engine.count(report)
    keep(report)
    log.info("graph %s: %s", torch_private.compile_id(), report)
    return compiled


fxfuse.reset = torch_private.reset_inductor


def _fused_and_compiled(
    gm: fx.GraphModule, example_inputs: Sequence[Any], own: Options, rest: Mapping[str, Any], record: dump.Record
) -> tuple[Report, Callable[..., Any]]:
    inductor = torch_private.inductor(own.mode, rest)
    original = gm.graph
    report = fuse_in_place(gm, own, autotune.timer(own.mode, rest))
    record.rewritten(report)
    try:
        return report, precision.compiled(gm, example_inputs, lambda inputs: _compiled(gm, inputs, inductor))
    except torch_private.Restart:
        raise  # this attempt is void; the next one reports
    except Exception as error:
        if own.strict or gm.graph is original:
            raise
        failure = error
    # Outside the handler: what the original raises is raised as it would be without fxfuse, with nothing in its context.
    chains = ", ".join(sorted({record.chain for record in report.fused}))
    gm.graph = original
    report.fused.clear()
    compiled = inductor(gm, example_inputs)
    report.stopped = f"Inductor does not compile the graph with {chains} fused; the log holds the exception"
    log.error("fxfuse: Inductor compiles the graph, but not with %s fused: it stays as it was. Please report this.", chains, exc_info=failure)
    return report, compiled


def fuse_in_place(gm: fx.GraphModule, options: Options, timer: Timer | None = None) -> Report:
    """Gives `gm` its rewritten graph, or leaves it as it was where nothing is fused or (outside strict mode) fxfuse fails."""
    try:
        graph, report = engine.fuse(gm.graph, options, timer=timer)
        if graph is not gm.graph:
            bodies.adopt(gm, graph)
    except Exception as error:
        if options.strict:
            raise
        log.exception("fxfuse: an exception in its own pass; the graph goes to Inductor as it was. Please report this.")
        return Report(graphs=1, stopped=f"an exception inside fxfuse: {type(error).__name__}: {error}")
    return report


def _compiled(gm: fx.GraphModule, example_inputs: Sequence[Any], inductor: Callable[..., Any]) -> Callable[..., Any]:
    emitted = [node for graph in bodies.graphs_below(gm.graph).values() for node in graph.nodes if FINGERPRINT in node.meta]
    if not emitted:
        return inductor(gm, example_inputs)
    with _cache_key(emitted):
        return inductor(gm, example_inputs)


def _cache_key(emitted: Sequence[fx.Node]) -> Any:
    """Inductor's cache keys hold a custom op's name only: the hashes of kernels and of the chains that emitted it join it, so that a new version
    is not served old code. So does autocast's dtype, which torch 2.11's key lacks and which decides the dtype that the op is called in."""
    config = torch.compiler.config
    tags = [config.cache_key_tag, *sorted({node.meta[FINGERPRINT] for node in emitted})]
    for device_type in sorted({value.device.type for value in map(value_of, emitted) if isinstance(value, torch.Tensor)}):
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else "no autocast"
        tags.append(f"fxfuse {device_type} {build_hash(device_type)} {autocast}")
    return config.patch(cache_key_tag=" ".join(tags))
