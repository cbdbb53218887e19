"""The report as plain JSON, to be read without fxfuse: `report.json` of a dump, `fxfuse explain --json`, the artifact `fxfuse_report` of a
trace, and the figures in `report.html`.

Schema 2, every key always there:

| key        | value                                                                                                             |
|------------|-------------------------------------------------------------------------------------------------------------------|
| schema     | 2; raised when a key changes its meaning or goes                                                                  |
| torch, cuda, python, fxfuse | versions; cuda is null for a torch without                                                       |
| time       | when the compilation was through, UTC, ISO 8601                                                                   |
| pid, rank  | the process; the rank in torch.distributed or torchrun's, else null                                               |
| number     | a compiled graph's number in its process, from 0; null for explain                                                |
| compile_id | Dynamo's name of the compilation, as in logs and tlparse ("0/0"); null outside one                                |
| target     | the model that explain was given, as it was named on the command line; null for a compiled graph                 |
| grad       | whether gradients were on                                                                                         |
| dynamic    | whether explain was asked for symbolic sizes; null for a compiled graph                                           |
| devices    | devices of the tensors: [{"device": "cuda:0", "name": ...}]                                                       |
| options    | fxfuse's options in force by name, and under "inductor" the options that go to it                                 |
| graphs     | number of FX graphs: 1 for a compiled graph, any number for explain                                               |
| stopped    | why fxfuse did not go to the end, or what compiling raised; else null                                             |
| fused      | replaced chains: the fields of `report.Fused`, and "repro", "no_repro"                                            |
| declined   | chains left alone: the fields of `report.Declined`, and "repro", "no_repro"                                       |
| expected   | what explain was asked to find: chain -> number of times; {} for a compiled graph                                 |
| unmet      | a sentence for each expectation that does not hold                                                                |
| files      | names of the other files in the folder of a dump                                                                  |

Every candidate is a record of its own, those too that share a row of the printed tables. A record's "graph" is the number of its graph, from
0, within this report, and its nodes are named as in that graph (in a dump's `before.py`). "module" is the path of its anchor's module in the
model, as `named_modules` has it ("blocks.2.conv"); "location" is file:line in the model, of the anchor of a fused chain, of the node where a
declined one stopped. Either is "" where the graph does not say. "candidates" are objects with the fields of `report.Candidate`: "us" and
"inductor_us" are microseconds as numbers or null. "repro" is the script that rebuilds the chain; where there is none it is null and "no_repro"
says why.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import torch_private
from .environment import device_name, versions
from .options import Options
from .report import Report
from .values import value_of

SCHEMA = 2


@dataclasses.dataclass(frozen=True)
class Repro:
    """The script that rebuilds a chain, or the sentence why there is none."""

    file: str | None = None
    missing: str | None = "only a dump writes them"
    text: str = ""


def document(
    report: Report,
    options: Options,
    devices: Sequence[torch.device],
    *,
    inductor: Mapping[str, Any] | None = None,
    repros: Sequence[Repro] = (),
    **more: Any,
) -> dict[str, Any]:
    """A report in the schema above. inductor: options of Inductor's. repros: of all fused chains, then of all declined ones; none at all
    where no scripts were asked for. more: further keys of the schema; those that are left out have the value that says "not given".
    """
    chains = [*report.fused, *report.declined]
    records = [{**dataclasses.asdict(record), **_told(repro)} for record, repro in zip(chains, repros or [Repro()] * len(chains))]
    told = {
        "schema": SCHEMA,
        **versions(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "rank": rank(),
        "number": None,
        "compile_id": torch_private.compile_id(),
        "target": None,
        "grad": torch.is_grad_enabled(),
        "dynamic": None,
        "devices": [{"device": str(device), "name": _name(device)} for device in devices],
        "options": {**dataclasses.asdict(options), "inductor": dict(inductor or {})},
        "graphs": report.graphs,
        "stopped": report.stopped,
        "fused": records[: len(report.fused)],
        "declined": records[len(report.fused) :],
        "expected": {},
        "unmet": [],
        "files": [],
    }
    return {**told, **more}


def rank() -> int | None:
    """The rank of this process among those of a distributed run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    given = os.environ.get("RANK", "")
    return int(given) if given.isdigit() else None


def devices_of(graph: fx.Graph) -> list[torch.device]:
    """The devices of the tensors in a graph, by name."""
    return distinct(value for value in map(value_of, graph.nodes) if isinstance(value, torch.Tensor))


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices of tensors, by name."""
    return sorted({tensor.device for tensor in tensors}, key=str)


def _name(device: torch.device) -> str:
    return device_name(device) if device.type in ("cpu", "cuda") else device.type


def _told(repro: Repro) -> dict[str, str | None]:
    return {"repro": repro.file, "no_repro": repro.missing}
