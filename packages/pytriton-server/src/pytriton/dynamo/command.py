"""The command `dynamo`, and the options of `serve`: the models of a server as workers of NVIDIA Dynamo."""

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from pytriton.exceptions import PyTritonError, PyTritonInvalidOperationError
from pytriton.guests import Guest
from pytriton.guests.endpoints import is_loopback
from pytriton.guests.options import AuthoritiesFile, Token

if TYPE_CHECKING:
    from pytriton.triton import Triton

__all__ = ["DynamoGuest", "dynamo_command"]

_INSTALL = 'pip install "pytriton-server[dynamo]"'
_DISCOVERY = ("etcd", "file", "kubernetes", "mem")
_HOST_VARIABLE = "DYN_TCP_RPC_HOST"
# At its default level, Dynamo logs each request.
_LOG_VARIABLE, _LOG_LEVEL = "DYN_LOG", "warn"
_LOOPBACK = "127.0.0.1"

_Discovery = Annotated[
    str,
    typer.Option(
        envvar="DYN_DISCOVERY_BACKEND",
        help=f"Where Dynamo's front ends find workers: {', '.join(_DISCOVERY)}. Dynamo's own variables say the rest, "
        "such as ETCD_ENDPOINTS, and DYN_FILE_KV for file.",
    ),
]
_Namespace = Annotated[str, typer.Option(envvar="DYN_NAMESPACE", help="Dynamo's namespace.")]


def dynamo_command(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="[grpc://]HOST[:PORT] of any tritonserver.")
    ] = "grpc://localhost:8001",
    model: Annotated[list[str] | None, typer.Option(help="A model to serve, in place of all; repeatable.")] = None,
    discovery: _Discovery = "etcd",
    namespace: _Namespace = "dynamo",
    access_token: Token = None,
    ca_file: AuthoritiesFile = None,
) -> None:
    """Serve the models of a running server to NVIDIA Dynamo, until Ctrl+C or SIGTERM.

    Dynamo's front ends find the models and send requests here, which go on to the server. Needs the extra dynamo.
    """
    _check(discovery)
    from pytriton.client.exceptions import PyTritonClientError
    from pytriton.client.management import TlsSettings, TritonUrl

    try:
        address = TritonUrl.from_url(url if "://" in url else f"grpc://{url}")
        if address.protocol != "grpc":
            raise typer.BadParameter(
                f"expected the address of a server's gRPC, such as grpc://localhost:8001; got {url}"
            )
        os.environ.setdefault(_LOG_VARIABLE, _LOG_LEVEL)  # before Dynamo is imported
        from pytriton.dynamo._worker import WorkerSettings, run

        run(
            WorkerSettings(
                address,
                names=frozenset(model or ()),
                namespace=namespace,
                discovery=discovery,
                access_token=access_token,
                tls=None if ca_file is None else TlsSettings(ca_file=ca_file),
            )
        )
    except (PyTritonClientError, PyTritonError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


@dataclass
class DynamoGuest(Guest):
    """Workers of Dynamo for the models of a server."""

    dynamo: Annotated[
        bool,
        typer.Option("--dynamo", help="Serve the models to NVIDIA Dynamo as well, whose front ends find them."),
    ] = False
    dynamo_discovery: _Discovery = "etcd"
    dynamo_namespace: _Namespace = "dynamo"

    commands: ClassVar = {"dynamo": dynamo_command}
    in_file: ClassVar = {"dynamo": bool, "dynamo_discovery": str, "dynamo_namespace": str}

    def check(self, given: Collection[str]) -> None:
        """Check that Dynamo is installed if it is asked for."""
        if self.dynamo:
            _check(self.dynamo_discovery)
            return
        for option in ("dynamo_discovery", "dynamo_namespace"):
            if option in given:
                raise typer.BadParameter(f"--{option.replace('_', '-')} is for --dynamo")

    def describe(self, triton: "Triton") -> Iterator[str]:
        """Yield a line for each model."""
        if self.dynamo:
            for model in triton.describe().models:
                yield f"Dynamo: {model.name} in the namespace {self.dynamo_namespace}, found by {self.dynamo_discovery}"

    def beside(
        self, triton: "Triton", opened: contextlib.ExitStack, *, address: str
    ) -> contextlib.AbstractContextManager[object]:
        """Return the context manager that runs the worker of Dynamo."""
        return self._worker(triton, address) if self.dynamo else contextlib.nullcontext()

    @contextlib.contextmanager
    def _worker(self, triton: "Triton", address: str) -> Iterator[None]:
        """Run the worker in a process of its own, which is started again if it ends."""
        from pytriton.triton import run_beside

        if triton.grpc_url is None:
            raise PyTritonInvalidOperationError("--dynamo asks the server over gRPC, which is switched off")
        command = [sys.executable, "-m", "pytriton", "dynamo", triton.grpc_url]
        command += ["--discovery", self.dynamo_discovery, "--namespace", self.dynamo_namespace]
        if _HOST_VARIABLE not in os.environ and is_loopback(address):
            # A server for this machine alone gets a worker for this machine alone. By default, Dynamo listens at all
            # addresses.
            command = ["env", f"{_HOST_VARIABLE}={_LOOPBACK}", *command]
        with run_beside(triton, command, name="the worker of Dynamo"):
            yield


def _check(discovery: str) -> None:
    """Check that a worker can be started."""
    if find_spec("dynamo") is None or find_spec("dynamo.runtime") is None:
        raise typer.BadParameter(f"Dynamo is not installed: {_INSTALL}")
    if discovery not in _DISCOVERY:
        raise typer.BadParameter(f"--discovery: expected {', '.join(_DISCOVERY)}; got {discovery!r}")
