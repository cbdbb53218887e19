"""The machine and the versions that a record was made with."""

from __future__ import annotations

import platform
from typing import Any

import torch

from . import __version__


def versions() -> dict[str, Any]:
    """Versions by name. cuda: what torch was built for; None for a build without."""
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(), "fxfuse": __version__}


def device_name(device: torch.device) -> str:
    """A GPU's name; a CPU by its instruction set and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} CPU, {torch.get_num_threads()} threads"
