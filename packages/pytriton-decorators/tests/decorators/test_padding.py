from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import (
    ConstantPadder,
    batch,
    get_requests,
    get_row_requests,
    group_by_values,
    pad_batch,
    sample,
)
from pytriton.decorators.serving import set_served_model
from pytriton.exceptions import (
    PyTritonBadParameterError,
    PyTritonBatchSizeError,
    PyTritonRuntimeError,
    PyTritonValidationError,
)
from pytriton.model_config import DynamicBatcher
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig


def serve(infer: Any, *args: Any, preferred: list[int] | None = None, batching: bool = True, **kwargs: Any) -> Any:
    """Calls a callable of a model with at most 8 rows."""
    config = TritonModelConfig(
        "padded",
        max_batch_size=8,
        batching=batching,
        batcher=DynamicBatcher(preferred_batch_size=preferred),
        outputs=[TensorSpec("y", (1,), np.float64)],
    )
    context = copy_context()
    context.run(set_served_model, infer, config)
    return context.run(infer, *args, **kwargs)


def column(*values: Any, dtype: Any = np.float64) -> Any:
    return np.array([[value] for value in values], dtype)


class TestPadBatch:
    @pytest.mark.parametrize(
        ("rows", "preferred", "expected"),
        [(1, None, 8), (8, None, 8), (3, [2, 4], 4), (4, [4, 2], 4), (2, [4, 2], 2), (5, [2, 4], 8), (8, [2, 4], 8)],
    )
    def test_the_next_preferred_size_else_the_maximum(
        self, rows: int, preferred: list[int] | None, expected: int
    ) -> None:
        seen: dict[str, Any] = {}

        @batch
        @pad_batch
        def infer(x: Any, text: Any) -> dict[str, Any]:
            seen.update(x=x, text=text)
            return {"y": x * 2, "text": text}

        texts = column(*[f"t{row}".encode() for row in range(rows)], dtype=object)
        (result,) = serve(infer, [{"x": column(*range(rows)), "text": texts}], preferred=preferred)
        last = rows - 1
        assert seen["x"].ravel().tolist() == [*range(rows), *[last] * (expected - rows)]
        assert seen["text"].ravel().tolist() == [*texts.ravel(), *[b"t%d" % last] * (expected - rows)]
        assert result["y"].ravel().tolist() == [2 * row for row in range(rows)]
        assert result["text"].tolist() == texts.tolist()

    def test_a_batch_of_a_preferred_size_is_handed_on_as_it_is(self) -> None:
        x = column(1, 2)
        assert serve(pad_batch(lambda x: {"y": x}), x=x, preferred=[2])["y"] is x

    def test_several_requests_and_outputs_by_place(self) -> None:
        infer = batch(pad_batch(lambda x: [x + 1]))
        results = serve(infer, [{"x": column(1)}, {"x": column(2, 3)}])
        assert [result["y"].ravel().tolist() for result in results] == [[2], [3, 4]]

    def test_untrimmed_for_a_callable_that_does_it_itself(self) -> None:
        for decorate in (pad_batch(trim=False), pad_batch):
            sizes: list[int] = []

            def outer(x: Any, decorate: Any = decorate, sizes: Any = sizes) -> Any:
                padded = decorate(lambda x: {"y": x})(x=x)
                sizes.append(len(padded["y"]))
                return {"y": padded["y"][: len(x)]}

            assert serve(batch(outer), [{"x": column(1, 2, 3)}])[0]["y"].ravel().tolist() == [1, 2, 3]
            assert sizes == [3 if decorate is pad_batch else 8]

    def test_a_callable_that_has_trimmed_already(self) -> None:
        results = serve(batch(pad_batch(lambda x: {"y": x[:3]})), [{"x": column(1, 2, 3)}])
        assert results[0]["y"].ravel().tolist() == [1, 2, 3]

    def test_wrong_outputs_are_told_by_batch(self) -> None:
        with pytest.raises(PyTritonBatchSizeError, match=r"y: 5\. Expected batch size: 3"):
            serve(batch(pad_batch(lambda x: {"y": x[:5]})), [{"x": column(1, 2, 3)}])
        with pytest.raises(PyTritonValidationError, match=r"'y' has no batch axis: .* received int 5"):
            serve(batch(pad_batch(lambda x: {"y": 5})), [{"x": column(1, 2, 3)}])

    def test_every_step_of_a_generator_is_trimmed(self) -> None:
        @batch
        @pad_batch
        def infer(x: Any) -> Iterator[Any]:
            yield {"y": x}
            yield [-x]

        steps = serve(infer, [{"x": column(1)}, {"x": column(2)}])
        # The model is known while the steps are taken, as under the server.
        context = copy_context()
        config = TritonModelConfig("m", outputs=[TensorSpec("y", (1,), np.float64)])
        context.run(set_served_model, infer, config)
        assert [[result["y"].item() for result in step] for step in context.run(list, steps)] == [[1, 2], [-1, -2]]

    def test_above_groups_whose_generators_end_at_different_steps(self) -> None:
        @batch
        @pad_batch
        @group_by_values("n")
        def infer(n: Any) -> Iterator[Any]:
            for step in range(n[0].item()):
                yield {"y": n * 10 + step}

        steps = serve(infer, [{"n": column(2, dtype=int)}, {"n": column(1, dtype=int)}, {"n": column(3, dtype=int)}])
        assert [[None if result is None else result["y"].item() for result in step] for step in steps] == [
            [20, 10, 30],
            [21, None, 31],
            [None, None, 32],
        ]

    def test_inputs_are_not_shared_with_the_caller(self) -> None:
        x = column(1, 2)

        def infer(x: Any) -> Any:
            x += 1
            return {"y": x}

        serve(batch(pad_batch(infer)), [{"x": x}])
        assert x.ravel().tolist() == [1, 2]

    def test_no_rows_are_filled_with_zeros(self) -> None:
        seen: dict[str, Any] = {}
        infer = pad_batch(lambda **inputs: seen.update(inputs) or {"y": inputs["x"]})
        inputs: dict[str, Any] = {
            "x": np.zeros((0, 2)),
            "text": np.zeros((0, 1), object),
            "flat": np.zeros((0, 1), "S3"),
        }
        assert serve(infer, preferred=[2], **inputs)["y"].shape == (0, 2)
        assert seen["x"].tolist() == [[0, 0], [0, 0]]
        assert seen["text"].tolist() == seen["flat"].tolist() == [[b""], [b""]]

    def test_without_inputs_there_is_nothing_to_pad(self) -> None:
        assert serve(batch(pad_batch(lambda: {"y": column(1, 2)})), [{}, {}])[1]["y"].tolist() == [[2]]

    def test_requests_of_the_added_rows(self, request_type: Any) -> None:
        seen: list[Any] = []

        def infer(x: Any) -> Any:
            seen.append([one.parameters["name"] for one in get_requests()])
            seen.append([one.parameters["name"] for one in get_row_requests()])
            return {"y": x}

        requests = [request_type({"x": column(*values)}, {"name": name}) for name, *values in (("a", 1, 2), ("b", 3))]
        serve(batch(pad_batch(infer)), requests, preferred=[4])
        assert seen == [["a", "b"], ["a", "a", "b", "b"]]

    def test_response_parameters_stay(self, request_type: Any) -> None:
        infer = batch(pad_batch(lambda x: request_type({"y": x}, {"said": "yes"})))
        results = serve(infer, [{"x": column(1)}, {"x": column(2)}])
        assert [(result["y"].item(), result.parameters) for result in results] == [
            (1, {"said": "yes"}),
            (2, {"said": "yes"}),
        ]

    def test_too_many_rows(self) -> None:
        with pytest.raises(PyTritonBatchSizeError, match=r"9 rows.*'padded' is 8") as caught:
            serve(pad_batch(lambda x: {"y": x}), x=np.zeros((9, 1)))
        assert (caught.value.expected, caught.value.received) == (8, 9)

    def test_a_model_without_batching(self) -> None:
        with pytest.raises(PyTritonRuntimeError, match=r"'padded' has batching=False"):
            serve(sample(pad_batch(lambda x: {"y": x})), [{"x": column(1)}], batching=False)

    def test_above_batch(self) -> None:
        with pytest.raises(PyTritonRuntimeError, match="Place @pad_batch below @batch"):
            serve(pad_batch(batch(lambda x: {"y": x})), [{"x": column(1)}])

    def test_not_bound(self, make_requests: Callable[..., Any]) -> None:
        with pytest.raises(PyTritonValidationError, match=r"not bound.*pytriton\.decorators\.testing"):
            batch(pad_batch(lambda a, b: {"y": a}))(make_requests(1))

    def test_only_callables_are_decorated(self) -> None:
        wrong: Any = 3
        for decorate in (pad_batch, pad_batch(), pad_batch(trim=False)):
            with pytest.raises(PyTritonBadParameterError, match="@pad_batch decorates a callable"):
                decorate(wrong)


class TestConstantPadder:
    def test_every_axis_but_the_first(self) -> None:
        first = {"a": np.ones((1, 2, 1)), "b": np.ones((1, 3))}
        second = {"a": np.ones((2, 1, 3)) * 2, "b": np.ones((2, 3)) * 2}
        padded = ConstantPadder(-1)([first, second])
        assert padded[0]["a"].tolist() == [[[1, -1, -1], [1, -1, -1]]]
        assert padded[1]["a"].tolist() == [[[2, 2, 2], [-1, -1, -1]]] * 2
        assert padded[0]["b"] is first["b"]
        assert first["a"].shape == (1, 2, 1)

    @pytest.mark.parametrize(
        "dtype", [np.bool_, np.int8, np.uint8, np.int64, np.uint64, np.float16, np.float32, np.float64]
    )
    def test_numbers_of_every_dtype(self, dtype: Any) -> None:
        padded = ConstantPadder(1)([{"a": np.zeros((1, 1), dtype)}, {"a": np.zeros((1, 2), dtype)}])
        assert padded[0]["a"].tolist() == [[0, 1]]
        assert {array["a"].dtype for array in padded} == {np.dtype(dtype)}

    def test_strings_of_every_kind(self) -> None:
        for one, two, empty in (
            (np.array([[b"a"]]), np.array([[b"bb", b"c"]]), b""),
            (np.array([["a"]]), np.array([["bb", "c"]]), ""),
            (np.array([[b"a"]], object), np.array([[b"bb", b"c"]], object), b""),
        ):
            padded = ConstantPadder(7)([{"a": one}, {"a": two}])
            assert padded[0]["a"].tolist() == [[one[0, 0], empty]]
            assert padded[1]["a"].tolist() == two.tolist()

    def test_arrays_without_rows(self) -> None:
        padded = ConstantPadder()([{"a": np.zeros((0, 1))}, {"a": np.zeros((1, 3))}])
        assert [array["a"].shape for array in padded] == [(0, 3), (1, 3)]

    def test_no_batches(self) -> None:
        assert ConstantPadder()([]) == []

    def test_float_values(self) -> None:
        for value in (0.1, np.nan, -np.inf, np.float32(2.5)):
            padded = ConstantPadder(value)([{"a": np.zeros((1, 0), np.float32)}, {"a": np.zeros((1, 1), np.float32)}])
            np.testing.assert_array_equal(padded[0]["a"], np.array([[value]], np.float32))

    @pytest.mark.parametrize(
        ("value", "dtype"), [(-1, np.uint8), (256, np.uint8), (0.5, np.int32), (np.nan, np.int64), (2, np.bool_)]
    )
    def test_a_value_that_the_dtype_cannot_hold(self, value: float, dtype: Any) -> None:
        with pytest.raises(PyTritonBadParameterError, match=rf"cannot pad 'a'.*{np.dtype(dtype)}"):
            ConstantPadder(value)([{"a": np.zeros((1, 1), dtype)}, {"a": np.zeros((1, 2), dtype)}])

    @pytest.mark.parametrize("value", [None, "0", b"", [0]], ids=repr)
    def test_a_value_that_is_no_number(self, value: Any) -> None:
        with pytest.raises(PyTritonBadParameterError, match=r"a number as pad_value"):
            ConstantPadder(value)

    def test_different_dtypes(self) -> None:
        for other in (np.zeros((1, 1), np.float64), np.array([[b""]]), np.array([[""]], object)):
            with pytest.raises(PyTritonRuntimeError, match=r"Arrays 'a'.*different dtypes, float32 and"):
                ConstantPadder()([{"a": np.zeros((1, 1), np.float32)}, {"a": other}])

    def test_different_axes(self) -> None:
        with pytest.raises(PyTritonRuntimeError, match=r"\(1, 1\) and \(1,\).*same number of axes"):
            ConstantPadder()([{"a": np.zeros((1, 1))}, {"a": np.zeros(1)}])

    def test_different_names(self) -> None:
        with pytest.raises(PyTritonRuntimeError, match=r"Only 1 of the 2 batches.*'b'"):
            ConstantPadder()([{"a": np.zeros((1, 1))}, {"a": np.zeros((1, 1)), "b": np.zeros((1, 1))}])
