"""``ifso repro``: studies of the paper, run again. All of it is in the package ``ifso_repro``."""

from __future__ import annotations

from typing import Any

DESCRIPTION = (
    "Run studies of the paper again, or what is left of them: tables, figures (their names are below), or rows such as "
    "resnet32-cifar10-50 (network, data, per cent of MACs removed). What was interrupted goes on when the same command "
    "is given again."
)


def add_parser(commands: Any) -> None:
    """Register the command, with commands of its own."""
    from ifso_repro.cli import add_commands

    parser = commands.add_parser(
        "repro", help="run studies of the paper again", description=DESCRIPTION, add_help=False
    )
    add_commands(parser)
