"""What `rewrite` returns: the module that it was given with another graph, which runs only under the state that it was rewritten for."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from . import library, torch_private
from .guards import Guards
from .vocabulary import NONE

# Rewritten modules by number, and those that said why they run unfused.
_numbers = itertools.count()
_told: set[int] = set()


class Rewritten(fx.GraphModule):
    """`given` with a rewritten graph. Parameters, buffers, submodules and hooks are those of `given`, in the same dicts: what is assigned,
    loaded or registered on one is so on both. Other attributes are read from `given`. bodies: of higher-order ops, by the names that the graph
    reads them by, where they were rewritten too.

    A call whose state is not that of the guards runs the graph of `given`, and the first such call warns.
    """

    def __init__(self, given: fx.GraphModule, graph: fx.Graph, guards: Guards, bodies: Mapping[str, fx.GraphModule] = NONE) -> None:
        # From the graph's own references a GraphModule would make modules and buffers of its own.
        super().__init__(nn.Module(), fx.Graph())
        own, shared = vars(self), vars(nn.Module())
        # An attribute that hides a method (`train` of an exported module) would not be looked for in `given`.
        hides = {name for name in vars(given) if name not in own and callable(getattr(type(self), name, None))}
        own.update({name: value for name, value in vars(given).items() if name in shared or name in hides})
        own.update(bodies)
        own.update(_given=given, _guards=guards, _bodies=dict(bodies), _number=next(_numbers), meta=dict(given.meta), _tracer_cls=given._tracer_cls)
        self.graph = graph

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_given" not in vars(self):
                raise
            return getattr(vars(self)["_given"], name)

    def recompile(self) -> Any:
        """Compiles the graph's code, and puts the guards in front of it."""
        code = super().recompile()
        type(self).forward = _guarded(type(self).forward)
        return code

    def __copy__(self) -> Rewritten:
        return Rewritten(copy.copy(self._given), torch_private.copy_of(self.graph), self._guards, self._bodies)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewritten:
        given, guards, bodies = (copy.deepcopy(own, memo) for own in (self._given, self._guards, self._bodies))
        memo[id(self)] = duplicate = Rewritten(given, torch_private.copy_of(self.graph), guards, bodies)
        return duplicate

    def __reduce__(self) -> tuple[Any, ...]:
        # As any GraphModule: by its code, which is traced again where it is loaded.
        traced, parts = fx.GraphModule(self, torch_private.copy_of(self.graph)).__reduce__()
        return _restored, (self._given, traced, parts, self._guards, self._bodies)


def _guarded(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def guarded(self: Rewritten, *args: Any, **kwargs: Any) -> Any:
        failed = self._guards.failed(self, args, kwargs)
        if failed is None:
            return forward(self, *args, **kwargs)
        _tell(self._number, failed)
        return self._given.forward(*args, **kwargs)

    return guarded


# What Dynamo takes as a constant it calls while it traces, and goes on.
@torch.compiler.assume_constant_result
def _tell(number: int, failed: str) -> None:
    if number not in _told:
        _told.add(number)
        warnings.warn(
            f"fxfuse: a rewritten module runs its graph unfused: {failed}. It was rewritten for another state: call fxfuse.rewrite under that "
            "of this call too, and use that module here. Further such calls of this module do not warn.",
            stacklevel=2,
        )


def _restored(
    given: fx.GraphModule, traced: Callable[..., fx.GraphModule], parts: tuple[Any, ...], guards: Guards, bodies: Mapping[str, fx.GraphModule]
) -> fx.GraphModule:
    """The rewritten module in the process that loads it; `given` where the kernels cannot be used there."""
    reasons = [library.unavailable(device) for device in guards.autocast]
    if any(reasons):
        warnings.warn(f"fxfuse: a rewritten module is loaded unfused: {next(filter(None, reasons))}", stacklevel=2)
        return given
    return Rewritten(given, traced(*parts).graph, guards, bodies)
