"""The chains, one a file. Each file states its structure, its conditions, its op with fake, and its replacement as `CHAIN`.

Importing this package imports every file in it, which declares the ops; a new file is all it takes to add a chain.
"""

import sys
from importlib import import_module
from pkgutil import iter_modules

# With TORCH_LOGS="+fxfuse" torch imports every package in fxfuse while it is itself half imported, and passes over those that raise this.
if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
    raise ImportError("fxfuse.passes needs the whole of torch, whose import is under way")

_modules = [import_module(f"{__name__}.{info.name}") for info in sorted(iter_modules(__path__), key=lambda info: info.name)]

CHAINS = tuple(module.CHAIN for module in _modules if hasattr(module, "CHAIN"))
