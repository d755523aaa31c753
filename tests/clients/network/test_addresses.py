"""Names that stand for several addresses, some of which cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest

from pytriton.client import AsyncioModelClient, FuturesModelClient, ModelClient
from pytriton.client._core.deadline import Deadline
from pytriton.client._route.addresses import order_addresses, start_look_up
from pytriton.client.exceptions import PyTritonClientConnectionError, PyTritonClientError, PyTritonClientTimeoutError
from pytriton.triton import Triton
from support.clients import KINDS, ROW, serving_all
from support.waiting import PATIENCE_S, eventually

NAME = "triton.test"
DROPS, REFUSES, SERVES = "127.0.0.2", "127.0.0.3", "127.0.0.1"
NOWHERE = "255.255.255.255"
"""An address that the system itself connects nobody to."""


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with serving_all() as server:
        yield server


@pytest.fixture(scope="module")
def port(triton: Triton) -> Iterator[int]:
    """The port of the server; at `DROPS`, nobody answers on it at all."""
    port = int(urlsplit(str(triton.http_url)).port or 0)
    with contextlib.ExitStack() as stack, socket.socket() as listening:
        listening.bind((DROPS, port))
        listening.listen(0)
        while True:
            # The system drops what comes when the queue of those that wait for accept() is full.
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect((DROPS, port))
            except TimeoutError:
                break
        yield port


@pytest.fixture
def url(port: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    look_up = socket.getaddrinfo

    def found(host: Any, *args: Any, **options: Any) -> Sequence[Any]:
        if host != NAME:
            return look_up(host, *args, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "it is a name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in request.param]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return f"http://{NAME}:{port}"


ORDERS = [
    (SERVES, DROPS),
    (DROPS, SERVES),
    (DROPS, DROPS, REFUSES, SERVES),
    (REFUSES, DROPS, SERVES),
    (NOWHERE, SERVES),
    (DROPS, NOWHERE, SERVES),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("url", ORDERS, indirect=True, ids=["-".join(order) for order in ORDERS])
def test_one_that_serves_is_found(url: str, kind: str) -> None:
    with KINDS[kind].asking(url, init_timeout_s=60, trust_env=False) as check:
        check()
        check()


def errors_of(url: str, **settings: Any) -> list[PyTritonClientError]:
    """Return the errors of a first call of each client, of which the others are made."""
    settings = {"trust_env": False, "ensure_model_is_ready": False, **settings}
    errors: list[Any] = []
    with ModelClient(url, "same", **settings) as client, pytest.raises(PyTritonClientError) as caught:
        client.infer_sample(ROW)
    errors.append(caught.value)
    with FuturesModelClient(url, "same", **settings) as futures:
        errors.append(futures.infer_sample(ROW).exception(PATIENCE_S))

    async def ask() -> None:
        async with AsyncioModelClient(url, "same", **settings) as client:
            with pytest.raises(PyTritonClientError) as caught:
                await client.infer_sample(ROW)
            errors.append(caught.value)

    asyncio.run(ask())
    return errors


@pytest.mark.parametrize("url", [(REFUSES, NOWHERE, "127.0.0.4")], indirect=True)
def test_all_that_refuse_are_named(url: str) -> None:
    for error in errors_of(url):
        assert isinstance(error, PyTritonClientConnectionError)
        assert f"no address of {NAME} can be reached: {REFUSES} (Connection refused), {NOWHERE} (" in error.message
        assert "127.0.0.4 (Connection refused)" in error.message


@pytest.mark.parametrize("url", [(DROPS, REFUSES)], indirect=True)
def test_all_are_named_when_the_time_is_over(url: str) -> None:
    for error in errors_of(url, init_timeout_s=1):
        assert isinstance(error, PyTritonClientTimeoutError)
        text = f"No address of {NAME} was reached: {DROPS} (no answer), {REFUSES} (Connection refused)."
        assert text in error.message


def test_families_take_turns() -> None:
    six, four = socket.AF_INET6, socket.AF_INET
    given = [(six, 1), (six, 2), (six, 1), (six, 3), (four, 1), (four, 2)]
    found = [(family, socket.SOCK_STREAM, 0, "", (str(number), 1)) for family, number in given]
    ordered = [(address[0], int(address[4][0])) for address in order_addresses(found)]
    assert ordered == [(six, 1), (four, 1), (six, 2), (four, 2), (six, 3)]


def test_localhost_has_an_address_of_either_family() -> None:
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 8000))
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 8000, 0, 0))
    for found in ([four], [four, six]):
        assert order_addresses(found, "localhost") == [four, six]
    assert order_addresses([six], "LocalHost") == [six, four]
    assert order_addresses([four], "another") == [four]
    assert order_addresses([], "localhost") == []


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Has the resolver answer only when the test is over; holds the names that it was asked for."""
    asked: list[str] = []
    over = threading.Event()
    look_up = socket.getaddrinfo

    def found(host: Any, *args: Any, **options: Any) -> Sequence[Any]:
        if host != NAME:  # Threads of other tests' servers look up 127.0.0.1.
            return look_up(host, *args, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "it is a name")
        asked.append(host)
        over.wait(PATIENCE_S)
        raise socket.gaierror(socket.EAI_AGAIN, "the test is over")

    monkeypatch.setattr(socket, "getaddrinfo", found)
    yield asked
    over.set()
    eventually(lambda: not look_ups())


def look_ups() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "pytriton-client-look-up"]


def test_a_resolver_that_does_not_answer_is_waited_for_until_the_deadline(stuck: list[str]) -> None:
    """The calls, of which there are many, hold one thread for all of them, and none of an event loop."""
    for _ in range(3):
        for error in errors_of(f"http://{NAME}:8000", init_timeout_s=0.3):
            assert isinstance(error, PyTritonClientTimeoutError)
            assert f"The name {NAME} was not looked up." in error.message
    assert stuck == [NAME]
    assert len(look_ups()) == 1


def test_a_forked_child_asks_by_itself(stuck: list[str]) -> None:
    start_look_up(NAME, 8000)
    eventually(lambda: stuck == [NAME])
    child = os.fork()
    if not child:
        start_look_up(NAME, 8000)
        deadline = Deadline(PATIENCE_S)
        while stuck != [NAME, NAME] and not deadline.is_over:
            time.sleep(0.01)
        os._exit(len(stuck))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
