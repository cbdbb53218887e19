"""Chains from outside: what `register` takes and refuses, how long a chain is there, which one wins, and that it counts as built-in ones do."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chains import RELU, SIN, Net, chain, conv_relu, implementation, of_steps, to_trained
from models import ConvGeluPool, dynamo_graph, fake_mode, fuse, reasons, traced_graph
from torch import fx, nn

import fxfuse
from fxfuse import choose, engine, registry
from fxfuse.chain import Chain, builtin_chains, chain_names, chains
from fxfuse.check import check
from fxfuse.options import OptionError, Options, split

pytestmark = pytest.mark.usefixtures("nothing_registered")
BUILT_IN = tuple(chain.name for chain in builtin_chains())


def fused_names(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if getattr(node.target, "namespace", "") == "fxfuse_tests"]


def graph_of(model: Callable[..., Any] | None = None) -> fx.GraphModule:
    with fake_mode(), torch.no_grad():
        return dynamo_graph(model or Net(), torch.zeros(2, 4, 8, 8))


def test_a_registered_chain_is_there_until_it_is_removed() -> None:
    registration = fxfuse.register(conv_relu())
    assert chain_names() == ("conv_relu", *BUILT_IN)
    registration.remove()
    registration.remove()
    assert chain_names() == BUILT_IN
    with fxfuse.register(registration.chain):
        registration.remove()
        assert "conv_relu" in chain_names(), "this one is another registration"


def test_a_with_block_takes_it_away_again_whatever_happens() -> None:
    with pytest.raises(ZeroDivisionError), fxfuse.register(conv_relu()) as registration:
        assert registration.chain in chains()
        raise ZeroDivisionError
    assert chain_names() == BUILT_IN


def test_it_is_fused_with_its_own_op_and_needs_no_library_of_fxfuses() -> None:
    with fxfuse.register(conv_relu()), torch.no_grad():
        graph, report = engine.fuse(graph_of().graph, Options(), unavailable=lambda device: "no library")
    (fused,) = report.fused
    assert (fused.chain, fused.op, fused.choice) == ("conv_relu", "fxfuse_tests::relu", "no cost given: taken wherever it can be")
    assert fused.shapes == "[2, 4, 8, 8] -> [2, 8, 6, 6] -> [2, 8, 6, 6]"
    assert fused_names(graph) == ["fxfuse_tests.relu.default"] and not report.declined
    with torch.no_grad():
        assert not fuse(graph_of())[1].fused, "the chain is gone"


def test_a_chain_of_ops_of_both_kinds_loses_those_whose_library_is_missing() -> None:
    both = dataclasses.replace(conv_relu(), implementations=(implementation("gelu_pool"), implementation()))
    with fxfuse.register(both), torch.no_grad():
        _, report = engine.fuse(graph_of().graph, Options(), unavailable=lambda device: f"no library for {device}")
    (fused,) = report.fused
    assert fused.op == "fxfuse_tests::relu"
    assert [(c.op, c.verdict) for c in fused.candidates][0] == ("gelu_pool", "no library for cpu")


def test_the_option_passes_knows_it_while_it_is_there() -> None:
    given = {"fxfuse.passes": "conv_relu"}
    with fxfuse.register(conv_relu()):
        options, _ = split(given, chain_names())
        assert options.passes == ("conv_relu",)
        assert not fuse(graph_of(), passes=("conv_gelu_pool",))[1].fused
    with pytest.raises(OptionError, match="'conv_relu', which is no chain; the chains are conv_gelu_pool, conv_norm_pool_gelu"):
        split(given, chain_names())


def named(name: str, emitted: list[str]) -> Chain:
    """A chain over the nodes of conv_gelu_pool that notes that it was emitted."""

    def replace(emit: Any, conv: Any, gelu: Any, pool: Any) -> fx.Node:
        emitted.append(name)
        return emit(F.adaptive_avg_pool2d, emit(F.gelu, conv.result), 1)

    return of_steps(name, ("conv", "gelu", "adaptive_avg_pool"), replace=replace, names=("conv", "gelu", "pool"))


def test_of_two_that_want_the_same_nodes_the_latest_registered_wins_and_built_in_ones_come_last() -> None:
    emitted: list[str] = []
    with torch.no_grad(), fxfuse.register(named("first", emitted)):
        with fxfuse.register(named("second", emitted)):
            _, report = fuse(graph_of(ConvGeluPool()), strict=True)
        assert [record.chain for record in report.fused] == ["second"] and emitted == ["second"]
        assert [record.chain for record in report.declined] == ["first", "conv_gelu_pool"]
        assert all("already belongs to another fused chain, second" in reason for reason in reasons(report))
        assert [record.chain for record in fuse(graph_of(ConvGeluPool()))[1].fused] == ["first"]
    assert [record.chain for record in fuse(graph_of(ConvGeluPool()))[1].fused] == ["conv_gelu_pool"]


def test_a_registered_chain_that_declines_leaves_the_nodes_to_the_next() -> None:
    def never(**calls: Any) -> Iterator[tuple[bool, str]]:
        yield False, "not today"

    with torch.no_grad(), fxfuse.register(dataclasses.replace(named("picky", []), requires=never)):
        _, report = fuse(graph_of(ConvGeluPool()))
    assert [record.chain for record in report.fused] == ["conv_gelu_pool"]
    assert [(record.chain, record.reason) for record in report.declined] == [("picky", "not today")]


def test_two_libraries_may_bring_the_same_word_each_in_its_own_way() -> None:
    """Words are the chain's own: here one library's `act` is relu and the other's is sin."""
    one = conv_relu("one", words=(fxfuse.Word("act", fxfuse.Spelling(torch.ops.aten.relu.default, F.relu, also={"inplace": (False,)})),), word="act")
    other = conv_relu("other", words=(fxfuse.Word("act", fxfuse.Spelling(torch.ops.aten.sin.default, torch.sin)),), word="act")
    same = conv_relu("same")

    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.relu(torch.conv2d(x, w)), torch.sin(torch.conv2d(x, w))

    with fake_mode(), torch.no_grad():
        gm = dynamo_graph(run, torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3))
        with fxfuse.register(one), fxfuse.register(other):
            assert sorted(record.chain for record in fuse(gm)[1].fused) == ["one", "other"]
        with fxfuse.register(one), fxfuse.register(same):
            assert [record.chain for record in fuse(gm)[1].fused] == ["same"]


BYTES = {1: ("fused", "moves 1 bytes, Inductor 8; saves 88%, at least the 20% asked for"), 8: ("declined", "saves 0%, less than the 20% asked for")}


@pytest.mark.parametrize(("moved", "expected"), BYTES.items())
def test_a_cost_that_is_given_decides(moved: int, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(conv: Any, relu: Any) -> fxfuse.Cost:
        return fxfuse.Cost(op=fxfuse.Work(bytes=moved, kernels=1), inductor=fxfuse.Work(bytes=8, kernels=1))

    monkeypatch.setattr(choose, "RATES", {})
    with torch.no_grad(), fxfuse.register(conv_relu(cost=cost)):
        _, report = fuse(graph_of(), select="auto")
    (record,) = getattr(report, expected[0])
    assert expected[1] in (record.choice if expected[0] == "fused" else record.reason)


IN_TRAINING = {
    "none given": (None, "fused", "moves 1 bytes in the forward of a training step, Inductor 8; saves 88%"),
    "small": (fxfuse.BackwardCost(fxfuse.Work(2, 1), fxfuse.Work(8, 1)), "fused", "moves 3 bytes in a training step, Inductor 16; saves 81%"),
    "large": (fxfuse.BackwardCost(fxfuse.Work(15, 1), fxfuse.Work(8, 1)), "declined", "moves 16 bytes in a training step, Inductor 16; saves 0%"),
}


@pytest.mark.parametrize(("backward", "verdict", "sentence"), IN_TRAINING.values(), ids=IN_TRAINING)
def test_a_cost_in_training(backward: Any, verdict: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that says nothing of its backward is weighed by its forward."""
    asked = []

    def cost(conv: Any, relu: Any) -> fxfuse.Cost:
        return fxfuse.Cost(op=fxfuse.Work(bytes=1, kernels=1), inductor=fxfuse.Work(bytes=8, kernels=1))

    def adds(training: fxfuse.Training, conv: Any, relu: Any) -> fxfuse.BackwardCost:
        asked.append(training.needed)
        return backward

    monkeypatch.setattr(choose, "RATES", {})
    own = conv_relu(op="fxfuse_tests::trained", replace=to_trained, cost=cost, backward_cost=adds if backward else None)
    with fxfuse.register(own):
        graph, report = fuse(dynamo_graph(Net(), torch.zeros(2, 4, 8, 8)), select="auto")
    (record,) = getattr(report, verdict)
    assert sentence in (record.choice if verdict == "fused" else record.reason)
    assert asked == ([{"conv.weight", "conv.bias"}] if backward else [])
    assert [str(node.target) for node in graph.nodes if "fxfuse_tests" in str(node.target)] == (
        ["fxfuse_tests.trained_training.default"] if verdict == "fused" else []
    )


def test_an_op_that_returns_a_tuple_is_read_by_its_first_entry() -> None:
    def norm(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.native_layer_norm(torch.conv2d(x, w), [6], None, None, 1e-5)

    def to_relu(emit: Any, conv: Any, layer_norm: Any) -> fx.Node:
        return emit(torch.ops.aten.relu.default, conv.result)

    first = traced_graph(lambda x, w: norm(x, w)[0], torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3))
    second = traced_graph(lambda x, w: norm(x, w)[1], torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3))
    with torch.no_grad(), fxfuse.register(of_steps("conv_norm", ("conv", "layer_norm"), replace=to_relu)):
        graph, report = fuse(first, passes=("conv_norm",))
        assert len(report.fused) == 1 and "native_layer_norm" not in str(graph)
        _, report = fuse(second, passes=("conv_norm",))
    assert reasons(report) == ["the result of layer_norm is a tuple, of which the first entry is not read"]


def test_an_anchor_need_not_be_a_convolution() -> None:
    linear = fxfuse.Word("linear", fxfuse.Spelling(torch.ops.aten.linear.default, F.linear, modules={nn.Linear: ("weight", "bias")}), through=("input",))

    def replace(emit: Any, linear: Any, relu: Any) -> fx.Node:
        return emit(torch.ops.fxfuse_tests.relu.default, linear.result)

    made = of_steps("linear_relu", ("linear", "relu"), words=(linear, RELU), replace=replace)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    with torch.no_grad(), fxfuse.register(made):
        for gm in (dynamo_graph(model, torch.zeros(3, 8)), traced_graph(model, torch.zeros(3, 8))):
            graph, report = fuse(gm)
            assert [record.shapes for record in report.fused] == ["[3, 8] -> [3, 4] -> [3, 4]"]
            assert fused_names(graph) == ["fxfuse_tests.relu.default"]
        _, report = fuse(dynamo_graph(lambda x, w: (y := F.linear(x, w)).relu() + y, torch.zeros(3, 8), torch.zeros(4, 8)))
        assert "the result of linear is also used by add" in reasons(report)[0]


def test_a_write_between_names_the_anchor() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = F.relu(x)
        x.add_(1)
        return y.sin()

    with torch.no_grad(), fxfuse.register(of_steps("relu_sin", ("relu", "sin"), words=(RELU, SIN))):
        _, report = fuse(dynamo_graph(run, torch.zeros(3)))
    assert "may write to l_x_ between the relu and sin" in reasons(report)[0]


ALIASES = {
    "an in-place step that writes to the input": (lambda x: x.view(-1).sin_(), "the in-place sin writes to l_x_ through a view of it"),
    "a result that is a view of the input": (lambda x: x.view(-1).view((2, -1)), "the chain's result is a view of l_x_"),
}


@pytest.mark.parametrize(("run", "sentence"), ALIASES.values(), ids=ALIASES)
def test_words_that_are_views_neither_write_to_the_chains_input_nor_return_it(run: Callable[..., Any], sentence: str) -> None:
    view = fxfuse.Word("view", fxfuse.Spelling(torch.ops.aten.reshape.default, methods=("view",)))
    with fake_mode(), torch.no_grad(), fxfuse.register(of_steps("views", ("view", ("sin", "view")), (view, SIN), names=("view", "then"))):
        _, report = fuse(dynamo_graph(run, torch.zeros(4, 4)))
    assert not report.fused and sentence in reasons(report)[0]


def test_chains_come_and_go_in_one_thread_while_another_looks_for_them() -> None:
    gm, done, failures = graph_of(), threading.Event(), []

    def come_and_go() -> None:
        try:
            for index in range(300):
                with fxfuse.register(conv_relu(f"conv_relu_{index}")):
                    pass
        finally:
            done.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    while not done.is_set():
        _, report = fuse(gm)
        failures += [record for record in report.declined if "mistake" in record.reason]
    thread.join()
    assert not failures and chain_names() == BUILT_IN


def test_many_threads_register_at_once_and_none_is_lost() -> None:
    made = [conv_relu(f"chain_{index}") for index in range(16)]
    threads = [threading.Thread(target=fxfuse.register, args=(one,)) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(registry.registered()) == set(made)


@pytest.mark.parametrize("built_in", builtin_chains(), ids=lambda chain: chain.name)
def test_chains_of_fxfuses_own_are_what_register_asks_for(built_in: Chain) -> None:
    check(built_in)


def test_a_name_that_is_taken_says_by_whom() -> None:
    with pytest.raises(fxfuse.RegistrationError, match="'conv_gelu_pool' is one of fxfuse's own; take another name"):
        fxfuse.register(conv_relu("conv_gelu_pool"))
    with fxfuse.register(conv_relu()), pytest.raises(fxfuse.RegistrationError, match=r"registered already: its functions are at .*chains.py:\d+;"):
        fxfuse.register(conv_relu())


def no_conv(relu: Any) -> Iterator[Any]:
    yield True, ""


def with_spelling(**fields: Any) -> Chain:
    return chain(words=(fxfuse.Word("relu", fxfuse.Spelling(torch.ops.aten.relu.default, **fields)),))


GOOD = conv_relu()
STEP = fxfuse.Step("conv", "conv")
BAD: dict[str, tuple[Any, str]] = {
    "not a chain": (object(), "takes a fxfuse.Chain; <object .* is a object"),
    "a name with a comma": (chain(name="a,b"), "its name is no Python identifier"),
    "version": (chain(version=3), "its version and its description are strings"),
    "one step": (chain(steps=(STEP,)), "its steps are not a tuple of at least two fxfuse.Step"),
    "steps in a list": (chain(steps=list(GOOD.steps)), "its steps are not a tuple"),
    "a step twice": (chain(steps=(STEP, fxfuse.Step("conv", "relu"))), "the step 'conv' needs a name of its own"),
    "a step that is emit": (chain(steps=(STEP, fxfuse.Step("emit", "relu"))), "is not 'emit'"),
    "a word nobody knows": (chain(steps=(STEP, fxfuse.Step("relu", "rellu"))), "nobody knows the word 'rellu' of the step 'relu' \\(the nearest is 'relu'\\)"),
    "a step without words": (chain(steps=(STEP, fxfuse.Step("relu"))), "nobody knows the word None"),
    "all optional": (chain(steps=(STEP, fxfuse.Step("relu", "relu", optional=True))), "at least one of the others must not be optional"),
    "dims of no convolution": (chain(steps=(fxfuse.Step("conv", "relu"), fxfuse.Step("relu", "relu")), dims=(2,)), "first step accepts relu; leave dims out"),
    "dims": (chain(dims=2), "its dims=2 are not a tuple of 1, 2 or 3"),
    "words": (chain(words=[RELU]), "are not a tuple of fxfuse.Word"),
    "a word without spellings": (chain(words=(fxfuse.Word("relu"),)), "the word 'relu' needs a string for its name and at least one"),
    "a built-in word": (chain(words=(RELU, fxfuse.Word("gelu", *RELU.spellings))), "there is a word 'gelu' already; take another name"),
    "a spelling of a built-in word": (
        chain(words=(RELU, fxfuse.Word("mine", fxfuse.Spelling(torch.ops.aten.gelu.default)))),
        "gelu.default is read as the word 'gelu' already; leave it out of 'mine'",
    ),
    "a packet for an overload": (chain(words=(fxfuse.Word("relu", fxfuse.Spelling(torch.ops.aten.relu)),)), "it takes an overload such as"),
    "through": (chain(words=(fxfuse.Word("relu", *RELU.spellings, through=("input",)),)), "flows through the word 'relu' by input, and aten.relu.default takes self"),
    "adapt": (chain(words=(fxfuse.Word("relu", fxfuse.Spelling(torch.ops.aten.relu.default, adapt=3)),)), "has adapt=3, which cannot be called"),
    "methods in a string": (with_spelling(methods="relu"), "has methods='relu'; give a tuple of names"),
    "modules in a tuple": (with_spelling(modules=(nn.ReLU,)), "has modules=.*; give a dict of types and tuples of attribute names"),
    "also without values": (with_spelling(also={"inplace": False}), "has also={'inplace': False}; give a dict of argument names and tuples of values"),
    "a word itself": (chain(steps=(STEP, fxfuse.Step("relu", RELU))), "the step 'relu' accepts words by their names; give 'relu', and the fxfuse.Word to"),
    "no implementations": (chain(implementations=()), "its implementations are not a tuple of at least one"),
    "an op twice": (chain(implementations=(implementation(), implementation())), "two of its implementations have the same op"),
    "an op nobody knows": (chain(implementations=(implementation("mine::relu"),)), "torch knows no op 'mine::relu'; define it with torch.library first"),
    "an op without namespace": (chain(implementations=(implementation("relu"),)), "torch knows no op 'relu'"),
    "requires without conv": (chain(requires=no_conv), r"its requires at .*test_registry.py:\d+ is not a function of conv, relu: got an unexpected"),
    "requires no function": (chain(requires=True), "its requires=True cannot be called"),
    "takes with another name": (chain(implementations=(implementation(takes=lambda conv, act: ()),)), "its takes at .* is not a function of conv, relu"),
    "replace without emit": (chain(implementations=(implementation(replace=lambda conv, relu: None),)), "its replace at .* is not a function of emit, conv, relu"),
    "backward_cost without training": (
        chain(implementations=(implementation(cost=lambda conv, relu: None, backward_cost=lambda conv, relu: None),)),
        "its backward_cost at .* is not a function of training, conv, relu",
    ),
    "backward_cost without cost": (
        chain(implementations=(implementation(backward_cost=lambda training, conv, relu: None),)),
        "the backward_cost of 'fxfuse_tests::relu' adds to a cost, and it has none",
    ),
    "cost with emit": (chain(implementations=(implementation(cost=lambda emit, conv, relu: None),)), "its cost at .* is not a function of conv, relu"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_nothing_is_registered(given: Any, sentence: str) -> None:
    with pytest.raises(fxfuse.RegistrationError, match=sentence) as raised:
        fxfuse.register(given)
    assert "\n" not in str(raised.value)
    assert chain_names() == BUILT_IN


def test_a_chain_that_is_good_is_registered() -> None:
    """What the bad ones are made from."""
    fxfuse.register(chain())
