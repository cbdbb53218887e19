"""Words written out in other ops: gelu by its formula, a mean over space in several steps. What is read so is proven, not recognised by its looks.

A reader is given the view, the value in front and the number of spatial dimensions, and returns the call that the nodes behind it spell, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx

from . import torch_private
from .identities import are_equal, is_identity
from .op_names import arguments_of, op_name, source_of
from .values import value_of
from .vocabulary import expand
from .writes import written

if TYPE_CHECKING:
    from .view import Call, GraphView

Size = int | torch.SymInt

# More nodes than any formula of gelu or any mean in steps takes.
MOST_NODES = 16
# Constants are written with 7 digits and more. One that is off by this much moves gelu by less than fp32 rounds it.
TOLERANCE = 1e-6
ADAPTIVE_POOLS = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


def gelu(view: GraphView, value: fx.Node, dims: int | None) -> Call | None:
    """gelu(value) as a formula: x/2 (1 + erf(x/sqrt 2)), or x/2 (1 + tanh(sqrt(2/pi) (x + .044715 x^3))), in any order and grouping."""
    from .view import Call

    formulas: dict[fx.Node, Formula] = {value: Formula({(1, 0): 1.0})}
    for node in _behind(view, value):
        found = _formula(node, formulas) if _is_elementwise(node, value) else None
        if found is None:
            continue
        formulas[node] = found
        form = found.gelu_form()
        if form is not None:
            nodes = _between(value, node, formulas)
            return Call("gelu", nodes[0], node, {"self": value, "approximate": form}, "self", nodes[1:-1])
    return None


def spatial_mean(view: GraphView, value: fx.Node, dims: int | None) -> Call | None:
    """The mean over the last `dims` dimensions in more than one op: dimensions merged first, one mean behind the other, a sum divided."""
    from .view import Call

    tensor = value_of(value)
    if dims is None or not isinstance(tensor, torch.Tensor) or tensor.dim() <= dims:
        return None
    reduction, nodes = Reduction.of(tensor, dims), []
    for node in _line_behind(view, value):
        nodes.append(node)
        if not is_identity(node):
            step = _reduced(reduction, node)
            if step is None:
                return None
            reduction = step
        if reduction.is_mean():
            break
    else:
        return None
    result, first = value_of(nodes[-1]), tensor.dim() - dims
    # A single op is a word itself. What is left must be the other dimensions, and ones behind them.
    shape = (*tensor.shape[:first], *[1] * (result.dim() - first))
    steps = [op_name(node) for node in nodes if not is_identity(node)]
    if len(steps) == 1 or not {"mean", "sum", *_POOLS}.intersection(steps) or not are_equal(shape, result.shape):
        return None
    strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    if not are_equal(strides, result.stride()):  # a mean's result is contiguous
        return None
    args = {"self": value, "dim": tuple(range(first, tensor.dim())), "keepdim": result.dim() > first, "dtype": None, "summed": reduction.summed}
    return Call("mean", nodes[0], nodes[-1], args, "self", tuple(nodes[1:-1]))


def whole_plane_pool(view: GraphView, value: fx.Node, dims: int | None) -> Call | None:
    """avg_pool with a window as large as the plane, where that is what adaptive_avg_pool to size 1 returns, strides included."""
    from .view import Call

    tensor = value_of(value)
    if dims is None or not isinstance(tensor, torch.Tensor) or tensor.dim() <= dims or not torch_private.is_plain(tensor):
        return None
    plane = tensor.shape[tensor.dim() - dims :]
    for node in view.readers[value]:
        is_pool = op_name(node) == f"avg_pool{dims}d" and source_of(node) is value and isinstance(value_of(node), torch.Tensor)
        if is_pool and _is_whole(node, plane) and are_equal(_strides_of_pool(tensor, dims), value_of(node).stride()):
            return Call("adaptive_avg_pool", node, node, {"self": value, "output_size": (1,) * dims, "dims": dims}, "self")
    return None


# The dimensions of a pool, and whether it is adaptive.
_POOLS = {f"{kind}avg_pool{dims}d": (dims, bool(kind)) for kind in ("", "adaptive_") for dims in (1, 2, 3)}

# By the word that is written out.
READERS: Mapping[str, Callable[[GraphView, fx.Node, int | None], Call | None]] = {
    "gelu": gelu,
    "mean": spatial_mean,
    "adaptive_avg_pool": whole_plane_pool,
}


def _behind(view: GraphView, value: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read the value, what those make, and so on, in graph order, as long as each is made of the value and numbers alone."""
    made, first = {value}, view.order[value]
    for node in view.nodes[first + 1 : first + 1 + 4 * MOST_NODES]:
        sources = node.all_input_nodes
        # What is written in place on the way is read by its latest value, of which `readers` knows.
        read = [source for source in sources if isinstance(value_of(source), torch.Tensor)]
        if read and all(source in made and node in view.readers[source] for source in read):
            made.add(node)
            yield node
        if len(made) > MOST_NODES:
            return


def _line_behind(view: GraphView, value: fx.Node) -> Iterator[fx.Node]:
    """The only reader of the value, the only reader of what that makes, and so on."""
    for _ in range(MOST_NODES):
        readers = view.readers[value]
        if len(readers) != 1 or source_of(readers[0]) is not value or written(readers[0]):
            return
        value = readers[0]
        yield value


def _between(value: fx.Node, result: fx.Node, formulas: Mapping[fx.Node, Formula]) -> tuple[fx.Node, ...]:
    """The nodes that the result is made of, behind the value, in graph order."""
    pending, found = [result], {result}
    while pending:
        new = [source for source in pending.pop().all_input_nodes if source in formulas and source is not value and source not in found]
        found.update(new)
        pending += new
    return tuple(node for node in formulas if node in found)


def _is_elementwise(node: fx.Node, value: fx.Node) -> bool:
    """Whether the node's value is of the shape, dtype and device of the value in front, and nothing is written."""
    one, other = value_of(value), value_of(node)
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or written(node):
        return False
    return (one.dtype, one.device) == (other.dtype, other.device) and are_equal(one.shape, other.shape)


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


def _formula(node: fx.Node, formulas: Mapping[fx.Node, Formula]) -> Formula | None:
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


@dataclass(frozen=True)
class Reduction:
    """How far a mean over the spatial dimensions has come.

    dims: of each dimension that is left, its size and the spatial dimensions of the first value that it holds, merged; () for any other.
    pending: spatial dimensions that are left. owed: what a sum is still to be divided by. summed: dtypes of the sums.
    """

    dims: tuple[tuple[Size, tuple[int, ...]], ...]
    pending: frozenset[int]
    owed: Size = 1
    summed: tuple[torch.dtype, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, spatial: int) -> Reduction:
        """Of a tensor whose last `spatial` dimensions are to go."""
        first = tensor.dim() - spatial
        own = tuple((size, (index,) if index >= first else ()) for index, size in enumerate(tensor.shape))
        return cls(own, frozenset(range(first, tensor.dim())))

    def is_mean(self) -> bool:
        """Whether this is the mean, with ones at most in the place of the spatial dimensions."""
        return not self.pending and torch_private.known_true(self.owed == 1)

    def reduced(self, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None) -> Reduction | None:
        """Behind a mean over these dimensions or, with a dtype, a sum. None where that goes beyond the spatial ones."""
        if any(not origin and not torch_private.known_true(size == 1) for size, origin in (self.dims[dim] for dim in dims)):
            return None
        gone = frozenset(index for dim in dims for index in self.dims[dim][1])
        left = tuple((1, ()) if index in dims else own for index, own in enumerate(self.dims) if keepdim or index not in dims)
        if dtype is None:
            return replace(self, dims=left, pending=self.pending - gone)
        owed = math.prod((self.dims[dim][0] for dim in dims), start=self.owed)
        return Reduction(left, self.pending - gone, owed, (*self.summed, dtype))

    def reshaped(self, shape: Sequence[Size]) -> Reduction | None:
        """With spatial dimensions merged, and ones dropped or added; None for any other change of shape."""
        rest, made = list(self.dims), []
        for size in shape:
            held: list[tuple[Size, tuple[int, ...]]] = []
            while rest and not torch_private.known_true(math.prod(own for own, _ in held) == size):
                held.append(rest.pop(0))
            if not held and rest and torch_private.known_true(rest[0][0] == size):
                held.append(rest.pop(0))
            if not torch_private.known_true(math.prod(own for own, _ in held) == size):
                return None
            spatial = [bool(origin) for own, origin in held if not torch_private.known_true(own == 1)]
            if len(set(spatial)) > 1 or (len(spatial) > 1 and not spatial[0]):
                return None
            made.append((size, tuple(index for _, origin in held for index in origin)))
        left_out = [index for _, origin in rest for index in origin]
        if not all(torch_private.known_true(own == 1) for own, _ in rest):
            return None
        return replace(self, dims=tuple(made), pending=self.pending - frozenset(left_out))


def _reduced(reduction: Reduction, node: fx.Node) -> Reduction | None:
    """Behind a node; None where it is no step of a mean."""
    name, value = op_name(node), value_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    if name == "reshape":
        return reduction.reshaped(value.shape)
    if name in ("mean", "sum"):
        given = arguments_of(node, "input", "dim", "keepdim")
        dims = given.get("dim", given.get("axis"))
        dims = range(len(reduction.dims)) if dims is None else _sizes(dims, 1)
        if not all(isinstance(dim, int) for dim in dims) or set(node.kwargs) - {"input", "self", "dim", "axis", "keepdim", "keepdims", "dtype"}:
            return None
        keepdim = given.get("keepdim", given.get("keepdims", False))
        return reduction.reduced([dim % len(reduction.dims) for dim in dims], bool(keepdim), value.dtype if name == "sum" else None)
    if name in _POOLS:
        return _pooled(reduction, node, *_POOLS[name])
    return _divided(reduction, node) if name in ("div", "mul") else None


def _pooled(reduction: Reduction, node: fx.Node, dims: int, is_adaptive: bool) -> Reduction | None:
    """Behind a pool of the whole of its last dimensions."""
    if len(reduction.dims) < dims:
        return None
    last = range(len(reduction.dims) - dims, len(reduction.dims))
    whole = _is_global(node, dims) if is_adaptive else _is_whole(node, [reduction.dims[dim][0] for dim in last])
    return reduction.reduced(list(last), True, None) if whole else None


def _is_whole(node: fx.Node, plane: Sequence[Size]) -> bool:
    """Whether an avg_pool has one window, as large as the plane, and averages what lies in it."""
    given = arguments_of(node, "input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    window, padding = (_sizes(given.get(name, 0), len(plane)) for name in ("kernel_size", "padding"))
    return are_equal(window, plane) and are_equal(padding, (0,) * len(plane)) and given.get("divisor_override") is None


def _is_global(node: fx.Node, dims: int) -> bool:
    size = _sizes(arguments_of(node, "input", "output_size").get("output_size"), dims)
    return all(entry == 1 for entry in size) and len(size) == dims


def _divided(reduction: Reduction, node: fx.Node) -> Reduction | None:
    """Behind a division by what is owed, or a product with its inverse."""
    others = [given for given in (*node.args, *node.kwargs.values()) if given is not source_of(node)]
    number = value_of(others[0]) if len(others) == 1 else None
    number = torch_private.constant_of(number) if torch_private.constant_of(number) is not None else number
    if not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)) or isinstance(number, bool):
        return None
    if op_name(node) == "mul":
        if not isinstance(number, float) or not isinstance(reduction.owed, int) or not math.isclose(number * reduction.owed, 1.0, rel_tol=1e-12):
            return None
    elif not torch_private.known_true(number == reduction.owed):
        return None
    return replace(reduction, owed=1)


def _sizes(value: Any, dims: int) -> tuple[Any, ...]:
    """The entries of a window's size or the like; none where the graph does not hold them one by one."""
    expanded = expand(value, dims)
    return tuple(expanded) if isinstance(expanded, (tuple, list)) and not isinstance(expanded, str) else ()


def _strides_of_pool(tensor: torch.Tensor, dims: int) -> tuple[Size, ...]:
    with torch_private.fake_mode_of(tensor), torch.no_grad():
        return ADAPTIVE_POOLS[dims - 1](tensor, 1).stride()
