"""The data that `explain` knows: of tensors made of numbers, in which the model's inputs and parameters have no part, such as
`torch.tensor(x.shape)`. A model that reads such data (`.tolist()`, `if`) goes on as it does under `torch.compile`.

Every tensor is fake. Beside a fake whose data is known stands a real tensor, and what is done to fakes alone that are known is done to those too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import torch_private

# Elements of the largest tensor whose data is known: sizes, positions, tables of them. Nothing of a model's own size is to be computed.
MOST_ELEMENTS = 2**16
# `torch.tensor` hands these what it has just made of numbers.
OF_NEW = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class KnownConstants(torch_private.RealAsFake):
    """Inside a FakeTensorMode, in which inputs and parameters are fakes: every op is run on fakes, and on data too where all of it is known.

    Real tensors (a model's plain attributes, NumPy's arrays) are known for as long as nobody writes to them, for such a write is done to a fake
    alone. What needs a gradient, is large, or is not on a CPU is not known.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__(mode)
        self._data = torch_private.by_tensor()
        # By identity of storages, which views share: of tensors that were there before, and of data that is no longer what it would be.
        self._theirs: dict[int, Any] = {}
        self._stale: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, written = _tensors((args, kwargs)), _written_to(func, args, kwargs)
        if func not in OF_NEW:
            _note(self._theirs, [tensor for tensor in given if not torch_private.is_fake(tensor)])
        if any(self.data_of(tensor) is None for tensor in given) or any(self._is_theirs(tensor) for tensor in written):
            self._forget(written)
            return self.on_fakes(func, args, kwargs)
        try:
            fake = self.on_fakes(func, args, kwargs)
        except Exception:  # its shape depends on data, or there is nothing that knows its shape
            fake = None
        if not all(map(_is_small, _tensors(fake))):
            self._forget(written)
            return fake
        return self._paired(fake, self.on_real(func, *pytree.tree_map_only(torch.Tensor, self.data_of, (args, kwargs))))

    def data_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor that a tensor stands for, where its data is known."""
        data = self._behind(tensor)
        known = data is not None and not data.requires_grad and _is_small(data) and torch_private.storage_of(data) not in self._stale
        return data if known else None

    def followed(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """The graph, to be called under this mode; what it gives to NumPy is an array where it is known."""
        arrays = torch_private.for_numpy(gm.graph)

        def run(*inputs: Any) -> tuple[Any, ...]:
            results = gm(*inputs)
            return tuple(self._as_array(result) if index in arrays else result for index, result in enumerate(results))

        return run

    def _as_array(self, tensor: Any) -> Any:
        data = self.data_of(tensor) if isinstance(tensor, torch.Tensor) else None
        return tensor if data is None else torch_private.as_array(data)

    def _behind(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._data.get(tensor) if torch_private.is_fake(tensor) else tensor

    def _is_theirs(self, tensor: torch.Tensor) -> bool:
        return torch_private.storage_of(self._behind(tensor)) in self._theirs

    def _forget(self, written: Sequence[torch.Tensor]) -> None:
        _note(self._stale, [data for data in map(self._behind, written) if data is not None])

    def _paired(self, fake: Any, result: Any) -> Any:
        """What the caller gets: fakes, behind which the data is noted, and values as they are."""
        made, structure = pytree.tree_flatten(result)
        fakes = pytree.tree_leaves(fake) if fake is not None else [None] * len(made)
        return pytree.tree_unflatten([self._pair(*pair) for pair in zip(fakes, made, strict=True)], structure)

    def _pair(self, fake: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fake = self.fake_mode.from_tensor(value) if fake is None else fake
        self._data[fake] = value
        return fake


@contextmanager
def known_constants(mode: Any) -> Iterator[KnownConstants]:
    """Within it everything is fake but for what is known. Random numbers among the constants are drawn; the caller's generator does not notice."""
    with torch.random.fork_rng(devices=[]), mode, KnownConstants(mode) as constants:
        yield constants


def _note(storages: dict[int, Any], tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if (identity := torch_private.storage_of(tensor)) is not None:
            storages[identity] = torch_private.storage_reference(tensor)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() <= MOST_ELEMENTS


def _written_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op writes to, by its schema; all that it is given where it has none."""
    if not isinstance(func, torch._ops.OpOverload):
        return _tensors((args, kwargs))
    arguments = func._schema.arguments
    named = {**dict(zip((argument.name for argument in arguments), args)), **kwargs}
    return _tensors([named.get(argument.name) for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write])
