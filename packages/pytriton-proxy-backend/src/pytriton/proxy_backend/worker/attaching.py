"""`Attaching`: a worker's way to its proxy backend, again and again until it is stopped, and what is told of it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import AttachError, ConnectionLostError, ProtocolError
from ..model import ModelSpec
from ..system.shortage import explain
from ..transport.connection import GreetingTimeoutError
from ..transport.link import Link
from .attempts import LAST_RETRY_S, Attempts
from .connect import Connect
from .watch import ConnectionWatch, stack_of

logger = logging.getLogger(__name__)

# How long the record of an unload is held back: a stop, or the load of another version, may follow and explain it.
_QUIET_S = 2.0
# Errors of a system that lacks something for a moment, after which a worker tries again.
SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class Attaching:
    """Attaches a worker whenever its proxy backend listens."""

    def __init__(self, model: ModelSpec, endpoint: Path | str, connect: Connect, on_change: Callable[[], None]) -> None:
        """Prepare it: `connect` connects to the endpoint, and `on_change` is called when the worker is attached."""
        self.attached = threading.Event()  # whether it is attached right now
        self.stopping = threading.Event()  # whether it is to end: from then on, nothing is tried again
        self.attempts = Attempts(endpoint)  # when it tries
        self.connection: Link | None = None  # the connection; `None` if there is none
        # The levels of the records about the begin and the end of its service; lower if somebody else logs them.
        self.level = self.end_level = logging.INFO
        self.stuck: str | None = None  # why the worker gets no batches although it is alive; `None` if it does
        self._model = model
        self._endpoint = endpoint
        self._connect = connect
        # Weak: a worker holds this object, and would be freed late, with the weights of its callable, by a circle.
        self._on_change = weakref.WeakMethod(on_change)
        self._trying_since = 0.0
        self._unsaid = ""  # why the last connection ended, where that was not logged so far
        self._trouble = ""  # why the last attempt failed, where that is worth telling

    def begin(self) -> None:
        """Note that the worker tries from now on."""
        self._trying_since = time.monotonic()

    def forget(self) -> None:
        """In a forked child: nothing is tried. Other threads may have held the locks of what is made anew."""
        self.attached = threading.Event()
        self.stopping = threading.Event()
        self.attempts = Attempts(self._endpoint)
        self.stopping.set()

    def stop(self) -> None:
        """Try nothing any more."""
        self.stopping.set()
        self.attempts.wake()

    # ---- attach -----------------------------------------------------------------------------------------------------

    def connections(self, worker_name: str, max_in_flight: int, capabilities: int) -> Iterator[Link | float]:
        """Attach until the worker is stopped.

        Yields each connection, or for how many seconds to wait if nobody listens.
        """
        try:
            while not self.stopping.is_set():
                try:
                    connection = self._connect(worker_name, max_in_flight, capabilities, self.stopping)
                except (FileNotFoundError, ConnectionError, BlockingIOError) as error:
                    self._say_lost(_QUIET_S)
                    yield self.attempts.pause_after(error)
                    continue
                except PermissionError as error:
                    raise _not_allowed(self._endpoint) from error
                except (GreetingTimeoutError, OSError) as error:
                    if isinstance(error, OSError) and error.errno == errno.EPROTOTYPE:
                        raise AttachError(
                            f"{self._endpoint} is a socket at which no native proxy listens. One of a Python proxy is "
                            f"given as an address: ipc://{self._endpoint}"
                        ) from error
                    if isinstance(error, OSError) and error.errno not in SHORTAGE:
                        raise
                    if not self.stopping.is_set():
                        self.note_trouble(_trouble_text(error))
                    yield LAST_RETRY_S
                    continue
                self._trouble = ""
                self._check(connection)
                self.attempts.reset()
                self._say_lost()
                served = self._model
                logger.log(
                    self.level, "Serving model %s (version %d) at %s", served.name, served.version, self._endpoint
                )
                # Whoever started the worker reports the first attachment; a later one ends what the log said was lost.
                self.level = logging.INFO
                self.connection = connection
                self.attached.set()
                on_change = self._on_change()
                if on_change is not None:
                    on_change()
                if self.stopping.is_set():
                    # If the proxy backend is gone already, the first read reports it.
                    with contextlib.suppress(ConnectionLostError):
                        connection.detach()
                yield connection
        finally:
            self.attempts.reset()
        if self._unsaid:
            # Whoever unloaded the model has stopped the worker as well, so nothing is logged.
            self._unsaid = ""
            self._note_detached("", logging.INFO)

    def _check(self, connection: Link) -> None:
        """Compare what the proxy backend serves with what the worker is for; closes the connection if they differ."""
        welcome = connection.welcome
        model = self._model
        if (welcome.model_name, welcome.model_version) != (model.name, model.version):
            connection.close()
            raise AttachError(
                f"{self._endpoint} serves model '{welcome.model_name}' version {welcome.model_version}, this worker "
                f"is for model '{model.name}' version {model.version}: give each model its own socket"
            )
        if welcome.batching != model.batching or welcome.decoupled != model.decoupled:
            connection.close()
            raise AttachError(
                f"the proxy backend of model '{model.name}' has batching={welcome.batching}, "
                f"decoupled={welcome.decoupled}; this worker was made for batching={model.batching}, "
                f"decoupled={model.decoupled}"
            )

    # ---- while it is attached ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attachment(self, connection: Link, callable_name: str) -> Iterator[None]:
        """See to the end of a connection, served in this block; an end that is not the callable's fault is no error."""
        watch: ConnectionWatch | None = None
        try:
            limit_s = connection.welcome.execution_timeout_s
            if limit_s is not None:
                thread = threading.current_thread()
                watch = ConnectionWatch(
                    connection,
                    f"pytriton-{self._model.name}-watch",
                    lambda: self._note_stuck(limit_s, callable_name, thread),
                )
            yield
            if self.stopping.is_set():
                self._note_detached("", logging.INFO)
            else:
                self._unsaid = "the model was unloaded, or its server ended"
        except ConnectionLostError as error:
            self._note_detached(str(error), logging.WARNING)
        except ProtocolError as error:
            logger.error("model %s: the proxy backend broke the protocol: %s", self._model.name, str(error))
            self.stopping.wait(LAST_RETRY_S)
        except OSError as error:
            if error.errno not in SHORTAGE:
                raise
            self.note_trouble(_trouble_text(error))
            self.stopping.wait(LAST_RETRY_S)
        finally:
            self._trying_since = time.monotonic()
            self.attached.clear()
            self.connection = None
            if watch is not None:
                watch.end()
            connection.close()
            if self.stuck is not None:
                logger.warning("model %s: the callable has returned after all", self._model.name)
                self.stuck = None

    def _note_stuck(self, limit_s: float, callable_name: str, thread: threading.Thread) -> None:
        if self.stopping.is_set():
            return
        self.attached.clear()
        self.stuck = (
            f"the inference callable '{callable_name}' of model '{self._model.name}' took longer than the execution "
            f"timeout of {limit_s:g} s and has not returned; its worker gets no more batches until it does"
        )
        logger.error("%s. What it does right now:\n%s", self.stuck, stack_of(thread))

    # ---- what is told -----------------------------------------------------------------------------------------------

    def note_trouble(self, reason: str) -> None:
        """Log why the worker cannot attach, once as long as the reason is the same."""
        trouble = f" The last attempt: {reason}"
        if trouble != self._trouble:
            logger.warning("model %s: cannot attach: %s; trying again", self._model.name, reason)
        self._trouble = trouble

    def not_attached(self, waited_s: float, *, is_warm: bool) -> AttachError:
        """Return the error for somebody who has waited in vain for so many seconds."""
        # A caller that waits several times, or for several workers in turn, has waited longer than this call.
        waited_s = max(waited_s, time.monotonic() - self._trying_since)
        what = f"the worker of model '{self._model.name}' was not attached after {waited_s:.3g} s"
        if not is_warm:
            return AttachError(
                f"{what}: its warm-up is not over. Allow more time, or warm up with fewer or smaller requests"
            )
        return AttachError(
            f"{what}: nobody accepts it at {self._endpoint}. Is tritonserver running, and has it loaded the model?"
            f"{self._trouble}"
        )

    def _note_detached(self, reason: str, level: int) -> None:
        """Log the end of a connection, and why, unless the worker itself was to end it."""
        name, version = self._model.name, self._model.version
        if self.stopping.is_set():
            logger.log(self.end_level, "Detached from model %s (version %d) at %s", name, version, self._endpoint)
        else:
            logger.log(level, "Lost model %s (version %d): %s; attaching again", name, version, reason)

    def _say_lost(self, after_s: float = 0.0) -> None:
        """Log that the model was unloaded, unless that was no longer ago: the worker may be about to be stopped."""
        if self._unsaid and time.monotonic() - self._trying_since >= after_s:
            reason, self._unsaid = self._unsaid, ""
            self._note_detached(reason, logging.INFO)


def _trouble_text(error: Exception) -> str:
    return explain(error) if isinstance(error, OSError) else str(error)


def _not_allowed(endpoint: Path | str) -> AttachError:
    return AttachError(
        f"user {os.geteuid()}, as which this worker runs, may not use the endpoint {endpoint}: it is for the user of "
        "the server alone. Run the worker as that user"
    )
