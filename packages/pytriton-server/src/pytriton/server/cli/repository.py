"""The command `serve-repository`."""

import logging
import signal
from collections.abc import Mapping
from typing import Any

import typer

from pytriton.exceptions import PyTritonError
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.triton import Triton

__all__ = ["serve_repository"]


def serve_repository(
    settings: Mapping[str, Any], *, access_token: str | None, unprotected: bool, log_level: str
) -> None:
    """Serve a model repository until a signal ends it.

    Args:
        settings: Fields of `TritonConfig`.
        access_token: The token that protected endpoints ask for; None is one that nobody knows.
        unprotected: Whether no endpoint is protected.
        log_level: The least level of the log.

    Raises:
        typer.BadParameter: An option is not acceptable.
        typer.Exit: The server could not be started, or ended by itself.
    """
    if unprotected and access_token is not None:
        raise typer.BadParameter("--unprotected and --access-token exclude each other")
    try:
        logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    except ValueError:
        raise typer.BadParameter(f"--log-level must be DEBUG, INFO, WARNING or ERROR, got {log_level!r}") from None
    try:
        # Not as an exception, as for the other commands: the server ends in order, with exit code 0.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        security = TritonSecurityConfig(access_token=access_token, restricted_endpoints=[] if unprotected else None)
        Triton(config=TritonConfig(**settings), security_config=security).serve()
    except PyTritonError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
