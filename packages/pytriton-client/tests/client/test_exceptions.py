from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
    exceptions,
)
from pytriton.client import warnings as client_warnings
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientInputError,
    PyTritonClientInvalidUrlError,
    PyTritonClientModelNotReadyError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)

ALL = [getattr(exceptions, name) for name in exceptions.__all__]


@pytest.mark.parametrize("kind", ALL)
def test_message_is_the_text(kind: type[PyTritonClientError]) -> None:
    error = kind("what happened")
    assert issubclass(kind, PyTritonClientError)
    assert error.message == str(error) == "what happened"
    assert not isinstance(error, TimeoutError)


@pytest.mark.parametrize("kind", ALL)
def test_attributes_survive_pickling_and_copying(kind: type[PyTritonClientError]) -> None:
    names = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "message")]
    error = kind("what happened", **{name: f"the {name}" for name in names})
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == "what happened"
        assert {name: getattr(again, name) for name in names} == {name: f"the {name}" for name in names}


def test_tree() -> None:
    assert issubclass(PyTritonClientInvalidUrlError, PyTritonClientValueError)
    assert PyTritonClientInputError.__bases__ == (PyTritonClientValueError, PyTritonClientInferenceServerError)
    assert issubclass(PyTritonClientModelNotReadyError, PyTritonClientTimeoutError)
    assert issubclass(PyTritonClientModelNotReadyError, PyTritonClientModelUnavailableError)
    assert not issubclass(PyTritonClientInferenceServerError, PyTritonClientTimeoutError)


def test_everything_public_is_in_all() -> None:
    defined = {
        name for name, value in vars(exceptions).items() if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert defined == set(exceptions.__all__)
    assert all(name in (exceptions.__doc__ or "") for name in exceptions.__all__)


def test_warnings() -> None:
    assert issubclass(client_warnings.NotSupportedTimeoutWarning, client_warnings.PyTritonWarning)
    with pytest.warns(UserWarning, match="short"):
        warnings.warn("short", client_warnings.PyTritonWarning, stacklevel=1)


@pytest.mark.parametrize("url", ["localhost", "grpc://localhost"])
def test_a_closed_client_tells_its_class(url: str) -> None:
    def check(make: Any, ask: Callable[[Any], Any]) -> None:
        client = make(url, "add")
        closing = client.close()
        if asyncio.iscoroutine(closing):
            asyncio.run(closing)
        with pytest.raises(PyTritonClientClosedError, match=f"^{make.__name__} is closed: make a new one"):
            ask(client)

    async def first(client: Any) -> None:
        async for _ in client.infer_sample([1]):
            break

    for make in (ModelClient, DecoupledModelClient, FuturesModelClient):
        check(make, lambda client: client.infer_sample([1]))
    check(AsyncioModelClient, lambda client: asyncio.run(client.infer_sample([1])))
    check(AsyncioDecoupledModelClient, lambda client: asyncio.run(first(client)))
