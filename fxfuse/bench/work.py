"""What is timed, a call or a training step, and what its result is held against."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..measure import first_convolution, fp64_result, relative_error, rounded_to_tf32, tf32_operands, widened

tree_leaves, tree_map_only = torch.utils._pytree.tree_leaves, torch.utils._pytree.tree_map_only
# A gradient this much smaller than the model's largest is 0 in exact arithmetic (of a bias in front of a norm): all that anyone computes of
# it is rounding, which fp64 leaves 1e-13 of and fp32 1e-6.
ZERO = 1e-9

Gradients = Mapping[str, torch.Tensor]
# A contender's relative errors by what they are of.
Errors = dict[str, float]


class Inference:
    """A call, whose result counts."""

    training = input_gradient = False
    # Values of the largest size that the fp64 reference holds at once.
    held = 3

    def call(self, model: nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Any]:
        return lambda: model(*inputs)

    def reference(self, model: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """What `call` returns, in fp64."""
        return fp64_result(model, *inputs)

    def tf32(self, model: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """The reference with the convolution's operands rounded to TF32."""
        return self.reference(*tf32_operands(model, inputs))

    def zeros(self, expected: Any) -> list[str]:
        """What of the reference is rounding only."""
        return []

    def errors(self, found: Any, expected: Any) -> Errors:
        return {"result": relative_error(found, expected)}


@dataclass(frozen=True)
class Training:
    """A step: forward, and the gradients of all parameters that a fixed random gradient of the result brings.

    input_gradient: of floating-point inputs too.
    """

    input_gradient: bool = False
    training = True
    held = 6

    def call(self, model: nn.Module, inputs: tuple[Any, ...]) -> Step:
        return Step(model, inputs, self.input_gradient)

    def reference(self, model: nn.Module, inputs: tuple[Any, ...]) -> Gradients:
        return self.call(copy.deepcopy(model).double(), tree_map_only(torch.Tensor, widened, inputs))()

    def tf32(self, model: nn.Module, inputs: tuple[Any, ...]) -> Gradients:
        """The backward's convolutions multiply with the gradient of the convolution's output, which is rounded too."""
        model, inputs = tf32_operands(model, inputs)
        first_convolution(model).register_forward_hook(_round_gradient)
        return self.reference(model, inputs)

    def zeros(self, expected: Gradients) -> list[str]:
        norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
        return [name for name, norm in norms.items() if norm <= ZERO * max(norms.values())]

    def errors(self, found: Gradients, expected: Gradients) -> Errors:
        if missing := expected.keys() - found.keys():
            raise ValueError(f"there is no gradient of {', '.join(sorted(missing))}")
        zeros = self.zeros(expected)
        return {name: relative_error(found[name], gradient) for name, gradient in expected.items() if name not in zeros}


Work = Inference | Training


class Step:
    """One training step; calling it returns the gradients by the names of what they are of, and leaves no `.grad` behind."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], input_gradient: bool) -> None:
        self.model = model
        self.inputs = tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(input_gradient and x.is_floating_point()), inputs)
        # torch.compile's wrapper puts a prefix in front of a parameter's name.
        parameters = {name.removeprefix("_orig_mod."): parameter for name, parameter in model.named_parameters()}
        given = {f"input {index}": leaf for index, leaf in enumerate(tree_leaves(self.inputs)) if isinstance(leaf, torch.Tensor)}
        self.leaves = {name: leaf for name, leaf in {**parameters, **given}.items() if leaf.requires_grad}
        self.grads: list[torch.Tensor] = []

    def __call__(self) -> dict[str, torch.Tensor]:
        try:
            results = [leaf for leaf in tree_leaves(self.model(*self.inputs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if not results:
                raise ValueError("no result of the model needs a gradient")
            self.grads = self.grads or [fixed_gradient(result, seed) for seed, result in enumerate(results)]
            torch.autograd.backward(results, self.grads)
            return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}
        finally:
            for leaf in self.leaves.values():
                leaf.grad = None


@torch.no_grad()
def fixed_gradient(result: torch.Tensor, seed: int) -> torch.Tensor:
    """The same for every contender, in the result's dtype and strides: normal, rounded to 1/16, which every dtype holds."""
    generator = torch.Generator(result.device).manual_seed(seed)
    values = torch.randn(result.shape, generator=generator, device=result.device)
    return torch.empty_like(result).copy_(values.mul_(16).round_().div_(16))


def _round_gradient(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: rounded_to_tf32(gradient.float()).double())
