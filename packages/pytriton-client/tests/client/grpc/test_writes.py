"""Time limits of gRPC calls whose message the server does not read, which gRPC itself does not keep."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pytriton.client import AsyncioModelClient, ModelClient, ModelSpec, TensorSpec
from pytriton.client.exceptions import PyTritonClientClosedError, PyTritonClientTimeoutError

SPEC = ModelSpec("deaf", batching=True, max_batch_size=1, inputs=(TensorSpec("x", (-1,), np.float32),), outputs=())
# More than the buffers of the sockets of both sides hold.
BIG = np.zeros(8_000_000, np.float32)
LIMIT_S = 0.5


def _frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + bytes(4) + payload


# SETTINGS with the largest window for a stream, and a WINDOW_UPDATE for the connection: the client may send at will.
GREETING = _frame(4, struct.pack(">HI", 4, 2**31 - 1)) + _frame(8, struct.pack(">I", 2**30))


@pytest.fixture
def accepted() -> list[socket.socket]:
    return []


@pytest.fixture
def hang_up(accepted: list[socket.socket]) -> Callable[[], None]:
    """Ends the connections of the server."""

    def close_all() -> None:
        for connection in accepted:
            connection.close()

    return close_all


@pytest.fixture
def deaf_url(accepted: list[socket.socket], hang_up: Callable[[], None]) -> Iterator[str]:
    """The address of a server that takes connections, says hello in HTTP/2 and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return  # the test is over
                accepted.append(connection)
                connection.sendall(GREETING)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(300)
            hang_up()


def test_a_big_message_keeps_its_time_limit(deaf_url: str) -> None:
    with ModelClient(
        deaf_url, "deaf", model_config=SPEC, ensure_model_is_ready=False, inference_timeout_s=LIMIT_S
    ) as client:
        for value in (BIG, BIG, BIG[:1]):
            with pytest.raises(PyTritonClientTimeoutError, match="inference request"):
                client.infer_sample(value)


def test_close_ends_a_call_that_is_being_written(deaf_url: str) -> None:
    client = ModelClient(deaf_url, "deaf", model_config=SPEC, ensure_model_is_ready=False, inference_timeout_s=3600)
    timer = threading.Timer(LIMIT_S, client.close)
    timer.start()
    with pytest.raises(PyTritonClientClosedError):
        client.infer_sample(BIG)
    timer.join()


def test_a_big_message_of_a_task_keeps_its_time_limit(deaf_url: str, hang_up: Callable[[], None]) -> None:
    async def infer() -> None:
        async with AsyncioModelClient(
            deaf_url, "deaf", model_config=SPEC, ensure_model_is_ready=False, inference_timeout_s=LIMIT_S
        ) as client:
            try:
                for value in (BIG, BIG[:1]):
                    with pytest.raises(PyTritonClientTimeoutError, match="inference request"):
                        await client.infer_sample(value)
            finally:
                # grpc.aio waits for the writes when its last channel closes, and has no limit for that.
                hang_up()

    asyncio.run(infer())
