"""FLOP formulas of ops, for `torch.utils.flop_counter` and for the partitioner's memory budget, which reads them too. Like torch's own they
count what convolutions multiply and add, and nothing of the elementwise ops, norms and pools beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# An op's arguments by name, with shapes in the place of tensors.
Formula = Callable[[Mapping[str, Any]], int]

_formulas: dict[Any, Formula] = {}


def register(op: Any, formula: Formula) -> None:
    """Makes `formula` what is counted for each call of an op. Raises RuntimeError where another is registered already."""
    from torch.utils.flop_counter import register_flop_formula

    _formulas[op] = formula
    names = [argument.name for argument in op._schema.arguments]

    @register_flop_formula(op.overloadpacket)
    def count(*given: Any, out_shape: Any = None, **by_name: Any) -> int:
        return formula({**dict(zip(names, given)), **by_name})


def formula_of(op: Any) -> Formula | None:
    """What was registered for an op; None where nothing was, which counts as 0."""
    return _formulas.get(op)


def of_convolution(arguments: Mapping[str, Any]) -> int:
    """The convolution inside an op: as many as torch counts for `aten::convolution` of the same `input`, `weight` and geometry."""
    from torch.utils.flop_counter import conv_flop_count

    weight, input = arguments["weight"], arguments["input"]
    if len(input) < len(weight):
        input = (1, *input)
    if arguments.get("transposed", False):
        return conv_flop_count(list(input), list(weight), [], transposed=True)
    return conv_flop_count(list(input), list(weight), [input[0], weight[0], *_output_size(input[2:], weight[2:], arguments)])


def of_convolution_again(arguments: Mapping[str, Any], names: Sequence[str]) -> int:
    """A backward that computes the convolution inside an op again: that, and the gradients of its input and its weight as far as they are among
    `names`, each of which multiplies as much."""
    return (1 + ("input" in names) + ("weight" in names)) * of_convolution(arguments)


def _output_size(input: Any, kernel: Any, arguments: Mapping[str, Any]) -> list[int]:
    """Spatial sizes of the convolution's output, as the documentation of torch.nn.Conv2d has them."""
    dilation = arguments.get("dilation", [1] * len(kernel))
    geometry = zip(input, kernel, arguments["stride"], arguments["padding"], dilation)
    return [(size + 2 * padding - step * (taps - 1) - 1) // stride + 1 for size, taps, stride, padding, step in geometry]
