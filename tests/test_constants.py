"""What `fxfuse.explain` knows the data of: what a model makes of numbers is read as under `torch.compile`, what comes of its inputs stops it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ConvGeluPool
from torch import nn

import fxfuse
from fxfuse import constants

pytestmark = pytest.mark.usefixtures("explains")
HERE = Path(__file__).name

TABLE, WEIGHT = torch.tensor([2.0, 3.0]), nn.Parameter(torch.ones(3))


@pytest.fixture(autouse=True)
def whatever_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXFUSE_SELECT", "always")


def in_place(x: torch.Tensor) -> float:
    table = torch.zeros(3)
    table[1:].add_(2)
    return table.tolist()[2]


def random(x: torch.Tensor) -> int:
    return 1 if torch.rand(()) > 0.5 else 2


KNOWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "tolist": lambda x: torch.tensor(x.shape).tolist()[2],
    "tolist of two dims": lambda x: torch.arange(6).view(2, 3).tolist()[1][2],
    "item": lambda x: (torch.ones(3) * 2).sum().item(),
    "int": lambda x: int(torch.linspace(1, 3, 3)[1]),
    "if": lambda x: 1 if torch.tensor([1, 2]).sum() > 0 else 2,
    "a shape that depends on data": lambda x: torch.tensor([0, 1, 1]).nonzero().shape[0] + len(torch.tensor([1, 1]).unique()),
    "written in place": in_place,
    "random": random,
    "tensors that the model holds": lambda x: int((TABLE * 2).sum()),
}


def from_inputs(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def read(x: torch.Tensor) -> Any:
        table = torch.zeros(3)
        write(table, x)
        return table.tolist()[2]

    return read


UNKNOWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "of an input": lambda x: x.sum().item(),
    "mixed": lambda x: (torch.ones(3) + x.sum()).tolist()[0],
    "an input written to a constant": from_inputs(lambda table, x: table[0].copy_(x.sum())),
    "an input written to a view": from_inputs(lambda table, x: table[:2].view(-1).add_(x.sum())),
    "an input written by index": from_inputs(lambda table, x: table.index_put_((torch.tensor([0]),), x.sum())),
    "an input written by out=": from_inputs(lambda table, x: torch.add(x[0, 0, 0, :3], 1, out=table)),
    "indexed by an input": lambda x: torch.arange(10)[x[0, 0, 0, 0].long()].item(),
    "large": lambda x: torch.ones(constants.MOST_ELEMENTS + 1).sum().item(),
    "a parameter that no module holds": lambda x: WEIGHT.sum().item(),
}


def explained(read: Callable[[torch.Tensor], Any], captured: bool) -> fxfuse.Report:
    """Of a chain behind what was read, by code that Dynamo captures up to there, or by eager code between two graphs."""
    model, reading = ConvGeluPool(), read if captured else torch.compiler.disable(read)
    return fxfuse.explain(lambda x: model(x * reading(x)), torch.ones(2, 4, 8, 8))


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("read", KNOWN.values(), ids=KNOWN)
def test_constants_are_read(read: Callable[[torch.Tensor], Any], captured: bool) -> None:
    report = explained(read, captured)
    assert (len(report.fused), report.stopped) == (1, None)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("read", UNKNOWN.values(), ids=UNKNOWN)
def test_what_comes_of_inputs_is_not(read: Callable[[torch.Tensor], Any], captured: bool) -> None:
    report = explained(read, captured)
    assert not report.fused and report.stopped.startswith("the model needs the data of a tensor at ") and HERE in report.stopped


# A global: what a model's code notes there is not put back.
HEARD: list[Any] = []


def heard_by(read: Callable[[torch.Tensor], Any]) -> list[Any]:
    """What eager code of a model reads under explain."""

    @torch.compiler.disable
    def note(x: torch.Tensor) -> None:
        HEARD.append(read(x))

    def run(x: torch.Tensor) -> torch.Tensor:
        note(x)
        return x * 2

    HEARD.clear()
    assert fxfuse.explain(run, torch.ones(2, 4, 8, 8)).stopped is None
    return list(HEARD)


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "random"])
def test_what_is_read_is_right(name: str) -> None:
    assert heard_by(KNOWN[name]) == [KNOWN[name](torch.ones(2, 4, 8, 8))]


def test_random_numbers_are_drawn_and_the_generator_does_not_notice() -> None:
    state = torch.get_rng_state()
    first, second = heard_by(lambda x: torch.rand(4).tolist()), heard_by(lambda x: torch.rand(4).tolist())
    assert torch.equal(torch.get_rng_state(), state)
    assert first == second == [torch.rand(4).tolist()]


def test_tensors_that_were_there_are_not_written_to() -> None:
    """Nor read behind such a write, or through a view that is written to."""
    table = torch.zeros(3)

    def run(x: torch.Tensor) -> torch.Tensor:
        write(table)
        return x * table.sum().item()

    for write in (lambda t: t.add_(1), lambda t: t[1:].add_(1), lambda t: torch.add(t, 1, out=t)):
        for given in (write, torch.compiler.disable(write)):
            write = given
            assert fxfuse.explain(run, torch.ones(2, 4, 8, 8)).stopped
            assert not table.any()


def test_nothing_large_is_computed() -> None:
    """A convolution of constants either, whose result would be: only its shape is known."""
    made: list[int] = []
    run = constants.KnownConstants.on_real

    def noting(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        result = run(self, func, args, kwargs)
        made.extend(leaf.numel() for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants.KnownConstants, "on_real", noting)
        report = fxfuse.explain(lambda x: x + torch.ones(2**14).expand(16, -1).repeat(1, 2).sum() + torch.zeros(2**40).sum(), torch.ones(3))
    assert report.stopped is None and made and max(made) <= constants.MOST_ELEMENTS


def of_numpy() -> dict[str, Callable[[torch.Tensor], Any]]:
    np = pytest.importorskip("numpy")

    def filled(x: torch.Tensor) -> int:
        sizes = np.zeros(3)
        sizes[1] = x.shape[2]
        return int(torch.from_numpy(sizes)[1])

    return {
        "an operator": lambda x: 1 + int((np.array(x.shape[2:]) % 2).sum()),
        "an attribute": lambda x: int(np.arange(6).reshape(2, 3).T[2, 1]),
        "a function": lambda x: float(np.prod(x.shape)),
        "a method, and a branch": lambda x: 1 if np.array(x.shape).max() > 4 else 2,
        "to torch": filled,
    }


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("name", ["an operator", "an attribute", "a function", "a method, and a branch", "to torch"])
def test_numpy(name: str, captured: bool) -> None:
    report = explained(of_numpy()[name], captured)
    assert (len(report.fused), report.stopped) == (1, None)
    assert heard_by(of_numpy()[name]) == [of_numpy()[name](torch.ones(2, 4, 8, 8))]


def test_from_torch_to_numpy() -> None:
    """Of a constant in code that Dynamo captures; in eager code, and of an input, it is a stop."""
    pytest.importorskip("numpy")
    assert explained(lambda x: int(torch.tensor([1, 2]).numpy()[1]), True).fused
    for captured in (True, False):
        report = explained(lambda x: float(x.numpy()[0, 0, 0, 0]), captured)
        assert not report.fused and "needs the data of a tensor at " in report.stopped
