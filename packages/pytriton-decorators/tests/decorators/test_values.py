from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import batch, first_value, get_requests, group_by_values, pad_batch, sample
from pytriton.decorators.serving import set_served_model
from pytriton.exceptions import PyTritonRuntimeError, PyTritonValidationError
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig


def seen_by(column: Any, **options: Any) -> Any:
    """What a callable gets for the rows of `column`."""
    seen: list[Any] = []

    @first_value("t", **options)
    def infer(t: Any, x: Any) -> Any:
        seen.append(t)
        return {"x": x}

    x = np.zeros((len(column), 1))
    assert infer(t=column, x=x)["x"] is x
    return seen[0]


def served(infer: Any, *args: Any, batching: bool = True, **kwargs: Any) -> Any:
    context = copy_context()
    inputs = [TensorSpec("x", (1,), np.float64), TensorSpec("t", (1,), np.float64, optional=True)]
    context.run(set_served_model, infer, TritonModelConfig("m", batching=batching, inputs=inputs, max_batch_size=4))
    return context.run(infer, *args, **kwargs)


class TestArrays:
    @pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint64, np.float16, np.float32, np.float64])
    def test_one_element_becomes_a_scalar_of_the_dtype(self, dtype: Any) -> None:
        value = seen_by(np.array([[1], [1]], dtype))
        assert type(value) is dtype
        assert value == 1

    def test_strings(self) -> None:
        assert seen_by(np.array([[b"a\0"], [b"a\0"]], object)) == b"a\0"
        assert type(seen_by(np.array([[b"a"], [b"a"]], object))) is bytes
        assert seen_by(np.array([[b"a"], [b"a"]])) == b"a"
        assert seen_by(np.array([["a"], ["a"]])) == "a"

    def test_one_element_in_any_number_of_axes(self) -> None:
        for shape in ((2,), (2, 1), (2, 1, 1)):
            value = seen_by(np.ones(shape))
            assert np.ndim(value) == 0
            assert value == 1

    def test_several_elements_are_the_row(self) -> None:
        assert seen_by(np.array([[1, 2], [1, 2]])).tolist() == [1, 2]
        assert seen_by(np.array([[[1], [2]]] * 3)).tolist() == [[1], [2]]

    def test_unsqueezed(self) -> None:
        assert seen_by(np.array([[1], [1]]), squeeze_single_values=False).tolist() == [1]
        assert seen_by(np.array([[[1]]]), squeeze_single_values=False).tolist() == [[1]]

    def test_several_keys(self) -> None:
        infer: Any = first_value("a", "b")(lambda a, b: {"sum": a + b})
        assert infer(a=np.array([[1], [1]]), b=np.array([[2], [2]])) == {"sum": 3}

    def test_equal_values_of_different_bytes(self) -> None:
        other = np.frombuffer(b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0]
        assert np.isnan(seen_by(np.array([[np.nan], [other]])))
        assert seen_by(np.array([[0.0], [-0.0]])) == 0

    def test_strict(self) -> None:
        for column in (np.array([[1], [2]]), np.array([[b"a"], [b"b"]], object), np.array([[1, 2], [1, 3]])):
            with pytest.raises(
                PyTritonRuntimeError, match=r'2 rows of input \'t\' to be equal.*@group_by_values\("t"\)'
            ):
                seen_by(column)
            np.testing.assert_array_equal(seen_by(column, strict=False, squeeze_single_values=False), column[0])
        with pytest.raises(PyTritonRuntimeError, match=r"received \[\[1\.0\], \[nan\]\]"):
            seen_by(np.array([[1], [np.nan]]))

    def test_no_rows(self) -> None:
        with pytest.raises(PyTritonRuntimeError, match=r"no row in input 't'.*\(0, 1\)"):
            seen_by(np.zeros((0, 1)))

    def test_no_array_with_a_batch_axis(self) -> None:
        for value in (3.0, np.float32(3), np.array(3), [3], None):
            with pytest.raises(PyTritonRuntimeError, match=r"input 't' to be an array with a batch axis"):
                first_value("t")(lambda t: {})(t=value)

    def test_an_optional_input_that_is_not_there(self) -> None:
        results = served(batch(first_value("t")(lambda x, t=None: {"y": x + (t is None)})), [{"x": np.zeros((1, 1))}])
        assert results[0]["y"].item() == 1

    def test_a_key_that_is_no_input_of_the_model(self, caplog: pytest.LogCaptureFixture) -> None:
        above_batch = first_value("x", "typo")(lambda requests: [{"y": np.full((1, 1), r["x"])} for r in requests])
        for infer in (batch(first_value("typo", "x")(lambda x: {"y": np.full((1, 1), x)})), above_batch):
            caplog.clear()
            for _ in range(2):
                results = served(infer, [{"x": np.full((1, 1), 7.0)}])
                assert results[0]["y"].item() == 7
            (message,) = caplog.messages
            assert message.startswith("@first_value has the key 'typo', which is no input of model 'm'")

    def test_outside_of_a_model_an_absent_key_is_passed_over(self, caplog: pytest.LogCaptureFixture) -> None:
        assert first_value("t", "x")(lambda x: x)(x=np.full((1, 1), 7.0)) == 7
        assert caplog.messages == []

    def test_a_model_without_batching(self) -> None:
        with pytest.raises(PyTritonRuntimeError, match=r"@first_value.*model 'm' has batching=False"):
            served(sample(first_value("x")(lambda x: {"y": x})), [{"x": np.zeros(1)}], batching=False)


class TestAmongOthers:
    """What has no batch axis any more is left alone by the decorators below."""

    def test_above_grouping(self) -> None:
        seen: list[Any] = []

        @batch
        @first_value("t", squeeze_single_values=False)
        @group_by_values("x", "t")
        def infer(x: Any, t: Any) -> Any:
            seen.append((x.ravel().tolist(), t.tolist()))
            return {"y": x}

        # As many elements as there are rows: by its shape alone it could not be told apart.
        infer([{"x": np.array([[2], [1]]), "t": np.array([[5, 6], [5, 6]])}])
        assert seen == [([1], [5, 6]), ([2], [5, 6])]

    def test_above_padding(self) -> None:
        @batch
        @first_value("t")
        @first_value("u", squeeze_single_values=False)
        @pad_batch
        def infer(x: Any, t: Any, u: Any) -> Any:
            assert (x.shape, t, u.tolist()) == ((4, 1), 5, [1, 2])
            return {"y": x}

        one = {"x": np.zeros((2, 1)), "t": np.full((2, 1), 5), "u": np.array([[1, 2]] * 2)}
        assert served(infer, [one])[0]["y"].shape == (2, 1)


class TestRequests:
    """Directly on a callable that takes requests."""

    def test_within_each_request(self, request_type: Any) -> None:
        def infer(requests: Any) -> Any:
            assert [one.parameters for one in get_requests()] == [one.parameters for one in requests]
            return [{"y": one["x"] + one["t"]} for one in requests]

        data = {"x": np.zeros((2, 1)), "t": np.array([[5], [5]])}
        requests = [request_type(data, {"name": "a"}), request_type({"x": np.zeros((1, 1)), "t": np.array([[6]])})]
        results: Any = first_value("t")(infer)(requests)
        assert [result["y"].ravel().tolist() for result in results] == [[5, 5], [6]]
        assert data["t"].shape == (2, 1)

    def test_errors(self) -> None:
        infer = first_value("t")(lambda requests: requests)
        with pytest.raises(PyTritonRuntimeError, match="2 rows of input 't' to be equal"):
            infer([{"t": np.array([[1], [2]])}])
        with pytest.raises(PyTritonValidationError, match="@first_value expected a list"):
            infer({"t": np.array([[1]])})
