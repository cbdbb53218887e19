"""`fxfuse passes`: the chains, from what each states of itself. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .command import CommandError

if TYPE_CHECKING:
    from .chain import Chain, Step

DESCRIPTION = """Lists the chains that fxfuse looks for.

Prints a table: each chain's steps in the order the value flows, with the words that each step accepts (a word is every spelling of an op:
torch function, nn module, tensor method, aten overload); its ops, the first that takes a chain being tried first; and what each op takes.
Then a line for each chain that says what it is. Chains of your own come first: those that the modules given register or hold."""


def add_parser(commands: Any) -> None:
    """Adds `passes` to the commands."""
    parser = commands.add_parser(
        "passes",
        help="list the chains, their steps and ops, and what each takes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("modules", nargs="*", metavar="module.py", help="or package.module: modules with chains of your own")


def main(arguments: argparse.Namespace) -> int:
    """Prints the table and the lines; raises CommandError for a module that cannot be loaded or holds no chain."""
    from . import registry
    from .chain import chains
    from .printing import wrapped

    for module in arguments.modules:
        if not registry.load(module):
            raise CommandError(f"{module} neither registers a chain with fxfuse.register nor holds a fxfuse.Chain")
    rows = [row for chain in chains() for row in _rows(chain)]
    print(wrapped(rows, ("chain", "steps", "ops, best first", "takes"), (20, 34, 28, 60)))
    for chain in chains():
        print(f"{chain.name}: {chain.description}")
    return 0


def _rows(chain: Chain) -> Iterator[tuple[str, str, str, str]]:
    """A row for each implementation; the chain's own cells are filled in the first one alone."""
    steps = [f"{step.name}: {_accepts(step)}" for step in chain.steps]
    steps[0] += chain.over
    own = (chain.name, "\n".join(steps))
    for implementation in chain.implementations:
        yield *own, implementation.qualified, implementation.description
        own = ("", "")


def _accepts(step: Step) -> str:
    return " or ".join(step.words) + (", or none" if step.optional else "")
