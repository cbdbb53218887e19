"""The vocabulary: every spelling of the ops that chains are made of, read as one canonical form.

`torch.conv2d`, `nn.Conv2d`, `aten.conv2d.default`, `aten.conv2d.padding` and `aten.convolution.default` all become the word `conv` with the
same argument names, so that a chain is written once. `words.py` holds the words that every chain knows; a chain adds its own, in the same way:

    RELU = Word(
        "relu",
        Spelling(aten.relu.default, F.relu, torch.relu, methods=("relu",), modules={nn.ReLU: ("inplace",)}, also={"inplace": (False, True)}),
        Spelling(aten.relu_.default, torch.relu_, methods=("relu_",)),
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from . import torch_private
from .values import ModuleParameter, value_of

Args = dict[str, Any]
NONE: Mapping[Any, Any] = MappingProxyType({})


class Spelling:
    """One way to write a word: an aten overload, whose schema names and orders the arguments, and whatever else takes the same ones.

    overload: the op, as `torch.ops.aten.relu.default`; of one that returns a tuple, the word's value is the first entry.
    targets: functions that graphs call instead, as `torch.relu` and `F.relu`. methods: names of Tensor methods.
    modules: nn modules, by exact type (a subclass may compute something else), and which of their attributes are passed by keyword. One whose call
    is not its class's own forward alone (hooks, a patched forward) is no word.
    adapt: turns the arguments by the schema's names into the word's, a dict too, where spellings differ.
    also: arguments that the targets take beyond the schema's, each with the values with which the call still is this word.
    """

    def __init__(
        self,
        overload: torch._ops.OpOverload,
        *targets: Callable[..., Any],
        methods: Sequence[str] = (),
        modules: Mapping[type[nn.Module], Sequence[str]] = NONE,
        adapt: Callable[[Args], Args] = dict,
        also: Mapping[str, Sequence[Any]] = NONE,
    ) -> None:
        self.overload, self.targets, self.methods, self.modules, self.adapt, self.also = overload, targets, methods, modules, adapt, also

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Args | None:
        """The arguments by the schema's names, or None where the call does not fit (an `out=` form, say)."""
        bound = bind(self.overload._schema, args, kwargs, tuple(self.also))
        if bound is None or any(bound.pop(name, values[0]) not in values for name, values in self.also.items()):
            return None
        return bound

    def returns_tuple(self) -> bool:
        """Whether the word's value is the first entry of what the op returns."""
        return len(self.overload._schema.returns) > 1


class Word:
    """A word: its name, every spelling, and the arguments by which a value can flow through it along a chain."""

    def __init__(self, name: str, *spellings: Spelling, through: Sequence[str] = ("self",)) -> None:
        self.name, self.spellings, self.through = name, spellings, tuple(through)


class Vocabulary:
    """Words, looked up by the node that spells them. Raises ValueError where two of them are contradictory: one name, or one spelling of both.

    words: by name. functions: the word and its spelling by call target (Python functions, operators and aten overloads); likewise methods, by
    name, and modules, by type.
    """

    def __init__(self, words: Iterable[Word]) -> None:
        self.words: dict[str, Word] = {}
        self.functions: dict[Any, tuple[Word, Spelling]] = {}
        self.methods: dict[str, tuple[Word, Spelling]] = {}
        self.modules: dict[type[nn.Module], tuple[Word, Spelling]] = {}
        for word in words:
            if word.name in self.words:
                raise ValueError(f"there is a word {word.name!r} already; take another name")
            self.words[word.name] = word
            for spelling in word.spellings:
                self._add(word, spelling)

    def read(self, node: fx.Node) -> tuple[Word, Spelling, Args] | None:
        """The word that `node` spells, the spelling and the arguments by its schema's names, or None."""
        found, kwargs = self._spelling(node)
        args = None if found is None else found[1].bound(node.args, kwargs)
        return None if args is None else (*found, args)

    def _spelling(self, node: fx.Node) -> tuple[tuple[Word, Spelling] | None, Mapping[str, Any]]:
        if node.op == "call_function":
            return self.functions.get(node.target), node.kwargs
        if node.op == "call_method":
            return self.methods.get(node.target), node.kwargs
        if node.op != "call_module":
            return None, node.kwargs
        module = node.graph.owning_module.get_submodule(node.target)
        found = self.modules.get(type(module))
        if found is None or getattr(module, "padding_mode", "zeros") != "zeros" or not torch_private.calls_own_forward(module):
            return None, node.kwargs
        given = {name: getattr(module, name) for name in found[1].modules[type(module)]}
        given = {n: ModuleParameter(f"{node.target}.{n}", v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        return found, {**given, **node.kwargs}

    def _add(self, word: Word, spelling: Spelling) -> None:
        targets = (spelling.overload, *spelling.targets)
        for table, keys in ((self.functions, targets), (self.methods, spelling.methods), (self.modules, spelling.modules)):
            for key in keys:
                if key in table:
                    raise ValueError(f"{getattr(key, '__name__', key)} is read as the word {table[key][0].name!r} already; leave it out of {word.name!r}")
                table[key] = (word, spelling)
        self.functions.setdefault(spelling.overload.overloadpacket, (word, spelling))


def expand(value: Any, dims: int) -> Any:
    """An int or a one-element sequence as a tuple of `dims` entries; strings and full tuples as they are."""
    value = _entries(value)
    if isinstance(value, str):
        return value
    if not isinstance(value, (tuple, list)):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _entries(value: Any) -> Any:
    """The sizes that a node stands for: `y.shape[-2:]` with sizes that vary is a node that makes a torch.Size of others."""
    if not isinstance(value, fx.Node):
        return value
    if value.target is torch.Size:
        return value.args[0]
    known = value_of(value)
    return known if isinstance(known, tuple) and all(isinstance(size, int) for size in known) else value


def bind(schema: torch._C.FunctionSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any], also: tuple[str, ...] = ()) -> Args | None:
    """Arguments by the schema's names with its defaults filled in, or None where the call does not fit the schema.

    also: names of arguments that may follow the schema's. Functional and torch-level spellings call the first argument `input`, aten calls it
    `self`; `axis` and `keepdims` are numpy's words.
    """
    names = [*(argument.name for argument in schema.arguments), *also]
    if len(args) > len(names):
        return None
    bound = dict(zip(names, args))
    for name, value in kwargs.items():
        name = {"input": "self", "axis": "dim", "keepdims": "keepdim"}.get(name, name) if name not in names else name
        if name not in names or name in bound:
            return None
        bound[name] = value
    for argument in schema.arguments:
        if argument.name in bound:
            continue
        # The Python spellings default these to None where the aten schema has no default.
        if not argument.has_default_value() and argument.name not in ("weight", "bias", "dim"):
            return None
        bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound
