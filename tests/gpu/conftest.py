"""What every GPU test starts from: the CUDA library loaded, the same random numbers."""

from __future__ import annotations

import pytest
import torch

from fxfuse import library


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    library.load("cuda")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
