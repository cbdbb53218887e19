"""Both headline models through `backend="fxfuse"`: what they became, and that the result is eager's.

    python examples/quickstart.py
"""

from __future__ import annotations

import torch

import fxfuse
from fxfuse.headline import HEADLINES


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for headline in HEADLINES:
        torch.manual_seed(0)
        model = headline.make().to(device)
        x = torch.rand(headline.shape(device), device=device)
        compiled = torch.compile(model, backend="fxfuse")
        with torch.no_grad():  # with gradients on it would be a training step, which is slower
            result, expected = compiled(x), model(x)
        print(fxfuse.reports()[-1])
        difference = float((result - expected).norm() / expected.norm())
        # On a GPU torch allows convolutions to round fp32 operands to TF32, and each of the two may.
        assert difference < 2e-3, f"{headline.chain} differs from eager by {difference:.1e}"
        print(f"equal to eager's result: the relative difference is {difference:.1e}\n")


if __name__ == "__main__":
    main()
