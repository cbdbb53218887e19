"""A near miss: the report says why a chain was not fused, and at which line; the line is changed, and the chain is fused.

    python examples/why_not.py
"""

from __future__ import annotations

import linecache
import os

import torch
import torch.nn.functional as F
from torch import nn

import fxfuse


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 3)
        self.scale = nn.Parameter(torch.rand(64, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.conv(x)) * self.scale
        return F.adaptive_avg_pool2d(y, 1).flatten(1)


class HeadThatIsFused(Head):
    """A channel's factor is the same for all its pixels: it stands behind the mean as well as in front."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.conv(x))
        return (F.adaptive_avg_pool2d(y, 1) * self.scale).flatten(1)


def main() -> None:
    os.environ["FXFUSE_SELECT"] = "always"  # the model alone decides, not what pays on this device at these sizes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head, fused_head = Head().to(device).eval(), HeadThatIsFused().to(device).eval()
    fused_head.load_state_dict(head.state_dict())
    x = torch.randn(2, 8, 32, 32, device=device)
    with torch.no_grad():
        report = fxfuse.explain(head, x)
        print(report)
        assert not report.fused and "gelu is followed by mul" in report.declined[0].reason
        file, line = report.declined[0].location.rsplit(":", 1)
        source = linecache.getline(file, int(line)).strip()
        print(f"\nline {line} of {os.path.basename(file)}: {source}\n")
        assert source == "y = F.gelu(self.conv(x)) * self.scale"

        report = fxfuse.explain(fused_head, x)
        print(report)
        assert len(report.fused) == 1 and not report.declined
        torch.testing.assert_close(fused_head(x), head(x))


if __name__ == "__main__":
    main()
