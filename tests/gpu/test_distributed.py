"""Training on ranks with a GPU each through NCCL, and on two ranks that may share one, which NCCL refuses, through gloo."""

from __future__ import annotations

import pytest
import ranks
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.large]

both_ways = pytest.mark.parametrize("parallel", [ranks.DDP, ranks.FSDP], ids=["DDP", "FSDP2"])


@both_ways
def test_one_rank(parallel: str) -> None:
    ranks.assert_gradients_are_eagers(parallel, backend="nccl", device="cuda", world=1)


@both_ways
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_ranks(parallel: str) -> None:
    ranks.assert_gradients_are_eagers(parallel, backend="nccl", device="cuda")


def test_two_ranks_through_gloo() -> None:
    ranks.assert_gradients_are_eagers(ranks.DDP, backend="gloo", device="cuda")  # with FSDP2 the processes end without a word
