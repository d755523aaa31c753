"""`python -m pytriton.proxy_backend.worker_main CHANNEL JOB LABEL`: one worker, in a process that a parent looks after.

It serves a callable, or a model of Triton's Python backend.

CHANNEL and JOB are descriptors that it has inherited, see `process.messages`; LABEL is for those who list processes.
Not for the command line: that is `pytriton-proxy-backend worker`.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import AttachError, GoldenError, ProxyBackendError, TargetError
from .process.messages import FORMAT, JobRefusedError, LineReader, WorkerJob
from .process.metrics import MetricsReport
from .process.sender import MessageSender
from .runtime.records import RecordHandler
from .runtime.results.golden import Golden
from .runtime.statistics import COUNTERS_BYTES, Counters
from .runtime.texts import format_trace, shortened, told_trace
from .system.forks import call_in_child, close_in_child
from .system.parents import POLLRDHUP, end_with_parent, unblock_signals
from .worker.worker import Worker

NAME = "pytriton.proxy_backend.worker_main"
"""Name of this module, which is not its own where it is run."""

_REPORT_S = 0.25
_ALIVE_S = 1.0
# How long a connection may be closed while the callable is busy, before that is reported.
_CUT_S = 0.5
# How long a worker may take for what it is at after SIGTERM.
_TERM_TIMEOUT_S = 30.0


def main(arguments: list[str], prepared: Preparation | None = None) -> int:
    """Run the worker to its end; returns the exit code. A fork gets what its parent has `prepared`."""
    channel = socket.socket(fileno=int(arguments[0]))
    close_in_child(channel)
    end_with_parent(channel)
    unblock_signals()
    job = int(arguments[1])
    # A parent of another version, which is told so, has no counters in front of the text.
    counters = Counters(job if os.lseek(job, 0, os.SEEK_CUR) == COUNTERS_BYTES else None)
    with open(job, encoding="utf-8") as file:
        text = file.read()
    return _Child(channel, counters, prepared).run(text)


class Preparation:
    """What a worker that serves a callable does before it has that: its log, its imports, and the call of its factory.

    The process that workers are forked from does it for all of them.
    """

    def __init__(self, job: WorkerJob, send: Callable[..., object]) -> None:
        # This is imported late because hosts of Python models do not need it.
        from .runtime.access import pass_on_records

        self.job = job
        self._handler = RecordHandler(send)
        # The log level of libraries may be another one than ours.
        logging.basicConfig(level=max(job.log_level, job.root_log_level), handlers=[self._handler])
        logging.getLogger("pytriton").setLevel(job.log_level)
        pass_on_records(self._handler)
        sys.path += [path for path in job.sys_path if path not in sys.path]
        self._made: tuple[Callable[..., Any], Any] | None = None

    def take_over(self, send: Callable[..., object]) -> None:
        """In a fork: send the records of the log to its own parent."""
        self._handler.take_over(send)

    def load(self) -> Callable[..., Any]:
        """Import the factory."""
        from .worker.loading import load_target

        target = self.job.target
        factory = load_target(target)
        if not callable(factory):
            raise TargetError(
                f"{target!r} is {factory!r}: expected a function or class that makes the inference callable",
                target=target,
            )
        return factory  # type: ignore[no-any-return]

    def make(self) -> tuple[Callable[..., Any], Any]:
        """Call the factory, once; returns the callable, and the signature of its hints or `None`."""
        if self._made is None:
            from .worker.context import make_infer_func

            job = self.job
            infer_func, signature = make_infer_func(self.load(), job.args, job.kwargs, is_factory=True)
            if not callable(infer_func):
                raise TargetError(
                    f"{job.target!r} returned {infer_func!r}: expected an inference callable. A worker process is told "
                    "of a factory, which is called once and returns the callable",
                    target=job.target,
                )
            self._made = infer_func, signature
        return self._made


class _Child:
    """This process."""

    def __init__(self, channel: socket.socket, counters: Counters, prepared: Preparation | None) -> None:
        self._prepared = prepared
        self.counters = counters
        """The counters of the worker, in memory that the parent process shares."""
        self._channel = channel
        self._sender = MessageSender(channel)
        self._wake = threading.Event()
        # How many seconds the batches in flight get once the worker was asked to stop.
        self._stop_timeout_s: float | None = None
        self._worker: Worker | None = None
        self._cut_since: float | None = None
        self._has_failed = False
        self._metrics = MetricsReport(self.send)
        self._serve: Mapping[str, Any] = {}
        self._told_serve = threading.Event()

    def run(self, job_text: str) -> int:
        self.send("hello", format=FORMAT, pid=os.getpid(), python=platform.python_version())
        threading.Thread(target=self._listen, name="pytriton-parent", daemon=True).start()
        fields = json.loads(job_text)
        if isinstance(fields, dict) and "python_model" in fields:
            return self._host(fields["python_model"])
        return self._work(job_text)

    def _host(self, fields: Mapping[str, Any]) -> int:
        """Be the host of a Python model."""
        # This is imported late because other workers do not need it.
        from .python_models.host import run_host

        try:
            return run_host(fields, self)
        except BaseException as error:
            # The parent reports the model's own exception, if there is one.
            stage = "refused" if isinstance(error, JobRefusedError) else "load"
            self._fail(stage, error, format_trace(error.__cause__ or error))
            return 1

    def _work(self, job_text: str) -> int:
        """Serve a callable."""
        # These are imported late because hosts of Python models do not need them.
        from .description import parse_description
        from .worker.context import (
            Warmup,
            check_callable,
            make_context,
            open_tracer,
            unrecoverable_errors,
        )

        stage = "load"
        close_tracer: Callable[[], None] | None = None
        try:
            job = WorkerJob.from_text(job_text)
            prepared = self._prepared
            if prepared is None:
                prepared = Preparation(job, self.send)
            else:
                prepared.take_over(self.send)
            model = parse_description(job.model)
            infer_func, signature = prepared.make()
            check_callable(infer_func, signature, model, job.target)
            tracer, close_tracer = open_tracer(job.trace_config)
            worker = Worker(
                infer_func,
                model,
                # The proxy backend of a remote host has an address instead of a path.
                job.endpoint if "://" in job.endpoint else Path(job.endpoint),
                unrecoverable=unrecoverable_errors(),
                on_unrecoverable=lambda error: self._fail("unrecoverable", error),
                context=make_context(infer_func, model, tracer),
                warmup=Warmup(job.warmups, model),
                golden=self._make_golden(job),
                counters=self.counters,
            )
            # The function that a factory made is called as all that it makes.
            worker.name = job.name
            # Whoever started this process logs that the model is served.
            worker.log_attachment_at(logging.DEBUG)
            stage = "warm-up"
            self.take_signals()
            worker.start()
            if not self.look_after(worker):
                return 1
            self.send("done")
            return 0
        except BaseException as error:
            # SystemExit and KeyboardInterrupt of a factory end this worker like any other error.
            self._fail("refused" if isinstance(error, JobRefusedError) else stage, error)
            return 1
        finally:
            if close_tracer is not None:
                close_tracer()

    def _make_golden(self, job: WorkerJob) -> Golden | None:
        """Make what records the outputs of the warm-up, or compares them; `None` if that is not wanted."""
        if job.golden is None:
            return None
        known = job.golden["known"] or None
        return Golden(float(job.golden["tolerance"]), known, lambda answer: self.send("golden", answer=answer))

    # ---- what it does -----------------------------------------------------------------------------------------------

    def take_signals(self) -> None:
        """Have SIGTERM end the worker, once it has answered what it has."""
        signal.signal(signal.SIGTERM, self._on_term)
        # A process that the callable forks shall end by it, as others do.
        call_in_child(self, lambda _: signal.signal(signal.SIGTERM, signal.SIG_DFL))

    def look_after(self, worker: Worker) -> bool:
        """Tell how the worker is until it ends or is to stop; says whether it ended as it should."""
        self._worker = worker
        ready = attached = False
        told = time.monotonic()
        while worker.is_alive and self._stop_timeout_s is None:
            self._await_change(worker, ready, attached)
            if not ready and _is_warm(worker):
                ready = True
                self.send("ready")
            if ready and attached != worker.is_attached:
                attached = not attached
                self.send("attached", value=attached)
            if time.monotonic() - told >= _ALIVE_S:
                told = time.monotonic()
                self.send("alive")
            self._metrics.tell()
            self._note_cut(worker)
        return self._end(worker)

    def _await_change(self, worker: Worker, ready: bool, attached: bool) -> None:
        # The next change is noticed at once, first warm, then attached. After both, a look now and then will do.
        if ready and attached:
            self._wake.wait(_REPORT_S)
            return
        try:
            (worker.wait_attached if ready else worker.wait_warm)(_REPORT_S)
        except ProxyBackendError:
            # There is no worker yet, or it has ended, which the caller notices.
            return

    def _end(self, worker: Worker) -> bool:
        timeout_s = self._stop_timeout_s
        has_ended = worker.stop(0.0 if timeout_s is None else timeout_s)
        self._metrics.tell(at_once=True)
        if worker.error is not None:
            # Whatever may get better, the worker has tried again by itself.
            is_refused = isinstance(worker.error, AttachError)
            stage = "refused" if is_refused else "worker"
            if not _is_warm(worker):
                stage = "golden" if isinstance(worker.error, GoldenError) else "warm-up"
            self._fail(stage, worker.error)
            return False
        if not has_ended:
            # The callable is cut off in the middle, so nothing of this process is worth waiting for.
            self.send("done")
            os._exit(0)
        return True

    def _note_cut(self, worker: Worker) -> None:
        """Tell when the proxy backend has closed the connection and the callable does not come back to see it."""
        connection = worker.connection
        if connection is None or not _is_closed(connection.fileno()):
            self._cut_since = None
            return
        now = time.monotonic()
        if self._cut_since is None:
            self._cut_since = now
        elif now - self._cut_since >= _CUT_S:
            self._cut_since = now
            self.send("cut")

    # ---- the parent -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Do what the parent says, to the end of it: nobody else answers for this process."""
        try:
            reader = LineReader()
            poller = select.poll()
            poller.register(self._channel, select.POLLIN)
            while data := self._read(poller):
                for message in reader.feed(data):
                    if message["kind"] == "stop":
                        self._stop(float(message["timeout_s"]))
                    elif message["kind"] == "serve":
                        self._serve = {key: value for key, value in message.items() if key != "kind"}
                        self._told_serve.set()
        except Exception:
            # A process that cannot be told to stop any more must end; the parent starts another one.
            traceback.print_exc()
        finally:
            os._exit(1)

    def _read(self, poller: select.poll) -> bytes:
        while True:
            poller.poll()
            try:
                return self._channel.recv(65536)
            except BlockingIOError:
                continue
            except OSError:
                return b""

    def _stop(self, timeout_s: float) -> None:
        # After a second request to stop, the shorter of the two times holds.
        self._stop_timeout_s = timeout_s if self._stop_timeout_s is None else min(timeout_s, self._stop_timeout_s)
        if self._worker is None:
            # It is still being loaded, and has nothing to finish.
            os._exit(0)
        self._wake.set()

    def _on_term(self, _number: int, _frame: object) -> None:
        self._stop_timeout_s = _TERM_TIMEOUT_S
        self._wake.set()

    def wait_for_serve(self) -> Mapping[str, Any]:
        """Wait until the parent says what a host that has completed a configuration is to serve."""
        self._told_serve.wait()
        return self._serve

    def send(self, kind: str, **fields: object) -> bool:
        """Send the parent a message; return whether it is on its way."""
        try:
            return self._sender.send(kind, **fields)
        except OSError:
            # Gone; the thread that listens sees the end.
            return False

    def _fail(self, stage: str, error: BaseException, trace: str | None = None) -> None:
        if self._has_failed:
            # An unrecoverable error is also that of the worker.
            return
        self._has_failed = True
        text = str(error) if isinstance(error, ProxyBackendError) else f"{type(error).__name__}: {error}"
        trace = told_trace(error) if trace is None else trace
        self.send("failed", stage=stage, error=type(error).__name__, text=shortened(text), traceback=trace[-20000:])


def _is_warm(worker: Worker) -> bool:
    try:
        worker.wait_warm(0.0)
    except ProxyBackendError:
        return False
    return True


def _is_closed(fd: int) -> bool:
    if fd < 0:
        return False
    poller = select.poll()
    poller.register(fd, POLLRDHUP)
    return bool(poller.poll(0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
