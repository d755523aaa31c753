"""A worker: one inference callable, one thread, one connection to the proxy backend."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from ._connection import Connection
from ._execution import InferenceCallable, Service, is_async
from ._serving import serve, serve_async
from .errors import AttachError, ConnectionLostError, ProtocolError
from .model import ModelSpec

logger = logging.getLogger(__name__)

# Batches that one async callable works on at once.
ASYNC_MAX_IN_FLIGHT = 64
_FIRST_RETRY_S = 0.005
_LAST_RETRY_S = 0.25


class Worker:
    """Serves one model version with one callable, in a thread of this process.

    The thread connects as soon as the proxy backend listens, and again after the server was restarted. A synchronous
    callable gets one batch at a time; an `async` one gets up to 64 at once, all on one event loop in that thread.

    States: new --start()--> attaching <--> attached --stop(), or an error--> ended
    """

    def __init__(
        self,
        infer_func: InferenceCallable,
        model: ModelSpec,
        endpoint: Path,
        *,
        unrecoverable: tuple[type[BaseException], ...] = (),
        on_unrecoverable: Callable[[BaseException], None] | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        """Prepares a worker; nothing happens before `start`.

        Args:
            infer_func: Takes a list of `Request`, returns a list with one mapping of arrays per request. A function,
                a method or an object with `__call__`; `async`, a generator or an async generator as well.
            model: The model that it serves.
            endpoint: The socket of that model version.
            unrecoverable: Errors of the callable after which it must not be called again.
            on_unrecoverable: Called with such an error in the worker's thread, after the callers got their answer.
            context: The context that the callable runs in; a copy of the current one by default.
        """
        self.model = model
        self.endpoint = endpoint
        self._infer_func = infer_func
        self._unrecoverable = unrecoverable
        self._on_unrecoverable = on_unrecoverable
        self._name = getattr(infer_func, "__qualname__", None) or type(infer_func).__name__
        self._context = context if context is not None else contextvars.copy_context()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._attached = threading.Event()
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._error: BaseException | None = None

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to attach, in the worker's own thread.

        Raises:
            RuntimeError: If it was started before.
        """
        if self._thread is not None:
            raise RuntimeError(f"the worker of model '{self.model.name}' was started before")
        self._thread = threading.Thread(
            target=self._context.run, args=(self._run,), name=f"pytriton-{self.model.name}", daemon=True
        )
        self._thread.start()

    def wait_attached(self, timeout_s: float) -> None:
        """Waits until the worker is attached.

        Raises:
            AttachError: If it was refused, or is not attached after `timeout_s` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._attached.is_set() or not self.is_alive, timeout_s)
        if self._attached.is_set():
            return
        if self._error is not None:
            raise AttachError(f"the worker of model '{self.model.name}' ended: {self._error}") from self._error
        raise AttachError(
            f"the worker of model '{self.model.name}' was not attached after {timeout_s:g} s: nobody accepts it at "
            f"{self.endpoint}. Is tritonserver running, and has it loaded the model?"
        )

    def stop(self, timeout_s: float) -> bool:
        """Detaches: takes no more batches and finishes those in flight.

        Returns:
            Whether it ended within `timeout_s` seconds. If not, the connection is cut, so that the callers of what is
            in flight get an error; the thread ends when the callable returns.
        """
        self._stopping.set()
        thread = self._thread
        if thread is None or not thread.is_alive():
            return True
        connection = self._connection
        if connection is not None:
            try:
                connection.detach()
            except ConnectionLostError:
                logger.debug("model %s: already disconnected", self.model.name)
        if thread is threading.current_thread():
            return False
        thread.join(timeout_s)
        if thread.is_alive() and connection is not None:
            connection.shutdown()
            thread.join(min(timeout_s, 1.0))
        return not thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs: attached, or trying to attach."""
        return self._thread is not None and self._thread.is_alive() and self._error is None

    @property
    def is_attached(self) -> bool:
        """Whether the worker is attached right now."""
        return self._attached.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it ended, where it did not end by `stop`."""
        return self._error

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                connection = self._attach()
                if connection is None:
                    break
                try:
                    self._serve(connection)
                except ConnectionLostError as error:
                    if not self._stopping.is_set():
                        logger.warning("model %s: %s; attaching again", self.model.name, str(error))
                except ProtocolError as error:
                    logger.error("model %s: the proxy backend broke the protocol: %s", self.model.name, str(error))
                    self._stopping.wait(_LAST_RETRY_S)
                finally:
                    self._attached.clear()
                    self._connection = None
                    connection.close()
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        if error is not None and not isinstance(error, self._unrecoverable):
            logger.error("model %s: the worker ended: %s", self.model.name, str(error))

    def _attach(self) -> Connection | None:
        pause_s = _FIRST_RETRY_S
        max_in_flight = ASYNC_MAX_IN_FLIGHT if is_async(self._infer_func) else 1
        while not self._stopping.is_set():
            try:
                connection = Connection(self.endpoint, self._name, max_in_flight=max_in_flight)
            except (FileNotFoundError, ConnectionError, BlockingIOError):
                self._stopping.wait(pause_s)
                pause_s = min(pause_s * 1.2, _LAST_RETRY_S)
                continue
            welcome = connection.welcome
            if (welcome.model_name, welcome.model_version) != (self.model.name, self.model.version):
                connection.close()
                raise AttachError(
                    f"{self.endpoint} serves model '{welcome.model_name}' version {welcome.model_version}, this worker "
                    f"is for model '{self.model.name}' version {self.model.version}: give each model its own socket"
                )
            if welcome.batching != self.model.batching or welcome.decoupled != self.model.decoupled:
                connection.close()
                raise AttachError(
                    f"the proxy backend of model '{self.model.name}' has batching={welcome.batching}, "
                    f"decoupled={welcome.decoupled}; this worker was made for batching={self.model.batching}, "
                    f"decoupled={self.model.decoupled}"
                )
            with self._changed:
                self._connection = connection
                self._attached.set()
                self._changed.notify_all()
            if self._stopping.is_set():
                # Where the proxy backend is gone already, the first read says so.
                with contextlib.suppress(ConnectionLostError):
                    connection.detach()
            return connection
        return None

    def _serve(self, connection: Connection) -> None:
        service = Service(connection, self._infer_func, self.model, self._unrecoverable)
        if is_async(self._infer_func):
            asyncio.run(serve_async(service, self._give_up))
        else:
            serve(service, self._give_up)

    def _give_up(self, failure: BaseException) -> None:
        if self._on_unrecoverable is not None:
            self._on_unrecoverable(failure)
        raise failure
