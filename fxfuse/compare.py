"""What a dump's `repro_*.py` calls: eager, Inductor and fxfuse on one chain, their errors against fp64 and their times; of a training step where
gradients were on and an input needs one."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate

from . import registry, torch_private
from .bench.timing import in_a_word, timed
from .bench.work import Inference, Training, Work, fixed_gradient
from .chain import chain_names
from .measure import medians, rounded_to_tf32, widened
from .report import reports

ROUNDS = 15
# A result may err twice as much as eager's does, or as rounding the operands to TF32 does where that is allowed, and by rounding noise.
ERROR_FACTOR, ERROR_FLOOR = 2.0, 1e-6

Chain = Callable[..., Any]
Inputs = Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Setting:
    """How the chain was compiled: fxfuse's and Inductor's options, whether gradients were on and TF32 allowed in cuDNN's convolutions, and
    the autocast regions around it (device type, dtype, enabled). chains: those from outside that were registered, and the module that each is
    loaded from."""

    select: str = "auto"
    backward: str = "auto"
    passes: Sequence[str] | None = None
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    grad: bool = False
    tf32: bool = False
    autocast: Sequence[tuple[str, str | None, bool]] = ()
    chains: Mapping[str, str] = field(default_factory=dict)


def tensor(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: str, offset: int = 0, requires_grad: bool = False
) -> torch.Tensor:
    """A tensor of random values with these strides; integers and bools are 0 or 1."""
    length = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if all(shape) else 0
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype.is_complex or dtype.itemsize > 1 else torch.float32
        values = torch.randn(length, dtype=wide, device=device).to(dtype)
    else:
        values = torch.randint(0, 2, (length,), device=device).to(dtype)
    return values.as_strided(shape, stride, offset).requires_grad_(requires_grad)


def compare(chain: Chain, inputs: Inputs, setting: Setting) -> int:
    """Prints the table and what fxfuse did. Returns 1, with a sentence on stderr, if fxfuse's result is wrong or could not be had."""
    for module in dict.fromkeys(setting.chains.values()):
        registry.load(module)
    missing = [name for name in setting.chains if name not in chain_names()]
    if missing:
        print(f"{setting.chains[missing[0]]} does not hold the chain {missing[0]}, which was registered", file=sys.stderr)
        return 1
    torch.backends.cudnn.conv.fp32_precision = "tf32" if setting.tf32 else "ieee"
    given = inputs()
    calls, work, trained = _contenders(chain, setting), Inference(), sum(setting.grad and x.requires_grad for x in given)
    if trained:
        calls, work = {name: _step(call) for name, call in calls.items()}, Training()
        print(f"A training step: forward, and the gradients of {trained} of {len(given)} inputs.", end="\n\n")
    expected = _in_fp64(calls["eager"], given, setting)
    errors, failed = _errors(calls, inputs, setting, work, expected)
    allowed = _allowed(calls["eager"], inputs, setting, work, errors, expected)
    del expected
    with _state(setting):
        times = timed({name: functools.partial(calls[name], *given) for name in errors}, given[0].device, ROUNDS)
    failed = {**failed, **times.failed}
    milliseconds = medians({name: times.compared[name] for name in errors if name in times.compared})
    rows = [(name, _text(milliseconds.get(name), ".4f"), _text(errors.get(name), ".1e"), failed.get(name, "")) for name in calls]
    columns = 4 if failed else 3
    print(tabulate([row[:columns] for row in rows], headers=("", "ms", "error", "")[:columns], disable_numparse=True), end="\n\n")
    print(*reports()[-1:], end="\n\n")
    return _verdict(errors, failed, allowed)


def _contenders(chain: Chain, setting: Setting) -> dict[str, Chain]:
    own = {"select": setting.select, "backward": setting.backward, "passes": setting.passes, "mode": setting.mode, "strict": False, "dump": None}
    options = {**{f"fxfuse.{name}": value for name, value in own.items()}, **setting.inductor}
    inductor = torch_private.inductor(setting.mode, setting.inductor)
    return {
        "eager": chain,
        "inductor": torch.compile(chain, backend=inductor, dynamic=False),
        "fxfuse": torch.compile(chain, backend="fxfuse", options=options, dynamic=False),
    }


def _step(call: Chain) -> Chain:
    """The call's results, and the gradients that fixed random ones of theirs bring to the inputs that need one, by name."""
    made: dict[tuple[torch.dtype, ...], list[torch.Tensor]] = {}  # once, so that they are not timed

    def step(*given: torch.Tensor) -> dict[str, torch.Tensor]:
        results = [leaf for leaf in torch.utils._pytree.tree_leaves(call(*given)) if isinstance(leaf, torch.Tensor)]
        needing = [result for result in results if result.requires_grad]
        leaves = {f"gradient of input {index}": x for index, x in enumerate(given) if x.requires_grad}
        dtypes = tuple(result.dtype for result in needing)
        made[dtypes] = made.get(dtypes) or [fixed_gradient(result, seed) for seed, result in enumerate(needing)]
        found = torch.autograd.grad(needing, list(leaves.values()), made[dtypes], allow_unused=True) if needing else ()
        gradients = {name: gradient for name, gradient in zip(leaves, found) if gradient is not None}
        return {**{f"result {index}": result.detach() for index, result in enumerate(results)}, **gradients}

    return step


def _in_fp64(call: Chain, given: Sequence[torch.Tensor], setting: Setting) -> Any:
    with torch.set_grad_enabled(setting.grad):
        return call(*(widened(x.detach()).requires_grad_(x.requires_grad) for x in given))


@contextlib.contextmanager
def _state(setting: Setting) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(setting.grad))
        for type, dtype, enabled in setting.autocast:
            stack.enter_context(torch.autocast(type, dtype and getattr(torch, dtype), enabled))
        yield


def _errors(
    calls: Mapping[str, Chain], inputs: Inputs, setting: Setting, work: Work, expected: Any
) -> tuple[dict[str, float], dict[str, str]]:
    """Relative errors of the contenders that run, and a line for each that does not. Inputs are made anew: a chain may write to them."""
    errors, failed = {}, {}
    with _state(setting):
        for name, call in calls.items():
            try:
                errors[name] = max(work.errors(call(*inputs()), expected).values())
            except Exception as error:
                failed[name] = in_a_word(error)
    return errors, failed


def _allowed(call: Chain, inputs: Inputs, setting: Setting, work: Work, errors: Mapping[str, float], expected: Any) -> float:
    given = inputs()
    # Where eager has no kernel (a CPU's avg_pool3d in bf16), the rounding of the inputs' dtype stands for its error.
    coarsest = max(torch.finfo(x.dtype).eps for x in given if x.is_floating_point())
    allowed = [ERROR_FLOOR, ERROR_FACTOR * errors.get("eager", coarsest)]
    if setting.tf32 and given[0].is_cuda:
        rounded = [rounded_to_tf32(x.detach()).requires_grad_(x.requires_grad) if x.dtype == torch.float32 else x for x in given]
        allowed.append(ERROR_FACTOR * max(work.errors(_in_fp64(call, rounded, setting), expected).values()))
    return max(allowed)


def _verdict(errors: Mapping[str, float], failed: Mapping[str, str], allowed: float) -> int:
    if "fxfuse" in errors and errors["fxfuse"] <= allowed:
        return 0
    told = f"errs by {errors['fxfuse']:.1e}, more than the allowed {allowed:.1e}" if "fxfuse" in errors else f"failed: {failed['fxfuse']}"
    print(f"fxfuse {told}", file=sys.stderr)
    return 1


def _text(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)
