"""Heads of requests over HTTP that come slowly, or in pieces where the part `frontend` of the guard is off."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import pytest
from numpy.typing import NDArray

from pytriton.decorators import Shape, model
from pytriton.triton import GuardConfig, Triton
from support.faults.front_end.poisons import post
from support.faults.http_answers import Reader, alone, generate, get, infer, send_in_pieces
from support.faults.raw_http import connect
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

MAY_GO_ON = threading.Event()


@model
def shout(text: str) -> str:
    return text.upper()


@model(max_batch_size=8)
def total(x: Annotated[NDArray[np.float32], Shape(-1)]) -> float:
    return float(x.sum())


@model
def hold(word: str) -> Iterator[str]:
    yield word
    assert MAY_GO_ON.wait(PATIENCE_S)
    yield word


@pytest.fixture
def hasty() -> Iterator[Triton]:
    """A server whose callers have a second for the head of a request."""
    triton = Triton(config=local_config(http_thread_count=1), guard=GuardConfig(head_timeout_s=1))
    triton.bind(shout)
    triton.bind(hold)
    with short_home(), running(triton):
        yield triton


def test_a_head_does_not_take_for_ever(hasty: Triton) -> None:
    for begin in (b"G", b"GET /v2/health", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nContent-Length: 5\r\nA"):
        with connect(hasty) as connection:
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n" + begin)
            reader = Reader(connection)
            first, late = reader.next(b""), reader.next(b"")
            assert first is not None
            assert first.status == 200
            assert late is not None
            assert (late.status, b"has not come within 1 seconds" in late.body) == (408, True)
            assert reader.next(b"") is None
    # A connection without a request, a body that takes its time, and who waits for an answer have no such end.
    MAY_GO_ON.clear()
    body = b'{"text": "a"}'
    with connect(hasty) as idle, connect(hasty) as slow, connect(hasty) as waits:
        slow.sendall(post(body, path="/v2/models/shout/generate")[:-3])
        waits.sendall(generate("hold", {"word": "a"}, "generate_stream") + b"GET /v2/health/li")
        for begin in (b"GET /v2", b"GET"):
            assert alone(hasty, begin).status == 408
        MAY_GO_ON.set()
        slow.sendall(body[-3:])
        answer = Reader(slow).next(b"")
        assert answer is not None
        assert answer.status == 200
        idle.sendall(get("/v2/health/live"))
        answer = Reader(idle).next(b"")
        assert answer is not None
        assert answer.status == 200
        reader = Reader(waits)
        assert reader.next(b"") is not None
        waits.sendall(b"ve HTTP/1.1\r\n\r\n")
        answer = reader.next(b"")
        assert answer is not None
        assert answer.status == 200


def test_without_the_part_frontend_first_lines_may_come_in_pieces() -> None:
    triton = Triton(config=local_config(), guard=GuardConfig(frontend=False))
    triton.bind(total)
    triton.bind(shout)
    with short_home(), running(triton):
        for request in (
            infer("total", [1, 2]),
            generate("shout", {"text": "a"}),
            get("/v2/health/live"),
            get("/", "HEAD"),
        ):
            whole = alone(triton, request)
            for cut in range(1, 60, 7):
                with connect(triton) as connection:
                    send_in_pieces(connection, request, [cut])
                    assert Reader(connection).next(request) == whole


def test_where_nothing_is_refused_no_head_is_late_nor_long() -> None:
    triton = Triton(config=local_config(http_thread_count=1), guard=GuardConfig(refuse=False, head_timeout_s=1))
    triton.bind(hold)
    folded = get("/v2/health/live", "GET", "A: b", " folded: c")
    with short_home(), running(triton), connect(triton) as waits, connect(triton) as slow:
        # The scanner does not know how this one goes on, so the stream behind it is Triton's alone.
        waits.sendall(folded)
        reader = Reader(waits)
        answer = reader.next(folded)
        assert answer is not None
        assert answer.status == 200
        slow.sendall(b"GET /v2/health/li")
        MAY_GO_ON.clear()
        waits.sendall(generate("hold", {"word": "a"}, "generate_stream"))
        # Longer than a head may take.
        slow.settimeout(3)
        try:
            with pytest.raises(TimeoutError):
                slow.recv(1)
        finally:
            MAY_GO_ON.set()
        answer = reader.next(b"")
        assert answer is not None
        assert answer.body.count(b'"output":"a"') == 2
        slow.settimeout(PATIENCE_S)
        slow.sendall(b"ve HTTP/1.1\r\n\r\n")
        answer = Reader(slow).next(b"")
        assert answer is not None
        assert answer.status == 200
        assert alone(triton, get("/v2/" + "p" * 5000)).status == 404


def test_a_head_that_was_refused_is_not_late(hasty: Triton, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), connect(hasty) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nA: b\r\n folded: c\r\n")
        reader = Reader(connection)
        answer = reader.next(b"")
        assert answer is not None
        assert answer.status == 400
        with connect(hasty) as idle:
            # Longer than a head may take.
            idle.settimeout(2.5)
            with pytest.raises(TimeoutError):
                idle.recv(1)
    assert [text for text in caplog.messages if "has not come within" in text] == []
    assert alone(hasty, get("/v2/health/live")).status == 200


def test_who_leaves_within_a_first_line_is_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    triton = Triton(config=local_config(http_thread_count=1))
    with caplog.at_level(logging.DEBUG), short_home(), running(triton):
        for end in ("half-closed", "closed", "reset") * 5:
            with connect(triton) as connection:
                connection.sendall(b"GET /v2/he")
                # It was read by then.
                assert alone(triton, get("/v2/health/live")).status == 200
                if end == "half-closed":
                    connection.shutdown(socket.SHUT_WR)
                    assert connection.recv(100) == b""
                elif end == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert alone(triton, get("/v2/health/live")).status == 200
    assert [text for text in caplog.messages if "first line" in text] == []


def test_each_of_many_heads_in_pieces_has_its_own_time() -> None:
    triton = Triton(config=local_config(http_thread_count=1), guard=GuardConfig(frontend=False, head_timeout_s=2))
    request = get("/v2/health/live")
    with short_home(), running(triton):
        while True:
            begin = last = time.monotonic()
            slowest = 0.0
            with connect(triton) as connection:
                reader = Reader(connection)
                connection.sendall(request[:20])
                while last < begin + 3:
                    # Each read has the end of a request and the begin of the next one.
                    connection.sendall(request[20:] + request[:20])
                    answer = reader.next(request)
                    slowest = max(slowest, time.monotonic() - last)
                    last = time.monotonic()
                    if answer is None or answer.status != 200:
                        break
                else:
                    return
            # A machine that is busy beyond measure shows nothing.
            assert slowest > 1, answer
