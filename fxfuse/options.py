"""Options: read from `torch.compile(..., options={"fxfuse.select": ...})`, else from `FXFUSE_*` variables, else the default. Nowhere else.

| option            | variable          | values                              | default |
|-------------------|-------------------|-------------------------------------|---------|
| `fxfuse.select`   | `FXFUSE_SELECT`   | `auto`, `always`, `tail`, `never`   | `auto`  |
| `fxfuse.backward` | `FXFUSE_BACKWARD` | `auto`, `recompute`, `save`         | `auto`  |
| `fxfuse.strict`   | `FXFUSE_STRICT`   | a bool; `1`/`0` in the variable     | `False` |
| `fxfuse.passes`   | `FXFUSE_PASSES`   | chain names, list or comma-separated | all    |
| `fxfuse.mode`     | `FXFUSE_MODE`     | an Inductor mode                    | none    |
| `fxfuse.dump`     | `FXFUSE_DUMP`     | a directory                         | none    |
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

PREFIX = "fxfuse."
SELECT = ("auto", "always", "tail", "never")
BACKWARD = ("auto", "recompute", "save")


class OptionError(ValueError):
    """An option of fxfuse's has an unknown name or a value it cannot take."""


@dataclass(frozen=True)
class Options:
    """How fxfuse treats one compilation.

    select: "auto" fuses where the measured rule says it is not slower, "always" wherever a kernel exists, "tail"
    likewise but with the convolution left to its library, "never" nowhere.
    strict: a candidate that is not fused, or an exception inside fxfuse, is an error.
    passes: names of the chains that are looked for; None for all.
    mode: an Inductor mode, for use beside other options (torch.compile itself refuses `mode=` next to `options=`).
    dump: a directory in which every graph that is compiled through the backend gets a folder (see `fxfuse.dump`).
    backward: for chains whose result needs a gradient, and for no others, what waits for the backward. "recompute": nothing of the size of the
    convolution's output; the op that contains the convolution is taken, whose backward computes it again, and the tail op where only that can be.
    "save": the convolution's output, once; the tail op is taken. Both are taken whatever the rule says. "auto": `select` decides.
    """

    select: str = "auto"
    strict: bool = False
    passes: tuple[str, ...] | None = None
    mode: str | None = None
    dump: str | None = None
    backward: str = "auto"


def split(options: Mapping[str, Any] | None, known_passes: tuple[str, ...]) -> tuple[Options, dict[str, Any]]:
    """fxfuse's own options, checked, and the rest, which is Inductor's to check.

    Raises OptionError where `options` is no mapping by name, for an unknown `fxfuse.*` key, an option of fxfuse's without that prefix, or a value
    that the option does not take.
    """
    names = [field.name for field in fields(Options)]
    given = _by_name(options, names)
    own = {key[len(PREFIX) :]: given.pop(key) for key in list(given) if key.startswith(PREFIX)}
    for name in own:
        if name not in names:
            nearest = (difflib.get_close_matches(name, names, n=1, cutoff=0.0) or names)[0]
            raise OptionError(
                f"unknown option {PREFIX + name!r}; the nearest is {PREFIX + nearest!r}; fxfuse takes {', '.join(PREFIX + n for n in names)}"
            )
    for key in given:
        name = key.removeprefix("fxfuse_")
        if name in names:
            raise OptionError(f"unknown option {key!r}; fxfuse's option is {PREFIX + name!r}")
    values = {}
    for name in names:
        variable = f"FXFUSE_{name.upper()}"
        source, value = (PREFIX + name, own[name]) if name in own else (variable, os.environ.get(variable))
        if value is not None and not (isinstance(value, str) and value == ""):
            values[name] = _READ[name](source, value, known_passes)
    return Options(**values), given


def _by_name(options: Any, names: Sequence[str]) -> dict[str, Any]:
    """The options as a new dictionary; raises OptionError where they are not values by name, each option with a key of its own."""
    example = f"give names and values, such as options={{'{PREFIX}select': 'always'}}"
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise OptionError(f"options={options!r} is of type {type(options).__name__}, not a mapping; {example}")
    for key in options:
        if not isinstance(key, str):
            raise OptionError(f"options has the key {key!r} of type {type(key).__name__}, and keys are strings; {example}")
    if PREFIX[:-1] in options:
        raise OptionError(f"unknown option {PREFIX[:-1]!r}; each option has a key of its own: {', '.join(PREFIX + name for name in names)}")
    return dict(options)


def _one_of(names: Sequence[str], source: str, value: Any, _: tuple[str, ...]) -> str:
    if value not in names:
        raise OptionError(f"{source}={value!r} is not one of {', '.join(names)}")
    return value


def _strict(source: str, value: Any, _: tuple[str, ...]) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in ("0", "1", "true", "false"):
        raise OptionError(f"{source}={value!r} is not a bool; give True or False (1 or 0 in the environment)")
    return text in ("1", "true")


def _passes(source: str, value: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(value, (str, list, tuple, set, frozenset)):
        raise OptionError(f"{source}={value!r} is not a list of chains; the chains are {', '.join(known)}")
    names = tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else tuple(value)
    for name in names:
        if name not in known:
            raise OptionError(f"{source} names {name!r}, which is no chain; the chains are {', '.join(known)}")
    return names


def _mode(source: str, value: Any, _: tuple[str, ...]) -> str | None:
    if not isinstance(value, str):
        raise OptionError(f"{source}={value!r} is not the name of an Inductor mode such as 'max-autotune'")
    return None if value == "default" else value


def _dump(source: str, value: Any, _: tuple[str, ...]) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"{source}={value!r} is not a directory's path")
    return os.fspath(value)


_READ: Mapping[str, Callable[[str, Any, tuple[str, ...]], Any]] = {
    "select": partial(_one_of, SELECT),
    "strict": _strict,
    "passes": _passes,
    "mode": _mode,
    "dump": _dump,
    "backward": partial(_one_of, BACKWARD),
}
