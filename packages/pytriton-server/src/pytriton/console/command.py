"""The command `console`: a page where people look at a running server."""

import contextlib
import importlib.util
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NoReturn

import typer

from pytriton.guests import Guest
from pytriton.guests.options import AuthoritiesFile, Token

if TYPE_CHECKING:
    from pytriton.triton import Triton

PASSWORD_VARIABLE = "PYTRITON_CONSOLE_PASSWORD"
"""The environment variable with the password of the console."""

_NEEDED = ("nicegui", "fastapi", "uvicorn")
_INSTALL = 'pip install "pytriton-server[console]"'
_LOG_BYTES = 1 << 20


def console_command(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="[SCHEME://]HOST[:PORT] of any tritonserver; http or https.")
    ] = "localhost:8000",
    metrics_url: Annotated[
        str | None, typer.Option(help="Its page of metrics; by default http://HOST:8002/metrics.")
    ] = None,
    grpc_url: Annotated[
        str | None, typer.Option(help="Where to ask for streams, such as grpc://HOST:8001, which carry any tensors.")
    ] = None,
    access_token: Token = None,
    ca_file: AuthoritiesFile = None,
    address: Annotated[str, typer.Option(help="Where the console listens. Beyond loopback it asks for a password.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Its port; 0 takes a free one.")] = 8003,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that browsers may call the console by, beside localhost and addresses; repeatable."),
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(help=f"Holds the console's password, in place of the variable {PASSWORD_VARIABLE}."),
    ] = None,
    log_file: Annotated[Path | None, typer.Option(help="The log of the server, whose last lines are shown.")] = None,
) -> None:
    """Show a running server in the browser: models, charts, a form for each model. Until Ctrl+C or SIGTERM.

    What is shown is asked of the server while somebody looks. Needs the extra console.
    """
    try:
        from pytriton.console.server import ConsoleOptions, serve_console
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        _fail(f"The console needs {error.name}: {_INSTALL}")
    from pytriton.client.exceptions import PyTritonClientError
    from pytriton.exceptions import PyTritonError
    from pytriton.guests.endpoints import is_loopback

    try:
        password = _read_password(password_file)
        if password is None and not is_loopback(address) and sys.stdin.isatty():
            password = typer.prompt("A password for the console", hide_input=True, confirmation_prompt=True)
        options = ConsoleOptions(
            url=url,
            metrics_url=metrics_url,
            grpc_url=grpc_url,
            access_token=access_token,
            ca_file=ca_file,
            address=address,
            port=port,
            allowed_hosts=tuple(allowed_host or ()),
            password=password,
            log_file=log_file,
        )
        serve_console(options, lambda where: typer.echo(f"Console: {where} (Ctrl+C ends it)"))
    except (PyTritonClientError, PyTritonError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or f'{address}, port {port}'}: {error.strerror or error}")
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


@dataclass
class ConsoleGuest(Guest):
    """The console beside a server."""

    console: Annotated[
        bool, typer.Option("--console", help="Start the console beside the server, a page where people look.")
    ] = False
    console_port: Annotated[int, typer.Option(min=0, max=65535, help="Its port on loopback; 0 takes a free one.")] = (
        8003
    )

    commands: ClassVar = {"console": console_command}

    def check(self, given: Collection[str]) -> None:
        """Check that the packages of the console are installed if one is asked for."""
        for name in _NEEDED if self.console else ():
            if importlib.util.find_spec(name) is None:
                raise typer.BadParameter(f"--console needs {name}: {_INSTALL}")

    def beside(
        self, triton: "Triton", opened: contextlib.ExitStack, *, address: str
    ) -> contextlib.AbstractContextManager[object]:
        """Return the context manager that runs the console."""
        return _console_beside(triton, self.console_port) if self.console else contextlib.nullcontext()


@contextlib.contextmanager
def _console_beside(triton: "Triton", port: int) -> Iterator[None]:
    """Run a console for a server of this process, in another process and on loopback, until the block ends."""
    from logging.handlers import RotatingFileHandler

    from pytriton.proxy_backend.cli.logs import TEXT_FORMAT
    from pytriton.triton import run_beside

    with tempfile.TemporaryDirectory(prefix="pytriton-console-") as folder:
        log = Path(folder, "server.log")
        handler = RotatingFileHandler(log, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")
        handler.setFormatter(logging.Formatter(TEXT_FORMAT))
        command = [sys.executable, "-m", "pytriton", "console", str(triton.http_url), "--port", str(port)]
        command += ["--log-file", str(log)]
        command += ["--metrics-url", triton.metrics_url] if triton.metrics_url else []
        command += ["--grpc-url", triton.grpc_url] if triton.grpc_url else []
        logging.getLogger().addHandler(handler)
        try:
            # It prints why it cannot listen, and restarting would not help.
            with run_beside(triton, command, name="the console", restart=False):
                yield
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()


def _read_password(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(PASSWORD_VARIABLE)
    with path.open(encoding="utf-8") as file:
        return file.readline().rstrip("\r\n")


def _fail(text: str) -> NoReturn:
    typer.echo(f"Error: {text}", err=True)
    raise typer.Exit(1)
