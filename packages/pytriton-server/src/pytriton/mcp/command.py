"""The command `mcp`, and the options of `serve`: models as tools for agents."""

import contextlib
import importlib.util
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from pytriton.exceptions import PyTritonError
from pytriton.guests import Guest
from pytriton.guests.endpoints import (
    bind_endpoint,
    check_port,
    read_key,
    run_application,
    run_endpoint_beside,
)
from pytriton.guests.options import AuthoritiesFile, Token, given_options

if TYPE_CHECKING:
    from pytriton.triton import Triton

API_KEY_VARIABLE = "PYTRITON_MCP_API_KEY"
"""The environment variable with the API key."""

_NAME = "the MCP endpoint"
_OF_PORTS = ("address", "port", "host", "api_key_file", "cors_origins")
_NEEDED = ("mcp", "mcp_types", "uvicorn")
_INSTALL = 'pip install "pytriton-server[mcp]"'


def mcp_command(
    context: typer.Context,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="[SCHEME://]HOST[:PORT] of any tritonserver.")
    ] = "grpc://localhost:8001",
    model: Annotated[list[str] | None, typer.Option(help="A model to offer, in place of all; repeatable.")] = None,
    address: Annotated[str, typer.Option(help="Where the endpoint listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Its port; 0 takes a free one.")] = 9100,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A further name that callers know this machine by; repeatable. Not needed with an API key."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"Holds the key that callers have to send, in place of the variable {API_KEY_VARIABLE}."),
    ] = None,
    access_token: Token = None,
    ca_file: AuthoritiesFile = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.001, help="How long a call may take, in seconds.")
    ] = 600.0,
    cors_origins: Annotated[
        list[str] | None,
        typer.Option("--cors", metavar="ORIGIN", help="A place whose pages browsers let call tools; repeatable."),
    ] = None,
    stdio: Annotated[
        bool,
        typer.Option("--stdio", help="Answer the agent that starts this, by its standard streams, without a port."),
    ] = False,
    descriptor: Annotated[int | None, typer.Option(hidden=True, help="A socket that is bound, from serve.")] = None,
) -> None:
    """Offer the models of a running server to agents as tools, by the Model Context Protocol, until Ctrl+C or SIGTERM.

    A tool has the name, the docstring and the inputs of its model. Needs the extra mcp.
    """
    _check_installed("The command mcp")
    from pytriton.client.exceptions import PyTritonClientError
    from pytriton.client.management import TlsSettings
    from pytriton.mcp._server import PATH, ToolModels, application, serve_stdio

    if stdio:
        given = given_options(context)
        for each in context.command.params:
            if each.name in _OF_PORTS and each.name in given:
                told = f"{each.opts[0]} is for callers over HTTP, and --stdio answers one without a port"
                raise typer.BadParameter(told)
    try:
        tls = None if ca_file is None else TlsSettings(ca_file=ca_file)
        # An agent that starts this is of the same user as a server which has left its token for that user.
        models = ToolModels(url, model or (), access_token, tls, timeout_s, finds_token=stdio)
        if stdio:
            for number in (signal.SIGINT, signal.SIGTERM):
                # A thread waits for the standard input, and ends with the process alone.
                signal.signal(number, signal.SIG_DFL)
            return serve_stdio(models)
        key = read_key(api_key_file, API_KEY_VARIABLE)
        app, end = application(models, api_key=key, hosts=[address, *(host or ())], cors_origins=cors_origins or ())
        listener = bind_endpoint(address, port, name=_NAME, option="--mcp", descriptor=descriptor)
    except (PyTritonClientError, PyTritonError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    try:
        run_application(app, listener, title="MCP", path=PATH, has_key=key is not None, on_end=end)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


@dataclass
class McpGuest(Guest):
    """Tools for agents beside a server."""

    mcp: Annotated[
        int | None,
        typer.Option(
            "--mcp",
            metavar="PORT",
            min=0,
            max=65535,
            help="Offer the models to agents as tools there, by the Model Context Protocol, at the address of the "
            "server; 0 takes a free port.",
        ),
    ] = None
    mcp_key_file: Annotated[
        Path | None,
        typer.Option(help=f"With --mcp: holds the API key that callers have to send, in place of {API_KEY_VARIABLE}."),
    ] = None
    mcp_host: Annotated[
        list[str] | None,
        typer.Option(help="With --mcp: a further name that callers know this machine by; repeatable."),
    ] = None

    commands: ClassVar = {"mcp": mcp_command}
    in_file: ClassVar = {"mcp": range(65536), "mcp_key_file": str, "mcp_host": list}

    def __post_init__(self) -> None:
        if self.mcp_key_file is not None:
            # A file of settings gives a string.
            self.mcp_key_file = Path(self.mcp_key_file)

    def check(self, given: Collection[str]) -> None:
        """Check that the endpoint can be started if it is asked for."""
        if self.mcp is not None:
            _check_installed("--mcp")
            return
        for option, value in (("key-file", self.mcp_key_file), ("host", self.mcp_host)):
            if value:
                raise typer.BadParameter(f"--mcp-{option} is for --mcp")

    def describe(self, triton: "Triton") -> Iterator[str]:
        """Yield a line for each model: its tool, or why it has none."""
        if self.mcp is None:
            return
        from pytriton.client.exceptions import PyTritonClientError
        from pytriton.mcp._tools import read_model, tool_names

        check_port(triton, self.mcp, name=_NAME, option="--mcp")
        configs = {model.name: model.triton_config for model in triton.describe().models}
        for tool, name in tool_names(configs).items():
            try:
                described = bool(read_model(configs[name]).description)
                yield f"MCP: {name} is the tool {tool}" + ("" if described else ", which has no docstring")
            except PyTritonClientError as error:
                yield f"MCP: {name} is no tool: {error}"
        read_key(self.mcp_key_file, API_KEY_VARIABLE)

    def beside(
        self, triton: "Triton", opened: contextlib.ExitStack, *, address: str
    ) -> contextlib.AbstractContextManager[object]:
        """Bind the port, and return the context manager that runs the endpoint."""
        if self.mcp is None:
            return contextlib.nullcontext()
        listener = opened.enter_context(bind_endpoint(address, self.mcp, name=_NAME, option="--mcp"))
        options = ["--api-key-file", str(self.mcp_key_file)] if self.mcp_key_file is not None else []
        options += [f"--host={host}" for host in (address, *(self.mcp_host or ()))]
        options += [f"--cors={origin}" for origin in triton.describe().cors_origins]
        return run_endpoint_beside(triton, listener, "mcp", options, name=_NAME)


def _check_installed(who: str) -> None:
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise typer.BadParameter(f"{who} needs {name}: {_INSTALL}")
