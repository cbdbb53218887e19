"""Spellings of conv -> gelu -> adaptive_avg_pool or mean, and twins that must not fuse."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from models import ConvGeluPool, exported_graph, traced_graph
from models import gelu_pool as tail
from spellings import NO_CANDIDATE, After, autocast, spelling, trainable, zeros
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

aten, gelu = torch.ops.aten, F.gelu
conv1, conv2, conv3 = torch.conv1d, torch.conv2d, torch.conv3d
pool1, pool2, pool3 = F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d
# The convolution's output is [2, 8, 6, 6]. u: unbatched. t: weight of a transposed convolution. 1 and 3: other numbers of dimensions.
INPUTS = {
    **{"x": (2, 4, 8, 8), "u": (4, 8, 8), "w": (8, 4, 3, 3), "t": (4, 8, 3, 3), "b": (8,), "a": ()},
    **{"x1": (2, 4, 8), "u1": (4, 8), "w1": (8, 4, 3), "t1": (4, 8, 3)},
    **{"x3": (2, 4, 8, 8, 8), "u3": (4, 8, 8, 8), "w3": (8, 4, 3, 3, 3), "t3": (4, 8, 3, 3, 3)},
}
row = partial(spelling, "conv_gelu_pool", INPUTS)


def squeezed_in_place(x, w, b):
    y = conv2(x, w, b)
    y.squeeze_()
    return tail(y)


def conv_also_used(x, w, b):
    y = conv2(x, w, b)
    return tail(y), y.relu()


def conv_written_through_a_view(x, w, b):
    y = conv2(x, w, b)
    y.view(-1).mul_(2)
    return tail(y)


def gelu_written_through_an_index(x, w, b):
    z = gelu(conv2(x, w, b))
    z[0].mul_(2)
    return pool2(z, 1)


def input_written_between(x, w, b):
    y = conv2(x, w, b)
    x.add_(1)
    return tail(y)


def view_of_input_written_between(x, w, b):
    y = conv2(x, w, b)
    x[0].zero_()
    return tail(y)


def bias_written_between(x, w, b):
    y = conv2(x, w, b)
    torch.add(b, 1, out=b)
    return tail(y)


def other_tensor_written_between(x, w, b, a):
    y = conv2(x, w, b)
    a.add_(1)
    return tail(y)


@torch.library.custom_op("fxfuse_tests::norm_of", mutates_args=())
def norm_of(x: torch.Tensor) -> torch.Tensor:
    return x.norm()


@norm_of.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(())


def custom_op_that_writes_nothing_between(x, w, b):
    y = conv2(x, w, b)
    norm = norm_of(x)
    return tail(y), norm


GELUS_BY_HAND = {
    "erf": lambda y: 0.5 * y * (1 + torch.erf(y / math.sqrt(2.0))),
    "erf, another order": lambda y: y * (torch.erf(y * 0.70710678) + 1.0) / 2,
    "erfc": lambda y: y * 0.5 * torch.special.erfc(-y * math.sqrt(0.5)),
    "the normal distribution": lambda y: y * torch.special.ndtr(y),
    "tanh": lambda y: 0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y**3))),
    "tanh, factored out": lambda y: 0.5 * y * (1.0 + torch.tanh(y * 0.7978845608 * (1.0 + 0.044715 * y * y))),
    "tanh, torch.pow": lambda y: y.mul(0.5).mul(torch.add(torch.tanh(math.sqrt(2 / math.pi) * (y + torch.pow(y, 3.0).mul(0.044715))), 1)),
}
# Each is gelu but for one constant, one power or one sign.
NO_GELUS = {
    "erf(y)": lambda y: 0.5 * y * (1 + torch.erf(y)),
    "erf(y / 1.414)": lambda y: 0.5 * y * (1 + torch.erf(y / 1.414)),
    "y instead of y / 2": lambda y: y * (1 + torch.erf(y / math.sqrt(2.0))),
    "1 - erf": lambda y: 0.5 * y * (1 - torch.erf(y / math.sqrt(2.0))),
    "0.0447": lambda y: 0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.0447 * y**3))),
    "y squared": lambda y: 0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y**2))),
    "tanh of erf's argument": lambda y: 0.5 * y * (1 + torch.tanh(y / math.sqrt(2.0))),
    "sigmoid(1.702 y)": lambda y: y * torch.sigmoid(1.702 * y),
}


def gelu_by_hand_written_between(x, w, b):
    y = conv2(x, w, b)
    half = y * 0.5
    y.add_(1)
    return pool2(half * (1 + torch.erf(y / math.sqrt(2.0))), 1)


def gelu_by_hand_also_used(x, w, b):
    y = conv2(x, w, b)
    inner = torch.erf(y / math.sqrt(2.0))
    return pool2(0.5 * y * (1 + inner), 1), inner


def autocast_ends_between(x, w, b):
    with autocast():
        y = conv2(x, w, b)
    return tail(y)


def autocast_disabled_between(x, w, b):
    with autocast():
        y = conv2(x, w, b)
        with autocast(enabled=False):
            return tail(y)


def no_grad_inside(x, w, b):
    with torch.no_grad():
        return tail(conv2(x, w, b))


def grad_mode_changes_between(x, w, b):
    y = conv2(x, w, b)
    with torch.enable_grad():
        return tail(y)


def checkpoint_between(x, w, b):
    return pool2(checkpoint(torch.relu, gelu(conv2(x, w, b)), use_reentrant=False), 1)


class AllIdentities(nn.Module):
    """The chain with modules between its steps that do nothing in eval."""

    def __init__(self) -> None:
        super().__init__()
        steps = (nn.Conv2d(4, 8, 3), nn.Identity(), nn.Dropout(0.1), nn.GELU(), nn.Dropout2d(0.3, inplace=True), nn.AvgPool2d(6))
        self.steps = nn.Sequential(*steps).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(x)


def two_tensor() -> TwoTensor:
    return TwoTensor(torch.zeros(2, 4, 8, 8), torch.zeros(2, 4, 8, 8))


@torch._dynamo.allow_in_graph
def custom(y: torch.Tensor) -> torch.Tensor:
    return y * 2


# fmt: off
ROWS = [
    row("conv1d", lambda x1, w1, b: pool1(gelu(conv1(x1, w1, b)), 1)),
    row("conv1d, unbatched", lambda u1, w1, b: pool1(gelu(conv1(u1, w1, b)), 2)),
    row("conv2d", lambda x, w, b: pool2(gelu(conv2(x, w, b)), 1)),
    row("conv2d, unbatched", lambda u, w, b: pool2(gelu(conv2(u, w, b)), 1)),
    row("conv3d", lambda x3, w3, b: pool3(gelu(conv3(x3, w3, b)), 1)),
    row("conv3d, unbatched", lambda u3, w3, b: pool3(gelu(conv3(u3, w3, b)), 1)),
    row("conv_transpose1d", lambda x1, t1, b: pool1(gelu(F.conv_transpose1d(x1, t1, b, 2)), 1)),
    row("conv_transpose1d, unbatched", lambda u1, t1, b: pool1(gelu(F.conv_transpose1d(u1, t1, b)), 1)),
    row("conv_transpose2d", lambda x, t, b: pool2(gelu(F.conv_transpose2d(x, t, b, (2, 1), output_padding=(1, 0))), 1)),
    row("conv_transpose2d, unbatched", lambda u, t, b: pool2(gelu(torch.conv_transpose2d(u, t, b)), 1)),
    row("conv_transpose3d", lambda x3, t3, b: pool3(gelu(F.conv_transpose3d(x3, t3, b)), 1)),
    row("aten.conv1d.padding", lambda x1, w1: pool1(gelu(aten.conv1d.padding(x1, w1, None, [1], "same")), 1)),
    row("aten.conv_transpose1d", lambda x1, t1: pool1(gelu(aten.conv_transpose1d.default(x1, t1)), 1)),
    row("aten packets", lambda x, w, b: aten.mean(aten.gelu(aten.conv2d(x, w, b)), (2, 3))),
    row("torch.convolution, lists of one", lambda x, w, b: pool2(gelu(torch.convolution(x, w, b, [1], [0], [1], False, [0], 1)), 1)),
    row("nn.Conv2d, padding='same', kernel 4", partial(After, tail, partial(nn.Conv2d, 4, 8, 4, padding="same"))),
    *[
        row(f"nn.Conv2d, {m} padding", partial(After, tail, partial(nn.Conv2d, 4, 8, 3, padding=1, padding_mode=m)))
        for m in ("reflect", "replicate", "circular")
    ],
    row("nn.Conv2d, depthwise, dilated", partial(After, tail, partial(nn.Conv2d, 4, 4, 3, groups=4, dilation=2))),
    row("nn.Conv2d, 1x1, stride", partial(After, tail, partial(nn.Conv2d, 4, 8, 1, stride=(2, 1)))),
    row("weight_norm (parametrize)", partial(After, tail, lambda: parametrizations.weight_norm(nn.Conv2d(4, 8, 3)))),
    row("spectral_norm (parametrize)", partial(After, tail, lambda: parametrizations.spectral_norm(nn.Conv2d(4, 8, 3)).eval())),
    row("gelu, tanh", lambda x, w: pool2(gelu(conv2(x, w), approximate="tanh"), 1)),
    row("torch._C._nn.gelu", lambda x, w: pool2(torch._C._nn.gelu(conv2(x, w)), 1)),
    row("aten.gelu_", lambda x, w: pool2(aten.gelu_.default(conv2(x, w)), 1)),
    *[
        row(f"adaptive_avg_pool2d(y, {s})", lambda x, w, s=s: pool2(gelu(conv2(x, w)), s), s=lambda s=s: s)
        for s in (1, 0, 9, (1, 1), (2, 3), (None, 1), [3, None], (None, None))
    ],
    row("torch.adaptive_avg_pool1d", lambda x1, w1: torch.adaptive_avg_pool1d(gelu(conv1(x1, w1)), (2,))),
    row("torch._C._nn.adaptive_avg_pool2d", lambda x, w: torch._C._nn.adaptive_avg_pool2d(gelu(conv2(x, w)), (1, 1))),
    row("aten.adaptive_avg_pool2d", lambda x, w: aten.adaptive_avg_pool2d.default(gelu(conv2(x, w)), [1, 1])),
    row("aten._adaptive_avg_pool2d", lambda x, w: aten._adaptive_avg_pool2d.default(gelu(conv2(x, w)), [1, 1])),
    row("adaptive_avg_pool2d, keywords", lambda x, w: F.adaptive_avg_pool2d(input=gelu(input=conv2(x, w)), output_size=(1, 1))),
    row("squeeze behind it", lambda x, w: pool2(gelu(conv2(x, w)), 1).squeeze(-1).squeeze(-1)),
    row("flatten and linear behind it", lambda x, w, b: F.linear(pool2(gelu(conv2(x, w)), 1).flatten(1), b[None])),
    row("y.mean((2, 3))", lambda x, w: gelu(conv2(x, w)).mean((2, 3))),
    row("y.mean([-1, -2], True)", lambda x, w: gelu(conv2(x, w)).mean([-1, -2], True)),
    row("y.mean(dim=, keepdim=)", lambda x, w: gelu(conv2(x, w)).mean(dim=(3, -2), keepdim=True)),
    row("y.mean(axis=, keepdims=)", lambda x, w: gelu(conv2(x, w)).mean(axis=(2, 3), keepdims=True)),
    row("torch.mean", lambda x, w: torch.mean(gelu(conv2(x, w)), (2, 3))),
    row("torch.mean, keywords", lambda x, w: torch.mean(input=gelu(conv2(x, w)), dim=(2, 3), keepdim=True)),
    row("aten.mean.dim", lambda x, w: aten.mean.dim(gelu(conv2(x, w)), [2, 3])),
    row("mean over space, then over the batch", lambda x, w: gelu(conv2(x, w)).mean((2, 3)).mean(0)),
    row("mean in 1-d, an int", lambda x1, w1: gelu(conv1(x1, w1)).mean(-1)),
    row("mean in 3-d", lambda x3, w3: gelu(conv3(x3, w3)).mean((2, 3, 4), keepdim=True)),
    row("mean, unbatched", lambda u, w: gelu(conv2(u, w)).mean((1, 2))),
    row(
        "bfloat16, mean in float32",
        lambda x, w: gelu(conv2(x, w)).mean((2, 3), dtype=torch.float32),
        x=zeros(2, 4, 8, 8, dtype=torch.bfloat16),
        w=zeros(8, 4, 3, 3, dtype=torch.bfloat16),
    ),
    *[row(f"gelu by hand, {name}", lambda x, w, f=f: pool2(f(conv2(x, w)), 1), f=lambda f=f: f) for name, f in GELUS_BY_HAND.items()],
    row("flatten(2).mean(-1)", lambda x, w: gelu(conv2(x, w)).flatten(2).mean(-1)),
    row("flatten(2).mean(-1, keepdim=True)", lambda x, w: gelu(conv2(x, w)).flatten(2).mean(-1, keepdim=True)),
    row("view(n, c, -1).mean(2)", lambda x, w: gelu(conv2(x, w)).view(2, 8, -1).mean(2)),
    row("mean(-1).mean(-1)", lambda x, w: gelu(conv2(x, w)).mean(-1).mean(-1)),
    row("mean(-1, True).mean(-2, True)", lambda x, w: gelu(conv2(x, w)).mean(-1, True).mean(-2, True)),
    row("mean(-1).mean(-1), unbatched", lambda u, w: gelu(conv2(u, w)).mean(-1).mean(-1)),
    row("mean in three steps", lambda x3, w3: gelu(conv3(x3, w3)).mean(-1).flatten(2).mean(-1)),
    row("avg_pool1d of the whole length", lambda x1, w1: F.avg_pool1d(gelu(conv1(x1, w1)), 6)),
    row("avg_pool2d of the whole plane", lambda x, w: F.avg_pool2d(gelu(conv2(x, w)), 6)),
    row("avg_pool2d of y.shape[2:]", lambda x, w: (lambda y: F.avg_pool2d(y, y.shape[2:], stride=1))(gelu(conv2(x, w)))),
    row("avg_pool3d of the whole volume", lambda x3, w3: F.avg_pool3d(gelu(conv3(x3, w3)), (6, 6, 6)).flatten(1)),
    row("flatten(2), adaptive_avg_pool1d", lambda x, w: pool1(gelu(conv2(x, w)).flatten(2), 1)),
    row("sum((2, 3)) / 36", lambda x, w: gelu(conv2(x, w)).sum((2, 3)) / 36),
    row("sum / (h * w)", lambda x, w: (lambda y: y.sum(-1).sum(-1) / (y.shape[-1] * y.shape[-2]))(gelu(conv2(x, w)))),
    row("sum((2, 3)) * (1 / 36)", lambda x, w: gelu(conv2(x, w)).sum(dim=(2, 3)) * (1 / 36)),
    row(
        "bfloat16, sum / n",
        lambda x, w: gelu(conv2(x, w)).sum((2, 3)) / 36,
        x=zeros(2, 4, 8, 8, dtype=torch.bfloat16),
        w=zeros(8, 4, 3, 3, dtype=torch.bfloat16),
    ),
    *[
        row(f"{name} between", lambda x, w, f=f: pool2(f(gelu(f(conv2(x, w)))), 1), f=lambda f=f: f)
        for name, f in {
            "dropout in eval": lambda y: F.dropout(y, 0.5, training=False),
            "dropout in eval, in place": lambda y: F.dropout(y, 0.5, False, True),
            "dropout2d of p=0": lambda y: F.dropout2d(y, 0.0, True),
            "alpha_dropout in eval": lambda y: F.alpha_dropout(y, 0.5),
            "contiguous": lambda y: y.contiguous(),
            "clone": lambda y: y.clone(),
            "to": lambda y: y.to(torch.float32),
            "float": lambda y: y.float(),
            "view of its own shape": lambda y: y.view(y.shape),
            "index of everything": lambda y: y[:, :],
            "three of them": lambda y: F.dropout(y.clone(), 0.1, False).contiguous(),
        }.items()
    ],
    row("modules that do nothing", AllIdentities),
    row("modules that do nothing, symbolic_trace", AllIdentities, capture=traced_graph),
    row("modules that do nothing, export", AllIdentities, capture=exported_graph),
    row("no_grad inside the model", no_grad_inside, w=trainable(8, 4, 3, 3), around=torch.enable_grad),
    row("inference_mode", lambda x, w: tail(conv2(x, w)), w=trainable(8, 4, 3, 3), around=torch.inference_mode),
    row("another tensor written between", other_tensor_written_between),
    row("custom op that writes nothing between", custom_op_that_writes_nothing_between),
    row("conv1d of a permuted input made contiguous", lambda x1, w1: pool1(gelu(conv1(x1.contiguous(), w1)), 1), x1=lambda: torch.zeros(2, 8, 4).mT),
    *[row(f"symbolic_trace, {d}-d", partial(ConvGeluPool, d), x=(2, 4, *[8] * d), capture=traced_graph) for d in (1, 2, 3)],
    *[
        row(f"symbolic_trace, transposed, {d}-d", partial(ConvGeluPool, d, True), x=(2, 4, *[8] * d), capture=traced_graph)
        for d in (1, 2, 3)
    ],
    *[row(f"export, {d}-d", partial(ConvGeluPool, d), x=(2, 4, *[8] * d), capture=exported_graph) for d in (1, 2, 3)],
    row("export, transposed, output size (None, 1)", partial(ConvGeluPool, 2, True, (None, 1)), capture=exported_graph),
    *[
        row(f"export, decomposed, {d}-d", partial(ConvGeluPool, d), x=(2, 4, *[8] * d), capture=partial(exported_graph, decompose=True))
        for d in (1, 2, 3)
    ],

    *[
        row(f"mean over {d}", lambda x, w, d=d: gelu(conv2(x, w)).mean(d), "not over exactly the spatial dims [2, 3]", d=lambda d=d: d)
        for d in (-1, (1, 2), (1, 2, 3), (0, 2, 3), None)
    ],
    row("mean of everything", lambda x, w: gelu(conv2(x, w)).mean(), "not over exactly the spatial dims [2, 3]"),
    row("conv1d, adaptive_avg_pool2d", lambda x1, w1: pool2(gelu(conv1(x1, w1)), 1), "the pool is over 2 dims, the convolution over 1"),
    row("conv2d, adaptive_avg_pool1d", lambda u, w: pool1(gelu(conv2(u, w)), 1), "the pool is over 1 dims, the convolution over 2"),
    row("adaptive_max_pool2d", lambda x, w: F.adaptive_max_pool2d(gelu(conv2(x, w)), 1), "gelu is followed by"),
    row("avg_pool2d of a part", lambda x, w: F.avg_pool2d(gelu(conv2(x, w)), 5), "gelu is followed by avg_pool2d"),
    row("avg_pool2d, padded", lambda x, w: F.avg_pool2d(gelu(conv2(x, w)), 6, 6, 1), "gelu is followed by avg_pool2d"),
    row("avg_pool2d, divided by another number", lambda x, w: F.avg_pool2d(gelu(conv2(x, w)), 6, divisor_override=9), "gelu is followed by avg_pool2d"),
    row("sum over space", lambda x, w: gelu(conv2(x, w)).sum((2, 3)), "gelu is followed by sum"),
    row("sum / 35", lambda x, w: gelu(conv2(x, w)).sum((2, 3)) / 35, "gelu is followed by sum"),
    row("sum / n, rounded down", lambda x, w: torch.div(gelu(conv2(x, w)).sum((2, 3)), 36, rounding_mode="floor"), "gelu is followed by sum"),
    row("channels merged too", lambda x, w: gelu(conv2(x, w)).flatten(1).mean(-1), "gelu is followed by flatten"),
    row("batch and channels merged", lambda x, w: gelu(conv2(x, w)).view(16, -1).mean(-1), "gelu is followed by view"),
    row("rows regrouped", lambda x, w: gelu(conv2(x, w)).view(2, 8, 4, 9).mean(-1), "gelu is followed by view"),
    row(
        "float16, sum / n",
        lambda x, w: gelu(conv2(x, w)).sum((2, 3)) / 36,
        "the mean is a sum in torch.float16, which may overflow",
        x=zeros(2, 4, 8, 8, dtype=torch.float16),
        w=zeros(8, 4, 3, 3, dtype=torch.float16),
    ),
    row("relu between", lambda x, w: pool2(gelu(conv2(x, w)).relu(), 1), "gelu is followed by relu"),
    row("custom function between", lambda x, w: pool2(custom(gelu(conv2(x, w))), 1), "gelu is followed by custom"),
    row("dropout in training", lambda x, w: pool2(F.dropout(gelu(conv2(x, w))), 1), "gelu is followed by dropout (p=0.5, in training)"),
    row("dropout in training, behind the conv", lambda x, w: tail(F.dropout(conv2(x, w), 0.1)), "conv is followed by dropout (p=0.1, in training)"),
    row(
        "contiguous that copies",
        lambda x, w: tail(conv2(x, w).contiguous(memory_format=torch.channels_last)),
        "conv is followed by contiguous (from strides [288, 36, 6, 1] to [288, 1, 48, 8]); the chain goes on with gelu",
    ),
    row("another dtype", lambda x, w: tail(conv2(x, w).to(torch.bfloat16)), "followed by to (from torch.float32 to torch.bfloat16)"),
    row("detach between", lambda x, w: tail(conv2(x, w).detach()), "conv is followed by detach"),
    row("clone that is also used", lambda x, w: (lambda z: (tail(z), z + 1))(conv2(x, w).clone()), "the result of clone is also used by add"),
    row("batch_norm between", lambda x, w, b: tail(F.batch_norm(conv2(x, w), b, b + 1)), "conv is followed by batch_norm; the chain goes on with gelu"),
    row("two ops between", lambda x, w: tail(conv2(x, w).relu() * 2), "conv is followed by relu; the chain goes on with gelu"),
    row("two ops, one behind the gelu", lambda x, w: pool2(gelu(conv2(x, w).relu()).sin(), 1), "conv is followed by relu"),
    row("three ops between", lambda x, w: tail(conv2(x, w).relu().sin() * 2), NO_CANDIDATE),
    row("batch_norm and no pool", lambda x, w, b: gelu(F.batch_norm(conv2(x, w), b, b + 1)), NO_CANDIDATE),
    row("checkpoint between", checkpoint_between, "gelu is followed by"),
    row(
        "gelu returned",
        lambda x, w: gelu(conv2(x, w)),
        "gelu is followed by the graph's output; the chain goes on with adaptive_avg_pool or mean",
    ),
    row("conv also used", conv_also_used, "the result of conv is also used by relu"),
    *[row(f"no gelu: {name}", lambda x, w, f=f: pool2(f(conv2(x, w)), 1), NO_CANDIDATE, f=lambda f=f: f) for name, f in NO_GELUS.items()],
    row("gelu by hand, written between", gelu_by_hand_written_between, NO_CANDIDATE),
    row("gelu by hand, also used", gelu_by_hand_also_used, "the result of gelu is also used by the graph's output"),
    row("relu instead", lambda x, w: pool2(conv2(x, w).relu(), 1), NO_CANDIDATE),
    row("conv written through a view", conv_written_through_a_view, "the result of conv is also used by view"),
    row("gelu written through an index", gelu_written_through_an_index, "the result of gelu is also used by getitem"),
    row("input written between", input_written_between, "add may write to l_x_ between the convolution and adaptive_avg_pool"),
    row("view of the input written between", view_of_input_written_between, "zero_ may write to l_x_ between"),
    row("bias written between, out=", bias_written_between, "add may write to l_b_ between"),
    row("autocast ends between", autocast_ends_between, "_exit_autocast changes how ops run"),
    row("autocast disabled between", autocast_disabled_between, "_enter_autocast changes how ops run"),
    row("grad mode changes between", grad_mode_changes_between, "changes how ops run"),
    row(
        "float64",
        lambda x, w: tail(conv2(x, w)),
        "is torch.float64; the kernels take",
        x=zeros(2, 4, 8, 8, dtype=torch.float64),
        w=zeros(8, 4, 3, 3, dtype=torch.float64),
    ),
    row(
        "complex",
        lambda x, w: gelu(conv2(x, w)).mean((2, 3)),
        "is torch.complex64",
        x=zeros(2, 4, 8, 8, dtype=torch.cfloat),
        w=zeros(8, 4, 3, 3, dtype=torch.cfloat),
    ),
    row("mean in float64", lambda x, w: gelu(conv2(x, w)).mean((2, 3), dtype=torch.float64), "mean turns torch.float32 into torch.float64"),
    row(
        "bias in float16, chain in bfloat16",
        lambda x, w, b: tail(conv2(x, w, b)),
        "the convolution's bias is torch.float16; the kernels take it as torch.float32 or torch.bfloat16",
        b=zeros(8, dtype=torch.float16),
        around=autocast,
    ),
    row("conv squeezed in place", squeezed_in_place, "squeeze_ changes the shape of y in place"),
    row("tensor subclass", lambda x, w: tail(conv2(x, w)), "is a TwoTensor", x=two_tensor),
    row("vmap", lambda x, w: torch.func.vmap(lambda x: tail(conv2(x, w)))(x), "torch.func transform"),
    row("vmap of something else", lambda x, w, b: torch.func.vmap(lambda e: tail(conv2(x, w)).sum() * e)(b), "inside a torch.func transform"),
    row("jvp", lambda x, w: torch.func.jvp(lambda x: tail(conv2(x, w)), (x,), (x,)), "torch.func transform"),
    row("grad", lambda x, w: torch.func.grad(lambda x: tail(conv2(x, w)).sum())(x), "torch.func transform"),
]
# fmt: on
