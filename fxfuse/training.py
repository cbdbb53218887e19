"""Ops with gradients: for an op its twin `fxfuse::<name>_training`, with the same arguments, kernels and fake, and a backward.

The op itself has no autograd registration, which would cost microseconds at each call without gradients; graphs that need gradients get the
twin. It saves its arguments and nothing else. `fxfuse::<name>_backward` computes again what lies inside the op, a piece of the batch at a
time, so that only a bounded part of it is ever alive. Gradients of what all samples share are summed in fp32, in the order of the batch: the
same bits in every run, where cuDNN's share has them (torch.backends.cudnn.deterministic).

The twin's autograd calls the op and the backward op (or what that is made of, see `Backward.traced`), none of which has one of its own: what
AOTAutograd traces holds these, so a compiled step goes through no autograd of Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import flops, ops

# Of fp32 values inside an op, a piece of the batch: enough for full kernels (cuDNN's convolution and weight gradient of conv_norm_pool_gelu's
# headline model take 7 to 11 % longer on an H200 than for the whole batch, with a quarter of it 31 % and more), and little beside the tensors of a
# model that is trained.
PIECE_BYTES = 256 << 20

Arguments = Mapping[str, Any]
# Gradients of the tensors among an op's arguments, by name: gradients(grad, arguments, names), where names are those that are asked for.
Gradients = Callable[[torch.Tensor, Arguments, Sequence[str]], Mapping[str, torch.Tensor]]
# The same in one go by a kernel made for it, or None where it does not take them.
Kernel = Callable[[torch.Tensor, Arguments, Sequence[str]], "Mapping[str, torch.Tensor] | None"]


@dataclass(frozen=True)
class Backward:
    """How an op's gradients come about.

    gradients: for a piece of the batch. inner: elements inside the op of a whole call. is_sample: whether an argument has the batch in front.
    splits: whether the batch comes in pieces. Not where samples meet inside the op, or where its gradients keep nothing of its size.
    kernel: what is tried first, on the whole batch. traced: whether a compiled graph holds the ops that `gradients` is made of in the place of one
    op: that takes the host less time, and Inductor fuses the sums. Not where `gradients` has something of the batch's size from arguments alone:
    the forward would keep it for the backward. flops: of a backward that gives the gradients of these names; arguments with shapes for tensors.
    """

    gradients: Gradients
    inner: Callable[[Arguments], int]
    is_sample: Callable[[str, Arguments], bool]
    splits: Callable[[Arguments], bool] = lambda arguments: True
    kernel: Kernel = lambda grad, arguments, names: None
    traced: Callable[[Arguments], bool] = lambda arguments: False
    flops: Callable[[Arguments, Sequence[str]], int] = lambda arguments, names: 0


def define_training(op: Any, backward: Backward) -> Any:
    """Declares the twin of `op` and its backward, and returns the twin."""
    schema = op._schema
    name, names = schema.name.partition("::")[2], [argument.name for argument in schema.arguments]
    tensors = [argument.name for argument in schema.arguments if "Tensor" in str(argument.type)]
    arguments = str(schema).partition("(")[2].rpartition(") ->")[0]

    def fake_backward(grad: torch.Tensor, *given: Any) -> list[torch.Tensor]:
        arguments = dict(zip(names, given))
        return [torch.empty_like(arguments[name]) for name, is_needed in zip(tensors, given[-1]) if is_needed]

    def run_backward(grad: torch.Tensor, *given: Any) -> list[torch.Tensor]:
        arguments, asked = dict(zip(names, given)), [name for name, is_needed in zip(tensors, given[-1]) if is_needed]
        if not torch.is_autocast_enabled(grad.device.type):
            return _computed(backward, grad, arguments, asked)
        with torch.autocast(grad.device.type, enabled=False):
            return _computed(backward, grad, arguments, asked)

    def formula(arguments: Arguments) -> int:
        return backward.flops(arguments, [name for name, is_needed in zip(tensors, arguments["needs"]) if is_needed])

    of_op = ops.define(f"{name}_backward(Tensor grad, {arguments}, bool[] needs) -> Tensor[]", fake_backward, run_backward, formula=formula)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, grad: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
            arguments = dict(zip(names, given))
            is_traced = _is_static(arguments) and backward.traced(arguments)
            return tuple((run_backward if is_traced else of_op)(grad, *given))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(
                f"fxfuse::{name} has a first derivative only, and this differentiates its gradient: differentiate the model as it was before it "
                "was fused"
            )

    class Twin(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> torch.Tensor:
            ctx.save_for_backward(*(value for name, value in zip(names, given) if name in tensors))
            ctx.others = {name: value for name, value in zip(names, given) if name not in tensors}
            return op(*given)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            values = {**ctx.others, **dict(zip(tensors, ctx.saved_tensors))}
            needs = [ctx.needs_input_grad[names.index(name)] for name in tensors]
            asked = [name for name, is_needed in zip(tensors, needs) if is_needed]
            found = dict(zip(asked, Gradient.apply(grad, *(values[name] for name in names), needs)))
            return tuple(found.get(name) for name in names)

    return ops.define(f"{name}_training({arguments}) -> Tensor", op, kernel=op, autograd=Twin.apply, formula=flops.formula_of(op))


def _is_static(arguments: Arguments) -> bool:
    return all(isinstance(size, int) for value in arguments.values() if isinstance(value, torch.Tensor) for size in value.shape)


def _computed(backward: Backward, grad: torch.Tensor, arguments: Arguments, asked: Sequence[str]) -> list[torch.Tensor]:
    """The gradients of what is asked for. A backward that fits a piece, as those do whose host time shows, comes to it by the shortest way."""
    found = backward.kernel(grad, arguments, asked)
    if found is None and 0 < backward.inner(arguments) <= PIECE_BYTES // 4:
        found = backward.gradients(grad, arguments, asked)
    if found is None:
        found = _in_pieces(backward, grad, arguments, asked)
    return [_like(arguments[name], found[name]) for name in asked]


def _in_pieces(backward: Backward, grad: torch.Tensor, arguments: Arguments, asked: Sequence[str]) -> Mapping[str, torch.Tensor]:
    samples = [name for name, value in arguments.items() if isinstance(value, torch.Tensor) and backward.is_sample(name, arguments)]
    batch = grad.shape[0] if samples else 1
    splits = samples and backward.splits(arguments)
    size = max(1, PIECE_BYTES // 4 * batch // max(1, backward.inner(arguments)) if splits else batch)
    if size >= batch > 0:
        return backward.gradients(grad, arguments, asked)
    results = {
        name: torch.empty_like(arguments[name]) if name in samples else torch.zeros_like(arguments[name], dtype=torch.float32) for name in asked
    }
    for first in range(0, batch, size):
        part = slice(first, first + size)
        piece = {**arguments, **{name: arguments[name][part] for name in samples}}
        found = backward.gradients(grad[part], piece, asked)
        for name, result in results.items():
            if name in samples:
                result[part].copy_(found[name])
            else:
                result.add_(found[name])
    return results


def _like(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in the dtype and the strides of torch.empty_like(value) and at the start of its memory, which is what the fake says: Inductor
    stops at a result that is not aligned as the fake's is."""
    fits = gradient.dtype == value.dtype and gradient.storage_offset() == 0
    if fits and value.is_contiguous() and gradient.stride() == value.stride():
        return gradient  # as below, without an empty tensor to compare with
    result = torch.empty_like(value)
    return gradient if fits and gradient.stride() == result.stride() else result.copy_(gradient)
