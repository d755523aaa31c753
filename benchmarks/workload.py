"""What is served, and what is sent to it.

Two models, both add two float32 tensors of shape `(batch, 4)`; `delay` also sleeps 5 ms per batch, whatever its size,
like a device that computes a batch of 16 as fast as a single row. Two wire forms: KServe v2 with binary tensors, and
raw bytes for servers without a protocol of their own.
"""

from __future__ import annotations

import http.client
import json
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass

WIDTH = 4
"""Elements in a row of each tensor."""
MAX_BATCH_SIZE = 16
DELAY_S = 0.005
"""How long the `delay` model takes for a batch, in seconds."""
_ROW = struct.Struct(f"<{WIDTH}f")
_LENGTH_HEADER = "Inference-Header-Content-Length"

Row = tuple[float, ...]


class WrongAnswerError(Exception):
    """A server answered something else than the sum."""


@dataclass(frozen=True)
class Model:
    """One served function."""

    name: str
    title: str
    ceiling: float | None = None
    """Most requests per second that are possible at `MAX_BATCH_SIZE`; `None` where only the machine limits it."""


@dataclass(frozen=True)
class Case:
    """One timed cell: a model under so many connections that each wait for an answer before they ask again."""

    model: Model
    connections: int

    @property
    def title(self) -> str:
        """One line for the table."""
        return f"{self.model.title}, {self.connections} connection{'' if self.connections == 1 else 's'}"


ADD = Model("add", f"float32[1,{WIDTH}] x 2 -> sum")
DELAY = Model("delay", f"{DELAY_S * 1e3:g} ms per batch, at most {MAX_BATCH_SIZE} in one", MAX_BATCH_SIZE / DELAY_S)
MODELS = {model.name: model for model in (ADD, DELAY)}
DELAY_CONNECTIONS = 32


class KServeWire:
    """KServe v2 over HTTP with the binary tensor extension, as Triton speaks it."""

    def path(self, model: str) -> str:
        """Return where to POST to."""
        return f"/v2/models/{model}/infer"

    def encode(self, a: Row, b: Row) -> tuple[dict[str, str], bytes]:
        """Return the headers and the body of a request."""
        tensor = {"shape": [1, WIDTH], "datatype": "FP32", "parameters": {"binary_data_size": _ROW.size}}
        header = json.dumps(
            {
                "inputs": [{"name": "a", **tensor}, {"name": "b", **tensor}],
                "parameters": {"binary_data_output": True},
            },
            separators=(",", ":"),
        ).encode()
        headers = {"Content-Type": "application/octet-stream", _LENGTH_HEADER: str(len(header))}
        return headers, header + _ROW.pack(*a) + _ROW.pack(*b)

    def decode(self, headers: Mapping[str, str], body: bytes) -> Row:
        """Return the sum from an answer, header names in lower case; raises `WrongAnswerError` for another form."""
        split = headers.get(_LENGTH_HEADER.lower())
        if split is None:
            raise WrongAnswerError(f"expected the header {_LENGTH_HEADER}, received {dict(headers)} and {body[:200]!r}")
        outputs = json.loads(body[: int(split)])["outputs"]
        found = [(output["name"], output["shape"], output["datatype"]) for output in outputs]
        if found != [("total", [1, WIDTH], "FP32")]:
            raise WrongAnswerError(f"expected one output total FP32 [1, {WIDTH}], received {found}")
        return _unpack(body[int(split) :])


class RawWire:
    """The bytes of both rows in, the bytes of their sum out."""

    def path(self, model: str) -> str:
        """Return where to POST to."""
        return f"/{model}"

    def encode(self, a: Row, b: Row) -> tuple[dict[str, str], bytes]:
        """Return the headers and the body of a request."""
        return {"Content-Type": "application/octet-stream"}, _ROW.pack(*a) + _ROW.pack(*b)

    def decode(self, headers: Mapping[str, str], body: bytes) -> Row:
        """Return the sum from an answer; raises `WrongAnswerError` when the answer has another length."""
        return _unpack(body)


Wire = KServeWire | RawWire


def check_answers(
    port: int, wire: Wire, model: str, *, threads: int = 1, requests: int = 1, timeout_s: float = 10
) -> None:
    """Ask for sums that differ from request to request and compare every answer.

    Several threads make the server form batches, so rows that come back to the wrong caller show up.

    Raises:
        WrongAnswerError: an answer has another status, form or value than expected.
        OSError: the server does not listen, or closed the connection, or did not answer within `timeout_s` seconds.
    """
    failures: list[Exception] = []

    def ask(thread: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        try:
            for request in range(requests):
                a = tuple(float(thread * 1000 + request + column) for column in range(WIDTH))
                b = tuple(0.5 * column for column in range(WIDTH))
                _ask(connection, wire, model, a, b)
        except (WrongAnswerError, OSError, http.client.HTTPException) as error:
            failures.append(error)
        finally:
            connection.close()

    crowd = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(threads)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(requests * timeout_s)
    if any(thread.is_alive() for thread in crowd):
        raise TimeoutError(f"waited {requests * timeout_s:g} s for {requests} answers of model {model} on port {port}")
    if failures:
        error = failures[0]
        raise OSError(f"{type(error).__name__}: {error}") if isinstance(error, http.client.HTTPException) else error


def _ask(connection: http.client.HTTPConnection, wire: Wire, model: str, a: Row, b: Row) -> None:
    headers, body = wire.encode(a, b)
    connection.request("POST", wire.path(model), body, headers)
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise WrongAnswerError(
            f"expected status 200 from {wire.path(model)}, received {response.status}: {answer[:200]!r}"
        )
    expected = tuple(x + y for x, y in zip(a, b, strict=True))
    received = wire.decode({name.lower(): value for name, value in response.getheaders()}, answer)
    if received != expected:
        raise WrongAnswerError(f"expected {a} + {b} = {expected} from {wire.path(model)}, received {received}")


def _unpack(data: bytes) -> Row:
    if len(data) != _ROW.size:
        raise WrongAnswerError(f"expected {_ROW.size} bytes of float32, received {len(data)}: {data[:200]!r}")
    return _ROW.unpack(data)
