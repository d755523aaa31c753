"""A tritonserver that dies and is started again: what becomes of requests, models, workers and waits."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.lifecycle.policies import RestartSchedule
from pytriton.server.tritonserver.ports import ReservedPorts
from pytriton.triton import RestartPolicy, Triton, TritonServerExitedError
from support.callables import X, Y, identity
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually, wait_for_threads

IN_FLIGHT = 1000


@pytest.fixture(autouse=True)
def _home() -> Iterator[None]:
    with short_home():
        yield
    wait_for_threads()


@contextlib.contextmanager
def client(triton: Triton) -> Iterator[Any]:
    one = tritonclient.grpc.InferenceServerClient(str(triton.grpc_url).removeprefix("grpc://"))
    try:
        yield one
    finally:
        one.close()


def tensor(value: float) -> list[tritonclient.grpc.InferInput]:
    made = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    made.set_data_from_numpy(np.full((1, 1), value, np.float32))
    return [made]


def ask(triton: Triton, model: str = "m", value: float = 7.0) -> float:
    with client(triton) as one:
        return float(one.infer(model, tensor(value), client_timeout=PATIENCE_S).as_numpy("y")[0, 0])


def is_served_by(triton: Triton, pid: int) -> bool:
    process = triton._server.server.process if triton._server is not None else None
    return process is not None and process.is_running and process.pid == pid


def kill(triton: Triton) -> int:
    """Kills the server, and returns when that is known."""
    pid = server_pid(triton)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_served_by(triton, pid))
    return pid


def test_a_lack_of_the_system_is_a_start_that_failed_and_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
    reserve_again = ReservedPorts.reserve_again

    def reserve(ports: ReservedPorts) -> None:
        if lacking:
            raise lacking.pop()
        reserve_again(ports)

    monkeypatch.setattr(ReservedPorts, "reserve_again", reserve)
    triton = Triton(config=local_config(), restart=RestartPolicy())
    triton.bind("m", identity, X, Y)
    with running(triton):
        pid = kill(triton)
        eventually(triton.is_alive)
        assert not lacking
        assert server_pid(triton) != pid
        assert ask(triton) == 7.0


def test_every_request_in_flight_has_one_end() -> None:
    held = threading.Event()

    def slow(requests: Any) -> Any:
        held.wait(PATIENCE_S)
        return identity(requests)

    triton = Triton(config=local_config(), restart=RestartPolicy())
    triton.bind("m", slow, X, Y)
    triton.bind("other", identity, X, Y)
    ends: list[Counter[str]] = [Counter() for _ in range(IN_FLIGHT)]
    lock = threading.Lock()
    done = threading.Semaphore(0)

    def note(number: int, result: Any, error: Any) -> None:
        with lock:
            ends[number]["answer" if error is None else "error"] += 1
        done.release()

    with running(triton):
        with client(triton) as one:
            for number in range(IN_FLIGHT):
                one.async_infer(
                    "m",
                    tensor(number),
                    lambda result, error, number=number: note(number, result, error),
                    client_timeout=PATIENCE_S,
                )
            # All of them are there: an answer that was asked for later has come.
            assert one.infer("other", tensor(3), client_timeout=PATIENCE_S).as_numpy("y")[0, 0] == 3
            kill(triton)
            for _ in range(IN_FLIGHT):
                assert done.acquire(timeout=PATIENCE_S), "a request has no end"
            held.set()
        eventually(triton.is_alive)
        assert all(sum(end.values()) == 1 for end in ends)
        assert sum((end for end in ends), Counter()) == {"error": IN_FLIGHT}
        assert ask(triton) == 7
        assert ask(triton, "other") == 7
        # Nothing came late.
        assert all(sum(end.values()) == 1 for end in ends)


def test_addresses_models_and_changes_stay() -> None:
    triton = Triton(config=local_config(allow_metrics=True, metrics_port=0), restart=RestartPolicy(first_delay_s=0.0))
    triton.bind("m", identity, X, Y)
    with running(triton):
        urls = triton.http_url, triton.grpc_url, triton.metrics_url
        triton.bind("late", identity, X, Y)
        triton.bind("gone", identity, X, Y)
        triton.unbind("gone")
        first = kill(triton)
        # Whoever changes something meanwhile waits for the server, and does it there.
        triton.bind("new", identity, X, Y)
        assert (triton.http_url, triton.grpc_url, triton.metrics_url) == urls
        assert server_pid(triton) != first
        eventually(triton.is_alive)
        assert [ask(triton, name) for name in ("m", "late", "new")] == [7, 7, 7]
        with pytest.raises(tritonclient.utils.InferenceServerException, match="gone"):
            ask(triton, "gone")
        kill(triton)
        triton.unbind("late")
        triton.rebind("m", lambda requests: [{"y": 2 * request.data["x"]} for request in requests])
        assert [ask(triton, name) for name in ("m", "new")] == [14, 7]
        with pytest.raises(tritonclient.utils.InferenceServerException, match="late"):
            ask(triton, "late")


def test_serve_goes_on_and_gives_up_in_the_end() -> None:
    triton = Triton(config=local_config(), restart=RestartPolicy(max_crashes=2, crash_window_s=600))
    triton.bind("m", identity, X, Y)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(triton.serve)
        eventually(triton.is_alive)
        kill(triton)
        eventually(triton.is_alive)
        assert not serving.done()
        assert ask(triton) == 7
        kill(triton)
        with pytest.raises(TritonServerExitedError, match="not started again after 2 crashes") as caught:
            serving.result(PATIENCE_S)
        assert caught.value.exit_code == -signal.SIGKILL
    assert not triton.is_alive()
    # A start that was asked for begins anew.
    with running(triton):
        kill(triton)
        eventually(triton.is_alive)


def test_stop_ends_a_long_wait_for_the_next_start() -> None:
    policy = RestartPolicy(first_delay_s=600, max_delay_s=600)
    triton = Triton(config=local_config(), restart=policy)
    triton.bind("m", identity, X, Y)
    with running(triton):
        kill(triton)
        assert not triton.is_alive()
        assert triton.stop()


def test_without_a_policy_it_stays_down() -> None:
    triton = Triton(config=local_config())
    triton.bind("m", identity, X, Y)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(triton.serve)
        eventually(triton.is_alive)
        os.kill(server_pid(triton), signal.SIGKILL)
        with pytest.raises(TritonServerExitedError, match="although nobody stopped it"):
            serving.result(PATIENCE_S)


def test_delays_grow_up_to_a_limit() -> None:
    schedule = RestartSchedule(RestartPolicy(max_crashes=6, first_delay_s=0.5, max_delay_s=3.0))
    assert [schedule.next_delay_s() for _ in range(7)] == [0.5, 1.0, 2.0, 3.0, 3.0, None, None]
    schedule = RestartSchedule(RestartPolicy(max_crashes=2, crash_window_s=0.001, first_delay_s=0.5))
    for _ in range(4):
        assert schedule.next_delay_s() == 0.5
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_crashes": 0}, "max_crashes must be a whole number of at least 1; got 0"),
        ({"max_crashes": True}, "max_crashes"),
        ({"crash_window_s": 0}, "crash_window_s must be more than 0 seconds"),
        ({"first_delay_s": -1}, "first_delay_s must be a number of seconds"),
        ({"max_delay_s": float("nan")}, "max_delay_s"),
        ({"first_delay_s": 20.0}, "first_delay_s must be at most max_delay_s, 10"),
    ],
)
def test_bad_policies(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PyTritonValidationError, match=message):
        RestartPolicy(**values)


def test_a_policy_of_another_type() -> None:
    with pytest.raises(PyTritonValidationError, match=r"restart=.* must be a RestartPolicy, or None; got dict"):
        Triton(restart={})  # type: ignore[arg-type] # as a user may
