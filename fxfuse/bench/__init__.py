"""`fxfuse bench`: contenders in turn in the same run, on the headline models, a sweep of shapes, the tail ops alone, or a model of your own.

    command.py     the command line, its checks, and the run from the first workload to the files
    workloads.py   what is measured: models, inputs, dtypes, precisions, layouts; `sweep.py` lists the sweep's shapes (`shapes.py`),
                   `user.py` takes your own model
    counts.py      operations, and the bytes that a call must move
    work.py        what is timed, a call or a training step, and what its result is held against
    contenders.py  who is measured
    rows.py        one workload, all its contenders; `checks.py` their errors, peak memory and what fxfuse did, `timing.py` their times,
                   `row.py` what is kept of that
    tails.py       the tail ops beside a copy
    ceilings.py    what the device reaches at best
    results.py     the JSON file; `table.py` and `chart.py` show it
"""

from __future__ import annotations


from ..command import CommandError


class BenchError(CommandError):
    """Something that was asked for cannot be measured."""
