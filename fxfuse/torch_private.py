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
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import RestartAnalysis, SkipFrame, TorchDynamoException
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy

from .places import Frame, nearest
from .printing import one_line

# Raised where fake tensors cannot stand in for data.
DataDependent = (DataDependentOutputException, DynamicOutputShapeException)

# What torch copies from node to node as well: where a node comes from, which differs from one to the next.
PROVENANCE = ("nn_module_stack", "torch_fn", "source_fn_stack", "original_aten", "from_node", "_numeric_debug_handle")

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


def calls_own_forward(module: nn.Module) -> bool:
    """Whether calling the module runs the forward that its class was written with, and nothing else.

    Not so with hooks (its own, or those of all modules), behind `module.compile()`, and where another function stands in the place of a method
    that a call goes through: on the module, or on a class of torch's. nn.Module has no public way to ask for any of them.
    """
    if _is_hooked(module) or torch.nn.modules.module._has_any_global_hook() or module._compiled_call_impl is not None:
        return False
    forward = getattr(getattr(type(module), "forward", None), "__code__", None)
    called = () if forward is None else forward.co_names  # `_conv_forward`, which is patched for other paddings
    return not any(_is_patched(module, name) for name in ("__call__", "_call_impl", "forward", *called))


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def _is_patched(module: nn.Module, method: str) -> bool:
    """Whether another function stands in a method's place. What a class from elsewhere has as its own is for who brings it as a word to say."""
    owner = next((kind for kind in type(module).__mro__ if method in vars(kind)), None)
    if owner is None or not callable(vars(owner)[method]):
        return False
    # A patch that `functools.wraps` made has the name and the module of what it wraps, but its own globals.
    written_in = getattr(getattr(type(module), method), "__globals__", None)
    return method in vars(module) or (owner.__module__.startswith("torch.nn.") and written_in is not vars(sys.modules[owner.__module__]))


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


def storage_reference(tensor: torch.Tensor) -> Any:
    """Keeps `storage_of(tensor)` from being the identity of another storage later, but not its memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether there is no data in a tensor."""
    return isinstance(tensor, FakeTensor)


def by_tensor() -> MutableMapping[torch.Tensor, Any]:
    """A dictionary by the identity of tensors, which it does not keep alive; `weakref`'s compares them."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def for_numpy(graph: fx.Graph) -> set[int]:
    """Which outputs of a Dynamo graph the code behind it takes as NumPy arrays: those that Dynamo's own wrappers of NumPy's functions made."""
    (output,) = graph.find_nodes(op="output")
    utils = torch._dynamo.utils
    makers = (utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper)
    targets = [node.target if isinstance(node, fx.Node) else None for node in output.args[0]]
    return {index for index, target in enumerate(targets) if isinstance(target, makers) or target is utils.numpy_attr_wrapper}


def as_array(tensor: torch.Tensor) -> Any:
    """A real tensor as NumPy's array: under a dispatch mode `tensor.numpy(force=True)` would be that mode's."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return tensor.numpy(force=True)


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
    """Inside a FakeTensorMode: ops that eager code between graphs runs on real tensors see fakes of them, and write to those."""

    supports_higher_order_operators = True  # they go on to that mode, which runs their bodies

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = mode

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo captures frames under infra modes only."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.on_fakes(func, args, kwargs or {})

    def on_fakes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op on fakes of its arguments."""
        args, kwargs = faked((args, kwargs), self.fake_mode)
        return func(*args, **kwargs)

    def on_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The op on its arguments as they are, outside of the FakeTensorMode."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
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
    return isinstance(error, DataDependent) or any(text in str(error) for text in ("data pointer", ".numpy() is not supported for tensor subclasses"))


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
    """What `torch.compile` wrapped, if it did: running compiled code on fake tensors would read their memory.

    As `torch.compile` itself it looks through `torch.compiler.disable` around a function or module, but not around a method.
    """
    if isinstance(model, MethodType):
        original = getattr(model.__func__, "_torchdynamo_orig_callable", None)
        return model if original is None or is_disabled(model) else MethodType(original, model.__self__)
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "_torchdynamo_orig_callable", model)


def is_disabled(model: Any) -> bool:
    """Whether `torch.compiler.disable` is around a function, or around a module or its forward; it leaves no public mark."""
    return any(getattr(function, "_torchdynamo_disable", False) for function in (model, getattr(model, "forward", None)))


def turned_off() -> str:
    """What keeps `torch.compile` from compiling anything now, as its user wrote it; empty where nothing does. Nothing public tells."""
    stance = torch._dynamo.eval_frame._stance
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1"
    if torch._dynamo.config.disable:
        return "TORCH_COMPILE_DISABLE=1" if os.environ.get("TORCH_COMPILE_DISABLE") == "1" else "torch._dynamo.config.disable"
    if stance.stance in ("force_eager", "eager_on_recompile", "fail_on_recompile"):
        return f'torch.compiler.set_stance("{stance.stance}")'
    return "" if stance.backend in (None, "fxfuse") else f"torch.compiler.set_stance(force_backend={stance.backend!r})"


def modes_around() -> str:
    """The names of the torch dispatch modes around this code under which Dynamo captures nothing; there is no public list."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if not (mode.is_infra_mode() or mode.ignore_compile_internals())]
    return ", ".join(type(mode).__name__ for mode in modes)


def put_on_fakes(module: nn.Module, mode: FakeTensorMode) -> None:
    """Gives a module fake parameters and buffers, and children that are not compiled; how it was is for the caller to put back.

    Written past nn.Module's own `__setattr__`, which would refuse what is no Parameter; under `torch.func.functional_call` a forward that
    deletes a parameter could not be captured, and the parameters of modules in a closure would stay real.
    """
    state = vars(module)
    for tensors in (state.get("_parameters", {}), state.get("_buffers", {})):
        for name, tensor in tensors.items():
            if tensor is None or isinstance(tensor, FakeTensor):
                continue
            tensors[name] = fake = mode.from_tensor(tensor)
            # As a compilation marks a module's own: under dynamic shapes the inputs' sizes alone vary.
            torch._dynamo.mark_static(fake)
            torch._dynamo.mark_static_address(fake, guard=False)
    for name, child in state.get("_modules", {}).items():
        if uncompiled(child) is not child and not is_disabled(child):
            state["_modules"][name] = uncompiled(child)
    if state.get("_compiled_call_impl") is not None:
        state["_compiled_call_impl"] = None


@contextmanager
def static_capture() -> Iterator[None]:
    """Dynamo with sizes as given and no limit on recompilations: functions behind a graph break share their code with earlier captures.

    Floats are constants, as they are once Inductor has asked for another trace: as inputs their data would be needed to go on.
    A stance that compiles, though later or through a backend of its own, gives way.
    """
    limits = {"recompile_limit": 2**30, "accumulated_recompile_limit": 2**30}
    usual = torch._dynamo.eval_frame._stance == torch._dynamo.eval_frame.DynamoStance()
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, specialize_float=True, **limits):
        with nullcontext() if usual else torch.compiler.set_stance("default"):
            yield


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
    with _quotable(graph):
        code = graph.python_code("self", verbose=True, include_stride=True, include_device=True, expanded_def=True).src
    bodies = {node.target: getattr(graph.owning_module, str(node.target), None) for node in graph.find_nodes(op="get_attr")}
    nested = [f"# self.{name}\n{readable(body.graph)}" for name, body in bodies.items() if isinstance(body, fx.GraphModule)]
    return "\n\n".join([code.strip() + "\n", *nested])


@contextmanager
def _quotable(graph: fx.Graph) -> Iterator[None]:
    """Within it, what the graph's code quotes of the user's source is one line a comment, whatever characters it holds."""
    kept = {node: node.meta for node in graph.nodes}
    try:
        for node, meta in kept.items():
            trace = "\n".join(map(one_line, (meta.get("stack_trace") or "").split("\n")))
            annotations = {key: value if repr(value).isprintable() else str(value) for key, value in (meta.get("custom") or {}).items()}
            node.meta = {**meta, "stack_trace": trace, "custom": annotations}
        yield
    finally:
        for node, meta in kept.items():
            node.meta = meta


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


def policies_of(body: fx.GraphModule) -> list[Any]:
    """The `context_fn` of a selective checkpoint, where a body is one's: Dynamo keeps it in the body's meta alone."""
    return [body.meta["_checkpoint_context_fn"]] if "_checkpoint_context_fn" in body.meta else []


def asking(context_fn: Any, note: Callable[[Any, bool], None]) -> AbstractContextManager[Any]:
    """Within it a selective checkpoint's policy is asked about every op, and nothing saved; note: is given the op and whether it would be.

    What `create_selective_checkpoint_contexts` makes of functions and lists holds the policy, and has no public way to ask it.
    """
    forward, _ = context_fn()
    policy = forward.policy_fn

    def ask(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        answer = policy(context, op, *args, **kwargs)
        note(op, answer is True or answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE))
        return CheckpointPolicy.MUST_RECOMPUTE

    forward.policy_fn = ask
    return forward


def annotations(node: fx.Node) -> dict[str, Any]:
    """What a node is marked with by a region of the user's code or by an earlier pass, for those behind; torch copies it from node to node."""
    kept = (name for name in fx.proxy._COPY_META_FIELDS if name not in PROVENANCE)
    return {name: node.meta[name] for name in kept if node.meta.get(name) not in (None, {}, False)}


def annotate(graph_module: fx.GraphModule, example_inputs: tuple[Any, ...], fake_mode: Any) -> None:
    """Fills `meta["val"]` of every node by running the graph on fake tensors; nothing is computed, and nothing written to."""
    _Propagation(graph_module, fake_mode).propagate(*example_inputs)


class _Propagation(FakeTensorProp):
    """Runs a graph on fakes of its parameters and buffers too: `self.weight.mul_(2)`, whose tensors are all real, would really run."""

    def run_node(self, n: fx.Node) -> Any:
        with RealAsFake(self._mode):
            return super().run_node(n)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether `Tensor::suggest_memory_format()` (C++ only) says channels_last or channels_last_3d."""
    return suggest_memory_format(tensor) in (torch.channels_last, torch.channels_last_3d)


def copy_of(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph, each node's meta in a dict of its own.

    `copy.deepcopy` would also copy what `torch.export` keeps to flatten inputs, tree by tree, of which torch itself warns that it is deprecated.
    """
    duplicate = fx.Graph(tracer_cls=graph._tracer_cls)
    returned = duplicate.graph_copy(graph, {}, return_output_node=True)
    if returned is not None:
        result, output = returned
        duplicate.output(result, output.type).meta = copy.copy(output.meta)
    # A codegen of its own: `on_generate_code` writes to it.
    duplicate.set_codegen(copy.copy(graph._codegen))
    return duplicate


def is_changed(module: nn.Module) -> bool:
    """Whether a module of which `calls_own_forward` held has got hooks or a forward of its own since: a check for each call."""
    return _is_hooked(module) or "forward" in module.__dict__


def flattens_inputs(graph: fx.Graph) -> bool:
    """Whether the graph's placeholders are the leaves of its module's arguments, as behind `torch.export`."""
    return isinstance(graph._codegen, fx.graph._PyTreeCodeGen)
