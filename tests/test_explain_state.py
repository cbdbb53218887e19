"""That `fxfuse.explain` leaves the state behind a model as it was: every entry of it the very object, whatever the model's code did."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import ConvGeluPool, gelu_pool
from torch import nn

import fxfuse
from fxfuse import preserved

pytestmark = pytest.mark.usefixtures("explains")


class FrozenDict(dict):
    """As the configuration of every diffusers model is: its own methods refuse."""

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("frozen")

    __setitem__ = __delitem__ = update = clear = pop = setdefault = __copy__ = _refuse


class FrozenOrderedDict(OrderedDict):
    """Frozen once it is made, its attributes among it."""

    def __init__(self, **entries: Any) -> None:
        super().__init__()
        for key, value in entries.items():
            OrderedDict.__setitem__(self, key, value)
        vars(self)["frozen"] = True

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("frozen")

    update = clear = copy = __delitem__ = __delattr__ = __setattr__ = __copy__ = _refuse


class AppendOnlyList(list):
    def _refuse(self, *_: Any) -> None:
        raise RuntimeError("append only")

    clear = extend = copy = __setitem__ = __delitem__ = __iter__ = __copy__ = _refuse


class GrowingSet(set):
    def _refuse(self, *_: Any) -> None:
        raise RuntimeError("grows only")

    clear = update = copy = remove = discard = __copy__ = _refuse


class Slotted:
    __slots__ = ("_other", "key", "unset")

    def __init__(self) -> None:
        self.key, self._other = [], 1000


class Cache:
    """A plain object, as the caches of language models are."""

    total = 1000
    everything: list[Any] = []

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None


def counting() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    """A function that changes a variable of its closure, and one that tells it."""
    last: Any = None

    def note(value: Any) -> None:
        nonlocal last
        last = value

    return note, lambda: last


def cycle() -> list[Any]:
    """A list in itself, and a list behind it."""
    ring: list[Any] = [[]]
    ring.append(ring)
    return ring


class Model(nn.Module):
    """A chain, and state of one kind that the forward changes before it."""

    def __init__(self, held: Any, change: Callable[[Model, torch.Tensor], Any]) -> None:
        super().__init__()
        self.chain = ConvGeluPool()
        self.held, self.change = held, change
        self.extra = nn.Parameter(torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.on, self.broken = 1000, True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        if self.broken:
            raise KeyError("the model's own")
        return self.chain(x)


def assign(**attributes: Callable[[torch.Tensor], Any]) -> Callable[[Model, torch.Tensor], None]:
    def change(model: Model, x: torch.Tensor) -> None:
        for name, value in attributes.items():
            setattr(model, name, value(x))

    return change


def of_dict(mapping: Any) -> list[Any]:
    return [entry for key in dict.__iter__(mapping) for entry in (key, dict.__getitem__(mapping, key))]


# name -> what the model holds, what its forward does, and the entries to look at beside the model's own.
Case = tuple[Callable[[], Any], Callable[[Model, torch.Tensor], Any], Callable[[Any], list[Any]]]
CASES: dict[str, Case] = {
    "nothing changes": (lambda: FrozenDict(a=1000), lambda m, x: None, of_dict),
    "a frozen dict that changes": (lambda: FrozenDict(a=1000, b=2), lambda m, x: dict.__setitem__(m.held, "a", x), of_dict),
    "a frozen ordered dict": (lambda: FrozenOrderedDict(a=1, b=2), lambda m, x: m.held.move_to_end("a"), lambda held: [*held]),
    "an ordered dict": (lambda: OrderedDict(a=1000, b=2), lambda m, x: (m.held.pop("a"), m.held.update(a=x)), lambda held: [*held, *held.values()]),
    "a defaultdict": (lambda: defaultdict(list), lambda m, x: m.held["new"].append(x), lambda held: [len(held), held.default_factory]),
    "a counter": (lambda: Counter(a=1000), lambda m, x: m.held.update(["a", "b"]), of_dict),
    "a UserDict": (lambda: UserDict(a=1), lambda m, x: m.held.update(b=x), lambda held: of_dict(held.data)),
    "a UserList": (lambda: UserList([1]), lambda m, x: m.held.append(x), lambda held: [*held.data]),
    "a deque": (lambda: deque([1, 2], maxlen=2), lambda m, x: m.held.append(x), lambda held: [*held, held.maxlen]),
    "a list that refuses": (lambda: AppendOnlyList([1000]), lambda m, x: m.held.append(x), lambda held: [held[i] for i in range(len(held))]),
    "a set that refuses": (lambda: GrowingSet([1000]), lambda m, x: m.held.add("new"), lambda held: sorted(set.__iter__(held), key=id)),
    "slots": (
        Slotted,
        lambda m, x: (m.held.key.append(x), setattr(m.held, "_other", x), setattr(m.held, "unset", x)),
        lambda held: [held.key, len(held.key), held._other, hasattr(held, "unset")],
    ),
    "a slot that is deleted": (Slotted, lambda m, x: delattr(m.held, "key"), lambda held: [getattr(held, "key", None)]),
    "a plain object": (Cache, lambda m, x: (m.held.keys.append(x), setattr(m.held, "last", x)), lambda held: [held.keys, *held.keys, *vars(held)]),
    "a class": (
        Cache,
        lambda m, x: (setattr(type(m.held), "total", x), setattr(type(m.held), "new", x), type(m.held).everything.append(x)),
        lambda held: [Cache.total, hasattr(Cache, "new"), len(Cache.everything)],
    ),
    "a namespace": (lambda: SimpleNamespace(a=[]), lambda m, x: (m.held.a.append(x), setattr(m.held, "b", x)), lambda held: [*vars(held), len(held.a)]),
    "containers in containers": (
        lambda: {"k": [], "t": ([], {"deep": [set()]})},
        lambda m, x: (m.held["k"].append(x), m.held["t"][0].append(x), m.held["t"][1]["deep"][0].add("new")),
        lambda held: [held["k"], len(held["k"]), len(held["t"][0]), len(held["t"][1]["deep"][0])],
    ),
    "a cycle": (cycle, lambda m, x: m.held[1][1][0].append(x), lambda held: [held[1], len(held[0]), len(held)]),
    "a closure": (counting, lambda m, x: m.held[0](x), lambda held: [held[1]()]),
    "an attribute": (lambda: None, assign(held=lambda x: x, new=lambda x: [x]), lambda held: [held]),
    "a number": (lambda: None, lambda m, x: setattr(m, "count", m.count + 1), lambda held: []),
    "a buffer that is replaced": (lambda: None, assign(calls=lambda x: x.sum()), lambda held: []),
    "a buffer that is new": (lambda: None, lambda m, x: m.register_buffer("new", x * 2), lambda held: []),
    "a buffer that is deleted": (lambda: None, lambda m, x: delattr(m, "calls"), lambda held: []),
    "a parameter that is replaced": (lambda: None, assign(extra=lambda x: nn.Parameter(torch.ones(3))), lambda held: []),
    "a parameter that is deleted": (lambda: None, lambda m, x: delattr(m, "extra"), lambda held: []),
    "a module that is replaced": (lambda: None, assign(chain=lambda x: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU())), lambda held: []),
    "a module in a list": (lambda: [nn.ReLU()], lambda m, x: setattr(m.held[0], "seen", x), lambda held: [*vars(held[0])]),
    "hooks": (lambda: None, lambda m, x: m.chain.register_forward_hook(lambda *_: None), lambda held: []),
    "the mode": (lambda: None, lambda m, x: m.train(not m.training), lambda held: []),
}


def entries(model: Model, look: Callable[[Any], list[Any]]) -> list[Any]:
    """What the model holds, one behind the other: its modules' attributes, with those in dicts (parameters, hooks, children), and its state."""
    found: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            found += [name, value, *(of_dict(value) if type(value) in (dict, OrderedDict) else ())]
    return [*found, *look(model.held)]


@pytest.mark.parametrize("how", ["captured", "eager", "raises"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_entry_is_what_it_was(case: Case, how: str, caplog: pytest.LogCaptureFixture) -> None:
    make, change, look = case
    model = Model(make(), change if how == "captured" else torch.compiler.disable(change))
    model.broken = raises = how == "raises"
    before = entries(model, look)
    if raises:
        with pytest.raises(Exception, match="the model's own"):
            fxfuse.explain(model, torch.ones(2, 4, 8, 8))
    else:
        assert fxfuse.explain(model, torch.ones(2, 4, 8, 8)).stopped is None
    after = entries(model, look)
    assert len(after) == len(before) and all(map(same, after, before))
    assert not [record for record in caplog.records if record.name.startswith("fxfuse")]


def same(one: Any, other: Any) -> bool:
    """Lengths, flags and names are made anew when one looks; of everything else the very object is asked for."""
    return one is other or (type(one) is type(other) and type(one) in (int, bool, str) and one == other)


@pytest.mark.parametrize("case", [case for name, case in CASES.items() if name != "nothing changes"], ids=[name for name in CASES if name != "nothing changes"])
def test_the_cases_change_what_is_looked_at(case: Case) -> None:
    """Or the test above could not fail."""
    make, change, look = case
    total, everything = Cache.total, list(Cache.everything)
    model = Model(make(), change)
    before = entries(model, look)
    try:
        model.change(model, torch.ones(2, 4, 8, 8))
        after = entries(model, look)
    finally:
        Cache.total, Cache.everything[:] = total, everything
        if hasattr(Cache, "new"):
            del Cache.new
    assert len(after) != len(before) or not all(map(same, after, before))


def test_arguments_and_what_a_function_holds_too() -> None:
    model, cache, seen = Model(None, lambda m, x: setattr(m, "new", x)), Cache(), []

    def run(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.keys.append(x)
        seen.append(x)
        return model(x)

    for function in (run, lambda x, cache: run(x, cache)):
        fxfuse.explain(function, torch.ones(2, 4, 8, 8), cache=cache)
        assert (cache.keys, seen, hasattr(model, "new")) == ([], [], False)


def test_modules_in_a_closure_are_on_fakes_in_eager_code_too() -> None:
    model = nn.BatchNorm2d(4)

    @torch.compiler.disable
    def count() -> None:
        model.running_mean.add_(1)
        model.running_mean = model.running_mean * 2

    def run(x: torch.Tensor) -> torch.Tensor:
        count()
        return gelu_pool(model(x))

    mean = model.running_mean
    fxfuse.explain(run, torch.ones(2, 4, 8, 8))
    assert model.running_mean is mean and not mean.any()


class Key:
    """A key that cannot be put back: it can be hashed for as long as it is not in the way."""

    broken = False

    def __hash__(self) -> int:
        if self.broken:
            raise RuntimeError("no hash any more")
        return 1


def test_what_cannot_be_put_back_is_said_and_the_rest_is_put_back(caplog: pytest.LogCaptureFixture) -> None:
    key = Key()
    first, stubborn, last = [], {key: 1}, []

    with caplog.at_level(logging.WARNING, logger="fxfuse"), preserved.preserved((first, stubborn, last)):
        first.append(1)
        stubborn[key] = 2
        last.append(1)
        Key.__hash__, kept = lambda self: 1 / 0, Key.__hash__
    Key.__hash__ = kept
    assert (first, last) == ([], [])
    (record,) = caplog.records
    assert record.getMessage() == "fxfuse: a dict of the model's cannot be put back as it was: ZeroDivisionError: division by zero"


def test_what_did_not_change_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    ways = preserved._ways
    monkeypatch.setattr(preserved, "_ways", lambda kind: [(read, lambda thing, _: written.append(type(thing).__name__)) for read, _ in ways(kind)])
    held = SimpleNamespace(a=[1], b={"c": {2}}, d=deque([3]))
    with preserved.preserved(nn.Sequential(nn.Conv2d(1, 1, 1)), held):
        held.b["c"].add(4)
    assert written == ["set"]


def test_what_is_no_state_of_a_models_is_left_alone() -> None:
    """Loggers and modules of Python's go on: what they noted is not taken back."""
    logger = logging.Logger("own")
    held = SimpleNamespace(logger=logger, module=logging, threads=logging.Handler)
    with preserved.preserved(held):
        logger.addHandler(logging.NullHandler())
        logging.own_attribute = 1
    assert len(logger.handlers) == 1 and logging.own_attribute == 1
    del logging.own_attribute


def test_a_module_whose_init_was_not_called() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            pass

    model = nn.Sequential(ConvGeluPool())
    vars(model)["bare"] = Bare.__new__(Bare)
    assert fxfuse.explain(model, torch.ones(2, 4, 8, 8)).graphs == 1
