"""Calls of workers into the server that they serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.proxy_backend.transport.calls import CallResult, Calls
from pytriton.triton import Triton
from support.serving import local_config, running, short_home

Array = np.ndarray[Any, Any]
F4 = np.dtype("float32")


def vector(name: str, dtype: Any = F4) -> Tensor:
    return Tensor(name=name, dtype=dtype, shape=(-1,))


class Server:
    """A server with targets, and a way to call it."""

    def __init__(self, triton: Triton, home: Path) -> None:
        self.triton = triton
        self._home = home

    def endpoint(self, model: str) -> Path:
        [path] = self._home.rglob(f"{model}.1.sock")
        return path

    def calls(self, model: str = "double") -> Calls:
        return Calls(self.endpoint(model), "test")


def double(requests: list[Request]) -> list[dict[str, Array]]:
    if any((request["x"] == 13).any() for request in requests):
        raise ValueError("not thirteen")
    return [{"y": request["x"] * 2, "n": np.array([request["x"].sum()], F4)} for request in requests]


def shout(requests: list[Request]) -> list[dict[str, Array]]:
    return [{"y": np.char.upper(request["x"].astype(bytes)).astype(object)} for request in requests]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with short_home() as home:
        triton = Triton(config=local_config(allow_metrics=True, metrics_port=0))
        made = Server(triton, home)
        single = ModelConfig(batching=False)
        triton.bind("double", double, inputs=[vector("x")], outputs=[vector("y"), vector("n")], config=single)
        triton.bind("shout", shout, inputs=[vector("x", bytes)], outputs=[vector("y", bytes)], config=single)

        def through(requests: list[Request]) -> list[dict[str, Array]]:
            with_calls = made.calls("through")
            try:
                answered = [with_calls.infer("double", {"x": request["x"]}, ["y"]) for request in requests]
                return [{"y": call.result().outputs["y"] + 1} for call in answered]
            finally:
                with_calls.close()

        triton.bind("through", through, inputs=[vector("x")], outputs=[vector("y")], config=single)
        with running(triton):
            yield made


def ask(calls: Calls, model: str, x: Array, outputs: tuple[str, ...] = (), **options: Any) -> CallResult:
    return calls.infer(model, {"x": x}, outputs, **options).result()


def test_inference(server: Server) -> None:
    calls = server.calls()
    error, outputs, parameters, final, _ = ask(calls, "double", np.arange(5, dtype=F4))
    assert (error, parameters, final) == (None, {}, True)
    assert outputs.keys() == {"y", "n"}
    np.testing.assert_array_equal(outputs["y"], np.arange(5, dtype=F4) * 2)
    assert outputs["n"].tolist() == [10]
    assert ask(calls, "double", np.arange(5, dtype=F4), ("n",)).outputs.keys() == {"n"}
    strings = np.array([b"a", b"", "grün".encode(), b"\0b"], object)
    assert ask(calls, "shout", strings).outputs["y"].tolist()[:2] == [b"A", b""]
    calls.close()


def test_a_callable_that_calls(server: Server) -> None:
    with ModelClient(str(server.triton.http_url), "through") as client:
        assert client.infer_sample(np.array([1, 2], F4))["y"].tolist() == [3, 5]
