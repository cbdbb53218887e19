"""Chains from outside: `fxfuse.register` adds one to those that are looked for, as if it lay in `fxfuse.passes`.

    import fxfuse

    fxfuse.register(CHAIN)                # for the rest of the process: a package does this where it is imported
    with fxfuse.register(CHAIN):          # within it alone
        ...

What such a chain is made of is exported by `fxfuse`: Chain, Step, Implementation, Cost and Work, Word and Spelling; its functions are handed
Calls and an Emitter. Its ops are the user's own, made with `torch.library` and a fake. It is looked for before the chains that were there
already, so that of two that want the same nodes the one registered last has them. What is compiled already stays as it is.
"""

from __future__ import annotations

import importlib.machinery
import threading
from types import TracebackType

from .chain import Chain, builtin_chains
from .check import RegistrationError, check
from .command import CommandError
from .factory import module_of
from .sources import file_of, place

_lock = threading.Lock()
# The latest first. Replaced as a whole: whoever reads it has one state of it.
_chains: tuple[Chain, ...] = ()


class Registration:
    """A chain that is registered until `remove` is called or the `with` block that it opens is left."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def remove(self) -> None:
        """Takes the chain away again; nothing happens where it is gone already."""
        global _chains
        with _lock:
            _chains = tuple(chain for chain in _chains if chain is not self.chain)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def register(chain: Chain) -> Registration:
    """Adds a chain to those that every later compilation in this process looks for.

    Raises RegistrationError, with nothing registered, for a chain that cannot work: a name that is taken, a step with a word that nobody
    knows, an op that torch does not know, functions that do not take the names of the steps, ...
    """
    global _chains
    check(chain)
    with _lock:
        for other in (*_chains, *builtin_chains()):
            if other.name == chain.name:
                whose = f"registered already: its functions are at {place(other.requires)}" if other in _chains else "one of fxfuse's own"
                raise RegistrationError(f"the chain {chain.name!r} is {whose}; take another name, or remove that registration first")
        _chains = (chain, *_chains)
    return Registration(chain)


def registered() -> tuple[Chain, ...]:
    """The chains from outside, the latest first."""
    return _chains


def load(source: str) -> list[str]:
    """Imports a module, "module.py" or "package.module", and registers the chains that it holds, if it has not done so itself; the names of
    what it registered or holds. Raises CommandError where the import fails or a chain cannot be registered."""
    before = _chains
    module = module_of(source)
    held = [value for value in vars(module).values() if isinstance(value, Chain)]
    for chain in held:
        if all(chain is not other for other in (*_chains, *builtin_chains())):
            try:
                register(chain)
            except RegistrationError as error:
                raise CommandError(f"{source}: {error}") from error
    return [chain.name for chain in {id(chain): chain for chain in (*held, *(c for c in _chains if c not in before))}.values()]


def source_of(chain: Chain) -> str | None:
    """What `load` is to be given for a chain, in another process: the module of its functions if it can be imported by name, else its file;
    None where there is neither, as in a notebook."""
    name = chain.requires.__module__
    if importlib.machinery.PathFinder.find_spec(name.partition(".")[0]) is not None:
        return name
    return file_of(chain.requires)
