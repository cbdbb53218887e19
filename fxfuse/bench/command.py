"""The command: arguments, their checks before anything is measured, the run, and the files. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command import check_file
from ..options import split
from . import BenchError
from .contenders import CONTENDERS, chosen

SUITES = ("headline", "sweep", "tails")
DTYPES = ("float32", "bfloat16", "float16")
DESCRIPTION = """Measures eager, Inductor and fxfuse in turn in the same run, on the GPU if there is one, else on the CPU (smaller).

  headline                 both headline models in every dtype, TF32 precision and layout (default)
  sweep                    many shapes of both chains: does fxfuse's default choose right?
  tails                    the tail ops alone, beside a copy
  module.py:factory        your model, as it is: factory() returns (model, tuple of example inputs)
  package.module:factory   the same, from a module that can be imported

Prints a table: milliseconds (GPU time of calls captured in a CUDA graph, and wall time; medians), time over Inductor's, error against fp64,
peak memory, achieved rates with their share of what a copy and matrix products reach in the same run, and what fxfuse made of the model.
Progress goes to stderr.

A call is one under torch.no_grad(); with --training it is a training step: forward, and the gradients of all parameters that a fixed random
gradient of the result brings. Time and peak memory are then also shown over those of the fastest of Inductor's contenders, and the error is that
of the worst parameter's gradient, ||g - g64|| / ||g64||; eager's is its yardstick, and twice that is fair. Left out of it (and named in the file)
are gradients below 1e-9 of the largest, which are 0 in exact arithmetic. The sweep is then of its large shapes only."""
EPILOG = f"""contenders: {", ".join(CONTENDERS)}

exit code: 0 when all that was asked for was measured or --seconds ended it, 1 if nothing could be measured, 2 for input that makes no sense,
130 after Ctrl-C. An ended run prints its table and keeps its rows in the JSON file, which is written anew after every workload."""


def add_parser(commands: Any) -> None:
    """Adds `bench` to the commands."""
    parser = commands.add_parser(
        "bench",
        help="measure the headline models, a sweep of shapes, the tail ops or a model of your own",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", default="headline", help="headline, sweep, tails, or module.py:factory")
    parser.add_argument("--training", action="store_true", help="measure training steps instead of calls under no_grad")
    parser.add_argument("--input-gradient", action="store_true", help="with --training: gradients of floating-point inputs too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure, the device, versions and commit to this file")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --json FILE has from an earlier run of the same versions")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw a chart, .svg or .png (needs matplotlib)")
    parser.add_argument("--rounds", type=int, default=31, metavar="N", help="paired rounds that a figure is the median of (default 31)")
    parser.add_argument("--seconds", type=float, metavar="S", help="start no further workload after this time")
    parser.add_argument("--dtype", choices=DTYPES, help="only workloads of this dtype")
    parser.add_argument("--layout", choices=("contiguous", "channels_last"), help="only workloads of this layout")
    parser.add_argument("--precision", choices=("tf32", "ieee"), help="only fp32 workloads of this precision; for a model of your own, the precision")
    parser.add_argument("--contenders", metavar="A,B,...", help="measure these; separated by commas")
    parser.add_argument("--only", metavar="SUBSTRING", help="only workloads whose name, dtype, precision and layout contain this")


def main(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the benchmark and returns the exit code; raises CommandError for bad input.

    argv: the command line, for the file, which takes no directories of this machine.
    """
    start = time.monotonic()
    command = shlex.join(["fxfuse", *(argument.rpartition("/")[2] for argument in argv)])
    suite = arguments.what if arguments.what in SUITES else "model"
    names = _checked(arguments, suite)
    from ..chain import chain_names
    from . import chart, results, session, table

    if suite != "model":
        split(None, chain_names())  # raises OptionError for a variable that makes no sense
    device, items = session.prepared(arguments, suite, names)
    split(None, chain_names())  # a model's module may have registered chains, which a variable may name
    result = results.header(suite, device, arguments.rounds, command, arguments.training, arguments.input_gradient)
    done = results.resume(result, arguments.json, names) if arguments.resume else set()
    items = {name: measure for name, measure in items.items() if name not in done}
    deadline = None if arguments.seconds is None else start + arguments.seconds
    interrupted = not session.measured(result, items, device, arguments.json, deadline)
    print(table.text(result))
    if arguments.chart:
        chart.draw(result, arguments.chart)
    if interrupted:
        return 130
    return 0 if any(not row["failed"] for row in result["rows"]) or not items else 1


def _checked(arguments: argparse.Namespace, suite: str) -> list[str]:
    """The contenders; raises BenchError for arguments that make no sense, before anything slow happens."""
    if suite == "model" and ":" not in arguments.what:
        raise BenchError(f"{arguments.what!r} is none of {', '.join(SUITES)}, and no module.py:factory")
    if suite == "model" and (arguments.dtype or arguments.layout):
        raise BenchError("a model of your own is measured as it is; leave --dtype and --layout out")
    if suite == "tails" and (arguments.contenders or arguments.precision):
        raise BenchError("the tail ops have neither contenders nor a precision; leave --contenders and --precision out")
    if suite == "tails" and arguments.training:
        raise BenchError("the tail ops alone have no training step; leave --training out")
    if arguments.input_gradient and not arguments.training:
        raise BenchError("--input-gradient needs --training")
    if arguments.rounds < 1:
        raise BenchError(f"--rounds {arguments.rounds} is not at least 1")
    if arguments.resume and not arguments.json:
        raise BenchError("--resume needs --json FILE")
    for option, path in (("--json", arguments.json), ("--chart", arguments.chart)):
        check_file(option, path)
    if arguments.chart:
        from . import chart

        chart.check(arguments.chart, suite)
    return [] if suite == "tails" else chosen(arguments.contenders, suite, arguments.training)
