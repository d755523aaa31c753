"""Batches that a worker gets before it has answered the one that it is at."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from pytriton.proxy_backend.transport.connection import Connection
from pytriton.proxy_backend.wire.batch import Batch
from pytriton.proxy_backend.wire.layout import CAPABILITIES, MESSAGE, Capability, MessageType
from pytriton.proxy_backend.wire.response import ResponseData, ResponseWriter
from support.bare_server import F4, Array, BareServer, serving
from support.callables import double
from support.waiting import PATIENCE_S, eventually

# Long enough to be the same each time, as far as that can be had.
PACE_S = 0.02
# Of batches during which something must not happen.
MANY = 40


@pytest.fixture(scope="module")
def server() -> Iterator[BareServer]:
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        made = BareServer(Path(folder))
        made.add("single", batching=False)
        made.add("rows", extra="dynamic_batching { }")
        made.add("unbatched")
        made.add("limited", batching=False, execution_timeout_s=5.0)
        made.add("narrow", batching=False, arena_budget_bytes=96 << 10)
        with serving(made):
            yield made


class Callers:
    """Call a model again and again, so that there is always a next request; note what went wrong."""

    def __init__(self, server: BareServer, name: str, count: int, width: int = 2) -> None:
        self.errors: list[str] = []
        self.answered = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._server, self._name, self._batching = server, name, server.models[name].batching
        self._width = width
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def _run(self, number: int) -> None:
        x: Array = np.full(self._width, number, F4)
        while not self._stopping.is_set():
            x += 1
            try:
                y = self._server.infer(self._name, x[np.newaxis] if self._batching else x).reshape(-1)
            except InferenceServerException as error:
                with self._lock:
                    self.errors.append(str(error))
                continue
            with self._lock:
                if not np.array_equal(y, x * 2):
                    self.errors.append(f"{y} for {x}")
                self.answered += 1

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Make no more calls; those that were made are still answered."""
        self._stopping.set()

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Stop, and wait for the last answers."""
        self.stop()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads)


class SlowWorker:
    """Takes a batch ahead, and shows whether it has one."""

    def __init__(self, server: BareServer, name: str, capabilities: int = CAPABILITIES | Capability.AHEAD) -> None:
        self.connection = Connection(server.endpoint(name), "slow", capabilities=capabilities)
        self._socket = socket.socket(fileno=os.dup(self.connection.fileno()))

    def __enter__(self) -> SlowWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self.connection.close()

    def receive(self) -> Batch:
        batch = self.connection.receive()
        assert batch is not None
        return batch

    @property
    def has_batch(self) -> bool:
        """Whether the next message is a batch."""
        with contextlib.suppress(BlockingIOError):
            head = self._socket.recv(MESSAGE.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return bool(MESSAGE.unpack(head)[0] == MessageType.BATCH)
        return False

    def answer(self, batch: Batch) -> None:
        answers = [
            ResponseData(i, {"y": batch.load_inputs(i)["x"] * 2}) for i in range(len(batch.rows))
        ]  # fmt: skip
        self.connection.respond(batch.number, ResponseWriter().lay_out(answers), done=True)

    def serve_until_ahead(self) -> Batch:
        """Serve at an even pace, until the next batch is there before an answer; returns the one not answered."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            batch = self.receive()
            time.sleep(PACE_S)
            if self.has_batch:
                return batch
            self.answer(batch)
        raise AssertionError("no batch was sent ahead")

    def serve_without_ahead(self, batches: int) -> None:
        for _ in range(batches):
            batch = self.receive()
            time.sleep(PACE_S)
            assert not self.has_batch
            self.answer(batch)


@pytest.mark.parametrize("name", ["single", "unbatched"])
def test_the_next_batch_is_there_before_the_answer(name: str, server: BareServer) -> None:
    """Without Triton's dynamic batcher every batch is full."""
    with SlowWorker(server, name) as worker, Callers(server, name, 3) as callers:
        assert worker.connection.welcome.capabilities & Capability.AHEAD
        batch = worker.serve_until_ahead()
        # Not two of them.
        following = worker.receive()
        time.sleep(PACE_S)
        assert not worker.has_batch
        worker.answer(batch)
        worker.answer(following)
        worker.answer(worker.serve_until_ahead())
        callers.stop()
        worker.connection.detach()
        for batch in iter(worker.connection.receive, None):
            worker.answer(batch)
        with server.worker(name, double):
            callers.finish()
    assert callers.errors == []


@pytest.mark.parametrize(
    ("name", "capabilities"),
    [("single", CAPABILITIES), ("rows", CAPABILITIES | Capability.AHEAD)],
    ids=["a worker that does not say that it can", "batches that are not full"],
)
def test_nothing_is_sent_ahead(name: str, capabilities: int, server: BareServer) -> None:
    with SlowWorker(server, name, capabilities) as worker, Callers(server, name, 3) as callers:
        worker.serve_without_ahead(MANY)
        worker.close()
        with server.worker(name, double):
            callers.finish()
    assert [error for error in callers.errors if "was lost while" not in error] == []


@pytest.mark.parametrize("late_s", [0.0, 5 * PACE_S], ids=["at once", "after the next was due"])
def test_full_batches_of_rows(late_s: float, server: BareServer) -> None:
    extra = 8 * 3
    with SlowWorker(server, "rows") as worker, Callers(server, "rows", extra) as callers:
        batch = worker.serve_until_ahead()
        assert sum(batch.rows) == 8
        worker.answer(batch)
        # Nothing may be sent behind the batch that is ahead while that is unread: it would count as begun.
        time.sleep(late_s)
        worker.close()
        with server.worker("rows", double):
            callers.finish()
    # It had been begun, as far as anybody can tell, or had not: what it has not read goes to the next worker.
    assert callers.errors == []


def test_with_two_workers_each_gets_its_next_batch_when_it_is_idle(server: BareServer) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(SlowWorker(server, "single")) for _ in range(2)]
        callers = stack.enter_context(Callers(server, "single", 5))
        failures: list[BaseException] = []

        def serve(worker: SlowWorker) -> None:
            try:
                worker.serve_without_ahead(MANY)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failures == []
        with server.worker("single", double):
            for worker in workers:
                worker.close()
            callers.finish()


def stop_answered(worker: SlowWorker, batch: Batch) -> None:
    worker.answer(batch)
    worker.close()


def stop_unanswered(worker: SlowWorker, batch: Batch) -> None:
    worker.close()


def stop_read(worker: SlowWorker, batch: Batch) -> None:
    worker.receive()
    worker.close()


@pytest.mark.parametrize(
    ("stop", "lost"), [(stop_answered, 0), (stop_unanswered, 1), (stop_read, 1)], ids=["answered", "unanswered", "read"]
)
def test_a_batch_that_was_not_begun_goes_to_the_next_worker(
    stop: Callable[[SlowWorker, Batch], None], lost: int, server: BareServer
) -> None:
    """The model is not `repeatable`: what was begun fails."""
    with Callers(server, "single", 3) as callers, SlowWorker(server, "single") as worker:
        stop(worker, worker.serve_until_ahead())
        with server.worker("single", double):
            before = callers.answered
            eventually(lambda: callers.answered > before + 10)
            callers.finish()
    assert len(callers.errors) == lost
    assert all("was lost while it worked on this request" in error for error in callers.errors)


def test_one_behind_a_batch_that_takes_too_long_goes_to_the_next_worker(server: BareServer) -> None:
    with Callers(server, "limited", 3) as callers, SlowWorker(server, "limited") as worker:
        batch = worker.serve_until_ahead()
        while worker.connection.receive() is not None:
            pass
        del batch
        with server.worker("limited", double):
            eventually(lambda: callers.errors)
            before = callers.answered
            eventually(lambda: callers.answered > before + 10)
            callers.finish()
    assert len(callers.errors) == 1
    assert "took longer for this request than the model's execution timeout, 5000 ms" in callers.errors[0]


def test_a_worker_that_leaves_answers_both(server: BareServer) -> None:
    with Callers(server, "single", 3) as callers, SlowWorker(server, "single") as worker:
        batch = worker.serve_until_ahead()
        worker.connection.detach()
        worker.answer(batch)
        worker.answer(worker.receive())
        assert worker.connection.receive() is None
        with server.worker("single", double):
            callers.finish()
    assert callers.errors == []


def test_the_failure_of_one_is_not_that_of_the_next(server: BareServer) -> None:
    with Callers(server, "single", 3) as callers, SlowWorker(server, "single") as worker:
        batch = worker.serve_until_ahead()
        worker.connection.fail(batch.number, "out of order")
        worker.answer(worker.receive())
        worker.connection.detach()
        for batch in iter(worker.connection.receive, None):
            worker.answer(batch)
        with server.worker("single", double):
            callers.finish()
    assert callers.errors == ["[500] out of order"]


@pytest.mark.parametrize(("name", "width"), [("single", 2), ("narrow", 15 << 10), ("rows", 2), ("unbatched", 2)])
@pytest.mark.parametrize("accelerated", [True, False])
def test_workers_of_ours(
    name: str, width: int, accelerated: bool, server: BareServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a narrow arena there is not room for two answers, of which the first is acknowledged late."""
    if not accelerated:
        monkeypatch.setenv("PYTRITON_ACCELERATOR", "0")

    def slow(requests: Any) -> Any:
        time.sleep(0.004)
        return double(requests)

    with server.worker(name, slow) as worker, Callers(server, name, 20, width) as callers:
        eventually(lambda: callers.answered > 300)
        callers.finish()
        assert sum(worker.statistics.failed_requests.values()) == 0
    assert callers.errors == []
