"""Random programs around both chains, for hypothesis.

A program is Python source, so that a failure prints a function to paste into a terminal. Several chains grow in it step by step, interleaved with
one another and with noise: readers of inner values, views, writes to inputs, weights and inner values, directly and through views. Each line runs
in eager mode as it is drawn, so that only lines that eager accepts get in.
"""

from __future__ import annotations

import dataclasses
import linecache
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

MODULES = {"torch": torch, "F": F, "operator": operator}
DTYPES = (*[torch.float32] * 6, torch.bfloat16, torch.float16, torch.float64)
# Eager on a CPU has no avg_pool3d for these.
HALVES = (torch.bfloat16, torch.float16)
ADDS = (
    "{y} + {a}",
    "{a} + {y}",
    "{y} - {a}",
    "{a} - {y}",
    "{y}.add({a})",
    "torch.add({y}, {a}, alpha=-0.5)",
    "torch.add({a}, {y}, alpha=2)",
    "torch.sub({y}, other={a}, alpha=3)",
    "torch.rsub({y}, {a})",
    "{y}.add_({a})",
    "{y}.sub_({a}, alpha=0.5)",
    "{a}.add_({y})",
    "operator.iadd({y}, {a})",
)
GELUS = (*["F.gelu({y})"] * 5, *["F.gelu({y}, approximate='tanh')"] * 4, "torch.ops.aten.gelu_.default({y})")
GELUS_BY_HAND = (
    "0.5 * {y} * (1 + torch.erf({y} / 2**0.5))",
    "{y} * (torch.erf({y} * 0.70710678) + 1) / 2",
    "0.5 * {y} * (1 + torch.tanh(0.7978845608 * ({y} + 0.044715 * {y}**3)))",
    "0.5 * {y} * (1 + torch.erf({y} / 1.5))",
    "{y} * torch.sigmoid(1.702 * {y})",
)
# What may stand between two steps: most of it changes nothing.
BETWEEN = (
    "F.dropout({y}, 0.5, False)",
    "F.dropout({y}, 0.5, False, True)",
    "{y}.contiguous()",
    "{y}.contiguous(memory_format=torch.preserve_format)",
    "{y}.clone()",
    "{y}.to({y}.dtype)",
    "{y}.view({y}.shape)",
    "{y}[...]",
    "{y}.transpose(-1, -2)",
    "{y}.flip(-1)",
)
AVERAGES = (
    "F.avg_pool3d({y}, 2)",
    "F.avg_pool3d({y}, (1, 2, 2), stride=(1, 1, 2))",
    "F.avg_pool3d({y}, 3, 2, 1)",
    "F.avg_pool3d({y}, 2, 2, 1, True, False)",
    "F.avg_pool3d({y}, 2, ceil_mode=True)",
    "F.avg_pool3d({y}, 2, divisor_override=3)",
)
GLOBAL_POOLS = (
    "F.adaptive_avg_pool{n}d({y}, 1)",
    "F.adaptive_avg_pool{n}d({y}, 2)",
    "F.adaptive_avg_pool{n}d({y}, 1).flatten(-{n} - 1)",
    "{y}.mean({spatial})",
    "{y}.mean(dim={spatial}, keepdim=True)",
    "torch.mean({y}, {spatial})",
    "{y}.mean(-1)",
    "{y}.mean(-1).mean(-1)",
    "{y}.flatten(-{n}).mean(-1)",
    "{y}.flatten(-{n}).mean(-1, keepdim=True)",
    "{y}.flatten(1).mean(-1)",
    "F.avg_pool{n}d({y}, {y}.shape[-{n}:])",
    "F.adaptive_avg_pool1d({y}.flatten(-{n}), 1)",
    "{y}.sum({spatial}) / {size}",
    "{y}.sum({spatial}) / 7",
)
READS = (
    "{v} * 2",
    "torch.relu({v})",
    "{v}.view(-1)",
    "{v}[0]",
    "{v}[..., :2]",
    "{v}.transpose(-1, -2)",
    "{v}.detach()",
    "{v}.sum()",
    "{v}.unsqueeze(0)",
    "{v} + {u}",
    "{v}.contiguous()",
    "torch.stack([{v}, {u}])",
)
WRITES = (
    "{v}.mul_(0.5)",
    "{v}.add_({u})",
    "{v}.copy_({u})",
    "{v}.view(-1).mul_(0.5)",
    "{v}[0].add_(1)",
    "operator.setitem({v}, 0, 0.25)",
    "{v}.data.neg_()",
    "{v}.zero_()",
    "F.relu({v}, inplace=True)",
    "torch.add({v}, 1, out={v})",
    "torch._foreach_add_([{v}, {u}], 1.0)",
    "torch.ops.aten.mul_.Tensor({v}, {u})",
)
# Not on arguments: Dynamo itself fails there.
RESHAPES = ("{v}.unsqueeze_(0)", "{v}.transpose_(-1, -2)", "{v}.squeeze_()")


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of a program: random values, or, given `view_of`, a view of an earlier argument. `dtype` None: the program's."""

    name: str
    shape: tuple[int, ...] = ()
    layout: str = "contiguous"
    dtype: torch.dtype | None = None
    view_of: str | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A function's arguments, the lines of its body, and the names it returns."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    returned: tuple[str, ...]
    dtype: torch.dtype

    @property
    def source(self) -> str:
        body = "\n".join(f"    {line}" for line in (*self.lines, f"return {', '.join(self.returned)},"))
        return f"def program({', '.join(i.name for i in self.inputs)}):\n{body}\n"

    def function(self) -> Callable[..., Any]:
        """The program as a Python function; its source is registered, so that stack traces and reports show its lines."""
        name = f"<program {abs(hash(self.source))}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        scope = dict(MODULES)
        exec(compile(self.source, name, "exec"), scope)
        return scope["program"]

    def arguments(self, widen: bool = False) -> list[torch.Tensor]:
        """Fresh arguments, the same at each call, aliased as the inputs say; widened to fp64 without another rounding if asked."""
        return list(_tensors(self.inputs, self.dtype, widen).values())


def _tensors(inputs: tuple[Input, ...] | list[Input], dtype: torch.dtype, widen: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for given in inputs:
        if given.view_of is not None:
            made[given.name] = eval(given.view_of, dict(made))
            continue
        tensor = _laid_out(torch.randn(given.shape, generator=generator), given.layout).to(given.dtype or dtype)
        made[given.name] = tensor.double() if widen and tensor.is_floating_point() else tensor
    return made


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "channels_last" and tensor.dim() in (4, 5):
        return tensor.to(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor


class Sketch:
    """A program while it is drawn: its inputs and lines so far, and eager's value of every name."""

    def __init__(self, draw: Callable[..., Any], dtype: torch.dtype) -> None:
        self.draw, self.dtype = draw, dtype
        self.inputs: list[Input] = []
        self.lines: list[str] = []
        self.scope: dict[str, Any] = dict(MODULES)

    def pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def often(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def input(self, *shape: int, **given: Any) -> str:
        """A new argument of the program."""
        made = Input(f"x{len(self.inputs)}", shape, **given)
        self.inputs.append(made)
        self.scope[made.name] = _tensors(self.inputs, self.dtype)[made.name]
        return made.name

    def line(self, expression: str) -> str | None:
        """A new name for the expression's value, or None (and no line) where eager raises."""
        name = f"v{len(self.lines)}"
        try:
            exec(f"{name} = {expression}", self.scope)
        except Exception:
            return None
        if self.scope[name] is not None and 0 in getattr(self.scope[name], "shape", ()):
            return None  # empty values have tests of their own, and here they only end chains
        self.lines.append(f"{name} = {expression}")
        return name

    def names(self) -> list[str]:
        return [name for name, value in self.scope.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]

    def value(self, name: str) -> torch.Tensor:
        return self.scope[name]

    def noise(self, templates: tuple[str, ...]) -> None:
        v = self.pick(self.names())
        peers = [name for name in self.names() if self.value(name).shape == self.value(v).shape]
        templates = WRITES + RESHAPES if templates is WRITES and v.startswith("v") else templates
        self.line(self.pick(templates).format(v=v, u=self.pick(peers)))


def conv(sketch: Sketch, dims: int) -> str | None:
    """A convolution over an existing value or a new input; sizes stay below ten, so that a draw costs milliseconds."""
    small = [n for n in sketch.names() if n.startswith("v") and sketch.value(n).dim() == dims + 2 and sketch.value(n).numel() < 4000]
    if small and sketch.often(25):
        x = sketch.pick(small)
    else:
        sizes = [sketch.pick((1, 2)), sketch.pick((1, 2, 3)), *(sketch.pick((3, 4, 5)) for _ in range(dims))]
        x = sketch.input(*sizes[sketch.often(15) :], layout=sketch.pick(("contiguous", "channels_last", "transposed")))
    channels, out = sketch.value(x).shape[-dims - 1], sketch.pick((1, 2, 4))
    transposed, kernel = sketch.often(40), sketch.pick((1, 2, 3))
    weight = sketch.input(*((channels, out) if transposed else (out, channels)), *[kernel] * dims)
    bias = sketch.input(out) if sketch.often(70) else "None"
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    geometry = sketch.pick(("", ", 2", ", 1, 1", ", stride=2, padding=1", ", padding=1" if transposed else ", padding='same'"))
    return sketch.line(f"{sketch.pick(('torch', 'F'))}.{name}({x}, {weight}, {bias}{geometry})")


def addend(sketch: Sketch, y: str) -> str:
    """Something to add to `y`: numbers, broadcasting tensors of any kind, values from elsewhere, values that depend on `y` or enlarge it."""
    shape = sketch.value(y).shape
    kind = sketch.pick(("number", "scalar", "channels", "row", "full", "elsewhere", "dependent", "enlarging", "typed"))
    if kind == "elsewhere":
        return sketch.pick([name for name in sketch.names() if sketch.value(name).shape == shape])
    if kind == "dependent":
        return sketch.line(f"{y}.mean()") or "0.5"
    if kind == "typed":
        return sketch.input(*sketch.pick(((), (1,))), dtype=sketch.pick((torch.int64, torch.float64, torch.float32, torch.bfloat16)))
    if kind == "number":
        return sketch.pick(("1.5", "-2", "True"))
    sizes = {"scalar": (), "channels": (*shape[-4:-3], 1, 1, 1), "row": shape[-1:], "full": shape, "enlarging": (3, 1, 1, 1, 1, 1)}
    return sketch.input(*sizes[kind])


def norm(sketch: Sketch, y: str) -> str:
    shape = tuple(sketch.value(y).shape[-sketch.pick((1, 1, 1, 2, 3)) :])
    weight, bias = (sketch.input(*shape) if sketch.often(60) else "None" for _ in range(2))
    return f"F.layer_norm({y}, {shape}, {weight}, {bias}, eps={sketch.pick((1e-5, 1e-2, 1))})"


def passed(sketch: Sketch, y: str) -> str:
    """The value, now and then behind an op that mostly hands it on as it is."""
    return (sketch.often(15) and sketch.line(sketch.pick(BETWEEN).format(y=y))) or y


def gelu(sketch: Sketch, y: str) -> str | None:
    return sketch.line(sketch.pick(GELUS_BY_HAND if sketch.often(15) else GELUS).format(y=y))


def norm_chain(sketch: Sketch) -> Iterator[str | None]:
    """conv_norm_pool_gelu step by step; the last yield is its result."""
    y = conv(sketch, 3)
    yield y
    if sketch.often(70):
        y = sketch.line(sketch.pick(ADDS).format(y=y, a=addend(sketch, y)))
        yield y
    y = sketch.line(norm(sketch, passed(sketch, y)))
    yield y
    y = passed(sketch, y)
    y = sketch.line(sketch.pick(AVERAGES).format(y=y)) or sketch.line(f"F.avg_pool3d({y}, 1)")
    yield y
    yield gelu(sketch, passed(sketch, y))


def pool_chain(sketch: Sketch) -> Iterator[str | None]:
    """conv_gelu_pool step by step."""
    dims = sketch.pick((1, 2, 3))
    y = conv(sketch, dims)
    yield y
    y = gelu(sketch, passed(sketch, y))
    yield y
    y = passed(sketch, y)
    size = math.prod(sketch.value(y).shape[-dims:])
    yield sketch.line(sketch.pick(GLOBAL_POOLS).format(y=y, n=dims, spatial=tuple(range(-dims, 0)), size=size))


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    """One to three chains grown in turns, with noise between the steps."""
    sketch = Sketch(draw, draw(st.sampled_from(DTYPES)))
    kinds = (pool_chain,) if sketch.dtype in HALVES else (norm_chain, norm_chain, norm_chain, pool_chain)
    growing = [sketch.pick(kinds)(sketch) for _ in range(sketch.pick((1, 1, 2, 2, 3)))]
    last: dict[Iterator, str] = {}
    while growing:
        chain = sketch.pick(growing)
        name = next(chain, None)
        if name is None:
            growing.remove(chain)
        else:
            last[chain] = name
        if sketch.lines and sketch.often(18):
            sketch.noise(READS if sketch.often(50) else WRITES)
        if sketch.inputs and sketch.often(4):
            sketch.input(view_of=sketch.pick(("{x}[..., 0]", "{x}[0]", "{x}.detach()")).format(x=sketch.inputs[0].name))
    hypothesis.assume(last)
    returned = [*last.values(), *(sketch.pick(sketch.names()) for _ in range(draw(st.integers(0, 2))))]
    return Program(tuple(sketch.inputs), tuple(sketch.lines), tuple(returned), sketch.dtype)
