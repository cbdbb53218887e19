"""What a way to compute a chain costs, and Inductor's: bytes, kernels and operations of a forward and, in training, of its backward.

The choice between the two is `fxfuse.choose`'s, with the rates of a device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """What a training step asks of a chain. needed: the tensors among its inputs that need a gradient, each by the names of the step and of
    its argument, as "conv.weight"."""

    needed: frozenset[str]

    def needs(self, *names: str) -> int:
        """How many of these need a gradient."""
        return len(self.needed.intersection(names))


@dataclass(frozen=True)
class Convolution:
    """A convolution in a kernel of its library. bytes: of input, weight and output. operand: what it multiplies, whose ceiling holds."""

    bytes: int
    flops: float
    operand: str
    channels_in: int


@dataclass(frozen=True)
class Work:
    """What an op does. bytes: read and written. flops: operations of the convolution inside it, or as many as take as long, at the rate of
    `kernel`; 0 where the convolution is left to its library. gelus: how many Inductor's kernels compute."""

    bytes: int
    kernels: int
    flops: float = 0.0
    kernel: str = ""
    gelus: float = 0.0


@dataclass(frozen=True)
class BackwardCost:
    """What a training step adds to a `Cost`.

    op, inductor: of the backward's kernels, and of what the forward's do for them beyond an inference's; convolutions are left out.
    convolutions: the gradients of input and weight that are asked for, each a convolution in its library, whoever does the rest.
    again: the convolution that the op computes again, after which `convolutions` too come in `pieces` of the batch.
    own: a kernel of the op's that stands for `op`, `again` and `convolutions` together, on devices where its rate was measured.
    """

    op: Work
    inductor: Work
    convolutions: tuple[Convolution, ...] = ()
    again: Convolution | None = None
    pieces: int = 1
    own: Work | None = None


@dataclass(frozen=True)
class Cost:
    """An implementation's op, what Inductor's kernels do instead, and the convolution in front of them that is left to its library either
    way, if the chain starts at one: `inductor` leaves it out, and so does `op` unless the op contains it (its `flops` say so).

    backward: what training adds; the engine fills it in, from the implementation's `backward_cost`.
    """

    op: Work
    inductor: Work
    convolution: Convolution | None = None
    backward: BackwardCost | None = None
