"""Convolutions on fake CUDA tensors: those that the fused ops take, and those that they refuse, with the sentence; GPUs that are only described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import dynamo_graph, fake_mode
from torch import fx

from fxfuse.chain import chains
from fxfuse.fused import Gpu
from fxfuse.headline import Headline
from fxfuse.match import Match, find
from fxfuse.view import GraphView

H200 = Gpu(major=9, num_processors=132, shared_bytes=232448)
A100, RTX_PRO_6000 = Gpu(8, 108, 166912), Gpu(12, 188, 101376)
X2, W2, X3, W3 = (2, 8, 12, 14), (16, 8, 3, 3), (2, 8, 6, 6, 12), (16, 8, 3, 3, 3)


def pooled(y: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(F.gelu(y), 1)


def normed(y: torch.Tensor, pool: int = 2, **window: Any) -> torch.Tensor:
    return F.gelu(F.avg_pool3d(F.layer_norm(y, y.shape[-1:]), pool, **window))


def graph_of(run: Callable[..., torch.Tensor], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, dynamic: bool = False) -> fx.GraphModule:
    with fake_mode(), torch.no_grad():
        return dynamo_graph(run, *(torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes), dynamic=dynamic)


def in_training(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph as if every tensor in it needed a gradient. (Autograd would ask a device that is not there for its streams.)"""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            node.meta["example_value"] = value.detach().requires_grad_()
    return gm


def training_step(model: Headline, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, of_input: bool = False) -> Match:
    """The chain of a headline model whose parameters, and input if asked for, need gradients, on a GPU that is not there."""
    module = model.make().to(dtype)
    with fake_mode():
        gm = dynamo_graph(module, torch.empty(shape, dtype=dtype, requires_grad=of_input))
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            with value.fake_mode:
                moved = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="cuda", requires_grad=value.requires_grad)
            node.meta["example_value"] = moved
    return match_of(gm)


def match_of(gm: fx.GraphModule) -> Match:
    view = GraphView(gm.graph)
    (found,) = [found for chain in chains() for found in find(view, chain)]
    assert isinstance(found, Match)
    return found


TAKEN = {
    "conv2d": (lambda x, w: pooled(torch.conv2d(x, w)), X2, W2),
    "conv2d, stride, padding, dilation": (lambda x, w: pooled(torch.conv2d(x, w, None, 2, (1, 2), 2)), X2, W2),
    "conv2d, same": (lambda x, w: pooled(torch.conv2d(x, w, padding="same")), X2, W2),
    "conv1d": (lambda x, w: F.adaptive_avg_pool1d(F.gelu(torch.conv1d(x, w)), 1), (2, 8, 20), (16, 8, 5)),
    "conv3d, mean": (lambda x, w: F.gelu(torch.conv3d(x, w)).mean((2, 3, 4)), X3, W3),
    "conv2d, mean, kept dims": (lambda x, w: F.gelu(torch.conv2d(x, w)).mean((2, 3), True), X2, W2),
    "conv2d, unbatched": (lambda x, w: pooled(torch.conv2d(x, w)), X2[1:], W2),
    "conv3d and norm": (lambda x, w: normed(torch.conv3d(x, w, padding=1)), X3, W3),
    "conv_transpose3d and norm": (lambda x, w: normed(torch.conv_transpose3d(x, w, None, 2, 1, 1), 3), X3, (8, 16, 3, 3, 3)),
    "number as addend": (lambda x, w: normed(torch.conv3d(x, w) - 2), X3, W3),
    "0-dim addend": (lambda x, w, a: normed(torch.conv3d(x, w) + a), X3, W3, ()),
    "one-element addend": (lambda x, w, a: normed(torch.conv3d(x, w) + a), X3, W3, (1,)),
    "per-channel addend": (lambda x, w, a: normed(torch.conv3d(x, w) + a), X3, W3, (1, 16, 1, 1, 1)),
    "per-channel addend, no batch dim": (lambda x, w, a: normed(torch.conv3d(x, w) + a), X3, W3, (16, 1, 1, 1)),
}

REFUSED = {
    "groups": (lambda x, w: pooled(torch.conv2d(x, w, groups=2)), "has 2 groups", X2, (16, 4, 3, 3)),
    "same, even kernel": (lambda x, w: pooled(torch.conv2d(x, w, padding="same")), "not the same on both sides", X2, (16, 8, 4, 4)),
    "transposed": (lambda x, w: pooled(torch.conv_transpose2d(x, w)), "is transposed", X2, (8, 16, 3, 3)),
    "pool not global": (lambda x, w: F.adaptive_avg_pool2d(F.gelu(torch.conv2d(x, w)), 2), "is not global", X2, W2),
    "many weights": (lambda x, w: pooled(torch.conv2d(x, w)), "padded values, over", (2, 512, 8, 8), (512, 512, 3, 3)),
    "large image": (lambda x, w: pooled(torch.conv2d(x, w)), "2^31 or more", (1, 8, 1 << 14, 1 << 14), W2),
    "large kernel": (lambda x, w: normed(torch.conv3d(x, w, padding=3)), "has a size over 5", X3, (16, 8, 7, 7, 7)),
    "stride 3": (lambda x, w: normed(torch.conv3d(x, w, stride=(1, 1, 3), padding=1)), "is not made of 1 and 2", X3, W3),
    "dilation": (lambda x, w: normed(torch.conv3d(x, w, dilation=2, padding=2)), "is not 1", X3, W3),
    "norm over two dims": (
        lambda x, w: F.gelu(F.avg_pool3d(F.layer_norm(torch.conv3d(x, w), (4, 10)), 2)), "over 2 dimensions", X3, W3
    ),
    "wide rows": (lambda x, w: normed(torch.conv3d(x, w, padding=1)), "300 wide", (*X3[:4], 300), W3),
    "overlapping windows": (lambda x, w: normed(torch.conv3d(x, w), 3, stride=2), "overlap", X3, W3),
    "large windows": (lambda x, w: normed(torch.conv3d(x, w, padding=1), 5), "size over 4", X3, W3),
    "padded windows": (lambda x, w: normed(torch.conv3d(x, w), 2, padding=1), "pads", X3, W3),
    "ceil_mode": (lambda x, w: normed(torch.conv3d(x, w), 3, ceil_mode=True), "ceil_mode", X3, W3),
    "divisor": (lambda x, w: normed(torch.conv3d(x, w), 2, divisor_override=3), "divisor_override", X3, W3),
    "addend along a row": (lambda x, w, a: normed(torch.conv3d(x, w) + a), "not one value or one a channel", X3, W3, (10,)),
    "addend a sample": (lambda x, w, a: normed(torch.conv3d(x, w) + a), "not one value or one a channel", X3, W3, (2, 1, 1, 1, 1)),
}  # fmt: skip
