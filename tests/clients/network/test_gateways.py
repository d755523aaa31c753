"""Servers behind a gateway, which has them below a path, or has a page of its own in their place."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import pytest

from pytriton.client import (
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientModelNotReadyError
from pytriton.client.utils import create_client_from_url
from support.clients import KINDS, ROW, ask_all, serving_all
from support.http import Forwards, serving
from support.waiting import PATIENCE_S

WAIT_S = 0.5
PREFIX = "/models/my%20team"
PAGE = b"\n<html><title>Bad\x1b[31m " + b"x" * 5000 + b"</title>\nsecond line</html>"


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with serving_all() as server:
        upstream = urlsplit(str(server.http_url)).netloc
        with serving(type("Handler", (Forwards,), {"upstream": upstream, "prefix": PREFIX})) as address:
            yield f"http://{address}{PREFIX}"


def test_a_server_below_a_path(gateway: str) -> None:
    ask_all(gateway)
    ask_all(f"{gateway}/")
    with ModelClient(gateway, "same") as client, ModelClient.from_existing_client(client) as other:
        KINDS["sync"].check(other)
    with create_client_from_url(gateway) as lent:
        assert lent.is_model_ready("same")
    for command in (["infer", gateway, "same", "x=[1, 2]"], ["models", gateway, "same"]):
        done = subprocess.run(
            [sys.executable, "-m", "pytriton", *command],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("status", [302, 404, 429, 500, 502, 503])
def test_the_page_of_a_gateway_is_told_when_the_wait_is_over(status: int) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *_: object) -> None:
            pass

    errors: list[PyTritonClientError] = []
    with serving(Page) as address:
        kinds = (ModelClient, DecoupledModelClient) if status == 502 else (ModelClient,)
        for kind in kinds:
            with kind(address, "echo", init_timeout_s=WAIT_S) as client:
                with pytest.raises(PyTritonClientModelNotReadyError) as caught:
                    client.infer_sample(ROW)
                errors.append(caught.value)

        async def ask() -> None:
            async with AsyncioModelClient(address, "echo", init_timeout_s=WAIT_S) as client:
                with pytest.raises(PyTritonClientModelNotReadyError) as caught:
                    await client.infer_sample(ROW)
                errors.append(caught.value)

        if status == 502:
            asyncio.run(ask())
            with FuturesModelClient(address, "echo", init_timeout_s=WAIT_S) as futures:
                error = futures.infer_sample(ROW).exception(PATIENCE_S)
                assert isinstance(error, PyTritonClientModelNotReadyError)
                errors.append(error)
    for error in errors:
        assert f"the HTTP status {status} and '<html><title>Bad\\x1b[31m xxx" in error.message
        assert "second line" not in error.message
        assert len(error.message) < 1000


def test_a_server_that_is_not_ready_is_no_gateway() -> None:
    class NotReady(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"error": "unknown model"}' if "versions" in self.path else b""
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving(NotReady) as address:
        for version in (None, "2"):
            missing = pytest.raises(PyTritonClientModelNotReadyError, match="the model echo is missing or not ready")
            with ModelClient(address, "echo", version, init_timeout_s=WAIT_S) as client, missing:
                client.infer_sample(ROW)


@pytest.mark.parametrize("status", [302, 404, 429, 500, 502, 503])
def test_over_grpc_the_status_of_the_page_is_told(status: int) -> None:
    # The frames of HTTP/2 that such a gateway sends: SETTINGS, then HEADERS that end each stream with the status.
    digits = str(status).encode()
    block = b"\x08" + bytes([len(digits)]) + digits  # the name `:status`, from the static table, and the value

    def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + payload

    def answer(connected: Any) -> None:
        with contextlib.suppress(OSError), connected:
            received = connected.makefile("rb")
            received.read(24)
            connected.sendall(frame(4, 0, 0))
            while head := received.read(9):
                received.read(int.from_bytes(head[:3], "big"))
                if head[3] == 4 and not head[4]:
                    connected.sendall(frame(4, 1, 0))
                if head[3] == 1:
                    connected.sendall(frame(1, 5, int.from_bytes(head[5:], "big"), block))

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        url = f"grpc://127.0.0.1:{listening.getsockname()[1]}"
        told = pytest.raises(PyTritonClientModelNotReadyError, match=f"the HTTP status {status}")
        with ModelClient(url, "echo", init_timeout_s=WAIT_S) as client, told:
            client.infer_sample(ROW)

        async def ask() -> None:
            async with AsyncioModelClient(url, "echo", init_timeout_s=WAIT_S) as client:
                with pytest.raises(PyTritonClientModelNotReadyError, match=f"the HTTP status {status}"):
                    await client.infer_sample(ROW)

        if status == 502:
            asyncio.run(ask())
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
