"""`fxfuse explain`: what would be fused in a model of your own, why not the rest, and whether that is what was expected.

Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .command import CommandError, check_file, in_a_word, write_json, write_text
from .options import BACKWARD, SELECT

DESCRIPTION = """Shows what torch.compile(model, backend="fxfuse") would fuse in a model, and why not the rest, without running a kernel.

  module.py:factory        factory() returns (model, tuple of example inputs)
  package.module:factory   the same, from a module that can be imported; chains that it registers are looked for too

Prints the report: a table of the chains that are fused (op, shapes, module and line of your model, why this op) and one of those that are
not (how far the match got, where, a sentence that says why and what to do). Candidates of which the same is said share a row, and the tables
fit one screen, the commonest rows first. Then comes a sentence for each --expect that does not hold. --html writes a page that
draws each graph before and after, side by side: what was fused and what it became, where near misses stopped and why, what is known of each node."""
EPILOG = """exit code: 0, 1 if an expectation does not hold, 2 for input that makes no sense, a model that raises among it"""


def add_parser(commands: Any) -> None:
    """Adds `explain` to the commands."""
    parser = commands.add_parser(
        "explain",
        help="show what would be fused in a model of your own, and why not the rest",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="module.py:factory", help="the function that returns the model and its inputs")
    parser.add_argument(
        "--expect",
        type=_expectation,
        action="append",
        default=[],
        metavar="CHAIN=N",
        help="exit code 1 unless CHAIN is fused N times, or where no graph is captured; repeatable",
    )
    parser.add_argument("--all", action="store_true", help="print every candidate in a row of its own, however many there are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report, the device and versions to this file")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page, which needs no network, with the graphs drawn before and after"
    )
    parser.add_argument("--grad", action="store_true", help="with gradients on; by default the model is captured under torch.no_grad()")
    parser.add_argument("--dynamic", action="store_true", help="with every size symbolic, as under torch.compile(dynamic=True)")
    parser.add_argument("--select", choices=SELECT, help="the option fxfuse.select (default: FXFUSE_SELECT, else auto)")
    parser.add_argument("--backward", choices=BACKWARD, help="with --grad, the option fxfuse.backward (default: FXFUSE_BACKWARD, else auto)")
    parser.add_argument("--passes", metavar="A,B,...", help="look for these chains only: the option fxfuse.passes")


def main(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code; raises CommandError for bad input."""
    check_file("--json", arguments.json)
    check_file("--html", arguments.html)
    from . import expect, factory
    from .chain import chain_names
    from .options import split

    make = factory.find(arguments.target)  # its module may register chains, which options and expectations may name
    given = {f"fxfuse.{name}": getattr(arguments, name) for name in ("select", "backward", "passes")}
    # An option that is not given leaves the variable in force.
    options, _ = split({name: value for name, value in given.items() if value is not None}, chain_names())
    if arguments.backward and not arguments.grad:
        raise CommandError("--backward says something of a training step only: give --grad too")
    expected = _expected(arguments.expect)
    try:
        expect.check(expected)
    except ValueError as error:
        raise CommandError(f"--expect: {error}") from error
    model, inputs = factory.made(arguments.target, make)
    drawn: list[Any] = []
    report = _explained(arguments, model, inputs, options, drawn)
    print(report.full() if arguments.all else report)
    unmet = [str(one) for one in expect.unmet(report, expected, options)]
    if unmet:
        print("", *unmet, sep="\n")
    if arguments.json or arguments.html:
        from .document import distinct, document

        asked = {"target": arguments.target, "grad": arguments.grad, "dynamic": arguments.dynamic, "expected": expected, "unmet": unmet}
        told = document(report, options, distinct(factory.tensors_of(model, inputs)), **asked)
        _write(told, drawn, arguments)
    return 1 if unmet else 0


def _write(told: dict[str, Any], drawn: list[Any], arguments: argparse.Namespace) -> None:
    try:
        if arguments.json:
            write_json(told, arguments.json)
        if arguments.html:
            from . import page

            write_text(page.html(told, drawn), arguments.html)
    except OSError as error:
        raise CommandError(f"{error.filename or arguments.json} cannot be written: {error.strerror}") from error


def _explained(arguments: argparse.Namespace, model: Any, inputs: tuple[Any, ...], options: Any, drawn: list[Any]) -> Any:
    """The report; with --html, what the page shows of each graph is added to `drawn`."""
    import torch

    from . import api, page, torch_private

    def draw(before: Any, after: Any) -> None:
        drawn.append((page.picture(before), page.picture(after)))

    try:
        with torch.set_grad_enabled(arguments.grad):
            return api.explained(model, inputs, {}, options, arguments.dynamic, draw if arguments.html else None)
    except Exception as error:
        sentence = f"the model of {arguments.target} raises {in_a_word(torch_private.cause(error))} {torch_private.user_line(error)}"
        raise CommandError(sentence.strip()) from error


def _expectation(text: str) -> tuple[str, int]:
    chain, _, times = text.partition("=")
    if not chain or not times.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not CHAIN=N, such as conv_gelu_pool=2")
    return chain, int(times)


def _expected(pairs: list[tuple[str, int]]) -> dict[str, int]:
    expected = dict(pairs)
    if len(expected) < len(pairs):
        raise CommandError("--expect names a chain twice")
    return expected
