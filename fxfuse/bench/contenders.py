"""Who is measured: each contender by name, and how it compiles a model. Importing this module does not import torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import BenchError

if TYPE_CHECKING:
    from .workloads import Built, Kind

# GPU times come from a CUDA graph of our own around every contender, so max-autotune is taken without CUDA graphs.
MODE = "max-autotune-no-cudagraphs"


@dataclass(frozen=True)
class Contender:
    """How to compile a model: the arguments of torch.compile, None for eager. channels_last: with the model and its inputs converted."""

    compile: Mapping[str, Any] | None
    channels_last: bool = False


def _fxfuse(**options: str) -> Contender:
    return Contender({"backend": "fxfuse", **({"options": {f"fxfuse.{name}": value for name, value in options.items()}} if options else {})})


_AS_GIVEN = {
    "eager": Contender(None),
    "inductor": Contender({"backend": "inductor"}),
    "inductor-max-autotune": Contender({"backend": "inductor", "mode": MODE}),
}
CONTENDERS: Mapping[str, Contender] = {
    **_AS_GIVEN,
    **{f"{name} channels_last": Contender(given.compile, channels_last=True) for name, given in _AS_GIVEN.items()},
    "fxfuse": _fxfuse(),
    "fxfuse always": _fxfuse(select="always"),
    "fxfuse tail": _fxfuse(select="tail"),
    "fxfuse max-autotune": _fxfuse(mode=MODE),
    "fxfuse recompute": _fxfuse(select="always", backward="recompute"),
    "fxfuse save": _fxfuse(select="always", backward="save"),
}
_WIDE = ("eager", "inductor", "inductor-max-autotune", "inductor channels_last", "inductor-max-autotune channels_last", "fxfuse", "fxfuse always")
DEFAULTS: Mapping[str, Sequence[str]] = {"headline": _WIDE, "model": _WIDE, "sweep": ("inductor", "fxfuse", "fxfuse always", "fxfuse tail")}
_TRAINED = ("inductor", "fxfuse", "fxfuse always", "fxfuse recompute", "fxfuse save")
_TRAINED_WIDE = ("eager", "inductor", "inductor channels_last", *_TRAINED[1:])
TRAINING_DEFAULTS: Mapping[str, Sequence[str]] = {"headline": _TRAINED_WIDE, "model": _TRAINED_WIDE, "sweep": _TRAINED}


def chosen(text: str | None, suite: str, training: bool = False) -> list[str]:
    """The names in a comma-separated text, or the suite's own; raises BenchError for a name that is no contender."""
    if text is None:
        return list((TRAINING_DEFAULTS if training else DEFAULTS)[suite])
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown or not names:
        raise BenchError(f"{(unknown or [text])[0]!r} is no contender; they are {', '.join(CONTENDERS)}")
    return names


def applicable(names: Sequence[str], kind: Kind, inputs: Sequence[Any]) -> list[str]:
    """The contenders that differ on this workload: channels_last ones only where the inputs are not, but can be, channels_last."""
    import torch

    ranks = {value.dim() for value in inputs if isinstance(value, torch.Tensor)}
    converts = kind.layout == "contiguous" and bool(ranks & {4, 5})
    return [name for name in names if converts or not CONTENDERS[name].channels_last]


def compiled(contender: Contender, built: Built) -> Built:
    """What is called, and with what: the model compiled as the contender says (at the first call), and its inputs."""
    import torch

    from .workloads import to_channels_last

    model, inputs = built
    if contender.channels_last:
        model, inputs = to_channels_last(copy.deepcopy(model), inputs)
    return (model if contender.compile is None else torch.compile(model, **contender.compile)), inputs
