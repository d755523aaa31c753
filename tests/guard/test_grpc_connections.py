"""How long connections of gRPC may be silent, and how old they get, is what Triton's options say."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import Triton
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
AGE_S = 1.5


@batch
def double(x: Any) -> Any:
    return {"y": 2 * x}


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    config = local_config(
        grpc_keepalive_time=200,
        grpc_keepalive_timeout=300,
        grpc_keepalive_permit_without_calls=True,
        grpc_max_connection_age=int(AGE_S * 1000),
        grpc_max_connection_age_grace=500,
    )
    with short_home():
        triton = Triton(config=config)
        triton.bind("double", double, [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")])
        with running(triton):
            yield triton


def frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags, 0, 0, 0, 0)) + payload


def frames(triton: Triton, *, answers: bool) -> list[int]:
    """Say nothing but the answers to the server's questions; returns the kinds of frames up to the end."""
    host, _, port = str(triton.grpc_url).partition("//")[2].rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection, connection.makefile("rb") as received:
        connection.sendall(PREFACE + frame(SETTINGS))
        kinds = []
        while header := received.read(9):
            kind, flags = header[3], header[4]
            payload = received.read(int.from_bytes(header[:3], "big"))
            kinds.append(kind)
            if kind in (PING, SETTINGS) and not flags & ACK and answers:
                connection.sendall(frame(kind, ACK, payload if kind == PING else b""))
        return kinds


def test_a_client_that_answers_nothing_is_left(served: Triton) -> None:
    kinds = frames(served, answers=False)
    assert kinds[-1] == PING
    assert GOAWAY not in kinds


def test_an_old_connection_ends_after_a_goodbye(served: Triton) -> None:
    kinds = frames(served, answers=True)
    assert kinds.count(PING) > 1
    assert GOAWAY in kinds


def test_calls_go_on_over_the_next_connection(served: Triton) -> None:
    with ModelClient(str(served.grpc_url), "double", inference_timeout_s=PATIENCE_S) as client:
        begun = time.monotonic()
        while time.monotonic() - begun < 2 * AGE_S:
            assert (client.infer_sample(np.ones(2, np.float32))["y"] == 2).all()
