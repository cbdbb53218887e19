"""Words written out in other ops: gelu by its formula, a mean over space in several steps. What is read so is proven, not recognised by its looks.

A reader is given the view, the value in front and the number of spatial dimensions, and returns the call that the nodes behind it spell, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import fx

from . import torch_private
from .formula import Formula, formula_of
from .identities import are_equal, is_identity
from .op_names import op_name, source_of
from .reduction import POOLS, Reduction, Size, is_whole, reduced
from .values import value_of
from .writes import written

if TYPE_CHECKING:
    from .view import Call, GraphView

# More nodes than any formula of gelu or any mean in steps takes.
MOST_NODES = 16
ADAPTIVE_POOLS = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


def gelu(view: GraphView, value: fx.Node, dims: int | None) -> Call | None:
    """gelu(value) as a formula: x/2 (1 + erf(x/sqrt 2)), or x/2 (1 + tanh(sqrt(2/pi) (x + .044715 x^3))), in any order and grouping."""
    from .view import Call

    formulas: dict[fx.Node, Formula] = {value: Formula({(1, 0): 1.0})}
    for node in _behind(view, value):
        found = formula_of(node, formulas) if _is_elementwise(node, value) else None
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
            step = reduced(reduction, node)
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
    if len(steps) == 1 or not {"mean", "sum", *POOLS}.intersection(steps) or not are_equal(shape, result.shape):
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
        if is_pool and is_whole(node, plane) and are_equal(_strides_of_pool(tensor, dims), value_of(node).stride()):
            return Call("adaptive_avg_pool", node, node, {"self": value, "output_size": (1,) * dims, "dims": dims}, "self")
    return None


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


def _strides_of_pool(tensor: torch.Tensor, dims: int) -> tuple[Size, ...]:
    with torch_private.fake_mode_of(tensor), torch.no_grad():
        return ADAPTIVE_POOLS[dims - 1](tensor, 1).stride()
