"""Every kind of in-place write that a model can hold, as a line of Python, and the functions and modules that such lines call."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten


@torch.library.custom_op("fxfuse_tests::halve_all", mutates_args=("tensors",))
def halve_all(tensors: list[torch.Tensor]) -> None:
    """Halves every tensor in place."""
    for tensor in tensors:
        tensor.mul_(0.5)


@torch._dynamo.allow_in_graph
def opaque(t: torch.Tensor) -> torch.Tensor:
    """A function that Dynamo does not look into."""
    return t.mul_(-0.5)


def untraced(t: torch.Tensor) -> torch.Tensor:
    """A function that symbolic_trace does not look into, as those of extensions are."""
    return handle_torch_function(untraced, (t,), t) if has_torch_function_unary(t) else t.mul_(-0.5)


class Own(nn.Module):
    """A module of the user's that writes to what it is given."""

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return t.mul_(-0.5)


def _write_first(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    args[0].mul_(-0.5)


class Modules(nn.Module):
    """What lines call as `self.<name>`."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.leaky, self.silu, self.dropout = nn.ReLU(True), nn.LeakyReLU(0.5, True), nn.SiLU(True), nn.Dropout(0.5, True)
        self.relus, self.own, self.identity, self.no_dropout = nn.Sequential(nn.ReLU(True)), Own(), nn.Identity(), nn.Dropout(0.5).eval()
        self.hooked, self.patched = nn.Identity(), nn.Identity()
        self.hooked.register_forward_hook(_write_first)
        self.patched.forward = opaque


# What lines name beside their target.
SCOPE = {
    "torch": torch,
    "F": F,
    "nn": nn,
    "operator": operator,
    "aten": aten,
    "checkpoint": checkpoint,
    "opaque": opaque,
    "untraced": untraced,
}

# In a line {t} is the target, {u} a tensor of its shape, {m} a mask of its shape, {i} two indices into its first dimension.
IN_PLACE_METHODS = (
    "{t}.add_({u})",
    "{t}.add_({u}, alpha=2)",
    "{t}.sub_({u})",
    "{t}.mul_(-0.5)",
    "{t}.mul_({u})",
    "{t}.div_({u})",
    "{t}.neg_()",
    "{t}.abs_()",
    "{t}.exp_()",
    "{t}.sigmoid_()",
    "{t}.tanh_()",
    "{t}.relu_()",
    "{t}.pow_(2)",
    "{t}.clamp_(-0.1, 0.1)",
    "{t}.clamp_min_(0.5)",
    "{t}.round_()",
    "{t}.nan_to_num_(1.0).mul_(2)",
    "{t}.copy_({u})",
    "{t}.fill_(0.25)",
    "{t}.zero_()",
    "{t}.masked_fill_({m}, 0.25)",
    "{t}.masked_scatter_({m}, {u})",
    "{t}.index_fill_(0, {i}, 0.25)",
    "{t}.index_add_(0, {i}, {u}[:2])",
    "{t}.index_copy_(0, {i}, {u}[:2])",
    "{t}.index_put_(({i},), {u}[:2])",
    "{t}.index_reduce_(0, {i}, {u}[:2], 'prod')",
    "{t}.scatter_(0, {m}.long(), {u})",
    "{t}.scatter_add_(0, {m}.long(), {u})",
    "{t}.scatter_reduce_(0, {m}.long(), {u}, 'amax')",
    "{t}.put_({i}, {u}.flatten()[:2])",
    "{t}.lerp_({u}, 0.5)",
    "{t}.addcmul_({u}, {u})",
    "{t}.addcdiv_({u}, {u}, value=0.1)",
    "{t}.cumsum_(0)",
    "{t}.renorm_(2, 0, 0.1)",
    "{t}.eq_({u})",
    "{t}.normal_()",
    "{t}.uniform_()",
    "{t}.bernoulli_(0.5)",
    "{t}.set_({u}.clone())",
    "{t}.__iadd__({u})",
    "{t}.__setitem__(0, 0.25)",
    "torch.Tensor.mul_({t}, -0.5)",
)
# Of the last two dimensions, which are equal in most targets: other values, and not just an error.
RESHAPES = (
    "{t}.transpose_(-1, -2)",
    "{t}.swapaxes_(-1, -2)",
    "{t}.swapdims_(-1, -2)",
    "{t}.t_()",
    "{t}.squeeze_()",
    "{t}.unsqueeze_(0)",
    "{t}.as_strided_({t}.shape, {u}.transpose(-1, -2).stride())",
    "{t}.resize_({u}.shape)",
    "{t}.resize_as_({u})",
    "{t}.detach_().mul_(-0.5)",
    "{t}.mul_(-0.5).transpose_(-1, -2)",
    "{t}.contiguous().transpose_(-1, -2)",
    "{t}.set_({u}.clone().transpose(-1, -2))",
)
REBINDING = (
    "{t} = {t}.mul_(-0.5)",
    "{t} = {t}.add_({u})",
    "{t} = F.relu({t}, inplace=True)",
    "{t} = operator.iadd({t}, {u})",
    "{t} = torch.relu_({t})",
    "{t} = torch.mul({t}, -0.5, out={t})",
    "{t} = {t}.unsqueeze_(0).mul_(-0.5).squeeze_(0)",
)
OPERATORS = (
    "{t} += {u}",
    "{t} += 0.5",
    "{t} *= -0.5",
    "{t} -= {u}",
    "{t} /= {u}",
    "{t} **= 2",
    "{t} //= 0.25",
    "{t} %= 0.25",
    "operator.iadd({t}, {u})",
    "operator.imul({t}, -0.5)",
    "operator.setitem({t}, 0, 0.25)",
)
INDEX_WRITES = (
    "{t}[0] = 0.25",
    "{t}[-1] = {u}[0]",
    "{t}[1:] = {u}[1:]",
    "{t}[::2] = 0.25",
    "{t}[:] = {u}",
    "{t}[...] = {u}",
    "{t}[..., -1] = 0.25",
    "{t}[None] = 0.25",
    "{t}[{m}] = 0.25",
    "{t}[{i}] = 0.25",
    "{t}[0] += 0.25",
    "{t}[:1] *= -0.5",
    "{t}[:1].view(-1)[:1] = 0.25",
)
OUT = (
    "torch.add({u}, 1, out={t})",
    "torch.mul({t}, -0.5, out={t})",
    "torch.neg({u}, out={t})",
    "torch.clamp({t}, -0.1, 0.1, out={t})",
    "torch.where({m}, {u}, {t}, out={t})",
    "torch.cat([{u}[:1], {u}[1:]], out={t})",
    "torch.sort({u}, dim=0, out=({t}, {m}.long()))",
    "torch.zeros({t}.shape, out={t})",
    "torch.full({t}.shape, 0.25, out={t})",
    "torch.add({u}, 1, out={t}.detach())",
    "aten.mul.out({u}, {u}, out={t})",
    "aten.cumsum.out({u}, 0, out={t})",
)
FUNCTIONS = (
    "torch.relu_({t})",
    "torch.neg_({t})",
    "torch.sigmoid_({t})",
    "torch.exp_({t})",
    "torch.clamp_({t}, -0.1, 0.1)",
    "torch.zero_({t})",
    "torch.fill_({t}, 0.25)",
    "torch.dropout_({t}, 0.5, True)",
    "torch.index_put_({t}, ({i},), {u}[:2])",
    "torch._foreach_add_([{t}], 0.5)",
    "torch._foreach_mul_([{u}.clone(), {t}], -0.5)",
    "torch._foreach_copy_([{t}], [{u}])",
    "torch._foreach_zero_([{t}])",
    "torch._foreach_lerp_([{t}], [{u}], 0.5)",
    "F.relu({t}, inplace=True)",
    "F.relu({t}, True)",
    "F.relu_({t})",
    "F.leaky_relu({t}, 0.5, True)",
    "F.leaky_relu_({t}, 0.5)",
    "F.elu({t}, inplace=True)",
    "F.selu({t}, True)",
    "F.silu({t}, inplace=True)",
    "F.mish({t}, inplace=True)",
    "F.hardswish({t}, inplace=True)",
    "F.hardtanh({t}, -0.1, 0.1, True)",
    "F.hardtanh_({t}, -0.1, 0.1)",
    "F.threshold({t}, 0.1, 0.2, True)",
    "F.dropout({t}, 0.5, True, True)",
    "F.alpha_dropout({t}, 0.5, True, True)",
    "F.rrelu({t}, 0.1, 0.3, True, True)",
    "F.batch_norm({u}.view(1, -1, 1).expand(3, -1, 2), {t}.view(-1), {t}.clone().view(-1), training=True)",
    "F.batch_norm({u}.view(1, -1, 1).expand(3, -1, 2), {u}.abs().view(-1), running_var={t}.view(-1), training=True)",
    "F.instance_norm({u}.view(1, -1, 1).expand(3, -1, 2), {t}.view(-1), {u}.abs().view(-1))",
    "F.embedding({i}, {t}.view({t}.shape[0], -1), max_norm=0.1)",
    "nn.init.constant_({t}, 0.25)",
    "nn.init.normal_({t})",
    "torch._fused_sgd_([{u}.clone()], [{u}.clone()], [{t}], weight_decay=0.1, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, "
    "maximize=False, is_first_step=False)",
    "torch._C._nn.rrelu_with_noise({u}, {t}, 0.1, 0.3, True)",
    "F.normalize({u}, 2.0, 0, 1e-12, {t})",
)
MODULES = (
    "self.relu({t})",
    "self.leaky({t})",
    "self.silu({t})",
    "self.dropout({t})",
    "self.relus({t})",
    "self.own({t})",
    "self.hooked({t})",
    "self.patched({t})",
)
OVERLOADS = (
    "aten.add_.Tensor({t}, {u})",
    "aten.add_.Scalar({t}, 0.5)",
    "aten.add_({t}, {u})",
    "aten.mul_.Scalar({t}, -0.5)",
    "aten.copy_.default({t}, {u})",
    "aten.relu_.default({t})",
    "aten.gelu_.default({t})",
    "aten.zero_.default({t})",
    "aten.fill_.Scalar({t}, 0.25)",
    "aten.clamp_.default({t}, -0.1, 0.1)",
    "aten.index_put_.default({t}, [{i}], {u}[:2])",
    "aten._foreach_mul_.Scalar([{t}], -0.5)",
    "aten._foreach_add_.List([{t}], [{u}])",
    "aten.set_.source_Tensor({t}, {u}.clone())",
    "torch.ops.fxfuse_tests.halve_all([{t}])",
    "torch.ops.fxfuse_tests.halve_all.default(tensors=[{u}.clone(), {t}])",
)
NESTED = (
    "checkpoint(lambda t: t.mul_(-0.5), {t}, use_reentrant=False)",
    "opaque({t})",
    "untraced({t})",
)
DATA = (
    "{t}.data.mul_(-0.5)",
    "{t}.data[0] = 0.25",
    "{t}.data.copy_({u})",
    "{t}.view(torch.int32).zero_()",
    "{t}.data = {u}.clone()",
    "{t}.detach().mul_(-0.5)",
)
# What shares the target's memory: a write goes through it, and it is made either there or as soon as the target is known.
VIEWS = (
    "{t}.view(-1)",
    "{t}.view({t}.shape)",
    "{t}.view_as({u})",
    "{t}.reshape(-1)",
    "{t}.flatten()",
    "{t}.ravel()",
    "{t}.unflatten(0, (1, -1))",
    "{t}[0]",
    "{t}[1:]",
    "{t}[::2]",
    "{t}[..., 0]",
    "{t}[:, None]",
    "{t}.select(0, 1)",
    "{t}.narrow(0, 0, 1)",
    "{t}.transpose(0, -1)",
    "{t}.permute(0, *range(1, {u}.dim()))",
    "{t}.movedim(0, -1)",
    "{t}.mT",
    "{t}.T",
    "{t}.diagonal(0, 0, -1)",
    "{t}.as_strided((2,), (1,))",
    "{t}.chunk(2)[0]",
    "{t}.split(1)[1]",
    "{t}.tensor_split(2)[1]",
    "{t}.unbind(0)[1]",
    "next(iter({t}.unbind()))",
    "{t}.unfold(0, 1, 1)",
    "{t}.expand(1, *{t}.shape)",
    "{t}.expand_as({u})",
    "{t}.sum_to_size({t}.shape)",
    "{t}.conj()",
    "{t}.type(torch.float32)",
    "{t}.as_subclass(torch.Tensor)",
    "{t}.unsafe_split(1)[1]",
    "{t}.broadcast_to({t}.shape)",
    "{t}.unsqueeze(0)",
    "{t}.squeeze()",
    "{t}.detach()",
    "{t}.data",
    "{t}.real",
    "{t}.contiguous()",
    "{t}.float()",
    "{t}.to(torch.float32)",
    "{t}.type_as({u})",
    "{t}.cpu()",
    "{t}.to({u})",
    "{t}.positive()",
    "{t}.resolve_conj()",
    "torch.atleast_1d({t})",
    "torch.broadcast_tensors({t}, {u})[0]",
    "torch.narrow({t}, 0, 0, 1)",
    "torch.split({t}, 1)[0]",
    "torch.transpose({t}, 0, -1)",
    "torch.as_strided({t}, (2,), (1,))",
    "F.dropout({t}, 0.5, False)",
    "self.identity({t})",
    "aten.view.default({t}, [-1])",
    "aten.select.int({t}, 0, 0)",
    "aten.slice.Tensor({t}, 0, 0, 1)",
    "aten.alias.default({t})",
    "aten.split.Tensor({t}, 1)[0]",
    "torch.asarray({t})",
    "torch.as_tensor({t})",
    "torch.ravel({t})",
    "torch.dropout({t}, 0.5, False)",
    "F.alpha_dropout({t}, 0.5, False)",
    "self.no_dropout({t})",
    "nn.Parameter({t}, requires_grad=False)",
    "[{t}][0]",
)


def kinds() -> Iterator[tuple[str, str]]:
    """Each kind once: what is made as soon as the target is known, under the name `early` (empty: nothing), and the line that writes."""
    lines = (IN_PLACE_METHODS, RESHAPES, REBINDING, OPERATORS, INDEX_WRITES, OUT, FUNCTIONS, MODULES, OVERLOADS, NESTED, DATA)
    yield from (("", line) for table in lines for line in table)
    yield from (("", f"{view}.mul_(-0.5)") for view in VIEWS)
    yield from ((view, "early.mul_(-0.5)") for view in VIEWS)
