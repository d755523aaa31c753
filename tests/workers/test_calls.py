"""Calls of workers into the server that they serve."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.proxy_backend.errors import ArenaFullError, CallFailedError, ConnectionLostError
from pytriton.proxy_backend.transport.calls import Call, CallResult, Calls
from pytriton.proxy_backend.transport.connection import Connection
from pytriton.proxy_backend.wire.layout import CAPABILITIES, Capability, ErrorCode
from pytriton.proxy_backend.wire.response import ResponseData, ResponseWriter
from pytriton.triton import Triton
from support.serving import arena_mappings, local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]
F4 = np.dtype("float32")
SINGLE = ModelConfig(batching=False)


def vector(name: str, dtype: Any = F4) -> Tensor:
    return Tensor(name=name, dtype=dtype, shape=(-1,))


def numbers(*values: float) -> Array:
    return np.array(values, F4)


class Gate:
    """A callable that waits until it may go on, or until nobody wants its answer any more."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)

    def __call__(self, requests: list[Request]) -> list[dict[str, Array]]:
        self.entered.release()
        eventually(lambda: self.leave.acquire(blocking=False) or all(request.is_cancelled() for request in requests))
        return [{"y": request["x"]} for request in requests]

    def wait(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_S)


class Server:
    """A server with models that call and are called."""

    def __init__(self, home: Path, traces: Path) -> None:
        trace = [f"triton,file={traces / 'trace.json'}", "triton,log-frequency=1", "rate=1", "level=TIMESTAMPS"]
        self.triton = Triton(config=local_config(allow_metrics=True, metrics_port=0, trace_config=trace))
        self.traces = traces
        self.gate = Gate()
        self.home = home
        self._calls: Calls | None = None
        bind = self.triton.bind
        bind("double", double, inputs=[vector("x")], outputs=[vector("y"), vector("n")], config=SINGLE)
        bind("shout", shout, inputs=[vector("x", bytes)], outputs=[vector("y", bytes)], config=SINGLE)
        stream = ModelConfig(batching=False, decoupled=True)
        bind("count", count, inputs=[vector("x")], outputs=[vector("y")], config=stream)
        bind("gate", self.gate, inputs=[vector("x")], outputs=[vector("y")], config=SINGLE)
        bind("through", self.through, inputs=[vector("x")], outputs=[vector("y")], config=SINGLE)
        bind("again", self.again, inputs=[vector("x")], outputs=[vector("y")], config=SINGLE)

    def endpoint(self, model: str) -> Path:
        [path] = self.home.rglob(f"{model}.1.sock")
        return path

    @property
    def calls(self) -> Calls:
        """One connection, which all tests may use."""
        if self._calls is None:
            self._calls = Calls(self.endpoint("double"), "test")
        return self._calls

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()

    def through(self, requests: list[Request]) -> list[dict[str, Array]]:
        called = [self.calls.infer("double", {"x": request["x"]}, ["y"]) for request in requests]
        return [{"y": answer_of(call).outputs["y"] + 1} for call in called]

    def again(self, requests: list[Request]) -> list[dict[str, Array]]:
        """Call the model itself, whose only worker is busy with the call."""
        [request] = requests
        if request["x"][0] == 0:
            return [{"y": request["x"]}]
        call = self.calls.infer("again", {"x": numbers(0)})
        try:
            call.result(0.2)
        except TimeoutError:
            return [{"y": numbers(-1)}]
        raise AssertionError("somebody has answered")


def double(requests: list[Request]) -> list[dict[str, Array]]:
    if any((request["x"] == 13).any() for request in requests):
        raise ValueError("not thirteen")
    return [{"y": request["x"] * 2, "n": np.array([request["x"].sum()], F4)} for request in requests]


def shout(requests: list[Request]) -> list[dict[str, Array]]:
    return [{"y": np.char.upper(request["x"].astype(bytes)).astype(object)} for request in requests]


def count(requests: list[Request]) -> Iterator[list[dict[str, Array]]]:
    """Count up to the number in the request; a negative one fails on the way."""
    [request] = requests
    for number in range(abs(int(request["x"][0]))):
        yield [{"y": numbers(number)}]
    if request["x"][0] < 0:
        raise ValueError("below zero")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with short_home() as home:
        made = Server(home, tmp_path_factory.mktemp("traces"))
        with running(made.triton):
            yield made
            made.close()


@pytest.fixture(autouse=True)
def patient_greetings(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("call_connection", "connection"):
        monkeypatch.setattr(f"pytriton.proxy_backend.transport.{module}.GREETING_TIMEOUT_S", PATIENCE_S)


def answer_of(call: Call) -> CallResult:
    return call.result(PATIENCE_S)


def ask(server: Server, model: str, x: Array, *outputs: str, **options: Any) -> CallResult:
    return answer_of(server.calls.infer(model, {"x": x}, outputs, **options))


def error_of(result: CallResult) -> CallFailedError:
    assert result.error is not None
    assert (result.outputs, result.final) == ({}, True)
    return result.error


# ---- inference -------------------------------------------------------------------------------------------------------


def test_inference(server: Server) -> None:
    error, outputs, parameters, final, _ = ask(server, "double", np.arange(5, dtype=F4))
    assert (error, parameters, final) == (None, {}, True)
    assert outputs.keys() == {"y", "n"}
    np.testing.assert_array_equal(outputs["y"], np.arange(5, dtype=F4) * 2)
    assert outputs["n"].tolist() == [10]
    assert ask(server, "double", np.arange(5, dtype=F4), "n", version=1).outputs.keys() == {"n"}
    strings = np.array([b"a", b"", b"\0b"], object)
    assert ask(server, "shout", strings).outputs["y"].tolist() == [b"A", b"", b"\0B"]
    assert ask(server, "double", np.empty(0, F4), "y").outputs["y"].tolist() == []


def test_a_callable_that_calls(server: Server) -> None:
    with ModelClient(str(server.triton.http_url), "through") as client:
        assert client.infer_sample(numbers(1, 2))["y"].tolist() == [3, 5]


def test_calls_from_many_threads_with_large_tensors(server: Server) -> None:
    wrong: list[object] = []

    def call(seed: int) -> None:
        for size in (1, 300_000, 7, 1_000_000):
            x = np.full(size, seed, F4)
            result = ask(server, "double", x, "y")
            if result.error is not None or not (result.outputs["y"] == 2 * seed).all():
                wrong.append(result)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_cannot_be_inferred(server: Server) -> None:
    x = numbers(1)
    start = "Model {} - Error when running inference: "
    error = error_of(ask(server, "double", numbers(13)))
    assert "not thirteen" in str(error)
    assert str(error_of(ask(server, "nobody", x))).startswith(start.format("nobody"))
    assert str(error_of(ask(server, "double", x, version=7))).startswith(start.format("double"))
    error = error_of(answer_of(server.calls.infer("double", {"other": x})))
    assert "unexpected inference input 'other'" in str(error)
    error = error_of(ask(server, "double", x, "nothing"))
    assert "unexpected inference output 'nothing'" in str(error)
    error = error_of(ask(server, "double", np.array([1], np.int64)))
    assert "data-type is 'INT64', but model 'double' expects 'FP32'" in str(error)
    error = error_of(ask(server, "count", x))
    assert "Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls" in str(error)
    assert error.code == ErrorCode.INTERNAL
    # A request that was written in vain takes nothing from the next.
    with pytest.raises(TypeError, match="no counterpart"):
        server.calls.infer("double", {"x": np.zeros(2, complex)})
    assert ask(server, "double", x, "y").outputs["y"].tolist() == [2]


def test_streams(server: Server) -> None:
    results = list(server.calls.infer("count", {"x": numbers(3)}, stream=True))
    assert [result.outputs["y"].tolist() for result in results if result.outputs] == [[0], [1], [2]]
    assert [result.final for result in results] == [False] * (len(results) - 1) + [True]
    results = list(server.calls.infer("count", {"x": numbers(0)}, stream=True))
    assert [(result.error, result.outputs, result.final) for result in results] == [(None, {}, True)]
    results = list(server.calls.infer("count", {"x": numbers(-2)}, stream=True))
    assert [result.outputs["y"].tolist() for result in results if result.outputs] == [[0], [1]]
    assert [str(result.error).count("below zero") for result in results if result.error] == [1]
    # A model that is not decoupled, too.
    [result] = server.calls.infer("double", {"x": numbers(4)}, stream=True)
    assert (result.final, result.outputs["y"].tolist()) == (True, [8])
    call = server.calls.infer("double", {"x": numbers(4)})
    answer_of(call)
    with pytest.raises(StopIteration):
        call.result()


def test_a_stream_that_nobody_reads_for_a_while(server: Server) -> None:
    """More answers than the socket has room for, and for longer than the proxy backend waits for room."""
    answers, waits, came = 5000, threading.Event(), queue.SimpleQueue[CallResult]()

    def read(result: CallResult) -> None:
        came.put(result)
        waits.wait(PATIENCE_S)

    calls = Calls(server.endpoint("double"), "slow")
    calls.infer("count", {"x": numbers(answers)}, stream=True, on_response=read)
    other = calls.infer("double", {"x": numbers(4)})
    came.get(timeout=PATIENCE_S)
    time.sleep(6)
    waits.set()
    left = [came.get(timeout=PATIENCE_S) for _ in range(answers)]
    assert [result.outputs["y"][0] for result in left[:-1]] == [*range(1, answers)]
    assert (left[-1].error, left[-1].final) == (None, True)
    assert answer_of(other).outputs["y"].tolist() == [8]
    calls.close()


def test_calls_in_an_event_loop(server: Server) -> None:
    async def main() -> list[float]:
        async def total(number: int) -> float:
            stream = server.calls.infer("count", {"x": numbers(number)}, stream=True)
            return sum([float(result.outputs["y"][0]) async for result in stream if result.outputs])

        return await asyncio.gather(*[total(number) for number in range(20)])

    assert asyncio.run(main()) == [sum(range(number)) for number in range(20)]


def test_answers_that_are_passed_on(server: Server) -> None:
    came: list[CallResult] = []
    done = threading.Event()

    def take(result: CallResult) -> None:
        came.append(result)
        if result.final:
            done.set()
            raise RuntimeError("which stops nothing")

    server.calls.infer("count", {"x": numbers(5)}, stream=True, on_response=take)
    assert done.wait(PATIENCE_S)
    assert [result.outputs["y"].tolist() for result in came if result.outputs] == [[n] for n in range(5)]
    assert ask(server, "double", numbers(1), "y").outputs["y"].tolist() == [2]


def test_outputs_that_are_kept(server: Server) -> None:
    """Memory lasts as long as a view of it, and comes back then."""
    calls = Calls(server.endpoint("double"), "keeper")
    kept = [answer_of(calls.infer("double", {"x": np.full(500_000, n, F4)}, ["y"])).outputs["y"] for n in range(8)]
    assert [float(array[-1]) for array in kept] == [2.0 * n for n in range(8)]
    last = kept[-1][-3:]
    kept.clear()
    gc.collect()
    again = answer_of(calls.infer("double", {"x": np.zeros(3_000_000, F4)}, ["y"])).outputs["y"]
    assert last.tolist() == [14, 14, 14]
    calls.close()
    assert (last.tolist(), float(again.sum())) == ([14, 14, 14], 0)
    with pytest.raises(ConnectionLostError, match="no calls into the server any more"):
        calls.infer("double", {"x": numbers(1)})


# ---- calls that do not end by themselves -----------------------------------------------------------------------------


def test_a_call_into_itself_ends_by_its_timeout(server: Server) -> None:
    with ModelClient(str(server.triton.http_url), "again") as client:
        assert client.infer_sample(numbers(1))["y"].tolist() == [-1]
        assert client.infer_sample(numbers(0))["y"].tolist() == [0]


def test_a_call_that_is_cancelled(server: Server) -> None:
    call = server.calls.infer("gate", {"x": numbers(1)})
    server.gate.wait()
    call.cancel()
    answer_of(call)
    call.cancel()  # what is done already


def test_a_caller_that_is_killed(server: Server) -> None:
    before = len(arena_mappings(server_pid(server.triton)))
    program = f"""
import numpy as np
from pathlib import Path
from pytriton.proxy_backend.transport.calls import Calls
calls = Calls(Path({str(server.endpoint("double"))!r}), "victim")
calls.metric(calls.metric_family("victims", "those", 0), {{}})
calls.infer("gate", {{"x": np.ones(1_000_000, np.float32)}})
calls.infer("count", {{"x": np.full(1, 100_000, np.float32)}}, stream=True)
print("called", flush=True)
input()
"""
    victim = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "called\n"
        server.gate.wait()
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    # Its calls are cancelled, or the gate would not open; and its memory goes.
    eventually(lambda: len(arena_mappings(server_pid(server.triton))) <= before)
    eventually(lambda: "victims" not in metrics_page(server))
    assert ask(server, "double", numbers(1), "y").outputs["y"].tolist() == [2]


def test_a_target_that_is_unloaded_while_it_is_called(server: Server) -> None:
    call = server.calls.infer("gate", {"x": numbers(5)})
    server.gate.wait()
    server.calls.unload_model("gate")
    eventually(lambda: not server.calls.is_model_ready("gate"))
    assert "is not ready" in str(error_of(ask(server, "gate", numbers(1))))
    server.gate.leave.release()
    assert answer_of(call).outputs["y"].tolist() == [5]
    server.calls.load_model("gate")
    assert server.calls.is_model_ready("gate", 1)
    call = server.calls.infer("gate", {"x": numbers(6)})
    server.gate.wait()
    server.gate.leave.release()
    assert answer_of(call).outputs["y"].tolist() == [6]


def own_model(server: Server, name: str, settings: str = "", **configuration: Any) -> Path:
    """Have Triton load a model with our backend, which nobody serves; returns its socket."""
    return load_own(server.calls, server.home, name, settings, **configuration)


def load_own(calls: Calls, home: Path, name: str, settings: str = "", **configuration: Any) -> Path:
    endpoint = home / f"{name}.sock"
    side_file = f"format = 1\nendpoint = {endpoint}\nbatching = false\n{settings}"
    config = {
        "name": name,
        "backend": "pytriton",
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
        **configuration,
    }
    calls.load_model(name, {"file:1/pytriton.conf": side_file.encode()}, json.dumps(config))
    return endpoint


def test_an_arena_without_room(server: Server) -> None:
    calls = Calls(own_model(server, "small", "arena_budget_bytes = 1048576\n"), "small")
    with pytest.raises(ArenaFullError, match="arena_budget_bytes"):
        calls.infer("double", {"x": np.zeros(1_000_000, F4)})

    def wait_for_room() -> bool:
        """Keep outputs while others are waited for; false where that took as long as they may wait."""
        kept = answer_of(calls.infer("double", {"x": np.zeros(200_000, F4)}, ["y"])).outputs["y"]
        came: list[CallResult] = []
        calls.infer("double", {"x": np.zeros(200_000, F4)}, ["y"], on_response=came.append)
        # Others go on meanwhile.
        assert answer_of(calls.infer("shout", {"x": np.array([b"a"], object)})).outputs["y"].tolist() == [b"A"]
        waits = not came
        del kept
        gc.collect()
        [result] = eventually(lambda: came)
        if "had no room" in str(result.error):
            return False
        assert (waits, result.error, result.outputs["y"].shape) == (True, None, (200_000,))
        return True

    eventually(wait_for_room)
    calls.close()
    server.calls.unload_model("small")


def test_an_endpoint_that_comes_and_goes_while_it_is_called(server: Server) -> None:
    for _ in range(5):
        calls = [Calls(own_model(server, "fleeting"), f"caller {number}") for number in range(2)]
        ended = [threading.Event() for _ in calls]

        def call(caller: Calls, end: threading.Event) -> None:
            try:
                while True:
                    result = answer_of(caller.infer("double", {"x": numbers(1)}, ["y"]))
                    assert result.error is None or result.error.code == ErrorCode.UNAVAILABLE
            except ConnectionLostError:
                end.set()

        threads = [threading.Thread(target=call, args=pair) for pair in zip(calls, ended, strict=True)]
        for thread in threads:
            thread.start()
        server.calls.unload_model("fleeting")
        for thread in threads:
            thread.join()
        assert all(end.is_set() for end in ended)
        for caller in calls:
            caller.close()


# ---- models, metrics, the log ----------------------------------------------------------------------------------------


def test_models(server: Server) -> None:
    assert server.calls.is_model_ready("double")
    assert server.calls.is_model_ready("double", 1)
    assert not server.calls.is_model_ready("nobody")
    assert not server.calls.is_model_ready("double", 7)
    with pytest.raises(CallFailedError, match="failed to load 'nobody'"):
        server.calls.load_model("nobody")
    own_model(server, "mine")
    assert server.calls.is_model_ready("mine")
    with pytest.raises(CallFailedError, match=r"got 'colour = red'"):
        own_model(server, "other", "colour = red\n")
    # A load error of any length arrives whole.
    with pytest.raises(CallFailedError) as caught:
        own_model(server, "other", f"colour{'r' * 20_000} = red\n")
    assert f"colour{'r' * 20_000}" in str(caught.value)
    server.calls.unload_model("mine", dependents=True)
    eventually(lambda: not server.calls.is_model_ready("mine"))
    with pytest.raises(ValueError, match="too long"):
        server.calls.unload_model("n" * 5000)


def metrics_page(server: Server) -> str:
    with urllib.request.urlopen(str(server.triton.metrics_url), timeout=PATIENCE_S) as page:
        return str(page.read().decode())


def test_metrics(server: Server) -> None:
    calls = Calls(server.endpoint("double"), "meter")
    family = calls.metric_family("pigs", "how many fly", 0)
    flying = calls.metric(family, {"where": "above"})
    calls.metric_increment(flying, 2)
    calls.metric_increment(flying, 0.5)
    assert calls.metric_value(flying) == 2.5
    with pytest.raises(CallFailedError):
        calls.metric_increment(flying, -1)
    with pytest.raises(CallFailedError):
        calls.metric_set(flying, 1)
    height = calls.metric(calls.metric_family("height", "of flight", 1), {})
    calls.metric_set(height, -3)
    calls.metric_increment(height, -0.25)
    assert calls.metric_value(height) == -3.25
    speeds = calls.metric_family("speed", "of flight", 2)
    speed = calls.metric(speeds, {}, [1, 10.5])
    for value in (0.5, 5, 50):
        calls.metric_observe(speed, value)
    with pytest.raises(CallFailedError):
        calls.metric_value(speed)
    page = metrics_page(server)
    assert "# HELP pigs how many fly" in page
    assert 'pigs{where="above"} 2.5' in page
    assert "height -3.25" in page
    assert 'speed_bucket{le="10.5"} 2' in page
    # Another one of the same name, which is another value of the same family.
    twin = calls.metric(calls.metric_family("pigs", "how many fly", 0), {"where": "below"})
    calls.metric_increment(twin, 1)
    assert 'pigs{where="below"} 1' in metrics_page(server)
    for wrong in (0, 77):
        with pytest.raises(CallFailedError, match="there is no such metric"):
            calls.metric_increment(wrong, 1)
    with pytest.raises(CallFailedError, match="there is no such metric family"):
        calls.metric(77, {})
    with pytest.raises(CallFailedError, match="kind"):
        calls.metric_family("odd", "", 7)
    calls.discard_metric(speed)
    calls.discard_metric_family(speeds)
    calls.discard_metric(77)  # told in our log alone
    eventually(lambda: "speed" not in metrics_page(server))
    calls.close()
    eventually(lambda: "pigs" not in metrics_page(server))


def test_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        long = "x" * 10_000
        for level, text in enumerate(["told", "warned of", "broken", "hidden"]):
            server.calls.log(level, f"what was {text} {long}", "my_model.py", 77)
        server.calls.log(0, "that is the end")
        server.calls.log(9, "nobody has such a level")
        eventually(lambda: "that is the end" in caplog.text)
    records = [record for record in caplog.records if "my_model.py:77" in record.getMessage()]
    assert [record.levelname for record in records] == ["INFO", "WARNING", "ERROR"]
    assert all(long in record.getMessage() for record in records)


# ---- requests that go back to the scheduler --------------------------------------------------------------------------


def test_a_request_that_is_rescheduled(server: Server) -> None:
    endpoint = own_model(server, "iterating", sequence_batching={"iterative_sequence": True})
    plain = own_model(server, "plain")
    capabilities = CAPABILITIES | Capability.RESCHEDULE
    worker = Connection(endpoint, "worker", capabilities=capabilities)
    assert worker.welcome.capabilities & Capability.RESCHEDULE
    call = server.calls.infer("iterating", {"x": numbers(3)})
    for left in (2, 1, 0):
        batch = worker.receive()
        assert batch is not None
        assert batch.load_inputs(0)["x"].tolist() == [3]
        answer = ResponseData(0, reschedule=True) if left else ResponseData(0, {"y": numbers(9)})
        worker.respond(batch.number, ResponseWriter().lay_out([answer]), done=True)
        del batch
    assert answer_of(call).outputs["y"].tolist() == [9]
    worker.close()
    # Triton refuses it where there is no such scheduler: the caller is told.
    worker = Connection(plain, "worker", capabilities=capabilities)
    call = server.calls.infer("plain", {"x": numbers(3)})
    batch = worker.receive()
    assert batch is not None
    worker.respond(batch.number, ResponseWriter().lay_out([ResponseData(0, reschedule=True)]), done=True)
    assert "RESCHEDULE" in str(error_of(answer_of(call)))
    worker.close()
    for name in ("iterating", "plain"):
        server.calls.unload_model(name)


def test_a_stream_that_goes_on_after_it_was_rescheduled(server: Server) -> None:
    endpoint = own_model(
        server, "streaming", "decoupled = true\n", sequence_batching={"iterative_sequence": True},
        model_transaction_policy={"decoupled": True},
    )  # fmt: skip
    worker = Connection(endpoint, "worker", capabilities=CAPABILITIES | Capability.RESCHEDULE)
    call = server.calls.infer("streaming", {"x": numbers(3)}, stream=True)
    for left in (2, 1, 0):
        batch = worker.receive()
        assert batch is not None
        more = ResponseData(0, {"y": numbers(left)}, final=False)
        # In one record, and in two.
        last = ResponseData(0, reschedule=True, final=False) if left else ResponseData(0, empty=True)
        if left == 2:
            worker.respond(batch.number, ResponseWriter().lay_out([more, last]), done=True)
        else:
            worker.respond(batch.number, ResponseWriter().lay_out([more]), done=False)
            worker.respond(batch.number, ResponseWriter().lay_out([last]), done=True)
        del batch
    results = list(call)
    assert [result.outputs["y"].tolist() for result in results if result.outputs] == [[2], [1], [0]]
    assert [result.error for result in results if result.error] == []
    worker.close()
    server.calls.unload_model("streaming")


def test_a_stream_that_goes_on_after_an_error(server: Server) -> None:
    endpoint = own_model(server, "faltering", "decoupled = true\n", model_transaction_policy={"decoupled": True})
    worker = Connection(endpoint, "worker", capabilities=CAPABILITIES | Capability.CONTINUES)
    assert worker.welcome.capabilities & Capability.CONTINUES
    for continues in (True, False):
        call = server.calls.infer("faltering", {"x": numbers(3)}, stream=True)
        batch = worker.receive()
        assert batch is not None
        answers = [
            ResponseData(0, error="one of them", code=ErrorCode.NOT_FOUND, final=False, continues=continues),
            ResponseData(0, {"y": numbers(1)}, final=False),
            ResponseData(0, empty=True),
        ]
        worker.respond(batch.number, ResponseWriter().lay_out(answers), done=True)
        del batch
        first, *others = call
        assert (str(first.error), first.error.code if first.error else 0) == ("one of them", ErrorCode.NOT_FOUND)
        # What comes after an error that is the last is dropped.
        assert [result.outputs["y"].tolist() for result in others if result.outputs] == ([[1]] if continues else [])
        assert (first.final, [result.final for result in others]) == (
            (False, [False, True]) if continues else (True, [])
        )
    worker.close()
    server.calls.unload_model("faltering")


# ---- traces ----------------------------------------------------------------------------------------------------------


def test_a_call_is_traced_with_the_request_for_which_it_is_made(server: Server) -> None:
    endpoint = own_model(server, "asks")
    worker = Connection(endpoint, "worker")
    calls = Calls(endpoint, "worker")

    def serve() -> None:
        """Call for the request, for one that is not there, and for no batch."""
        batch = worker.receive()
        assert batch is not None
        for parent in ((batch.number, 0), (batch.number, 1), (batch.number + 9, 0)):
            call = calls.infer("shout", {"x": np.array([b"a"], object)}, parent=parent)
            assert answer_of(call).outputs["y"].tolist() == [b"A"]
        answer = ResponseData(0, {"y": batch.load_inputs(0)["x"]})
        worker.respond(batch.number, ResponseWriter().lay_out([answer]), done=True)

    serving = threading.Thread(target=serve)
    serving.start()
    with ModelClient(str(server.triton.http_url), "asks") as client:
        assert client.infer_sample(numbers(4))["y"].tolist() == [4]
    serving.join()
    worker.close()
    calls.close()
    server.calls.unload_model("asks")

    def traces() -> dict[int, tuple[str, int | None]]:
        """The model and the parent of each trace that is written."""
        found = {}
        for path in server.traces.glob("trace.json*"):
            try:
                entries = json.loads(path.read_text())
            except ValueError:
                continue  # being written
            found.update({e["id"]: (e["model_name"], e.get("parent_id")) for e in entries if "model_name" in e})
        return found

    # They are written one by one, the parent last.
    eventually(lambda: {"asks", "shout"} <= {name for name, _ in traces().values()})
    [parent] = [number for number, (name, _) in traces().items() if name == "asks"]
    assert [above for name, above in traces().values() if name == "shout"] == [parent]


# ---- peers that are not what they should be --------------------------------------------------------------------------


def test_nobody_to_call(tmp_path: Path, server: Server) -> None:
    with pytest.raises(FileNotFoundError):
        Calls(tmp_path / "nobody", "test")


def test_the_end_of_the_endpoint(server: Server) -> None:
    calls = Calls(own_model(server, "passing"), "test")
    call = calls.infer("gate", {"x": numbers(1)})
    server.gate.wait()
    server.calls.unload_model("passing")
    error = error_of(answer_of(call))
    assert error.code == ErrorCode.UNAVAILABLE
    assert "the call was lost" in str(error)
    with pytest.raises(ConnectionLostError):
        calls.infer("double", {"x": numbers(1)})
    calls.close()
