import collections
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest

from pytriton.decorators import batch, get_inference_request_batch_size, get_requests, sample
from pytriton.decorators.serving import set_served_model
from pytriton.exceptions import PyTritonBatchSizeError, PyTritonRuntimeError, PyTritonValidationError
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig


def add(a: Any, b: Any) -> dict[str, Any]:
    return {"total": a + b}


def values(results: Any, name: str = "total") -> list[list[float]]:
    return [result[name].ravel().tolist() for result in results]


class TestBatch:
    def test_every_request_gets_its_rows(self, make_requests: Callable[..., Any]) -> None:
        results = batch(add)(make_requests(1, 3, 2))
        assert values(results) == [[0], [101, 202, 303], [404, 505]]
        assert type(results) is list

    def test_results_are_views(self, make_requests: Callable[..., Any]) -> None:
        total = np.zeros((3, 1))
        results = batch(lambda a, b: {"total": total})(make_requests(1, 2))
        assert all(result["total"].base is total for result in results)

    def test_a_list_or_tuple_is_named_by_the_outputs_of_the_model(
        self, make_requests: Callable[..., Any], model_config: TritonModelConfig
    ) -> None:
        for kind in (list, tuple):
            infer = batch(lambda a, b, kind=kind: kind((a + b, a - b)))
            context = copy_context()
            context.run(set_served_model, infer, model_config)
            results = context.run(infer, make_requests(1, 2))
            assert values(results, "total") == [[0], [101, 202]]
            assert values(results, "difference") == [[0], [-99, -198]]

    def test_a_generator_is_split_step_by_step(self, make_requests: Callable[..., Any]) -> None:
        @batch
        def infer(a: Any, b: Any) -> Iterator[Any]:
            yield {"total": a}
            yield {"total": b}

        assert [values(step) for step in infer(make_requests(1, 2))] == [[[0], [1, 2]], [[0], [100, 200]]]

    def test_no_copy_for_one_request(self, make_requests: Callable[..., Any]) -> None:
        (only,) = make_requests(3)
        seen: dict[str, Any] = {}
        results = batch(lambda **inputs: seen.update(inputs) or {"same": inputs["a"]})([only])
        assert seen["a"] is only["a"]
        assert seen["b"] is only["b"]
        assert results[0]["same"] is only["a"]

    def test_one_copy_for_several(self, make_requests: Callable[..., Any]) -> None:
        requests = make_requests(1, 2)
        seen: dict[str, Any] = {}
        batch(lambda **inputs: seen.update(inputs) or {})(requests)
        assert seen["a"].ravel().tolist() == [0, 1, 2]
        assert not np.shares_memory(seen["a"], requests[1]["a"])

    def test_requests_of_every_kind(self, make_requests: Callable[..., Any], request_type: Any) -> None:
        first, second, third, fourth = make_requests(1, 1, 1, 1)
        requests = [first, request_type(second), MappingProxyType(third), collections.UserDict(fourth)]
        for sequence in (requests, tuple(requests), collections.deque(requests)):
            assert values(batch(add)(sequence)) == [[0], [101], [202], [303]]

    def test_the_order_of_inputs_within_a_request_does_not_matter(self, make_requests: Callable[..., Any]) -> None:
        first, second = make_requests(1, 1)
        assert values(batch(add)([first, dict(reversed(second.items()))])) == [[0], [101]]

    def test_a_request_without_rows(self, make_requests: Callable[..., Any]) -> None:
        assert values(batch(add)(make_requests(1, 0, 2))) == [[0], [], [101, 202]]

    def test_a_request_without_inputs_is_one_row(self) -> None:
        @batch
        def tick() -> dict[str, Any]:
            return {"tick": np.array([[1], [2], [3]])}

        assert values(tick([{}, {}, {}]), "tick") == [[1], [2], [3]]
        with pytest.raises(ValueError, match="Expected batch size: 1"):
            tick([{}])

    def test_strings(self) -> None:
        requests = [{"text": np.array([[b"a"]], object)}, {"text": np.array([[b"b\0"], [b"c"]], object)}]
        assert [result["text"].tolist() for result in batch(lambda text: {"text": text})(requests)] == [
            [[b"a"]],
            [[b"b\0"], [b"c"]],
        ]

    def test_keyword_arguments_of_the_caller_are_handed_on(self, make_requests: Callable[..., Any]) -> None:
        infer: Any = batch(lambda a, b, factor: {"total": factor * a})
        assert values(infer(make_requests(1, 2), factor=2)) == [[0], [2, 4]]

    def test_any_mapping_as_result(self, make_requests: Callable[..., Any], request_type: Any) -> None:
        for kind in (MappingProxyType, request_type, collections.OrderedDict):
            infer = batch(lambda a, b, kind=kind: kind({"total": a}))
            assert values(infer(make_requests(1, 1))) == [[0], [1]]
            assert values(infer(make_requests(1))) == [[0]]

    def test_no_outputs(self, make_requests: Callable[..., Any]) -> None:
        assert batch(lambda a, b: {})(make_requests(1, 1)) == [{}, {}]


class TestBatchWithoutCopy:
    class Laid:
        """A request of a batch that lies in one piece, as the server hands it out."""

        def __init__(self, data: dict[str, Any], whole: dict[str, Any], batch: list[Any]) -> None:
            self.data = data
            self.whole = whole
            self.batch = batch

        def __pytriton_batch__(self, requests: list[Any]) -> tuple[dict[str, Any], list[int]] | None:
            if requests is not self.batch:
                return None
            return self.whole, [len(request.data["a"]) for request in requests]

    @pytest.fixture
    def laid(self) -> tuple[list[Any], dict[str, Any]]:
        whole = {"a": np.arange(3.0).reshape(3, 1), "b": np.arange(3.0).reshape(3, 1) * 100}
        requests: list[Any] = []
        for rows in (slice(0, 1), slice(1, 3)):
            requests.append(self.Laid({name: array[rows] for name, array in whole.items()}, whole, requests))
        return requests, whole

    def test_the_array_of_the_server_is_handed_on(self, laid: tuple[list[Any], dict[str, Any]]) -> None:
        requests, whole = laid
        seen: dict[str, Any] = {}
        results = batch(lambda **inputs: seen.update(inputs) or add(**inputs))(requests)
        assert seen["a"] is whole["a"]
        assert values(results) == [[0], [101, 202]]

    def test_another_list_is_concatenated(self, laid: tuple[list[Any], dict[str, Any]]) -> None:
        requests, whole = laid
        seen: dict[str, Any] = {}
        results = batch(lambda **inputs: seen.update(inputs) or add(**inputs))(requests[::-1])
        assert not np.shares_memory(seen["a"], whole["a"])
        assert values(results) == [[101, 202], [0]]


class TestBatchErrors:
    def test_different_inputs(self, make_requests: Callable[..., Any]) -> None:
        first, second = make_requests(1, 1)
        third = {**second, "c": second["a"]}
        for odd in ({"a": second["a"]}, third, {"a": second["a"], "c": second["a"]}, {}):
            for requests in ([first, first, odd], [odd, first]):
                with pytest.raises(
                    PyTritonValidationError, match=r"different inputs.*@group_by_keys above @batch"
                ) as caught:
                    batch(add)(requests)
                assert caught.value.request_index == len(requests) - 1

    def test_wrong_rows_of_outputs(self, make_requests: Callable[..., Any]) -> None:
        infer = batch(lambda a, b: {"good": a, "bad": a[:2], "worse": a[:1]})
        message = (
            r"Received output tensors with different batch sizes: good: 3, bad: 2, worse: 1\. Expected batch size: 3"
        )
        with pytest.raises(ValueError, match=message) as caught:
            infer(make_requests(1, 2))
        assert isinstance(caught.value, PyTritonBatchSizeError)
        assert caught.value.tensor == "bad"
        assert caught.value.expected == 3
        assert caught.value.received == {"good": 3, "bad": 2, "worse": 1}
        with pytest.raises(ValueError, match="Expected batch size: 3"):
            infer(make_requests(3))

    @pytest.mark.parametrize("output", [[1.0], 1.0, None, np.float32(1), np.array(1.0)], ids=repr)
    def test_outputs_without_a_batch_axis(self, make_requests: Callable[..., Any], output: Any) -> None:
        with pytest.raises(PyTritonValidationError, match=r"'odd' has no batch axis: expected a numpy array") as caught:
            batch(lambda a, b: {"fine": a, "odd": output})(make_requests(1, 1))
        assert caught.value.tensor == "odd"
        assert ("numpy.asarray makes an array" in str(caught.value)) is not isinstance(output, (np.ndarray, np.generic))

    def test_ragged_rows_are_told_with_their_request(self, make_requests: Callable[..., Any]) -> None:
        ragged = [np.zeros(3), np.zeros(3), np.zeros(5)]
        with pytest.raises(
            PyTritonValidationError, match=r"'total' is ragged: .*\(3,\), row 2 .*\(5,\).*request 1"
        ) as caught:
            batch(lambda a, b: {"total": ragged})(make_requests(1, 2))
        assert (caught.value.tensor, caught.value.request_index) == ("total", 1)
        assert (caught.value.expected, caught.value.received) == ((3,), (5,))
        assert "ConstantPadder" in caught.value.message

    def test_inputs_of_different_rows(self, make_requests: Callable[..., Any]) -> None:
        first, second = make_requests(1, 2)
        second["b"] = second["b"][:1]
        for requests in ([first, second], [second]):
            with pytest.raises(PyTritonBatchSizeError, match=r"request \d have different batch sizes: a: 2, b: 1"):
                batch(add)(requests)

    @pytest.mark.parametrize("value", [[[1.0]], np.float32(1), None], ids=repr)
    def test_inputs_that_are_no_arrays(self, make_requests: Callable[..., Any], value: Any) -> None:
        (fine,) = make_requests(1)
        with pytest.raises(PyTritonValidationError, match=r"Input 'b' of request 1 is a .*@sample") as caught:
            batch(add)([fine, {**fine, "b": value}])
        assert (caught.value.tensor, caught.value.request_index) == ("b", 1)

    def test_inputs_of_different_shapes(self) -> None:
        requests = [{"a": np.zeros((1, 2))}, {"a": np.zeros((2, 2))}, {"a": np.zeros((1, 3))}]
        with pytest.raises(
            PyTritonValidationError, match=r"Input 'a'.*\(1, 2\).*request 2 has shape \(1, 3\)"
        ) as caught:
            batch(lambda a: {"a": a})(requests)
        assert caught.value.request_index == 2

    @pytest.mark.parametrize("requests", [[], (), 3, None, {"a": np.zeros(1)}], ids=repr)
    def test_no_list_of_requests(self, requests: Any) -> None:
        for decorate in (batch, sample):
            with pytest.raises(PyTritonValidationError, match=r"expected a list of at least one request"):
                decorate(add)(requests)

    def test_arrays_as_keyword_arguments(self) -> None:
        infer: Any = batch(add)
        with pytest.raises(PyTritonValidationError, match=r"no positional argument.*not passed as keyword arguments"):
            infer(a=np.zeros(1), b=np.zeros(1))

    def test_a_request_that_is_no_mapping(self) -> None:
        bad: Any = [{"a": np.zeros((1, 1))}, [1]]
        with pytest.raises(PyTritonValidationError, match=r"Request 1 is a list"):
            batch(add)(bad)

    @pytest.mark.parametrize("output", [None, 3, np.zeros((1, 1)), "text"], ids=repr)
    def test_results_of_unsupported_types(self, make_requests: Callable[..., Any], output: Any) -> None:
        for decorate in (batch, sample):
            with pytest.raises(PyTritonValidationError, match="Unsupported output type"):
                decorate(lambda a, b: output)(make_requests(1))


class TestSample:
    def test_the_arrays_are_handed_on_as_they_are(self) -> None:
        a = np.zeros((2, 3))
        results = sample(lambda a: {"same": a})([{"a": a}])
        assert results[0]["same"] is a
        assert len(results) == 1

    def test_a_list_or_tuple_becomes_one_result(self, model_config: TritonModelConfig) -> None:
        for kind in (list, tuple):
            context = copy_context()
            infer = sample(lambda a, kind=kind: kind((a, -a)))
            context.run(set_served_model, infer, model_config)
            (result,) = context.run(infer, [{"a": np.ones(1, np.float32)}])
            assert result == {"total": [1], "difference": [-1]}

    def test_scalars_and_missing_inputs_are_fine(self) -> None:
        (result,) = sample(lambda: {"x": np.array(3)})([{}])
        assert result["x"].item() == 3

    def test_a_generator(self) -> None:
        @sample
        def infer(a: Any) -> Iterator[Mapping[str, Any]]:
            yield {"a": a}
            yield {"a": -a}

        assert [step[0]["a"].item() for step in infer([{"a": np.array(2)}])] == [2, -2]

    def test_several_requests(self, make_requests: Callable[..., Any]) -> None:
        with pytest.raises(PyTritonValidationError, match=r"one request, received 2.*batching=False.*@batch"):
            sample(add)(make_requests(1, 1))


class TestBatchSize:
    def test_of_the_first_input(self, make_requests: Callable[..., Any], request_type: Any) -> None:
        (data,) = make_requests(3)
        assert get_inference_request_batch_size(data) == 3
        assert get_inference_request_batch_size(request_type(data)) == 3

    def test_without_inputs(self) -> None:
        assert get_inference_request_batch_size({}) == 1

    def test_without_a_batch_axis(self) -> None:
        with pytest.raises(PyTritonValidationError, match="Input 'a'"):
            get_inference_request_batch_size({"a": np.array(1)})


# ---- calls for whole batches ---------------------------------------------------------------------------------------


class TestWhole:
    """What a server calls that has the batch as one array per input."""

    SIZES: ClassVar[list[int]] = [1, 2]

    def call(self, infer: Any, requests: Any = list) -> Any:
        return infer.__pytriton_whole__({"a": np.arange(3.0).reshape(3, 1)}, self.SIZES, requests)

    def test_outputs_come_back_whole(self) -> None:
        @batch
        def infer(a: Any) -> dict[str, Any]:
            return {"b": a + 1}

        outputs = self.call(infer)
        assert type(outputs) is dict
        assert outputs["b"].tolist() == [[1], [2], [3]]

    def test_a_list_becomes_outputs_by_name(self) -> None:
        @batch
        def infer(a: Any) -> list[Any]:
            return [a * 2]

        config = TritonModelConfig(model_name="m", outputs=[TensorSpec(name="b", shape=(1,), dtype=np.float64)])
        context = copy_context()
        context.run(set_served_model, infer, config)
        assert context.run(self.call, infer)["b"].tolist() == [[0], [2], [4]]

    def test_methods_are_reached_through_their_object(self) -> None:
        class Model:
            offset = 5

            @batch
            def infer(self, a: Any) -> dict[str, Any]:
                return {"b": a + self.offset}

        assert self.call(Model().infer)["b"].tolist() == [[5], [6], [7]]
        # Of the class it is not known which object to call.
        assert Model.infer.__pytriton_whole__ is None  # type: ignore[attr-defined] # not for users

    def test_steps_are_taken_apart(self) -> None:
        @batch
        def infer(a: Any) -> Iterator[dict[str, Any]]:
            yield {"b": a}
            yield {"b": -a}

        steps = list(self.call(infer, lambda: [{"a": 0}, {"a": 1}]))
        assert [[result["b"].tolist() for result in step] for step in steps] == [
            [[[0]], [[1], [2]]],
            [[[0]], [[-1], [-2]]],
        ]

    def test_coroutine_functions_do_not_offer_it(self) -> None:
        @batch
        async def infer(a: Any) -> dict[str, Any]:
            return {"b": a}

        assert infer.__pytriton_whole__ is None  # type: ignore[attr-defined] # not for users

    def test_the_rows_are_checked(self) -> None:
        @batch
        def infer(a: Any) -> dict[str, Any]:
            return {"b": a[:2]}

        with pytest.raises(ValueError, match="Expected batch size: 3"):
            self.call(infer)

    def test_the_requests_are_made_when_somebody_asks(self) -> None:
        made: list[list[str]] = []

        def requests() -> list[str]:
            made.append(["first", "second"])
            return made[-1]

        @batch
        def infer(a: Any) -> dict[str, Any]:
            return {"b": a}

        @batch
        def asking(a: Any) -> dict[str, Any]:
            assert get_requests() is get_requests() is made[0]
            return {"b": a}

        self.call(infer, requests)
        assert made == []
        self.call(asking, requests)
        assert len(made) == 1
        with pytest.raises(PyTritonRuntimeError):
            get_requests()
