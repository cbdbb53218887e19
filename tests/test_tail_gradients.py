"""Which tail gradients the CUDA kernels take, and what is made of what a kernel leaves behind: with torch's ops in the kernels' place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import gelu_pool_reference, norm_pool_gelu_reference
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torch._dynamo.backends.common import aot_autograd
from functorch.compile import make_boxed_func

from fxfuse import library, ops
from fxfuse.passes import conv_gelu_pool_gradients as gelu
from fxfuse.passes import conv_gelu_pool_ops as gelu_ops
from fxfuse.passes import conv_norm_pool_gelu_gradients as norm
from fxfuse.passes import conv_norm_pool_gelu_ops as norm_ops
from fxfuse.recompute import dense

Arguments = dict[str, Any]


def of_norm(input: torch.Tensor, **changed: Any) -> Arguments:
    window = {"kernel_size": [2, 2, 2], "stride": [2, 2, 2], "padding": [0, 0, 0], "ceil_mode": False, "count_include_pad": True}
    none = {"bias": None, "addend": None, "norm_weight": None, "norm_bias": None}
    fixed = {"addend_scale": -2.0, "addend_value": 0.5, "norm_ndim": 1, "eps": 1e-5, **window, "divisor_override": None}
    return {"input": input, **none, **fixed, "approximate": "none", "out_dtype": None, **changed}


def of_gelu(input: torch.Tensor, size: list[int], **changed: Any) -> Arguments:
    return {"input": input, "bias": None, "output_size": size, "keepdim": True, "approximate": "none", "out_dtype": None, **changed}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on "cuda" that hold nothing, and a library that has every kernel."""
    monkeypatch.setattr(ops, "has_kernel", lambda op, device: device == "cuda")
    with FakeTensorMode():
        yield


@pytest.mark.parametrize(
    ("shape", "changed", "taken"),
    [
        ((2, 4, 4, 4, 64), {}, True), ((4, 4, 4, 1024), {}, True), ((2, 4, 4, 4, 1025), {}, False), ((0, 4, 4, 4, 64), {}, False),
        ((2, 4, 4, 4, 64), {"norm_ndim": 2}, False), ((2, 4, 4, 4, 64), {"stride": [2, 1, 2]}, False),
        ((2, 4, 4, 4, 64), {"padding": [0, 0, 1]}, False),
        ((2, 4, 4, 4, 64), {"ceil_mode": True}, True), ((2, 4, 4, 5, 64), {"ceil_mode": True}, False), ((2, 4, 4, 5, 64), {}, True),
        ((2, 4, 4, 4, 64), {"divisor_override": 3}, False), ((1 << 16, 64, 64, 64, 64), {}, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_norm_kernel_takes(shape: tuple[int, ...], changed: Arguments, taken: bool, cuda: None) -> None:
    assert norm.kernel_takes(of_norm(torch.empty(shape, device="cuda"), **changed)) == taken


@pytest.mark.parametrize(
    ("shape", "size", "taken"),
    [
        ((2, 4, 9), [1], True), ((2, 4, 9, 9), [-1, 3], True), ((4, 9, 9), [1, 1], True), ((2, 4, 9, 9), [0, 3], False),
        ((0, 4, 9, 9), [1, 1], False),
        ((1, 1, 1 << 20), [1 << 12], False), ((1, 1, 1 << 15, 1 << 15), [1, 1], False),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_gelu_kernel_takes(shape: tuple[int, ...], size: list[int], taken: bool, cuda: None) -> None:
    assert gelu.kernel_takes(of_gelu(torch.empty(shape, device="cuda"), size)) == taken


def test_nothing_without_a_kernel_or_elsewhere(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not norm.kernel_takes(of_norm(torch.empty(2, 4, 4, 4, 64))) and not gelu.kernel_takes(of_gelu(torch.empty(2, 4, 9), [1]))
    monkeypatch.setattr(ops, "has_kernel", lambda op, device: False)
    on_gpu = torch.empty(2, 4, 4, 4, 64, device="cuda")
    assert not norm.kernel_takes(of_norm(on_gpu)) and not gelu.kernel_takes(of_gelu(on_gpu, [1, 1, 1]))


def test_no_library_has_kernels_of_these_ops_for_a_cpu() -> None:
    assert not ops.has_kernel(norm.norm_pool_gelu_input_gradient, "cpu") and not ops.has_kernel(gelu.gelu_pool_input_gradient, "cpu")


def test_dense() -> None:
    x = torch.randn(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    others = [(x[..., ::2], False, True), (x[:1].expand(2, -1, -1, -1), False, True)]
    for given, contiguous, copied in ((x, True, False), (last, False, False), (last, True, True), *others):
        found, is_copy = dense(given, contiguous)
        assert is_copy == copied == (found is not given) and torch.equal(found, given)


@torch.enable_grad()
def norm_kernel(grad: torch.Tensor, input: torch.Tensor, *given: Any) -> None:
    """What the CUDA kernel leaves behind, by autograd."""
    bias, addend, weight, shift, scale, value, eps, pool, approximate, of_input, of_channels, of_rows = given
    affine = [torch.full((input.shape[-1],), default) if own is None else own for own, default in ((weight, 1.0), (shift, 0.0))]
    leaves = [tensor.detach().double().requires_grad_() for tensor in (input, *affine)]
    tensors = {"bias": bias, "addend": addend, "norm_weight": leaves[1], "norm_bias": leaves[2]}
    rest = {"addend_scale": scale, "addend_value": value, "eps": eps, "kernel_size": pool, "stride": pool, "approximate": approximate}
    _leave(norm_pool_gelu_reference(*of_norm(leaves[0], **tensors, **rest).values()), leaves, grad, of_input, of_channels, of_rows)


@torch.enable_grad()
def gelu_kernel(grad: torch.Tensor, input: torch.Tensor, bias: Any, size: list[int], approximate: str, *outputs: Any) -> None:
    x = input.detach().double().requires_grad_()
    _leave(gelu_pool_reference(*of_gelu(x, size, bias=bias, approximate=approximate).values()), [x], grad, *outputs)


def _leave(out: torch.Tensor, leaves: list[torch.Tensor], grad: torch.Tensor, of_input: Any, of_channels: Any, of_rows: Any = None) -> None:
    assert grad.is_contiguous() and grad.shape == out.shape and of_input.dtype in (torch.float32, torch.bfloat16)
    found, *rest = torch.autograd.grad(out, leaves, grad.double())
    of_input.copy_(found)
    if of_channels is not None:
        of_channels.copy_(found.flatten(2).sum(2))
    if of_rows is not None:
        of_rows.copy_(torch.stack(rest))


@pytest.mark.parametrize("may_overwrite", (False, True))
@pytest.mark.parametrize("layout", ("contiguous", "channels_last", "sliced", "no batch"))
@pytest.mark.parametrize("addend", ((), (3, 1, 1, 1), (2, 1, 1, 1, 1), (4, 1), (8,)), ids=str)
def test_norm_as_torch_s_own_ops(addend: tuple[int, ...], layout: str, may_overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = _input((2, 3, 4, 4, 8), layout)
    addend = addend[1:] if len(addend) > x.dim() else addend
    parameters = {"bias": torch.randn(3), "addend": torch.randn(addend), "norm_weight": torch.randn(8), "norm_bias": torch.randn(8)}
    arguments, grad = of_norm(x, **parameters), torch.randn(*x.shape[:-3], 2, 2, 4)
    monkeypatch.setattr(norm, "norm_pool_gelu_input_gradient", norm_kernel)
    is_copied = layout == "sliced" or (layout == "channels_last" and len(addend) in (1, 2))
    expected = norm.norm_pool_gelu_gradients(grad, arguments, ("input", *parameters))
    monkeypatch.setattr(norm, "kernel_takes", lambda arguments: True)
    before = x.clone()
    _check(norm.norm_pool_gelu_gradients(grad, arguments, ("input", *parameters), may_overwrite), expected)
    assert torch.equal(x, before) == (is_copied or not may_overwrite)


@pytest.mark.parametrize("may_overwrite", (False, True))
@pytest.mark.parametrize("layout", ("contiguous", "channels_last", "sliced", "no batch"))
@pytest.mark.parametrize("size", ([1, 1], [3, -1]), ids=str)
def test_gelu_as_torch_s_own_ops(size: list[int], layout: str, may_overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = _input((2, 3, 7, 6), layout)
    arguments, grad = of_gelu(x, size, bias=torch.randn(3)), torch.randn(*x.shape[:-2], size[0], 6 if size[1] == -1 else 1)
    monkeypatch.setattr(gelu, "gelu_pool_input_gradient", gelu_kernel)
    expected = gelu.gelu_pool_gradients(grad, arguments, ("input", "bias"))
    monkeypatch.setattr(gelu, "kernel_takes", lambda arguments: True)
    before = x.clone()
    _check(gelu.gelu_pool_gradients(grad, arguments, ("input", "bias"), may_overwrite), expected)
    assert torch.equal(x, before) == (layout == "sliced" or not may_overwrite)


@pytest.mark.compiler
@pytest.mark.parametrize(("dynamic", "held"), [(False, "kernel_gradients"), (True, "backward")])
@pytest.mark.parametrize("name", ("norm_pool_gelu", "gelu_pool"))
def test_what_a_compiled_backward_holds(name: str, dynamic: bool, held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes that are known the kernel, with the sums of what it leaves behind as ops of their own."""
    library.load("cpu")
    torch._dynamo.reset()
    norm_a = of_norm(torch.randn(2, 3, 4, 4, 8), bias=torch.randn(3), addend=torch.randn(()), norm_weight=torch.randn(8), norm_bias=torch.randn(8))
    module, ops_module, kernel, arguments = {
        "norm_pool_gelu": (norm, norm_ops, norm_kernel, norm_a),
        "gelu_pool": (gelu, gelu_ops, gelu_kernel, of_gelu(torch.randn(2, 3, 7, 6), [1, 1], bias=torch.randn(3))),
    }[name]
    leaves = [value.requires_grad_() for value in arguments.values() if isinstance(value, torch.Tensor)]
    twin, targets = getattr(torch.ops.fxfuse, f"{name}_training"), []

    def kept(gm: torch.fx.GraphModule, _: Any) -> Any:
        targets.append([node.target.name() for node in gm.graph.nodes if getattr(node.target, "namespace", None) == "fxfuse"])
        return make_boxed_func(gm.forward)

    expected = torch.autograd.grad(twin(*arguments.values()).square().sum(), leaves)
    monkeypatch.setattr(module, f"{name}_input_gradient", lambda grad, *given: None if isinstance(grad, FakeTensor) else kernel(grad, *given))
    for patched in (module, ops_module):
        monkeypatch.setattr(patched, "kernel_takes", lambda arguments: True)
    compiled = torch.compile(lambda *given: twin(*given), backend=aot_autograd(fw_compiler=kept), dynamic=dynamic)
    found = torch.autograd.grad(compiled(*arguments.values()).square().sum(), leaves)
    assert targets == [[f"fxfuse::{name}"], [f"fxfuse::{name}_{held}"]]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ("norm_pool_gelu", "conv_norm_pool_gelu"))
def test_gradients_that_a_kernel_leaves_in_one_tensor_come_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library.load("cpu")
    monkeypatch.setattr(norm, "norm_pool_gelu_input_gradient", norm_kernel)
    monkeypatch.setattr(norm, "kernel_takes", lambda arguments: True)
    parameters = {"bias": torch.randn(3), "addend": torch.randn(()), "norm_weight": torch.randn(10), "norm_bias": torch.randn(10)}
    arguments = of_norm(torch.randn(2, 3, 4, 4, 10), **parameters)
    if name == "conv_norm_pool_gelu":
        conv = {"input": torch.randn(2, 4, 2, 2, 5), "weight": torch.randn(4, 3, 2, 2, 2), **parameters, "transposed": True}
        geometry = {"stride": [2] * 3, "padding": [0] * 3, "output_padding": [0] * 3, "addend_scale": 1.0, "addend_value": 0.0, "eps": 1e-5}
        arguments = {**conv, **geometry, "pool_size": [2] * 3, "approximate": "none", "precision": "ieee", "out_dtype": None}
    needs = [True] * sum(isinstance(value, torch.Tensor) for value in arguments.values())
    found = getattr(torch.ops.fxfuse, f"{name}_backward")(torch.randn(2, 3, 2, 2, 5), *arguments.values(), needs)
    assert len({gradient.untyped_storage().data_ptr() for gradient in found}) == len(needs)
    assert all(gradient.storage_offset() == 0 for gradient in found)


def _input(shape: tuple[int, ...], layout: str) -> torch.Tensor:
    x = torch.randn(shape)
    if layout == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return {"sliced": torch.stack([x, x], -1)[..., 0], "no batch": x[0]}.get(layout, x)


def _check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-4)
