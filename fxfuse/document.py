"""`report.json`: one compiled graph's report as plain JSON, to be read without fxfuse.

Schema 1, every key always there:

| key        | value                                                                                                             |
|------------|-------------------------------------------------------------------------------------------------------------------|
| schema     | 1; raised when a key changes its meaning or goes                                                                  |
| torch, cuda, python, fxfuse | versions; cuda is null for a torch without                                                       |
| time       | when the compilation was through, UTC, ISO 8601                                                                   |
| pid, rank  | the process; the rank in torch.distributed or torchrun's, else null                                               |
| number     | the graph's number in its process, from 0                                                                         |
| compile_id | Dynamo's name of the compilation, as in logs and tlparse ("0/0"); null outside one                                |
| devices    | devices of the graph's tensors: [{"device": "cuda:0", "name": ...}]                                               |
| options    | fxfuse's options in force by name, and under "inductor" the options that go to it                                 |
| stopped    | why fxfuse did not go to the end, or what compiling raised; else null                                             |
| fused      | replaced chains: the fields of `report.Fused`, candidates as [{"op", "verdict"}], and "repro", "no_repro"          |
| declined   | chains left alone: the fields of `report.Declined`, and "repro", "no_repro"                                       |
| files      | names of the other files in the folder                                                                            |

"repro" is the script that rebuilds the chain; where there is none it is null and "no_repro" says why. Nodes are named as in `before.py`.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import torch_private
from .environment import device_name, versions
from .options import Options
from .report import Report
from .values import value_of

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Repro:
    """The script that rebuilds a chain, or the sentence why there is none."""

    file: str | None = None
    missing: str | None = "only a dump writes them"
    text: str = ""


def document(
    report: Report, options: Options, inductor: Mapping[str, Any], devices: Sequence[torch.device], number: int, repros: Sequence[Repro]
) -> dict[str, Any]:
    """A report as in `report.json`. inductor: options of Inductor's. repros: of all fused chains, then of all declined ones."""
    records = [{**dataclasses.asdict(record), **_told(repro)} for record, repro in zip([*report.fused, *report.declined], repros)]
    return {
        "schema": SCHEMA,
        **versions(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "rank": rank(),
        "number": number,
        "compile_id": torch_private.compile_id(),
        "devices": [{"device": str(device), "name": _name(device)} for device in devices],
        "options": {**dataclasses.asdict(options), "inductor": dict(inductor)},
        "stopped": report.stopped,
        "fused": records[: len(report.fused)],
        "declined": records[len(report.fused) :],
        "files": [],
    }


def rank() -> int | None:
    """The rank of this process among those of a distributed run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    given = os.environ.get("RANK", "")
    return int(given) if given.isdigit() else None


def devices_of(graph: fx.Graph) -> list[torch.device]:
    """The devices of the tensors in a graph, by name."""
    values = map(value_of, graph.nodes)
    return sorted({value.device for value in values if isinstance(value, torch.Tensor)}, key=str)


def _name(device: torch.device) -> str:
    return device_name(device) if device.type in ("cpu", "cuda") else device.type


def _told(repro: Repro) -> dict[str, str | None]:
    return {"repro": repro.file, "no_repro": repro.missing}
