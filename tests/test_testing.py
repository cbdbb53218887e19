"""`fxfuse.testing.assert_fused`: when it holds, and the message that it fails with."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, ConvNormPoolGelu
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxfuse import library, listeners
from fxfuse.options import OptionError
from fxfuse.report import Report
from fxfuse.testing import assert_fused

ALWAYS = {"fxfuse.select": "always"}


@pytest.fixture(autouse=True)
def without_gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "unavailable", lambda device, build=True: None)
    with torch.no_grad():
        yield


def image(channels: int = 4) -> torch.Tensor:
    return torch.ones(2, channels, 8, 8)


class OneOfTwo(nn.Module):
    """A chain, and a near miss in the line marked below."""

    def __init__(self) -> None:
        super().__init__()
        self.chain, self.conv = ConvGeluPool(), nn.Conv2d(4, 8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.gelu(self.conv(x))  # near miss
        return self.chain(x), y.amax((2, 3))


class FrozenDict(collections.OrderedDict):
    """A config as diffusers' models keep it: it cannot be changed by its own methods."""

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a FrozenDict cannot be changed")

    __setitem__ = __delitem__ = setdefault = pop = update = _refuse


class Configured(nn.Module):
    """In the manner of diffusers: a frozen config among the attributes, which forward reads, and checkpoints in training."""

    def __init__(self) -> None:
        super().__init__()
        self._internal_dict = FrozenDict()
        collections.OrderedDict.__setitem__(self._internal_dict, "scale", 2.0)
        self.gradient_checkpointing = True
        self.chain = ConvGeluPool()

    @property
    def config(self) -> FrozenDict:
        return self._internal_dict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.config["scale"]
        if self.training and self.gradient_checkpointing:
            return checkpoint(self.chain, x, use_reentrant=False)
        return self.chain(x)


class WithDropout(nn.Module):
    """Dropout between all steps, as models for training have it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Dropout2d(0.1), nn.GELU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(x)


def failure(*args: Any, **kwargs: Any) -> tuple[str, str]:
    """The message's first line, and the rest with the words of a cell that is wrapped beside each other."""
    with pytest.raises(AssertionError) as caught:
        assert_fused(*args, **{"options": ALWAYS, **kwargs})
    sentence, _, rest = str(caught.value).partition("\n\n")
    return sentence, rest


def test_an_expectation_that_holds_gives_the_report() -> None:
    report = assert_fused(OneOfTwo(), (image(),), {"conv_gelu_pool": 1, "conv_norm_pool_gelu": 0}, options=ALWAYS)
    assert [fused.op for fused in report.fused] == ["gelu_pool"] and len(report.declined) == 1


def test_a_model_with_a_frozen_config_keeps_it() -> None:
    model = Configured().eval()
    config = model.config
    assert_fused(model, (image(),), {"conv_gelu_pool": 1}, options=ALWAYS)
    assert model.config is config and dict(config) == {"scale": 2.0}


def test_a_model_under_a_checkpoint_in_training() -> None:
    with torch.enable_grad():
        report = assert_fused(Configured().train(), (image(),), {"conv_gelu_pool": 1}, options=ALWAYS)
    assert report.fused[0].body and report.fused[0].module == "chain.conv"


def test_a_model_with_dropout_in_eval_and_in_training() -> None:
    assert_fused(WithDropout().eval(), (image(),), {"conv_gelu_pool": 1}, options=ALWAYS)
    _, table = failure(WithDropout().train(), (image(),), {"conv_gelu_pool": 1})
    assert "conv is followed by dropout" in table


def test_the_message_is_the_why_not_table() -> None:
    sentence, table = failure(OneOfTwo(), (image(),), {"conv_gelu_pool": 2})
    assert sentence == "expected conv_gelu_pool to be fused 2 times, found it fused 1 time and declined 1 time"
    for text in ("declined chain", "got to", "gelu is followed by amax; the chain goes on", "fused chain", 'select="always"'):
        assert text in table
    lines, first = inspect.getsourcelines(OneOfTwo)
    line = first + next(index for index, text in enumerate(lines) if "# near miss" in text)
    assert f"test_testing.py:{line} " in table


def test_chains_that_are_not_named_are_not_checked() -> None:
    assert_fused(ConvGeluPool(), (image(),), {}, options=ALWAYS)
    assert_fused(ConvGeluPool(), (image(),), {"conv_norm_pool_gelu": 0}, options=ALWAYS)
    sentence, table = failure(OneOfTwo(), (image(),), {"conv_norm_pool_gelu": 1})
    assert sentence.endswith("found it fused 0 times and declined 0 times: no conv over 3 dims is followed by add or layer_norm")
    assert table == "", "no candidate of the chain that was asked for, and the other is not shown"


def test_zero_means_that_none_may_fuse() -> None:
    sentence, table = failure(ConvGeluPool(), (image(),), {"conv_gelu_pool": 0})
    assert sentence == "expected conv_gelu_pool not to be fused, found it fused 1 time and declined 0 times"
    assert "fused chain" in table and "models.py:" in table


def test_a_sentence_for_each_expectation() -> None:
    sentences, _ = failure(OneOfTwo(), (image(),), {"conv_gelu_pool": 3, "conv_norm_pool_gelu": 1})
    assert [line.split(",")[0] for line in sentences.splitlines()] == [
        "expected conv_gelu_pool to be fused 3 times",
        "expected conv_norm_pool_gelu to be fused 1 time",
    ]


def test_with_gradients_on_the_message_says_what_to_do() -> None:
    with torch.enable_grad():
        sentence, table = failure(ConvGeluPool(), (image(),), {"conv_gelu_pool": 1}, options={})
    assert "declined 1 time" in sentence and "torch.no_grad()" in table


def test_nothing_like_the_chain() -> None:
    sentence, _ = failure(torch.relu, (image(),), {"conv_gelu_pool": 1})
    assert sentence.endswith(": no conv over 1, 2 or 3 dims is followed by gelu")
    sentence, _ = failure(ConvGeluPool(), (image(),), {"conv_gelu_pool": 2})
    assert sentence.endswith(": no other conv over 1, 2 or 3 dims is followed by gelu")


def test_a_capture_that_stops_is_said() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else ConvGeluPool()(x)

    sentence, rest = failure(run, image(), {"conv_gelu_pool": 1})
    assert "stopped: the model needs the data of a tensor at " in sentence and rest.startswith("stopped: ")


def test_options_are_those_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXFUSE_STRICT", "1")  # would raise NotFusedError in place of the message
    _, table = failure(ConvGeluPool(), (image(),), {"conv_gelu_pool": 1}, options={"fxfuse.select": "never", "max_autotune": False})
    assert 'fxfuse.select is "never"' in table
    sentence, _ = failure(ConvGeluPool(), (image(),), {"conv_gelu_pool": 1}, options={"fxfuse.passes": ["conv_norm_pool_gelu"]})
    assert sentence.endswith(": fxfuse.passes leaves it out")
    monkeypatch.setenv("FXFUSE_SELECT", "always")
    assert_fused(ConvGeluPool(), (image(),), {"conv_gelu_pool": 1})
    with pytest.raises(OptionError, match="unknown option 'fxfuse.selct'"):
        assert_fused(ConvGeluPool(), (image(),), {}, options={"fxfuse.selct": "always"})
    with pytest.raises(RuntimeError, match="max_autotun"):
        assert_fused(ConvGeluPool(), (image(),), {}, options={"max_autotun": True})


@pytest.mark.parametrize(
    ("expected", "sentence"),
    [
        ({"conv_gelu": 1}, "'conv_gelu' is no chain; the chains are conv_gelu_pool, conv_norm_pool_gelu"),
        ({"conv_gelu_pool": -1}, "conv_gelu_pool=-1: a chain is expected a number of times"),
        ({"conv_gelu_pool": True}, "conv_gelu_pool=True: a chain is expected a number of times"),
    ],
)
def test_expectations_that_make_no_sense(expected: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        assert_fused(ConvGeluPool(), (image(),), expected)


@pytest.mark.parametrize("expected", [["conv_gelu_pool"], "conv_gelu_pool", 1])
def test_expectations_that_are_no_mapping(expected: object) -> None:
    with pytest.raises(TypeError, match=r"is no mapping; give how often each chain is fused, such as {'conv_gelu_pool': 1}"):
        assert_fused(ConvGeluPool(), (image(),), expected)


def test_arguments() -> None:
    def run(x: torch.Tensor, *, model: nn.Module) -> torch.Tensor:
        return model(x)

    assert_fused(ConvGeluPool(), image(), {"conv_gelu_pool": 1}, options=ALWAYS)
    assert_fused(run, [image()], {"conv_gelu_pool": 1}, kwargs={"model": ConvGeluPool()}, options=ALWAYS)


def test_dynamic_sizes_are_those_of_the_inputs() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return y + model(x * 2)

    model = ConvGeluPool()
    for given, graphs in ((model, 1), (run, 2)):
        report = assert_fused(given, image(), {"conv_gelu_pool": graphs}, options=ALWAYS, dynamic=True)
        for fused in report.fused:
            batch, channels, *_ = fused.shapes.partition("]")[0].strip("[").split(", ")
            assert batch.startswith("s") and channels == "4", fused.shapes
            assert "the weight's shape is not constant" not in str(fused.candidates)
    report = assert_fused(model, image(), {"conv_gelu_pool": 1}, options=ALWAYS)
    assert report.fused[0].shapes.startswith("[2, 4, 8, 8]")


def test_listeners_hear_of_it() -> None:
    heard: list[tuple[Report, str]] = []

    def listener(report: Report, how: str) -> None:
        heard.append((report, how))

    listeners.add(listener)
    try:
        report = assert_fused(ConvNormPoolGelu(), torch.ones(2, 4, 6, 6, 12), {"conv_norm_pool_gelu": 1}, options=ALWAYS)
        with pytest.raises(AssertionError):
            assert_fused(ConvGeluPool(), (image(),), {"conv_gelu_pool": 2}, options=ALWAYS)
    finally:
        listeners.remove(listener)
    assert len(heard) == 2 and heard[0] == (report, "explained")
    assert_fused(ConvGeluPool(), (image(),), {}, options=ALWAYS)
    assert len(heard) == 2
