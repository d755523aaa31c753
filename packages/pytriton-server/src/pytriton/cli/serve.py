"""The command `serve`."""

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from pytriton.cli.config_file import ConfigFile, ConfigFileError, read_config
from pytriton.cli.openai_endpoint import (
    EndpointError,
    bind_endpoint,
    check_openai,
    describe_endpoints,
    endpoint_beside,
    read_key,
)
from pytriton.cli.reloading import Reloader, ReloadError
from pytriton.cli.replacing import replacing
from pytriton.cli.serving import ServerOptions
from pytriton.cli.targets import UserCodeError, load_served
from pytriton.console.command import check_console, console_beside
from pytriton.decorators import get_model_signature
from pytriton.proxy_backend.system.escapes import is_terminal
from pytriton.server.lifecycle.stop_signals import end_on_sigterm
from pytriton.triton import ProcessWorker, Triton

__all__ = ["serve"]

logger = logging.getLogger(__name__)

# What they tell at INFO of a start, the lines for a terminal tell in fewer words.
_TELL_OF_START = ("pytriton.tritonserver", "pytriton.proxy_backend", "pytriton.server", "pytriton.triton")
_TELL_OF_STOP = ("pytriton.server", "pytriton.triton")
# Options that a file may have, too; those of ports are fields of `TritonConfig`.
_IN_FILE = {
    "workers": int,
    "address": str,
    "access_token": str,
    "unprotected": bool,
    "log_level": str,
    "log_format": str,
    "access_log": bool,
    "openai": int,
    "openai_key_file": str,
}
_MOST_PORT = 65535
_TOLD = (UserCodeError, ConfigFileError, ReloadError, EndpointError)
_OF_SERVER = ("workers", "address", "http_port", "grpc_port", "metrics_port", "access_token", "unprotected", "config")


def serve(target: str, options: Mapping[str, Any], *, given: Collection[str]) -> None:
    """Serve the models of a file or module until a signal ends it.

    Args:
        target: What to serve, see `load_served`.
        options: Those of the command, by the names of its parameters.
        given: Names of those that somebody has given: they win over the file of `--config`.

    Raises:
        typer.BadParameter: An option is not acceptable.
        typer.Exit: There is nothing to serve, the server could not be started, or ended by itself.
    """
    began = time.monotonic()
    try:
        file, settings = _read_settings(options, given)
        openai_port, openai_key = _read_openai(options, given, file)
    except ConfigFileError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    if options["console"]:
        check_console()
    if openai_port is not None:
        check_openai()
    elif openai_key is not None:
        raise typer.BadParameter("--openai-key-file is for --openai")
    settings.start_log()
    # Until the server is served, which then ends in order, with exit code 0.
    end_on_sigterm()
    workers = options["workers"] if "workers" in given else file.options.get("workers", options["workers"])
    served = _Served(target, workers, file)
    try:
        with contextlib.ExitStack() as opened, settings.exit_on_errors(*_TOLD):
            reloader = Reloader(target) if options["reload"] else None
            triton = served.make(settings, [name for name in (*_OF_SERVER, "reload") if name in given])
            if options["check"]:
                triton.check()
                if openai_port in triton.describe().ports:
                    raise EndpointError(
                        f"the port {openai_port} is to be that of the OpenAI endpoints and one of the server as well: "
                        "choose another with --openai PORT; 0 takes a free one."
                    )
                lines = str(triton.describe()).splitlines()
                lines += describe_endpoints(triton) if openai_port is not None else ()
                typer.echo("\n".join([*lines, f"{target} can be served."]))
                return
            endpoint = None
            if openai_port is not None:
                # Before anything is started: what cannot be used of templates, key and port.
                list(describe_endpoints(triton))
                read_key(openai_key)
                listener = opened.enter_context(bind_endpoint(settings.address, openai_port))
                endpoint = endpoint_beside(triton, listener, openai_key)
            port = options["console_port"] if options["console"] else None
            reloading = None if reloader is None else reloader.watching(lambda: served.reload(triton))
            # Not before `serve`, which from the first moment on that requests are answered ends in order.
            replace = replacing(lambda: served.replace(triton, lambda: _read_settings(options, given)))
            _be_brief(_TELL_OF_START, logging.WARNING)
            # Which says what is served, and after how long, with what the user's own file has loaded.
            triton.serve(beside=lambda: _beside(triton, port, (endpoint, reloading, replace)), since=began)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _read_settings(options: Mapping[str, Any], given: Collection[str]) -> tuple[ConfigFile, ServerOptions]:
    """Return the file of `--config`, as it is now, and what it and the command line say of the server.

    Raises:
        ConfigFileError: The file cannot be read, or is not understood.
    """
    path: Path | None = options["config"]
    file = ConfigFile(Path()) if path is None else read_config(path, _IN_FILE)
    if file.options.get("workers", 0) < 0:
        raise ConfigFileError(f"{path}: workers: expected an integer of at least 0; got {file.options['workers']}")
    # Typed on the command line, else in the file, else the default.
    values = {**options, **{name: value for name, value in file.options.items() if name not in given}}
    server = {name: value for name, value in file.server.items() if name not in given}
    if "address" in given:
        server = {name: value for name, value in server.items() if not name.endswith("_address")}
    names = ("address", "http_port", "grpc_port", "metrics_port", "access_token", "unprotected")
    settings = ServerOptions(
        **{name: values[name] for name in (*names, "log_level", "log_format", "access_log")}, server=server
    )
    return file, settings


def _read_openai(
    options: Mapping[str, Any], given: Collection[str], file: ConfigFile
) -> tuple[int | None, Path | None]:
    """Return the port of the OpenAI endpoints, if there are to be any, and the file with their key.

    Raises:
        ConfigFileError: The file says a port that is none.
    """
    port: int | None = options["openai"]
    if "openai" not in given and "openai" in file.options:
        port = file.options["openai"]
        if not 0 <= file.options["openai"] <= _MOST_PORT:
            raise ConfigFileError(f"{file.path}: openai: expected a port from 0 to {_MOST_PORT}; got {port}")
    key: Path | None = options["openai_key_file"]
    if key is None and "openai_key_file" in file.options:
        key = Path(file.options["openai_key_file"])
    return port, key


class _Served:
    """The models of a file or module on a server."""

    def __init__(self, target: str, workers: int, file: ConfigFile) -> None:
        self._target = target
        self._workers = workers
        self._file = file
        # What is served, by name: where it is, and the arguments of `bind`.
        self._models: dict[str, dict[str, Any]] = {}

    def make(self, settings: ServerOptions, given: Collection[str]) -> Triton:
        """Make the server with its models, without starting it.

        Args:
            settings: Its settings.
            given: Options that are for none that has settings of its own.
        """
        found = load_served(self._target)
        if isinstance(found, Triton):
            if given:
                names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
                raise typer.BadParameter(f"{self._target} is a Triton with settings of its own: leave out {names}")
            return found
        self._models = self._describe(found)
        triton = settings.make_triton()
        for name, model in self._models.items():
            triton.bind(name, **model)
        return triton

    def replace(self, triton: Triton, read_settings: Callable[[], tuple[ConfigFile, ServerOptions]]) -> None:
        """Put another server in the place of the running one, with the settings of now and the models of before.

        Args:
            triton: What runs.
            read_settings: Reads the settings; not asked where the file has a Triton with settings of its own.

        Raises:
            ConfigFileError: The settings cannot be read, or are not for these models.
            PyTritonError: The other server does not get ready: the running one goes on.
        """
        if not self._models:
            triton.replace_server()
            return
        file, settings = read_settings()
        # What a start would refuse is no settings of a server that goes on.
        file.check_models(self._models)
        for name, model in self._models.items():
            file.configure(name, model["config"])
        triton.replace_server(settings.make_config())
        if changed := self._file.changed_beside_server(file):
            logger.warning(
                "%s: %s changed, which counts from the next start on. SIGHUP changes what [server] says alone.",
                file.path,
                ", ".join(changed),
            )

    def reload(self, triton: Triton) -> str:
        """Serve what the file defines now, in place of what it has defined before.

        Returns:
            What has changed.

        Raises:
            UserCodeError: The file fails; nothing has changed.
            PyTritonError: A model cannot be served: it is as before.
        """
        found = load_served(self._target, again=True)
        if isinstance(found, Triton):
            raise ReloadError(f"{self._target} is a Triton with settings of its own: it is not reloaded")
        models = self._describe(found)
        told = []
        for name in [name for name in self._models if name not in models]:
            triton.unbind(name)
            del self._models[name]
            told.append(f"{name} is gone")
        for name, model in models.items():
            if name in self._models:
                triton.rebind(name, **model)
            else:
                triton.bind(name, **model)
                told.append(f"{name} is new")
            self._models[name] = model
        return ", ".join(told)

    def _describe(self, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the arguments of `bind` by the names of the models."""
        models = {}
        for place, model in found.items():
            signature = get_model_signature(model)
            workers = self._file.workers(signature.name, self._workers)
            models[signature.name] = {
                # By its place, since that is how the processes find an object, too.
                "infer_func": ProcessWorker(place, copies=workers) if workers else model,
                "inputs": signature.inputs,
                "outputs": signature.outputs,
                "config": self._file.configure(signature.name, signature.config),
            }
        self._file.check_models(models)
        return models


@contextlib.contextmanager
def _beside(
    triton: Triton,
    console_port: int | None,
    others: Iterable[contextlib.AbstractContextManager[None] | None],
) -> Iterator[None]:
    """Run what is asked for beside a server that has been started."""
    _be_brief(_TELL_OF_STOP, logging.NOTSET)
    with contextlib.ExitStack() as stack:
        if console_port is not None:
            stack.enter_context(console_beside(triton, console_port))
        for other in others:
            if other is not None:
                stack.enter_context(other)
        yield


def _be_brief(names: Sequence[str], level: int) -> None:
    """Set the levels of logs at a terminal, which is told the same in fewer words."""
    if is_terminal(sys.stdout) and logging.getLogger().level == logging.INFO:
        for name in names:
            logging.getLogger(name).setLevel(level)
