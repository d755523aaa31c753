"""The server that the fuzz test attacks: a real tritonserver with bound models of every kind."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonServerError
from support.http import call
from support.servers import server_version
from support.serving import local_config, server_pid, short_home

F4, I4, I8 = np.float32, np.int32, np.int64


def _ones(requests: Any) -> Any:
    return [{"y": np.ones((request["x"].shape[0], 1), F4)} for request in requests]


def _one(requests: Any) -> Any:
    return [{"y": np.ones((1, 1), F4)} for request in requests]


def _same(requests: Any) -> Any:
    return [{"y": request["x"]} for request in requests]


def _two_responses(requests: Any) -> Iterator[Any]:
    for _ in range(2):
        yield [{"y": np.ones((request["x"].shape[0], 1), I4)} for request in requests]


def _bind(triton: Triton) -> None:
    x, y = Tensor((-1,), F4, "x"), Tensor((-1,), F4, "y")
    quick = DynamicBatcher(max_queue_delay_microseconds=100)
    triton.bind("batched", _ones, [x], [y], config=ModelConfig(max_batch_size=16, batcher=quick))
    inputs = [Tensor((-1, -1), F4, "x"), Tensor((-1, -1), I8, "n", optional=True)]
    triton.bind("plain", _one, inputs, [Tensor((-1, -1), F4, "y")], config=ModelConfig(batching=False))
    words = ModelConfig(max_batch_size=16)
    triton.bind("words", _same, [Tensor((-1,), bytes, "x")], [Tensor((-1,), bytes, "y")], config=words)
    stream = ModelConfig(max_batch_size=4, decoupled=True)
    triton.bind("stream", _two_responses, [Tensor((-1,), I4, "x")], [Tensor((-1,), I4, "y")], config=stream)
    triton.bind("sequence", _ones, [x], [y], config=ModelConfig(max_batch_size=16))


class Served:
    """A server that runs."""

    def __init__(self, triton: Triton) -> None:
        self.triton = triton  # it
        self.pid = server_pid(triton)  # the process of tritonserver
        self.url = str(triton.http_url)  # of its HTTP
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.address = (host, int(port))  # the same, for a socket
        self.grpc_address = str(triton.grpc_url).removeprefix("grpc://")  # where it listens for gRPC
        self.token = triton.get_access_token() or ""  # its access token

    def is_alive(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    def rss_mib(self) -> int:
        """Return the memory that it has, in MiB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    def answers(self) -> None:
        """Check that each model still answers a good request rightly."""
        for model, datatype, data, expected in (
            ("batched", "FP32", [1, 2], [1.0]),
            ("plain", "FP32", [1, 2], [1.0]),
            ("words", "BYTES", ["a", "b"], ["a", "b"]),
            ("sequence", "FP32", [1, 2], [1.0]),
        ):
            tensor = {"name": "x", "shape": [1, 2], "datatype": datatype, "data": data}
            status, answer = call(self.url, "POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
            assert status == 200, (model, answer)
            assert answer["outputs"][0]["data"] == expected, (model, answer)
        # Older servers take one element alone here.
        x = [1, 2] if server_version() >= (2, 51) else [1]
        status, text = call(self.url, "POST", "/v2/models/stream/generate_stream", {"x": x})
        assert (status, text.count('"y":1')) == (200, 2), text

    def goes_on(self) -> bool:
        """Return whether it lives and answers good requests as if nothing had happened."""
        try:
            self.answers()
        except (OSError, HTTPException):
            return False  # it is ending, if it has not ended
        return self.is_alive()


@contextmanager
def served(**settings: Any) -> Iterator[Served]:
    """Run a server with the models of `bodies.MODELS`. Its death is for the test to tell.

    Args:
        settings: Of the server, beside those of a local one.
    """
    with short_home():
        triton = Triton(config=local_config(**settings))
        _bind(triton)
        triton.run()
        server = Served(triton)
        try:
            yield server
        finally:
            try:
                triton.stop()
            except TritonServerError:
                # One that died says so again here.
                if server.is_alive():
                    raise


class Recent:
    """The last few things that happened, written by several threads."""

    def __init__(self, most: int) -> None:
        self._numbers: deque[int] = deque(maxlen=most)
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self._numbers.append(number)

    def list(self) -> list[int]:
        with self._lock:
            return list(self._numbers)
