"""Every private torch API that fxfuse uses, in one place. Checked on torch 2.11.0 (CUDA 13.0) and 2.13.0 (CPU).

Each function says why no public API serves. The rest of the package names only what every FX pass must: the types of ops in `torch._ops`,
schemas (`torch._C.FunctionSchema`), `torch._C._nn`, `torch.utils._pytree`, and Dynamo's counters.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import RestartAnalysis, SkipFrame, TorchDynamoException
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode

from .places import Frame, nearest

# Raised where fake tensors cannot stand in for data.
DataDependent = (DataDependentOutputException, DynamicOutputShapeException)

# Not failures: with these Inductor asks Dynamo to trace once more (a float input that should be a constant, say), or to leave a frame alone.
Restart = (RestartAnalysis, SkipFrame)


def inductor(mode: str | None, options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """What `torch.compile(backend="inductor", mode=..., options=...)` would call, with Inductor's own checks of both.

    `torch._inductor.compile_fx` alone would have to repeat how a mode becomes options and what CUDA graphs need in the environment.
    Raises RuntimeError for an unknown mode or option.
    """
    return torch._TorchCompileInductorWrapper(mode, dict(options or {}), dynamic=None)


def reset_inductor() -> None:
    """Frees what CUDA graph trees hold; `torch._dynamo.reset()` asks each backend to do so."""
    torch._TorchCompileInductorWrapper(None, None, dynamic=None).reset()


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs more than its `forward`; nn.Module has no public way to ask."""
    return any(getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"))


def hint(value: Any) -> int:
    """The example value behind a size. Reading it installs no guard, unlike `int(size)`; an unbacked size counts as 1."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    return int(value.node.hint) if value.node.has_hint() else 1


def example_of(value: Any) -> int | float | bool | None:
    """The number itself, or the example value behind a symbolic one; None for anything else. Installs no guard."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint if value.node.has_hint() else constant_of(value)
    return value if isinstance(value, (int, float)) else None


def constant_of(value: Any) -> int | float | bool | None:
    """The number that a symbolic value has been specialised to, as Dynamo does with a module's float attributes; None if it varies.

    Reading it installs no guard.
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    node = value.node
    return {torch.SymInt: node.maybe_as_int, torch.SymFloat: node.maybe_as_float, torch.SymBool: node.maybe_as_bool}[type(value)]()


def known_true(condition: Any) -> bool:
    """Whether a (symbolic) condition holds for every size the graph was compiled for; installs no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def storage_of(tensor: Any) -> int | None:
    """Identity of the storage under a (fake) tensor, which its views share; None where there is none (sparse tensors, no tensor).

    Fake storages have no data pointer to compare.
    """
    if not isinstance(tensor, torch.Tensor):
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def fake_mode_of(values: Any) -> FakeTensorMode:
    """The FakeTensorMode that the tensors in `values` (nested tuples, lists, dicts) were made under; a new one if they are all real.

    `detect_fake_mode` would prefer the mode that is active, which under `explain` is another one than the graph's.
    """
    leaves = torch.utils._pytree.tree_leaves(values)
    return next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None) or new_fake_mode()


def new_fake_mode() -> FakeTensorMode:
    """A FakeTensorMode for static shapes that lets real tensors in (attributes that are neither parameters nor buffers)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Compiled code that is given a fake tensor then gets an error instead of a pointer to nothing.
    mode._allow_unsafe_data_ptr_access = False
    return mode


def faked(values: Any, mode: FakeTensorMode) -> Any:
    """`values` (nested) with each real tensor turned into a fake one of the same shape, strides, dtype, device and requires_grad."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    return torch.utils._pytree.tree_map_only(torch.Tensor, fake, values)


class RealAsFake(TorchDispatchMode):
    """Inside a FakeTensorMode: ops that eager code between graphs runs on real tensors alone see fakes of them, and write to those."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._fake_mode = mode

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo captures frames under infra modes only."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = faked((args, kwargs or {}), self._fake_mode)
        return func(*args, **kwargs)


class LargestValue(TorchDispatchMode):
    """Inside it, `elements` is the size of the largest tensor that any op returned so far. Function modes see no ops inside of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.elements = max([self.elements, *(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))])
        return result


def needs_data(error: BaseException) -> bool:
    """Whether the error says that fake tensors cannot stand in for data."""
    return isinstance(error, DataDependent) or "data pointer" in str(error)


def compile_context() -> Callable[[], AbstractContextManager[Any]]:
    """How to enter the state of the compilation that is going on once more, later: its fake mode and symbolic sizes."""
    from torch._guards import TracingContext, tracing

    context = TracingContext.try_get()
    return lambda: tracing(context)


@contextmanager
def outside_compilation() -> Iterator[None]:
    """Within it, inside a backend's call, tensors are real and a graph can be compiled and run for itself, without gradients."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), tracing(None), torch.no_grad():
        yield


def uncompiled(model: Any) -> Any:
    """What `torch.compile` wrapped, if it did: running compiled code on fake tensors would read their memory."""
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "_torchdynamo_orig_callable", model)


@contextmanager
def preserved(model: Any) -> Iterator[None]:
    """Within it, no part of the model runs compiled code; behind it, every module has the attributes it had before.

    A forward that assigns or appends (`self.cache = ...`, `self.seen.append(...)`) would leave fake tensors in the user's model.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)] if isinstance(model, nn.Module) else []
    containers = [container for module in modules for container in _containers(module)]
    saved = [(container, copy.copy(container)) for container in containers]
    try:
        for module in modules:
            module._modules.update({name: uncompiled(child) for name, child in module._modules.items()})
            module._compiled_call_impl = None
        yield
    finally:
        for current, before in saved:
            current.clear()
            (current.extend if isinstance(current, list) else current.update)(before)


def _containers(module: nn.Module) -> list[Any]:
    """What holds a module's state: its attributes, and those of them that are lists, dicts or sets (parameters and children among them)."""
    return [vars(module), *(value for value in vars(module).values() if isinstance(value, (list, dict, set)))]


def static_capture() -> AbstractContextManager[None]:
    """Dynamo with sizes as given and no limit on recompilations: functions behind a graph break share their code with earlier captures.

    Floats are constants, as they are once Inductor has asked for another trace: as inputs their data would be needed to go on.
    """
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=2**30, accumulated_recompile_limit=2**30, specialize_float=True)


def user_line(error: BaseException) -> str:
    """"at file:line" of the line of the user's model that led to `error`, see `places.nearest`; empty if there is none."""
    packages = tuple(os.path.dirname(os.path.abspath(module.__file__)) for module in (torch, sys.modules[__package__]))
    # What Dynamo raises while it captures has the frames that it was reading, which are not running, as an attribute.
    frames = [*traceback.extract_tb(error.__traceback__), *(getattr(error, "real_stack", None) or ())]
    frames = [f for f in frames if not f.filename.startswith("<frozen ") and not os.path.abspath(f.filename).startswith(packages)]
    return f"at {nearest([Frame(f.filename, f.lineno, f.name) for f in frames])}" if frames else ""


def cause(error: BaseException) -> BaseException:
    """What the model raised, out of the exceptions of its own that Dynamo wraps around it."""
    while isinstance(error, TorchDynamoException) and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__
    return error


def readable(graph: fx.Graph) -> str:
    """The graph as Python code, each value annotated with dtype, shape, strides and device where they are known, under the user's lines.

    Bodies of higher-order ops follow. `GraphModule.print_readable` would need the graph to be a module's.
    """
    code = graph.python_code("self", verbose=True, include_stride=True, include_device=True, expanded_def=True).src
    bodies = [(node.target, getattr(graph.owning_module, str(node.target), None)) for node in graph.find_nodes(op="get_attr")]
    nested = [f"# self.{name}\n{readable(body.graph)}" for name, body in bodies if isinstance(body, fx.GraphModule)]
    return "\n\n".join([code.strip() + "\n", *nested])


def imports_of(graph: fx.Graph) -> str:
    """The import statements that the graph's code needs; raises where it calls what cannot be imported."""
    from torch.fx.graph_module import _format_import_block
    from torch.package import sys_importer

    code = graph.python_code("self")
    used = {name: value for name, value in code.globals.items() if re.search(rf"(?<![\w.]){name}\b", code.src)}
    return _format_import_block({"torch": torch, **used}, sys_importer)


def tracing() -> bool:
    """Whether somebody listens to torch's structured trace (`TORCH_TRACE`, which tlparse reads)."""
    return bool(torch._logging._internal.trace_log.handlers)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Adds an artifact to torch's structured trace, under the current compile id. encoding: "string" or "json"."""
    metadata = {"name": name, "encoding": encoding}
    torch._logging.trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=payload, expect_trace_id=False)


def compile_id() -> str | None:
    """Dynamo's name of the compilation that is going on ("0/0"), as logs and tlparse show it."""
    current = torch._guards.CompileContext.current_compile_id()
    return None if current is None else str(current)


def overload_of(target: Any) -> Any:
    """The op that `torch.library.custom_op` or `triton_op` made, which hold no public link to it; any other target as it is."""
    return target._opoverload if isinstance(target, torch._library.custom_ops.CustomOpDef) else target


def is_state(node: fx.Node) -> bool:
    """Whether a node stands for a parameter or buffer: Dynamo makes them placeholders, and marks those that keep their place in memory."""
    value = node.meta.get("example_value", node.meta.get("val"))
    marked = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    return node.op == "get_attr" or (node.op == "placeholder" and (marked or isinstance(value, nn.Parameter)))


def has_kernel(name: str, device: str) -> bool:
    """Whether an op "namespace::name" has a kernel of its own for a device type; nothing public tells it from one that runs on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, {"cpu": "CPU", "cuda": "CUDA"}[device])


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` stands for a plain tensor or parameter, not for another subclass (DTensor) or a functorch wrapper."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not is_wrapped and type(tensor) in (FakeTensor, torch.Tensor, nn.Parameter, nn.Buffer)


def annotate(graph_module: fx.GraphModule, example_inputs: tuple[Any, ...], fake_mode: Any) -> None:
    """Fills `meta["val"]` of every node by running the graph on fake tensors; nothing is computed."""
    FakeTensorProp(graph_module, fake_mode).propagate(*example_inputs)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether `Tensor::suggest_memory_format()` (C++ only) says channels_last or channels_last_3d."""
    return suggest_memory_format(tensor) in (torch.channels_last, torch.channels_last_3d)
