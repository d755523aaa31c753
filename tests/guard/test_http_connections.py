"""How the guard spreads HTTP connections over the front end's threads, and what it keeps in the epoll of each."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.faults.front_end.poisons import post
from support.faults.raw_http import connect, read_answer
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

NUMBERS = 4_000_000
# Closes a connection with a reset.
AT_ONCE = struct.pack("ii", 1, 0)


class Gate:
    """Holds requests for one number until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, requests: Any) -> Any:
        if requests[0]["x"][0] < 0:
            self.entered.set()
            assert self.opened.wait(PATIENCE_S)
        return [{"y": request["x"]} for request in requests]

    def close(self) -> None:
        self.entered.clear()
        self.opened.clear()


GATE = Gate()


def serving(threads: int) -> Triton:
    triton = Triton(config=local_config(http_thread_count=threads))
    x, y = (Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in "xy")
    triton.bind("gate", GATE, [x], [y], config=ModelConfig(batching=False))
    triton.bind(
        "many", lambda _: [{"y": np.arange(NUMBERS, dtype=np.float32)}], [x], [y], config=ModelConfig(batching=False)
    )
    return triton


@pytest.fixture(scope="module")
def one_thread() -> Iterator[Triton]:
    with short_home(), running(serving(1)) as triton:
        yield triton


def ask_for(number: float, model: str = "gate") -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [number]}
    outputs = [{"name": "y", "parameters": {"binary_data": model == "many"}}]
    body = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    return post(body, path=f"/v2/models/{model}/infer")


def read_number(connection: socket.socket) -> float:
    status, body = read_answer(connection)
    assert status == 200, body
    return float(json.loads(body)["outputs"][0]["data"][0])


def connections_by_thread(triton: Triton) -> list[int]:
    """Return how many HTTP connections each thread waits for: each has an epoll instance of its own."""
    assert triton.http_url is not None
    port = int(triton.http_url.rpartition(":")[2])
    sockets = {
        f"socket:[{fields[9]}]"
        for fields in (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        if int(fields[1].partition(":")[2], 16) == port and fields[3] == "01"
    }
    process = Path(f"/proc/{server_pid(triton)}")
    names = {link.name: os.readlink(link) for link in (process / "fd").iterdir()}
    counts = []
    for descriptor, name in names.items():
        if name == "anon_inode:[eventpoll]":
            watched = re.findall(r"(?m)^tfd: *(\d+)", (process / "fdinfo" / descriptor).read_text())
            counts.append(sum(names.get(other) in sockets for other in watched))
    return [count for count in counts if count > 0]


def test_connections_are_spread_over_the_threads() -> None:
    with ExitStack() as stack:
        stack.enter_context(short_home())
        triton = stack.enter_context(running(serving(4)))
        # One after the other, each after an answer: to the front end all of its threads are idle.
        for _ in range(40):
            connection = stack.enter_context(connect(triton))
            connection.sendall(ask_for(1))
            assert read_number(connection) == 1
        counts = connections_by_thread(triton)
        # Those of the watch over the server come and go.
        assert len(counts) == 4
        assert min(counts) >= 8, counts


def test_a_connection_stays_in_the_epoll_while_its_request_is_served(one_thread: Triton) -> None:
    GATE.close()
    with ExitStack() as stack:
        stack.callback(GATE.opened.set)
        connections = [stack.enter_context(connect(one_thread)) for _ in range(20)]
        for connection in connections:
            connection.sendall(ask_for(-1))
        # By itself the front end removes each.
        eventually(lambda: sum(connections_by_thread(one_thread)) >= len(connections))
        assert GATE.entered.wait(PATIENCE_S)
        GATE.opened.set()
        for connection in connections:
            assert read_number(connection) == -1


def test_a_response_that_the_system_does_not_take_at_once(one_thread: Triton) -> None:
    with ExitStack() as stack:
        slow, other = (stack.enter_context(connect(one_thread)) for _ in range(2))
        for _ in range(3):
            slow.sendall(ask_for(1, "many"))
            # Nobody reads it yet: the thread serves others meanwhile.
            assert slow.recv(1, socket.MSG_PEEK)
            other.sendall(ask_for(2))
            assert read_number(other) == 2
            head, body = read_binary(slow)
            assert head.startswith(b"HTTP/1.1 200 OK")
            np.testing.assert_array_equal(np.frombuffer(body, np.float32), np.arange(NUMBERS, dtype=np.float32))
            slow.sendall(ask_for(3))
            assert read_number(slow) == 3


def read_binary(connection: socket.socket) -> tuple[bytes, bytes]:
    """Read one answer; return its head, and the binary part of its body."""
    data = bytearray()
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    sizes = re.search(rb"(?is)inference-header-content-length: *(\d+).*content-length: *(\d+)", head)
    assert sizes is not None, head
    parts = [body]
    while (left := int(sizes[2]) - sum(map(len, parts))) > 0:
        parts.append(connection.recv(min(left, 1 << 20)))
    return head, b"".join(parts)[int(sizes[1]) :]


def test_a_caller_that_asks_again_before_it_has_its_answer(one_thread: Triton) -> None:
    GATE.close()
    with ExitStack() as stack:
        stack.callback(GATE.opened.set)
        hasty, other = (stack.enter_context(connect(one_thread)) for _ in range(2))
        hasty.sendall(ask_for(-1))
        assert GATE.entered.wait(PATIENCE_S)
        hasty.sendall(ask_for(4) + ask_for(5))
        # The thread has seen that something came, and does not look at it again and again.
        assert read_status(other, b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n") == 200
        GATE.opened.set()
        data = b""
        while len(numbers := re.findall(rb'"data":\[([-\d.]+)\]', data)) < 3:
            data += (part := hasty.recv(65536))
            assert part, data
        assert [float(number) for number in numbers] == [-1, 4, 5]


def read_status(connection: socket.socket, request: bytes) -> int:
    connection.sendall(request)
    return read_answer(connection)[0]


@pytest.mark.parametrize("reset", [False, True])
def test_callers_that_leave_before_they_have_their_answer(one_thread: Triton, reset: bool) -> None:
    for _ in range(5):
        GATE.close()
        with ExitStack() as stack:
            stack.callback(GATE.opened.set)
            for _ in range(10):
                connection = connect(one_thread)
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                connection.sendall(ask_for(-1))
                assert GATE.entered.wait(PATIENCE_S)
                connection.close()
            # Those that come next get the same numbers in the server.
            GATE.opened.set()
            for number in range(20):
                with connect(one_thread) as connection:
                    connection.sendall(ask_for(number))
                    assert read_number(connection) == number
    # The server notices that they have left when it answers.
    eventually(lambda: sum(connections_by_thread(one_thread)) <= 5)
