from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest

from pytriton.client import exceptions
from pytriton.client import warnings as client_warnings
from pytriton.client.exceptions import (
    PyTritonClientError,
    PyTritonClientInferenceServerError,
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
