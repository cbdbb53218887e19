"""The matcher over chains of its own: steps in order, optional steps, alternatives, and how far a candidate got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import ConvGeluPool, dynamo_graph, fake_mode, traced_graph
from torch import nn

from fxfuse.chain import Chain, Step, first_failure
from fxfuse.match import Match, Miss, find
from fxfuse.view import GraphView


def chain(*steps: Step, dims: tuple[int, ...] = (1, 2, 3)) -> Chain:
    return Chain("test", (Step("conv", "conv"), *steps), requires=lambda **calls: (), implementations=(), dims=dims)


ADD_THEN_GELU = chain(Step("add", "add", optional=True), Step("gelu", "gelu"), Step("pool", "adaptive_avg_pool", "mean"))


def found(run: Callable[..., Any], of: Chain = ADD_THEN_GELU) -> list[Match | Miss]:
    with fake_mode(), torch.no_grad():
        gm = dynamo_graph(run, torch.zeros(2, 4, 8, 8), torch.zeros(8, 4, 3, 3))
    return list(find(GraphView(gm.graph), of))


def test_steps_are_found_by_name_and_an_absent_optional_one_is_none() -> None:
    (match,) = found(lambda x, w: F.gelu(torch.conv2d(x, w)).mean((2, 3)))
    assert {name: call and call.word for name, call in match.calls.items()} == {"conv": "conv", "add": None, "gelu": "gelu", "pool": "mean"}
    assert [call.word for call in match.present] == ["conv", "gelu", "mean"]
    assert (match.anchor.word, match.last.word) == ("conv", "mean")
    assert match.nodes == {call.node for call in match.present}


def test_an_optional_step_is_taken_where_it_is_there() -> None:
    (match,) = found(lambda x, w: F.adaptive_avg_pool2d(F.gelu(1 + torch.conv2d(x, w)), 1))
    assert [(call.word, call.by) for call in match.present] == [
        ("conv", "input"),
        ("add", "other"),
        ("gelu", "self"),
        ("adaptive_avg_pool", "self"),
    ]


def test_a_miss_says_how_far_it_got_and_what_stood_there() -> None:
    (miss,) = found(lambda x, w: F.gelu(torch.conv2d(x, w) + 1).sum())
    assert (miss.reached, miss.call.word) == ("gelu", "gelu")
    assert miss.reason == "gelu is followed by sum; the chain goes on with adaptive_avg_pool or mean"
    (miss,) = found(lambda x, w: F.gelu((torch.conv2d(x, w) + 1).relu()).mean((2, 3)))
    assert (miss.reached, miss.reason) == ("add", "add is followed by relu; the chain goes on with gelu")


def test_an_optional_step_alone_makes_no_candidate() -> None:
    assert found(lambda x, w: torch.conv2d(x, w) + 1) == []
    assert found(lambda x, w: (torch.conv2d(x, w) + 1).relu()) == []


def test_a_chain_with_two_other_ops_in_it_is_a_near_miss_and_one_with_three_is_none() -> None:
    (miss,) = found(lambda x, w: F.gelu(torch.conv2d(x, w).relu().sin()).mean((2, 3)))
    assert (miss.reached, miss.reason) == ("conv", "conv is followed by relu; the chain goes on with gelu")
    (miss,) = found(lambda x, w: F.gelu(torch.conv2d(x, w).relu()).sin().mean((2, 3)))
    assert (miss.reached, miss.reason) == ("conv", "conv is followed by relu; the chain goes on with gelu")
    assert found(lambda x, w: F.gelu(torch.conv2d(x, w).relu().sin().cos()).mean((2, 3))) == []
    assert found(lambda x, w: F.gelu(torch.conv2d(x, w).relu())) == []


def test_what_another_anchor_makes_is_not_near() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.conv2d(torch.conv2d(x, w).relu(), w.transpose(0, 1))).mean((2, 3))

    (match,) = found(run)
    assert isinstance(match, Match)


def test_a_convolution_that_reaches_into_a_match_by_way_of_another_op_is_no_near_miss() -> None:
    (match,) = found(lambda x, w: F.gelu(torch.conv2d(x, w) + torch.conv2d(x, w + 1).relu()).mean((2, 3)))
    assert isinstance(match, Match)


def test_identities_between_steps_are_part_of_the_path_and_no_step() -> None:
    (match,) = found(lambda x, w: F.dropout(F.gelu(torch.conv2d(x, w).clone()), 0.5, False).contiguous().mean((2, 3)))
    assert [call.word for call in match.path] == ["conv", "clone", "gelu", "dropout", "contiguous", "mean"]
    assert [call.word for call in match.present] == ["conv", "gelu", "mean"]
    assert match.nodes == {node for call in match.path for node in call.nodes}


def test_the_sentence_names_what_stands_behind_identities_and_why_one_is_none() -> None:
    (miss,) = found(lambda x, w: F.gelu(torch.conv2d(x, w)).clone().contiguous().relu().mean((2, 3)))
    assert miss.reason == "gelu is followed by relu; the chain goes on with adaptive_avg_pool or mean"
    (miss,) = found(lambda x, w: F.dropout(F.gelu(torch.conv2d(x, w)), 0.25).mean((2, 3)))
    assert miss.reason == "gelu is followed by dropout (p=0.25, in training); the chain goes on with adaptive_avg_pool or mean"


def test_a_module_that_stands_there_is_named_by_its_class() -> None:
    model = ConvGeluPool()
    hooked = ConvGeluPool()
    hooked.pool.register_forward_hook(lambda module, args, result: 2 * result)
    model.pool = nn.AdaptiveMaxPool2d(1)
    (miss,) = find(GraphView(traced_graph(model, torch.zeros(2, 4, 8, 8)).graph), ADD_THEN_GELU)
    assert miss.reason == "gelu is followed by AdaptiveMaxPool2d; the chain goes on with adaptive_avg_pool or mean"
    (miss,) = find(GraphView(traced_graph(hooked, torch.zeros(2, 4, 8, 8)).graph), ADD_THEN_GELU)
    followed = "gelu is followed by AdaptiveAvgPool2d with hooks or a forward of its own"
    assert miss.reason == f"{followed}; the chain goes on with adaptive_avg_pool or mean"


def test_a_long_list_of_followers_is_cut() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y = F.gelu(torch.conv2d(x, w))
        return [
            f(y) for f in (torch.sin, torch.cos, torch.tan, torch.exp, torch.log, torch.sqrt, torch.sinh, torch.cosh, torch.tanh, torch.abs)
        ]

    (miss,) = found(run)
    assert "sin" in miss.reason and "abs" not in miss.reason


def test_an_anchor_that_no_step_follows_is_no_candidate() -> None:
    assert found(lambda x, w: torch.conv2d(x, w).relu()) == []
    assert found(lambda x, w: torch.conv2d(x, w)) == []


def test_an_anchor_of_other_dims_is_no_candidate() -> None:
    of = chain(Step("gelu", "gelu"), dims=(1, 3))
    assert found(lambda x, w: F.gelu(torch.conv2d(x, w)), of) == []


def test_candidates_come_in_graph_order() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = torch.conv2d(x, w), torch.conv2d(x + 1, w), torch.conv2d(x + 2, w)
        return F.gelu(third).mean((2, 3)), F.gelu(first).mean((2, 3)), F.gelu(second)

    candidates = found(run)
    assert [type(candidate) for candidate in candidates] == [Match, Miss, Match]


def test_a_value_written_in_place_is_followed() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(x, w)
        y.add_(1)
        return F.gelu(y).mean((2, 3))

    (match,) = found(run)
    assert match.calls["add"].node.target == "add_"


def test_the_first_failing_condition_is_the_one_that_is_told() -> None:
    def conditions():
        yield True, "first"
        yield False, "second"
        raise AssertionError("a later condition may rely on the ones before it")

    assert first_failure(conditions()) == "second"
    assert first_failure([(True, "only")]) is None
