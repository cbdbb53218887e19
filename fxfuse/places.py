"""Where in the user's model a node comes from: the path of its module, and the nearest line of the model's own code."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

TORCH = os.path.dirname(torch.__file__) + os.sep
# What `explain` wraps around a model.
WRAPPERS = (os.path.join(os.path.dirname(__file__), "api.py"),)
# Code that no file holds: graphs that were traced before, the import system.
MACHINERY = ("<eval_with_key>", "<frozen ")

# Folders of installed packages, in this environment and in others, and Python's own library.
PACKAGES = ("site-packages", "dist-packages")
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# How Dynamo spells the path to a module: L['self'].blocks, getattr(L['self'].blocks, '0'), G['models'][0].conv.
GETATTR = re.compile(r"getattr\(((?:(?!getattr\().)*?), (['\"])(.*?)\2\)")
ITEM = re.compile(r"\[(['\"]?)([^\]]*?)\1\]")
# Steps of such a path that are not the model's: how Dynamo reaches a module, and what is wrapped around one.
REACHED_BY = (r"__closure__\.\d+\.cell_contents", "__self__", "__func__", "__dict__", "_modules")
WRAPPED_IN = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
FOREIGN = re.compile(rf"(^|\.)({'|'.join((*REACHED_BY, *WRAPPED_IN))})(?=\.|$)")
# Names of the model itself: of what torch.compile is given, and of what `explain` is given in its wrapper.
ROOT = re.compile(r"^[LG]\.(self(?=\.|$)|model(?=\.|$)|__import_\w+)?\.?")
# A module that is called again.
AGAIN = re.compile(r"@\d+(?=\.|$)")


class Frame(NamedTuple):
    """A frame of a stack trace."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def location_of(node: fx.Node) -> str:
    """`file:line` of the user's model that made the node, see `nearest`; empty where the graph holds no stack trace."""
    found = re.findall(r'File "(.+)", line (\d+)(?:, in (.+))?', node.meta.get("stack_trace") or "")
    frames = [Frame(file, int(line), function) for file, line, function in found if file not in WRAPPERS]
    return str(nearest(frames)) if frames else ""


def nearest(frames: Sequence[Frame]) -> Frame:
    """Of a stack, outermost frame first, the one that a user looks for: the innermost one outside torch and installed packages. In a model
    that is an installed package's, the innermost one in the file of the model's own forward: behind it come libraries of layers and
    activations. Where all frames are torch's, the innermost."""
    # torch.export traces through nn.Module.forward.
    own = [frame for frame in frames if not frame.file.startswith((TORCH, *MACHINERY))] or list(frames)
    users = [frame for frame in own if not _is_installed(frame.file)]
    if users:
        return users[-1]
    model = next((frame for frame in own if _is_forward(frame.function)), own[0])
    return next(frame for frame in reversed(own) if frame.file == model.file)


def module_of(node: fx.Node) -> str:
    """The path of the innermost module whose forward made the node, as `named_modules` of the model spells it ("blocks.2.conv"); empty for
    the model itself, and where the graph does not say. Of a model that a function calls, behind the function's name for it ("encoder.conv")."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path = stack[-1][0] if isinstance(stack[-1], tuple) else stack[-1]
    return _plain(str(path))


def stack_of(node: fx.Node) -> str:
    """The stack trace of the user's code that made the node, as Python prints it; empty where the graph holds none."""
    frames = re.split(r'^(?=  File ")', node.meta.get("stack_trace") or "", flags=re.MULTILINE)
    return "".join(frame for frame in frames if not frame.startswith(tuple(f'  File "{file}"' for file in WRAPPERS)))


def relative(path: str) -> str:
    """A path relative to the working directory where it lies below it."""
    return path.removeprefix(os.getcwd() + os.sep)


def short(location: str) -> str:
    """A location for reading: relative to the working directory where it lies below it; of an installed package from the package on."""
    below = relative(location)
    return below if below != location else re.sub(rf"^.*{re.escape(os.sep)}({'|'.join(PACKAGES)}){re.escape(os.sep)}", "", location)


def _is_installed(file: str) -> bool:
    return file.startswith(LIBRARIES) or not set(PACKAGES).isdisjoint(file.split(os.sep))


def _is_forward(function: str) -> bool:
    """Whether a function is a module's forward, or Dynamo's of the rest of one behind a graph break; decorators have other names."""
    return function == "forward" or "_resume_in_forward_" in function


def _plain(path: str) -> str:
    """The steps of a path, by points."""
    nested = True
    while nested:
        path, nested = GETATTR.subn(r"\1.\3", path)
    path = ITEM.sub(r".\2", path)
    return AGAIN.sub("", ROOT.sub("", FOREIGN.sub("", path))).lstrip(".")
