"""The command `serve`."""

import contextlib
import dataclasses
import itertools
import logging
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from pytriton.cli.config_file import ConfigFile, ConfigFileError, check_duration, check_sleep, read_config
from pytriton.cli.reloading import Reloader
from pytriton.cli.replacing import replacing
from pytriton.cli.server_options import ServerOptions
from pytriton.cli.targets import UserCodeError, load_served, user_code_error
from pytriton.decorators import get_model_signature
from pytriton.exceptions import PyTritonError
from pytriton.guests import Guest
from pytriton.proxy_backend import ProxyBackendError
from pytriton.proxy_backend.settings import read_duration
from pytriton.proxy_backend.system.escapes import is_terminal
from pytriton.server.garbage import collecting_what_is_new
from pytriton.server.lifecycle.stop_signals import StopRequested, end_on_sigterm
from pytriton.server.models.process_workers import MAX_COPIES, PROCESS, SLEEPS
from pytriton.triton import ProcessWorker, Triton

logger = logging.getLogger(__name__)

# The lines for a terminal replace what these loggers write at INFO during a start.
_TELL_OF_START = ("pytriton.tritonserver", "pytriton.proxy_backend", "pytriton.server", "pytriton.triton")
_TELL_OF_STOP = ("pytriton.server", "pytriton.triton")
# A file may have these options, too; ports are fields of `TritonConfig`.
_IN_FILE: Mapping[str, type | range] = {
    "workers": int,
    "min_workers": range(1, MAX_COPIES + 1),
    "idle": str,
    "sleep": str,
    "memory_budget": str,
    "min_awake": int,
    "address": str,
    "access_token": str,
    "unprotected": bool,
    "log_level": str,
    "log_format": str,
    "access_log": bool,
}
_OF_OPTIONS = [field.name for field in dataclasses.fields(ServerOptions) if field.name != "server"]
_TOLD = (UserCodeError, ConfigFileError)
_OF_SERVER = (
    "workers",
    "min_workers",
    "idle",
    "sleep",
    "memory_budget",
    "min_awake",
    "address",
    "http_port",
    "grpc_port",
    "metrics_port",
    "access_token",
    "unprotected",
    "cors_origins",
    "config",
)


def serve(target: str, options: Mapping[str, Any], *, guests: Sequence[type[Guest]], given: Collection[str]) -> None:
    """Serve the models of a file or module until a signal ends it.

    Options in `given` win over the file of `--config`.
    """
    began = time.monotonic()
    if options["idle"] is not None:
        _check_idle(options["idle"])
    if options["sleep"] not in (None, *SLEEPS):
        raise typer.BadParameter(f"--sleep: expected {' or '.join(SLEEPS)}; got {options['sleep']!r}")
    settings_now = _Settings(options, guests, given)
    try:
        file, values, settings = settings_now.read()
    except ConfigFileError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    present = [kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)}) for kind in guests]
    for guest in present:
        guest.check(given)
    with settings.exit_on_errors(*_TOLD):
        if any(guest.serve(target, partial(load_served, target), values) for guest in present):
            return
    settings.start_log()
    # This handler counts until `serve` begins, which ends in order, with exit code 0.
    end_on_sigterm()
    served = _Served(target, values, file)
    try:
        with contextlib.ExitStack() as opened, settings.exit_on_errors(*_TOLD):
            reloader = Reloader(target) if options["reload"] else None
            triton = served.make(settings, [name for name in (*_OF_SERVER, "reload") if name in given])
            lines = itertools.chain.from_iterable(guest.describe(triton) for guest in present)
            if options["check"]:
                triton.check()
                typer.echo("\n".join([*str(triton.describe()).splitlines(), *lines, f"{target} can be served."]))
                return
            # Guests check models and settings before anything is started.
            list(lines)
            address = triton.describe().address
            beside = [guest.beside(triton, opened, address=address) for guest in present]
            if reloader is None:
                beside.append(collecting_what_is_new())
            else:
                # What was loaded before goes then, so the collector has to see it.
                beside.append(reloader.watching(lambda: served.reload(triton)))
            # This begins inside `serve`, which ends in order from the moment that requests are answered.
            beside.append(replacing(lambda: served.replace(triton, settings_now.read)))
            beside.append(settings.telling_of_token(triton))
            _be_brief(_TELL_OF_START, logging.WARNING)
            # It reports what is served, and the time since the start, including the import of the user's file.
            triton.serve(beside=lambda: _entering(beside), since=began)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


class _Settings:
    """The options of the command line and of the file of `--config`, read again on demand."""

    def __init__(self, options: Mapping[str, Any], guests: Sequence[type[Guest]], given: Collection[str]) -> None:
        self._options = options
        self._given = given
        self._in_file: dict[str, type | range] = dict(_IN_FILE)
        for guest in guests:
            self._in_file |= guest.in_file

    def read(self) -> tuple[ConfigFile, dict[str, Any], ServerOptions]:
        """Return the file, all options of the command, and those of the server."""
        path: Path | None = self._options["config"]
        file = ConfigFile(Path()) if path is None else read_config(path, self._in_file)
        if file.options.get("workers", 0) < 0:
            raise ConfigFileError(f"{path}: workers: expected an integer of at least 0; got {file.options['workers']}")
        if file.options.get("min_awake", 0) < 0:
            raise ConfigFileError(
                f"{path}: min_awake: expected an integer of at least 0; got {file.options['min_awake']}"
            )
        if path is not None and "idle" in file.options:
            check_duration(path, "idle", file.options["idle"])
        if path is not None and "sleep" in file.options:
            check_sleep(path, "sleep", file.options["sleep"])
        # The command line wins over the file, and the file over the default.
        values = {**self._options, **{name: each for name, each in file.options.items() if name not in self._given}}
        server = {name: value for name, value in file.server.items() if name not in self._given}
        if "address" in self._given:
            server = {name: value for name, value in server.items() if not name.endswith("_address")}
        settings = ServerOptions(**{name: values[name] for name in _OF_OPTIONS}, server=server)
        return file, values, settings


class _Served:
    """The models of a file or module on a server."""

    def __init__(self, target: str, values: Mapping[str, Any], file: ConfigFile) -> None:
        self._target = target
        self._workers: int = values["workers"]
        self._idle: str | None = values["idle"]
        self._sleep: str | None = values["sleep"]
        self._min_workers: int | None = values["min_workers"]
        self._file = file
        # The models by name: where they are defined, and the arguments of `bind`.
        self._models: dict[str, dict[str, Any]] = {}

    def make(self, settings: ServerOptions, given: Collection[str]) -> Triton:
        """Make the server with its models, without starting it.

        A Triton with settings of its own takes none of the options in `given`.
        """
        found = load_served(self._target)
        if isinstance(found, Triton):
            if given:
                named = {"cors_origins": "cors"}
                names = ", ".join(f"--{named.get(name, name).replace('_', '-')}" for name in given)
                raise typer.BadParameter(f"{self._target} is a Triton with settings of its own: leave out {names}")
            return found
        self._models = self._describe(found)
        triton = settings.make_triton()
        for name, model in self._models.items():
            _bind(triton.bind, name, model)
        return triton

    def replace(self, triton: Triton, read: Callable[[], tuple[ConfigFile, Mapping[str, Any], ServerOptions]]) -> None:
        """Replace the running server by one with the current settings and the same models.

        If that fails, the running server goes on.
        """
        if not self._models:
            triton.replace_server()
            return
        file, _, settings = read()
        # Settings that a start would refuse must not reach the running server.
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
        """Serve what the file defines now, and return what has changed. After an error, models are as before."""
        found = load_served(self._target, again=True)
        if isinstance(found, Triton):
            raise UserCodeError(f"{self._target} is a Triton with settings of its own: it is not reloaded")
        models = self._describe(found)
        told = []
        for name in [name for name in self._models if name not in models]:
            triton.unbind(name)
            del self._models[name]
            told.append(f"{name} is gone")
        for name, model in models.items():
            if name in self._models:
                _bind(triton.rebind, name, model)
            else:
                _bind(triton.bind, name, model)
                told.append(f"{name} is new")
            self._models[name] = model
        return ", ".join(told)

    def _describe(self, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the arguments of `bind` by the names of the models."""
        models = {}
        for place, model in found.items():
            signature = get_model_signature(model)
            workers = self._file.workers(signature.name, self._workers)
            idle_timeout_s = self._file.idle_timeout_s(signature.name, self._idle)
            if idle_timeout_s is not None and not workers:
                raise UserCodeError(
                    f"{signature.name} cannot sleep when it is idle, because a thread of the server's process serves "
                    f"it: give it a process of its own, with --workers 1, or leave out --idle"
                )
            sleep = self._file.sleep(signature.name, self._sleep)
            options: dict[str, Any] = {
                "sleep": sleep or PROCESS,
                "starts_asleep": self._file.starts_asleep(signature.name),
                "pinned": self._file.is_pinned(signature.name),
                "golden": self._file.golden(signature.name),
                "min_workers": self._file.min_workers(signature.name, self._min_workers),
            }
            given = next((name for name, value in options.items() if value not in (False, None, PROCESS)), None)
            if given is not None and not workers:
                raise UserCodeError(
                    f"{signature.name} cannot have {given}, because a thread of the server's process serves it, which "
                    f"never sleeps and is never started again: leave out {given}, or give it a process of its own, "
                    "with --workers 1"
                )
            options["idle_timeout_s"] = idle_timeout_s
            options["min_copies"] = fewest = options.pop("min_workers")
            if fewest is not None and fewest > workers:
                raise UserCodeError(
                    f"{signature.name} has --workers {workers}, fewer than the {fewest} of --min-workers, which run at "
                    "least: raise --workers, or lower --min-workers"
                )
            models[signature.name] = {
                # Given by its place, because worker processes find an object by that.
                "infer_func": ProcessWorker(place, copies=workers, **options) if workers else model,
                "inputs": signature.inputs,
                "outputs": signature.outputs,
                "config": self._file.configure(signature.name, signature.config),
            }
        self._file.check_models(models)
        return models


def _check_idle(text: str) -> None:
    try:
        read_duration(text)
    except ValueError:
        raise typer.BadParameter(f"--idle: expected a time above 0, such as 90s, 5m or 1h; got {text!r}") from None


def _bind(bind: Callable[..., object], name: str, model: Mapping[str, Any]) -> None:
    """Bind a model; if it is a class, making its object may fail in the user's code."""
    try:
        bind(name, **model)
    except (PyTritonError, ProxyBackendError, StopRequested):
        raise
    except Exception as error:
        raise user_code_error(f"{name} fails when it is made", error) from error


@contextlib.contextmanager
def _entering(beside: Iterable[contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """Enter the context managers that run beside a started server."""
    _be_brief(_TELL_OF_STOP, logging.NOTSET)
    with contextlib.ExitStack() as stack:
        for each in beside:
            stack.enter_context(each)
        yield


def _be_brief(names: Sequence[str], level: int) -> None:
    """Set the levels of loggers at a terminal, which prints the same in fewer words."""
    if is_terminal(sys.stdout) and logging.getLogger("pytriton").getEffectiveLevel() == logging.INFO:
        for name in names:
            logging.getLogger(name).setLevel(level)
