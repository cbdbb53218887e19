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

from .chain import Chain, builtin_chains, chains
from .check import RegistrationError, check
from .command import CommandError
from .factory import module_of
from .sources import file_of, place, unwrapped

_lock = threading.Lock()


class Registration:
    """A chain that is registered until `remove` is called or the `with` block that it opens is left."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def remove(self) -> None:
        """Takes the chain away again; nothing happens where it is gone already."""
        global _registrations
        with _lock:
            _registrations = tuple(other for other in _registrations if other is not self)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


# The latest first. Replaced as a whole: whoever reads it has one state of it.
_registrations: tuple[Registration, ...] = ()


def register(chain: Chain) -> Registration:
    """Adds a chain to those that every later compilation in this process looks for.

    Raises RegistrationError, with nothing registered, for a chain that cannot work: a name that is taken, a step with a word that nobody
    knows, an op that torch does not know, functions that do not take the names of the steps, ...
    """
    global _registrations
    check(chain)
    registration = Registration(chain)
    with _lock:
        if chain.name in [own.name for own in builtin_chains()]:
            raise RegistrationError(f"the chain {chain.name!r} is one of fxfuse's own; take another name")
        for other in registered():
            if other.name == chain.name:
                theirs = f"the chain {chain.name!r} is registered already: its functions are at {place(other.requires)}"
                raise RegistrationError(f"{theirs}; take another name, or remove that registration first")
        _registrations = (registration, *_registrations)
    return registration


def registered() -> tuple[Chain, ...]:
    """The chains from outside, the latest first."""
    return tuple(registration.chain for registration in _registrations)


def load(source: str) -> bool:
    """Imports a module, "module.py" or "package.module", and registers the chains that it holds, if it has not done so itself; whether there
    are any. Raises CommandError where the import fails or a chain cannot be registered."""
    before = _registrations
    held = [value for value in vars(module_of(source)).values() if isinstance(value, Chain)]
    for chain in held:
        if all(chain is not known for known in chains()):
            try:
                register(chain)
            except RegistrationError as error:
                raise CommandError(f"{source}: {error}") from error
    return bool(held) or _registrations is not before


def source_of(chain: Chain) -> str | None:
    """What `load` is to be given for a chain, in another process: the module of its functions if it can be imported by name, else its file;
    None where there is neither, as in a notebook."""
    name = unwrapped(chain.requires).__module__
    if importlib.machinery.PathFinder.find_spec(name.partition(".")[0]) is not None:
        return name
    return file_of(chain.requires)
