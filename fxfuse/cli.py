"""The `fxfuse` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from . import __version__, explain_command, passes_command
from .bench import command as bench
from .command import CommandError, Parser
from .options import OptionError


# As of a process that SIGPIPE ended.
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code: 2, with one line on stderr, for input that makes no sense; 141, silently, where whoever
    reads the output (head, a pager) has gone. A character that the streams' encoding lacks is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    try:
        code = _run(arguments, argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return BROKEN_PIPE
    except CommandError as error:
        print(f"fxfuse {arguments.command}: {error}", file=sys.stderr)
        return error.code
    except OptionError as error:
        print(f"fxfuse {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    parser = Parser(prog="fxfuse", description="Fuses convolution chains in torch.compile models into single ops.")
    parser.add_argument("--version", action="version", version=f"fxfuse {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser(
        "demo",
        help="compile both headline models and compare error and time with eager and Inductor",
        description="Compiles both headline models at a size that suits the device found, checks them against fp64 and times eager, "
        "Inductor and fxfuse in turn. Prints a table: what each became, its error, its times. Exit code 1 if a result is wrong or a chain "
        "was not fused.",
    )
    doctor = commands.add_parser(
        "doctor",
        help="show versions, devices, compilers and libraries, what will happen and how to mend it",
        description="Prints the whole state (versions, devices, compilers, libraries, variables), what fxfuse will do on each device, and the "
        "command that mends what is missing. Exit code 1 if chains cannot be fused.",
    )
    doctor.add_argument("--build", action="store_true", help="build what is missing first")
    explain_command.add_parser(commands)
    passes_command.add_parser(commands)
    bench.add_parser(commands)
    return parser


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.command == "demo":
        from .demo import main as demo

        return demo()
    if arguments.command == "bench":
        return bench.main(arguments, argv)
    if arguments.command == "explain":
        return explain_command.main(arguments)
    if arguments.command == "passes":
        return passes_command.main(arguments)
    from .doctor import main as doctor_main

    return doctor_main(build=arguments.build)


if __name__ == "__main__":
    sys.exit(main())
