"""`keys`: makes keys for workers and Python proxies that meet over a network."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "keys",
        help="make keys for a Python proxy or a worker",
        description="Makes a CURVE key pair: NAME.key is public, NAME.key_secret stays where it is used.",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for the files")
    parser.add_argument("--name", required=True, help="begin of the files' names")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the keys."""
    # Imported late, because the other commands do not need pyzmq.
    from ..dropin.repository import check_name
    from ..python_proxy.sockets import make_keys

    check_name(arguments.name)
    public, secret = make_keys(arguments.out, arguments.name)
    print(f"public: {public}")
    print(f"secret: {secret}")
    return 0
