"""How far a mean over the spatial dimensions has come, step by step: dimensions merged, one mean behind the other, a sum divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from . import torch_private
from .identities import are_equal
from .op_names import arguments_of, op_name, source_of
from .values import value_of
from .vocabulary import expand

Size = int | torch.SymInt

# The dimensions of a pool, and whether it is adaptive.
POOLS = {f"{kind}avg_pool{dims}d": (dims, bool(kind)) for kind in ("", "adaptive_") for dims in (1, 2, 3)}


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
            # Of those that are more than ones, spatial dimensions may be merged with each other, and others with nothing.
            spatial = [bool(origin) for own, origin in held if not torch_private.known_true(own == 1)]
            if len(spatial) > 1 and not all(spatial):
                return None
            made.append((size, tuple(index for _, origin in held for index in origin)))
        left_out = [index for _, origin in rest for index in origin]
        if not all(torch_private.known_true(own == 1) for own, _ in rest):
            return None
        return replace(self, dims=tuple(made), pending=self.pending - frozenset(left_out))


def reduced(reduction: Reduction, node: fx.Node) -> Reduction | None:
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
    if name in POOLS:
        return _pooled(reduction, node, *POOLS[name])
    return _divided(reduction, node) if name in ("div", "mul") else None


def _pooled(reduction: Reduction, node: fx.Node, dims: int, is_adaptive: bool) -> Reduction | None:
    """Behind a pool of the whole of its last dimensions."""
    if len(reduction.dims) < dims:
        return None
    last = range(len(reduction.dims) - dims, len(reduction.dims))
    whole = _is_global(node, dims) if is_adaptive else is_whole(node, [reduction.dims[dim][0] for dim in last])
    return reduction.reduced(list(last), True, None) if whole else None


def is_whole(node: fx.Node, plane: Sequence[Size]) -> bool:
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
