"""What a graph was rewritten for. `torch.compile` guards what it compiles; a module that `rewrite` returns has these guards, looked at in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from . import gradients, torch_private
from .emitter import FINGERPRINT
from .values import value_of

# The names that lead to a submodule or a tensor of a module.
Path = tuple[str, ...]


@dataclass(frozen=True)
class TensorGuard:
    """What a tensor must be: its rank, dtype and device type, and those of its sizes that are fixed, as (dimension, size)."""

    rank: int
    dtype: torch.dtype
    device: str
    sizes: tuple[tuple[int, int], ...] = ()

    def holds(self, value: Any) -> bool:
        """Whether `value` is such a tensor. A proxy, while a graph is traced, may be."""
        if not isinstance(value, torch.Tensor):
            return isinstance(value, fx.Proxy)
        if value.dim() != self.rank or value.dtype != self.dtype or value.device.type != self.device:
            return False
        for dim, size in self.sizes:
            if value.shape[dim] != size:
                return False
        return True

    def __str__(self) -> str:
        fixed = dict(self.sizes)
        return f"{self.dtype}[{', '.join(str(fixed.get(dim, '*')) for dim in range(self.rank))}] on {self.device}"


@dataclass(frozen=True)
class Guards:
    """Guards of a rewritten module.

    inputs: by the graph's placeholders, in order; None where anything goes. is_nested: whether they are leaves of the arguments.
    attributes: of the parameters and buffers that fused ops read, by path.
    autocast: the dtype by device type; None: off.
    modules: those whose calls the fused ops replace, by path, and their training mode.
    detached_inputs, detached: placeholders, and paths of parameters and modules, on which ops that autograd does not know depend.
    """

    inputs: Mapping[str, TensorGuard | None] = field(default_factory=dict)
    is_nested: bool = False
    attributes: Mapping[Path, TensorGuard] = field(default_factory=dict)
    autocast: Mapping[str, torch.dtype | None] = field(default_factory=dict)
    modules: Mapping[Path, tuple[nn.Module, bool]] = field(default_factory=dict)
    detached_inputs: Sequence[str] = ()
    detached: Sequence[Path] = ()

    def failed(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """What of a call of `module` is not as it was when the graph was rewritten; None where all is."""
        given = dict(zip(self.inputs, pytree.arg_tree_leaves(*args) if self.is_nested else args))
        given.update(kwargs)
        for name, guard in self.inputs.items():
            if guard is not None and name in given and not guard.holds(given[name]):
                return f"the input {name} is {_text(given[name])}, not {guard}"
        for path, guard in self.attributes.items():
            value = _attribute(module, path)
            if not guard.holds(value):
                return f"{'.'.join(path)} is {_text(value)}, not {guard}"
        for device, dtype in self.autocast.items():
            if autocast_of(device) != dtype:
                return f"autocast of {device} is {autocast_of(device) or 'off'}, not {dtype or 'off'}"
        for path, (replaced, training) in self.modules.items():
            if _submodule(module, path) is not replaced or torch_private.is_changed(replaced):
                return f"{'.'.join(path)} is another module, or has hooks or a forward of its own"
            if replaced.training != training:
                return f"{'.'.join(path)} is in {_mode(replaced.training)} mode, not in {_mode(training)} mode"
        if torch.is_grad_enabled() and self._needs_gradient(module, given):
            return "the result needs a gradient, and the fused ops have none"
        return None

    def _needs_gradient(self, module: nn.Module, given: Mapping[str, Any]) -> bool:
        inputs = pytree.tree_leaves([given.get(name) for name in self.detached_inputs])
        attributes = (_attribute(module, path) for path in self.detached)
        held = (tensor for found in attributes for tensor in (found.parameters() if isinstance(found, nn.Module) else (found,)))
        return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in (*inputs, *held))


def of(original: fx.Graph, fused: fx.Graph, is_fixed: Callable[[fx.Node, int], bool]) -> Guards:
    """The guards of `fused`, under the state that is on.

    original: the graph that it was made of, with example values. is_fixed: whether a size of a placeholder is.
    """
    emitted = [node for node in fused.nodes if FINGERPRINT in node.meta]
    ops = [node for node in emitted if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten"]
    read = dict.fromkeys(source for node in emitted for source in node.all_input_nodes if source.op == "get_attr")
    devices = {value_of(node).device.type for node in ops if isinstance(value_of(node), torch.Tensor)}
    left = {node.target for node in fused.find_nodes(op="call_module")}
    replaced = [node for node in original.find_nodes(op="call_module") if node.target not in left]
    sources = list(dict.fromkeys(source for op in ops for source in _without_gradient(op)))
    modules = {_path(node): original.owning_module.get_submodule(node.target) for node in replaced}
    return Guards(
        inputs={node.target: _guard(value_of(node), lambda dim, node=node: is_fixed(node, dim)) for node in _named(original)},
        is_nested=torch_private.flattens_inputs(original),
        attributes={_path(node): _guard(value_of(node)) for node in read},
        autocast={device: autocast_of(device) for device in sorted(devices)},
        modules={path: (module, module.training) for path, module in modules.items()},
        detached_inputs=[node.target for node in sources if node.op == "placeholder"],
        detached=[_path(node) for node in sources if node.op != "placeholder"],
    )


def autocast_of(device: str) -> torch.dtype | None:
    """The dtype of autocast for a device type; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _named(graph: fx.Graph) -> Iterator[fx.Node]:
    """The placeholders up to `*args` or `**kwargs`."""
    for node in graph.find_nodes(op="placeholder"):
        if node.target.startswith("*"):
            return
        yield node


def _guard(value: Any, is_fixed: Callable[[int], bool] = lambda dim: False) -> TensorGuard | None:
    if not isinstance(value, torch.Tensor):
        return None
    sizes = tuple((dim, size) for dim, size in enumerate(value.shape) if isinstance(size, int) and is_fixed(dim))
    return TensorGuard(value.dim(), value.dtype, value.device.type, sizes)


def _without_gradient(op: fx.Node) -> list[fx.Node]:
    """What an op that autograd does not know depends on; nothing where the graph itself says that this needs no gradient (`detach`)."""
    if op.target.name().partition(".")[0].endswith(gradients.SUFFIX):
        return []
    sources = [node for node in gradients.ancestors([op]) if node.op in ("placeholder", "get_attr", "call_module")]
    return [] if torch.is_grad_enabled() and gradients.is_trained(*sources) else sources


def _path(node: fx.Node) -> Path:
    return tuple(node.target.split("."))


def _attribute(module: nn.Module, path: Path) -> Any:
    return getattr(_submodule(module, path[:-1]), path[-1])


def _submodule(module: nn.Module, path: Path) -> nn.Module:
    """`get_submodule`, which takes ten times as long."""
    for name in path:
        module = module._modules[name]
    return module


def _text(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)} on {value.device.type}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"
