"""The state behind a model, put back as it was: every attribute, container, slot, closure and class attribute that its code can assign to.

Things are read and written through the methods of the built-in types that they derive from: a class of the user's may raise in its own, or
count, or be frozen. What has not changed is not touched. Importing this module does not import the rest of fxfuse.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

log = logging.getLogger(__name__)

# Loggers, locks, threads and what torch keeps for itself are no state of a model's; that of the standard library's containers is.
FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", __package__}
OWN_OF_FOREIGN = (nn.Module, SimpleNamespace, UserDict, UserList)
OPAQUE = (torch.Tensor, torch.jit.ScriptModule)
ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
ABSENT = object()


# How entries, which are compared by identity, are read from a thing and put back.
Way = tuple[Callable[[Any], list[Any]], Callable[[Any, list[Any]], None]]


class _State(NamedTuple):
    """A thing, and one way to its entries."""

    thing: Any
    read: Callable[[Any], list[Any]]
    write: Callable[[Any, list[Any]], None]


@contextmanager
def preserved(*roots: Any) -> Iterator[list[nn.Module]]:
    """Within it, what `roots` (models, functions, arguments) hold may be changed; behind it everything is the very object that it was.

    Gives all modules that can be reached. State that code reaches by a global's name is not followed, nor the data of tensors.
    Where something cannot be put back, a warning names it and the rest is put back all the same.
    """
    things = _reachable(roots)
    saved = [(state, state.read(state.thing)) for thing in things for state in _states(thing)]
    try:
        yield [thing for thing in things if issubclass(type(thing), nn.Module)]
    finally:
        for state, before in saved:
            _restore(state, before)


def _restore(state: _State, before: list[Any]) -> None:
    try:
        now = state.read(state.thing)
        if len(now) != len(before) or not all(map(operator.is_, now, before)):
            state.write(state.thing, before)
    except Exception as error:
        log.warning("fxfuse: a %s of the model's cannot be put back as it was: %s: %s", type(state.thing).__name__, type(error).__name__, error)


def _reachable(roots: Iterable[Any]) -> list[Any]:
    """The roots and what they hold, each once."""
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or not _is_own(thing):
            continue
        seen[id(thing)] = thing
        waiting += [held for held in _held(thing) if type(held) not in ATOMS]
    return list(seen.values())


def _is_own(thing: Any) -> bool:
    """Whether a thing's state counts as the model's; functions and classes are judged by where they are written, others by their class."""
    kind = type(thing)
    return _is_own_kind(kind) if not issubclass(kind, (type, FunctionType)) else _package(thing) not in FOREIGN


@lru_cache(maxsize=1024)
def _is_own_kind(kind: type) -> bool:
    if issubclass(kind, OPAQUE):
        return False
    known = (*CONTAINERS, tuple, frozenset, MethodType, partial, *OWN_OF_FOREIGN)
    return issubclass(kind, known) or _package(kind) not in FOREIGN


def _package(home: Any) -> str:
    return str(getattr(home, "__module__", None)).partition(".")[0]


def _held(thing: Any) -> list[Any]:
    """What a thing refers to, its class among it."""
    held = list(chain.from_iterable(state.read(thing) for state in _states(thing)))
    kind = type(thing)
    if issubclass(kind, (tuple, frozenset)):
        held += (tuple if issubclass(kind, tuple) else frozenset).__iter__(thing)
    elif issubclass(kind, FunctionType):
        held += [*(thing.__closure__ or ()), *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    elif issubclass(kind, MethodType):
        held += [thing.__self__, thing.__func__]
    elif issubclass(kind, partial):
        held += [thing.func, thing.args, thing.keywords]
    if (attributes := _attributes(thing)) is not None:
        held.append(attributes)
    return [*held, *(thing if issubclass(kind, type) else kind).__mro__]


def _attributes(thing: Any) -> dict[str, Any] | None:
    """The instance's dictionary; past `__getattribute__`, as a proxy would give another object's."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return found if issubclass(type(found), dict) else None


def _states(thing: Any) -> list[_State]:
    return [_State(thing, read, write) for read, write in _ways(type(thing))]


@lru_cache(maxsize=1024)
def _ways(kind: type) -> tuple[Way, ...]:
    """How the state of a class's instances, apart from their dictionaries, is read and written."""
    if issubclass(kind, type):
        return ((_read_class, _write_class),)
    # An OrderedDict is a dict whose order the methods of dict would break: the most special base counts.
    ways = [way for base, way in CONTAINERS.items() if issubclass(kind, base)][:1]
    slotted = [cls for cls in kind.__mro__ if "__slots__" in vars(cls)]
    slots = [slot for cls in slotted for slot in vars(cls).values() if type(slot) is MemberDescriptorType]
    return (*ways, (partial(_read_slots, slots), partial(_write_slots, slots))) if slots else tuple(ways)


def _read_slots(slots: list[MemberDescriptorType], thing: Any) -> list[Any]:
    return [_slot(slot, thing) for slot in slots]


def _slot(slot: MemberDescriptorType, thing: Any) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:
        return ABSENT


def _write_slots(slots: list[MemberDescriptorType], thing: Any, entries: list[Any]) -> None:
    for slot, value in zip(slots, entries, strict=True):
        now = _slot(slot, thing)
        if now is value:
            continue
        if value is ABSENT:
            slot.__delete__(thing)
        else:
            slot.__set__(thing, value)


def _read_class(cls: type) -> list[Any]:
    """Names and values; what Python keeps there itself (`__annotations__`, made when they are read) is left out."""
    return list(chain.from_iterable(pair for pair in vars(cls).items() if not pair[0].startswith("__")))


def _write_class(cls: type, entries: list[Any]) -> None:
    before, now = _pairs(entries), _pairs(_read_class(cls))
    for name in now.keys() - before.keys():
        type.__delattr__(cls, name)
    for name, value in before.items():
        if now.get(name, ABSENT) is not value:
            type.__setattr__(cls, name, value)


def _pairs(entries: list[Any]) -> dict[Any, Any]:
    return dict(zip(entries[::2], entries[1::2], strict=True))


def _read_mapping(base: type[dict], thing: Any) -> list[Any]:
    return list(chain.from_iterable(base.items(thing)))


def _write_mapping(base: type[dict], thing: Any, entries: list[Any]) -> None:
    base.clear(thing)
    for key, value in zip(entries[::2], entries[1::2], strict=True):
        base.__setitem__(thing, key, value)


def _read_cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a variable that is not assigned yet
        return []


def _write_cell(cell: CellType, entries: list[Any]) -> None:
    if entries:
        (cell.cell_contents,) = entries
    else:
        del cell.cell_contents


def _write_all(clear: Callable[[Any], None], add: Callable[[Any, list[Any]], None], thing: Any, entries: list[Any]) -> None:
    clear(thing)
    add(thing, entries)


def _read_all(iterate: Callable[[Any], Iterator[Any]], thing: Any) -> list[Any]:
    return list(iterate(thing))


# How each kind of container is read and written, the most special first.
CONTAINERS: dict[type, Way] = {
    **{base: (partial(_read_mapping, base), partial(_write_mapping, base)) for base in (OrderedDict, dict)},
    list: (partial(_read_all, list.__iter__), partial(_write_all, list.clear, list.extend)),
    set: (partial(_read_all, set.__iter__), partial(_write_all, set.clear, set.update)),
    deque: (partial(_read_all, deque.__iter__), partial(_write_all, deque.clear, deque.extend)),
    CellType: (_read_cell, _write_cell),
}
