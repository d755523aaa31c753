"""An HTTP server that answers with whatever bytes a test gives it, and the five clients that ask it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client.management import DirectStreamsClient
from support.waiting import PATIENCE_S

# What is sent for a request: bytes, or pieces of them as long as somebody reads.
Sent = bytes | Callable[[], Iterable[bytes]]

COUPLED = ("sync", "futures", "asyncio")
DECOUPLED = ("decoupled", "asyncio decoupled", "asyncio direct")
CLIENTS = (*COUPLED, *DECOUPLED)
# One of each way to read an answer.
READERS = ("sync", "asyncio")


def http(body: bytes = b"", *headers: str, status: str = "200 OK", length: object = None) -> bytes:
    """Return a response; its length is what it is, or what is given."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1") + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """Return a response in chunks."""
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded + end


def inferred(head: Any, data: bytes = b"", head_length: object = None) -> bytes:
    """Return the response to an inference: JSON, or its text as it stands, and binary data."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return http(text + data, f"Inference-Header-Content-Length: {len(text) if head_length is None else head_length}")


def output(shape: Any = (1, 2), datatype: Any = "FP32", name: Any = "y", size: Any = 8, **more: Any) -> dict[str, Any]:
    """Return an output as a response describes it; without a size its data is in the JSON."""
    found = {"name": name, "datatype": datatype, "shape": shape, **more}
    return found if size is None else {**found, "parameters": {"binary_data_size": size}}


def event(content: Any) -> bytes:
    """Return one response of a stream: JSON, or its text as it stands."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return b"data: " + text + b"\n\n"


def config(decoupled: bool, **changes: Any) -> dict[str, Any]:
    """Return the configuration of the model `m`."""
    return {
        "name": "m",
        "max_batch_size": 4,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
        "model_transaction_policy": {"decoupled": decoupled},
        **changes,
    }


GOOD_INFER = inferred({"model_name": "m", "outputs": [output()]}, struct.pack("<2f", 1, 2))
GOOD_STREAM = chunked(event({"model_name": "m", "model_version": "1", "y": [1.0, 2.0]}))


class HostileServer:
    """Answers well, but for the places where a test says otherwise: `ready`, `config` and `infer`."""

    def __init__(self) -> None:
        self.answers: dict[str, Sent] = {}  # what is sent for a place; without an entry the good answer
        self.keeps_open = False  # whether a connection stays open after such an answer; else it is closed
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"  # of the server
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join(PATIENCE_S)
        self._listening.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._connections.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as reader:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := reader.readline():
                length = 0
                while line := reader.readline().strip():
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                reader.read(length)
                place, good = _place_of(request.split()[1].decode())
                # The test may change its mind while this is sent.
                is_hostile, sent = place in self.answers, self.answers.get(place, good)
                for piece in [sent] if isinstance(sent, bytes) else sent():
                    connection.sendall(piece)
                if is_hostile and not self.keeps_open:
                    # Else what the client still sends would end the connection with a reset, and with it the answer.
                    connection.shutdown(socket.SHUT_WR)
        self._connections.discard(connection)


def _place_of(path: str) -> tuple[str, bytes]:
    decoupled = "/models/d" in path
    if path.endswith("/ready"):
        return "ready", http()
    if path.endswith("/config"):
        return "config", http(json.dumps(config(decoupled)).encode())
    return "infer", GOOD_STREAM if decoupled else GOOD_INFER


@contextlib.contextmanager
def hostile_server() -> Iterator[HostileServer]:
    """Run a server of that kind."""
    server = HostileServer()
    try:
        yield server
    finally:
        server.close()


class Caller:
    """One client of any of the five classes, called the same way whatever it waits with.

    Args:
        kind: One of `CLIENTS`.
        url: Of the server.
        options: For the client.
    """

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self.kind = kind
        self._loop = asyncio.new_event_loop() if "asyncio" in kind else None
        made = {
            "sync": ModelClient,
            "futures": FuturesModelClient,
            "asyncio": AsyncioModelClient,
            "decoupled": DecoupledModelClient,
            "asyncio decoupled": AsyncioDecoupledModelClient,
            "asyncio direct": DirectStreamsClient,
        }[kind]
        options.setdefault("init_timeout_s", PATIENCE_S)
        options.setdefault("inference_timeout_s", PATIENCE_S)
        client: Any = made(url, "d" if kind in DECOUPLED else "m", **options)
        # A stream has a strict limit for each response only where a view of the client says so.
        self._client = client.with_options(timeout_s=options["inference_timeout_s"]) if kind in DECOUPLED else client

    def infer(self) -> list[list[float] | None]:
        """Infer one sample; gives the values of `y` in each response, `None` if it is not among the outputs."""
        given = np.ones(2, np.float32)
        if self.kind == "decoupled":
            results = list(self._client.infer_sample(given))
        elif self.kind == "futures":
            results = [self._client.infer_sample(given).result(PATIENCE_S)]
        elif self.kind == "sync":
            results = [self._client.infer_sample(given)]
        else:
            assert self._loop is not None
            results = self._loop.run_until_complete(self._infer_async(given))
        return [result["y"].tolist() if "y" in result else None for result in results]

    async def _infer_async(self, given: Any) -> list[Any]:
        if self.kind == "asyncio":
            return [await self._client.infer_sample(given)]
        return [result async for result in self._client.infer_sample(given)]

    def close(self) -> None:
        if self._loop is None:
            self._client.close()
            return
        self._loop.run_until_complete(self._client.close())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@contextlib.contextmanager
def caller(kind: str, url: str, **options: Any) -> Iterator[Caller]:
    """Make a client, and close it in the end."""
    one = Caller(kind, url, **options)
    try:
        yield one
    finally:
        one.close()
