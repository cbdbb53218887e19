"""Calls of the ops on CPU tensors: one of each that is taken, and by what change in it each sentence is told."""

from __future__ import annotations

from typing import Any

import torch

X, IMAGE = torch.randn(2, 3, 4, 4, 8), torch.randn(2, 4, 9, 9)
TAKEN: dict[str, dict[str, Any]] = {
    "norm_pool_gelu": dict(
        input=X, bias=None, addend=None, norm_weight=None, norm_bias=None, addend_scale=1.0, addend_value=0.0, norm_ndim=1, eps=1e-5,
        kernel_size=[2, 2, 2], stride=[2, 2, 2], padding=[0, 0, 0], ceil_mode=False, count_include_pad=True, divisor_override=None,
        approximate="none", out_dtype=None,
    ),
    "gelu_pool": dict(input=X, bias=None, output_size=[1, 1, 1], keepdim=True, approximate="none", out_dtype=None),
    "conv_gelu_pool": dict(
        input=IMAGE, weight=torch.randn(6, 4, 3, 3), bias=None, stride=[1, 1], padding=[0, 0], dilation=[1, 1], keepdim=True,
        approximate="none", precision="ieee", out_dtype=None,
    ),
    "conv_norm_pool_gelu": dict(
        input=X, weight=torch.randn(6, 3, 3, 3, 3), bias=None, addend=None, norm_weight=None, norm_bias=None, transposed=False,
        stride=[1, 1, 1], padding=[1, 1, 1], output_padding=[0, 0, 0], addend_scale=1.0, addend_value=0.0, eps=1e-5, pool_size=[2, 2, 2],
        approximate="none", precision="ieee", out_dtype=None,
    ),
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("norm_pool_gelu", dict(input=X.double()), "input is float64, but float32, bfloat16 and float16 are supported"),
    ("norm_pool_gelu", dict(input=X[0, 0]), "input has shape [4, 4, 8], but [N, C, D, H, W] or [C, D, H, W] is needed"),
    ("norm_pool_gelu", dict(input=X[:, :0]), "input has shape [2, 0, 4, 4, 8], but only the batch may be empty"),
    ("norm_pool_gelu", dict(bias=torch.randn(4)), "bias has shape [4], but [3] is needed"),
    ("norm_pool_gelu", dict(bias=torch.randn(3).half()), "bias is float16, but float32 and the input's float32 are supported"),
    ("norm_pool_gelu", dict(addend=torch.randn(2, 1, 3, 4, 4, 8)), "addend has shape [2, 1, 3, 4, 4, 8], which does not broadcast"),
    ("norm_pool_gelu", dict(addend=torch.randn(2)), "which does not broadcast to the input's [2, 3, 4, 4, 8] without enlarging it"),
    ("norm_pool_gelu", dict(addend=torch.ones(8, dtype=torch.int64)), "addend is "),
    ("norm_pool_gelu", dict(norm_weight=torch.randn(4)), "norm_weight has shape [4], but [8] is needed"),
    ("norm_pool_gelu", dict(norm_bias=torch.randn(4, 8)), "norm_bias has shape [4, 8], but [8] is needed"),
    ("norm_pool_gelu", dict(norm_ndim=0), "norm_ndim is 0, but 1 to 5 dimensions"),
    ("norm_pool_gelu", dict(norm_ndim=6), "norm_ndim is 6, but 1 to 5 dimensions"),
    ("norm_pool_gelu", dict(kernel_size=[2, 2]), "each needs three entries"),
    ("norm_pool_gelu", dict(kernel_size=[0, 2, 2]), "every entry must be positive"),
    ("norm_pool_gelu", dict(stride=[2, 0, 2]), "every entry must be positive"),
    ("norm_pool_gelu", dict(padding=[2, 0, 0]), "between 0 and half of kernel_size"),
    ("norm_pool_gelu", dict(padding=[-1, 0, 0]), "between 0 and half of kernel_size"),
    ("norm_pool_gelu", dict(kernel_size=[5, 2, 2]), "kernel_size [5, 2, 2] is larger than an input of shape [2, 3, 4, 4, 8]"),
    ("norm_pool_gelu", dict(divisor_override=0), "divisor_override is 0"),
    ("norm_pool_gelu", dict(approximate="sigmoid"), "approximate is 'sigmoid', but GELU takes 'none' (exact) or 'tanh'"),
    ("norm_pool_gelu", dict(out_dtype=torch.float16), "out_dtype is float16, but float32 and the input's float32 are supported"),
    ("gelu_pool", dict(input=X.int()), "input is Int, but float32"),
    ("gelu_pool", dict(output_size=[]), "one to three entries are needed"),
    ("gelu_pool", dict(output_size=[1, 1]), "one entry for each dimension behind the channels is needed"),
    ("gelu_pool", dict(output_size=[1, 1, -2]), "sizes are 0 or more, or -1 for the input's"),
    ("gelu_pool", dict(output_size=[1, 2, 1], keepdim=False), "dimensions are dropped (keepdim=False) only at size 1"),
    ("gelu_pool", dict(input=X[:, :, :0], output_size=[1, 2, 1]), "only a global pool takes an empty plane"),
    ("gelu_pool", dict(bias=torch.randn(3, 1)), "bias has shape [3, 1], but [3] is needed"),
    ("gelu_pool", dict(approximate=""), "approximate is ''"),
    ("gelu_pool", dict(out_dtype=torch.bfloat16), "out_dtype is bfloat16"),
    ("conv_gelu_pool", dict(input=IMAGE.double()), "input is float64"),
    ("conv_gelu_pool", dict(weight=torch.randn(6, 4)), "weight has shape [6, 4], but [C_out, C_in] and one to three kernel sizes are needed"),
    ("conv_gelu_pool", dict(weight=torch.randn(6, 4, 3)), "input needs a channel dimension and may have a batch dimension before 1 spatial ones"),
    ("conv_gelu_pool", dict(weight=torch.randn(6, 4, 3, 3).half()), "weight is float16 and input float32, but both must have one dtype"),
    ("conv_gelu_pool", dict(bias=torch.randn(5)), "bias has shape [5], but [6] is needed"),
    ("conv_gelu_pool", dict(precision="high"), "precision is 'high', but 'tf32' or 'ieee' is needed"),
    ("conv_gelu_pool", dict(stride=[1, 1, 1]), "stride is [1, 1, 1], but 2 entries are needed, or one for all"),
    ("conv_gelu_pool", dict(weight=torch.randn(6, 3, 3, 3)), "input has 4 channels and weight takes 3, but the two must be equal and positive"),
    ("conv_gelu_pool", dict(stride=[0]), "stride is [0], padding [0, 0] and dilation [1, 1], but kernel sizes, strides and dilations are positive"),
    ("conv_gelu_pool", dict(weight=torch.randn(6, 4, 11, 3)), "a kernel of [11, 3] with padding [0, 0] and dilation [1, 1] needs more pixels"),
    ("conv_gelu_pool", dict(approximate="erf"), "approximate is 'erf'"),
    ("conv_norm_pool_gelu", dict(input=X.double()), "input is float64"),
    ("conv_norm_pool_gelu", dict(input=X[0, 0]), "input has shape [4, 4, 8], but [N, C, D, H, W] or [C, D, H, W] is needed"),
    ("conv_norm_pool_gelu", dict(precision="high"), "precision is 'high', but 'tf32' or 'ieee' is needed"),
    ("conv_norm_pool_gelu", dict(pool_size=[5, 2, 2]), "kernel_size [5, 2, 2] is larger than an input of shape [2, 6, 4, 4, 8]"),
    ("conv_norm_pool_gelu", dict(norm_weight=torch.randn(4)), "norm_weight has shape [4], but [8] is needed"),
    ("conv_norm_pool_gelu", dict(addend=torch.randn(7)), "which does not broadcast to the input's [2, 6, 4, 4, 8]"),
    ("conv_norm_pool_gelu", dict(approximate="erf"), "approximate is 'erf'"),
    ("conv_norm_pool_gelu", dict(weight=torch.randn(6, 2, 3, 3, 3)), "aten::convolution failed: "),
]  # fmt: skip
