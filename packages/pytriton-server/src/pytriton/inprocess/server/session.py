"""One run of a server, from its start to its stop. A `Server` has one at a time and may have several in its life."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.c_types import MetricsHandle, ServerHandle
from pytriton.inprocess.capi.enums import MetricFormat, ModelControlMode
from pytriton.inprocess.capi.errors import (
    InternalError,
    ModelNotFoundError,
    TimedOutError,
    TritonError,
    UnavailableError,
)
from pytriton.inprocess.capi.parameters import Parameter, c_parameters
from pytriton.inprocess.capi.threads import unloading, unloading_threads
from pytriton.inprocess.requests.access import ServerAccess
from pytriton.inprocess.server import stubs
from pytriton.inprocess.server.load_parameters import files_of
from pytriton.inprocess.server.log_records import deliver_log
from pytriton.inprocess.server.memory_models import MemoryRepository, is_folder_name
from pytriton.inprocess.server.options import Options, option_values
from pytriton.inprocess.server.startup import Folders, failure_of_models, new_server
from pytriton.server.workspace import Workspace

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
# Seconds that Triton may spend on its final checks once all models are unloaded.
_EMPTY_EXIT_TIMEOUT_S = 1
_GONE_STATES = (None, "UNAVAILABLE")
# The threads need microseconds, but a busy machine may keep them waiting.
_UNLOADING_THREADS_S = 30


class Session(ServerAccess):
    """A running server of the C API with all that belongs to it."""

    def __init__(self, options: Options) -> None:
        values = option_values(options)
        super().__init__(options.server_id)
        # Describes what keeps bound callables busy, for the error of a stop that takes too long.
        self.describe_busy: Callable[[], list[str]] = list
        self.control_mode = ModelControlMode(values["model_control_mode"])
        local = json.loads(values["cache_config"].get(b"local", b"{}"))
        size = str(local.get("size", "")).strip()
        # Triton refuses a size that is no number.
        self.cache_bytes = int(size) if size.isdecimal() else 0
        self._exit_timeout_s = float(values["exit_timeout"])
        python = values["backend_configuration"].get(b"python", {})
        self._shm_prefix = python.get(b"shm-region-prefix-name", b"").decode()
        self._stop_lock = threading.Lock()
        self._is_empty = False  # whether all models are unloaded, for good
        self._workspace = Workspace()
        self._workspace.create()
        self.memory = MemoryRepository(self._workspace.model_store_path)
        process.register(self)
        try:
            self._create(values)
        except BaseException:
            self._abandon()
            raise

    def _create(self, values: dict[str, Any]) -> None:
        folders = Folders(self.api, self._workspace, values)
        # Triton must not delete a failed server while others run, so it keeps running and is checked here.
        self.handle = new_server(self.api, values, folders, exit_on_error=False)
        try:
            index = self._index(self.handle)
        except UnavailableError:
            raise self._no_server(values, folders) from None
        if values["exit_on_error"] and (failure := failure_of_models(self.name, values, index)) is not None:
            raise failure

    def _no_server(self, values: dict[str, Any], folders: Folders) -> TritonError:
        """Return the error for a server that could not even look for models."""
        if process.is_alone(self):
            try:
                # Start once more, to get Triton's message about the failure.
                self.handle = new_server(self.api, values, folders, exit_on_error=True)
            except TritonError as error:
                return error
        about_cache = (
            "The process can have one response cache, which another server may have, or may have had while others "
            "still run. "
            if values["cache_config"]
            else ""
        )
        return InternalError(
            f"Server {self.name!r} did not start. {about_cache}Triton's log (log_error=True) tells why.",
            expected="a server that starts",
            received="one that failed",
            where=f"server {self.name!r}",
        )

    def _abandon(self) -> None:
        """Free what a failed start has left."""
        self.refuse_calls()
        try:
            if self.handle:
                with contextlib.suppress(UnavailableError):
                    self._unload_all(time.monotonic() + self._exit_timeout_s)
        finally:
            self._delete()

    def index(self, *, ready_only: bool = False) -> list[dict[str, Any]]:
        """List the models of the repositories, as Triton's model index does."""
        with self.use() as handle:
            return self._index(handle, ready_only=ready_only)

    def flag(self, function: str) -> bool:
        """Call a function of the C API that returns a flag of the server."""
        flag = ctypes.c_bool()
        with self.use() as handle:
            getattr(self.api, function)(handle, ctypes.byref(flag))
        return flag.value

    def metrics(self, metric_format: MetricFormat) -> str:
        """Return the metrics of all servers of this process as text in one of the formats."""
        text, size = ctypes.c_char_p(), ctypes.c_size_t()
        with self.use() as handle:
            metrics = MetricsHandle()
            self.api.TRITONSERVER_ServerMetrics(handle, ctypes.byref(metrics))
            try:
                self.api.TRITONSERVER_MetricsFormatted(metrics, metric_format, ctypes.byref(text), ctypes.byref(size))
                return ctypes.string_at(text, size.value).decode()
            finally:
                self.api.TRITONSERVER_MetricsDelete(metrics)

    def load(self, name: str, parameters: Mapping[str, Parameter]) -> None:
        """Load a model, whatever the mode of control is. It goes on after an interrupt."""
        process.interruptible(lambda: self._load(name, parameters), lambda _: None, "load")

    def _load(self, name: str, parameters: Mapping[str, Parameter]) -> None:
        with self.use() as handle:
            if parameters and self._is_in_memory_only(handle, name):
                self.memory.write(name, files_of(name, parameters))
                parameters = {}
            try:
                with c_parameters(self.api, parameters) as (array, count):
                    self.api.TRITONSERVER_ServerLoadModelWithParameters(handle, name.encode(), array, count)
            except TritonError as error:
                if not parameters and isinstance(error, InternalError) and not self._is_known(handle, name):
                    raise self._no_model(name) from error
                error.where = f"model {name!r}"
                if "failed to poll from model repository" not in error.message:
                    raise
                # Triton says nothing more about a configuration or folder that it cannot use.
                raise type(error)(
                    f"{error.message}: expected a folder and a configuration that Triton can use. Its log "
                    "(log_error=True) tells what is wrong with them.",
                    expected="a folder and a configuration that Triton can use",
                    received=name,
                    where=error.where,
                ) from error

    def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a model, whatever the mode of control is, without waiting."""
        with self.use() as handle, unloading():
            if dependents:
                self.api.TRITONSERVER_ServerUnloadModelAndDependents(handle, name.encode())
            else:
                self.api.TRITONSERVER_ServerUnloadModel(handle, name.encode())

    def check_listed(self, name: str) -> None:
        """Raise an error if there is no model of this name; Triton would unload any name without an error."""
        with self.use() as handle:
            if not self._is_known(handle, name):
                raise self._no_model(name)

    def is_listed(self, name: str) -> bool:
        """Return whether a repository has a folder for a model, loaded or not."""
        return any(model["name"] == name for model in self.index())

    def _is_in_memory_only(self, handle: ServerHandle, name: str) -> bool:
        if name in self.memory:
            return True
        return is_folder_name(name) and all(model["name"] != name for model in self._index(handle))

    def _is_known(self, handle: ServerHandle, name: str) -> bool:
        try:
            return any(model["name"] == name for model in self._index(handle))
        except InternalError:
            # A repository's folder is gone, so nobody knows.
            return True

    def _no_model(self, name: str) -> ModelNotFoundError:
        return ModelNotFoundError(
            f"Server {self.name!r}: expected a model {name!r} in one of the model repositories, found none.",
            expected="the name of a model in a repository",
            received=name,
            where=f"model {name!r}",
        )

    def _index(self, handle: ServerHandle, *, ready_only: bool = False) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.api.ask("TRITONSERVER_ServerModelIndex", handle, int(ready_only))
        return listed

    # -- end ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Cancel what runs, unload all models and delete the server.

        If requests or models take too long, the server refuses calls but still exists, and another call waits again.
        """
        if self.is_foreign:
            raise self.refusal()
        with self._stop_lock:
            if not self._stopped:
                self._stop(time.monotonic() + self._exit_timeout_s)

    def _stop(self, deadline: float) -> None:
        self.refuse_calls()
        for request in self.in_flight:
            request.cancel()
        self._wait(self.users, deadline)
        if self.control_mode is not ModelControlMode.POLL:
            self._unload_all(deadline)
        self._delete()

    def after_fork(self) -> None:
        """Make the copy in a forked child useless, because everything in it belongs to the parent."""
        self._stop_lock = threading.Lock()
        super().after_fork()

    def _unload_all(self, deadline: float) -> None:
        """Unload all models, so that the stop of Triton finds none and does not sleep in steps of whole seconds."""
        try:
            listed = self._index(self.handle)
        except InternalError as error:
            # A repository's folder is gone. Triton needs it for its list, but not for its stop.
            logger.debug("Server %r leaves the unloading of its models to Triton: %s", self.name, error)
            return
        loaded = [model for model in listed if model.get("state") not in _GONE_STATES]
        crashed = stubs.crashed(self._configs(loaded))
        regions = stubs.idle_regions(self._shm_prefix) if crashed else set()
        with unloading():
            for name in {model["name"] for model in loaded}:
                self.api.TRITONSERVER_ServerUnloadModel(self.handle, name.encode())
        given_up_at = time.monotonic() + stubs.GRACE_S
        self._wait(lambda: self._models_left(crashed if time.monotonic() >= given_up_at else ()), deadline)
        if left := self._models_left():
            stubs.clear_away(crashed, regions & stubs.idle_regions(self._shm_prefix))
            logger.warning(
                "Server %r: a process of Triton's Python backend has crashed, and Triton holds on to %s. Nothing "
                "can be asked of it; its memory is given back at the end of the process.",
                self.name,
                left,
            )
        self._is_empty = True

    def _configs(self, models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        for model in models:
            name, version = model["name"], model["version"]
            # The model may be about to be unloaded.
            with contextlib.suppress(TritonError):
                config = self.api.ask("TRITONSERVER_ServerModelConfig", self.handle, name.encode(), int(version), 1)
                yield name, version, config

    def _models_left(self, given_up: Collection[tuple[str, str]] = ()) -> str:
        left = [
            model
            for model in self._index(self.handle)
            if model.get("state") not in _GONE_STATES and (model["name"], model.get("version")) not in given_up
        ]
        named = ", ".join(f"{model['name']} version {model.get('version')} ({model.get('state')})" for model in left)
        return f"models that are not unloaded: {named}" if left else ""

    def _wait(self, left: Any, deadline: float) -> None:
        pause_s = _FIRST_PAUSE_S
        while what := left():
            if time.monotonic() > deadline:
                raise TimedOutError(
                    f"Server {self.name!r} was not stopped within the exit_timeout of {self._exit_timeout_s:g} s: "
                    f"there are still {what}. They were cancelled, which takes effect where the model looks for it. "
                    + "\n".join(["Call stop() again to go on waiting.", *self.describe_busy()]),
                    expected="nothing left",
                    received=what,
                    where=f"server {self.name!r}",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _stop_triton(self) -> bool:
        """Stop Triton itself, and return whether it may be deleted.

        After a failed reload, Triton counts the failed model as live for ever, and would wait for it in vain.
        """
        # Older servers wait for the time that they got at their start.
        if self._is_empty and self.api.has("TRITONSERVER_ServerSetExitTimeout"):
            self.api.TRITONSERVER_ServerSetExitTimeout(self.handle, _EMPTY_EXIT_TIMEOUT_S)
        try:
            with unloading():
                self.api.TRITONSERVER_ServerStop(self.handle)
        except InternalError as error:
            if "Exit timeout expired" not in str(error):
                raise
            if self._is_empty:
                return False
            raise TimedOutError(
                f"Server {self.name!r} was not stopped within the exit_timeout of {self._exit_timeout_s:g} s: there "
                "are still models that are not unloaded. Triton stays in memory with them.",
                expected="nothing left",
                received="models that are not unloaded",
                where=f"server {self.name!r}",
            ) from error
        return True

    def _has_unloaded(self) -> bool:
        """Wait for the threads in which Triton still ends models; return whether they are done."""
        try:
            self._wait(
                lambda: unloading_threads() and "threads in which Triton ends models",
                time.monotonic() + _UNLOADING_THREADS_S,
            )
        except TimedOutError:
            logger.warning(
                "Server %r is stopped, but stays in memory: threads in which Triton ends models were not done with it "
                "within %g s.",
                self.name,
                _UNLOADING_THREADS_S,
            )
            return False
        return True

    def _delete(self) -> None:
        delete: Callable[[], object] | None = None
        try:
            # A server that does not stop stays in memory, because its models still use it.
            if self.handle and self._stop_triton() and self._has_unloaded():
                delete = functools.partial(self.api.TRITONSERVER_ServerDelete, self.handle)
        finally:
            self._stopped = True
            process.delete_when_alone(self, delete)
            self._workspace.clean()
            deliver_log()
