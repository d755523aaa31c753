import pickle

import pytest

from pytriton import exceptions
from pytriton.exceptions import (
    PyTritonBadParameterError,
    PyTritonBatchSizeError,
    PyTritonError,
    PyTritonUnrecoverableError,
    PyTritonValidationError,
)

CLASSES = [getattr(exceptions, name) for name in exceptions.__all__]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_is_in_the_tree_and_keeps_its_message(kind: type[PyTritonError]) -> None:
    error = kind("the text")
    assert isinstance(error, PyTritonError)
    assert error.message == "the text"
    assert str(error) == "the text"


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_survives_pickling(kind: type[PyTritonError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("the text")))
    assert type(copy) is kind
    assert copy.message == "the text"


def test_attributes_survive_pickling() -> None:
    parameter = pickle.loads(pickle.dumps(PyTritonBadParameterError("text", parameter="x", value=3, rule="must be 4")))
    assert (parameter.parameter, parameter.value, parameter.rule) == ("x", 3, "must be 4")
    error = PyTritonValidationError("text", tensor="image", request_index=2, expected=(1,), received=(2,))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.tensor, copy.request_index, copy.expected, copy.received) == ("image", 2, (1,), (2,))


def test_a_batch_size_error_is_a_value_error() -> None:
    assert issubclass(PyTritonBatchSizeError, ValueError)
    assert issubclass(PyTritonBatchSizeError, PyTritonValidationError)


def test_users_may_subclass_with_a_constructor_of_their_own() -> None:
    class LostDevice(PyTritonUnrecoverableError):
        def __init__(self, device: int) -> None:
            super().__init__(f"device {device} is lost")
            self.device = device

    assert str(LostDevice(3)) == "device 3 is lost"
