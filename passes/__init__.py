"""The chains, one a file. Each file states its structure, its conditions, its op with fake, and its replacement as `CHAIN`.

Importing this package imports every file in it, which declares the ops; a new file is all it takes to add a chain.
"""

from importlib import import_module
from pkgutil import iter_modules

_modules = [import_module(f"{__name__}.{info.name}") for info in sorted(iter_modules(__path__), key=lambda info: info.name)]

CHAINS = tuple(module.CHAIN for module in _modules if hasattr(module, "CHAIN"))
