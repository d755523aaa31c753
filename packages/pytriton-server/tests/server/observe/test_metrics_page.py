"""The HTTP server of the metrics page, at its socket."""

import contextlib
import gzip
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pytriton.server.observe import metrics_page
from pytriton.server.observe.metrics_page import CONTENT_TYPE, MAX_CALLERS, MetricsPage
from support.waiting import eventually

TEXT = b"a_total 1.0\n"
PATIENCE_S = 300.0


@contextmanager
def serving(render: Callable[[], bytes] = lambda: TEXT) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    page = MetricsPage(listener, render)
    page.start()
    try:
        yield listener.getsockname()
    finally:
        page.close()
        page.close()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pytriton-metrics")]
        assert not left


def ask(
    address: tuple[str, int], method: str = "GET", path: str = "/metrics"
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        ("gzip", True),
        ("GZIP;q=1.0,*;q=0.5", True),
        ("deflate, gzip;q=0.1", True),
        ("*", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("br, zstd", False),
    ],
)
def test_a_page_is_compressed_for_who_wants_it(accepted: str, is_compressed: bool) -> None:
    text = TEXT * 1000
    with serving(lambda: text) as address:
        connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers={"Accept-Encoding": accepted})
            response = connection.getresponse()
            body = response.read()
    assert response.headers["Content-Length"] == str(len(body))
    assert response.headers["Vary"] == "Accept-Encoding"
    assert response.headers["Content-Encoding"] == ("gzip" if is_compressed else None)
    assert (gzip.decompress(body) if is_compressed else body) == text
    assert (len(body) < len(text) / 10) == is_compressed


def test_a_short_answer_is_not_compressed() -> None:
    with serving() as address:
        answer = ask_raw(address, b"GET /metrics HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n")
    assert answer.endswith(TEXT)


def ask_raw(address: tuple[str, int], request: bytes) -> bytes:
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        return receive_all(connection)


def receive_all(connection: socket.socket) -> bytes:
    answer = b""
    while piece := connection.recv(4096):
        answer += piece
    return answer


@pytest.mark.parametrize("path", ["/metrics", "/metrics?name[]=a"])
def test_the_page(path: str) -> None:
    with serving() as address:
        response, body = ask(address, path=path)
    assert (response.status, body) == (200, TEXT)
    assert response.headers["Content-Type"] == CONTENT_TYPE
    assert response.headers["Content-Length"] == str(len(TEXT))
    assert response.headers["Connection"] == "close"


def test_head_has_the_headers_of_get_and_no_body() -> None:
    with serving() as address:
        answer = ask_raw(address, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: %d\r\n" % len(TEXT) in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/metrics/", 404), ("HEAD", "/other", 404), ("POST", "/metrics", 405)],
)
def test_what_is_not_there(method: str, path: str, status: int) -> None:
    with serving() as address:
        response, _ = ask(address, method, path)
    assert response.status == status
    assert response.headers.get("Allow") == ("GET, HEAD" if status == 405 else None)


@pytest.mark.parametrize(
    "request_line", [b"GET /metrics HTTP/x\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01 what is this\n\n"]
)
def test_what_is_no_request(request_line: bytes) -> None:
    with serving() as address:
        assert ask_raw(address, request_line).startswith(b"HTTP/1.1 400 ")


def test_a_method_that_nobody_knows() -> None:
    with serving() as address:
        assert ask(address, "BREW")[0].status == 501


@pytest.mark.parametrize(
    "part", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"], ids=["none", "line", "head"]
)
def test_a_request_that_does_not_come_to_its_end_is_cut_off(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "_REQUEST_TIMEOUT_S", 0.1)
    with serving() as address, socket.create_connection(address, timeout=PATIENCE_S) as slow:
        slow.sendall(part)
        assert receive_all(slow) == b""


def test_a_caller_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "_SEND_TIMEOUT_S", 0.1)
    begun = threading.Event()

    def render() -> bytes:
        begun.set()
        return b"x" * (64 << 20)

    with serving(render) as address, socket.create_connection(address, timeout=PATIENCE_S) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert begun.wait(PATIENCE_S)
        eventually(lambda: "pytriton-metrics-answer" not in {thread.name for thread in threading.enumerate()})
        with contextlib.suppress(ConnectionResetError):
            assert len(receive_all(slow)) < 64 << 20


def test_endless_headers_are_not_read_to_the_end() -> None:
    with serving() as address, socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        try:
            for _ in range(1000):
                connection.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")
            answer = receive_all(connection)
        except ConnectionError:
            answer = b""
    # The end of the connection may overtake the answer, since not all was read.
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")


def test_a_text_that_cannot_be_made_is_an_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    def render() -> bytes:
        raise ValueError("no text today")

    with serving(render) as address:
        response, body = ask(address)
        assert response.status == 500
        assert b"no text today" not in body
    assert "no text today" in caplog.text


def test_a_caller_that_says_nothing_keeps_nobody_waiting() -> None:
    with serving() as address, socket.create_connection(address) as silent:
        assert ask(address)[0].status == 200
        silent.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        silent.settimeout(PATIENCE_S)
        assert receive_all(silent).endswith(TEXT)


@pytest.mark.parametrize("part", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half a request"])
def test_many_that_say_nothing_keep_nobody_out(part: bytes) -> None:
    with serving() as address, contextlib.ExitStack() as silent:
        for _ in range(500):
            connection = silent.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
            with contextlib.suppress(ConnectionError):
                connection.sendall(part)
            last = connection
        assert ask(address)[0].status == 200
        # Of those that came late the request is still taken.
        last.sendall(b"\r\n" if part else b"GET /metrics HTTP/1.1\r\n\r\n")
        assert receive_all(last).endswith(TEXT)


def test_too_many_callers_are_turned_away() -> None:
    release = threading.Event()
    begun = threading.Semaphore(0)

    def render() -> bytes:
        begun.release()
        release.wait(PATIENCE_S)
        return TEXT

    with serving(render) as address:
        callers = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(MAX_CALLERS)]
        try:
            for caller in callers:
                caller.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            for _ in callers:
                assert begun.acquire(timeout=PATIENCE_S)
            assert ask(address)[0].status == 503
            release.set()
            assert all(receive_all(caller).endswith(TEXT) for caller in callers)
        finally:
            release.set()
            for caller in callers:
                caller.close()


def test_close_ends_what_is_under_way() -> None:
    with serving() as address:
        waiting = socket.create_connection(address, timeout=PATIENCE_S)
        assert ask(address)[0].status == 200
    with waiting, contextlib.suppress(ConnectionResetError):
        assert waiting.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=PATIENCE_S)


def test_a_page_that_was_never_started_can_be_closed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    MetricsPage(listener, lambda: TEXT).close()
    assert listener.fileno() == -1
