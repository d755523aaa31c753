"""Callers over gRPC who do not read what they are answered take no more memory than the guard allows."""

from __future__ import annotations

import re
import socket
import struct
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import GuardConfig, Triton
from support.faults.hostile_grpc import (
    DATA_FRAME,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    call_headers,
    frame,
    read_frame,
)
from support.serving import local_config, running
from support.waiting import PATIENCE_S, eventually

MIB = 1 << 20
CALLS = 12
INITIAL_WINDOW_SIZE = 4


def large(requests: Any) -> Any:
    return [{"y": np.zeros(8 * MIB, np.uint8)} for _ in requests]


def large_stream(requests: Any) -> Iterator[Any]:
    yield large(requests)


def ended_calls(triton: Triton) -> int:
    """Return how many calls the server has ended, in whatever way."""
    with urllib.request.urlopen(str(triton.metrics_url), timeout=PATIENCE_S) as response:
        text = response.read().decode()
    lines = re.findall(r'^pytriton_responses_total\{[^}]*model="large"[^}]*\} (\S+)$', text, re.MULTILINE)
    return int(sum(map(float, lines)))


# With the pattern, all that comes over gRPC goes on to Triton's own front end.
@pytest.mark.parametrize("pattern", [None, "x-.*"], ids=["own", "forwarded"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_answers_that_are_not_read_are_counted(pattern: str | None, method: str) -> None:
    """The first calls are answered whole when their caller reads at last; the others get an error."""
    is_stream = method == "ModelStreamInfer"
    guard = GuardConfig(max_in_flight_bytes=32 * MIB)
    config = local_config(grpc_header_forward_pattern=pattern, allow_metrics=True, metrics_port=0)
    triton = Triton(config=config, guard=guard)
    tensors = [Tensor((1,), np.uint8, "x")], [Tensor((-1,), np.uint8, "y")]
    triton.bind(
        "large",
        large_stream if is_stream else large,
        *tensors,
        config=ModelConfig(batching=False, decoupled=is_stream),
    )
    request = service_pb2.ModelInferRequest(model_name="large", raw_input_contents=[b"\0"])
    request.inputs.add(name="x", datatype="UINT8", shape=[1])
    message = request.SerializeToString()
    head = call_headers(method)
    streams = range(1, 2 * CALLS, 2)
    with running(triton):
        host, _, port = str(triton.grpc_url).partition("//")[2].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)))
            for stream in streams:
                connection.sendall(
                    frame(HEADERS, END_HEADERS, stream, head)
                    + frame(DATA_FRAME, END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message)
                )
            reader = connection.makefile("rb", buffering=1 << 20)
            received: Counter[int] = Counter()
            ended: set[int] = set()

            def read() -> None:
                kind, flags, stream, length = read_frame(reader)
                received[stream] += length * (kind == DATA_FRAME)
                if kind in (DATA_FRAME, HEADERS) and flags & END_STREAM:
                    ended.add(stream)

            # The server has made each answer before any of it is read.
            eventually(lambda: ended_calls(triton) == CALLS)
            window = struct.pack(">I", 1 << 30)
            connection.sendall(b"".join(frame(WINDOW_UPDATE, 0, stream, window) for stream in (0, *streams)))
            while len(ended) < CALLS:
                read()
    whole = [stream for stream in streams if received[stream] > 8 * MIB]
    assert 1 <= len(whole) <= CALLS // 2
    assert all(received[stream] == 0 for stream in streams if stream not in whole)
