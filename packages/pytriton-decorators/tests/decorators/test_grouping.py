import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import (
    ConstantPadder,
    batch,
    first_value,
    get_requests,
    get_row_requests,
    group_by_keys,
    group_by_values,
    sample,
)
from pytriton.exceptions import (
    PyTritonBadParameterError,
    PyTritonBatchSizeError,
    PyTritonRuntimeError,
    PyTritonValidationError,
)


def request(value: float, *, rows: int = 1, **others: Any) -> dict[str, Any]:
    return {"x": np.full((rows, 1), value), **others}


class TestByKeys:
    def test_one_call_for_each_set_of_inputs(self) -> None:
        calls: list[list[str]] = []

        @group_by_keys
        @batch
        def infer(**inputs: Any) -> dict[str, Any]:
            calls.append(sorted(inputs))
            return {"y": inputs["x"] + len(inputs)}

        b = np.zeros((1, 1))
        results = infer([request(10, b=b), request(20), request(30, b=b), request(40, rows=2), request(50, c=b)])
        assert [result["y"].ravel().tolist() for result in results] == [[12], [21], [32], [41, 41], [52]]
        assert calls == [["b", "x"], ["x"], ["c", "x"]]

    def test_the_order_of_inputs_within_a_request_makes_no_difference(self) -> None:
        calls = []

        @group_by_keys
        def infer(requests: Any) -> Any:
            calls.append(len(requests))
            return requests

        first = {"a": np.zeros(1), "b": np.zeros(1)}
        assert infer([first, dict(reversed(first.items())), first]) == [first, first, first]
        assert calls == [3]

    def test_the_requests_are_handed_on_as_they_are(self, request_type: Any) -> None:
        seen: list[Any] = []

        @group_by_keys
        def infer(requests: Sequence[Any]) -> list[Any]:
            seen.append((list(requests), list(get_requests())))
            return [one.parameters["id"] for one in requests]

        one, two, three = (request_type({name: np.zeros(1)}, {"id": name}) for name in "aba")
        three.parameters["id"] = "a2"
        assert infer([one, two, three]) == ["a", "b", "a2"]
        assert seen == [([one, three], [one, three]), ([two], [two])]

    def test_results_of_every_kind_keep_their_places(self) -> None:
        error = ValueError("just this one")

        @group_by_keys
        def infer(requests: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(error if "bad" in one else [one["x"]] for one in requests)

        x = np.zeros((1, 1))
        assert infer([{"x": x}, {"x": x, "bad": x}, {"x": x}]) == [[x], error, [x]]  # type: ignore[comparison-overlap]

    def test_generators_that_end_at_different_steps(self) -> None:
        @group_by_keys
        @batch
        def infer(x: Any, extra: Any = None) -> Iterator[Any]:
            for step in range(1 if extra is None else 3):
                yield {"y": x + step}

        steps = list(infer([request(10), request(20, extra=np.zeros((1, 1)))]))
        assert [[None if result is None else result["y"].item() for result in step] for step in steps] == [
            [10, 20],
            [None, 21],
            [None, 22],
        ]

    @pytest.mark.parametrize("returned", [[], [{}, {}, {}], None, {"y": np.zeros((2, 1))}], ids=repr)
    def test_a_result_for_each_request_is_expected(self, returned: Any) -> None:
        infer: Any = group_by_keys(lambda requests: returned if len(requests) == 2 else [{}])
        with pytest.raises(
            PyTritonValidationError, match=r"under @group_by_keys returned.*2 requests.*\['x'\]"
        ) as caught:
            infer([request(1), request(1), request(1, b=np.zeros((1, 1)))])
        assert caught.value.expected == 2

    @pytest.mark.parametrize("requests", [[], None, {"x": np.zeros((1, 1))}], ids=repr)
    def test_no_list_of_requests(self, requests: Any) -> None:
        with pytest.raises(PyTritonValidationError, match="@group_by_keys expected a list of at least one request"):
            group_by_keys(batch(lambda x: {"y": x}))(requests)

    def test_below_batch_it_says_where_it_goes(self) -> None:
        with pytest.raises(PyTritonValidationError, match="@group_by_keys goes above those that take arrays"):
            batch(group_by_keys(lambda requests: requests))([request(1)])

    def test_a_server_that_has_the_batch_in_one_piece_is_believed(self, request_type: Any) -> None:
        class Laid(request_type):  # type: ignore[misc]
            def __pytriton_batch__(self, requests: Any) -> Any:
                return {"x": np.zeros((2, 1))}, [1, 1]

            @property
            def data(self) -> Any:
                raise AssertionError("nobody has to look at the arrays of a request")

            @data.setter
            def data(self, value: Any) -> None:
                pass

        requests: Any = [Laid({}), Laid({})]
        assert group_by_keys(lambda requests: [len(requests)] * 2)(requests) == [2, 2]


class TestByValues:
    def calls(self, column: Any, *keys: str, **others: Any) -> list[list[int]]:
        """The rows of each group, in the order of the calls."""
        groups: list[list[int]] = []
        rows = np.arange(len(column))[:, None]

        @group_by_values(*(keys or ("t",)))
        def infer(t: Any, rows: Any, **_: Any) -> dict[str, Any]:
            groups.append(rows.ravel().tolist())
            return {"rows": rows, "t": t}

        result: Any = infer(t=column, rows=rows, **others)
        # Whatever the groups are: every row is in its place again.
        np.testing.assert_array_equal(result["rows"], rows)
        assert result["t"].tolist() == column.tolist() or column.dtype.kind == "f"
        assert result["t"].dtype == column.dtype
        return groups

    def test_groups_are_in_the_order_of_their_values(self) -> None:
        assert self.calls(np.array([[3], [1], [3], [2]])) == [[1], [3], [0, 2]]
        assert self.calls(np.array([[-1.5], [-2.5], [-1.5]])) == [[1], [0, 2]]
        assert self.calls(np.array([[True], [False], [True]])) == [[1], [0, 2]]
        assert self.calls(np.array([[b"b"], [b"a"], [b"b"]], object)) == [[1], [0, 2]]
        assert self.calls(np.array([[b"b"], [b"a"], [b"b"]])) == [[1], [0, 2]]
        assert self.calls(np.array([["b"], ["a"], ["b"]])) == [[1], [0, 2]]
        assert self.calls(np.array([[1], [2]], np.float16)) == [[0], [1]]

    def test_values_that_cannot_be_compared_keep_the_order_of_their_rows(self) -> None:
        assert self.calls(np.array([["b"], [b"a"], ["b"], [None]], object)) == [[0, 2], [1], [3]]

    def test_one_group(self) -> None:
        for column in (np.array([[7], [7], [7]]), np.array([[b"x"]] * 3, object), np.zeros((3, 2, 2)), np.ones((3, 0))):
            assert self.calls(column) == [[0, 1, 2]]

    def test_a_batch_of_one_group_is_handed_on_as_it_is(self) -> None:
        x, t = np.zeros((3, 1)), np.ones((3, 1))
        seen: dict[str, Any] = {}
        output = np.zeros((3, 5))
        result = group_by_values("t")(lambda **inputs: seen.update(inputs) or {"y": output})(x=x, t=t)
        assert seen["x"] is x
        assert seen["t"] is t
        assert result["y"] is output

    def test_rows_side_by_side_are_views(self) -> None:
        x = np.arange(4.0)[:, None]
        seen: list[Any] = []

        def infer(x: Any, t: Any) -> Any:
            seen.append(x)
            return {}

        group_by_values("t")(infer)(x=x, t=np.array([[1], [1], [2], [2]]))
        assert all(np.shares_memory(part, x) for part in seen)

    def test_values_of_several_elements(self) -> None:
        assert self.calls(np.array([[1, 2], [2, 1], [1, 2], [1, 1]])) == [[3], [0, 2], [1]]
        assert self.calls(np.array([[[1], [2]], [[1], [3]], [[1], [2]]])) == [[0, 2], [1]]

    def test_several_keys(self) -> None:
        u = np.array([[1], [0], [1], [1]])
        assert self.calls(np.array([[2], [1], [1], [2]]), "t", "u", u=u) == [[1], [2], [0, 3]]
        assert self.calls(np.array([[2], [1], [1], [2]]), "u", "t", u=u) == [[1], [2], [0, 3]]
        assert self.calls(np.array([[1], [1], [1], [2]]), "u", "t", u=u) == [[1], [0, 2], [3]]

    def test_nan_is_a_value_and_zero_has_no_sign(self) -> None:
        other = np.frombuffer(b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0]
        assert math.isnan(other)
        groups = self.calls(np.array([[np.nan], [0.0], [other], [-0.0], [np.nan]]))
        assert sorted(groups) == [[0, 2, 4], [1, 3]]
        assert self.calls(np.array([[0.0], [-0.0]])) == [[0, 1]]
        assert self.calls(np.array([[np.nan, 1], [other, 1]])) == [[0, 1]]

    def test_many_rows(self) -> None:
        column = np.random.default_rng(5).integers(0, 7, (1000, 1))
        groups = self.calls(column)
        assert groups == [np.flatnonzero(column.ravel() == value).tolist() for value in range(7)]
        assert self.calls(np.zeros((20_000, 1))) == [list(range(20_000))]

    def test_no_rows(self) -> None:
        assert self.calls(np.zeros((0, 1))) == [[]]

    def test_a_list_is_named_by_the_outputs_of_the_model(self, model_config: Any) -> None:
        from contextvars import copy_context

        from pytriton.decorators.serving import set_served_model

        infer = batch(group_by_values("b")(lambda a, b: [a, b]))
        context = copy_context()
        context.run(set_served_model, infer, model_config)
        results = context.run(infer, [{"a": np.array([[1.0], [2.0]]), "b": np.array([[2], [1]])}])
        assert results[0]["total"].tolist() == [[1], [2]]

    def test_scalars_and_other_arguments_are_handed_on(self) -> None:
        seen: list[Any] = []

        @group_by_values("t")
        def infer(t: Any, scale: Any, tag: str) -> Any:
            seen.append((scale, tag))
            return {"t": t}

        infer(t=np.array([[1], [2]]), scale=np.float32(3), tag="tag")
        assert seen == [(3, "tag"), (3, "tag")]

    def test_dtypes_of_groups_are_joined(self) -> None:
        def outputs(t: Any) -> Any:
            value = t.item()
            return {
                "number": np.array([[value]], np.int32 if value == 1 else np.float64),
                "text": np.array([[b"a" * value]]),
                "mixed": np.array([["b"]]) if value == 1 else np.array([[b"c\0"]], object),
            }

        result: Any = group_by_values("t")(outputs)(t=np.array([[2], [1]]))
        assert result["number"].dtype == np.float64
        assert result["text"].tolist() == [[b"aa"], [b"a"]]
        assert result["mixed"].tolist() == [[b"c\0"], ["b"]]

    def test_response_parameters_stay(self, request_type: Any) -> None:
        kinds = {1: {"who": "same"}, 2: {"who": "same"}, 3: {"who": "other"}}
        infer = batch(group_by_values("x")(lambda x: request_type({"y": x}, kinds[x[0].item()])))
        results: Any = infer([request(2), request(1)])
        assert [(result["y"].item(), result.parameters) for result in results] == [
            (2, {"who": "same"}),
            (1, {"who": "same"}),
        ]
        with pytest.raises(PyTritonRuntimeError, match="different response parameters"):
            infer([request(2), request(3)])


class TestPadFunction:
    def test_outputs_of_different_widths(self) -> None:
        @batch
        @group_by_values("n", pad_fn=ConstantPadder(-1))
        @first_value("n")
        def infer(n: Any) -> Any:
            return {"y": np.arange(n)[None]}

        results: Any = infer([{"n": np.array([[2]])}, {"n": np.array([[1]])}, {"n": np.array([[3]])}])
        assert [result["y"].tolist() for result in results] == [[[0, 1, -1]], [[0, -1, -1]], [[0, 1, 2]]]

    def test_without_one_the_error_says_so(self) -> None:
        infer: Any = group_by_values("n")(lambda n: {"y": np.zeros((1, n.item()))})
        with pytest.raises(PyTritonRuntimeError, match=r"Output 'y'.*\(1, 1\).*\(1, 2\).*pad_fn.*ConstantPadder"):
            infer(n=np.array([[1], [2]]))

    def test_it_gets_all_groups_also_a_single_one(self) -> None:
        seen: list[int] = []

        def pad(groups: Any) -> Any:
            seen.append(len(groups))
            return [{"y": group["y"] * 10} for group in groups]

        infer: Any = group_by_values("n", pad_fn=pad)(lambda n: {"y": n})
        assert infer(n=np.array([[1], [2]]))["y"].tolist() == [[10], [20]]
        assert infer(n=np.array([[1], [1]]))["y"].tolist() == [[10], [10]]
        assert seen == [2, 1]

    @pytest.mark.parametrize("returned", [None, [], [{}, {}, {}], {}], ids=repr)
    def test_it_returns_as_many(self, returned: Any) -> None:
        infer: Any = group_by_values("n", pad_fn=lambda groups: returned)(lambda n: {"y": n})
        with pytest.raises(PyTritonValidationError, match=r"pad_fn of @group_by_values expected .* 2 groups"):
            infer(n=np.array([[1], [2]]))


class TestSteps:
    """Generators that end for one group before they end for the others."""

    @staticmethod
    @batch
    @group_by_values("n", pad_fn=ConstantPadder(0))
    @first_value("n")
    def count(n: Any, x: Any) -> Iterator[Any]:
        for step in range(int(n)):
            yield {"y": np.full((len(x), step + 1), step) + x}

    @staticmethod
    @batch
    @group_by_values("n")
    @first_value("n")
    async def count_async(n: Any, x: Any) -> AsyncIterator[Any]:
        for step in range(int(n)):
            await asyncio.sleep(0)
            yield {"y": x + step}

    @pytest.mark.parametrize("name", ["count", "count_async"])
    def test_requests_end_with_their_group(self, name: str, drain: Callable[[Any], list[Any]]) -> None:
        requests = [
            {"n": np.array([[3], [3]]), "x": np.array([[10.0], [20.0]])},
            {"n": np.array([[1]]), "x": np.array([[30.0]])},
            {"n": np.array([[2]]), "x": np.array([[40.0]])},
        ]
        steps = drain(getattr(self, name)(requests))
        firsts = [[None if result is None else result["y"][:, 0].tolist() for result in step] for step in steps]
        assert firsts == [[[10, 20], [30], [40]], [[11, 21], None, [41]], [[12, 22], None, None]]

    def test_one_request_with_all_rows_of_one_group(self, drain: Callable[[Any], list[Any]]) -> None:
        steps = drain(self.count_async([{"n": np.array([[2]]), "x": np.array([[1.0]])}]))
        assert [step[0]["y"].item() for step in steps] == [1, 2]

    def test_a_request_cannot_end_in_parts(self) -> None:
        steps: Any = self.count([{"n": np.array([[2], [1]]), "x": np.zeros((2, 1))}])
        assert next(steps)[0]["y"].shape == (2, 1)
        with pytest.raises(PyTritonRuntimeError, match=r"rows of request 0.*1 of its 2 rows"):
            next(steps)

    def test_a_request_of_a_model_without_batching_cannot_either(self) -> None:
        steps: Any = sample(group_by_values("n")(lambda n: (part for part in [{"y": n}] * n[0].item())))(
            [{"n": np.array([[2], [1]])}]
        )
        next(steps)
        with pytest.raises(PyTritonRuntimeError, match="Under @sample there is one request"):
            next(steps)

    def test_groups_within_groups(self, drain: Callable[[Any], list[Any]]) -> None:
        @batch
        @group_by_values("a")
        @group_by_values("n")
        def infer(a: Any, n: Any) -> Iterator[Any]:
            for step in range(n[0].item()):
                yield {"y": a * 100 + n * 10 + step}

        rows = [(1, 2), (0, 1), (1, 1), (0, 3)]
        steps = drain(infer([{"a": np.array([[a]]), "n": np.array([[n]])} for a, n in rows]))
        assert [[None if result is None else result["y"].item() for result in step] for step in steps] == [
            [120, 10, 110, 30],
            [121, None, None, 31],
            [None, None, None, 32],
        ]

    def test_closing_closes_the_generators_of_all_groups(self) -> None:
        closed: list[int] = []

        @batch
        @group_by_values("n")
        def infer(n: Any) -> Iterator[Any]:
            try:
                while True:
                    yield {"y": n}
            finally:
                closed.append(n[0].item())

        steps: Any = infer([{"n": np.array([[1], [2], [3]])}])
        next(steps)
        steps.close()
        assert sorted(closed) == [1, 2, 3]


class TestRequestsOfGroups:
    def test_requests_and_rows_of_a_group(self, request_type: Any) -> None:
        seen: list[Any] = []

        @batch
        @group_by_values("t")
        def infer(t: Any) -> Any:
            names = [one.parameters["name"] for one in get_requests()]
            seen.append((t[0].item(), names, [one.parameters["name"] for one in get_row_requests()]))
            return {"t": t}

        infer(
            [
                request_type({"t": np.array([[2], [1]])}, {"name": "a"}),
                request_type({"t": np.array([[2]])}, {"name": "b"}),
                request_type({"t": np.array([[1], [1]])}, {"name": "c"}),
            ]
        )
        assert seen == [(1, ["a", "c"], ["a", "c", "c"]), (2, ["a", "b"], ["a", "b"])]

    def test_below_both(self, request_type: Any) -> None:
        seen: list[Any] = []

        @group_by_keys
        @batch
        @group_by_values("t")
        async def infer(t: Any, extra: Any = None) -> Any:
            await asyncio.sleep(0)
            seen.append([one.parameters["name"] for one in get_row_requests()])
            return {"t": t}

        extra = {"extra": np.zeros((1, 1))}
        requests = [
            request_type({"t": np.array([[value]]), **(extra if name in "bd" else {})}, {"name": name})
            for name, value in zip("abcde", [2, 1, 1, 1, 2], strict=True)
        ]
        asyncio.run(infer(requests))
        assert seen == [["c"], ["a", "e"], ["b", "d"]]

    def test_there_are_none_where_arrays_were_passed(self) -> None:
        def infer(t: Any) -> Any:
            with pytest.raises(PyTritonRuntimeError, match="no current requests"):
                get_row_requests()
            with pytest.raises(PyTritonRuntimeError, match="no current requests"):
                get_requests()
            return {"t": t}

        group_by_values("t")(infer)(t=np.array([[1], [2]]))


class TestErrors:
    def test_above_batch(self) -> None:
        with pytest.raises(PyTritonRuntimeError, match="Place @group_by_values below @batch"):
            group_by_values("x")(batch(lambda x: {"y": x}))([request(1)])
        with pytest.raises(PyTritonRuntimeError, match="Place @group_by_values below @batch"):
            group_by_values("x")(lambda x: {"y": x})({"x": np.zeros((1, 1))})

    @pytest.mark.parametrize("keys", [(), (1,), ("",), ("a", None), ("__triton_context__",)], ids=repr)
    def test_keys_are_names(self, keys: Any) -> None:
        for decorate in (group_by_values, first_value):
            with pytest.raises(PyTritonBadParameterError, match=r"expected the names of inputs"):
                decorate(*keys)

    def test_without_parentheses(self) -> None:
        for decorate, name in ((group_by_values, "group_by_values"), (first_value, "first_value")):
            wrong: Any = lambda x: {"y": x}  # noqa: E731
            with pytest.raises(PyTritonBadParameterError, match=rf'Write @{name}\("temperature"\)'):
                decorate(wrong)

    def test_a_pad_fn_that_is_none(self) -> None:
        wrong: Any = 0
        with pytest.raises(PyTritonBadParameterError, match="callable as pad_fn"):
            group_by_values("x", pad_fn=wrong)

    def test_a_key_that_is_no_input(self) -> None:
        infer: Any = batch(group_by_values("typo")(lambda x: {"y": x}))
        with pytest.raises(PyTritonBadParameterError, match=r"@group_by_values has the key 'typo'.*\['x'\]") as caught:
            infer([request(1), request(2)])
        assert caught.value.value == "typo"

    def test_inputs_of_different_rows(self) -> None:
        with pytest.raises(PyTritonBatchSizeError, match="@group_by_values received inputs of different batch sizes"):
            group_by_values("a")(lambda a, b: {})(a=np.zeros((2, 1)), b=np.zeros((3, 1)))

    def test_outputs_of_a_group_with_wrong_rows(self) -> None:
        infer: Any = group_by_values("a")(lambda a: {"y": np.zeros((2, 1))})
        with pytest.raises(PyTritonBatchSizeError, match=r"y: 2\. Expected batch size: 1.*@group_by_values"):
            infer(a=np.array([[1], [2]]))

    def test_an_output_that_is_no_array(self) -> None:
        infer: Any = group_by_values("a")(lambda a: {"y": 3})
        with pytest.raises(PyTritonValidationError, match=r"Output 'y' has no batch axis: .*received int 3\."):
            infer(a=np.array([[1], [2]]))

    def test_groups_with_different_outputs(self) -> None:
        infer: Any = group_by_values("a")(lambda a: {"y": a} if a.item() == 1 else {"z": a})
        with pytest.raises(PyTritonValidationError, match=r"different outputs.*\['y'\].*\['z'\]"):
            infer(a=np.array([[1], [2]]))

    def test_an_error_of_one_group_comes_through(self) -> None:
        with pytest.raises(ZeroDivisionError):
            batch(group_by_values("x")(lambda x: {"y": x} if x.sum() < 2 else 1 // 0))([request(1), request(2)])
