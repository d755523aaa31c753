"""Requests that come together, in pieces or slowly on one HTTP connection: each gets the answer that it gets alone."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
import pytest
from numpy.typing import NDArray

from pytriton.decorators import Shape, model
from pytriton.triton import Triton
from support.faults.front_end.poisons import chunked, post
from support.faults.http_answers import Answer, Reader, alone, generate, get, infer, send_in_pieces
from support.faults.raw_http import connect
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

MAY_GO_ON = threading.Event()


@model
def shout(text: str, times: int = 1) -> str:
    return text.upper() * times


@model(max_batch_size=8)
def total(x: Annotated[NDArray[np.float32], Shape(-1)]) -> float:
    return float(x.sum())


@model
def spell(word: str) -> Iterator[str]:
    yield from word


@model
def hold(word: str) -> Iterator[str]:
    yield word
    assert MAY_GO_ON.wait(PATIENCE_S)
    yield word


# Each may stand anywhere in a pipeline.
SERVED = [
    infer("total", [1, 2, 3]),
    infer("total", range(3000)),
    infer("total", []),
    infer("none", [1]),
    post(
        gzip.compress(infer("total", [5]).partition(b"\r\n\r\n")[2]),
        "Content-Encoding: gzip",
        path="/v2/models/total/infer",
    ),
    chunked(infer("total", range(900)).partition(b"\r\n\r\n")[2], 50).replace(b"batched", b"total"),
    generate("shout", {"text": "a", "times": 2}),
    generate("shout", {"text": "long" * 3000}),
    generate("shout", {"txet": "a"}),
    generate("total", {"x": [1, 2]}),
    generate("spell", {"word": "w"}),
    generate("spell", {"word": "several"}),
    generate("spell", {"word": ""}),
    generate("spell", {"word": "stream"}, "generate_stream"),
    generate("spell", {"wrod": "stream"}, "generate_stream"),
    get("/v2/health/live"),
    get("/v2/health/ready"),
    get("/v2/models/shout/ready"),
    get("/v2/models/none/ready"),
    get("/v2/models/total/config"),
    get("/"),
    get("/docs", "GET", "Accept: text/html"),
    get("/nothing"),
    get("/v2/" + "p" * 3000),
    get("/v2/models/total/infer"),
    get("/v2/health/live", "HEAD"),
    get("/", "HEAD"),
    get("/nothing", "HEAD"),
    get("/v2/models/shout", "HEAD"),
    get("/v2/models/total/infer", "HEAD"),
    get("/v2/health/ready", "OPTIONS"),
    get("/v2/models/none/ready", "OPTIONS"),
    get("/", "OPTIONS"),
    b"\r\n" + get("/v2/health/live"),
]
# The connection ends with each of these.
REFUSED = [
    b"NO REQUEST\r\n\r\n",
    get("/v2/" + "p" * 9000),
    get("/v2/health/live").replace(b"\r\n\r\n", b"\n\n"),
    post(b"{}", "Transfer-Encoding: chunked"),
    post(b"{}", "Content-Length: 1"),
    get("/", "GET", "A: b", " folded: c"),
    post(b"[" * 1000),
    get("/", "GET", "Connection: close"),
    b"GET /v2/health/live HTTP/1.0\r\n\r\n",
]


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    triton = Triton(config=local_config(http_thread_count=2))
    for function in (shout, total, spell, hold):
        triton.bind(function)
    with short_home(), running(triton):
        yield triton


@pytest.fixture(scope="module")
def expected(served: Triton) -> dict[bytes, Answer]:
    return {request: alone(served, request) for request in [*SERVED, *REFUSED]}


def check(triton: Triton, requests: Sequence[bytes], cuts: Sequence[int], expected: dict[bytes, Answer]) -> None:
    data = b"".join(requests)
    with connect(triton) as connection:
        sender = threading.Thread(target=send_in_pieces, args=(connection, data, cuts))
        sender.start()
        reader = Reader(connection)
        for number, request in enumerate(requests):
            assert reader.next(request) == expected[request], (number, request[:200])
            if request in REFUSED:
                with contextlib.suppress(ConnectionError):
                    assert reader.next(request) is None
                break
        sender.join(PATIENCE_S)


@pytest.mark.parametrize("seed", range(12))
def test_any_requests_cut_anywhere_get_the_answers_that_each_gets_alone(
    served: Triton, expected: dict[bytes, Answer], seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(6):
        requests = [chance.choice(SERVED) for _ in range(chance.randrange(1, 30))]
        if chance.random() < 0.5:
            requests += [chance.choice(REFUSED), chance.choice(SERVED)]
        size = sum(map(len, requests))
        cuts = sorted({chance.randrange(1, size) for _ in range(chance.choice([0, 0, 1, 5, 50, 400]))} - {size})
        check(served, requests, cuts, expected)


@pytest.mark.parametrize("request_", SERVED, ids=range(len(SERVED)))
def test_a_hundred_in_one_write(served: Triton, expected: dict[bytes, Answer], request_: bytes) -> None:
    check(served, [request_] * 100, [], expected)


def test_a_hundred_of_all_kinds_in_one_write(served: Triton, expected: dict[bytes, Answer]) -> None:
    check(served, (SERVED * 4)[:100], [], expected)


@pytest.mark.parametrize("length", range(4060, 4130, 3))
def test_a_first_line_on_the_border_of_what_is_read_at_once(
    served: Triton, expected: dict[bytes, Answer], length: int
) -> None:
    first = get("/v2/health/live", "GET", "A: " + "b" * (length - 47))
    answers = {**expected, first: expected[SERVED[15]]}
    check(served, [first, *SERVED[:3], *SERVED[13:20]], [], answers)


def test_each_byte_alone(served: Triton, expected: dict[bytes, Answer]) -> None:
    requests = [SERVED[0], SERVED[6], SERVED[25], SERVED[13], SERVED[15]]
    check(served, requests, range(1, sum(map(len, requests))), expected)


@pytest.mark.parametrize(("length", "status"), [(4000, 404), (4096, 414), (9000, 414), (100_000, 414)])
def test_a_long_path_is_reported_as_long(served: Triton, length: int, status: int) -> None:
    answer = alone(served, get("/v2/" + "p" * length))
    assert answer.status == status
    if status == 414:
        assert json.loads(answer.body)["error"] == "the first line of the request, with its path, has more than 4.0 KiB"


def test_who_speaks_something_else_is_answered_at_once(served: Triton) -> None:
    for begin in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\x00", b"(hello"):
        assert alone(served, begin).status == 400


def test_a_stream_is_sent_as_it_comes_while_a_request_waits_behind_it(
    served: Triton, expected: dict[bytes, Answer]
) -> None:
    MAY_GO_ON.clear()
    with connect(served) as connection:
        connection.sendall(generate("hold", {"word": "a"}, "generate_stream") + SERVED[6] + SERVED[15])
        data = b""
        while data.count(b"data: ") < 1:
            data += connection.recv(65536)
        # More than the system keeps is not read meanwhile.
        connection.sendall(SERVED[0])
        MAY_GO_ON.set()
        while not data.endswith(b"0\r\n\r\n"):
            data += (part := connection.recv(1))
            assert part, data
        assert data.count(b'"output":"a"') == 2
        reader = Reader(connection)
        for request in (SERVED[6], SERVED[15], SERVED[0]):
            assert reader.next(request) == expected[request]


def test_a_caller_that_leaves_a_stream_with_a_request_behind_it(served: Triton) -> None:
    gone = threading.Event()

    @model
    def endless(word: str) -> Iterator[str]:
        try:
            while True:
                yield word
        finally:
            gone.set()

    served.bind(endless)
    for behind in (b"", SERVED[0], SERVED[0] * 100):
        gone.clear()
        connection = connect(served)
        connection.sendall(generate("endless", {"word": "a"}, "generate_stream") + behind)
        assert connection.recv(10)
        connection.close()
        assert gone.wait(PATIENCE_S), len(behind)
    served.unbind("endless")


def test_a_caller_that_sends_thousands_ahead_is_answered(served: Triton, expected: dict[bytes, Answer]) -> None:
    check(served, [SERVED[15]] * 3000, [], expected)


def test_callers_beside_one_that_sends_ahead(served: Triton, expected: dict[bytes, Answer]) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(connect(served))
            connection.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection.send(SERVED[15] * 1000)
        for _ in range(20):
            assert alone(served, SERVED[6]) == expected[SERVED[6]]


def smuggled(begin: bytes, hidden: bytes) -> list[bytes]:
    """Return requests that two parsers could divide in two ways, each with one that only the wrong way shows."""
    length, chunks = b"Content-Length: %d\r\n" % len(hidden), b"Transfer-Encoding: chunked\r\n"
    return [
        begin + length + chunks + b"\r\n0\r\n\r\n" + hidden,
        begin + chunks + length + b"\r\n0\r\n\r\n" + hidden,
        begin + b"Content-Length: 0\r\n" + length + b"\r\n" + hidden,
        begin + b"Transfer-Encoding: xchunked\r\n" + length + b"\r\n0\r\n\r\n" + hidden,
        begin + b"Transfer-Encoding : chunked\r\n" + length + b"\r\n0\r\n\r\n" + hidden,
        begin + b"Transfer-Encoding:\x0bchunked\r\n" + length + b"\r\n0\r\n\r\n" + hidden,
        begin + b"A: b\r\n " + chunks + length + b"\r\n0\r\n\r\n" + hidden,
        begin + b"A: b\n" + chunks + length + b"\r\n0\r\n\r\n" + hidden,
        begin + b"A: b\r" + chunks + length + b"\r\n0\r\n\r\n" + hidden,
        begin + chunks + b"\r\n0;a=b\r\n\r\n" + hidden,
        begin + chunks + b"\r\n0\r\nA: b\r\n\r\n" + hidden,
        begin + chunks + b"\r\n0\n\r\n" + hidden,
        begin + chunks + b"\r\n0x0\r\n\r\n" + hidden,
        begin + b"Content-Length: +%d\r\n\r\n" % len(hidden) + hidden,
        begin + b"Content-Length: %d,0\r\n\r\n" % len(hidden) + hidden,
    ]


@pytest.mark.parametrize("seed", range(3))
def test_no_request_hides_in_another(served: Triton, expected: dict[bytes, Answer], seed: int) -> None:
    chance = random.Random(seed)
    hidden = get("/v2/models/shout")
    for begin in (
        b"POST /v2/models/total/infer HTTP/1.1\r\nHost: h\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n",
        b"HEAD / HTTP/1.1\r\n",
    ):
        for request in smuggled(begin, hidden):
            data = SERVED[15] + request
            with connect(served) as connection:
                send_in_pieces(
                    connection, data, sorted({chance.randrange(1, len(data)) for _ in range(chance.choice([0, 3, 30]))})
                )
                reader = Reader(connection)
                assert reader.next(SERVED[15]) == expected[SERVED[15]]
                # The server itself may have ended it over a piece that the guard has let through.
                with contextlib.suppress(ConnectionError):
                    refused = reader.next(b"")
                    assert refused is None or refused.status in (400, 501), request
                    assert reader.next(b"") is None
    # A whole body is none of it, though it looks like a request.
    body = post(hidden, path="/v2/models/total/infer")
    assert alone(served, body).status == 400
    answers = {**expected, body: alone(served, body)}
    check(served, [body, SERVED[0], body, SERVED[15]], [], answers)


def test_load_balancers_and_wget_ask_for_health(served: Triton) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/shout/ready", "/"):
        for method in ("HEAD", "OPTIONS"):
            # HAProxy asks so by default.
            for version in (b"HTTP/1.0", b"HTTP/1.1"):
                request = get(path, method).replace(b"HTTP/1.1", version)
                with connect(served) as connection:
                    connection.sendall(request + b"GET /v2/health/live HTTP/1.0\r\n\r\n")
                    data = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))  # type: ignore[misc]
                assert data.startswith((b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n")), data
                assert (b"Allow: GET, HEAD, OPTIONS\r\n" in data) == (method == "OPTIONS")
                # No body, which would stand in front of the next answer.
                assert data.count(b"HTTP/1.") == (1 if version == b"HTTP/1.0" else 2), data
                assert b"models" not in data
    assert alone(served, get("/v2/models/none/ready", "HEAD")).status == 400
    assert alone(served, get("/v2/models/shout", "OPTIONS")).status == 405


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_a_caller_of_http_1_0_that_keeps_its_connection_learns_where_each_answer_ends(
    served: Triton, method: str
) -> None:
    # ApacheBench with -k, for one.
    kept = b"HTTP/1.0\r\nConnection: keep-alive"
    paths = ("/v2/health/live", "/v2/models/shout/ready", "/v2/models/shout", "/v2/models/none/ready", "/nothing", "/")
    with connect(served) as connection:
        reader = Reader(connection)
        for path in paths * 2:
            request = get(path, method)
            connection.sendall(request.replace(b"HTTP/1.1", kept))
            answer = reader.next(request)
            assert answer is not None
            assert {"content-length", "connection"} <= {name for name, _ in answer.headers}, path
            assert answer == Answer(
                (told := alone(served, request)).status, told.headers | {("connection", "keep-alive")}, told.body
            )


def test_what_is_behind_the_last_answer_of_a_connection_is_not_executed(served: Triton) -> None:
    calls: list[str] = []

    @model
    def note(text: str) -> str:
        calls.append(text)
        return text

    served.bind(note)
    kept = b"HTTP/1.0\r\nConnection: keep-alive"
    stream = generate("spell", {"word": "long" * 20}, "generate_stream").replace(b"HTTP/1.1", kept)
    behind = generate("note", {"text": "behind"}).replace(b"HTTP/1.1", kept)
    for sent in (stream + behind, stream + behind * 20, get("/", "HEAD").replace(b"HTTP/1.1", kept) + stream + behind):
        with connect(served) as connection:
            connection.sendall(sent)
            data = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))  # type: ignore[misc]
            assert data.count(b"data: ") == 80, data
            # The server would have it by then.
            for _ in range(5):
                assert alone(served, generate("note", {"text": "alone"})).status == 200
    assert set(calls) == {"alone"}
    served.unbind("note")
