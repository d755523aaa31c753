"""`convert`: has a model written for Triton's Python backend served by processes of ours."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..dropin.conversion import SUFFIX, Conversion, convert_model
from ..settings import ProxySettings
from ..system.native import library_path
from ..wire.settings import setting_fields
from .app import add_hosts_endpoint, hosts_endpoint, own_version, seconds

_ATTACH = next(field for field in setting_fields(ProxySettings) if field.name == "attach_timeout_s")


def register(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="have a model written for Triton's Python backend served by processes of ours",
        description="Writes a copy of a model's folder that any tritonserver serves with processes of ours, which run "
        "its model.py as it is. The command hosts starts them when the server asks. The original is not touched.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder of the model in its model repository")
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help=f"the folder to write, whose name is the new model's (MODEL{SUFFIX})",
    )
    add_hosts_endpoint(parser)
    parser.add_argument(
        "--attach-timeout",
        type=seconds,
        default=_ATTACH.default,
        metavar="S",
        help=f"how long a load, or a request, waits where the command hosts does not run ({_ATTACH.default:g})",
    )
    parser.add_argument("--replace", action="store_true", help="replace a converted model that differs and is unedited")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert the model."""
    # Imported late, because the other commands do not need it.
    from ..hosting.supervisor import SOCKET_NAME, check_folder

    # Links are not resolved, because the user's name of the folder is the model's name.
    source = Path(os.path.abspath(arguments.model))
    target = Path(os.path.abspath(arguments.to or source.with_name(f"{source.name}{SUFFIX}")))
    folder = hosts_endpoint(arguments)
    check_folder(folder)
    conversion = Conversion(
        source=source,
        target=target,
        supervisor=folder / SOCKET_NAME,
        attach_timeout_s=arguments.attach_timeout,
        library=library_path(),
        made_by=own_version(),
    )
    with _undone_by_sigterm():
        outcome = convert_model(conversion, may_replace=arguments.replace)
    print(f"{'converted' if outcome == 'added' else outcome}: {target}")
    print(f"its processes come from: pytriton-proxy-backend hosts --endpoint {folder}")
    return 0


@contextlib.contextmanager
def _undone_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise an error, because a copy may take minutes and must not be left half done."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
