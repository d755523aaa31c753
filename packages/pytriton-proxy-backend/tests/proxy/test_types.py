"""Requests and responses as callables see them."""

import copy
import pickle
from collections.abc import Mapping

import numpy as np
import pytest

from pytriton.proxy.types import Request, Response


def test_a_request_made_by_hand() -> None:
    x = np.zeros((2, 3))
    request = Request(
        {"x": x}, {"key": 1}, requested_output_names=["y"], request_id="7", priority=1, correlation_id="s"
    )
    assert request["x"] is request.data["x"] is x
    assert list(request) == ["x"]
    assert len(request) == 1
    assert "x" in request
    assert request.get("z") is None
    assert dict(request.items()) == {"x": x}
    assert request.parameters == {"key": 1}
    assert request.requested_output_names == ["y"]
    assert (request.request_id, request.priority, request.timeout_us, request.correlation_id) == ("7", 1, 0, "s")
    assert (request.sequence_start, request.sequence_end, request.trace_context) == (False, False, "")
    assert not request.is_cancelled()
    assert request.__pytriton_batch__([request]) is None
    assert repr(request) == "Request(x: float64[2, 3])"


def test_a_request_is_a_mutable_mapping() -> None:
    request = Request({"x": np.zeros(1)})
    request["y"] = np.ones(1)
    del request["x"]
    assert list(request) == ["y"]
    request.data = {"z": np.zeros(2)}
    assert list(request) == ["z"]
    request.parameters["a"] = True
    assert request.parameters == {"a": True}
    request.parameters = None
    assert request.parameters == {}
    with pytest.raises(KeyError):
        request["x"]


def test_requests_and_responses_are_compared_by_identity() -> None:
    # Equality of mappings of arrays would raise, or be wrong.
    first, second = Request({"x": np.zeros(2)}), Request({"x": np.zeros(2)})
    assert first == first
    assert first != second
    assert len({first, second}) == 2
    assert Response({"x": np.zeros(2)}) != Response({"x": np.zeros(2)})


def test_response() -> None:
    data = {"y": np.zeros(2)}
    response = Response(data, {"score": 0.5})
    response["z"] = np.ones(1)
    assert data.keys() == {"y"}  # the response has a dictionary of its own
    assert list(response) == ["y", "z"]
    assert response.parameters == {"score": 0.5}
    assert Response(data).parameters == {}
    del response["y"]
    assert len(response) == 1
    assert not response.final
    assert repr(response) == "Response(z: float64[1])"


def test_the_end_of_a_stream() -> None:
    end = Response(final=True)
    assert (end.final, len(end), end.parameters) == (True, 0, {})
    assert repr(end) == "Response(final)"


def test_requests_and_responses_are_mappings() -> None:
    assert isinstance(Request({}), Mapping)
    assert isinstance(Response({}), Mapping)
    assert dict(**Request({"x": np.zeros(1)})).keys() == {"x"}


def test_copies_of_a_request() -> None:
    x = np.arange(3)
    request = Request(
        {"x": x}, {"a": 1}, object(), ["y"], request_id="7", priority=2, timeout_us=3, correlation_id="four"
    )
    shallow, deep, far = copy.copy(request), copy.deepcopy(request), pickle.loads(pickle.dumps(request))
    for made in (shallow, deep, far):
        assert isinstance(made, Request)
        assert made["x"].tolist() == [0, 1, 2]
        assert (made.parameters, made.requested_output_names) == ({"a": 1}, ["y"])
        assert (made.request_id, made.priority, made.timeout_us, made.correlation_id) == ("7", 2, 3, "four")
        made["z"] = x
        made.parameters["b"] = 2
        assert list(request) == ["x"]
        assert request.parameters == {"a": 1}
    assert shallow["x"] is x
    assert deep["x"] is not x
    assert shallow.span is request.span
    assert far.span is None
