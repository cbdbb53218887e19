"""Training on two GPUs through NCCL."""

from __future__ import annotations

import pytest
import ranks
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.large, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]


@pytest.mark.parametrize("parallel", [ranks.DDP, ranks.FSDP], ids=["DDP", "FSDP2"])
def test_gradients_on_two_gpus_are_eagers(parallel: str) -> None:
    ranks.assert_gradients_are_eagers(parallel, backend="nccl", device="cuda")
