"""The life of callables in a server in process: streams, cancellation, errors at the call, versions, start and stop."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.exceptions import (
    PyTritonBadParameterError,
    PyTritonInvalidOperationError,
    PyTritonUnrecoverableError,
    PyTritonValidationError,
)
from pytriton.model_config import ModelConfig, Tensor
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.proxy.types import Request, Response
from pytriton.triton import ProcessWorker
from support.callables import X, Y, identity
from support.inprocess import chain_config
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]

ONE = np.ones((1, 1), np.float32)
DECOUPLED = ModelConfig(decoupled=True)


@pytest.fixture(scope="module")
def server() -> Iterator[inprocess.Server]:
    with inprocess.Server() as server:
        yield server


def ask(server: inprocess.Server, name: str, value: float = 1, version: int = -1) -> list[float]:
    """The single values of all responses."""
    given = np.full((1, 1), value, np.float32)
    return [
        np.array(response.outputs["y"]).item()
        for response in server.model(name, version).infer(inputs={"x": given})
        if response.outputs
    ]


# ---- streams, async callables, cancellation --------------------------------------------------------------------------


def test_a_stream_comes_piece_by_piece(server: inprocess.Server) -> None:
    go_on = threading.Semaphore(0)

    def count(requests: list[Request]) -> Iterator[list[Any]]:
        for number in range(3):
            assert go_on.acquire(timeout=PATIENCE_S)
            yield [Response({"y": np.full((1, 1), number, np.float32)}, {"n": number}) for _ in requests]

    server.bind("count", count, X, Y, config=DECOUPLED)
    responses = iter(server.model("count").infer(inputs={"x": ONE}))
    for number in range(3):
        go_on.release()
        response = next(responses)
        assert np.array(response.outputs["y"]).item() == number
        assert response.parameters["n"] == number
    assert [response.final for response in responses] == [True]


def test_a_stream_that_fails_on_its_way(server: inprocess.Server) -> None:
    def fail(requests: list[Request]) -> Iterator[list[Any]]:
        yield identity(requests)
        raise ValueError("half way")

    server.bind("half", fail, X, Y, config=DECOUPLED)
    responses = iter(server.model("half").infer(inputs={"x": ONE}))
    assert np.array(next(responses).outputs["y"]).item() == 1
    with pytest.raises(inprocess.InternalError, match="ValueError: half way"):
        next(responses)


def test_many_batches_of_an_async_callable_are_in_flight(server: inprocess.Server) -> None:
    """None of them would end if one had to wait for another's end."""
    inside: list[int] = []
    all_in = asyncio.Event()

    async def meet(requests: list[Request]) -> list[Any]:
        inside.append(1)
        if len(inside) == 8:
            all_in.set()
        await asyncio.wait_for(all_in.wait(), PATIENCE_S)
        return identity(requests)

    server.bind("meet", meet, X, Y, config=ModelConfig(max_batch_size=1))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda value: ask(server, "meet", value), range(8))) == [[value] for value in range(8)]


def test_async_callers(server: inprocess.Server) -> None:
    async def double(requests: list[Request]) -> AsyncIterator[list[Any]]:
        for factor in (1, 2):
            await asyncio.sleep(0)
            yield [{"y": request["x"] * factor} for request in requests]

    server.bind("adouble", double, X, Y, config=DECOUPLED)

    async def call(value: float) -> list[float]:
        given = np.full((1, 1), value, np.float32)
        responses = server.model("adouble").async_infer(inputs={"x": given})
        return [np.array(response.outputs["y"]).item() async for response in responses if response.outputs]

    async def call_all() -> list[list[float]]:
        return await asyncio.gather(*[call(value) for value in range(20)])

    assert asyncio.run(call_all()) == [[value, 2 * value] for value in range(20)]


def test_a_callable_sees_that_its_caller_gave_up(server: inprocess.Server) -> None:
    begun, seen = threading.Event(), threading.Event()

    def wait(requests: list[Request]) -> list[Any]:
        begun.set()
        eventually(requests[0].is_cancelled)
        seen.set()
        return identity(requests)

    server.bind("patient", wait, X, Y)
    responses = server.model("patient").infer(inputs={"x": ONE})
    assert begun.wait(PATIENCE_S)
    responses.cancel()
    assert seen.wait(PATIENCE_S)
    with pytest.raises(inprocess.CancelledError):
        list(responses)


def test_cancellation_ends_a_generator_and_a_coroutine(server: inprocess.Server) -> None:
    ended: list[str] = []
    # One for each: a request that is cancelled before its callable runs never gets there.
    begun = {"forever": threading.Event(), "sleeps": threading.Event()}

    def forever(requests: list[Request]) -> Iterator[list[Any]]:
        try:
            while True:
                begun["forever"].set()
                yield identity(requests)
                time.sleep(0.001)
        finally:
            ended.append("generator")

    async def sleeps(requests: list[Request]) -> list[Any]:
        begun["sleeps"].set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            ended.append("coroutine")
            raise
        return identity(requests)

    server.bind("forever", forever, X, Y, config=DECOUPLED)
    server.bind("sleeps", sleeps, X, Y)
    for name in ("forever", "sleeps"):
        responses = server.model(name).infer(inputs={"x": ONE})
        assert begun[name].wait(PATIENCE_S)
        responses.cancel()
    eventually(lambda: sorted(ended) == ["coroutine", "generator"])


def test_a_request_that_is_cancelled_before_its_coroutine_runs_comes_to_its_end(server: inprocess.Server) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def blocks(requests: list[Request]) -> list[Any]:
        if requests[0]["x"][0] == 1 and not begun.is_set():
            begun.set()
            go_on.wait(PATIENCE_S)  # the loop has no turn meanwhile
        return identity(requests)

    server.bind("blocks", blocks, X, Y)
    model = server.model("blocks")
    for _ in range(3):
        begun.clear()
        go_on.clear()
        first = model.infer(inputs={"x": ONE})
        assert begun.wait(PATIENCE_S)
        second = model.infer(inputs={"x": ONE + 1})
        # The second one is with the loop by then; and the next look for cancelled requests is due.
        time.sleep(0.05)
        second.cancel()
        time.sleep(0.05)
        go_on.set()
        assert len(list(first)) == 1
    assert len(list(model.infer(inputs={"x": ONE + 1}))) == 1
    # It waits for all of its requests.
    server.unbind("blocks")


def test_what_a_cancelled_coroutine_awaits_at_its_end_goes_on(server: inprocess.Server) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def tidy(requests: list[Request]) -> list[Any]:
        try:
            begun.set()
            await asyncio.sleep(PATIENCE_S)
        finally:
            # Several looks for cancelled requests are due meanwhile.
            for _ in range(20):
                await asyncio.sleep(0.01)
            ended.set()
        return identity(requests)

    server.bind("tidy", tidy, X, Y)
    responses = server.model("tidy").infer(inputs={"x": ONE})
    assert begun.wait(PATIENCE_S)
    responses.cancel()
    assert ended.wait(PATIENCE_S)
    server.unbind("tidy")


def test_what_belongs_to_a_thread_or_a_context_is_there_in_every_call(server: inprocess.Server) -> None:
    chosen: contextvars.ContextVar[str] = contextvars.ContextVar("chosen", default="nothing")
    local = threading.local()
    seen: list[tuple[str, int, int]] = []

    def look(requests: list[Request]) -> list[Any]:
        local.calls = getattr(local, "calls", 0) + 1
        seen.append((chosen.get(), local.calls, threading.get_ident()))
        return identity(requests)

    chosen.set("what bind saw")
    server.bind("look", look, X, Y)
    for _ in range(3):
        assert ask(server, "look") == [1]
    assert [(value, calls) for value, calls, _ in seen] == [("what bind saw", calls) for calls in (1, 2, 3)]
    assert len({thread for _, _, thread in seen}) == 1


def test_a_callable_may_ask_another_model(server: inprocess.Server) -> None:
    def through(requests: list[Request]) -> list[Any]:
        return [{"y": np.full((1, 1), ask(server, "below", request["x"].item())[0])} for request in requests]

    server.bind("below", lambda requests: [{"y": request["x"] + 1} for request in requests], X, Y)
    server.bind("above", through, X, Y)
    assert ask(server, "above", 2) == [3]


# ---- errors at the call ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ({"model_name": ""}, PyTritonValidationError, "cannot be empty"),
        ({"model_name": "a/b"}, PyTritonValidationError, "alphanumeric"),
        ({"infer_func": 7}, PyTritonValidationError, "infer_func has to be a callable"),
        ({"infer_func": []}, PyTritonValidationError, "infer_func has to be a callable"),
        ({"infer_func": ProcessWorker("os:getpid")}, inprocess.InvalidArgumentError, "callables of this process"),
        ({"inputs": ["x"]}, PyTritonValidationError, "must be a Tensor"),
        ({"outputs": None}, PyTritonValidationError, "outputs have to be said"),
        ({"model_version": 0}, PyTritonValidationError, "at least 1"),
        ({"config": {"batching": True}}, PyTritonValidationError, "ModelConfig"),
        ({"config": ModelConfig(max_batch_size=0)}, PyTritonBadParameterError, "max_batch_size"),
    ],
)
def test_wrong_arguments_are_errors_of_the_call(
    arguments: dict[str, Any], error: type[Exception], part: str, server: inprocess.Server
) -> None:
    good: dict[str, Any] = {"model_name": "wrong", "infer_func": identity, "inputs": X, "outputs": Y}
    with pytest.raises(error, match=part):
        server.bind(**{**good, **arguments})
    assert not any(name == "wrong" for name, _ in server.models())


def test_names_that_are_taken(server: inprocess.Server) -> None:
    server.bind("taken", identity, X, Y)
    with pytest.raises(inprocess.AlreadyBoundError, match="same name twice") as caught:
        server.bind("Taken", identity, X, Y)
    assert isinstance(caught.value, inprocess.AlreadyExistsError)
    assert isinstance(caught.value, PyTritonInvalidOperationError)
    with pytest.raises(inprocess.AlreadyBoundError, match="differs from version 1 in inputs"):
        server.bind("taken", identity, [*X, Tensor(name="z", dtype=np.int8, shape=(1,))], Y, model_version=2)
    assert ask(server, "taken") == [1]


def test_a_model_of_a_repository_keeps_its_name() -> None:
    with inprocess.Server(model_control_mode=inprocess.ModelControlMode.EXPLICIT) as server:
        server.bind("inner", identity, X, Y, config=ModelConfig(max_batch_size=8))
        server.load("outer", config=chain_config("inner"))
        # An ensemble of a bound callable.
        assert ask(server, "outer", 4) == [4]
        with pytest.raises(inprocess.AlreadyBoundError, match="from a repository or from load"):
            server.bind("outer", identity, X, Y)
        assert ask(server, "outer", 5) == [5]


def test_a_server_that_polls_serves_no_callables(tmp_path: Any) -> None:
    server = inprocess.Server(model_repository=str(tmp_path), model_control_mode=inprocess.ModelControlMode.POLL)
    with pytest.raises(inprocess.InvalidArgumentError, match="NONE or EXPLICIT, got POLL"):
        server.bind("polled", identity, X, Y)


# ---- life ------------------------------------------------------------------------------------------------------------


def test_versions(server: inprocess.Server) -> None:
    for version in (1, 2, 3):
        factor = float(version)
        server.bind(
            "versions",
            lambda requests, factor=factor: [{"y": request["x"] * factor} for request in requests],
            X,
            Y,
            model_version=version,
        )
    assert [ask(server, "versions", 1, version) for version in (1, 2, 3, -1)] == [[1], [2], [3], [3]]
    server.unbind("versions", 3)
    assert [ask(server, "versions", 1, version) for version in (1, 2, -1)] == [[1], [2], [2]]
    with pytest.raises(inprocess.UnavailableError):
        ask(server, "versions", 1, 3)
    server.unbind("versions")
    with pytest.raises(inprocess.TritonError):
        ask(server, "versions")
    with pytest.raises(inprocess.NotBoundError, match="No callable is bound as model 'versions'"):
        server.unbind("versions")
    server.bind("versions", identity, X, Y)
    assert ask(server, "versions", 7) == [7]


def test_unbind_answers_what_is_in_flight(server: inprocess.Server) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(requests: list[Request]) -> list[Any]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return identity(requests)

    server.bind("drained", wait, X, Y)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(ask, server, "drained", 3)
        assert begun.wait(PATIENCE_S)
        with pytest.raises(inprocess.TimedOutError, match="'drained' version 1"):
            server.unbind("drained", timeout_s=0.05)
        go_on.set()
        assert answer.result(PATIENCE_S) == [3]


def warm(count: int) -> ModelConfig:
    inputs = {"x": WarmupInput(dtype=np.float32, shape=(1,), zero_data=True)}
    return ModelConfig(model_warmup=[ModelWarmup(name="w", batch_size=1, inputs=inputs, count=count)])


def test_the_warm_up_comes_before_the_first_request(server: inprocess.Server) -> None:
    seen: list[float] = []

    def note(requests: list[Request]) -> list[Any]:
        seen.extend(request["x"].item() for request in requests)
        return identity(requests)

    async def note_async(requests: list[Request]) -> list[Any]:
        await asyncio.sleep(0)
        return note(requests)

    for name, infer_func in (("warm", note), ("warm_async", note_async)):
        seen.clear()
        server.bind(name, infer_func, X, Y, config=warm(2))
        assert seen == [0, 0]
        assert ask(server, name, 5) == [5]
        assert seen == [0, 0, 5]


def test_a_warm_up_that_fails_leaves_nothing(server: inprocess.Server) -> None:
    def fail(requests: list[Request]) -> list[Any]:
        raise ValueError("cold")

    with pytest.raises(inprocess.TritonError, match=r"warm-up of model 'cold'.*ValueError: cold") as caught:
        server.bind("cold", fail, X, Y, config=warm(1))
    assert isinstance(caught.value.__cause__, ValueError)
    server.bind("cold", identity, X, Y, config=warm(1))
    assert ask(server, "cold", 2) == [2]


def test_bound_before_the_start_and_after_a_stop() -> None:
    server = inprocess.Server()
    model = server.bind("again", identity, X, Y)
    for _ in range(2):
        with server:
            assert model.ready()
            assert ask(server, "again", 3) == [3]
    server.unbind("again")
    with server, pytest.raises(inprocess.TritonError):
        ask(server, "again")


def test_an_unrecoverable_error_ends_the_callable(server: inprocess.Server) -> None:
    calls: list[int] = []

    def broken(requests: list[Request]) -> list[Any]:
        calls.append(1)
        raise PyTritonUnrecoverableError("the device is gone")

    server.bind("broken", broken, X, Y)
    with pytest.raises(inprocess.InternalError, match="the device is gone"):
        ask(server, "broken")
    with pytest.raises(inprocess.UnavailableError, match=r"cannot go on: .*the device is gone"):
        ask(server, "broken")
    assert calls == [1]


def test_a_callable_that_takes_too_long(server: inprocess.Server) -> None:
    go_on = threading.Event()

    def slow(requests: list[Request]) -> list[Any]:
        if requests[0]["x"].item() == 0:
            assert go_on.wait(PATIENCE_S)
        return identity(requests)

    server.bind("slow", slow, X, Y, config=ModelConfig(execution_timeout_s=0.2))
    with pytest.raises(inprocess.UnavailableError, match=r"longer than the model's execution timeout, 0\.2 s"):
        ask(server, "slow", 0)
    go_on.set()
    assert ask(server, "slow", 1) == [1]


def test_stop_returns_soon_with_inputs_and_results_kept() -> None:
    kept: list[Array] = []

    def keep(requests: list[Request]) -> list[Any]:
        kept.extend(request["x"] for request in requests)
        return identity(requests)

    # A stop that waited for what is kept would take longer than a test may.
    with inprocess.Server(exit_timeout=3600) as server:
        server.bind("keep", keep, X, Y)
        given = np.arange(1 << 19, dtype=np.float32).reshape(1, -1)
        responses = [next(server.model("keep").infer(inputs={"x": given})) for _ in range(2)]
    del given
    for array in (*kept, *[np.array(response.outputs["y"]) for response in responses]):
        assert np.array_equal(array[0], np.arange(1 << 19, dtype=np.float32))


def test_no_memory_is_lost_over_many_calls(server: inprocess.Server) -> None:
    def sizes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    server.bind("much", identity, X, Y)
    given = np.ones((1, 1 << 18), np.float32)
    model = server.model("much")

    def call(count: int) -> None:
        for _ in range(count):
            for response in model.infer(inputs={"x": given}):
                assert response.outputs["y"].shape is not None

    call(50)
    before = sizes()
    call(300)
    # Every request or response that was not given back would be 1 MiB.
    assert sizes() - before < 100 << 20


EXITS = """
import sys
import numpy as np
from pytriton import inprocess
from pytriton.model_config import Tensor

def infer(requests):
    return [{"y": request["x"]} for request in requests]

async def ainfer(requests):
    return infer(requests)

tensors = [Tensor(name="x", dtype=np.float32, shape=(1,))], [Tensor(name="y", dtype=np.float32, shape=(1,))]
server = inprocess.Server()
server.bind("sync", infer, *tensors)
server.bind("async", ainfer, *tensors)
server.start()
if sys.argv[1] == "used":
    for name in ("sync", "async"):
        (response,) = server.model(name).infer(inputs={"x": np.ones((1, 1), np.float32)})
        assert np.array(response.outputs["y"]).item() == 1
print("leaving")
if sys.argv[1] == "raises":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("how", "code"), [("used", 0), ("unused", 0), ("raises", 3)])
def test_a_process_that_ends_without_stop_ends(how: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS, how], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stdout.strip().endswith("leaving"), done.stderr
    assert done.returncode == code, done.stderr


STUCK = """
import sys
import threading
import time
import numpy as np
from pytriton import inprocess
from pytriton.model_config import Tensor

entered = threading.Event()

def never_returns(requests):
    entered.set()
    while True:
        time.sleep(0.001)

tensors = [Tensor(name="x", dtype=np.float32, shape=(1,))], [Tensor(name="y", dtype=np.float32, shape=(1,))]
server = inprocess.Server(exit_timeout=1)
server.bind("stuck", never_returns, *tensors)
server.start()
responses = server.model("stuck").infer(inputs={"x": np.ones((1, 1), np.float32)})
assert entered.wait(300)
try:
    server.stop()
except inprocess.TimedOutError as error:
    print(error)
sys.exit(5)
"""


def test_a_callable_that_never_returns_keeps_no_process_from_its_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "was not stopped within the exit_timeout of 1 s" in done.stdout, done.stderr
    assert "the inference callable of model 'stuck' (version 1) has not returned" in done.stdout
    assert "in never_returns" in done.stdout
    assert done.returncode == 5, done.stderr


SIGNALS = """
import os
import signal
import sys
import time
import numpy as np
from pytriton import inprocess
from pytriton.model_config import ModelConfig, Tensor

class Alarm(BaseException):
    pass

is_ringing = False

def ring(_, frame):
    # Anywhere in calls(), and never where the program sees to the alarm before; on a busy machine an alarm takes longer
    # than the next one takes to come.
    global is_ringing
    if is_ringing:
        return
    is_ringing = True
    try:
        while frame is not None:
            if frame.f_code is calls.__code__:
                raise Alarm
            frame = frame.f_back
    finally:
        is_ringing = False

def calls():
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 3e-5)
    for _ in range(20):
        next(model.infer(inputs={"x": x}))

# What an alarm interrupts in a destructor is told there.
sys.stderr = open(os.devnull, "w")
x = np.ones((1, 4), np.float32)
tensors = [Tensor(name="x", dtype=np.float32, shape=(-1,))], [Tensor(name="y", dtype=np.float32, shape=(-1,))]
server = inprocess.Server(exit_timeout=30)
model = server.bind("same", lambda requests: [{"y": request["x"]} for request in requests], *tensors)
server.start()
signal.signal(signal.SIGALRM, ring)
interrupted = 0
while interrupted <= 200:
    try:
        calls()
    except Alarm:
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
print(next(model.infer(inputs={"x": x})).final)
server.stop()
print("stopped")
"""


def test_signals_upon_signals_leave_no_request_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["True", "stopped"])
