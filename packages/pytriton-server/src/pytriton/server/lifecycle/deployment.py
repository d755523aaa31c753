"""Load, replace and unload the models of one running server."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from pytriton.proxy_backend import ProxyBackendError
from pytriton.proxy_backend.process.budget import NoRoomError
from pytriton.proxy_backend.system.threads import start_all
from pytriton.server.control.http import Control, ControlError
from pytriton.server.control.queues import Queues
from pytriton.server.errors import TritonModelLoadError, WorkspaceError
from pytriton.server.lifecycle.orphans import ORPHANED, OrphanedRequests
from pytriton.server.models.service import WorkerService
from pytriton.server.models.workers import Begin, StartCancelled
from pytriton.server.tritonserver.ports import Endpoint

WORKER_DEADLINE_S = 2.0
"""How long a worker is waited for that has nothing to do for anybody any more, in seconds."""
HURRIED_DEADLINE_S = 0.2
"""The same while somebody waits for the end."""

_JOIN_POLL_S = 0.1
# What the end of an idle worker takes of the processor at most.
_MOMENT_S = 0.01
_MOST_MOMENTS_S = 5.0
# Up to so many models are stopped one after the other.
_FEW = 8
# How much longer than the wait for its workers the stop of a model may take: a process has to be killed, and its end
# noted.
_STOP_MARGIN_S = 30.0
# How long a pause between two looks is, in terms of the time that a look takes, and at most.
_LOOK_SHARE = 4.0
_LONGEST_POLL_S = 0.25
_POLL_S = 0.005
# Time between the end of the last request and the removal of the model's socket.
_RELEASE_DEADLINE_S = 5.0
_ROOM_FOR_BOTH = ". Both callables need room until the old one is done: unbind the model first, or raise the budget"

logger = logging.getLogger(__name__)

StopWanted = Callable[[], bool]
"""Asked again and again while something is waited for; True ends the wait."""


class Deployer(Protocol):
    """Makes a server serve models."""

    def deploy(self, name: str, models: Sequence[WorkerService], timeout_s: float) -> bool:
        """Make the server serve these versions under a name, and no others; wait until they are loaded.

        No versions takes the name out of service; it returns False if other processes keep it there. After an error,
        the server serves what it served before.
        """

    def has_others(self, names: Collection[str]) -> bool:
        """Return whether the server has, or may have, models beside these."""


class Deployment:
    """The models of one running server. One thread at a time may use it."""

    def __init__(
        self,
        deployer: Deployer,
        endpoints: Path,
        *,
        control: Callable[[], Control],
        is_running: Callable[[], bool],
        log_tail: Callable[[], Sequence[str]],
        on_unrecoverable: Callable[[BaseException], None],
        cache_bytes: int,
        metrics: Callable[[], Endpoint | None] = lambda: None,
    ) -> None:
        self.cache_bytes = cache_bytes
        self._deployer = deployer
        self._endpoints = endpoints
        self._control = control
        self._is_running = is_running
        self._log_tail = log_tail
        self._on_unrecoverable = on_unrecoverable
        self._models: list[WorkerService] = []
        # These models are in service until the server has confirmed that they are not.
        self._leaving: Sequence[WorkerService] = ()
        # These models are out of service, but their workers still have requests to answer.
        self._draining: list[WorkerService] = []
        # The wait for the requests of these models has ended in vain.
        self._orphaned: list[WorkerService] = []
        self._generations = itertools.count(1)
        self._queues = Queues(control, metrics)

    @property
    def models(self) -> Sequence[WorkerService]:
        """The models in service."""
        return tuple(self._models)

    @property
    def lasting(self) -> Sequence[WorkerService]:
        """The models in service that stay in service, and so need workers."""
        return tuple(model for model in self._models if model not in self._leaving)

    @property
    def endpoints(self) -> Path:
        """Folder of the sockets between server and workers."""
        return self._endpoints

    def side_files(self, model: WorkerService) -> list[tuple[str, str]]:
        """Return names and texts of the files that the proxy reads from the folder of a model's version."""
        return model.side_files(self._endpoints, self.cache_bytes)

    def unloading(self) -> list[str]:
        """Return the names of models that are out of service and that the server has not released."""
        return [model.name for model in (*self._draining, *self._orphaned) if self._is_loaded(model)]

    def has_only_orphaned(self, orphaned: OrphanedRequests, models: Sequence[WorkerService] | None = None) -> bool:
        """Return whether the server can never answer the remaining requests of models."""
        loaded = list(filter(self._is_loaded, self._all() if models is None else models))
        # A model that replaced another under its name has its own socket, or the workers of both.
        if not orphaned.poll({model.endpoint(self._endpoints): model.definition.batching_delay_s for model in loaded}):
            return False
        return not self._deployer.has_others({model.name for model in self._all()})

    def prepare_all(self, models: Iterable[WorkerService], stop_wanted: StopWanted) -> None:
        """Start the workers of models that the server will load, as many of those that may sleep as have room."""
        begins = Begin.IF_ROOM
        for model in models:
            self.prepare(model, stop_wanted, begins)
            if model.workers.begins_asleep and not model.definition.starts_asleep:
                # Those that follow are likely to be as large, and to measure all again for each would take long.
                begins = Begin.ASLEEP

    def prepare(self, model: WorkerService, stop_wanted: StopWanted, begins: Begin = Begin.AWAKE) -> None:
        """Start the workers of a model that the server will load. They attach as soon as it is loaded."""
        if model.endpoint(self._endpoints).exists():
            # The requests of a model with this name were cut off, and its end takes time.
            model.generation = next(self._generations)
        self._models.append(model)
        model.describe(self._endpoints)
        self._start_workers(model, stop_wanted, begins=begins)

    def wait_warm(self, model: WorkerService, stop_wanted: StopWanted, old: WorkerService | None = None) -> None:
        """Wait until the callables of a model, which may take the place of an old one, have done their warm-up."""
        try:
            model.workers.wait_warm(cancelled=stop_wanted)
            model.workers.check_budget(None if old is None else old.workers)
        except ProxyBackendError as error:
            cause = error.__cause__ or error
            raise self.load_error(model, str(error), cause) from cause

    def wait_attached(self, model: WorkerService, timeout_s: float) -> None:
        """Wait until the workers of a loaded model are attached."""
        try:
            model.workers.wait_attached(timeout_s)
        except ProxyBackendError as error:
            raise TritonModelLoadError(
                f"Model {model.name!r} (version {model.version}) is loaded, but nothing serves it: {error}",
                model_name=model.name,
                model_version=model.version,
                reason=str(error),
            ) from error

    def load(self, model: WorkerService, *, timeout_s: float, stop_wanted: StopWanted) -> None:
        """Bring a model into service. After an error nothing of it is left."""
        is_deployed = False
        try:
            self.prepare(model, stop_wanted)
            self.wait_warm(model, stop_wanted)
            is_deployed = True
            try:
                self._deployer.deploy(model.name, self._named(model.name), timeout_s)
            except ControlError as error:
                # If the server refused, the model is not there; if it did not answer, the model may still come.
                is_deployed = error.reason is None
                raise self.load_error(model, error.reason or str(error)) from error
            self.wait_attached(model, timeout_s)
        except BaseException as error:
            if model in self._models:
                self._models.remove(model)
            if is_deployed:
                self._roll_back(model)
            model.stop_workers(_grace_s(error))
            raise

    def unload(
        self, models: Sequence[WorkerService], *, timeout_s: float, drain_timeout_s: float, stop_wanted: StopWanted
    ) -> None:
        """Take versions of one name out of service, and wait until their requests are answered.

        After `drain_timeout_s` the requests are cut off, with a warning. After an error, all versions stay in service.
        `stop_workers` has to follow if `stop_wanted` ends the wait.
        """
        name = models[0].name
        self._leaving = models
        try:
            staying = [model for model in self._named(name) if model not in models]
            is_gone = self._deployer.deploy(name, staying, timeout_s)
            self._models = [model for model in self._models if model not in models]
        finally:
            self._leaving = ()
        if not is_gone:
            self._detach(models, drain_timeout_s, stop_wanted)
            return
        self._draining += models
        self._wait_unloaded(models, drain_timeout_s, stop_wanted)

    def unload_all(self, *, timeout_s: float, drain_timeout_s: float, stop_wanted: StopWanted) -> None:
        """Take all models out of service, as `unload` does; the log names models that the server keeps."""
        shared: list[WorkerService] = []
        for name in dict.fromkeys(model.name for model in self._models):
            try:
                is_gone = self._deployer.deploy(name, [], timeout_s)
            except (ControlError, WorkspaceError) as error:
                logger.warning("Model %r stays on the server, without anybody to answer: %s", name, error)
                continue
            if is_gone:
                self._draining += self._named(name)
            else:
                shared += self._named(name)
            self._models = [model for model in self._models if model.name != name]
        self._detach(shared, drain_timeout_s, stop_wanted)
        self._wait_unloaded(tuple(self._draining), drain_timeout_s, stop_wanted)

    def replace(
        self,
        old: WorkerService,
        new: WorkerService,
        *,
        timeout_s: float,
        drain_timeout_s: float,
        stop_wanted: StopWanted,
    ) -> None:
        """Replace a model by another one of its name and version, without losing a request.

        If only the callables differ, the workers of both are attached for a moment, and Triton notices nothing.
        Otherwise Triton loads the new model beside the old one, which answers the requests that it has. After an error,
        the old model stays in service.
        """
        place = self._models.index(old)
        new.generation = old.generation
        same = self._files(new) == self._files(old)
        if not same:
            # Both listen at the same time, so each needs its own socket.
            new.generation = next(self._generations)
            new.shared_endpoint = None
        try:
            if not same:
                new.describe(self._endpoints)
            self._start_workers(new, stop_wanted, _ROOM_FOR_BOTH)
            self.wait_warm(new, stop_wanted, old)
            if same:
                self.wait_attached(new, timeout_s)
                # Not earlier: if the load fails, the file beside the socket must still describe the old model.
                new.describe(self._endpoints)
                self._models[place] = new
            else:
                self._models[place] = new
                self._reload(new, timeout_s)
        except BaseException as error:
            self._models[place] = old
            new.stop_workers(_grace_s(error))
            raise
        if same:
            self._detach([old], drain_timeout_s, stop_wanted)
            return
        try:
            self.wait_attached(new, timeout_s)
        finally:
            self._draining.append(old)
            self._wait_unloaded([old], drain_timeout_s, stop_wanted)

    def move_workers(self, model: WorkerService, endpoint: Path | None, stop_wanted: StopWanted) -> None:
        """Let the workers of a model attach to another socket once the old one is gone; None is one of our own.

        Those that may sleep do so until their next request, where the memory budget has no room for them.
        """
        model.stop_workers(WORKER_DEADLINE_S)
        model.shared_endpoint = endpoint
        model.describe(self._endpoints)
        self._start_workers(model, stop_wanted, begins=Begin.IF_ROOM)

    def cut_workers(self) -> None:
        """Cut all workers off, so that callers of requests in flight get an error. `stop_workers` has to follow."""
        for model in self._all():
            model.workers.cut()

    def stop_workers(self, timeout_s: float = WORKER_DEADLINE_S) -> None:
        """Stop all workers, because no request is left to answer."""
        models = [*self._models, *self._draining]
        self._models, self._draining, self._orphaned = [], [], []
        _stop_at_once(models, timeout_s)

    def load_error(self, model: WorkerService, reason: str, cause: BaseException | None = None) -> TritonModelLoadError:
        """Make the error for a model that the server does not serve."""
        return TritonModelLoadError(
            f"Model {model.name!r} (version {model.version}) cannot be served: {reason}"
            if cause is not None
            else f"tritonserver did not load model {model.name!r} (version {model.version}): {reason}",
            model_name=model.name,
            model_version=model.version,
            reason=reason,
            log_lines=() if cause is not None else self._log_tail(),
        )

    def _start_workers(
        self, model: WorkerService, stop_wanted: StopWanted, advice: str = "", begins: Begin = Begin.AWAKE
    ) -> None:
        try:
            queue = self._queues.of(model.name, model.version)
            model.start_workers(self._endpoints, self._on_unrecoverable, stop_wanted, begins, queue)
        except NoRoomError as error:
            raise self.load_error(model, f"{error}{advice}", error) from error

    def _all(self) -> list[WorkerService]:
        return [*self._models, *self._draining, *self._orphaned]

    def _named(self, name: str) -> list[WorkerService]:
        return [model for model in self._models if model.name == name]

    def _files(self, model: WorkerService) -> tuple[str, list[tuple[str, str]]]:
        return model.definition.config_text, self.side_files(model)

    def _reload(self, model: WorkerService, timeout_s: float) -> None:
        try:
            self._deployer.deploy(model.name, self._named(model.name), timeout_s)
        except ControlError as error:
            raise self.load_error(model, error.reason or str(error)) from error

    def _roll_back(self, model: WorkerService) -> None:
        try:
            self._deployer.deploy(model.name, self._named(model.name), WORKER_DEADLINE_S)
        except (ControlError, WorkspaceError) as error:
            logger.debug("After a failed load, model %r: %s", model.name, error)

    def _detach(self, models: Sequence[WorkerService], drain_timeout_s: float, stop_wanted: StopWanted) -> None:
        """Let the workers of models finish their batches, while others serve new requests."""
        _stop_at_once(models, drain_timeout_s, stop_wanted)

    def _wait_unloaded(self, models: Sequence[WorkerService], drain_timeout_s: float, stop_wanted: StopWanted) -> None:
        """Wait until models out of service have answered their requests, then stop their workers."""
        deadline = time.monotonic() + drain_timeout_s
        grace_s = WORKER_DEADLINE_S
        release_s = _RELEASE_DEADLINE_S
        orphaned = OrphanedRequests()
        left = list(models)
        while left := [model for model in left if self._is_loaded(model)]:
            begun = time.monotonic()
            if stop_wanted():
                # The end of the server has a time limit of its own.
                return
            if time.monotonic() >= deadline:
                logger.warning(
                    "Requests of model %r have not been answered %g s after it was taken out of service: they are cut "
                    "off now.",
                    left[0].name,
                    drain_timeout_s,
                )
                grace_s = 0.0
                break
            if self.has_only_orphaned(orphaned, models):
                logger.warning(ORPHANED, repr(left[0].name))
                release_s = 0.0
                break
            time.sleep(pause_s(begun, _POLL_S))
        _stop_at_once(models, grace_s)
        self._draining = [model for model in self._draining if model not in models]
        deadline = time.monotonic() + release_s
        while any(map(self._is_loaded, models)) and time.monotonic() < deadline and not stop_wanted():
            time.sleep(_POLL_S)
        self._orphaned = list(filter(self._is_loaded, [*self._orphaned, *models]))

    def _is_loaded(self, model: WorkerService) -> bool:
        # The server removes the socket with the model, after its last request.
        return self._is_running() and model.endpoint(self._endpoints).exists()


def pause_s(begun: float, least_s: float) -> float:
    """Return how long to wait after a look at all models that began at a time: the longer it takes, the rarer it is."""
    return min(_LONGEST_POLL_S, max(least_s, _LOOK_SHARE * (time.monotonic() - begun)))


def _stop_at_once(models: Sequence[WorkerService], timeout_s: float, stop_wanted: StopWanted | None = None) -> None:
    """Stop the workers of models, many of them all at the same time; `stop_wanted` ends the wait for them."""
    failures: list[BaseException] = []

    def stop(model: WorkerService, limit_s: float) -> None:
        try:
            model.stop_workers(limit_s)
        except BaseException as error:
            failures.append(error)

    # All need a moment of the processor, even those that are idle.
    limit_s = timeout_s + (min(_MOMENT_S * len(models), _MOST_MOMENTS_S) if timeout_s else 0.0)
    # A few are stopped in this thread: it may be in the handler of a signal, and hold a lock that others wait for.
    in_threads = models if stop_wanted is not None or len(models) > _FEW else ()
    stoppers = [
        threading.Thread(target=stop, args=(model, limit_s), name=f"pytriton-{model.name}-detach", daemon=True)
        for model in in_threads
    ]
    count = start_all(stoppers)
    deadline = time.monotonic() + limit_s
    for model in models[count:]:
        stop(model, max(0.0, deadline - time.monotonic()))
    given_up = deadline + _STOP_MARGIN_S
    for stopper in stoppers[:count]:
        while stopper.is_alive() and time.monotonic() < given_up and not (stop_wanted is not None and stop_wanted()):
            stopper.join(_JOIN_POLL_S)
    if failures:
        raise failures[0]


def _grace_s(error: BaseException) -> float:
    return HURRIED_DEADLINE_S if isinstance(error, (StartCancelled, KeyboardInterrupt)) else WORKER_DEADLINE_S
