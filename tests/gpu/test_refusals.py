"""What the CUDA ops do not take, where no other file of tests asks: each call raises a RuntimeError with its sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

Arguments = dict[str, Any]
DEVICE = torch.device("cuda")


def gelu_pool_input_gradient() -> Arguments:
    x = torch.zeros(2, 3, 4, 8)
    return dict(
        grad=torch.zeros(2, 3, 1, 1), input=x, bias=None, output_size=[1, 1], approximate="none", of_input=torch.zeros_like(x), of_channels=torch.zeros(2, 3)
    )


def conv_gelu_pool_weight_gradient() -> Arguments:
    weight = torch.zeros(64, 8, 3, 3)
    return dict(
        grad=torch.zeros(2, 64), input=torch.zeros(2, 8, 20, 20), weight=weight, bias=None, stride=[1, 1], padding=[0, 0], dilation=[1, 1],
        approximate="none", precision="tf32", of_weight=torch.zeros_like(weight), of_bias=None,
    )  # fmt: skip


def conv_norm_pool_gelu() -> Arguments:
    return dict(
        input=torch.zeros(2, 3, 4, 4, 8), weight=torch.zeros(6, 3, 3, 3, 3), bias=None, addend=None, norm_weight=None, norm_bias=None,
        transposed=False, stride=[1, 1, 1], padding=[1, 1, 1], output_padding=[0, 0, 0], addend_scale=1.0, addend_value=0.0, eps=1e-5,
        pool_size=[2, 2, 2], approximate="none", precision="tf32", out_dtype=None,
    )  # fmt: skip


def conv_norm_pool_gelu_weight_gradient() -> Arguments:
    forward = conv_norm_pool_gelu()
    del forward["out_dtype"]
    outputs = dict(of_weight=torch.zeros_like(forward["weight"]), of_norm_weight=None, of_norm_bias=None, of_constants=None)
    return dict(grad=torch.zeros(2, 6, 2, 2, 4), **forward, **outputs)


TAKEN = (gelu_pool_input_gradient, conv_gelu_pool_weight_gradient, conv_norm_pool_gelu, conv_norm_pool_gelu_weight_gradient)
REFUSED: list[tuple[Callable[[], Arguments], Callable[[], Arguments], str]] = [
    (gelu_pool_input_gradient, lambda: dict(input=torch.zeros(3, 4, 8)), "input has shape [3, 4, 8], but [N, C, *spatial] is needed"),
    (gelu_pool_input_gradient, lambda: dict(input=torch.zeros(2, 3, 4, 16)[..., ::2]), "neither contiguous nor channels_last"),
    (gelu_pool_input_gradient, lambda: dict(of_input=torch.zeros(2, 3, 4, 9)), "of_input must have the shape"),
    (gelu_pool_input_gradient, lambda: dict(grad=torch.zeros(2, 3, 2, 2)), "grad has shape [2, 3, 2, 2], but contiguous [2, 3, 1, 1] is needed"),
    (gelu_pool_input_gradient, lambda: dict(of_channels=torch.zeros(3, 3)), "of_channels must be contiguous float32 [N, C]"),
    (gelu_pool_input_gradient, lambda: dict(bias=torch.zeros(4)), "bias has shape [4], but [3] is needed"),
    (gelu_pool_input_gradient, lambda: dict(approximate="sigmoid"), "approximate is 'sigmoid'"),
    (gelu_pool_input_gradient, lambda: dict(output_size=[0, 1], grad=torch.zeros(2, 3, 0, 1)), "without windows there is no gradient"),
    (conv_gelu_pool_weight_gradient, lambda: dict(grad=torch.zeros(2, 63)), "a contiguous value for each image and output channel is needed"),
    (conv_gelu_pool_weight_gradient, lambda: dict(stride=[1, 1, 1]), "2 entries are needed"),
    (conv_norm_pool_gelu, lambda: dict(input=torch.zeros(2, 3, 4, 4, 8).double()), "input is float64"),
    (conv_norm_pool_gelu, lambda: dict(input=torch.zeros(4, 4, 8)), "but [N, C, D, H, W] or [C, D, H, W] is needed"),
    (conv_norm_pool_gelu, lambda: dict(input=torch.zeros(2, 3, 4, 0, 8)), "only the batch may be empty"),
    (conv_norm_pool_gelu, lambda: dict(weight=torch.zeros(6, 3, 3, 3)), "five dimensions are needed"),
    (conv_norm_pool_gelu, lambda: dict(weight=torch.zeros(6, 3, 3, 3, 3).half()), "one dtype for both is needed"),
    (conv_norm_pool_gelu, lambda: dict(weight=torch.zeros(6, 4, 3, 3, 3)), "groups are not supported"),
    (conv_norm_pool_gelu, lambda: dict(stride=[1, 1]), "each needs three entries"),
    (conv_norm_pool_gelu, lambda: dict(padding=[-1, 1, 1]), "it cannot be negative"),
    (conv_norm_pool_gelu, lambda: dict(output_padding=[1, 0, 0]), "output_padding is [1, 0, 0]"),
    (conv_norm_pool_gelu, lambda: dict(bias=torch.zeros(5)), "bias has shape [5], but [6] is needed"),
    (conv_norm_pool_gelu, lambda: dict(bias=torch.zeros(6, device="cpu")), "different devices"),
    (conv_norm_pool_gelu, lambda: dict(norm_weight=torch.zeros(4)), "norm_weight has shape [4], but [8] is needed"),
    (conv_norm_pool_gelu, lambda: dict(addend=torch.zeros(5, 1, 1, 1)), "one value or one for each of 6 channels"),
    (conv_norm_pool_gelu, lambda: dict(precision="high"), "precision is 'high'"),
    (conv_norm_pool_gelu, lambda: dict(out_dtype=torch.float16), "out_dtype is float16"),
    (conv_norm_pool_gelu_weight_gradient, lambda: dict(grad=torch.zeros(2, 6, 2, 2, 5)), "grad has shape [2, 6, 2, 2, 5]"),
    (conv_norm_pool_gelu_weight_gradient, lambda: dict(grad=torch.zeros(193)[1:].view(2, 6, 2, 2, 4)), "between two elements of a pair"),
    (conv_norm_pool_gelu_weight_gradient, lambda: dict(of_norm_weight=torch.zeros(16)[::2]), "of_norm_weight is not contiguous"),
    (conv_norm_pool_gelu_weight_gradient, lambda: dict(of_constants=torch.zeros(5)), "of_constants is not a contiguous tensor"),
]


def call(taken: Callable[[], Arguments], change: Callable[[], Arguments] = dict) -> Any:
    with DEVICE:
        arguments = {**taken(), **change()}
    return getattr(torch.ops.fxfuse, taken.__name__)(*arguments.values())


@pytest.mark.parametrize("taken", TAKEN, ids=lambda taken: taken.__name__)
def test_taken(taken: Callable[[], Arguments]) -> None:
    call(taken)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("taken", "change", "sentence"), REFUSED, ids=[f"{taken.__name__}: {sentence}" for taken, _, sentence in REFUSED])
def test_refused(taken: Callable[[], Arguments], change: Callable[[], Arguments], sentence: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        call(taken, change)
