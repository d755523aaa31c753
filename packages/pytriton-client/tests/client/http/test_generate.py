from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelSpec, TensorSpec
from pytriton.client._core.options import NO_OPTIONS, CallOptions
from pytriton.client._core.requests import InferRequest, build_request, check_call
from pytriton.client._core.translate import Operation
from pytriton.client._http.generate import GenerateReader, encode_generate_request
from pytriton.client.exceptions import PyTritonClientInferenceServerError, PyTritonClientValueError

OPERATION = Operation("streaming inference", "http://host:1", 5.0, "m")


def spec_of(inputs: dict[str, Any], outputs: dict[str, Any], batching: bool = True) -> ModelSpec:
    def tensors(named: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, shape, dtype) for name, (shape, dtype) in named.items())

    return ModelSpec("m", None, 8 if batching else 0, batching, True, tensors(inputs), tensors(outputs))


ROW = ((2,), np.float32)
SPEC = spec_of({"a": ROW}, {"out": ROW})


def request_for(spec: ModelSpec, *, is_batch: bool = False, parameters: Any = None, **named: Any) -> InferRequest:
    call = check_call((), named, parameters, None, NO_OPTIONS)
    return build_request(spec, call, model_name="m", model_version=None, request_id="7", is_batch=is_batch)


def body_of(spec: ModelSpec, **named: Any) -> Any:
    return json.loads(encode_generate_request(spec, request_for(spec, **named)))


def responses(spec: ModelSpec, request: InferRequest, *events: Any) -> list[Any]:
    reader = GenerateReader(spec, request)
    for event in events:
        reader.feed(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")
    received = []
    while (response := reader.next_response(OPERATION)) is not None:
        received.append(response)
    return received


def test_elements_are_listed_flat() -> None:
    assert body_of(SPEC, a=[1, 2.5]) == {"a": [1.0, 2.5], "parameters": {}}
    assert body_of(SPEC, a=[[1, 2], [3, 4]], is_batch=True) == {"a": [1.0, 2.0, 3.0, 4.0], "parameters": {}}
    text = spec_of({"a": ((1,), np.bytes_)}, {"out": ROW})
    assert body_of(text, a=["zażółć\0"], parameters={"p": 1}) == {"a": ["zażółć\0"], "parameters": {"p": 1}}
    wide = spec_of({"a": ((-1,), np.uint64), "b": ((2, -1), np.bool_)}, {"out": ROW}, batching=False)
    named = {"a": np.array([2**64 - 1], np.uint64), "b": [[True], [False]]}
    assert body_of(wide, **named) == {"a": [2**64 - 1], "b": [True, False], "parameters": {}}


def test_id_is_sent_only_where_the_caller_chose_it() -> None:
    call = check_call((), {"a": [1, 2]}, None, None, CallOptions(request_id="abc"))
    request = build_request(SPEC, call, model_name="m", model_version=None, request_id="7", is_batch=False)
    assert json.loads(encode_generate_request(SPEC, request))["id"] == "abc"


@pytest.mark.parametrize(
    ("spec", "named", "reason"),
    [
        (spec_of({"a": ((2,), np.float16)}, {"out": ROW}), {"a": [1, 2]}, "'a' of another type than FP16"),
        (spec_of({"a": ROW}, {"out": ((2,), np.float16)}), {"a": [1, 2]}, "output 'out' of another type than FP16"),
        (spec_of({"a": ROW}, {"out": ((-1, -1), np.int8)}), {"a": [1, 2]}, r"'out' with one free axis .*\(-1, -1\)"),
        (spec_of({"a": ROW}, {"model_name": ROW}), {"a": [1, 2]}, "another name for the output 'model_name'"),
        (spec_of({"id": ROW}, {"out": ROW}), {"id": [1, 2]}, "another name for the input 'id'"),
        (SPEC, {"a": [1, np.nan]}, "'a' with finite numbers"),
        (spec_of({"a": ((-1,), np.float32)}, {"out": ROW}), {"a": np.zeros((0,), np.float32)}, "at least one element"),
        (spec_of({"a": ((1,), np.bytes_)}, {"out": ROW}), {"a": [b"\xff"]}, "text in UTF-8"),
        (spec_of({"a": ((-1, -1), np.int8)}, {"out": ROW}), {"a": np.ones((2, 3), np.int8)}, r"make \(1, 1, 6\)"),
        (
            spec_of({"a": ((-1,), np.int8)}, {"out": ROW}),
            {"a": np.ones((2, 3), np.int8), "is_batch": True},
            r"make \(1, 6\), in place of \(2, 3\)",
        ),
        (SPEC, {"a": [1, 2], "parameters": {"priority": 1}}, "a request without 'priority'"),
        (SPEC, {"a": [1, 2], "parameters": {"a": 1}}, "another name for the parameter 'a'"),
    ],
)
def test_what_json_cannot_carry_is_refused(spec: ModelSpec, named: dict[str, Any], reason: str) -> None:
    request = request_for(spec, **named)
    with pytest.raises(PyTritonClientValueError, match=reason) as caught:
        encode_generate_request(spec, request)
    assert "grpc://" in caught.value.message
    assert caught.value.model_name == "m"


def test_responses_get_their_shapes_back() -> None:
    spec = spec_of(
        {"a": ROW},
        {"out": ROW, "free": ((3, -1), np.int64), "text": ((1,), np.bytes_), "flag": ((1,), np.bool_)},
    )
    event = {
        "model_name": "m",
        "model_version": "3",
        "out": [0.1, 2],
        "free": [1, 2, 3, 4, 5, 6],
        "text": "ü",
        "flag": True,
    }
    (response,) = responses(spec, request_for(spec, a=[1, 2]), {**event, "tokens": 5, "why": "end"})
    assert {name: array.shape for name, array in response.outputs.items()} == {
        "out": (1, 2),
        "free": (1, 3, 2),
        "text": (1, 1),
        "flag": (1, 1),
    }
    assert response.outputs["out"].dtype == np.float32
    assert response.outputs["free"].tolist() == [[[1, 2], [3, 4], [5, 6]]]
    assert response.outputs["text"].tolist() == [["ü".encode()]]
    assert response.parameters == {"tokens": 5, "why": "end"}
    assert (response.model_name, response.model_version, response.request_id) == ("m", "3", "7")
    batch = request_for(spec, a=[[1, 2], [3, 4]], is_batch=True)
    (response,) = responses(spec, batch, {"model_name": "m", "out": [1, 2, 3, 4], "id": "x"})
    assert response.outputs["out"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert response.request_id == "x"


def test_bytes_that_are_no_text_come_back_unchanged() -> None:
    spec = spec_of({"a": ROW}, {"out": ((-1,), np.bytes_)})
    event = b'{"model_name":"m","model_version":"1","out":["\xff\xfe","\xc3\xbc"]}'
    (response,) = responses(spec, request_for(spec, a=[1, 2]), event)
    assert response.outputs["out"].tolist() == [[b"\xff\xfe", "ü".encode()]]


def test_numbers_that_only_triton_writes_as_json() -> None:
    (response,) = responses(SPEC, request_for(SPEC, a=[1, 2]), b'{"model_name":"m","out":[NaN,-Infinity]}')
    np.testing.assert_array_equal(response.outputs["out"], np.array([[np.nan, -np.inf]], np.float32))


def test_events_in_pieces() -> None:
    reader = GenerateReader(SPEC, request_for(SPEC, a=[1, 2]))
    stream = b"".join(b'data: {"model_name":"m","out":[%d,2]}\n\n' % number for number in range(3))
    received = []
    for position in range(len(stream)):
        reader.feed(stream[position : position + 1])
        response = reader.next_response(OPERATION)
        if response is not None:
            received.append(int(response.outputs["out"][0, 0]))
    assert received == [0, 1, 2]
    reader.feed(b": a comment\n\n")
    assert reader.next_response(OPERATION) is None


def test_errors() -> None:
    with pytest.raises(PyTritonClientInferenceServerError, match="it failed") as caught:
        responses(SPEC, request_for(SPEC, a=[1, 2]), {"error": "it failed"})
    assert caught.value.status is None
    assert caught.value.server_message == "it failed"
    # An output may have the name.
    spec = spec_of({"a": ROW}, {"error": ROW})
    (response,) = responses(spec, request_for(spec, a=[1, 2]), {"model_name": "m", "error": [1, 2]})
    assert response.outputs["error"].tolist() == [[1.0, 2.0]]
    for body, text in (
        (b'data: {"error":"no"}\n\n', "no"),
        (b'{"error":"no"}', "no"),
        (b"Bad Gateway", "Bad Gateway"),
        (b"", "(HTTP status 502 without a text)"),
    ):
        error = GenerateReader.error_of(502, body, OPERATION)
        assert isinstance(error, PyTritonClientInferenceServerError)
        assert (error.status, error.server_message) == ("502", text)


def test_json_that_a_newer_server_finds_too_large_says_what_helps() -> None:
    text = "request JSON size of 70 bytes exceeds the maximum. Use --http-max-input-size to increase the limit."
    error = GenerateReader.error_of(400, b'{"error":"%s"}' % text.encode(), OPERATION)
    assert isinstance(error, PyTritonClientInferenceServerError)
    assert (error.status, error.server_message) == ("400", text)
    assert str(error).endswith(
        f"{text} Use a grpc:// address, or TritonConfig(http_max_input_size=...) for the server."
    )


def test_arrays_that_an_older_server_does_not_take_say_what_helps() -> None:
    text = "Unable to parse 'data': Shape does not match true shape of 'data' field"
    error = GenerateReader.error_of(500, b'{"error":"%s"}' % text.encode(), OPERATION)
    assert str(error).endswith("take tensors of one element alone: use a grpc:// address, or a newer server.")


@pytest.mark.parametrize(
    "event",
    [
        b"no json",
        b"[1]",
        b'{"model_name":"m","out":[1,2,3]}',
        b'{"model_name":"m","out":["a","b"]}',
        b'{"model_name":"m","out":{"a":1}}',
        b'{"model_name":"m","out":null}',
    ],
)
def test_answers_that_cannot_be_read(event: bytes) -> None:
    with pytest.raises(PyTritonClientInferenceServerError, match="cannot be read"):
        responses(SPEC, request_for(SPEC, a=[1, 2]), event)
