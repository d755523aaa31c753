"""`guard`: where the library is that keeps hostile requests from ending a tritonserver."""

from __future__ import annotations

import argparse
from typing import Any

from ..system.native import guard_library_path


def register(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "guard",
        help="print the path of the guard for a tritonserver of your own",
        description="Prints the path of the guard, a library that keeps hostile requests from ending a tritonserver. "
        "Start the server with it: LD_PRELOAD=$(pytriton-proxy-backend guard) tritonserver ...",
    )
    parser.set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> int:
    """Print the path."""
    print(guard_library_path())
    return 0
