"""The five clients and an HTTP server that lies, breaks off or never stops: errors of ours, in time and in bounds."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import struct
import time
import tracemalloc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from support.faults.hostile_http import (
    CLIENTS,
    COUPLED,
    DECOUPLED,
    GOOD_INFER,
    GOOD_STREAM,
    READERS,
    HostileServer,
    Sent,
    caller,
    chunked,
    config,
    event,
    hostile_server,
    http,
    inferred,
    output,
)

MIB = 1 << 20
# Many times what any of these answers is; a claim that was believed would be far more.
MOST_MEMORY_BYTES = 64 * MIB
LONGEST_ERROR = 20_000
GOOD = [[1.0, 2.0]]

Broken = PyTritonClientConnectionError
Refused = PyTritonClientInferenceServerError
TimedOut = PyTritonClientTimeoutError


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with hostile_server() as one:
        yield one


def endless(piece: bytes, before: bytes = b"", pause_s: float = 0) -> Sent:
    def pieces() -> Iterable[bytes]:
        yield before
        for _ in itertools.count():
            yield piece
            time.sleep(pause_s)

    return pieces


CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\n"

# ---- what breaks the frame around an answer: the answer, and the error of every client -----------------------------

FRAMES: dict[str, tuple[Sent, type[PyTritonClientError]]] = {
    "nothing": (b"", Broken),
    "zeros": (bytes(1000), Broken),
    "another protocol": (b"SSH-2.0-server\r\n\r\n", Broken),
    "HTTP/2": (b"HTTP/2 200\r\n\r\n", Broken),
    "no status": (b"HTTP/1.1 OK\r\n\r\n", Broken),
    "a negative status": (b"HTTP/1.1 -20 OK\r\n\r\n", Broken),
    "a length of 2**62": (http(b"abc", length=2**62), Refused),
    "a length of 3 GiB": (http(b"abc", length=3 * 2**30), Broken),
    "a length of 70,000 digits": (http(b"abc", length="9" * 70_000), Broken),
    "a length of 5,000 digits": (http(b"abc", length="9" * 5_000), Broken),
    "a negative length": (http(b"abc", length=-3), Broken),
    "a length in hexadecimal": (http(b"abc", length="0x3"), Broken),
    "a length with a sign": (http(b"abc", length="+3"), Broken),
    "a length with a fraction": (http(b"abc", length="3.0"), Broken),
    "no length": (http(b"abc", length=""), Broken),
    "two lengths": (http(b"abc", "Content-Length: 2"), Broken),
    "a chunk of 2**64 - 1": (CHUNKS + b"ffffffffffffffff\r\nabc", Refused),
    "a chunk of 60,000 digits": (CHUNKS + b"f" * 60_000 + b"\r\nabc", Broken),
    "a chunk of 3 GiB": (CHUNKS + b"c0000000\r\nabc", Broken),
    "a chunk of -1": (CHUNKS + b"-1\r\nabc\r\n", Broken),
    "a chunk of zz": (CHUNKS + b"zz\r\nabc\r\n", Broken),
    "a chunk without a size": (CHUNKS + b"\r\nabc\r\n", Broken),
    "a chunk that goes on": (CHUNKS + b"1\r\nabc\r\n0\r\n\r\n", Broken),
    "a chunk that breaks off": (CHUNKS + b"5\r\nabc", Broken),
    "no last chunk": (CHUNKS + b"3\r\n{  \r\n", Broken),
    "trailers that break off": (CHUNKS + b"0\r\nt: v\r\n", Broken),
    "an endless header": (endless(b"x" * 65536, HEAD + b"x: "), Broken),
    "endless headers": (endless(b"x: y\r\n" * 10_000, HEAD), Broken),
    "endless trailers": (endless(b"x: y\r\n" * 10_000, CHUNKS + b"0\r\n"), Broken),
    "an endless size of a chunk": (endless(b"0" * 65536, CHUNKS), Broken),
    "an endless extension of a chunk": (endless(b"0" * 65536, CHUNKS + b"1;"), Broken),
    "endless interim answers": (endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 100), Broken),
    "a switch of protocols": (b"HTTP/1.1 101 Switching Protocols\r\n\r\n\0\0\0\0", Broken),
}  # fmt: skip


# A stream is read piece by piece: what it claims to become is of no interest.
CLAIMS = ("a length of 2**62", "a chunk of 2**64 - 1")


@pytest.mark.parametrize("kind", CLIENTS)
def test_frames(server: HostileServer, kind: str) -> None:
    rows = {
        name: (sent, Broken if name in CLAIMS and kind in DECOUPLED else expected)
        for name, (sent, expected) in FRAMES.items()
    }
    check(server, kind, rows)


def check(
    server: HostileServer,
    kind: str,
    rows: Mapping[str, tuple[Sent, type[PyTritonClientError]]],
    place: str = "infer",
    **options: Any,
) -> dict[str, PyTritonClientError]:
    """Check that each answer is an error of that class, in little memory, and that the client goes on after it.

    One client has them all. Only what it asks for once is asked by a fresh one.
    """
    errors: dict[str, PyTritonClientError] = {}
    problems = []
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(caller(kind, server.url, **options))
        for name, (sent, expected) in rows.items():
            if place == "infer":
                assert client.infer() == GOOD, name
            else:
                client = stack.enter_context(caller(kind, server.url, **options))
            server.answers[place] = sent
            tracemalloc.start()
            try:
                values = client.infer()
                problems.append(f"{name}: answered with {values}")
            except PyTritonClientError as error:
                errors[name] = error
                if not isinstance(error, expected) or len(str(error)) > LONGEST_ERROR:
                    problems.append(f"{name}: {error!r:.500}")
            except Exception as error:
                problems.append(f"{name}: {type(error).__name__} came through: {error!s:.500}")
            finally:
                memory = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            if memory > MOST_MEMORY_BYTES:
                problems.append(f"{name}: took {memory} bytes")
            server.answers.clear()
            assert client.infer() == GOOD, name
    assert not problems, "\n".join(problems)
    return errors


STATUSES: dict[str, bytes] = {
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "a redirect": http(b"", "Location: http://127.0.0.1:1/", status="301 Moved Permanently"),
    "a redirect to itself": http(b"gone", "Location: /", status="307 Temporary Redirect"),
    "a status of 999": http(b"abc", status="999 What"),
}


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("place", ["infer", "config"])
def test_statuses(server: HostileServer, kind: str, place: str) -> None:
    server.keeps_open = True
    check(server, kind, {name: (sent, Refused) for name, sent in STATUSES.items()}, place)


# ---- answers that are too large, or that never end -----------------------------------------------------------------

TOO_MUCH: dict[str, Sent] = {
    "a length": http(b" " * 3 * MIB),
    "chunks": endless(b"10000\r\n" + b" " * 65536 + b"\r\n", CHUNKS),
    "the end of the connection": endless(b" " * 65536, HEAD + b"\r\n"),
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_more_than_a_client_takes(server: HostileServer, kind: str) -> None:
    rows = {name: (sent, Refused) for name, sent in TOO_MUCH.items()}
    for error in check(server, kind, rows, max_response_bytes=2 * MIB).values():
        assert "max_response_bytes" in str(error)


@pytest.mark.parametrize("kind", CLIENTS)
def test_as_much_as_a_client_takes(server: HostileServer, kind: str) -> None:
    # Larger than the configuration, which the limit is for as well.
    about = {"id": "i" * 1000, "model_name": "m"}
    head = json.dumps({**about, "outputs": [output()]}).encode()
    content = event({**about, "y": [1.0, 2.0]})
    server.answers["infer"] = chunked(content) if kind in DECOUPLED else inferred(head, DATA)
    # The end of an event is none of its content.
    size = len(content) if kind in DECOUPLED else len(head) + len(DATA)
    with caller(kind, server.url, max_response_bytes=size) as client:
        assert client.infer() == GOOD


@pytest.mark.parametrize("size", [0, -1, 1.5, "1", True])
def test_size_that_is_none(size: Any) -> None:
    with pytest.raises(PyTritonClientValueError, match="max_response_bytes"):
        ModelClient("localhost", "m", max_response_bytes=size)


NEVER_ENDS: dict[str, Sent] = {
    "silence": b"",
    "half a head": HEAD,
    "a length that does not come": http(b"abc", length=4),
    "a chunk that does not come": CHUNKS + b"5\r\nabc",
    "a head byte by byte": endless(b"x", HEAD, pause_s=0.01),
    "a body byte by byte": endless(b" ", HEAD + b"Content-Length: 1000000\r\n\r\n", pause_s=0.01),
    "chunks of one byte": endless(b"1\r\n \r\n", CHUNKS, pause_s=0.01),
    "one-byte chunks in masses": endless(b"1\r\n \r\n" * 10_000, CHUNKS),
    "events without a word": endless(b"6\r\n: hi\n\n\r\n", CHUNKS, pause_s=0.01),
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_answers_that_never_end(server: HostileServer, kind: str) -> None:
    server.keeps_open = True
    # The last one is larger than a limit, if a client is quicker than its deadline.
    rows = {name: (sent, TimedOut) for name, sent in NEVER_ENDS.items()}
    check(server, kind, rows, inference_timeout_s=0.5)


@pytest.mark.parametrize("kind", CLIENTS)
def test_end_at_every_byte(server: HostileServer, kind: str) -> None:
    good = GOOD_STREAM if kind in DECOUPLED else GOOD_INFER
    with caller(kind, server.url) as client:
        for end in range(len(good)):
            server.answers["infer"] = good[:end]
            with pytest.raises(Broken):
                client.infer()
        server.answers.clear()
        assert client.infer() == GOOD


@pytest.mark.parametrize("kind", CLIENTS)
def test_more_than_the_answer(server: HostileServer, kind: str) -> None:
    # What comes behind an answer must not become the answer to the next request.
    good = GOOD_STREAM if kind in DECOUPLED else GOOD_INFER
    server.keeps_open = True
    wrong = http(json.dumps({"error": "this is not for you"}).encode(), status="500 No")
    with caller(kind, server.url) as client:
        server.answers["infer"] = good + wrong
        for _ in range(3):
            assert client.infer() == GOOD


# ---- answers that arrive whole and say what cannot be --------------------------------------------------------------

DEEP = b"[" * 100_000
ONE = struct.pack("<I", 1)
DATA = struct.pack("<2f", 1, 2)


def one(data: bytes = DATA, **changes: Any) -> bytes:
    return inferred({"outputs": [output(**changes)]}, data)


def in_json(data: Any, shape: Any = (1, 2), datatype: str = "FP32") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    described = json.dumps(output(shape, datatype, size=None))
    return inferred(f'{{"outputs": [{described[:-1]}, "data": {text}}}]}}'.encode())


ANSWERS: dict[str, bytes] = {
    "no JSON": inferred(b"hello"),
    "nothing": inferred(b""),
    "bytes that are no UTF-8": inferred(b'{"outputs": [], "id": "\xff"}'),
    "deep JSON": inferred(DEEP),
    "deep JSON that ends": inferred(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a number": inferred(b"1"),
    "null": inferred(b"null"),
    "a list": inferred(b"[]"),
    "a number of 10,000 digits": inferred(b"1" * 10_000),
    "a JSON length beyond the body": inferred({"outputs": []}, head_length=10**6),
    "a negative JSON length": inferred({"outputs": []}, head_length=-1),
    "a JSON length of 10,000 digits": inferred({"outputs": []}, head_length="9" * 10_000),
    "a JSON length of letters": inferred({"outputs": []}, head_length="abc"),
    "outputs that are a number": inferred({"outputs": 1}),
    "outputs that are an object": inferred({"outputs": {"y": 1}}),
    "outputs that are null": inferred({"outputs": None}),
    "an output that is null": inferred({"outputs": [None]}),
    "an output without a name": inferred({"outputs": [{"datatype": "FP32", "shape": [1]}]}),
    "an output twice": inferred({"outputs": [output(), output()]}, DATA + DATA),
    "a name that is a list": one(name=["y"]),
    "parameters that are a list": inferred({"outputs": [output()], "parameters": [1]}, DATA),
    "parameters of an output that are a list": one(size=None, parameters=[]),
    "a shape that is null": one(shape=None),
    "a shape that is a number": one(shape=2),
    "a shape that is text": one(shape="12"),
    "a shape that is an object": one(shape={"1": 1}),
    "a shape of texts": one(shape=["1", "2"]),
    "a shape of fractions": one(shape=[1.0, 2.0]),
    "a shape with infinity": inferred(b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1e999]}]}'),
    "a shape with NaN": inferred(b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [NaN]}]}'),
    "a shape with true": one(shape=[True, 2]),
    "a negative shape": one(shape=[1, -1]),
    "a shape of two negatives": one(shape=[-1, -2]),
    "a shape that overflows": one(shape=[2**32, 2**32]),
    "a shape that is huge": one(shape=[1, 2**62]),
    "a shape beyond 64 bits": one(shape=[10**30]),
    "an empty shape that is huge": one(b"", shape=[0, 2**63 - 1, 2**63 - 1], size=0),
    "a shape of 100,000 axes": one(shape=[1] * 100_000),
    "a shape larger than the data": one(shape=[1, 3]),
    "a shape smaller than the data": one(shape=[1, 1]),
    "a datatype that is null": one(datatype=None),
    "a datatype that is a list": one(datatype=[]),
    "a size that is negative": one(size=-8),
    "a size beyond the body": one(size=2**40),
    "a size that overflows": one(size=2**70),
    "a size with a fraction": one(size=8.0),
    "a size that is text": one(size="8"),
    "data that nobody described": one(DATA + b"more"),
    "strings that are huge in number": one(b"", shape=[2**40], datatype="BYTES", size=0),
    "strings that overflow": one(ONE + b"a", shape=[2**62, 4], datatype="BYTES", size=5),
    "a string beyond its data": one(struct.pack("<I", 2**32 - 1) + b"abc", shape=[1], datatype="BYTES", size=7),
    "a string's length that breaks off": one(b"\x01\0", shape=[1], datatype="BYTES", size=2),
    "fewer strings than the shape": one(ONE + b"a", shape=[2], datatype="BYTES", size=5),
    "more strings than the shape": one((ONE + b"a") * 2, shape=[1], datatype="BYTES", size=10),
    "JSON data that is null": in_json(None),
    "JSON data that is an object": in_json({"a": 1}),
    "JSON data that is text": in_json("12"),
    "JSON data of texts for numbers": in_json(["1", "2"]),
    "JSON data of nulls": in_json([None, None]),
    "JSON data of objects": in_json([{}, {}]),
    "JSON data too few": in_json([1]),
    "JSON data for a huge shape": in_json([1, 2], shape=[1, 2**62]),
    "JSON data in uneven lists": in_json([[1], 2]),
    "JSON data nested deep": in_json("[" * 500 + "1" + "]" * 500, shape=[2]),
    "JSON data with infinity for integers": in_json("[1e999, 1]", datatype="INT32"),
    "JSON data with NaN for integers": in_json("[NaN, 1]", datatype="INT32"),
    "JSON data with fractions for integers": in_json([1.5, 1], datatype="INT32"),
    "JSON data too large for its type": in_json([300, 1], datatype="UINT8"),
    "JSON data negative for its type": in_json([-1, 1], datatype="UINT64"),
    "JSON data too large for floats": in_json([10**400, 1], datatype="FP64"),
    "JSON data too large for small floats": in_json("[1e300, 1]", datatype="FP32"),
    "JSON data of numbers for strings": in_json([1, 2], datatype="BYTES"),
    "JSON data with half a surrogate": in_json('["\\ud800", ""]', datatype="BYTES"),
    "gzip that nobody asked for": http(gzip.compress(b'{"outputs": []}'), "Content-Encoding: gzip"),
    "a gzip bomb": http(gzip.compress(b" " * 100 * MIB, 1), "Content-Encoding: gzip"),
}  # fmt: skip


@pytest.mark.parametrize("kind", COUPLED)
def test_answers(server: HostileServer, kind: str) -> None:
    server.keeps_open = True
    check(server, kind, {name: (sent, Refused) for name, sent in ANSWERS.items()})


def test_unknown_datatype(server: HostileServer) -> None:
    server.keeps_open = True
    rows = {"FP31": (one(datatype="FP31" + "x" * 100_000), PyTritonClientError)}
    assert "FP31" in str(check(server, "sync", rows)["FP31"])


def text(*, y: Any = (1.0, 2.0), **more: Any) -> bytes:
    return chunked(event({"model_name": "m", "y": y, **more}))


STREAMS: dict[str, bytes] = {
    "no JSON": chunked(event(b"hello")),
    "nothing": chunked(event(b"")),
    "deep JSON": chunked(event(DEEP)),
    "a list": chunked(event([])),
    "null": chunked(event(None)),
    "a number of 10,000 digits": chunked(event(b"1" * 10_000)),
    "an output that is null": text(y=None),
    "an output that is an object": text(y={"a": 1}),
    "an output of texts": text(y=["1", "2"]),
    "an output in lists": text(y=[[1.0], 2.0]),
    "an output that is true": text(y=True),
    "an output that is too large": chunked(event(b'{"model_name": "m", "y": [1e300]}')),
    "an output of huge numbers": text(y=[10**400, 1]),
    "an error that is an object": chunked(event({"error": {"a": [1]}})),
    "an error that is null": chunked(event({"error": None})),
    "an error that is long": chunked(event({"error": "e" * 10 * MIB})),
}  # fmt: skip


@pytest.mark.parametrize("kind", DECOUPLED)
def test_streams(server: HostileServer, kind: str) -> None:
    server.keeps_open = True
    check(server, kind, {name: (sent, Refused) for name, sent in STREAMS.items()})


# ---- the configuration and readiness of the model, and errors ------------------------------------------------------


def configured(**changes: Any) -> bytes:
    return http(json.dumps(config(False, **changes)).encode())


def with_input(**changes: Any) -> bytes:
    return configured(input=[{"name": "x", "data_type": "TYPE_FP32", "dims": [-1], **changes}])


CONFIGS: dict[str, bytes] = {
    "no JSON": http(b"hello"),
    "nothing": http(b""),
    "no UTF-8": http(b"\xff\xfe\xfd"),
    "deep JSON": http(DEEP),
    "a list": http(b"[]"),
    "null": http(b"null"),
    "a number": http(b"1e999"),
    "text": http(b'"config"'),
    "an empty object": http(b"{}"),
    "a batch size of infinity": http(b'{"name": "m", "max_batch_size": 1e999}'),
    "a batch size of NaN": http(b'{"name": "m", "max_batch_size": NaN}'),
    "a batch size of text": configured(max_batch_size="many"),
    "a batch size of null": configured(max_batch_size=None),
    "a batch size of 10,000 digits": http(b'{"name": "m", "max_batch_size": %s}' % (b"1" * 10_000)),
    "a batch size of a text of 10,000 digits": configured(max_batch_size="1" * 10_000),
    "inputs that are a number": configured(input=1),
    "inputs that are an object": configured(input={"x": 1}),
    "inputs that are nested": http(b'{"name": "m", "input": %s1%s}' % (b"[" * 900, b"]" * 900)),
    "an input that is null": configured(input=[None]),
    "an input without a name": configured(input=[{"data_type": "TYPE_FP32", "dims": [1]}]),
    "a shape that is a number": with_input(dims=3),
    "a shape with infinity": http(json.dumps(config(False)).replace("[-1]", "[1e999]").encode()),
    "a shape of texts": with_input(dims=["a"]),
    "a shape below -1": with_input(dims=[-2]),
    "a shape beyond 64 bits": with_input(dims=[2**70]),
    "a data type that is null": with_input(data_type=None),
    "a data type that is a number": with_input(data_type=7),
    "a data type that is unknown": with_input(data_type="TYPE_" + "X" * 100_000),
    "a policy that is text": configured(model_transaction_policy="coupled"),
    "a policy that is null": configured(model_transaction_policy=None),
    "megabytes": configured(name=["m" * 1000] * 10_000, max_batch_size="m" * MIB),
}  # fmt: skip


@pytest.mark.parametrize("kind", CLIENTS)
def test_configurations(server: HostileServer, kind: str) -> None:
    server.keeps_open = True
    check(server, kind, {name: (sent, PyTritonClientError) for name, sent in CONFIGS.items()}, place="config")


ERRORS: dict[str, bytes] = {
    "nothing": b"",
    "text": b"no",
    "no UTF-8": b"\xff" * 1000,
    "deep JSON": DEEP,
    "a deep error": b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a deeper error": b'{"error": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "an error that is null": b'{"error": null}',
    "an error that is a number": b'{"error": 1e999}',
    "an error of half a surrogate": b'{"error": "\\ud800"}',
    "no error": b"{}",
    "a list": b"[1]",
    "a long text": b"e" * 10 * MIB,
    "a long error": b'{"error": "' + b"e" * 300_000 + b'"}',
    "a wide error": b'{"error": [' + b"1," * 300_000 + b"1]}",
    "control characters": b'{"error": "\\u0000\\u001b[2J"}',
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_errors(server: HostileServer, kind: str) -> None:
    server.keeps_open = True
    rows: dict[str, tuple[Sent, type[PyTritonClientError]]] = {
        name: (http(body, status="500 No"), Refused) for name, body in ERRORS.items()
    }
    for error in check(server, kind, rows).values():
        assert isinstance(error, PyTritonClientInferenceServerError)
        assert error.status == "500"
        assert error.server_message is not None
        assert len(error.server_message) < LONGEST_ERROR


def test_both_ends_of_a_long_error_are_told(server: HostileServer) -> None:
    server.keeps_open = True
    body = json.dumps({"error": "begin " + "." * 100_000 + " end"}).encode()
    told = str(check(server, "sync", {"long": (http(body, status="500 No"), Refused)})["long"])
    assert "begin " in told
    assert " end" in told
    assert "left out" in told


@pytest.mark.parametrize("kind", CLIENTS)
def test_readiness_that_is_broken(server: HostileServer, kind: str) -> None:
    # A server that may come yet: the wait for it ends in time, and says what was seen.
    names = ["nothing", "another protocol", "a length of 3 GiB", "an endless header", "endless interim answers"]
    rows = {name: (FRAMES[name][0], TimedOut) for name in names}
    check(server, kind, rows, place="ready", init_timeout_s=0.5)


@pytest.mark.parametrize("kind", READERS)
def test_frames_of_the_configuration(server: HostileServer, kind: str) -> None:
    check(server, kind, FRAMES, place="config")
