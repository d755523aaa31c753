"""`remove`: takes a model of ours out of a model repository."""

from __future__ import annotations

import argparse
from typing import Any

from ..dropin.repository import remove_model
from .app import add_repository


def register(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "remove",
        help="take a model of ours out of a model repository",
        description="Removes the folder of a model that this command has put there and nobody has edited. A server "
        "that has loaded it serves it until it is unloaded.",
    )
    add_repository(parser)
    parser.add_argument("--name", required=True, help="name of the model")
    parser.add_argument("--version", type=int, metavar="N", help="the version to remove; all of them by default")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Remove the model."""
    remove_model(arguments.model_repository, arguments.name, arguments.version)
    version = "" if arguments.version is None else f" version {arguments.version}"
    print(f"removed: {arguments.model_repository / arguments.name}{version}")
    return 0
