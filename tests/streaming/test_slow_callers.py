"""Callers who read a stream slower than its model gives it: the model waits for them, or they are told why it ended."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pytriton.client import DecoupledModelClient
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.proxy_backend.protocol.worker import WorkerProtocol
from pytriton.triton import Triton
from support.callables import X
from support.processes import resident_bytes
from support.serving import local_config, running, server_pid
from support.waiting import PATIENCE_S, eventually

ROW = 200
COUNT = 20_000
MILLION = 1_000_000
# What a worker may have sent before it hears of a pause, and what sockets hold, of rows of this size.
MOST_AHEAD = 15_000
BACKLOG = 1 << 18

given: dict[str, int] = {}
ended: list[str] = []
Y = Tensor(name="y", dtype=np.float32, shape=(-1,))


def row(number: int) -> list[dict[str, Any]]:
    return [{"y": np.full((1, ROW), number, np.float32)}]


def count(name: str, requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    for number in range(int(requests[0]["x"].item())):
        given[name] = number + 1
        yield row(number)


async def thin(requests: list[Request]) -> AsyncIterator[Any]:
    for number in range(int(requests[0]["x"].item())):
        yield [{"y": np.full((1, 1), number, np.float32)}]


async def wide(requests: list[Request]) -> AsyncIterator[Any]:
    for result in count("wide", requests):
        yield result


def sync(requests: list[Request]) -> Iterator[Any]:
    yield from count("sync", requests)


def handed_on(requests: list[Request]) -> Any:
    """No asynchronous callable by its looks, as where another library has wrapped one."""
    return counted("handed_on", requests)


async def counted(name: str, requests: list[Request]) -> AsyncIterator[Any]:
    for result in count(name, requests):
        yield result


async def returned(requests: list[Request]) -> Any:
    """An asynchronous callable that gives a generator which is none."""
    return count("returned", requests)


async def hasty(requests: list[Request]) -> AsyncIterator[Any]:
    try:
        for result in count("hasty", requests):
            yield result
    finally:
        ended.append("hasty")


def hasty_sync(requests: list[Request]) -> Iterator[Any]:
    try:
        yield from count("hasty_sync", requests)
    finally:
        ended.append("hasty_sync")


async def boundless(requests: list[Request]) -> AsyncIterator[Any]:
    for result in count("boundless", requests):
        yield result


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    triton = Triton(config=local_config())
    for func in (wide, thin, sync, handed_on, returned, hasty, hasty_sync, boundless):
        config = ModelConfig(decoupled=True, max_batch_size=1, stream_backlog_bytes=BACKLOG)
        if func in (hasty, hasty_sync):
            config.stream_stall_timeout_s = 0.2
        if func is boundless:
            config.stream_backlog_bytes = 0
        triton.bind(func.__name__, func, X, [Y], config=config)
    with running(triton):
        yield triton


@pytest.fixture(autouse=True)
def _fresh() -> None:
    given.clear()
    ended.clear()


def is_paused(name: str) -> bool:
    protocols = (each for each in gc.get_objects() if type(each) is WorkerProtocol)
    return any(hasattr(each, "welcome") and each.welcome.model_name == name and each.paused for each in protocols)


class HttpCaller:
    """Reads the events of `generate_stream` from a socket, when asked to."""

    headers = ""
    host = ""

    def __init__(self, triton: Triton, name: str, value: int) -> None:
        host, _, port = str(triton.http_url).removeprefix("http://").rpartition(":")
        self._socket = socket.socket()
        self._socket.settimeout(PATIENCE_S)
        # Not more than the system insists on.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        self._socket.connect((host, int(port)))
        body = json.dumps({"x": [float(value)]}).encode()
        head = f"POST {self.host}/v2/models/{name}/generate_stream HTTP/1.1\r\nHost: a\r\n{self.headers}"
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._text = b""

    def rows(self) -> Iterator[dict[str, Any]]:
        """The events, each as its JSON; reads no further than to the next of them."""
        while True:
            before, found, rest = self._text.partition(b"\n\n")
            if found:
                self._text = rest
                yield json.loads(before[before.index(b"data: ") + 6 :])
                continue
            if self._text.endswith(b"0\r\n\r\n"):
                return
            more = self._socket.recv(1 << 16)
            assert more, "the connection ended within the stream"
            self._text += more

    def close(self) -> None:
        self._socket.close()


class ExpectingCaller(HttpCaller):
    """One that sends its body without the wait for 100 Continue."""

    headers = "Expect: 100-continue\r\n"


class ProxyingCaller(HttpCaller):
    """One that names the host in the first line, as callers of a proxy do."""

    host = "http://a:80"


class GrpcCaller:
    """Takes the responses of ModelStreamInfer, when asked to."""

    def __init__(self, triton: Triton, name: str, value: int) -> None:
        self._channel = grpc.insecure_channel(str(triton.grpc_url).removeprefix("grpc://"))
        request = self.request(name)
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        tensor.contents.fp32_contents.append(value)
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer(iter([request]))

    def request(self, name: str) -> service_pb2.ModelInferRequest:
        return service_pb2.ModelInferRequest(model_name=name)

    def rows(self) -> Iterator[dict[str, Any]]:
        for response in self._call:
            if response.error_message:
                yield {"error": response.error_message}
            elif raw := response.infer_response.raw_output_contents:
                yield {"y": np.frombuffer(raw[0], np.float32).tolist()}

    def close(self) -> None:
        self._call.cancel()
        self._channel.close()


class ForwardedCaller(GrpcCaller):
    """One whose request goes on to Triton's own front end."""

    def request(self, name: str) -> service_pb2.ModelInferRequest:
        request = super().request(name)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        return request


CALLERS = {"http": HttpCaller, "grpc": GrpcCaller, "forwarded": ForwardedCaller}


@pytest.fixture(params=list(CALLERS))
def caller_of(request: pytest.FixtureRequest) -> Any:
    return CALLERS[request.param]


@pytest.mark.parametrize("name", ["wide", "sync", "handed_on", "returned"])
def test_a_generator_waits_for_its_caller(triton: Triton, caller_of: Any, name: str) -> None:
    caller = caller_of(triton, name, COUNT)
    try:
        numbers = []
        most_ahead = 0
        for found in caller.rows():
            numbers.append(found["y"][0])
            # It reads again when nothing more comes of itself.
            if len(numbers) in (1, COUNT // 4):
                eventually(lambda: is_paused(name))
            most_ahead = max(most_ahead, given[name] - len(numbers))
        assert numbers == list(range(COUNT))
        assert most_ahead < MOST_AHEAD
    finally:
        caller.close()


@pytest.mark.parametrize("caller_type", [ExpectingCaller, ProxyingCaller])
def test_a_generator_waits_for_a_caller_who_asks_in_another_way(triton: Triton, caller_type: type[HttpCaller]) -> None:
    caller = caller_type(triton, "wide", COUNT)
    try:
        eventually(lambda: is_paused("wide") or given.get("wide") == COUNT)
        assert given["wide"] < MOST_AHEAD
        assert [found["y"][0] for found in caller.rows()] == list(range(COUNT))
    finally:
        caller.close()


def test_the_streams_of_others_go_on(triton: Triton, caller_of: Any) -> None:
    slow = caller_of(triton, "wide", COUNT)
    try:
        eventually(lambda: is_paused("wide"))
        with DecoupledModelClient(str(triton.grpc_url), "wide") as client:
            answers = list(client.infer_sample(np.array([300], np.float32)))
        assert [answer["y"][0] for answer in answers] == list(range(300))
        assert is_paused("wide")
    finally:
        slow.close()
    # Its caller has left: nothing waits for it any more.
    eventually(lambda: not is_paused("wide"))


@pytest.mark.parametrize("name", ["hasty", "hasty_sync"])
def test_a_caller_who_reads_nothing_is_told_why_its_stream_has_ended(triton: Triton, caller_of: Any, name: str) -> None:
    caller = caller_of(triton, name, COUNT)
    try:
        eventually(lambda: ended == [name])
        assert given[name] < COUNT
        *rows, last = caller.rows()
        assert [found["y"][0] for found in rows] == list(range(len(rows)))
        assert f"the caller has taken less than {BACKLOG // 16} bytes of the stream in 200 ms" in last["error"]
        assert "stream_stall_timeout_s" in last["error"]
    finally:
        caller.close()
    # Its worker serves the next one.
    with DecoupledModelClient(str(triton.grpc_url), name) as client:
        assert [answer["y"][0] for answer in client.infer_sample(np.array([3], np.float32))] == [0, 1, 2]


@pytest.mark.parametrize("name", ["hasty", "hasty_sync"])
def test_a_caller_who_trickles_is_one_who_reads_nothing(triton: Triton, caller_of: Any, name: str) -> None:
    # So many that the generator cannot have sent them all before it hears of the pause, however late that is.
    caller = caller_of(triton, name, MILLION)
    try:
        rows = caller.rows()
        # On a busy machine, the pause may be over before it is seen: the caller took too little in its time.
        eventually(lambda: bool(ended) or is_paused(name))
        last: dict[str, Any] = {}
        while not ended:
            last = next(rows)
            # Twice and more within the time, and never as much as it takes.
            time.sleep(0.07)
        assert given[name] < MILLION
        for row in rows:
            last = row
        assert "bytes of the stream in 200 ms" in last["error"]
    finally:
        caller.close()


def test_a_model_may_have_no_bound(triton: Triton) -> None:
    caller = HttpCaller(triton, "boundless", COUNT)
    try:
        eventually(lambda: given.get("boundless") == COUNT)
        assert [found["y"][0] for found in caller.rows()] == list(range(COUNT))
    finally:
        caller.close()


@pytest.mark.soak
def test_a_million_responses_to_a_slow_caller_leave_the_memory_of_the_server_flat(
    triton: Triton, caller_of: Any
) -> None:
    pid = server_pid(triton)
    caller = caller_of(triton, "thin", MILLION)
    try:
        sizes = []
        for number, found in enumerate(caller.rows()):
            assert np.ravel(found["y"])[0] == number
            if number % 1000 == 0:
                # The model gives about twice as many meanwhile.
                time.sleep(0.02)
            if number % 50_000 == 0:
                sizes.append(resident_bytes(pid))
        print("resident MiB", [size >> 20 for size in sizes])
        # The first ones fill what is kept for a stream.
        assert max(sizes[2:]) - sizes[2] < 32 << 20
    finally:
        caller.close()
