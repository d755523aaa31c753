"""A worker: one inference callable, one thread, one connection to the proxy backend."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pytriton.proxy.outputs import use_allocator

from ..errors import AttachError, ConnectionLostError, ProxyBackendError
from ..model import ModelSpec
from ..runtime.access import is_wanted
from ..runtime.batch_loop import ASYNC_MAX_IN_FLIGHT, STREAMS_MAX_IN_FLIGHT, LazyLoop, serve, serve_async
from ..runtime.meters import find_meters
from ..runtime.results.golden import Golden
from ..runtime.service import InferenceCallable, Service, is_async
from ..runtime.statistics import Counters, WorkerStatistics
from ..runtime.texts import error_text, told_error, told_trace
from ..runtime.warmup import WarmupBatches, warm_up, warm_up_async
from ..system.forks import call_in_child
from ..system.shortage import explain
from ..system.threads import call_safely
from ..transport.connection import Connection
from ..transport.link import Link
from ..wire.accelerator import accelerator
from ..wire.layout import CAPABILITIES, Capability
from .accelerated import serve_accelerated
from .attaching import SHORTAGE, Attaching
from .attempts import LAST_RETRY_S
from .connect import make_connect
from .watch import LoopWatch

if TYPE_CHECKING:
    from ..python_proxy.keys import CurveKeys

logger = logging.getLogger(__name__)


class Worker:
    """Serves one model version with one callable, in a thread of this process.

    The thread warms the callable up, connects as soon as the proxy backend listens, and again after the server was
    restarted. A synchronous callable gets one batch at a time. An `async` one gets up to 64 at once, up to 1024 where
    the model is decoupled, all on one event loop in that thread, which lasts as long as the worker.

    States: new --start()--> warming up --> attaching <--> attached --stop(), or an error--> ended
    """

    def __init__(
        self,
        infer_func: InferenceCallable,
        model: ModelSpec,
        endpoint: Path | str,
        *,
        unrecoverable: tuple[type[BaseException], ...] = (),
        on_unrecoverable: Callable[[BaseException], None] | None = None,
        context: contextvars.Context | None = None,
        warmup: WarmupBatches = (),
        curve_keys: CurveKeys | None = None,
        insecure: bool = False,
        stands_in: bool = False,
        counters: Counters | None = None,
        golden: Golden | None = None,
    ) -> None:
        """Prepare a worker; nothing happens before `start`.

        Args:
            infer_func: Takes a list of `Request`, returns a list with one mapping of arrays per request. A function,
                a method or an object with `__call__`; `async`, a generator or an async generator as well.
            model: The model that it serves.
            endpoint: The socket of that model version; the address of a Python proxy is a string with "://" in it.
            unrecoverable: Errors of the callable after which it must not be called again.
            on_unrecoverable: Called with such an error in the worker's thread, after the callers got their answer.
            context: The callable runs in a copy of this context; of the current one by default.
            warmup: Batches of requests for the callable to serve before the worker attaches; their results are checked
                like any others and thrown away. What fails here ends the worker with that error.
            curve_keys: Keys for a Python proxy that asks for them, as one at a `tcp://` address does.
            insecure: Whether to attach to a `tcp://` address without keys, to whoever listens there.
            stands_in: Whether the callable only says why nobody serves the model, which is not ready for all that.
            counters: Where it is counted what happens; in some of its own by default.
            golden: Takes the outputs of the warm-up, which fails where that raises.

        Raises:
            KeysMissingError: `endpoint` is a `tcp://` address, and there are neither keys nor `insecure`.
        """
        connect = make_connect(endpoint, model, curve_keys, insecure=insecure)
        self._attaching = Attaching(model, endpoint, connect, self._notify)
        self.model = model
        self.endpoint = endpoint
        self._infer_func = infer_func
        self._unrecoverable = unrecoverable
        self._on_unrecoverable = on_unrecoverable
        self._stands_in = Capability.STANDS_IN if stands_in else Capability(0)
        self.name = getattr(infer_func, "__qualname__", None) or type(infer_func).__name__
        # A copy: a context cannot be entered by two threads, and its owner may give it to several workers.
        self._context = contextvars.copy_context() if context is None else context.copy()
        self._thread: threading.Thread | None = None
        self._warmup = warmup
        self._golden = golden
        self._warm = threading.Event()
        self._counters = Counters() if counters is None else counters
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        call_in_child(self, Worker._end_in_child)

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to attach, in the worker's own thread.

        Raises:
            RuntimeError: If it was started before.
        """
        if self._thread is not None:
            raise RuntimeError(f"the worker of model '{self.model.name}' was started before")
        self._attaching.begin()
        self._thread = threading.Thread(
            target=self._context.run, args=(self._run,), name=f"pytriton-{self.model.name}", daemon=True
        )
        self._thread.start()

    def run(self, on_begin: Callable[[], object]) -> None:
        """Attach and serve in this thread, until the worker ends.

        Args:
            on_begin: Called when the worker is alive.

        Raises:
            RuntimeError: If it was started before.
        """
        if self._thread is not None:
            raise RuntimeError(f"the worker of model '{self.model.name}' was started before")
        self._attaching.begin()
        self._thread = threading.current_thread()
        on_begin()
        self._context.run(self._run)

    def log_attachment_at(self, level: int) -> None:
        """Set the level of the records that the worker begins to serve its model, and ends, if others say so."""
        self._attaching.level = self._attaching.end_level = level

    def wait_warm(self, timeout_s: float) -> None:
        """Wait until the callable has served the warm-up requests; at once if there are none.

        Raises:
            AttachError: If the warm-up failed, with the callable's error as its cause, or is not over after
                `timeout_s` seconds.
        """
        if not self._wait(self._warm, timeout_s):
            raise AttachError(
                f"the warm-up of model '{self.model.name}' was not over after {timeout_s:g} s. Allow more time, "
                f"or warm up with fewer or smaller requests"
            )

    def wait_attached(self, timeout_s: float) -> None:
        """Wait until the worker is attached.

        Raises:
            AttachError: If its warm-up failed, it was refused, or it is not attached after `timeout_s` seconds.
        """
        if not self._wait(self._attaching.attached, timeout_s):
            raise self._attaching.not_attached(timeout_s, is_warm=self._warm.is_set())

    def _wait(self, event: threading.Event, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: event.is_set() or not self.is_alive, timeout_s)
        if event.is_set():
            return True
        if self._error is None:
            return False
        if self._warm.is_set():
            what = f"the worker of model '{self.model.name}' ended"
        else:
            what = f"the warm-up of model '{self.model.name}' failed"
        raise AttachError(f"{what}: {_shown(self._error)}") from self._error

    def stop(self, timeout_s: float) -> bool:
        """Detach: takes no more batches and finishes those in flight.

        Returns:
            Whether it ended within `timeout_s` seconds. If not, the connection is cut, so that the callers of what is
            in flight get an error; the thread ends when the callable returns.
        """
        self._attaching.stop()
        thread = self._thread
        if thread is None or not thread.is_alive():
            return True
        connection = self.connection
        if connection is not None:
            try:
                connection.detach()
            except ConnectionLostError:
                logger.debug("model %s: already disconnected", self.model.name)
        if thread is threading.current_thread():
            return False
        ended = self._wait_ended(thread, timeout_s)
        if not ended and connection is not None:
            connection.shutdown()
            ended = self._wait_ended(thread, min(timeout_s, 1.0))
        return ended

    def _wait_ended(self, thread: threading.Thread, timeout_s: float) -> bool:
        if thread is threading.main_thread():
            # The main thread has more to do than to run the worker, see `run`.
            with self._changed:
                return self._changed.wait_for(lambda: self._ended, timeout_s)
        thread.join(timeout_s)
        return not thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs: attached, or trying to attach."""
        return self._thread is not None and self._thread.is_alive() and not self._ended

    @property
    def connection(self) -> Link | None:
        """Its connection to the proxy backend, while it is attached."""
        return self._attaching.connection

    @property
    def is_attached(self) -> bool:
        """Whether the worker is attached right now."""
        return self._attaching.attached.is_set()

    @property
    def stuck(self) -> str | None:
        """Why it gets no batches although it is alive; `None` if it does.

        Its callable took longer than the model allows and is still at it. It attaches again when the callable returns.
        """
        return self._attaching.stuck

    @property
    def error(self) -> BaseException | None:
        """Why it ended, where it did not end by `stop`."""
        return self._error

    @property
    def statistics(self) -> WorkerStatistics:
        """What it has done since it was made, as a snapshot; cheap, and may be asked for from any thread."""
        return self._counters.snapshot()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            service = self._make_service()
            loop = LazyLoop()
            try:
                if is_async(self._infer_func):
                    if self._make_loop(loop):
                        loop.run(self._run_async(service))
                else:
                    self._run_sync(service, loop)
            finally:
                loop.close()
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _make_service(self) -> Service:
        service = Service(self._infer_func, self.model, self._unrecoverable, self._counters)
        service.is_logged, service.golden = is_wanted(), self._golden
        self._counters.meters = find_meters(self.model)
        return service

    def _make_loop(self, loop: LazyLoop) -> bool:
        """Make the event loop, which takes descriptors, as soon as there are some; false if it is to stop before."""
        while not self._attaching.stopping.is_set():
            try:
                loop.make()
            except OSError as error:
                if error.errno not in SHORTAGE:
                    raise
                self._attaching.note_trouble(f"no event loop can be made for its coroutines: {explain(error)}")
                self._attaching.stopping.wait(LAST_RETRY_S)
            else:
                return True
        return False

    def _run_sync(self, service: Service, loop: LazyLoop) -> None:
        warm_up(service, self._warmup, loop.run)
        self._warmed()
        for connection in self._connections(self._max_in_flight, self._capabilities):
            if isinstance(connection, float):
                self._attaching.attempts.wait(connection)
                continue
            with self._attachment(connection):
                self._serve(service, connection, loop)

    @property
    def _capabilities(self) -> int:
        """The capabilities of a worker that serves a synchronous callable."""
        return CAPABILITIES | Capability.AHEAD | Capability.REFERENCES | self._pace

    @property
    def _pace(self) -> int:
        return Capability.PACE if self.model.decoupled else 0

    @property
    def _together(self) -> int:
        return Capability.TOGETHER if self.model.decoupled else 0

    _max_in_flight = 1

    def _serve(self, service: Service, connection: Link, loop: LazyLoop) -> None:
        native = accelerator()
        # The accelerator does not report each batch, so it is not used if somebody wants to know of each.
        is_watched = service.is_logged or self._counters.meters is not None
        if native is None or service.model.decoupled or is_watched or not isinstance(connection, Connection):
            serve(service, connection, loop, self._give_up)
        else:
            serve_accelerated(service, connection, loop, self._give_up, native.Lane)

    async def _run_async(self, service: Service) -> None:
        await warm_up_async(service, self._warmup)
        self._warmed()
        max_in_flight = STREAMS_MAX_IN_FLIGHT if self.model.decoupled else ASYNC_MAX_IN_FLIGHT
        for connection in self._connections(max_in_flight, CAPABILITIES | self._pace | self._together):
            if isinstance(connection, float):
                # The loop is not blocked, because tasks of the callable may still run on it.
                await self._attaching.attempts.wait_async(connection)
                continue
            with self._attachment(connection), LoopWatch(self.model.name, connection.protocol.batches):
                await serve_async(service, connection, self._give_up)

    def _warmed(self) -> None:
        self._warmup = ()
        with self._changed:
            self._warm.set()
            self._changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = error
            self._ended = True
            self._changed.notify_all()
        if error is None:
            return
        if not self._warm.is_set():
            call_safely(logger.error, "model %s: the warm-up failed\n%s", self.model.name, told_trace(error))
        elif not isinstance(error, self._unrecoverable):
            call_safely(logger.error, "model %s: the worker ended: %s", self.model.name, told_error(error))

    def _connections(self, max_in_flight: int, capabilities: int) -> Iterator[Link | float]:
        return self._attaching.connections(self.name, max_in_flight, capabilities | self._stands_in)

    @contextlib.contextmanager
    def _attachment(self, connection: Link) -> Iterator[None]:
        with self._attaching.attachment(connection, self.name):
            use_allocator(functools.partial(connection.lend_outputs, [spec.name for spec in self.model.outputs]))
            try:
                yield
            finally:
                use_allocator(None)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _end_in_child(self) -> None:
        """In a forked child: a callable that returns there, too, must not become a second worker."""
        # Made anew: another thread may have held the locks of the old ones.
        self._changed = threading.Condition()
        self._attaching.forget()
        self._counters.leave()

    def _give_up(self, failure: BaseException) -> None:
        if self._on_unrecoverable is not None:
            self._on_unrecoverable(failure)
        raise failure


def _shown(error: BaseException) -> str:
    """Return an error of ours by its text, another by its type and its text."""
    if isinstance(error, ProxyBackendError):
        return str(error)
    return f"{type(error).__name__}: {error_text(error)}"
