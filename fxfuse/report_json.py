"""A report as a JSON file, to be read without fxfuse. SCHEMA grows by one when a field changes its meaning or goes.

    schema      1
    fxfuse, torch, cuda, python   versions; cuda is null for a torch without it
    device      the GPU's name, or the CPU's instruction set and threads
    date        when, in UTC
    target      the model, as it was named on the command line
    grad, dynamic   whether gradients were on, and whether sizes were symbolic
    options     select, passes (null for all), mode: as they were in force
    graphs      number of FX graphs
    stopped     null, or why the capture did not go to the end
    fused       a list of: chain; op, without "fxfuse::"; nodes, the names of the FX nodes it replaced; shapes, "input -> convolution output ->
                result"; choice, why this op; location, "file:line" of the convolution or ""; candidates, a list of: op; verdict, its
                predicted time or why it cannot be
    declined    a list of: chain; reached, the last step that was found; node, the FX node it stopped at; reason; location, "file:line" of
                that node or ""; nodes, the FX nodes of the chain as far as it was found; body, the attribute that holds their graph
                where that is the body of a higher-order op, else ""
    expected    chain -> number of times that was asked for
    unmet       a sentence for each expectation that does not hold
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import torch

from .environment import device_name, versions
from .options import Options
from .report import Report

SCHEMA = 1


def as_json(report: Report, options: Options, device: torch.device, **more: Any) -> dict[str, Any]:
    """The file's contents; more: target, grad, dynamic, expected, unmet."""
    return {
        "schema": SCHEMA,
        **versions(),
        "device": device_name(device) if device.type in ("cpu", "cuda") else str(device),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "options": {"select": options.select, "passes": options.passes, "mode": options.mode},
        "graphs": report.graphs,
        "stopped": report.stopped,
        "fused": [dataclasses.asdict(fused) for fused in report.fused],
        "declined": [dataclasses.asdict(declined) for declined in report.declined],
        **more,
    }
