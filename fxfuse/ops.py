"""Declaring ops: schema, tags and fake in Python; the kernels register themselves from the compiled library.

Schemas live in Python so that matching, explain and fake tensors work with no library built, and because a second C++ `def` of an op
aborts the process, while here a second import finds the op declared and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import flops, torch_private

NAMESPACE = "fxfuse"
# Inductor gives an untagged custom op exact strides: it copies a channels_last convolution output to contiguous in front of it.
TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

# torch keeps its caller's file name and takes only text: in a folder with letters that the locale does not have it is none.
_library = eval(compile("Library(NAMESPACE, 'FRAGMENT')", "fxfuse.ops", "eval"), {"Library": torch.library.Library, "NAMESPACE": NAMESPACE})
_with_kernel: set[tuple[str, str]] = set()


def define(
    schema: str,
    fake: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
    autograd: Callable[..., Any] | None = None,
    formula: flops.Formula | None = None,
) -> Any:
    """Declares `fxfuse::<name><schema>` with its fake and returns the op; declares it once a process, whoever imports it again.

    schema: as in native_functions.yaml, without the namespace. fake: gets the op's arguments, returns an empty output of the right shape,
    dtype and strides, computed from the strides it is given, and raises what eager would raise on bad shapes.
    kernel: what runs on every device, for an op made of others; without it the compiled library brings kernels.
    autograd: what runs in front of the kernels where autograd records, `apply` of a torch.autograd.Function that calls other ops.
    formula: the FLOPs of a call; without one they are 0.
    """
    name = schema.split("(", 1)[0]
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        _library.define(schema, tags=TAGS)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        if kernel is not None:
            _library.impl(name, kernel, "CompositeExplicitAutograd")
        if autograd is not None:
            _library.impl(name, autograd, "Autograd")
        if formula is not None:
            flops.register(getattr(getattr(torch.ops, NAMESPACE), name).default, formula)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def has_kernel(op: Any, device: str) -> bool:
    """Whether a library with a kernel of `op` for a device type, "cpu" or "cuda", is loaded."""
    key = op.name(), device
    if key not in _with_kernel and torch_private.has_kernel(*key):
        _with_kernel.add(key)  # for good: libraries stay loaded, and asking takes as long as a small kernel
    return key in _with_kernel
