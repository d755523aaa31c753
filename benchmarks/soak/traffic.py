"""The callers of the soak: each asks until it is told to stop, and enters what becomes of every request."""

from __future__ import annotations

import asyncio
import http.client
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np

from benchmarks.soak.calls import RequestFactory, SoakRequest
from benchmarks.soak.models import STREAM_FAILS
from benchmarks.soak.tally import Tally
from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client.exceptions import PyTritonClientInferenceServerError

# No request of the soak takes so long; one that does is as good as lost.
PATIENCE_S = 90.0
_WINDOW = 8
_TASKS = 4
_MODELS = ("bytes", "text", "killed", "repeated", "waits", "hangs", "refuses")
_FOUR_LITTLE = np.array([1, 2, 3, 4], np.uint8)


def settle(tally: Tally, kind: str, request: SoakRequest, answer: Mapping[str, Any] | BaseException) -> None:
    """Enter what became of a request."""
    if not isinstance(answer, BaseException):
        right = request.is_right(answer)
        tally.end(kind, "answered", None if right else f"a wrong answer of {request.model}: {dict(answer)!r:.300}")
        return
    allowed_outcome = request.allowed_outcome(answer)
    problem = None if allowed_outcome else f"{request.model}: {type(answer).__name__}: {answer}"
    tally.end(kind, allowed_outcome or "", problem, by_error=True)


class Callers:
    """All callers.

    Args:
        http_url: Of the server.
        grpc_url: Likewise.
        make_factory: Makes the request factory of a caller with this name.
        tally: Where everything is entered.
    """

    def __init__(
        self, http_url: str, grpc_url: str, make_factory: Callable[[str], RequestFactory], tally: Tally
    ) -> None:
        self._urls = {"http": http_url, "grpc": grpc_url}
        self._make_factory = make_factory
        self._tally = tally
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        for scheme in self._urls:
            for name, run in (
                ("sync", self._sync),
                ("sync-2", self._sync),
                ("futures", self._futures),
                ("asyncio", self._asyncio),
                ("stream", self._stream),
            ):
                self._add(f"{name}/{scheme}", run, scheme)
        self._add("asyncio-stream/grpc", self._asyncio_streams, "grpc")
        self._add("raw/http", self._raw, "http")

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Send nothing more, and wait for what is under way."""
        self._stop.set()
        deadline = time.monotonic() + PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._tally.note(f"{thread.name} still waits {PATIENCE_S:g} s after the last request was sent")

    def _add(self, name: str, run: Callable[[str, str], None], scheme: str) -> None:
        def guarded() -> None:
            try:
                run(name, scheme)
            except Exception as error:
                self._tally.note(f"{name} broke off: {type(error).__name__}: {error}")

        self._threads.append(threading.Thread(target=guarded, name=f"soak-{name}", daemon=True))

    def _pause(self, dice: random.Random) -> None:
        # Leaves the processor to others now and then; a soak looks for faults, not for throughput.
        self._stop.wait(dice.random() * 0.02)

    def _sync(self, name: str, scheme: str) -> None:
        """Send one request after the other."""
        factory = self._make_factory(name)
        clients = {model: ModelClient(self._urls[scheme], model, inference_timeout_s=PATIENCE_S) for model in _MODELS}
        while not self._stop.is_set():
            request = factory.any()
            client = clients[request.model]
            if request.timeout_s is not None:
                client = client.with_options(timeout_s=request.timeout_s)
            self._tally.begin(name)
            try:
                answer: Any = client.infer_sample(**request.inputs)
            except Exception as error:
                answer = error
            settle(self._tally, name, request, answer)
            if factory.random.random() < 0.01:
                # A client that goes and comes; its connections must go with it.
                clients.pop(request.model).close()
                clients[request.model] = ModelClient(self._urls[scheme], request.model, inference_timeout_s=PATIENCE_S)
            self._pause(factory.random)
        for client in clients.values():
            client.close()

    def _futures(self, name: str, scheme: str) -> None:
        """Send several requests at a time; cancel some before they begin."""
        factory = self._make_factory(name)
        clients = {
            model: FuturesModelClient(self._urls[scheme], model, max_workers=3, inference_timeout_s=PATIENCE_S)
            for model in _MODELS
        }
        while not self._stop.is_set():
            asked: list[tuple[SoakRequest, Future[Any]]] = []
            for _ in range(_WINDOW):
                request = factory.any()
                client = clients[request.model]
                if request.timeout_s is not None:
                    client = client.with_options(timeout_s=request.timeout_s)
                self._tally.begin(name)
                asked.append((request, client.infer_sample(**request.inputs)))
            for request, future in asked:
                if factory.random.random() < 0.1 and future.cancel():
                    self._tally.end(name, "cancelled")
                    continue
                try:
                    answer = future.result(2 * PATIENCE_S)
                except Exception as error:
                    answer = error
                settle(self._tally, name, request, answer)
            self._pause(factory.random)
        for client in clients.values():
            client.close()

    def _asyncio(self, name: str, scheme: str) -> None:
        """Send requests from several tasks; cancel some in the middle of a call."""
        factory = self._make_factory(name)

        async def ask(clients: Mapping[str, AsyncioModelClient]) -> None:
            request = factory.any()
            client = clients[request.model]
            if request.timeout_s is not None:
                client = client.with_options(timeout_s=request.timeout_s)
            self._tally.begin(name)
            call = asyncio.ensure_future(client.infer_sample(**request.inputs))
            if factory.random.random() < 0.1:
                await asyncio.wait([call], timeout=factory.random.random() * 0.05)
                call.cancel()
            try:
                answer: Any = await call
            except asyncio.CancelledError:
                self._tally.end(name, "cancelled")
                return
            except Exception as error:
                answer = error
            settle(self._tally, name, request, answer)

        async def repeat(clients: Mapping[str, AsyncioModelClient]) -> None:
            while not self._stop.is_set():
                await ask(clients)
                await asyncio.sleep(factory.random.random() * 0.05)

        async def main() -> None:
            clients = {
                model: AsyncioModelClient(self._urls[scheme], model, inference_timeout_s=PATIENCE_S)
                for model in _MODELS
            }
            try:
                await asyncio.gather(*(repeat(clients) for _ in range(_TASKS)))
            finally:
                for client in clients.values():
                    await client.close()

        asyncio.run(main())

    def _stream(self, name: str, scheme: str) -> None:
        """Read streams to the end, to an error in the middle, or not to the end."""
        dice = self._make_factory(name).random
        with DecoupledModelClient(self._urls[scheme], "counts", inference_timeout_s=PATIENCE_S) as client:
            while not self._stop.is_set():
                stream = _Stream(dice)
                self._tally.begin(name)
                try:
                    responses = client.infer_sample(**stream.inputs)
                    for response in responses:
                        if stream.takes(response):
                            break
                    responses.close()
                except Exception as error:
                    stream.error = error
                self._tally.end(name, *stream.outcome(), by_error=stream.error is not None)
                self._pause(dice)

    def _asyncio_streams(self, name: str, scheme: str) -> None:
        """Read several streams at a time, in tasks."""
        dice = self._make_factory(name).random

        async def repeat(client: AsyncioDecoupledModelClient) -> None:
            while not self._stop.is_set():
                stream = _Stream(dice)
                self._tally.begin(name)
                try:
                    responses = client.infer_sample(**stream.inputs)
                    async for response in responses:
                        if stream.takes(response):
                            break
                    await responses.aclose()
                except Exception as error:
                    stream.error = error
                self._tally.end(name, *stream.outcome(), by_error=stream.error is not None)
                await asyncio.sleep(dice.random() * 0.05)

        async def main() -> None:
            url = self._urls[scheme]
            async with AsyncioDecoupledModelClient(url, "counts", inference_timeout_s=PATIENCE_S) as client:
                await asyncio.gather(*(repeat(client) for _ in range(_TASKS)))

        asyncio.run(main())

    def _raw(self, name: str, scheme: str) -> None:
        """Send half a request, leave without reading the answer, send random bytes, or send a valid request."""
        dice = self._make_factory(name).random
        address = self._urls[scheme].removeprefix("http://")
        head = '{"inputs":[{"name":"x","shape":[1,4],"datatype":"UINT8","parameters":{"binary_data_size":4}}]}'
        while not self._stop.is_set():
            way = dice.choice(["half", "unread", "nonsense", "whole"])
            body = head.encode() + _FOUR_LITTLE.tobytes() if way != "nonsense" else dice.randbytes(100)
            self._tally.begin(name)
            connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
            try:
                connection.putrequest("POST", "/v2/models/bytes/infer")
                connection.putheader("Content-Length", str(len(body)))
                if way != "nonsense":
                    connection.putheader("Inference-Header-Content-Length", str(len(head)))
                connection.endheaders(body[: len(body) // 2] if way == "half" else body)
                if way in ("half", "unread"):
                    self._tally.end(name, "went away")
                    continue
                response = connection.getresponse()
                status, _ = response.status, response.read()
                # What is no JSON at all, Triton answers with 500.
                outcome, wanted = ("refused", (400, 500)) if way == "nonsense" else ("answered", (200,))
                problem = None if status in wanted else f"{way}: expected status {wanted}, received {status}"
                self._tally.end(name, outcome, problem)
            except (OSError, http.client.HTTPException) as error:
                self._tally.end(name, "", f"{way}: {type(error).__name__}: {error}", by_error=True)
            finally:
                with suppress(OSError):
                    connection.close()
            self._pause(dice)


class _Stream:
    """One stream, and what has come of it."""

    def __init__(self, dice: random.Random) -> None:
        self._fails = dice.random() < 0.1
        self._n = 1 if self._fails else dice.choice([1, 2, 10, 100])
        self._start = dice.getrandbits(30)
        self._leaves_after = dice.randrange(1, self._n) if self._n > 1 and dice.random() < 0.3 else None
        self._came: list[int] = []
        self.error: BaseException | None = None
        n = STREAM_FAILS if self._fails else self._n
        self.inputs: dict[str, Any] = {"n": np.array([n], np.int64), "start": np.array([self._start], np.int64)}

    def takes(self, response: Mapping[str, Any]) -> bool:
        """Take a response; says whether the caller leaves now."""
        self._came.append(int(np.ravel(response["number"])[0]))
        return len(self._came) == self._leaves_after

    def outcome(self) -> tuple[str, str | None]:
        """Return what is to be entered."""
        number = self._n if self._leaves_after is None else self._leaves_after
        wanted = list(range(self._start, self._start + number))
        if self._came != wanted:
            return "", f"expected {number} responses from {self._start} on, received {self._came} and {self.error!r}"
        if self._fails:
            own = isinstance(self.error, PyTritonClientInferenceServerError) and f"<{self._start}>" in str(self.error)
            return "refused", None if own else f"expected the error of the model, received {self.error!r}"
        if self.error is not None:
            return "", f"after {number} responses: {type(self.error).__name__}: {self.error}"
        return "answered" if self._leaves_after is None else "cancelled", None
