"""Ops that hand a value on as it is, which a chain may go through: proven from shapes, dtypes, strides, memory and the training flag."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from . import torch_private
from .op_names import arguments_of, op_name, source_of
from .values import value_of

# What these return holds the values of what they are given, in row-major order: the same tensor, but for where it lies, if shape, strides,
# dtype and device are the same. `detach` is none: the backward does not go through it.
COPIES = frozenset(("clone", "contiguous", "to", "reshape", "identity", "alias"))
# These return part of the memory they are given, in any order.
VIEWS = frozenset("getitem expand expand_as broadcast_to permute transpose swapaxes swapdims movedim moveaxis narrow as_strided slice t".split())
DROPOUT = "dropout"


def is_identity(node: fx.Node) -> bool:
    """Whether a node's value is its first argument's for all that a reader could tell. False where that is not proven."""
    name, before, after = op_name(node), value_of(source_of(node)), value_of(node)
    if not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)) or not _looks_the_same(before, after):
        return False
    if name == DROPOUT:
        return not _drops(node)
    if name == "reshape" and _has_other_strides(before):
        return False
    return name in COPIES or (name in VIEWS and _is_same_memory(before, after))


def why_not(node: fx.Node) -> str:
    """What an op does that is an identity elsewhere, for a sentence; empty for any other op."""
    name, before, after = op_name(node), value_of(source_of(node)), value_of(node)
    if name == DROPOUT:
        return f"p={_dropout(node).get('p')}, in training" if _drops(node) else ""
    if name not in COPIES or not (isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)):
        return ""
    if before.dtype != after.dtype:
        return f"from {before.dtype} to {after.dtype}"
    if before.device != after.device:
        return f"from {before.device} to {after.device}"
    if are_equal(before.shape, after.shape) and not are_equal(before.stride(), after.stride()):
        return f"from strides {list(before.stride())} to {list(after.stride())}"
    return ""


def _has_other_strides(before: torch.Tensor) -> bool:
    """Whether a view of the same shape may have strides that its fake does not tell: eager gives dimensions of size 1 new ones."""
    contiguous = [math.prod(before.shape[dim + 1 :]) for dim in range(before.dim())]
    return any(isinstance(size, int) and size == 1 for size in before.shape) and not are_equal(before.stride(), contiguous)


def _drops(node: fx.Node) -> bool:
    given = _dropout(node)
    p, training = given.get("p"), given.get("training", given.get("train"))
    return not (training is False or (isinstance(p, (int, float)) and p == 0))


def _dropout(node: fx.Node) -> dict[str, Any]:
    return arguments_of(node, "input", "p", "train")


def _looks_the_same(before: torch.Tensor, after: torch.Tensor) -> bool:
    kinds = [(t.dtype, t.device, t.layout, t.dim(), t.is_neg(), t.is_conj()) for t in (before, after)]
    if kinds[0] != kinds[1] or before.layout is not torch.strided:
        return False
    return are_equal(before.shape, after.shape) and are_equal(before.stride(), after.stride())


def are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether sizes are as many and the same, for every size that the graph was compiled for; installs no guard."""
    return len(one) == len(other) and all(torch_private.known_true(value_of(a) == value_of(b)) for a, b in zip(one, other))


def _is_same_memory(before: torch.Tensor, after: torch.Tensor) -> bool:
    storage = torch_private.storage_of(before)
    return storage is not None and storage == torch_private.storage_of(after) and are_equal([before.storage_offset()], [after.storage_offset()])
