from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytriton.client._core.options import CallOptions
from pytriton.client._core.requests import (
    InferResponse,
    RequestIds,
    build_request,
    check_call,
    decode_response,
    find_wrong_shape,
)
from pytriton.client._core.spec import ModelSpec, TensorSpec
from pytriton.client.exceptions import PyTritonClientInferenceServerError, PyTritonClientValueError

SPEC = ModelSpec(
    model_name="m",
    max_batch_size=4,
    batching=True,
    inputs=(TensorSpec("a", (2,), np.float32), TensorSpec("b", (1,), np.bytes_, optional=True)),
    outputs=(TensorSpec("out", (2,), np.float32),),
)


def build(*args: Any, is_batch: bool = False, **named: Any) -> Any:
    call = check_call(args, named, None, None)
    return build_request(SPEC, call, model_name="m", model_version=None, request_id="7", is_batch=is_batch)


def test_sample_gets_a_batch_axis() -> None:
    request = build([1, 2], "text")
    assert [(tensor.name, array.shape) for tensor, array in request.inputs] == [("a", (1, 2)), ("b", (1, 1))]
    assert (request.request_id, request.model_name, request.model_version) == ("7", "m", None)


def test_an_empty_batch_is_called_so() -> None:
    with pytest.raises(PyTritonClientValueError, match=r"Input 'a': expected a batch of one sample at least.*\(0, 2\)"):
        build(np.zeros((0, 2), np.float32), is_batch=True)


@pytest.mark.parametrize(
    ("shape", "is_batch", "text"),
    [
        ((3,), False, "expected the shape (2), as its Tensor declares it; received the shape (3)."),
        ((1, 2), False, "received the shape (1, 2). Did you mean infer_batch, which takes arrays with a batch axis"),
        (
            (2,),
            True,
            "expected the shape (batch, 2), as its Tensor declares it; received the shape (2). Did you mean",
        ),
        ((1, 3), True, "expected the shape (batch, 2), as its Tensor declares it; received the shape (1, 3)."),
        ((1, 1, 2), True, "received the shape (1, 1, 2)."),
        ((), False, "received the shape ()."),
    ],
)
def test_errors_of_shape_speak_of_the_tensor(shape: tuple[int, ...], is_batch: bool, text: str) -> None:
    request = build(a=np.zeros(shape, np.float32), is_batch=is_batch)
    error = find_wrong_shape(SPEC, request, is_batch=is_batch)
    assert error is not None
    assert str(error).startswith("Model m, input 'a': expected the shape (")
    assert text in str(error)
    assert ("Did you mean" in str(error)) is ("Did you mean" in text)


def test_any_size_is_of_the_right_shape() -> None:
    spec = replace(SPEC, batching=False, inputs=(TensorSpec("a", (-1, 2), np.float32),))
    for shape, fits in (((5, 2), True), ((0, 2), True), ((5, 3), False), ((2,), False), ((1, 5, 2), False)):
        call = check_call((np.zeros(shape, np.float32),), {}, None, None)
        request = build_request(spec, call, model_name="m", model_version=None, request_id="7", is_batch=False)
        assert (find_wrong_shape(spec, request, is_batch=False) is None) is fits


def test_arrays_of_the_same_kind_are_cast_where_the_call_says_so() -> None:
    call = check_call((np.array([1.0, 2.0]),), {}, None, None, CallOptions(casting="same_kind"))
    request = build_request(SPEC, call, model_name="m", model_version=None, request_id="7", is_batch=False)
    assert request.inputs[0][1].dtype == np.float32


def test_inputs_are_sent_in_the_order_of_the_model() -> None:
    request = build(b=[["x"]], a=[[1, 2]], is_batch=True)
    assert [tensor.name for tensor, _ in request.inputs] == ["a", "b"]


@pytest.mark.parametrize(
    ("args", "named", "received"),
    [
        ((1, 2, 3), {}, "3 by position"),
        ((), {"b": "x"}, "'b' (without a)"),
        ((), {"a": [1, 2], "c": 1}, "'a', 'c'"),
    ],
)
def test_wrong_names_or_number(args: Any, named: Any, received: str) -> None:
    with pytest.raises(PyTritonClientValueError, match=r"expected 2 inputs 'a', 'b' \(optional\); received") as caught:
        build(*args, **named)
    assert caught.value.received == received


def test_a_name_that_was_meant_is_told() -> None:
    spec = ModelSpec("m", inputs=(TensorSpec("text", (1,), np.bytes_, hint="str"), TensorSpec("times", (1,), np.int64)))
    for named, told in (
        (
            {"txet": "a", "times": 1},
            "'text' (str), 'times'; received 'txet', 'times' (without text). Did you mean 'text'?",
        ),
        ({"text": "a", "tiems": 1}, "Did you mean 'times'?"),
        ({"q" * 10**6: "a"}, "(without text, times)."),
    ):
        with pytest.raises(PyTritonClientValueError) as caught:
            build_request(
                spec,
                check_call((), named, None, None),
                model_name="m",
                model_version=None,
                request_id="",
                is_batch=False,
            )
        assert str(caught.value).endswith(told)


def test_batch_without_batch_axis() -> None:
    with pytest.raises(PyTritonClientValueError, match=r"Input 'a': expected a batch, .*\(batch, 2,\).* infer_sample"):
        build(np.array(1, np.float32), is_batch=True)


def test_nothing_or_one_input_twice() -> None:
    with pytest.raises(PyTritonClientValueError, match="Provide input data"):
        build()
    with pytest.raises(
        PyTritonClientValueError, match=r"Use either positional either keyword .* 'a' of model m is given"
    ):
        build([1, 2], a=[1, 2])


def test_the_first_by_position_and_others_by_name() -> None:
    request = build([1, 2], b="x")
    assert [tensor.name for tensor, _ in request.inputs] == ["a", "b"]
    with pytest.raises(PyTritonClientValueError, match="received 'a', 'c'"):
        build([1, 2], c="x")


@pytest.mark.parametrize("flat", [["x", "yy"], np.array([b"x", b"yy"], object), [b"x", b"yy"]])
def test_batch_of_single_values_may_be_flat(flat: Any) -> None:
    spec = ModelSpec("m", max_batch_size=4, batching=True, inputs=(TensorSpec("text", (1,), np.bytes_),))
    call = check_call((flat,), {}, None, None)
    request = build_request(spec, call, model_name="m", model_version=None, request_id="1", is_batch=True)
    assert request.inputs[0][1].tolist() == [[b"x"], [b"yy"]]


def test_a_model_without_inputs_is_asked_without_any() -> None:
    spec = ModelSpec("clock", max_batch_size=4, batching=True)
    for is_batch in (False, True):
        call = check_call((), {}, None, None)
        request = build_request(spec, call, model_name="clock", model_version=None, request_id="1", is_batch=is_batch)
        assert request.inputs == ()
    with pytest.raises(PyTritonClientValueError, match="expected no inputs; received 1 by position"):
        build_request(
            spec, check_call((1,), {}, None, None), model_name="clock", model_version=None, request_id="1",
            is_batch=False,
        )  # fmt: skip


def test_parameters_are_divided() -> None:
    call = check_call((1,), {}, {"mine": 1.5, "priority": 3, "sequence_id": "s", "sequence_start": True}, {"K": True})
    assert call.parameters == {"mine": 1.5}
    assert call.options == {"priority": 3, "sequence_id": "s", "sequence_start": True}
    assert call.headers == {"K": "True"}


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ([1], "Parameters and headers must be a dictionary"),
        ({1: 1}, "Parameter/header key must be a string"),
        ({"a": None}, "Parameter/header value must be a string, integer or boolean, or a float"),
        ({"a": [1]}, "Parameter/header value must be a string, integer or boolean, or a float"),
        ({"a": 2**63}, "integer of 64 bits"),
        ({"a": float("inf")}, "finite"),
        ({"triton_x": 1}, "keeps this name for itself"),
        ({"headers": 1}, "keeps this name for itself"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"sequence_end": 1}, "sequence_end"),
    ],
)
def test_parameters_that_cannot_be_sent(parameters: Any, text: str) -> None:
    with pytest.raises(PyTritonClientValueError, match=text):
        check_call((1,), {}, parameters, None)


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ("a: b", "Parameters and headers must be a dictionary"),
        ({b"a": "b"}, "Parameter/header key must be a string"),
        ({"a": 1.5}, "Parameter/header value must be a string, integer or boolean"),
        ({"a": "b\r\nc: d"}, "printable ASCII"),
        ({"a": "ü"}, "printable ASCII"),
        ({"a b": "c"}, "a name of letters"),
        ({"": "c"}, "a name of letters"),
        ({"Accept-Encoding": "gzip"}, "the connection needs this one"),
        ({"a": "b" * (64 << 10)}, "of 64 KiB at most"),
    ],
)
def test_headers_that_cannot_be_sent(headers: Any, text: str) -> None:
    with pytest.raises(PyTritonClientValueError, match=text) as refused:
        check_call((1,), {}, None, headers)
    assert len(str(refused.value)) < 1000


def test_decoding() -> None:
    response = InferResponse({"out": np.array([[1.0, 2.0]]), "flat": np.array([b"x"], object)})
    assert decode_response(SPEC, response, is_batch=True) == response.outputs
    sample = decode_response(SPEC, response, is_batch=False)
    assert sample["out"].tolist() == [1.0, 2.0]
    assert sample["flat"] == b"x"
    assert type(sample["flat"]) is bytes


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_])
def test_a_sample_without_axes_is_a_numpy_scalar(dtype: Any) -> None:
    sample = decode_response(SPEC, InferResponse({"out": np.array([1], dtype)}), is_batch=False)
    assert type(sample["out"]) is dtype


@pytest.mark.parametrize("shape", [(), (0, 2), (2, 2)])
def test_sample_in_and_something_else_out(shape: tuple[int, ...]) -> None:
    with pytest.raises(PyTritonClientInferenceServerError, match=r"Output 'out' of model m: expected one sample"):
        decode_response(SPEC, InferResponse({"out": np.zeros(shape)}), is_batch=False)


def test_no_two_clients_have_an_id_in_common() -> None:
    one, other = RequestIds(), RequestIds()
    made = [ids.next() for ids in (one, other) for _ in range(100)]
    assert len(set(made)) == 200
    assert all(each.isprintable() and len(each) < 20 for each in made)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_ids_of_its_own() -> None:
    ids = RequestIds()
    ids.next()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, ids.next().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        theirs = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    ours = ids.next()
    assert ours.partition("-")[2] == theirs.partition("-")[2]
    assert ours != theirs
