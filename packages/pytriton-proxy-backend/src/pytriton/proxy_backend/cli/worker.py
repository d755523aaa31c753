"""`worker`: attaches a worker to an endpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..python_proxy.keys import CurveKeys, KeyFileError
from .app import seconds
from .logs import add_service_options, start_log


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "worker",
        help="serve a model of a running server with a callable",
        description="Attaches a worker to the endpoint of a model, and serves it until SIGINT or SIGTERM. Requests in "
        "flight are finished then. Any number of workers may serve a model.",
    )
    parser.add_argument(
        "target", metavar="MODULE:CALLABLE", help="the inference callable; also path/to/file.py:callable"
    )
    parser.add_argument(
        "--endpoint",
        required=True,
        metavar="DIR",
        help="the folder of the endpoints; also a socket in it, or an address such as tcp://host:port",
    )
    parser.add_argument("--model", metavar="NAME", help="the model; not needed where there is only one")
    parser.add_argument("--version", type=_version, metavar="N", help="its version; likewise")
    parser.add_argument(
        "--description",
        type=Path,
        metavar="FILE",
        help="what the model is like; by default the file beside the socket",
    )
    parser.add_argument(
        "--curve-secret-key", type=Path, metavar="FILE", help="the worker's own keys, for a Python proxy with keys"
    )
    parser.add_argument("--curve-server-key", type=Path, metavar="FILE", help="the public key of that proxy")
    parser.add_argument(
        "--insecure", action="store_true", help="attach to a tcp:// address without keys, to whoever listens there"
    )
    parser.add_argument("--factory", action="store_true", help="the target makes the callable")
    parser.add_argument(
        "--kwargs", type=_arguments, default={}, metavar="JSON", help="keyword arguments of the factory, an object"
    )
    parser.add_argument(
        "--attach-timeout", type=seconds, default=30.0, metavar="S", help="how long to wait for the endpoint (30)"
    )
    add_service_options(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    # Imported late, because the other commands do not need it.
    from ..worker.attach import Attachment, serve_endpoint

    if parsed.kwargs and not parsed.factory:
        raise ValueError("--kwargs has the arguments of a factory: give --factory as well, or leave them out")
    start_log(parsed.log_level, parsed.log_format)
    wanted = Attachment(
        target=parsed.target,
        endpoint=parsed.endpoint,
        model=parsed.model,
        version=parsed.version,
        description=parsed.description,
        is_factory=parsed.factory,
        arguments=parsed.kwargs,
        attach_timeout_s=parsed.attach_timeout,
        stop_timeout_s=parsed.stop_timeout,
        curve_keys=_keys(parsed.curve_secret_key, parsed.curve_server_key),
        insecure=parsed.insecure,
    )
    return serve_endpoint(wanted)


def _keys(secret: Path | None, server: Path | None) -> CurveKeys | None:
    if secret is not None and server is not None:
        return CurveKeys(secret_key_file=secret, server_key_file=server)
    if secret is not None or server is not None:
        raise KeyFileError(
            "--curve-secret-key and --curve-server-key go together: the worker's own keys, and the proxy's public one",
            path=str(secret or server),
        )
    return None


def _version(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a version of at least 1, got {text!r}")
    return number


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from error
    if not isinstance(arguments, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return arguments
