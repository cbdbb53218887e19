"""Spellings of conv -> add -> layer_norm -> avg_pool3d -> gelu, and twins that must not fuse."""

from __future__ import annotations

import operator
from functools import partial

import torch
import torch.nn.functional as F
from models import ConvNormPoolGelu, exported_graph, traced_graph
from models import norm_pool_gelu as tail
from spellings import NO_CANDIDATE, After, autocast, spelling, zeros
from torch import nn

aten, gelu, conv3, pool3 = torch.ops.aten, F.gelu, torch.conv3d, F.adaptive_avg_pool3d
# The convolution's output is [2, 8, 4, 4, 10]: its width differs from its channels. u: unbatched. t: weight of a transposed convolution.
INPUTS = {
    **{"x": (2, 4, 6, 6, 12), "u": (4, 6, 6, 12), "w": (8, 4, 3, 3, 3), "t": (4, 8, 3, 3, 3), "b": (8,)},
    **{"a": (), "full": (2, 8, 4, 4, 10), "lw": (10,), "lb": (10,)},
}
row = partial(spelling, "conv_norm_pool_gelu", INPUTS)


def norm(y: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(y, (10,))


def pool(y: torch.Tensor) -> torch.Tensor:
    return F.avg_pool3d(y, 2)


def plus_assign(x, w, b, a):
    y = conv3(x, w, b)
    y += a
    return tail(y)


def minus_assign(x, w, b, a):
    y = conv3(x, w, b)
    y -= a
    return tail(y)


def in_place_add_read_by_its_old_name(x, w, b, a):
    y = conv3(x, w, b)
    y.add_(a)
    return tail(y)


def input_written_before(x, w, b, a):
    x.add_(1)
    return tail(conv3(x, w, b) + a)


def result_written_after(x, w, b, a):
    return tail(conv3(x, w, b) + a).mul_(2)


def norm_also_returned(x, w, b, a):
    z = norm(conv3(x, w, b) + a)
    return gelu(pool(z)), z


def addend_depends_on_conv(x, w, b):
    y = conv3(x, w, b)
    return tail(y + y.mean())


def conv_written_after_the_add(x, w, b, a):
    y = conv3(x, w, b)
    z = y + a
    y.mul_(2)
    return tail(z), y


def written_in_place_of_the_addend(x, w, b, full):
    y = conv3(x, w, b)
    full += y
    return tail(full)


def sigmoid_gelu(x, w, b):
    y = pool(norm(conv3(x, w, b)))
    return y * torch.sigmoid(1.702 * y)


def channel_norm(x, w, b, a):
    y = (conv3(x, w, b) + a).permute(0, 2, 3, 4, 1)
    return gelu(pool(F.layer_norm(y, (8,)).permute(0, 4, 1, 2, 3)))


def autocast_inside(x, w, b, a):
    with autocast():
        return tail(conv3(x, w, b) + a)


# fmt: off
ROWS = [
    row("torch.conv3d", lambda x, w, b, a: tail(torch.conv3d(x, w, b) + a)),
    row("F.conv3d, keywords", lambda x, w, b, a: tail(F.conv3d(input=x, weight=w, bias=b, stride=1, padding=0) + a)),
    row("no bias", lambda x, w, a: tail(F.conv3d(x, w) + a)),
    row("stride, padding, dilation, groups", lambda x, w, a: tail(F.conv3d(x, w, None, (1, 1, 1), 1, (1, 1, 2), 2) + a), w=(8, 2, 3, 3, 3)),
    row("padding='same'", lambda x, w, b: gelu(pool(F.layer_norm(F.conv3d(x, w, b, padding="same"), (12,))))),
    row("padding='valid'", lambda x, w, b: tail(F.conv3d(x, w, b, padding="valid"))),
    row("unbatched", lambda u, w, b, a: tail(conv3(u, w, b) + a)),
    row("torch.conv_transpose3d", lambda x, t, b, a: gelu(pool(F.layer_norm(torch.conv_transpose3d(x, t, b) + a, (14,))))),
    row("F.conv_transpose3d, headline", lambda x, t, b, a: gelu(pool(F.layer_norm(F.conv_transpose3d(x, t, b, 2, 1, 1) + a, (24,))))),
    row(
        "F.conv_transpose3d, keywords",
        lambda x, t: gelu(pool(F.layer_norm(F.conv_transpose3d(x, t, groups=2, dilation=2), (16,)))),
        t=(4, 4, 3, 3, 3),
    ),
    row("torch.convolution", lambda x, w, b, a: tail(torch.convolution(x, w, b, [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1) + a)),
    row("torch.convolution, lists of one", lambda x, w, b, a: tail(torch.convolution(x, w, b, [1], [0], [1], False, [0], 1) + a)),
    row("aten.conv3d", lambda x, w, b, a: tail(aten.conv3d.default(x, w, b) + a)),
    row("aten.conv3d.padding", lambda x, w, b, a: tail(aten.conv3d.padding(x, w, b, [1, 1, 1], "valid") + a)),
    row("aten.conv_transpose3d.input", lambda x, t, b: gelu(pool(F.layer_norm(aten.conv_transpose3d.input(x, t, b), (14,))))),
    row("aten.convolution", lambda x, w, b, a: tail(aten.convolution.default(x, w, b, [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1) + a)),
    row("nn.Conv3d", partial(After, tail, partial(nn.Conv3d, 4, 8, 3))),
    row("nn.Conv3d, reflect padding", partial(After, tail, partial(nn.Conv3d, 4, 8, (3, 3, 5), padding=1, padding_mode="reflect"))),

    row("no add", lambda x, w, b: tail(conv3(x, w, b))),
    row("y + a", lambda x, w, b, a: tail(conv3(x, w, b) + a)),
    row("a + y", lambda x, w, b, a: tail(a + conv3(x, w, b))),
    row("y += a", plus_assign),
    row("operator.iadd", lambda x, w, b, a: tail(operator.iadd(conv3(x, w, b), a))),
    row("y.add(a)", lambda x, w, b, a: tail(conv3(x, w, b).add(a))),
    row("a.add(y)", lambda x, w, b, a: tail(a.add(conv3(x, w, b)))),
    row("y.add(other=a, alpha=2)", lambda x, w, b, a: tail(conv3(x, w, b).add(other=a, alpha=2))),
    row("y.add_(a)", lambda x, w, b, a: tail(conv3(x, w, b).add_(a))),
    row("y.add_(a); y", in_place_add_read_by_its_old_name),
    row("y.__radd__(a)", lambda x, w, b, a: tail(conv3(x, w, b).__radd__(a))),
    row("torch.Tensor.add", lambda x, w, b, a: tail(torch.Tensor.add(conv3(x, w, b), a))),
    row("torch.add", lambda x, w, b, a: tail(torch.add(conv3(x, w, b), a))),
    row("torch.add, keywords, alpha", lambda x, w, b, a: tail(torch.add(input=conv3(x, w, b), other=a, alpha=-0.5))),
    row("torch.add(a, y)", lambda x, w, b, a: tail(torch.add(a, conv3(x, w, b)))),
    row("y - a", lambda x, w, b, a: tail(conv3(x, w, b) - a)),
    row("y -= a", minus_assign),
    row("y.sub(a, alpha=3)", lambda x, w, b, a: tail(conv3(x, w, b).sub(a, alpha=3))),
    row("y.sub_(a)", lambda x, w, b, a: tail(conv3(x, w, b).sub_(a))),
    row("torch.sub", lambda x, w, b, a: tail(torch.sub(conv3(x, w, b), a))),
    row("torch.subtract", lambda x, w, b, a: tail(torch.subtract(conv3(x, w, b), a))),
    row("torch.rsub(a, y)", lambda x, w, b, a: tail(torch.rsub(a, conv3(x, w, b), alpha=2))),
    row("aten.add.Tensor", lambda x, w, b, a: tail(aten.add.Tensor(conv3(x, w, b), a))),
    row("aten.add_.Tensor", lambda x, w, b, a: tail(aten.add_.Tensor(conv3(x, w, b), a))),
    row("aten.add (packet)", lambda x, w, b, a: tail(aten.add(conv3(x, w, b), a))),
    row("aten.sub.Tensor", lambda x, w, b, a: tail(aten.sub.Tensor(conv3(x, w, b), a))),
    row("aten.add.Scalar", lambda x, w, b: tail(aten.add.Scalar(conv3(x, w, b), 2))),
    row("y + 1.5", lambda x, w, b: tail(conv3(x, w, b) + 1.5)),
    row("1 + y", lambda x, w, b: tail(1 + conv3(x, w, b))),
    row("y + True", lambda x, w, b: tail(conv3(x, w, b) + True)),
    row("y.add(1, alpha=2)", lambda x, w, b: tail(conv3(x, w, b).add(1, alpha=2))),
    row("y - 2", lambda x, w, b: tail(conv3(x, w, b) - 2)),
    *[
        row(f"addend of shape {shape}", lambda x, w, b, a: tail(conv3(x, w, b) + a), a=shape)
        for shape in ((1,), (10,), (1, 8, 1, 1, 1), (8, 1, 1, 1), (2, 1, 1, 1, 1), (4, 1, 10), (2, 8, 4, 4, 10))
    ],
    row("addend expanded from one row", lambda x, w, b, a: tail(conv3(x, w, b) + a.expand(2, 8, 4, 4, 10)), a=(10,)),
    row("a - y, by the convolution's weight and bias", lambda x, w, b, a: tail(conv3(x, -w, -b) + a)),
    row("addend in the chain's dtype", lambda x, w, b, full: tail((lambda y: y + full.to(y.dtype))(conv3(x, w, b))), around=autocast),
    row("addend int64, 0-dim", lambda x, w, b, a: tail(conv3(x, w, b) + a), a=zeros(dtype=torch.int64)),
    row("addend int64, per column", lambda x, w, b, a: tail(conv3(x, w, b) + a), a=zeros(10, dtype=torch.int64)),
    row("addend bool, 0-dim", lambda x, w, b, a: tail(conv3(x, w, b) + a), a=zeros(dtype=torch.bool)),
    row("addend float64, 0-dim", lambda x, w, b, a: tail(conv3(x, w, b) + a), a=zeros(dtype=torch.float64)),
    row("addend float16 to float32", lambda x, w, b, full: tail(conv3(x, w, b) + full), full=zeros(2, 8, 4, 4, 10, dtype=torch.float16)),
    row("addend computed by another convolution", lambda x, w, b: tail(conv3(x, w, b) + conv3(x, w).relu())),
    row(
        "addend on the CPU, chain on CUDA",
        lambda x, w, a: tail(conv3(x, w) + a),
        x=zeros(2, 4, 6, 6, 12, device="cuda"),
        w=zeros(8, 4, 3, 3, 3, device="cuda"),
    ),

    row("F.layer_norm, weight and bias", lambda x, w, lw, lb: gelu(pool(F.layer_norm(conv3(x, w), (10,), lw, lb)))),
    row("F.layer_norm, keywords", lambda x, w, lb: gelu(pool(F.layer_norm(input=conv3(x, w), normalized_shape=[10], bias=lb, eps=1e-12)))),
    row("torch.layer_norm", lambda x, w, lw: gelu(pool(torch.layer_norm(conv3(x, w), (10,), lw, None, 1.0, False)))),
    row("torch.native_layer_norm", lambda x, w: gelu(pool(torch.native_layer_norm(conv3(x, w), (10,), None, None, 1e-5)[0]))),
    row("aten.layer_norm", lambda x, w, lw, lb: gelu(pool(aten.layer_norm.default(conv3(x, w), [10], lw, lb)))),
    row("aten.native_layer_norm", lambda x, w: gelu(pool(aten.native_layer_norm.default(conv3(x, w), [10], None, None, 1e-5)[0]))),
    row(
        "nn.LayerNorm, no bias",
        partial(After, nn.Sequential(nn.LayerNorm(10, bias=False), nn.AvgPool3d(2), nn.GELU()), partial(nn.Conv3d, 4, 8, 3)),
    ),
    row("LayerNorm over (H, W)", lambda x, w: gelu(pool(F.layer_norm(conv3(x, w), (4, 10))))),
    row("LayerNorm over (D, H, W)", lambda x, w: gelu(pool(F.layer_norm(conv3(x, w), (4, 4, 10))))),
    row("LayerNorm over everything", lambda x, w: gelu(pool(F.layer_norm(conv3(x, w), (2, 8, 4, 4, 10))))),
    row("F.avg_pool3d(y, 2)", lambda x, w: gelu(F.avg_pool3d(norm(conv3(x, w)), 2))),
    row("F.avg_pool3d(y, [2])", lambda x, w: gelu(F.avg_pool3d(norm(conv3(x, w)), [2]))),
    row("F.avg_pool3d, stride=None", lambda x, w: gelu(F.avg_pool3d(norm(conv3(x, w)), (1, 2, 3), stride=None))),
    row("F.avg_pool3d, stride=()", lambda x, w: gelu(F.avg_pool3d(norm(conv3(x, w)), 2, ()))),
    row("F.avg_pool3d, stride != kernel", lambda x, w: gelu(F.avg_pool3d(norm(conv3(x, w)), 3, (1, 1, 2)))),
    row("F.avg_pool3d, seven positionals", lambda x, w: gelu(F.avg_pool3d(norm(conv3(x, w)), 3, 2, 1, True, False, 5))),
    row(
        "F.avg_pool3d, keywords",
        lambda x, w: gelu(F.avg_pool3d(input=norm(conv3(x, w)), kernel_size=2, ceil_mode=True, divisor_override=-3)),
    ),
    row("aten.avg_pool3d", lambda x, w: gelu(aten.avg_pool3d.default(norm(conv3(x, w)), [2, 2, 2]))),
    row("F.gelu, tanh", lambda x, w: gelu(pool(norm(conv3(x, w))), approximate="tanh")),
    row("aten.gelu", lambda x, w: aten.gelu.default(pool(norm(conv3(x, w))))),
    row(
        "float16",
        lambda x, w: tail(conv3(x, w)),
        x=zeros(2, 4, 6, 6, 12, dtype=torch.float16),
        w=zeros(8, 4, 3, 3, 3, dtype=torch.float16),
    ),
    row("autocast inside the model", autocast_inside),
    row("autocast around the call", lambda x, w, b, a: tail(conv3(x, w, b) + a), around=autocast),
    row("input written before", input_written_before),
    row("result written after", result_written_after),
    row("symbolic_trace", ConvNormPoolGelu, capture=traced_graph, around=torch.no_grad),
    row("symbolic_trace, transposed", partial(ConvNormPoolGelu, nn.ConvTranspose3d), x=(2, 4, 4, 4, 8), capture=traced_graph),
    row("export", ConvNormPoolGelu, capture=exported_graph),
    row("export, y += a", partial(ConvNormPoolGelu, add=operator.iadd), capture=exported_graph),
    row("export, decomposed", ConvNormPoolGelu, capture=partial(exported_graph, decompose=True)),

    row("norm also returned", norm_also_returned, "the result of layer_norm is also used by the graph's output"),
    row("addend depends on the conv", addend_depends_on_conv, "the result of conv is also used by mean"),
    row("y + y", lambda x, w, b: tail((lambda y: y + y)(conv3(x, w, b))), "takes the chain's own value as its"),
    row(
        "norm's weight is the conv",
        lambda u, w, b: gelu(pool((lambda y: F.layer_norm(y, y.shape, y))(conv3(u, w, b)))),
        "takes the chain's own value as its",
    ),
    row("conv written after the add", conv_written_after_the_add, "the result of conv is also used by mul_"),
    row("full += y", written_in_place_of_the_addend, "writes to l_full_, which is not the convolution's result"),
    row("a - y", lambda x, w, a: tail(a - conv3(x, w)), "scales the convolution's result by -1"),
    row("2 - y", lambda x, w: tail(2 - conv3(x, w)), "scales the convolution's result by -1"),
    row("torch.add(a, y, alpha=2)", lambda x, w, a: tail(torch.add(a, conv3(x, w), alpha=2)), "scales the convolution's result by 2"),
    row("torch.rsub(y, a)", lambda x, w, a: tail(torch.rsub(conv3(x, w), a)), "scales the convolution's result by -1"),
    row(
        "addend enlarges",
        lambda x, w, a: tail(conv3(x, w) + a),
        "enlarges the convolution's result",
        x=(1, 4, 6, 6, 12),
        a=(2, 1, 1, 1, 1),
    ),
    row("addend float64", lambda x, w, a: tail(conv3(x, w) + a), "the addend is torch.float64", a=zeros(1, dtype=torch.float64)),
    row(
        "autocast, addend float32",
        lambda x, w, full: tail(conv3(x, w) + full),
        "turns the convolution's torch.bfloat16 into torch.float32",
        around=autocast,
    ),
    row(
        "float64",
        lambda x, w: tail(conv3(x, w)),
        "the convolution's result is torch.float64",
        x=zeros(2, 4, 6, 6, 12, dtype=torch.float64),
        w=zeros(8, 4, 3, 3, 3, dtype=torch.float64),
    ),
    row("permute, norm, permute", channel_norm, "add is followed by permute; the chain goes on with layer_norm"),
    row("an add and no norm near", lambda x, w, a: pool(conv3(x, w) + a), NO_CANDIDATE),
    row("relu between add and norm", lambda x, w, a: tail((conv3(x, w) + a).relu()), "add is followed by relu; the chain goes on with layer_norm"),
    row("no norm", lambda x, w, a: gelu(pool(conv3(x, w) + a)), NO_CANDIDATE),
    row("no pool", lambda x, w: gelu(norm(conv3(x, w))), "layer_norm is followed by gelu; the chain goes on with avg_pool3d"),
    row("no gelu", lambda x, w: pool(norm(conv3(x, w))).relu(), "avg_pool3d is followed by relu; the chain goes on with gelu"),
    row("x sigmoid(1.702 x)", sigmoid_gelu, "avg_pool3d is followed by mul"),
    row("max_pool3d", lambda x, w: gelu(F.max_pool3d(norm(conv3(x, w)), 2)), "layer_norm is followed by"),
    row("avg_pool2d", lambda u, w: gelu(F.avg_pool2d(norm(conv3(u, w)), 2)), "layer_norm is followed by avg_pool2d"),
    row("adaptive pool", lambda x, w: gelu(pool3(norm(conv3(x, w)), 2)), "layer_norm is followed by adaptive_avg_pool"),
    row("two norms", lambda x, w: tail(norm(conv3(x, w))), "layer_norm is followed by layer_norm"),
    row("only a conv", lambda x, w: conv3(x, w).relu(), NO_CANDIDATE),
    row(
        "meta device",
        lambda x, w: tail(conv3(x, w)),
        "on meta",
        x=zeros(2, 4, 6, 6, 12, device="meta"),
        w=zeros(8, 4, 3, 3, 3, device="meta"),
    ),
]
# fmt: on
