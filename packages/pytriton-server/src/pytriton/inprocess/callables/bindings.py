"""Functions of this process as models of a server: what `Server.bind` does, and what Triton finds of it."""

from __future__ import annotations

import contextvars
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pytriton.decorators import TritonContext
from pytriton.exceptions import PyTritonUnrecoverableError
from pytriton.inprocess.callables.backend import MODEL_FILE, Instance, load_backend
from pytriton.inprocess.callables.batches import POINTED_TO_BYTES
from pytriton.inprocess.callables.runners import AsyncRunner, Runner, SyncRunner
from pytriton.inprocess.capi.enums import ModelControlMode
from pytriton.inprocess.capi.errors import (
    AlreadyBoundError,
    InternalError,
    InvalidArgumentError,
    NotBoundError,
    TimedOutError,
)
from pytriton.inprocess.capi.parameters import Parameter
from pytriton.model_config import DeviceKind, ModelConfig, Tensor
from pytriton.model_config.generator import ModelConfigGenerator
from pytriton.proxy_backend import INPROCESS_BACKEND_NAME
from pytriton.proxy_backend.runtime.batch_loop import LazyLoop
from pytriton.proxy_backend.runtime.service import Service, is_async
from pytriton.proxy_backend.runtime.statistics import Counters
from pytriton.proxy_backend.runtime.texts import error_text
from pytriton.proxy_backend.runtime.warmup import warm_up, warm_up_async
from pytriton.server.models.arguments import Servable
from pytriton.server.models.callers import calling_model, run_in_background
from pytriton.server.models.definition import ModelDefinition, triton_part
from pytriton.server.models.process_workers import ProcessWorker
from pytriton.server.models.tracing import ModelTracing, TracerLease

logger = logging.getLogger(__name__)

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.02


class ModelControl(Protocol):
    """The part of a server that bound models need."""

    control_mode: ModelControlMode
    describe_busy: Callable[[], list[str]]
    cache_bytes: int

    def load(self, name: str, parameters: Mapping[str, Parameter]) -> None:
        """Load a model, whatever the mode of control is."""

    def unload(self, name: str) -> None:
        """Unload a model, whatever the mode of control is, without waiting."""

    def is_listed(self, name: str) -> bool:
        """Return whether a repository has a folder for a model, loaded or not."""


class BoundCallables:
    """One version of a bound model."""

    def __init__(self, bound: ModelDefinition, tracing: ModelTracing, copy_inputs: bool) -> None:
        self.bound = bound
        self.number: int | None = None
        self.cache_bytes = 0
        self.warmup_error: BaseException | None = None
        self._tracing = tracing
        self._tracer: TracerLease | None = None
        self._copy_inputs = copy_inputs
        self._counters = Counters()
        # The context of the user; the model is loaded in a thread of Triton.
        self._bind_context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._runners: list[Runner] = []
        self._is_warm: set[int] = set()

    @property
    def is_loaded(self) -> bool:
        """Whether Triton has an instance of it."""
        return bool(self._runners)

    def make_runner(self, place: int, instance: Instance) -> Runner:
        """Make the runner of an instance. The first call warms the callable up."""
        infer: Any = self.bound.callables[place % len(self.bound.callables)]
        with self._lock:
            if self._tracer is None:
                self._tracer = self._tracing.acquire()
            tracer = None if self._tracer is None else self._tracer.tracer
        instance.cache_bytes = self.cache_bytes
        context = self._bind_context.copy().run(self.bound.make_context, infer, tracer)
        service = Service(
            infer, self.bound.spec, (PyTritonUnrecoverableError,), self._counters, join_below=POINTED_TO_BYTES
        )
        kind = AsyncRunner if is_async(infer) else SyncRunner
        runner = kind(
            load_backend(),
            service,
            context,
            instance,
            self._copy_inputs,
            execution_timeout_s=self.bound.execution_timeout_s,
            on_unload=self._remove,
        )
        try:
            self._warm_up(place, runner, service, context)
        except BaseException:
            runner.unload()
            raise
        with self._lock:
            self._runners.append(runner)
        return runner

    def _remove(self, runner: Runner) -> None:
        with self._lock:
            if runner in self._runners:
                self._runners.remove(runner)
            tracer = None
            if not self._runners:
                tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.release()

    def _warm_up(self, place: int, runner: Runner, service: Service, context: contextvars.Context) -> None:
        batches = self.bound.new_warmup()
        if not len(batches) or place in self._is_warm:
            return
        name, limit_s = self.bound.name, self.bound.warmup_timeout_s
        failures: list[BaseException] = []

        def run() -> None:
            try:
                if isinstance(runner, AsyncRunner):
                    runner.run_coroutine(lambda: warm_up_async(service, batches))
                else:
                    loop = LazyLoop()
                    try:
                        warm_up(service, batches, loop.run)
                    finally:
                        loop.close()
            except BaseException as error:
                failures.append(error)

        # In a thread, so that a callable that hangs does not hang the server. The context of the callable is entered
        # later.
        thread = threading.Thread(target=context.copy().run, args=(run,), name=f"pytriton-warmup-{name}", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            batches.cut()
            raise TimedOutError(
                f"the warm-up of model {name!r} (version {self.bound.version}) was not over after {limit_s:g} s: "
                f"{batches.progress}. Set ModelConfig.warmup_timeout_s higher, or warm up with less",
                expected=f"over within {limit_s:g} s",
                received=batches.progress,
                where=f"model {name!r}",
            )
        if failures:
            error = self.warmup_error = failures[0]
            raise InternalError(
                f"the warm-up of model {name!r} (version {self.bound.version}) failed: {type(error).__name__}: "
                f"{error_text(error)} ({batches.progress})",
                where=f"model {name!r}",
            ) from error
        self._is_warm.add(place)

    def busy(self) -> list[str]:
        """Return which callables are serving a batch, and where in their code. Any thread may call this."""
        return [
            f"the inference callable of model {self.bound.name!r} (version {self.bound.version}) has not returned; "
            f"what it does right now:\n{stack}"
            for runner in list(self._runners)
            if (stack := runner.stuck_at) is not None
        ]


class Bindings:
    """The bound models of one `Server`. They outlast its stop: the next start serves them again."""

    def __init__(self, running: Callable[[], ModelControl | None]) -> None:
        self._running = running
        self._lock = threading.RLock()
        self._models: dict[tuple[str, int], BoundCallables] = {}
        self._context = TritonContext()
        # The names that the running server has loaded from here, even if they were unloaded later.
        self._loaded: set[str] = set()

    def bind(
        self,
        model_name: str | Servable,
        infer_func: Servable | None = None,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
        copy_inputs: bool = False,
        *,
        control_mode: ModelControlMode,
    ) -> tuple[str, int]:
        """See `Server.bind`; returns name and version of the model. `control_mode` is the one of the next start."""
        bound = ModelDefinition(
            name=model_name,
            infer_func=infer_func,
            inputs=inputs,
            outputs=outputs,
            version=model_version,
            config=config,
            strict=strict,
            triton_context=self._context,
        )
        for infer in bound.callables:
            if isinstance(infer, ProcessWorker):
                raise InvalidArgumentError(
                    f"Model {bound.name!r}: expected callables of this process, received {infer!r}. A server in "
                    "process calls them directly; use pytriton.triton.Triton for callables in processes of their own.",
                    expected="a callable, or a sequence of callables",
                    received=infer,
                    where=f"model {bound.name!r}",
                )
        if bound.settings_of_workers:
            logger.warning(
                "Model %r: %s mean nothing in process, where there are no workers and no shared memory.",
                bound.name,
                ", ".join(f"ModelConfig.{name}" for name in bound.settings_of_workers),
            )
        model = BoundCallables(bound, ModelTracing(trace_config), bool(copy_inputs))
        server = self._running()
        _refuse_polling(bound.name, control_mode if server is None else server.control_mode)
        with self._lock:
            self._refuse_conflict(model)
            server = self._running()
            if server is not None:
                self._refuse_listed(server, bound.name)
            self._models[bound.key] = model
            bound.publish()
            if server is not None:
                try:
                    self._load(server, bound.name)
                except BaseException as error:
                    self._forget(model)
                    self._restore(server, bound.name)
                    if model.warmup_error is not None:
                        raise error from model.warmup_error
                    raise
        return bound.name, bound.version

    def unbind(self, model_name: str, model_version: int | None = None, *, timeout_s: float = 30.0) -> None:
        """See `Server.unbind`."""
        caller = calling_model(self._context)
        if caller is not None and caller.name == model_name and model_version in (None, caller.version):
            run_in_background(
                "unbind", lambda: self.unbind(model_name, model_version, timeout_s=timeout_s), daemon=False
            )
            return
        with self._lock:
            gone = [
                model
                for model in self._models.values()
                if model.bound.name == model_name and model_version in (None, model.bound.version)
            ]
            if not gone:
                version = "" if model_version is None else f" version {model_version}"
                names = ", ".join(sorted({repr(model.bound.name) for model in self._models.values()})) or "none"
                raise NotBoundError(
                    f"No callable is bound as model {model_name!r}{version}; bound are: {names}.",
                    expected="a bound model",
                    received=model_name,
                    where=f"model {model_name!r}",
                )
            for model in gone:
                self._forget(model)
            server = self._running()
            if server is None:
                return
            self._load_or_unload(server, model_name)
            self._await_unloaded(gone, timeout_s)

    # ---- for the server ---------------------------------------------------------------------------------------------

    def on_started(self, server: ModelControl) -> None:
        """Load the models that were bound before the start."""
        with self._lock:
            self._loaded = set()
            names = list(dict.fromkeys(model.bound.name for model in self._models.values()))
            for name in names:
                _refuse_polling(name, server.control_mode)
                self._refuse_listed(server, name)
            for name in names:
                self._load(server, name)

    def are_calling(self) -> bool:
        """Return whether a bound callable runs in this thread or task."""
        return calling_model(self._context) is not None

    def busy(self) -> list[str]:
        """Return which bound callables are serving a batch, and where in their code. Any thread may call this."""
        return [text for model in list(self._models.values()) for text in model.busy()]

    # -----------------------------------------------------------------------------------------------------------------

    def _load(self, server: ModelControl, name: str) -> None:
        """Make Triton load all bound versions of a name, and forget versions that are no longer bound."""
        backend = load_backend()
        models = [model for model in self._models.values() if model.bound.name == name]
        parameters: dict[str, Parameter] = {"config": _config(models[-1])}
        for model in models:
            model.cache_bytes = server.cache_bytes if model.bound.triton_config.response_cache else 0
            model.bound.warn_without_cache(server.cache_bytes, 'Server(cache_config={"local": {"size": <bytes>}})')
            if model.number is None:
                model.number = backend.add_model(model)
            parameters[f"file:{model.bound.version}/{MODEL_FILE}"] = str(model.number).encode()
        self._loaded.add(name)
        server.describe_busy = self.busy
        server.load(name, parameters)

    def _load_or_unload(self, server: ModelControl, name: str) -> None:
        """Make Triton serve the bound versions of a name, or nothing of the name if there are none."""
        if any(model.bound.name == name for model in self._models.values()):
            self._load(server, name)
        else:
            server.unload(name)

    def _restore(self, server: ModelControl, name: str) -> None:
        """After a failure: the versions that were there before are served as before, or nothing is left of the name."""
        try:
            self._load_or_unload(server, name)
        except Exception as error:
            logger.warning("model %s: what was left of it after a failed bind could not be cleared: %s", name, error)

    def _forget(self, model: BoundCallables) -> None:
        self._models.pop(model.bound.key, None)
        model.bound.unpublish()
        if model.number is not None:
            load_backend().remove_model(model.number)
            model.number = None

    def _await_unloaded(self, models: Sequence[BoundCallables], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while busy := [model for model in models if model.is_loaded]:
            if time.monotonic() >= deadline:
                left = ", ".join(f"{model.bound.name!r} version {model.bound.version}" for model in busy)
                raise TimedOutError(
                    f"Expected the requests of the unbound model {left} to be answered within {timeout_s:g} s, which "
                    "they are not. It takes no new ones, and goes when they are.",
                    expected=f"unloaded within {timeout_s:g} s",
                    received="still loaded",
                    where=f"model {busy[0].bound.name!r}",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _refuse_conflict(self, model: BoundCallables) -> None:
        bound = model.bound
        other = self._models.get(bound.key)
        if other is not None:
            raise AlreadyBoundError(
                f"Cannot add model with the same name twice. There is a bound model {other.bound.name!r} of version "
                f"{bound.version} already: choose another name or version (names that differ only in case count as "
                "the same), or call unbind() first.",
                expected="a name and version that is free",
                received=bound.name,
                where=f"model {bound.name!r}",
            )
        for other in self._models.values():
            if other.bound.name != bound.name:
                continue
            differences = bound.differences(other.bound)
            if len(other.bound.callables) != len(bound.callables):
                differences.append("the number of callables")
            if differences:
                raise AlreadyBoundError(
                    f"Model {bound.name!r}: version {bound.version} differs from version {other.bound.version} in "
                    f"{', '.join(differences)}, but Triton keeps one description for all versions of a name. Bind it "
                    "under another name.",
                    expected="the same description as the other versions have",
                    received=", ".join(differences),
                    where=f"model {bound.name!r}",
                )

    def _refuse_listed(self, server: ModelControl, name: str) -> None:
        """Refuse to take the place of a model that is not from here."""
        if name in self._loaded:
            return
        if server.is_listed(name):
            raise AlreadyBoundError(
                f"Model {name!r}: expected a name that no model has, but the server has one of the name from a "
                "repository or from load(). Choose another name, or unload that model and remove it.",
                expected="a name that is free",
                received=name,
                where=f"model {name!r}",
            )


def _config(model: BoundCallables) -> str:
    config = dataclasses.replace(
        triton_part(model.bound.triton_config),
        instance_group={DeviceKind.KIND_CPU: len(model.bound.callables)},
    )
    fields: Mapping[str, object] = {**ModelConfigGenerator(config).get_config(), "backend": INPROCESS_BACKEND_NAME}
    return json.dumps(fields)


def _refuse_polling(name: str, mode: ModelControlMode) -> None:
    if mode is ModelControlMode.POLL:
        raise InvalidArgumentError(
            f"Model {name!r}: expected a server in model control mode NONE or EXPLICIT, got POLL: a server that "
            "polls its repositories serves nothing but what it finds there.",
            expected="NONE or EXPLICIT",
            received=mode,
            where=f"model {name!r}",
        )
