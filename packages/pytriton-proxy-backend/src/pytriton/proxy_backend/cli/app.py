"""The command line: which commands there are, and what becomes of their errors."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ProxyBackendError
from ..process.budget import LEAST_BUDGET_BYTES
from ..settings import read_duration, read_size
from ..system.home import default_home

PROGRAM = "pytriton-proxy-backend"
# Each module has `register(commands)`, which adds a parser with `set_defaults(run=function)`; the function takes the
# parsed arguments and returns the exit code.
_COMMANDS: tuple[str, ...] = (
    "add", "convert", "list_models", "remove", "check", "keys", "worker", "hosts", "guard",
)  # fmt: skip
_FAILED = 1


def run(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> None:
    """Run the command line, and end the interpreter: 0 is success, 1 a failure, 2 a wrong command line."""
    parsed = make_parser(program).parse_args(arguments)
    try:
        code = parsed.run(parsed)
    except (ProxyBackendError, ValueError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        code = _FAILED
    sys.exit(code)


def make_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog=program, description="Models of pytriton in the model repository of any tritonserver."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in _COMMANDS:
        importlib.import_module(f".{name}", __package__).register(commands)
    return parser


def add_repository(parser: argparse.ArgumentParser) -> None:
    """Add `--model-repository`, which the commands about drop-in models share."""
    parser.add_argument(
        "--model-repository", required=True, type=Path, metavar="REPO", help="the model repository of tritonserver"
    )


def add_hosts_endpoint(parser: argparse.ArgumentParser) -> None:
    """Add `--endpoint`, which is the same for commands that ask for processes and that start them."""
    parser.add_argument(
        "--endpoint",
        type=Path,
        metavar="DIR",
        help="folder of the socket where tritonserver asks for processes, which both see (hosts in PYTRITON_HOME)",
    )


def hosts_endpoint(arguments: argparse.Namespace) -> Path:
    """Return the folder that `--endpoint` names, absolute."""
    return Path(os.path.abspath(arguments.endpoint or default_home() / "hosts"))


def seconds(text: str) -> float:
    """Read a number of seconds of the command line."""
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"expected a number of seconds of at least 0, got {text!r}")
    return number


def duration(text: str) -> float:
    """Read a time such as `5m` of the command line, in seconds."""
    try:
        return read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def memory_budget(text: str) -> int:
    """Read a memory budget such as `2GiB` of the command line, in bytes."""
    try:
        size = read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < LEAST_BUDGET_BYTES:
        least = LEAST_BUDGET_BYTES >> 20
        raise argparse.ArgumentTypeError(
            f"expected at least {least} MiB, which a process takes by itself; got {text!r}"
        )
    return size


def own_version() -> str:
    """Return the version of this distribution, which is looked up on disk."""
    from importlib.metadata import version

    return version(PROGRAM)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"{PROGRAM} {own_version()}")
        parser.exit()
