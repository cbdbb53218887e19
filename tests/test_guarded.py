"""Mistakes in a chain: each is named (chain, function, file:line, what it did, what it should), kept to its candidate, and an error under strict.

Every mistake is tried in a graph that holds a built-in chain as well, which is fused all the same, and whose original is left as it was.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chains import RELU, Net, conv_relu, relu_op, to_op
from models import dynamo_graph, fake_mode, fuse, fused_nodes, gelu_pool
from torch import fx

import fxfuse
from fxfuse.guarded import MOST_CONDITIONS, PassError

pytestmark = pytest.mark.usefixtures("nothing_registered")
HERE = re.escape(__file__)
Pairs = Iterator[Any]


@torch.library.custom_op("fxfuse_tests::fake_raises", mutates_args=())
def fake_raises(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@fake_raises.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no fake for this")


@torch.library.custom_op("fxfuse_tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("fxfuse_tests::two", mutates_args=())
def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clone(), x.clone()


@two.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def raises(conv: Any, relu: Any) -> Pairs:
    yield True, ""
    yield conv.shape[0] > 1, "a call has no shape"


def never_ends(conv: Any, relu: Any) -> Pairs:
    return ((True, str(number)) for number in itertools.count())


def no_pair(conv: Any, relu: Any) -> Pairs:
    yield True


def no_bool(conv: Any, relu: Any) -> Pairs:
    yield 1, "sentence"


def no_sentence(conv: Any, relu: Any) -> Pairs:
    yield False, " "


def symbolic(conv: Any, relu: Any) -> Pairs:
    yield conv.value.shape[0] > 1, "one image"


def wrong_cost(conv: Any, relu: Any) -> Any:
    return 3


def cost_raises(conv: Any, relu: Any) -> Any:
    return {}["bytes"]


def no_backward(training: Any, conv: Any, relu: Any) -> Any:
    return training


def one_byte(conv: Any, relu: Any) -> Any:
    return fxfuse.Cost(op=fxfuse.Work(bytes=1, kernels=1), inductor=fxfuse.Work(bytes=9, kernels=1))


def another_shape(emit: Any, conv: Any, relu: Any) -> fx.Node:
    return emit(torch.sum, conv.result)


def another_dtype(emit: Any, conv: Any, relu: Any) -> fx.Node:
    return emit(torch.ops.aten.to.dtype, conv.result, torch.float64)


def nothing(emit: Any, conv: Any, relu: Any) -> None:
    emit(relu_op, conv.result)


def a_node_of_the_model(emit: Any, conv: Any, relu: Any) -> fx.Node:
    return conv.result


def a_tuple(emit: Any, conv: Any, relu: Any) -> fx.Node:
    return emit(two, conv.result)


def replace_raises(emit: Any, conv: Any, relu: Any) -> fx.Node:
    emit(relu_op, conv.result)
    raise KeyError("halfway")


def fx_habit(emit: Any, conv: Any, relu: Any) -> fx.Node:
    with relu.node.graph.inserting_before(relu.node):
        return relu.node.graph.call_function(torch.relu, (conv.result,))


def reads_elsewhere(emit: Any, conv: Any, relu: Any) -> fx.Node:
    return emit(relu_op, fx.Graph().placeholder("elsewhere"))


def raises_in_a_fake(emit: Any, conv: Any, relu: Any) -> fx.Node:
    return emit(fake_raises, conv.result)


def has_no_fake(emit: Any, conv: Any, relu: Any) -> fx.Node:
    return emit(no_fake, conv.result)


def writes(emit: Any, conv: Any, relu: Any) -> fx.Node:
    return emit(torch.ops.aten.relu_.default, conv.result)


def adapts_to_nothing(args: Any) -> None:
    return None


def adapt_raises(args: Any) -> Any:
    return args["weight"]


def bad_word(adapt: Callable[..., Any]) -> fxfuse.Chain:
    return conv_relu(words=(fxfuse.Word("relu", fxfuse.Spelling(torch.ops.aten.relu.default, F.relu, adapt=adapt, also={"inplace": (False,)})),))


def requiring(requires: Callable[..., Any]) -> fxfuse.Chain:
    return fxfuse.Chain("conv_relu", conv_relu().steps, requires, conv_relu().implementations, words=(RELU,))


SHOULD_YIELD = "it should yield pairs of a bool and the sentence for when it is False"
MISTAKES: dict[str, tuple[fxfuse.Chain, str]] = {
    "requires raises": (requiring(raises), rf"its requires at {HERE}:\d+ raises AttributeError: conv has no argument shape; .*; {SHOULD_YIELD}"),
    "requires never ends": (requiring(never_ends), rf"its requires at {HERE}:\d+ yields more than {MOST_CONDITIONS} conditions; it should come to an end"),
    "requires yields no pair": (requiring(no_pair), rf"its requires at {HERE}:\d+ yields True; {SHOULD_YIELD}"),
    "requires yields no bool": (requiring(no_bool), rf"its requires at {HERE}:\d+ yields \(1, 'sentence'\); {SHOULD_YIELD}"),
    "requires yields no sentence": (requiring(no_sentence), rf"its requires at {HERE}:\d+ yields False with an empty sentence"),
    "requires returns a bool": (requiring(lambda conv, relu: True), rf"its requires at {HERE}:\d+ returns True; {SHOULD_YIELD}"),
    "takes raises": (conv_relu(takes=raises), rf"its takes at {HERE}:\d+ raises AttributeError"),
    "takes never ends": (conv_relu(takes=never_ends), rf"its takes at {HERE}:\d+ yields more than"),
    "cost raises": (conv_relu(cost=cost_raises), rf"its cost at {HERE}:\d+ raises KeyError: 'bytes'; it should return a fxfuse.Cost"),
    "cost is a number": (conv_relu(cost=wrong_cost), rf"its cost at {HERE}:\d+ returns 3; it should return a fxfuse.Cost"),
    "replace raises": (conv_relu(replace=replace_raises), rf"its replace at {HERE}:\d+ raises KeyError: 'halfway'; it should call emit"),
    "replace gives another shape": (
        conv_relu(replace=another_shape),
        rf"its replace at {HERE}:\d+ gives torch.float32\[\] on cpu by .*sum.*; the chain gives torch.float32\[2, 8, 6, 6\] on cpu",
    ),
    "replace gives another dtype": (conv_relu(replace=another_dtype), r"gives torch.float64\[2, 8, 6, 6\] on cpu by .*; the chain gives torch.float32\["),
    "replace returns nothing": (conv_relu(replace=nothing), rf"its replace at {HERE}:\d+ returns None; it should return the node that stands for"),
    "replace returns a node of the model": (conv_relu(replace=a_node_of_the_model), "returns conv2d.*, a node of another graph; it should return the node"),
    "replace returns a tuple": (conv_relu(replace=a_tuple), "returns two_default, whose value is a tuple; it should be a tensor"),
    "replace writes to the model's graph": (conv_relu(replace=fx_habit), "adds relu_1 to the model's own graph; it should call emit"),
    "an op reads a node of another graph": (conv_relu(replace=reads_elsewhere), "emits an op that reads elsewhere, a node of another graph"),
    "a fake raises": (
        conv_relu(replace=raises_in_a_fake),
        rf"its replace at {HERE}:\d+ emits fxfuse_tests.fake_raises.default, which raises ValueError: no fake for this; its fake should take",
    ),
    "an op without a fake": (conv_relu(replace=has_no_fake), "emits fxfuse_tests.no_fake.default, which raises .*; its fake should take"),
    "an op that writes to its arguments": (conv_relu(replace=writes), "emits aten.relu_.default, which writes to its arguments; it should emit ops that"),
    "adapt raises": (bad_word(adapt_raises), rf"its adapt of relu at {HERE}:\d+ raises KeyError: 'weight'; it should turn a dict of arguments into another"),
    "adapt returns nothing": (bad_word(adapts_to_nothing), rf"its adapt of relu at {HERE}:\d+ returns None; it should turn a dict"),
}  # fmt: skip


def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.relu(torch.conv2d(x, w)), gelu_pool(torch.conv2d(x, w))


def graph_of_both() -> fx.GraphModule:
    with fake_mode(), torch.no_grad():
        return dynamo_graph(run, torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3))


@pytest.mark.parametrize(("chain", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_and_hinders_nobody(chain: fxfuse.Chain, sentence: str, caplog: pytest.LogCaptureFixture) -> None:
    gm = graph_of_both()
    before = str(gm.graph)
    with fxfuse.register(chain), torch.no_grad():
        graph, report = fuse(gm)
    (declined,) = report.declined
    assert declined.chain == "conv_relu" and re.search(f"a mistake in the chain conv_relu: .*{sentence}", declined.reason), declined.reason
    assert "\n" not in declined.reason and declined.reason in caplog.text
    assert [record.chain for record in report.fused] == ["conv_gelu_pool"]
    assert len(fused_nodes(graph)) == 1 and not [node for node in graph.nodes if "fxfuse_tests" in str(node.target)]
    graph.lint()
    assert str(gm.graph) == before
    gm.graph.lint()


@pytest.mark.parametrize(("chain", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_an_error_under_strict(chain: fxfuse.Chain, sentence: str) -> None:
    gm = graph_of_both()
    before = str(gm.graph)
    with fxfuse.register(chain), torch.no_grad(), pytest.raises(PassError, match=sentence):
        fuse(gm, strict=True)
    assert str(gm.graph) == before


def test_a_condition_on_a_size_that_varies_is_a_mistake_and_installs_no_guard() -> None:
    with torch.no_grad(), fxfuse.register(requiring(symbolic)):
        gm = dynamo_graph(Net(), torch.zeros(2, 4, 8, 8), dynamic=True)
        _, report = fuse(gm)
    assert re.search(r"yields s\d+ > 1, which depends on sizes that vary; it should ask torch.fx.experimental", report.declined[0].reason)


def test_the_other_matches_of_a_chain_that_fails_once_are_fused() -> None:
    calls = itertools.count()

    def fails_once(emit: Any, conv: Any, relu: Any) -> fx.Node:
        if conv.value.shape[1] == 8 and next(calls) == 0:
            raise KeyError("the first time")
        return to_op(emit, conv, relu)

    def three(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [F.relu(torch.conv2d(x, w)) for _ in range(3)]

    with fake_mode(), torch.no_grad(), fxfuse.register(conv_relu(replace=fails_once)):
        _, report = fuse(dynamo_graph(three, torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3)))
    assert (len(report.fused), len(report.declined)) == (2, 1)


def test_a_replacement_that_holds_the_chain_again_is_made_once() -> None:
    """The pass goes over the graph that it is given, not over what it made of it."""
    emitted: list[fx.Node] = []

    def itself(emit: Any, conv: Any, relu: Any) -> fx.Node:
        emitted.append(conv.node)
        return emit(F.relu, emit(torch.conv2d, conv.input, conv.weight, conv.bias))

    with fxfuse.register(conv_relu(replace=itself)), torch.no_grad():
        graph, report = fuse(graph_of_both())
    assert len(emitted) == 1 and [record.chain for record in report.fused] == ["conv_relu", "conv_gelu_pool"]
    assert len([node for node in graph.nodes if node.target is F.relu]) == 1
    graph.lint()


def test_a_mistake_in_a_backward() -> None:
    own = conv_relu(op="fxfuse_tests::trained", cost=one_byte, backward_cost=no_backward)
    with fxfuse.register(own):
        _, report = fuse(dynamo_graph(Net(), torch.zeros(2, 4, 8, 8)))
    assert re.search(rf"its backward_cost at {HERE}:\d+ returns Training\(.*; it should return a fxfuse.BackwardCost", report.declined[0].reason)


def test_keywords_go_into_the_node() -> None:
    def total(emit: Any, conv: Any, relu: Any) -> fx.Node:
        return emit(torch.mul, conv.result, emit(torch.sum, conv.result, dtype=torch.float32))

    with fxfuse.register(conv_relu(replace=total)), torch.no_grad():
        graph, report = fuse(graph_of_both())
    assert len(report.fused) == 2
    assert [node.kwargs for node in graph.nodes if node.target is torch.sum] == [{"dtype": torch.float32}]


def test_what_the_replacement_reads_of_the_chain_is_kept() -> None:
    with fxfuse.register(conv_relu()), torch.no_grad():
        graph, _ = fuse(graph_of_both())
    assert len([node for node in graph.nodes if node.target is torch.conv2d]) == 2
    assert not [node for node in graph.nodes if node.target is F.relu]


def test_a_graph_that_needs_a_gradient_is_declined_as_for_every_chain() -> None:
    with fxfuse.register(conv_relu()):
        _, report = fuse(dynamo_graph(Net(), torch.zeros(2, 4, 8, 8)))
    assert not report.fused and "torch.no_grad()" in report.declined[0].reason
