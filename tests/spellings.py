"""What a row of the pattern coverage is: one way to write a chain, or a twin that looks like one, with its verdict."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from models import dynamo_graph, fake_mode
from torch import fx, nn

NO_CANDIDATE = "no candidate"


@dataclass(frozen=True)
class Row:
    """One spelling.

    inputs: shapes by the names that rows use. run: a function of such names, or the factory of a module of `x`. declined: a piece of the
    sentence, or NO_CANDIDATE; "" where the chain is fused. given: inputs of this row, shapes or factories. around: what the call runs in.
    """

    chain: str
    inputs: dict[str, tuple[int, ...]]
    name: str
    run: Callable[..., Any]
    declined: str
    given: dict[str, Any]
    capture: Callable[..., fx.GraphModule] = dynamo_graph
    around: Callable[[], AbstractContextManager[Any]] = torch.no_grad

    def graph(self, needs_gradient: bool = False) -> fx.GraphModule:
        """needs_gradient: the weights', and so the chain's result, in place of what `around` says."""
        specs = {**self.inputs, **self.given}
        # Export and symbolic_trace make fake tensors themselves.
        with fake_mode() if self.capture is dynamo_graph else nullcontext():
            module = isinstance(self.run, (type, partial))
            names = ["x"] if module else inspect.signature(self.run).parameters
            tensors = [torch.zeros(spec) if isinstance(spec, tuple) else spec() for spec in (specs[name] for name in names)]
            run = self.run() if module else self.run
            weights = [tensor for name, tensor in zip(names, tensors) if name.startswith("w")]
            for tensor in (weights or tensors) if needs_gradient else ():
                tensor.requires_grad_()
            with torch.enable_grad() if needs_gradient else self.around():
                return self.capture(run, *tensors)


def spelling(chain: str, inputs: dict[str, tuple[int, ...]], name: str, run: Callable[..., Any], declined: str = "", **given: Any) -> Row:
    """given: inputs by name, as a shape or a factory; also `capture` and `around`."""
    own = {key: given.pop(key) for key in ("capture", "around") if key in given}
    return Row(chain, inputs, name, run, declined, given, **own)


def zeros(*shape: int, **options: Any) -> Callable[[], torch.Tensor]:
    return partial(torch.zeros, shape, **options)


def trainable(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: nn.Parameter(torch.zeros(shape))


class After(nn.Module):
    """The tail of a chain behind a convolution module."""

    def __init__(self, tail: Callable[[torch.Tensor], torch.Tensor], conv: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tail, self.conv = tail, conv()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.conv(x))


def autocast(enabled: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)
