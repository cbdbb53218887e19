"""What fxfuse does without `torch.compile`: `explain` a model, `rewrite` a traced graph."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import engine, library, rewriting, torch_private
from .chain import chain_names
from .constants import known_constants
from .options import Options, split
from .preserved import preserved
from .report import Report

Seen = Callable[[fx.Graph, fx.Graph], None]


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """What `torch.compile(model, backend="fxfuse")` would fuse when called with these arguments, and why not the rest.

    Captures every graph under the caller's grad mode, across graph breaks, on fake tensors: nothing of the model's runs and no machine code is
    made. What the model, its modules and the arguments hold is as before, to the very object; globals that the model assigns to are not.
    What the model makes of numbers on the CPU, such as `torch.tensor(x.shape)`, has its data. Where it needs other data to go on
    (`if x.sum() > 0`), the report holds what was captured so far and `report.stopped` names the line. Where no graph is captured at all, as
    with Dynamo turned off, `report.stopped` says why. Options are read from the `FXFUSE_*` variables.
    Raises OptionError for a bad variable, and what the model itself raises on these arguments.
    """
    return explained(model, args, kwargs, split(None, chain_names())[0])


def explained(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    dynamic: bool = False,
    seen: Seen | None = None,
) -> Report:
    """`explain` with options given, but for `strict`, which has no say; dynamic: with every size symbolic, as `torch.compile` takes it.

    seen: is given each graph before and after rewriting.
    """
    if off := torch_private.turned_off():
        return Report(stopped=_uncaptured(off))
    options = dataclasses.replace(options, strict=False)
    report, around = Report(), torch_private.modes_around()

    model, mode = torch_private.uncompiled(model), torch_private.new_fake_mode()

    def capture(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        report.extend(_explained(gm, options, seen))
        return constants.followed(gm)

    with known_constants(mode) as constants, preserved(model, args, kwargs) as modules, torch_private.static_capture():
        for module in modules:
            torch_private.put_on_fakes(module, mode)
        args, kwargs = torch_private.faked((args, kwargs), mode)
        try:
            torch.compile(_as_new(model), backend=capture, dynamic=dynamic or None)(*args, **kwargs)
        except Exception as error:
            if not torch_private.needs_data(error):
                raise
            report.stopped = f"the model needs the data of a tensor {torch_private.user_line(error)}"
    if not report.graphs and report.stopped is None:
        disabled = "torch.compiler.disable on the model's forward" if torch_private.is_disabled(model) else ""
        report.stopped = _uncaptured(around or disabled)
    return report


def _uncaptured(off: str) -> str:
    """Why there is no graph to look at. off: what turned Dynamo off, where that can be told."""
    if off:
        return f"{off} turns torch.compile off, so no graph was captured: run without it"
    return (
        "Dynamo captured no graph, so nothing was looked at: the model runs no tensor op, or all of them where torch.compile does not go "
        "(torch.compiler.disable, code that Dynamo skips, errors under suppress_errors); TORCH_LOGS=graph_breaks,dynamo names the lines"
    )


def rewrite(gm: fx.GraphModule, *example_inputs: Any, **options: Any) -> tuple[fx.GraphModule, Report]:
    """The FX pass alone: a graph module with its chains fused, and the report; `gm` itself, untouched, where nothing is fused.

    gm: from `torch.fx.symbolic_trace`, `torch.export.export(...).module()` or a Dynamo graph; it and its modules are never modified.
    example_inputs: needed where the graph holds no example values, or where an input needs a gradient; only their shapes, strides, dtypes, devices
    and requires_grad are read.
    options: `select`, `backward`, `strict`, `passes` as in `fxfuse.options`.
    Where a chain's result needs a gradient, ops that have one are emitted. For inference call it under `torch.no_grad()`; a module made so has no
    gradients of its own, and is not for training.

    The module returned shares parameters, buffers, submodules and hooks with `gm`: whatever is loaded (`assign=True` too), assigned or moved on one is
    so on both. Fixed at rewriting are the graph, and the attributes of the modules that it fuses (stride, eps, output size). Fixed too, and checked in
    each call, are: rank, dtype and device type of the inputs and of the parameters that the fused ops read; sizes of the inputs for which another graph
    would be made, as where a mean divides by a number (not of a captured graph, which has guards, or whose caller has); whether autocast is on, and its
    dtype; the modules that are fused, their training mode, hooks and forward; and that no gradient is needed, if ops were emitted that have none. A
    call where one of them differs runs the graph of `gm`, with nothing fused, and the first such call warns. Not checked are hooks of all modules
    (`register_module_forward_hook`) and patched classes: they count as they are at rewriting.
    Raises OptionError for a bad option, NotFusedError under `strict` for a candidate that is left alone, TypeError where `gm` is not traced.
    """
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(
            f"rewrite takes a torch.fx.GraphModule, not {type(gm).__name__}: torch.fx.symbolic_trace(model), "
            "or torch.export.export(model, args).module()"
        )
    own, _ = split({f"fxfuse.{name}": value for name, value in options.items()}, chain_names())
    return rewriting.rewritten(gm, example_inputs, own)


def _as_new(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model as a function that Dynamo has not seen: it keeps what it compiled, and which sizes vary, by code object."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(called.__code__.replace(), globals(), closure=called.__closure__)


def _explained(gm: fx.GraphModule, options: Options, seen: Seen | None) -> Report:
    graph, report = engine.fuse(gm.graph, options, unavailable=lambda device: library.unavailable(device, build=False))
    report.before.append(torch_private.readable(gm.graph))
    report.after.append(torch_private.readable(graph))
    if seen is not None:
        seen(gm.graph, graph)
    return report
