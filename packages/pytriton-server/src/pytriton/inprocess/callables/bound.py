"""A bound model of a server in process: its callables, and what runs them while Triton has it loaded."""

from __future__ import annotations

import contextvars
import logging
import threading
from typing import Any

from pytriton.exceptions import PyTritonUnrecoverableError
from pytriton.inprocess.callables.backend import Instance, load_backend
from pytriton.inprocess.callables.runners import AsyncRunner, Runner, SyncRunner
from pytriton.inprocess.capi.errors import InternalError, TimedOutError
from pytriton.proxy_backend.runtime.service import Service, is_async
from pytriton.proxy_backend.runtime.serving import LazyLoop
from pytriton.proxy_backend.runtime.statistics import Counters
from pytriton.proxy_backend.runtime.texts import error_text
from pytriton.proxy_backend.runtime.warmup import warm_up, warm_up_async
from pytriton.server.models.bound_model import BoundModel
from pytriton.server.observe.tracing import ModelTracing, TracerLease

__all__ = ["BoundCallables"]

logger = logging.getLogger(__name__)


class BoundCallables:
    """One version of a bound model.

    Args:
        bound: What the user gave, checked.
        tracing: Which tracer the callables get.
        copy_inputs: Whether the callables get copies of all inputs.

    Attributes:
        bound: See above.
        number: Under which the native library finds it; `None` until it is first loaded.
        warmup_error: What the warm-up failed with, the last time.
    """

    def __init__(self, bound: BoundModel, tracing: ModelTracing, copy_inputs: bool) -> None:
        self.bound = bound
        self.number: int | None = None
        self.warmup_error: BaseException | None = None
        self._tracing = tracing
        self._tracer: TracerLease | None = None
        self._copy_inputs = copy_inputs
        self._counters = Counters()
        # The user's context, not that of Triton's thread which loads the model.
        self._bind_context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._runners: list[Runner] = []
        self._is_warm: set[int] = set()

    @property
    def is_loaded(self) -> bool:
        """Whether Triton has an instance of it."""
        return bool(self._runners)

    def make_runner(self, place: int, instance: Instance) -> Runner:
        """See `ServedModel`. Warms the callable up, the first time.

        Raises:
            InternalError: If the warm-up failed.
            TimedOutError: If it is not over in time.
        """
        infer: Any = self.bound.callables[place % len(self.bound.callables)]
        with self._lock:
            if self._tracer is None:
                self._tracer = self._tracing.acquire()
            tracer = None if self._tracer is None else self._tracer.tracer
        context = self._bind_context.copy().run(self.bound.make_context, infer, tracer)
        service = Service(infer, self.bound.spec, (PyTritonUnrecoverableError,), self._counters)
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

        # In a thread, so that one that hangs does not hang the server. The callable's own context is not entered yet.
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
        """Say which callables are at a batch, and where in their code. From any thread."""
        return [
            f"the inference callable of model {self.bound.name!r} (version {self.bound.version}) has not returned; "
            f"what it does right now:\n{stack}"
            for runner in list(self._runners)
            if (stack := runner.stuck_at) is not None
        ]
