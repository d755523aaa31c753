"""The command `console`: a page where people look at a running server."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["PASSWORD_VARIABLE", "console"]

PASSWORD_VARIABLE = "PYTRITON_CONSOLE_PASSWORD"
"""Where the password of the console is looked for."""


def console(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="[SCHEME://]HOST[:PORT] of any tritonserver; http or https.")
    ] = "localhost:8000",
    metrics_url: Annotated[
        str | None, typer.Option(help="Its page of metrics; by default http://HOST:8002/metrics.")
    ] = None,
    grpc_url: Annotated[
        str | None, typer.Option(help="Where to ask for streams, such as grpc://HOST:8001, which carry any tensors.")
    ] = None,
    access_token: Annotated[
        str | None,
        typer.Option(envvar="PYTRITON_ACCESS_TOKEN", help="The server's token. Others can see a command line."),
    ] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates of the authorities to trust.")] = None,
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
        from pytriton.server.console.serving import ConsoleOptions, serve_console
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("nicegui", "fastapi", "uvicorn"):
            raise
        _fail(f'The console needs {error.name}: pip install "pytriton-server[console]"')
    from pytriton.client.exceptions import PyTritonClientError
    from pytriton.exceptions import PyTritonError
    from pytriton.server.console.guard import is_loopback

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


def _read_password(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(PASSWORD_VARIABLE)
    with path.open(encoding="utf-8") as file:
        return file.readline().rstrip("\r\n")


def _fail(text: str) -> None:
    typer.echo(f"Error: {text}", err=True)
    raise typer.Exit(1)
