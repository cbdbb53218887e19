"""fxfuse: a torch.compile backend that fuses chains around a convolution into single CUDA and CPU ops.

    compiled = torch.compile(model, backend="fxfuse")     # no import of fxfuse needed; backend=fxfuse is the same
    print(fxfuse.explain(model, x))                       # what would be fused, and why the rest would not
    print(*fxfuse.reports())                              # what the compilations of this process did
    fused, report = fxfuse.rewrite(graph_module, x)       # the FX pass alone, on a traced graph

A chain of your own: `fxfuse.register(fxfuse.Chain(...))`, see `fxfuse.registry` and `fxfuse.chain`.

Importing this package touches no device and compiles nothing.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import explain, rewrite
    from .chain import Chain, Implementation, Step
    from .check import RegistrationError
    from .cost import BackwardCost, Cost, Training, Work
    from .emitter import Emitter
    from .registry import Registration, register
    from .report import Report, reports
    from .view import Call
    from .vocabulary import Spelling, Word

__version__ = "0.1.0"
__all__ = [
    "BackwardCost",
    "Call",
    "Chain",
    "Cost",
    "Emitter",
    "Implementation",
    "Registration",
    "RegistrationError",
    "Report",
    "Spelling",
    "Step",
    "Training",
    "Word",
    "Work",
    "explain",
    "register",
    "reports",
    "rewrite",
]

if __name__ != "fxfuse":
    # TORCH_LOGS="+fxfuse" imports every package below this one; on the path of a checkout that is this very package, again and again.
    raise ImportError(f"fxfuse is imported as {__name__}")

# Imported from a checkout (`python -m pytest` puts it first on the path), `passes/` lies beside this folder and not in it.
if not (Path(__file__).parent / "passes").is_dir() and (Path(__file__).parents[1] / "passes" / "__init__.py").is_file():
    __path__.append(str(Path(__file__).parents[1]))

if os.environ.get("FXFUSE_LOG"):
    import_module(".logs", __name__).set_level(os.environ["FXFUSE_LOG"])

# The module that each name of `__all__` lies in.
_NAMES = {
    "api": ("explain", "rewrite"),
    "chain": ("Chain", "Implementation", "Step"),
    "check": ("RegistrationError",),
    "cost": ("BackwardCost", "Cost", "Training", "Work"),
    "emitter": ("Emitter",),
    "registry": ("Registration", "register"),
    "report": ("Report", "reports"),
    "view": ("Call",),
    "vocabulary": ("Spelling", "Word"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fxfuse' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


class _Backend(ModuleType):
    """This module, which is its backend too: `torch.compile(model, backend=fxfuse)`."""

    def __call__(self, gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        """`fxfuse.backend.fxfuse`."""
        return import_module(".backend", __name__).fxfuse(gm, example_inputs, **kwargs)

    def reset(self) -> None:
        """What `torch._dynamo.reset()` asks of a backend."""
        import_module(".backend", __name__).fxfuse.reset()


sys.modules[__name__].__class__ = _Backend
