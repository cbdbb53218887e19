"""For the tests of those who use fxfuse: a model that must stay fused.

    from fxfuse.testing import assert_fused

    def test_the_head_is_fused():
        with torch.no_grad():
            assert_fused(Model().eval(), (torch.randn(8, 3, 64, 64),), {"conv_gelu_pool": 2}, options={"fxfuse.select": "always"})

The pytest plugin has the same function as the fixture `assert_fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import api, expect, listeners, torch_private
from .chain import chain_names
from .options import split
from .report import Report, declined_table, fused_table


def assert_fused(
    model: Callable[..., Any],
    args: Sequence[Any] | Any,
    expected: Mapping[str, int],
    *,
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool = False,
) -> Report:
    """Asserts how often each chain is fused when `torch.compile(model, backend="fxfuse")` is called with these arguments; the report.

    It is `fxfuse.explain` underneath: no kernel runs, nothing is compiled, and the model stays as it is. The caller's grad mode counts, as
    there: with gradients on, "auto" declines chains, and the message says torch.no_grad().

    args: the model's arguments as a tuple or list; anything else is its only argument. kwargs: its keyword arguments.
    expected: chain name -> times, exactly. 0: none may be fused. Chains that are not named are not checked. Where no graph is captured, as with
    Dynamo turned off, no expectation holds, 0 neither.
    options: as torch.compile takes them; `fxfuse.select` decides on which terms a chain counts as fused. By default ("auto") that is where
    it is predicted to be no slower on this device; under "always" wherever a kernel exists, so that only the model decides.
    dynamic: with every size symbolic.
    Raises AssertionError whose message is the table of what was declined, how far it got, why and at which line; ValueError for a name that
    is no chain; TypeError where `expected` is no mapping; for options what `torch.compile` raises.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    expect.check(expected)
    own, rest = split(options, chain_names())
    torch_private.inductor(own.mode, rest)  # Inductor's options have no say here, but a misspelt one should not pass
    positional = args if isinstance(args, (tuple, list)) else (args,)
    report = api.explained(model, positional, kwargs or {}, own, dynamic)
    listeners.tell(report, "explained")
    unmet = expect.unmet(report, expected, own)
    if unmet:
        raise AssertionError(_message(unmet, report.stopped))
    return report


def _message(unmet: Sequence[expect.Unmet], stopped: str | None) -> str:
    """A sentence for each expectation that does not hold, then the tables of their chains."""
    fused = [record for one in unmet for record in one.fused]
    declined = [record for one in unmet for record in one.declined]
    parts = ["\n".join(one.headline for one in unmet)]
    if declined:
        parts.append(declined_table(declined))
    if fused:
        parts.append(fused_table(fused))
    if stopped and unmet[0].looked:  # else the headline says it
        parts.append(f"stopped: {stopped}")
    return "\n\n".join(parts)
