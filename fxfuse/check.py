"""What a chain must be for the engine to work with it, said in one sentence where it is registered and not where it is first met."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .chain import Chain, Implementation, Step
from .sources import place
from .vocabulary import Spelling, Word

Problems = Iterator[str]


class RegistrationError(ValueError):
    """A chain cannot be registered."""


def check(chain: Chain) -> None:
    """Raises RegistrationError with the first sentence about what the chain lacks."""
    if not isinstance(chain, Chain):
        raise RegistrationError(f"fxfuse.register takes a fxfuse.Chain; {chain!r} is a {type(chain).__name__}")
    problem = next(_problems(chain), None)
    if problem is not None:
        raise RegistrationError(f"the chain {chain.name!r} cannot be registered: {problem}")


def _problems(chain: Chain) -> Problems:
    """Later sentences rely on earlier ones."""
    if not isinstance(chain.name, str) or not chain.name.isidentifier():
        yield "its name is no Python identifier, as options, counters and file names need"
    if not isinstance(chain.version, str) or not isinstance(chain.description, str):
        yield "its version and its description are strings"
    yield from _word_problems(chain)
    yield from _step_problems(chain)
    if chain.dims is not None and chain.steps[0].words != ("conv",):
        yield f"its dims={chain.dims!r} are those of a convolution, and its first step accepts {' or '.join(chain.steps[0].words)}; leave dims out"
    if chain.dims is not None and not (isinstance(chain.dims, tuple) and chain.dims and set(chain.dims) <= {1, 2, 3}):
        yield f"its dims={chain.dims!r} are not a tuple of 1, 2 or 3"
    yield from _implementation_problems(chain)


def _word_problems(chain: Chain) -> Problems:
    if not isinstance(chain.words, tuple) or not all(isinstance(word, Word) for word in chain.words):
        yield f"its words={chain.words!r} are not a tuple of fxfuse.Word"
    for word in chain.words:
        if not isinstance(word.name, str) or not word.spellings or not all(isinstance(spelling, Spelling) for spelling in word.spellings):
            yield f"the word {word.name!r} needs a string for its name and at least one fxfuse.Spelling"
        for spelling in word.spellings:
            yield from _spelling_problems(word, spelling)
    try:
        chain.vocabulary
    except ValueError as error:
        yield str(error)


def _spelling_problems(word: Word, spelling: Spelling) -> Problems:
    if not isinstance(spelling.overload, torch._ops.OpOverload):
        yield f"a spelling of the word {word.name!r} starts with {spelling.overload!r}; it takes an overload such as torch.ops.aten.relu.default"
    names = [argument.name for argument in spelling.overload._schema.arguments]
    if not word.through or not set(word.through) <= set(names):
        yield f"a value flows through the word {word.name!r} by {', '.join(word.through) or 'nothing'}, and {spelling.overload} takes {', '.join(names)}"
    if not callable(spelling.adapt):
        yield f"the word {word.name!r} has adapt={spelling.adapt!r}, which cannot be called"
    if not _are_strings(spelling.methods):
        yield f"the word {word.name!r} has methods={spelling.methods!r}; give a tuple of names"
    if not isinstance(spelling.modules, Mapping) or not all(isinstance(t, type) and _are_strings(n) for t, n in spelling.modules.items()):
        yield f"the word {word.name!r} has modules={spelling.modules!r}; give a dict of types and tuples of attribute names"
    if not isinstance(spelling.also, Mapping) or not all(isinstance(v, (tuple, list)) and v for v in spelling.also.values()):
        yield f"the word {word.name!r} has also={spelling.also!r}; give a dict of argument names and tuples of values"


def _are_strings(names: Any) -> bool:
    return isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)


def _step_problems(chain: Chain) -> Problems:
    steps = chain.steps
    if not isinstance(steps, tuple) or not all(isinstance(step, Step) for step in steps) or len(steps) < 2:
        yield "its steps are not a tuple of at least two fxfuse.Step"
    names = [step.name for step in steps]
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name == "emit" or names.count(name) > 1:
            yield f"the step {name!r} needs a name of its own that can name an argument and is not 'emit'"
    for step in steps:
        given = next((word.name for word in step.words if isinstance(word, Word)), None)
        if given is not None:
            yield f"the step {step.name!r} accepts words by their names; give {given!r}, and the fxfuse.Word to the chain's words"
        for word in step.words or (None,):
            if word not in chain.vocabulary.words:
                yield f"nobody knows the word {word!r} of the step {step.name!r}{_nearest(word, chain)}; add a fxfuse.Word to the chain's words"
    if steps[0].optional or all(step.optional for step in steps[1:]):
        yield "its first step and at least one of the others must not be optional"


def _nearest(word: Any, chain: Chain) -> str:
    found = difflib.get_close_matches(str(word), chain.vocabulary.words, n=1)
    return f" (the nearest is {found[0]!r})" if found else ""


def _implementation_problems(chain: Chain) -> Problems:
    implementations, steps = chain.implementations, [step.name for step in chain.steps]
    yield from _signature_problems("requires", chain.requires, steps)
    if not isinstance(implementations, tuple) or not implementations or not all(isinstance(i, Implementation) for i in implementations):
        yield "its implementations are not a tuple of at least one fxfuse.Implementation"
    if len({i.op for i in implementations}) < len(implementations):
        yield "two of its implementations have the same op"
    for implementation in implementations:
        if not isinstance(implementation.op, str) or not _is_op(implementation.qualified):
            yield f"torch knows no op {implementation.op!r}; define it with torch.library first and name it 'namespace::name'"
        yield from _signature_problems("takes", implementation.takes, steps)
        yield from _signature_problems("replace", implementation.replace, steps, "emit")
        if implementation.cost is not None:
            yield from _signature_problems("cost", implementation.cost, steps)
        if implementation.backward_cost is not None:
            yield from _signature_problems("backward_cost", implementation.backward_cost, steps, "training")
            if implementation.cost is None:
                yield f"the backward_cost of {implementation.op!r} adds to a cost, and it has none"


def _is_op(qualified: str) -> bool:
    namespace, _, name = qualified.partition("::")
    return hasattr(getattr(torch.ops, namespace), name)


def _signature_problems(role: str, function: Callable[..., Any], steps: list[str], *first: str) -> Problems:
    """A function is called with what is in `first` by position and each step by name."""
    takes = ", ".join((*first, *steps))
    if not callable(function):
        yield f"its {role}={function!r} cannot be called; it is a function of {takes}"
    try:
        inspect.signature(function).bind(*first, **dict.fromkeys(steps))
    except TypeError as error:
        at = place(function)
        yield f"its {role}{f' at {at}' if at else ''} is not a function of {takes}: {error}"
    except ValueError:
        return  # a builtin that has no signature
