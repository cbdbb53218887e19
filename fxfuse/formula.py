"""Formulas of one value, by which a word written out in arithmetic is proven to be that word."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from . import torch_private
from .op_names import op_name
from .values import value_of

# Constants are written with 7 digits and more. One that is off by this much moves gelu by less than fp32 rounds it.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Formula:
    """A polynomial in x and one other function of x: coefficients by the powers of both. function: its name and its argument's coefficients."""

    terms: Mapping[tuple[int, int], float]
    function: tuple[str, tuple[tuple[int, float], ...]] | None = None

    def gelu_form(self) -> str | None:
        """"none" or "tanh" where this is gelu with that `approximate`."""
        if self.function is None or not _close(self.terms, {(1, 0): 0.5, (1, 1): 0.5}):
            return None
        name, argument = self.function[0], dict(self.function[1])
        slope = math.sqrt(2 / math.pi)
        if name == "erf" and _close(argument, {1: math.sqrt(0.5)}):
            return "none"
        return "tanh" if name == "tanh" and _close(argument, {1: slope, 3: slope * 0.044715}) else None


def _close(found: Mapping[Any, float], wanted: Mapping[Any, float]) -> bool:
    return found.keys() == wanted.keys() and all(math.isclose(found[key], wanted[key], rel_tol=TOLERANCE) for key in wanted)


def formula_of(node: fx.Node, formulas: Mapping[fx.Node, Formula]) -> Formula | None:
    """The node's value by its operands'; None for an op that is not arithmetic."""
    # A function's own order of arguments, whatever is given by name: the value, then the other operand.
    first = [node.kwargs[key] for key in ("input", "self") if key in node.kwargs]
    name, given = op_name(node), [*first, *node.args, *(node.kwargs[key] for key in ("other", "exponent") if key in node.kwargs)]
    if node.op == "call_module" or set(node.kwargs) - {"input", "self", "other", "exponent"}:
        return None
    operands = [_number(one) if not isinstance(one, fx.Node) or one not in formulas else formulas[one] for one in given]
    if None in operands or len(operands) not in (1, 2):
        return None
    if len({operand.function for operand in operands if operand.function}) > 1:
        return None
    return _UNARY[name](operands[0]) if len(operands) == 1 and name in _UNARY else _binary(name, operands)


def _number(value: Any) -> Formula | None:
    known = torch_private.constant_of(value_of(value)) if isinstance(value, fx.Node) else value
    return Formula({(0, 0): float(known)}) if isinstance(known, (int, float)) else None


def _binary(name: str, operands: Sequence[Formula]) -> Formula | None:
    if len(operands) != 2:
        return None
    left, right = operands
    constant = right.terms.get((0, 0), 0.0) if set(right.terms) <= {(0, 0)} else None
    if name in ("add", "sub"):
        return _sum(left, right, 1.0 if name == "add" else -1.0)
    if name == "mul":
        return _product(left, right)
    if name == "div" and constant:
        return _product(left, Formula({(0, 0): 1 / constant}))
    if name == "pow" and constant in (1, 2, 3):
        powers = [left, _product(left, left)]
        return _product(powers[1], left) if constant == 3 else powers[int(constant) - 1]
    return None


def _sum(left: Formula, right: Formula, sign: float) -> Formula:
    terms = dict(left.terms)
    for key, value in right.terms.items():
        terms[key] = terms.get(key, 0.0) + sign * value
    return Formula({key: value for key, value in terms.items() if value}, left.function or right.function)


def _product(left: Formula, right: Formula) -> Formula:
    terms: dict[tuple[int, int], float] = {}
    for (a, b), one in left.terms.items():
        for (c, d), other in right.terms.items():
            terms[a + c, b + d] = terms.get((a + c, b + d), 0.0) + one * other
    return Formula({key: value for key, value in terms.items() if value}, left.function or right.function)


def _applied(name: str) -> Callable[[Formula], Formula | None]:
    """erf or tanh of a polynomial in x; both are odd, so that its lowest coefficient may be taken to be positive."""

    def apply(argument: Formula) -> Formula | None:
        if argument.function is not None or not argument.terms:
            return None
        coefficients = sorted((power, value) for (power, _), value in argument.terms.items())
        sign = math.copysign(1.0, coefficients[0][1])
        return Formula({(0, 1): sign}, (name, tuple((power, sign * value) for power, value in coefficients)))

    return apply


def _through(scale: float, shift: float, stretch: float) -> Callable[[Formula], Formula | None]:
    """shift + scale * erf(stretch * argument)."""

    def apply(argument: Formula) -> Formula | None:
        inner = _applied("erf")(_product(argument, Formula({(0, 0): stretch})))
        return None if inner is None else _sum(Formula({(0, 0): shift}), _product(inner, Formula({(0, 0): scale})), 1.0)

    return apply


_UNARY: Mapping[str, Callable[[Formula], Formula | None]] = {
    "erf": _applied("erf"),
    "tanh": _applied("tanh"),
    "erfc": _through(-1.0, 1.0, 1.0),
    "ndtr": _through(0.5, 0.5, math.sqrt(0.5)),
    "neg": lambda x: _product(x, Formula({(0, 0): -1.0})),
    "square": lambda x: _product(x, x),
}
