"""What the commands that serve have in common."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import typer

from pytriton.exceptions import PyTritonError
from pytriton.proxy_backend import ProxyBackendError
from pytriton.proxy_backend.cli.logs import start_log
from pytriton.proxy_backend.runtime.access import ACCESS_VARIABLE
from pytriton.proxy_backend.system.escapes import is_terminal
from pytriton.server.errors import PortInUseError
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.triton import Triton

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of every command that serves."""

    # Those that are None come from the environment, or are the defaults of `TritonConfig`.
    address: str | None  # where HTTP, gRPC and metrics listen
    http_port: int | None  # port of HTTP
    grpc_port: int | None  # port of gRPC
    metrics_port: int | None  # port of the metrics
    access_token: str | None  # the token that protected endpoints ask for; None is one that nobody knows
    unprotected: bool  # whether no endpoint is protected
    log_level: str | None  # the least level of the log; None is INFO for pytriton and WARNING for all else
    log_format: str  # how its records look, see `pytriton.proxy_backend.cli.logs`
    access_log: bool = False  # whether there is a record of every request
    server: Mapping[str, Any] = field(default_factory=dict)  # fields of `TritonConfig` that count more than these
    memory_budget: str | None = None  # how much memory worker processes may take, such as `2GiB`
    min_awake: int = 0  # how many models stay awake however long nobody calls them
    cors_origins: list[str] | None = None  # origins whose pages browsers let read answers

    def start_log(self) -> None:
        """Write the log to standard error."""
        try:
            start_log(self.log_level and self.log_level.upper(), self.log_format)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if self.access_log:
            # Worker processes read this variable.
            os.environ[ACCESS_VARIABLE] = "1"

    def make_triton(self, **settings: Any) -> Triton:
        """Make the server, without starting it; `settings` are further fields of `TritonConfig`."""
        if self.unprotected and self.access_token is not None:
            raise typer.BadParameter("--unprotected and --access-token exclude each other")
        restricted: list[str] | None = [] if self.unprotected else None
        security = TritonSecurityConfig(access_token=self.access_token, restricted_endpoints=restricted)
        return Triton(
            config=self.make_config(**settings),
            security_config=security,
            memory_budget=self.memory_budget,
            min_awake=self.min_awake,
        )

    def make_config(self, **settings: Any) -> TritonConfig:
        """Return the settings of the server."""
        fields: dict[str, Any] = {f"{front}_address": self.address for front in ("http", "grpc", "metrics")}
        fields |= {"http_port": self.http_port, "grpc_port": self.grpc_port, "metrics_port": self.metrics_port}
        fields |= {"cors_origins": self.cors_origins or None}
        return TritonConfig(**{**fields, **self.server, **settings})

    @contextlib.contextmanager
    def telling_of_token(self, triton: Triton) -> Iterator[None]:
        """Print where the token of a running server is for the other commands of this user."""
        if (path := triton.access_token_path) is not None:
            url = triton.http_url or triton.grpc_url
            line = f"The access token is in {path}, where this user's pytriton finds it: pytriton models {url}"
            if is_terminal(sys.stdout):
                # A server may outlive the terminal that it was started in.
                with contextlib.suppress(OSError):
                    print(line, flush=True)
            else:
                logger.info("%s", line)
        yield

    @contextlib.contextmanager
    def exit_on_errors(self, *others: type[Exception]) -> Iterator[None]:
        """Print the errors of the block, and exit with code 1; of `others`, print the text alone."""
        told: tuple[type[Exception], ...] = (PyTritonError, ProxyBackendError, *others)
        try:
            yield
        except told as error:
            text = _in_words_of_the_command(error)
            if self.log_format == "json":
                logger.error("%s", text)
            else:
                typer.echo(f"Error: {text}", err=True)
            raise typer.Exit(1) from None


def _in_words_of_the_command(error: Exception) -> str:
    """Return the text of an error with the option of the command in place of the field of `TritonConfig`."""
    text = str(error)
    if isinstance(error, PortInUseError) and error.setting in ("http_port", "grpc_port", "metrics_port"):
        option = f"--{error.setting.replace('_', '-')}"
        text = text.replace(f"TritonConfig.{error.setting}=", f"{option} ").replace(error.setting, option)
    return text
