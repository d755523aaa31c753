"""Workers that die, stop, hang and starve: every request gets one answer or one error, and the next works."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from pytriton.proxy.types import Request
from pytriton.proxy_backend import Worker
from pytriton.proxy_backend.transport.activity import EndpointActivity, ask_activity
from support.bare_server import F4, Array, BareServer, serving
from support.callables import WithFactory, double
from support.paths import TESTS
from support.processes import stop
from support.waiting import PATIENCE_S, eventually

MIB = 1 << 20
# Longer than a busy machine keeps anybody waiting.
LIMIT_S = 3.0
ONE = np.array([[1, 2]], F4)
# How often the native proxy says that it cannot accept a worker.
ACCEPT_LOG_S = 10.0
SCRIPT = TESTS / "support" / "faults" / "fault_worker.py"
STREAMING = "model_transaction_policy { decoupled: true }"
NO_BATCHER_DELAY = "dynamic_batching { }"
SHORT_QUEUE = "dynamic_batching { default_queue_policy { max_queue_size: 4 } }"


@pytest.fixture(scope="module")
def server() -> Iterator[BareServer]:
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        made = BareServer(Path(folder))
        made.add("plain", extra=NO_BATCHER_DELAY)
        made.add("single")
        made.add("timed", execution_timeout_s=LIMIT_S, attach_timeout_s=3.0)
        made.add("timed_stream", execution_timeout_s=LIMIT_S, decoupled=True, extra=STREAMING)
        made.add("repeat", repeatable=True, extra=NO_BATCHER_DELAY)
        made.add("repeat_short", repeatable=True, attach_timeout_s=0.5)
        made.add("repeat_stream", repeatable=True, decoupled=True, extra=STREAMING)
        made.add("tight", arena_budget_bytes=4 * MIB, arena_idle_s=0.0)
        made.add("waits", attach_timeout_s=1.0)
        made.add("waits_alone", batching=False, attach_timeout_s=PATIENCE_S)
        made.add("waits_few", attach_timeout_s=PATIENCE_S, max_waiting=4, extra=SHORT_QUEUE)
        with serving(made):
            yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


class WorkerProcess:
    """`fault_worker.py`, attached."""

    def __init__(self, server: BareServer, model: str, name: str, *options: str) -> None:
        command = [sys.executable, str(SCRIPT), str(server.endpoint(model)), model, name, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="read-worker")
        self._reader.start()
        if "starved" not in options:
            self.wait_for("attached")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def wait_for(self, text: str, count: int = 1) -> None:
        """Waits for as many lines that begin so."""
        deadline = time.monotonic() + PATIENCE_S
        while count > 0:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"the worker did not say {text!r} {count} times more") from None
            count -= line.startswith(text)

    def stop(self) -> None:
        """Stops every thread of it where it is."""
        stop(self.pid)

    def go_on(self) -> None:
        """Ends that."""
        self.process.send_signal(signal.SIGCONT)

    def tell(self) -> None:
        """Lets go of what it holds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Calls:
    """Requests that are on their way at the same time, each with its own number; what becomes of each is counted."""

    def __init__(self, server: BareServer, model: str, count: int, first: int = 0) -> None:
        self.count = count
        self.answers: dict[int, float] = {}
        self.errors: dict[int, str] = {}
        self.twice: list[int] = []
        self.last_s = 0.0
        """When the last answer or error came, as `time.monotonic` has it."""
        self._left = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        for number in range(first, first + count):
            tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.array([[number]], F4))
            self._client.async_infer(
                model,
                [tensor],
                lambda result, error, number=number: self._done(number, result, error),
                client_timeout=PATIENCE_S,
            )

    def _done(self, number: int, result: Any, error: Exception | None) -> None:
        with self._lock:
            if number in self.answers or number in self.errors:
                self.twice.append(number)
            if error is None:
                self.answers[number] = float(result.as_numpy("y")[0, 0])
            else:
                self.errors[number] = str(error)
            self.last_s = time.monotonic()
        self._left.release()

    def wait(self, timeout_s: float = PATIENCE_S) -> Calls:
        """Waits until each has its answer or its error; every answer must be its own request's."""
        deadline = time.monotonic() + timeout_s
        for _ in range(self.count):
            left = max(0.0, deadline - time.monotonic())
            assert self._left.acquire(timeout=left), f"{len(self.answers)} answers, {len(self.errors)} errors so far"
        self._client.close()
        assert not self.twice
        assert len(self.answers) + len(self.errors) == self.count
        assert all(value == 2 * number for number, value in self.answers.items())
        return self


def assert_next_works(server: BareServer, model: str = "plain") -> None:
    with server.worker(model, double):
        assert server.infer(model, ONE).tolist() == [[2, 4]]


def infer_with_error(server: BareServer, model: str) -> str:
    with pytest.raises(InferenceServerException) as caught:
        server.infer(model, ONE)
    return str(caught.value)


def stream(server: BareServer, model: str, count: int) -> Iterator[float]:
    """The responses to one request for `count` of them; an error is raised."""
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[count]], F4))
        client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
        while True:
            result, error = results.get(timeout=PATIENCE_S)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                yield float(result.as_numpy("y")[0, 0])
            if response.parameters["triton_final_response"].bool_param:
                return


# ---- workers that are killed ---------------------------------------------------------------------------------------


def test_many_requests_of_a_killed_worker(server: BareServer) -> None:
    """64 batches are with the worker, the others wait in Triton's queue for the next one."""
    with WorkerProcess(server, "plain", "held_async") as victim:
        calls = Calls(server, "plain", 1000)
        victim.wait_for("got", 64)
        victim.process.kill()
        eventually(lambda: len(calls.errors) >= 64)
    with server.worker("plain", double):
        calls.wait()
        assert 64 <= len(calls.errors) <= 64 * 8
        assert len(calls.answers) >= 1000 - 64 * 8
        for text in calls.errors.values():
            assert f"worker 'held_async' (pid {victim.pid}) was lost while it worked on this request" in text
        assert server.infer("plain", ONE).tolist() == [[2, 4]]


def test_what_is_repeatable_goes_to_another_worker(server: BareServer) -> None:
    with WorkerProcess(server, "repeat", "held_async") as victim:
        calls = Calls(server, "repeat", 300)
        victim.wait_for("got", 10)
        with server.worker("repeat", double):
            victim.process.kill()
            calls.wait()
            assert not calls.errors
            assert server.infer("repeat", ONE).tolist() == [[2, 4]]


def test_what_is_repeatable_waits_for_the_worker_that_comes(server: BareServer) -> None:
    with WorkerProcess(server, "repeat", "held") as victim:
        calls = Calls(server, "repeat", 3)
        victim.wait_for("got")
        victim.process.kill()
        server.wait_for_log(f"(pid {victim.pid}) is gone")
        assert not calls.answers
        assert not calls.errors
        with WorkerProcess(server, "repeat", "double"):
            assert len(calls.wait().answers) == 3


def test_a_request_is_repeated_only_once(server: BareServer) -> None:
    with WorkerProcess(server, "repeat", "held") as first:
        calls = Calls(server, "repeat", 1)
        first.wait_for("got")
        with WorkerProcess(server, "repeat", "held") as second:
            first.process.kill()
            second.wait_for("got")
            with server.worker("repeat", double):
                second.process.kill()
                [text] = calls.wait().errors.values()
                assert f"worker 'held' (pid {second.pid}) was lost" in text
                assert f"It was the second: worker 'held' (pid {first.pid}) was lost" in text
                assert server.infer("repeat", ONE).tolist() == [[2, 4]]


def test_each_request_waits_for_a_worker_as_long_as_promised(server: BareServer) -> None:
    """Also those that come while others wait, and those that come when others have just waited in vain."""

    def waited(_: int) -> float:
        began = time.monotonic()
        assert "no worker is attached. Waited 1000 ms" in infer_with_error(server, "waits")
        return time.monotonic() - began

    def apart(number: int) -> float:
        time.sleep(0.1 * number)
        return waited(number)

    with ThreadPoolExecutor(30) as pool:
        assert min(pool.map(apart, range(30))) >= 1.0
    assert_next_works(server, "waits")


def test_requests_that_wait_for_a_worker_do_not_wait_for_each_other(server: BareServer) -> None:
    endpoint = server.endpoint("waits_alone")
    with ThreadPoolExecutor(20) as pool:
        calls = [pool.submit(server.infer, "waits_alone", ONE[0]) for _ in range(20)]
        eventually(lambda: ask_activity(endpoint, PATIENCE_S) == EndpointActivity(in_flight=20, taken=20))
        with server.worker("waits_alone", double):
            assert all(call.result(PATIENCE_S).tolist() == [2, 4] for call in calls)


def test_what_waits_for_a_worker_counts_for_a_queue_with_a_limit(server: BareServer) -> None:
    refused: list[str] = []

    def ask() -> None:
        try:
            assert server.infer("waits_few", ONE).tolist() == [[2, 4]]
        except InferenceServerException as error:
            refused.append(str(error))

    with ThreadPoolExecutor(100) as pool:
        calls: list[Future[None]] = []
        while not refused:
            assert len(calls) < 100, "the queue takes any number"
            calls.append(pool.submit(ask))
            # Longer than Triton keeps one in its queue while there is no worker.
            time.sleep(0.1)
        with server.worker("waits_few", double):
            for call in calls:
                call.result(PATIENCE_S)
    assert all("maximum queue size" in text for text in refused), refused
    # As many as Triton's queue takes at least, however the requests came to it.
    assert len(calls) - len(refused) >= 4


def test_what_is_repeatable_fails_where_no_other_worker_comes(server: BareServer) -> None:
    with WorkerProcess(server, "repeat_short", "held") as victim:
        calls = Calls(server, "repeat_short", 1)
        victim.wait_for("got")
        victim.process.kill()
        [text] = calls.wait().errors.values()
        assert f"worker 'held' (pid {victim.pid}) was lost while it worked on this request" in text
        assert "No other worker attached within 500 ms to take it over" in text
    # And who asks now learns whom the model has lost.
    text = infer_with_error(server, "repeat_short")
    assert "no worker is attached. Waited 500 ms" in text
    assert re.search(rf"The last that was lost, \d+ ms ago, was worker 'held' \(pid {victim.pid}\)", text)
    assert_next_works(server, "repeat_short")


@pytest.mark.parametrize("name", ["stream", "stream_async"])
def test_a_stream_is_repeated_as_long_as_nothing_of_it_was_sent(
    name: str, server: BareServer, pool: ThreadPoolExecutor
) -> None:
    def count_up(requests: list[Request]) -> Iterator[list[dict[str, Array]]]:
        for step in range(int(requests[0]["x"][0, 0]) + 1):
            yield [{"y": np.array([[step]], F4)} for _ in requests]

    with WorkerProcess(server, "repeat_stream", name, "decoupled") as victim:
        none = pool.submit(lambda: list(stream(server, "repeat_stream", 0)))
        victim.wait_for("gave all")
        with server.worker("repeat_stream", count_up):
            victim.process.kill()
            assert none.result(PATIENCE_S) == [0]
    with WorkerProcess(server, "repeat_stream", name, "decoupled") as victim:
        responses = stream(server, "repeat_stream", 2)
        assert [next(responses), next(responses)] == [0, 1]
        victim.wait_for("gave all")
        with server.worker("repeat_stream", count_up):
            victim.process.kill()
            with pytest.raises(InferenceServerException, match=rf"pid {victim.pid}\) was lost while it worked"):
                next(responses)
            assert list(stream(server, "repeat_stream", 1)) == [0, 1]


# ---- workers that are stopped --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("held", "other", "batches"), [("held", "double", 1), ("held_async", "double_async", 64)])
def test_a_stopped_worker_holds_what_it_has_and_the_others_go_on(
    held: str, other: str, batches: int, server: BareServer
) -> None:
    count = 8 * batches + 200
    with WorkerProcess(server, "plain", held) as stopped, WorkerProcess(server, "plain", other):
        stopped.stop()
        calls = Calls(server, "plain", count)
        eventually(lambda: len(calls.answers) >= count - 8 * batches)
        stopped.go_on()
        stopped.tell()
        assert len(calls.wait().answers) == count


def test_a_stopped_worker_is_let_go_when_its_time_is_over(server: BareServer) -> None:
    with WorkerProcess(server, "timed", "double") as stopped:
        stopped.stop()
        text = infer_with_error(server, "timed")
        assert f"worker 'double' (pid {stopped.pid}) took longer for this request than the model's execution" in text
        with server.worker("timed", double):
            assert len(Calls(server, "timed", 50).wait().answers) == 50
        stopped.go_on()
        # It comes back by itself.
        assert len(Calls(server, "timed", 1).wait().answers) == 1


# ---- callables that take too long ----------------------------------------------------------------------------------


def test_a_callable_that_never_returns(server: BareServer, caplog: pytest.LogCaptureFixture) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stuck_here(requests: list[Request]) -> list[dict[str, Array]]:
        if not leave.is_set():
            entered.set()
            assert leave.wait(PATIENCE_S)
        return double(requests)

    caplog.set_level(logging.WARNING, "pytriton")
    with server.worker("timed", stuck_here) as worker:
        begin = time.monotonic()
        calls = Calls(server, "timed", 1).wait()
        assert time.monotonic() - begin >= LIMIT_S
        [text] = calls.errors.values()
        assert "took longer for this request than the model's execution timeout, 3000 ms" in text
        assert "StatusCode.UNAVAILABLE" in text
        eventually(lambda: worker.stuck is not None)
        assert worker.is_alive
        assert not worker.is_attached
        assert "took longer than the execution timeout of 3 s and has not returned" in str(worker.stuck)
        eventually(lambda: "in stuck_here" in caplog.text)
        assert "leave.wait(" in caplog.text
        # It gets no more batches: others do, and without others nobody.
        with server.worker("timed", double):
            assert len(Calls(server, "timed", 20).wait().answers) == 20
        text = infer_with_error(server, "timed")
        assert "no worker is attached" in text
        leave.set()
        eventually(lambda: worker.is_attached)
        assert worker.stuck is None
        assert server.infer("timed", ONE).tolist() == [[2, 4]]


def test_a_coroutine_that_takes_too_long_is_cancelled_and_the_others_go_on(server: BareServer) -> None:
    cancelled: list[float] = []

    async def some_hang(requests: list[Request]) -> list[dict[str, Array]]:
        if any(request["x"][0, 0] == 13 for request in requests):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.extend(float(request["x"][0, 0]) for request in requests)
                raise
        return double(requests)

    with server.worker("timed", some_hang) as worker:
        calls = Calls(server, "timed", 40).wait()
        assert 13 in calls.errors
        eventually(lambda: set(cancelled) == set(calls.errors))
        assert "execution timeout" in calls.errors[13]
        assert worker.is_attached
        assert worker.stuck is None
        assert server.infer("timed", ONE).tolist() == [[2, 4]]


def test_the_task_factory_of_a_callable_makes_its_own_tasks_only(server: BareServer) -> None:
    """What it makes may have ended before it is noted, and would then be kept for ever."""
    callable_ = WithFactory()
    with server.worker("timed", callable_):
        for _ in range(3):
            assert server.infer("timed", ONE[:, :1]).tolist() == [[2]]
        assert callable_.made == ["coroutine"] * 3


def test_an_event_loop_that_stands_still_is_let_go(server: BareServer) -> None:
    leave = threading.Event()

    async def blocks(requests: list[Request]) -> list[dict[str, Array]]:
        if not leave.is_set():
            leave.wait(PATIENCE_S)  # as many do by mistake
        return double(requests)

    with server.worker("timed", blocks) as worker:
        calls = Calls(server, "timed", 30).wait()
        assert len(calls.errors) == 30
        eventually(lambda: worker.stuck is not None)
        leave.set()
        eventually(lambda: worker.is_attached)
        assert server.infer("timed", ONE).tolist() == [[2, 4]]


def test_a_stream_may_last_as_long_as_it_goes_on(server: BareServer) -> None:
    leave = threading.Event()

    def count_slowly(requests: list[Request]) -> Iterator[list[dict[str, Array]]]:
        for step in range(5):
            time.sleep(LIMIT_S / 4)
            yield [{"y": np.array([[step]], F4)} for _ in requests]
        if requests[0]["x"][0, 0] == 99:
            leave.wait(PATIENCE_S)

    with server.worker("timed_stream", count_slowly) as worker:
        responses = stream(server, "timed_stream", 99)
        assert [next(responses) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(InferenceServerException, match="execution timeout"):
            next(responses)
        leave.set()
        eventually(lambda: worker.is_attached)
        assert list(stream(server, "timed_stream", 1)) == [0, 1, 2, 3, 4]


# ---- callables that fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_storm_of_errors(kind: str, server: BareServer) -> None:
    raised = [ValueError, MemoryError, RecursionError, KeyError, OSError, AssertionError, asyncio.CancelledError]
    logging.getLogger("pytriton.proxy_backend").setLevel(logging.CRITICAL)

    def fails(requests: list[Request]) -> list[dict[str, Array]]:
        number = int(requests[0]["x"][0, 0])
        if number % 8:
            raise raised[number % 8 - 1](f"number {number}")
        return double(requests)

    async def fails_async(requests: list[Request]) -> list[dict[str, Array]]:
        return fails(requests)

    try:
        with server.worker("single", fails if kind == "sync" else fails_async):
            calls = Calls(server, "single", 400).wait()
            assert set(calls.answers) == set(range(0, 400, 8))
            assert "MemoryError: number 2" in calls.errors[2]
            assert server.infer("single", np.zeros((1, 2), F4)).tolist() == [[0, 0]]
    finally:
        logging.getLogger("pytriton.proxy_backend").setLevel(logging.NOTSET)


def test_a_callable_that_asks_for_more_memory_than_there_is(server: BareServer) -> None:
    def greedy(requests: list[Request]) -> list[dict[str, Array]]:
        if requests[0]["x"][0, 0] == 0:
            np.empty(1 << 62, np.uint8)
        return double(requests)

    with server.worker("plain", greedy):
        with pytest.raises(InferenceServerException, match="MemoryError"):
            server.infer("plain", np.zeros((1, 1), F4))
        assert server.infer("plain", ONE).tolist() == [[2, 4]]


def test_a_callable_that_keeps_all_inputs_uses_up_the_budget(server: BareServer) -> None:
    kept: list[Array] = []

    def keep(requests: list[Request]) -> list[dict[str, Array]]:
        kept.extend(request["x"] for request in requests)
        return [{"y": request["x"][:, :1]} for request in requests]

    large = np.ones((1, MIB // 4), F4)
    with server.worker("tight", keep):
        answers, errors = 0, []
        for _ in range(8):
            try:
                server.infer("tight", large)
                answers += 1
            except InferenceServerException as error:
                errors.append(str(error))
        assert answers + len(errors) == 8
        assert answers == len(kept) > 0
        assert errors
        for text in errors:
            assert "in use (by inputs that the callable keeps)" in text
            assert "Raise arena_budget_bytes" in text
        kept.clear()
        eventually(lambda: _works(server, "tight", large))


def _works(server: BareServer, model: str, value: Array) -> bool:
    try:
        server.infer(model, value)
    except InferenceServerException:
        return False
    return True


# ---- no descriptors ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """Leaves a process no descriptor beyond those that it has."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used: set[int] = set()
    settled = 0
    # What callers before this one have left may still be closing.
    while settled < 5:
        now = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        settled = settled + 1 if now == used else 0
        used = now
        time.sleep(0.1)
    lowest_free = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_server_without_descriptors_accepts_workers_later(server: BareServer, pool: ThreadPoolExecutor) -> None:
    pid = server.process.pid
    assert pid is not None
    with server.worker("plain", double), tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        tensor = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(ONE)

        def ask() -> Any:
            return client.infer("plain", [tensor], client_timeout=PATIENCE_S).as_numpy("y").tolist()

        assert ask() == [[2, 4]]
        late = Worker(double, server.models["plain"], server.endpoint("plain"))
        with without_descriptors(pid):
            late.start()
            server.wait_for_log("accepting a worker: Too many open files")
            began = time.monotonic()
            for _ in range(20):
                assert ask() == [[2, 4]]  # the attached one serves on
            ticks = _cpu_ticks(pid)
            time.sleep(0.5)
            assert _cpu_ticks(pid) - ticks < 0.45 * os.sysconf("SC_CLK_TCK")  # and nothing spins
            assert server.log().count("accepting a worker") <= 2 + (time.monotonic() - began) / ACCEPT_LOG_S
            assert not late.is_attached
        late.wait_attached(PATIENCE_S)
        assert late.stop(PATIENCE_S)
        assert ask() == [[2, 4]]


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize("callable_", ["double", "double_async"])
def test_a_worker_without_descriptors_attaches_later(server: BareServer, callable_: str) -> None:
    with WorkerProcess(server, "plain", callable_, "starved") as starved:
        starved.wait_for("starved")
        calls = Calls(server, "plain", 5)
        starved.tell()
        starved.wait_for("attached")
        assert len(calls.wait().answers) == 5


def test_outputs_that_need_a_descriptor_that_is_not_there(server: BareServer) -> None:
    with WorkerProcess(server, "plain", "large_without_descriptors") as worker:
        text = infer_with_error(server, "plain")
        assert "the system gives no shared memory" in text
        assert "Too many open files" in text
        worker.tell()
        eventually(lambda: _works(server, "plain", ONE))


# ---- nobody there --------------------------------------------------------------------------------------------------


def test_requests_without_a_worker_fail_in_time_and_the_next_works(server: BareServer) -> None:
    begin = time.monotonic()
    calls = Calls(server, "timed", 20).wait()
    assert len(calls.errors) == 20
    assert time.monotonic() - begin >= 3.0
    assert all("no worker is attached. Waited 3000 ms" in text for text in calls.errors.values())
    assert_next_works(server, "timed")


def test_a_detached_worker_takes_nothing_with_it(server: BareServer, pool: ThreadPoolExecutor) -> None:
    """Workers come and go while requests are on their way."""
    with server.worker("plain", double):
        stop = threading.Event()

        def come_and_go() -> int:
            count = 0
            while not stop.is_set():
                with server.worker("plain", double):
                    count += 1
            return count

        changes: Future[int] = pool.submit(come_and_go)
        try:
            for first in range(0, 3000, 300):
                assert len(Calls(server, "plain", 300, first).wait().answers) == 300
        finally:
            stop.set()
        assert changes.result(PATIENCE_S) > 1
