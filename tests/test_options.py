"""fxfuse's options: where they are read from, what they take, and the sentence for what they do not."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from types import MappingProxyType

import pytest

from fxfuse.options import OptionError, Options, split

CHAINS = ("conv_gelu_pool", "conv_norm_pool_gelu")


def own(**given: object) -> Options:
    return split({f"fxfuse.{name}": value for name, value in given.items()}, CHAINS)[0]


def test_defaults() -> None:
    for given in (None, {}, {"fxfuse.select": None, "fxfuse.passes": None}):
        assert split(given, CHAINS) == (Options(select="auto", strict=False, passes=None, mode=None, dump=None, backward="auto"), {})


def test_own_keys_are_split_from_the_rest_which_is_left_alone() -> None:
    given = {"fxfuse.select": "never", "max_autotune": True, "triton.cudagraphs": False, "fuse": 1}
    options, rest = split(given, CHAINS)
    assert options == Options(select="never")
    assert rest == {"max_autotune": True, "triton.cudagraphs": False, "fuse": 1}
    assert "fxfuse.select" in given, "the user's own dictionary was changed"


ACCEPTED = [
    ("select", "always", "always"),
    ("backward", "save", "save"),
    ("strict", True, True),
    ("strict", 0, False),
    ("strict", "true", True),
    ("passes", "conv_gelu_pool", ("conv_gelu_pool",)),
    ("passes", " conv_gelu_pool, conv_norm_pool_gelu,", CHAINS),
    ("passes", ["conv_norm_pool_gelu"], ("conv_norm_pool_gelu",)),
    ("passes", [], ()),
    ("mode", "max-autotune", "max-autotune"),
    ("mode", "default", None),
    ("dump", "/tmp/dump", "/tmp/dump"),
    ("dump", Path("dump"), "dump"),
]


@pytest.mark.parametrize(("name", "given", "read"), ACCEPTED)
def test_values(name: str, given: object, read: object) -> None:
    assert getattr(own(**{name: given}), name) == read


REFUSED = [
    ("fxfuse.select", "sometimes", "fxfuse.select='sometimes' is not one of auto, always, tail, never"),
    ("fxfuse.select", {"select": "auto"}, "fxfuse.select={'select': 'auto'} is not one of"),
    ("fxfuse.strict", {}, "fxfuse.strict={} is not a bool"),
    ("fxfuse.passes", {"conv_gelu_pool": 1}, "fxfuse.passes={'conv_gelu_pool': 1} is not a list of chains"),
    ("fxfuse", {"select": "auto"}, "unknown option 'fxfuse'; each option has a key of its own: fxfuse.select, fxfuse.strict, "),
    ("fxfuse", "auto", "unknown option 'fxfuse'; each option has a key of its own: "),
    (3, "auto", "options has the key 3 of type int, and keys are strings; give names and values, such as options="),
    (("fxfuse.select",), "auto", r"options has the key \('fxfuse.select',\) of type tuple, and"),
    (None, "auto", "options has the key None of type NoneType, and"),
    ("fxfuse.select", ["auto"], r"fxfuse.select=\['auto'\] is not one of"),
    ("fxfuse.backward", "keep", "fxfuse.backward='keep' is not one of auto, recompute, save"),
    ("fxfuse.strict", "yes", "fxfuse.strict='yes' is not a bool"),
    ("fxfuse.strict", 2, "fxfuse.strict=2 is not a bool"),
    (
        "fxfuse.passes",
        "conv_gelu",
        "fxfuse.passes names 'conv_gelu', which is no chain; the chains are conv_gelu_pool, conv_norm_pool_gelu",
    ),
    ("fxfuse.passes", 1, "fxfuse.passes=1 is not a list of chains"),
    ("fxfuse.passes", [1], "fxfuse.passes names 1, which is no chain"),
    ("fxfuse.mode", 3, "fxfuse.mode=3 is not the name of an Inductor mode"),
    ("fxfuse.dump", 3, "fxfuse.dump=3 is not a directory's path"),
    ("fxfuse.selct", "auto", "unknown option 'fxfuse.selct'; the nearest is 'fxfuse.select'; fxfuse takes fxfuse.select, fxfuse.strict"),
    ("fxfuse.pass", "auto", "unknown option 'fxfuse.pass'; the nearest is 'fxfuse.passes'"),
    ("fxfuse.", "auto", "unknown option 'fxfuse.'"),
    ("select", "auto", "unknown option 'select'; fxfuse's option is 'fxfuse.select'"),
    ("fxfuse_select", "auto", "unknown option 'fxfuse_select'; fxfuse's option is 'fxfuse.select'"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), REFUSED)
def test_refusals(key: str, value: object, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        split({key: value}, CHAINS)


@pytest.mark.parametrize("given", [[("fxfuse.select", "always")], ["fxfuse.select"], "fxfuse.select", "", {"fxfuse.select"}, ("always",), [], 0, True])
def test_options_that_are_no_mapping(given: object) -> None:
    with pytest.raises(OptionError) as raised:
        split(given, CHAINS)
    kind = type(given).__name__
    assert str(raised.value) == f"options={given!r} is of type {kind}, not a mapping; give names and values, such as options={{'fxfuse.select': 'always'}}"


def test_any_mapping_will_do() -> None:
    for kind in (dict, UserDict, MappingProxyType):
        assert split(kind({"fxfuse.select": "never", "fuse": 1}), CHAINS) == (Options(select="never"), {"fuse": 1})


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXFUSE_SELECT", "always")
    monkeypatch.setenv("FXFUSE_STRICT", "1")
    monkeypatch.setenv("FXFUSE_PASSES", "conv_gelu_pool")
    monkeypatch.setenv("FXFUSE_MODE", "reduce-overhead")
    monkeypatch.setenv("FXFUSE_BACKWARD", "recompute")
    assert own() == Options("always", True, ("conv_gelu_pool",), "reduce-overhead", backward="recompute")
    assert own(select="never", strict=False, backward="auto") == Options("never", False, ("conv_gelu_pool",), "reduce-overhead")


def test_an_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SELECT", "STRICT", "PASSES", "MODE", "BACKWARD"):
        monkeypatch.setenv(f"FXFUSE_{name}", "")
    assert own() == Options()


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXFUSE_SELECT", "fast")
    with pytest.raises(OptionError, match="FXFUSE_SELECT='fast' is not one of auto, always, tail, never"):
        own()
