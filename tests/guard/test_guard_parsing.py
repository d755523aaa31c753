"""The guard and the server's own parser see the same requests, and the same memory, however a caller sends them."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import GuardConfig, Triton
from support.callables import identity
from support.faults.raw_http import ask, connect, read_answer
from support.serving import local_config, running, short_home
from support.waiting import eventually

INFER = b"POST /v2/models/same/infer HTTP/1.1\r\nHost: h\r\n"
GZIP = b"Content-Encoding: gzip\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def serving(guard: GuardConfig, **settings: Any) -> Iterator[Triton]:
    """A server with little memory, or with one thread for HTTP."""
    x, y = (Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in "xy")
    with short_home():
        triton = Triton(config=local_config(**settings), guard=guard)
        triton.bind("same", identity, [x], [y], config=ModelConfig(batching=False))
        with running(triton):
            yield triton


@pytest.fixture(scope="module")
def small() -> Iterator[Triton]:
    """A server that takes 4 MB in flight, and lets compressed requests leave 1 MB behind."""
    with serving(GuardConfig(max_in_flight_bytes=4_000_000)) as triton:
        yield triton


def with_length(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def is_well(triton: Triton) -> bool:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}).encode()
    status, text = ask(triton, INFER + with_length(body))
    return status == 200 and '"data":[1.0,2.0]' in text


def test_a_path_in_pieces_is_not_another_path() -> None:
    # The server's parser takes the byte behind a piece into the path. Here that is a question mark, left by the request
    # before, so the server would see /generate, whose body is JSON to its end, where the guard sees /infer.
    with serving(GuardConfig(), http_thread_count=1) as triton:
        begin = b"POST http://" + b"a" * 300 + b"/v2/models/same/generate"
        deep = b'{"a":' + b"[" * 12_000_000
        rest = b"x/infer HTTP/1.1\r\nHost: h\r\nInference-Header-Content-Length: 0\r\n" + with_length(deep)
        for _ in range(5):
            with connect(triton) as connection:
                connection.sendall(b"GET /v2/health/live" + b"?" * 600 + b" HTTP/1.1\r\n\r\n")
                assert read_answer(connection)[0] == 200
                connection.sendall(begin)
                # The server has read it once it has answered another one behind it.
                assert is_well(triton)
                connection.sendall(rest)
                assert read_answer(connection)[0] == 404
            assert is_well(triton)


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_good_compressed_requests_are_no_leak(small: Triton, version: bytes, expect: bytes) -> None:
    count = 100_000
    inputs = [{"name": "x", "datatype": "FP32", "shape": [count], "parameters": {"binary_data_size": 4 * count}}]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = gzip.compress(header + bytes(4 * count))
    head = (
        INFER.replace(b"HTTP/1.1", version) + GZIP + expect + b"Inference-Header-Content-Length: %d\r\n" % len(header)
    )
    # More than three of them would be too much if each counted as one that failed.
    assert [ask(small, head + with_length(body))[0] for _ in range(8)] == [200] * 8


def test_compressed_requests_in_pipelines_are_answered_in_their_order(small: Triton) -> None:
    def body(number: int) -> bytes:
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [number]}]
        return json.dumps({"inputs": inputs}).encode()

    plain = [INFER + with_length(body(number)) for number in range(10)]
    packed = [INFER + GZIP + with_length(gzip.compress(body(number))) for number in range(10)]
    with connect(small) as connection:
        connection.sendall(b"".join(packed[number] if number % 3 else plain[number] for number in range(10)))
        data = b""
        while data.count(b'"data":[') < 10 or not data.endswith(b"]}]}"):
            part = connection.recv(65536)
            assert part, data
            data += part
    assert [float(found) for found in re.findall(rb'"data":\[([\d.]+)\]', data)] == list(range(10))
    assert is_well(small)


def test_small_chunks_take_more_memory_than_they_have_bytes(small: Triton) -> None:
    # 5,000 chunks of one byte are 30 kB on the wire and 5 MB in the server.
    status, text = ask(small, INFER + CHUNKED + b"1\r\n \r\n" * 5_000)
    assert (status, "max_in_flight_bytes of the guard" in text) == (503, True)
    eventually(lambda: is_well(small))


def test_what_came_of_a_refused_request_counts_until_its_connection_is_closed(small: Triton) -> None:
    def refuse() -> socket.socket | None:
        connection = connect(small)
        # Three MB, which the server keeps, and then a chunk that is none.
        connection.sendall(INFER + GZIP + CHUNKED + b"2dc6c0\r\n" + bytes(3_000_000) + b"\r\nno size\r\n")
        status, text = read_answer(connection)
        if status == 503:  # the connection of the test before counts still
            connection.close()
            return None
        assert (status, "size of a chunk" in text) == (400, True)
        return connection

    with eventually(refuse):
        status, text = ask(small, INFER + GZIP + b"Content-Length: 3000000\r\n\r\n" + bytes(3_000_000))
        assert (status, "max_in_flight_bytes of the guard" in text) == (503, True)
    eventually(lambda: ask(small, INFER + GZIP + with_length(bytes(3_000_000)))[0] != 503)


def test_deep_json_is_found_behind_the_gzip(small: Triton) -> None:
    for text in (b'{"inputs":' + b"[" * 600, b"\xef\xbb\xbf [" + b'{"a":' * 600):
        status, _ = ask(small, INFER + GZIP + with_length(gzip.compress(text)))
        assert status == 400
    assert is_well(small)
