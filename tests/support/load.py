"""Callers that keep a server busy and count what becomes of every request."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import tritonclient.grpc

from support.http import infer
from support.waiting import PATIENCE_S


def ask_while_killed(url: str, victims: Callable[[], Iterable[int]], share: float, idle_s: float) -> None:
    """Ask the model `m`, which doubles, around the time after which it sleeps, while processes of it are killed.

    Every request is answered rightly, or its caller is told which worker was lost.

    Args:
        url: Where it is served over HTTP.
        victims: Returns the processes.
        share: The part of them that is killed each time.
        idle_s: After how long without a request it sleeps.
    """
    chance = random.Random(35)
    over = threading.Event()
    told: list[str] = []
    answered = 0

    def kill() -> None:
        # Few enough that one comes up between them on any machine.
        for _ in range(12):
            if over.wait(chance.uniform(0.1, 2.0)):
                return
            for pid in victims():
                if chance.random() < share:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with ThreadPoolExecutor(4) as callers:
            for _ in range(8):
                time.sleep(chance.uniform(0.0, 2.0) * idle_s)
                values = [float(chance.randrange(1, 1000)) for _ in range(4)]
                answers = callers.map(lambda value: infer(url, "m", value), values)
                for value, answer in zip(values, answers, strict=True):
                    if isinstance(answer, str):
                        told.append(answer)
                    else:
                        assert answer == [2 * value]
                        answered += 1
    finally:
        over.set()
        killer.join()
    assert all("was lost" in text for text in told), told
    assert answered + len(told) == 32


class Load:
    """Threads that ask one model over HTTP and gRPC, each for something else every time, until they are told to stop.

    The model takes `x`, float32 of one row and one column, and answers `y`, which is `x` times a factor that tells
    which callable it was.
    """

    def __init__(
        self, http_url: str, grpc_url: str, model: str, *, version: int | None = None, threads: int = 3
    ) -> None:
        self._http = http_url.removeprefix("http://")
        self._grpc = grpc_url.removeprefix("grpc://")
        self._model = model
        self._version = "" if version is None else str(version)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.sent = 0
        self.answers: list[tuple[float, float]] = []
        """When the request was sent, as `time.monotonic` has it, and the factor of its answer."""
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(kind, number), name=f"load-{number}")
            for number, kind in enumerate([self._over_http, self._over_grpc] * threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop asking and wait until every request is answered."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a request was never answered"

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true; fails when it is not in a minute, or when a request has failed."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert not self.failures, self.failures[0]
            assert time.monotonic() < deadline, "it did not come true"
            time.sleep(0.005)

    def wait_for_more(self, count: int = 40) -> None:
        """Wait for more answers."""
        goal = len(self.answers) + count
        self.wait_for(lambda: len(self.answers) >= goal)

    def factors_since(self, moment: float) -> set[float]:
        """Return the factors of all requests that were sent after a moment."""
        with self._lock:
            return {factor for sent, factor in self.answers if sent >= moment}

    def _run(self, kind: Callable[[], Iterator[Callable[[float], float]]], number: int) -> None:
        with contextmanager(kind)() as ask:
            for count in itertools.count():
                # Different ones for all who ask at a time, and small enough that float32 has their products exactly.
                x = float(1 + (count * 61 + number * 7) % 9973)
                if self._stop.is_set():
                    return
                with self._lock:
                    self.sent += 1
                sent = time.monotonic()
                try:
                    answer = ask(x)
                except Exception as error:
                    with self._lock:
                        self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                    return
                with self._lock:
                    self.answers.append((sent, answer / x))

    def _over_http(self) -> Iterator[Callable[[float], float]]:
        connection = http.client.HTTPConnection(self._http, timeout=PATIENCE_S)
        version = f"/versions/{self._version}" if self._version else ""

        def ask(x: float) -> float:
            tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [x]}
            connection.request("POST", f"/v2/models/{self._model}{version}/infer", json.dumps({"inputs": [tensor]}))
            response = connection.getresponse()
            text = response.read().decode()
            if response.status != 200:
                raise RuntimeError(text)
            answer: dict[str, Any] = json.loads(text)
            return float(answer["outputs"][0]["data"][0])

        try:
            yield ask
        finally:
            connection.close()

    def _over_grpc(self) -> Iterator[Callable[[float], float]]:
        client = tritonclient.grpc.InferenceServerClient(self._grpc)

        def ask(x: float) -> float:
            tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.array([[x]], np.float32))
            result = client.infer(self._model, [tensor], model_version=self._version, client_timeout=PATIENCE_S)
            return float(result.as_numpy("y")[0, 0])

        try:
            yield ask
        finally:
            client.close()


@contextmanager
def under_load(http_url: str | None, grpc_url: str | None, model: str, **options: Any) -> Iterator[Load]:
    """Ask a model from several threads as long as the block runs, from its first answer on."""
    assert http_url is not None
    assert grpc_url is not None
    load = Load(http_url, grpc_url, model, **options)
    load.start()
    try:
        load.wait_for_more(1)
        yield load
    finally:
        load.end()
