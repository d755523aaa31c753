"""Each request over HTTP is handled as that of its own connection, in whatever form it is asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import model
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.faults.raw_http import ask, connect, read_answer
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"
EXPECTS = "Expect: 100-continue"
ENTERED, OPENED = threading.Event(), threading.Event()
cancelled: list[bool] = []


@model
def shout(text: str, times: int = 1) -> str:
    return text.upper() * times


def gate(requests: Any) -> Any:
    """Answer once the gate is open, and note whether the caller is said to have left: that is told a little later."""
    ENTERED.set()
    assert OPENED.wait(PATIENCE_S)
    end = time.monotonic() + 0.5
    while not (left := requests[0].is_cancelled()) and time.monotonic() < end:
        time.sleep(0.01)
    cancelled.append(left)
    return [{"y": request["x"]} for request in requests]


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    triton = Triton(config=local_config(http_thread_count=1))
    triton.bind(shout)
    x, y = (Tensor(name=name, dtype=np.float32, shape=(1,)) for name in "xy")
    triton.bind("gate", gate, [x], [y], config=ModelConfig(batching=False))
    with short_home(), running(triton):
        yield triton


def generate(model: str, body: dict[str, Any], *headers: str, target: str = "", version: str = "1.1") -> bytes:
    """Return a request whose head and body are sent, and read, in one piece."""
    text = json.dumps(body)
    lines = [f"POST {target}/v2/models/{model}/generate HTTP/{version}", "Host: h", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(text)}", "", text]).encode()


FORMS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "as any": ((), {}),
    "a caller that waits for 100 Continue, and has not waited": ((EXPECTS,), {}),
    "a target with scheme and host": ((), {"target": "http://h"}),
    "all of it": ((EXPECTS,), {"target": "HTTP://h:80", "version": "1.0"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_names_that_are_no_inputs_are_refused(served: Triton, form: str) -> None:
    headers, how = FORMS[form]
    assert ask(served, generate("shout", {"text": "a"}, *headers, **how))[0] == 200
    status, body = ask(served, generate("shout", {"text": "a", "tims": 2}, *headers, **how))
    assert (status, "'tims' is no input" in body) == (400, True)


def test_a_connection_with_an_old_number_cancels_nothing(served: Triton) -> None:
    # The number of a connection that the server's thread has closed is taken by the next one, that of somebody else.
    for headers in ((EXPECTS,), ()):
        ENTERED.clear()
        OPENED.clear()
        with ExitStack() as stack:
            stack.callback(OPENED.set)
            caller, first = (stack.enter_context(connect(served)) for _ in range(2))
            for connection in (caller, first):
                connection.sendall(HEALTH)
                assert read_answer(connection)[0] == 200
            first.close()
            for _ in range(2):  # behind which the thread has seen that end
                assert ask(served, HEALTH)[0] == 200
            caller.sendall(generate("gate", {"x": 1}, *headers))
            assert ENTERED.wait(PATIENCE_S)
            for _ in range(3):
                assert ask(served, HEALTH)[0] == 200
            OPENED.set()
            assert read_answer(caller)[0] == 200
    assert cancelled == [False, False]
