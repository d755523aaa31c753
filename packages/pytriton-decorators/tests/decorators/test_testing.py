"""The harness: what a server would do to requests and results, without one."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import TritonContext, batch, get_model_config, get_triton_context, sample, triton_context
from pytriton.decorators.testing import Harness, Result, make_request
from pytriton.exceptions import PyTritonBadParameterError, PyTritonRuntimeError, PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.model_config.triton_model_config import TritonModelConfig

X = [Tensor((2,), np.float32, "x"), Tensor((1,), bytes, "text", optional=True)]
Y = [Tensor((-1,), np.float32, "y")]
ONE = {"x": np.array([[1, 2]], np.float32)}


def identity(requests: Any) -> Any:
    return requests


class TestRequests:
    def test_one_or_several(self) -> None:
        harness = Harness(batch(lambda x: {"y": x * 2}))
        assert harness.infer(ONE)["y"].tolist() == [[2, 4]]
        assert [result["y"].tolist() for result in harness.infer([ONE, ONE])] == [[[2, 4]]] * 2
        assert [result["y"].tolist() for result in harness.infer((ONE,))] == [[[2, 4]]]
        assert type(harness.infer(ONE)) is Result

    def test_everything_that_a_request_has(self) -> None:
        def infer(requests: Any) -> Any:
            (request,) = requests
            found = (request.parameters, request.request_id, request.priority, request.timeout_us)
            assert found == ({"scale": 2}, "seven", 3, 4)
            assert (request.correlation_id, request.requested_output_names) == ("five", ["y"])
            assert not request.is_cancelled()
            with request.traced_span("span"):
                return [{"y": request["x"], "z": request["x"]}]

        request = make_request(
            ONE, {"scale": 2}, request_id="seven", priority=3, timeout_us=4, correlation_id="five",
            requested_output_names=["y"],
        )  # fmt: skip
        assert list(Harness(infer).infer(request)) == ["y"]

    def test_they_are_of_the_type_of_the_server_where_it_is_installed(self) -> None:
        seen: list[Any] = []

        def infer(requests: Any) -> Any:
            seen.extend(requests)
            return requests

        Harness(infer).infer([ONE, make_request(ONE)])
        try:
            from pytriton.proxy.types import Request
        except ModuleNotFoundError:
            assert {type(request).__mro__[2].__name__ for request in seen} == {"FakeRequest"}
        else:
            assert all(isinstance(request, Request) for request in seen)
        assert all(list(request) == ["x"] and len(request) == 1 and "x" in request for request in seen)

    def test_the_stand_in_has_the_same_attributes(self) -> None:
        types = pytest.importorskip("pytriton.proxy.types")
        from pytriton.decorators._fake_request import FakeRequest

        real = {name for name in dir(types.Request(ONE)) if not name.startswith("_")} - {"is_cancelled"}
        assert real <= set(dir(FakeRequest(ONE)))

    def test_lists_become_arrays_of_the_declared_dtypes(self) -> None:
        seen: list[Any] = []

        def infer(requests: Any) -> Any:
            seen.extend(requests)
            return requests

        Harness(infer, X).infer({"x": [[1, 2]], "text": [["a"]]})
        assert seen[0]["x"].dtype == np.float32
        assert seen[0]["text"].dtype == object
        assert seen[0]["text"].tolist() == [[b"a"]]

    @pytest.mark.parametrize("text", [np.array([["ä"]]), np.array([["ä".encode()]]), np.array([["ä"]], object)])
    def test_strings_come_as_from_the_server(self, text: Any) -> None:
        seen: list[Any] = []

        def infer(requests: Any) -> Any:
            seen.extend(requests)
            return requests

        Harness(infer).infer({"text": text})
        assert seen[0]["text"].tolist() == [["ä".encode()]]

    def test_the_callers_dictionaries_are_not_changed(self) -> None:
        data = dict(ONE)
        request = make_request(data)

        def infer(requests: Any) -> Any:
            for one in requests:
                one["new"] = one.data.pop("x")
            return [{}] * len(requests)

        Harness(infer).infer([data, request])
        assert list(data) == list(request) == ["x"]

    def test_cancelling(self) -> None:
        request = make_request(ONE)

        def infer(requests: Any) -> Iterator[Any]:
            for _ in range(3):
                if requests[0].is_cancelled():
                    return
                yield [{"y": requests[0]["x"]}]

        steps = Harness(infer).stream(request)
        next(steps)
        request.cancel()
        assert list(steps) == []
        assert request.is_cancelled()

    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ({"z": [[1.0]]}, r"Input 'z' of request 0 is none of the model's inputs \['text', 'x'\]"),
            ({"text": [["a"]]}, r"Request 0 lacks the inputs \['x'\]"),
            ({"x": np.zeros((1, 2))}, r"Input 'x'.*dtype.*expected float32, received float64"),
            ({"x": np.zeros((1, 3), np.float32)}, r"Input 'x'.*shape.*\(rows, 2\), received \(1, 3\)"),
            ({"x": np.zeros(2, np.float32)}, r"Input 'x'.*shape"),
            ({"x": np.float32(3)}, r"Input 'x'.*shape"),
            ({"x": [["a", "b"]]}, r"Input 'x'.*values.*expected float32, received object \[\['a', 'b'\]\]"),
            ({"x": [[1, 2], [3]]}, r"Input 'x'.*values.*lists of one length"),
            ({"x": np.array([[b"a", b"b"]])}, r"Input 'x'.*dtype.*expected float32"),
            ({"x": [[1, 2]], "text": [[1]]}, r"Input 'text'.*dtype"),
            ({"x": [[1, 2]], "text": np.array([[1]], object)}, r"Input 'text'.*objects with a int at place 0"),
            ({"x": [[1, 2]], "text": [["a"], ["b"]]}, r"request 0 have the shapes x: \(1, 2\), text: \(2, 1\)"),
            ([], r"at least one request"),
            ([3], r"Request 0 is a int"),
            ({"x": [[0, 0]] * 5}, r"\[5\] rows, together 5: expected at most the max_batch_size of 4"),
            ([{"x": [[0, 0]] * 3}, {"x": [[0, 0]] * 2}], r"\[3, 2\] rows"),
        ],
        ids=repr,
    )
    def test_what_the_server_refuses(self, request_: Any, message: str) -> None:
        with pytest.raises(PyTritonValidationError, match=message):
            Harness(identity, X, config=ModelConfig()).infer(request_)

    @pytest.mark.parametrize(
        ("dtype", "value"), [(int, 1.5), (int, 1.0), (np.uint8, 300), (np.uint8, -1), (bool, 1), (np.float32, None)]
    )
    def test_plain_values_that_no_client_would_send(self, dtype: Any, value: Any) -> None:
        harness = Harness(identity, [Tensor((1,), dtype, "x")])
        with pytest.raises(PyTritonValidationError, match="values that the server takes"):
            harness.infer({"x": [[value]]})

    @pytest.mark.parametrize(("dtype", "value"), [(np.uint8, 255), (np.float16, 1), (np.float32, True), (bool, False)])
    def test_plain_values_that_become_the_declared_dtype(self, dtype: Any, value: Any) -> None:
        result = Harness(identity, [Tensor((1,), dtype, "x")]).infer({"x": [[value]]})["x"]
        assert (result.dtype, result.tolist()) == (np.dtype(dtype), [[value]])

    def test_without_batching_each_request_is_a_call(self) -> None:
        harness = Harness(sample(lambda x: [x]), X[:1], Y, ModelConfig(batching=False, max_batch_size=1))
        assert [result["y"].tolist() for result in harness.infer([{"x": [1, 2]}, {"x": [3, 4]}])] == [[1, 2], [3, 4]]
        with pytest.raises(PyTritonValidationError, match=r"shape.*\(2\), received \(1, 2\)"):
            harness.infer(ONE)


class TestResults:
    def result(self, returned: Any, *, outputs: Any = Y, strict: bool = False) -> Any:
        return Harness(lambda requests: [returned], None, outputs, strict=strict).infer(ONE)

    def test_outputs_are_cast_unless_strict(self) -> None:
        result = self.result({"y": np.array([[1.5]]), "undeclared": np.zeros((1, 1))})
        assert list(result) == ["y"]
        assert result["y"].dtype == np.float32

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            ({"y": np.zeros((1, 1))}, r"Output 'y' of request 0.*dtype.*float32, received float64"),
            ({"y": np.zeros((1, 1), np.float32), "z": np.zeros((1, 1))}, r"outputs \['y', 'z'\], expected.*\['y'\]"),
            ({}, r"outputs \[\], expected"),
            ({"y": np.zeros((1, 1, 1), np.float32)}, r"shape.*\(rows, -1\), received \(1, 1, 1\)"),
        ],
        ids=repr,
    )
    def test_strict(self, returned: Any, message: str) -> None:
        assert self.result({"y": np.zeros((1, 1), np.float32)}, strict=True)["y"].tolist() == [[0]]
        with pytest.raises(PyTritonValidationError, match=message):
            self.result(returned, strict=True)

    @pytest.mark.parametrize("returned", [{"Y": np.zeros((1, 1), np.float32)}, {}])
    def test_none_of_the_outputs(self, returned: Any) -> None:
        with pytest.raises(
            PyTritonValidationError, match=r"has the outputs \[.*\], expected those of the model, \['y'\]"
        ):
            self.result(returned)

    def test_a_response_of_a_stream_may_leave_outputs_out(self) -> None:
        def give(requests: Any) -> Any:
            yield [{}]
            yield [{"Y": np.zeros((1, 1), np.float32)}]

        responses = Harness(give, None, Y, config=ModelConfig(decoupled=True)).stream(ONE)
        assert dict(next(responses)) == {}
        with pytest.raises(PyTritonValidationError, match="expected those of the model"):
            next(responses)

    def test_strict_callables_may_leave_out_what_is_not_asked_for(self) -> None:
        outputs = [*Y, Tensor((1,), np.float32, "z")]
        returned = {"y": np.zeros((1, 1), np.float32)}
        harness = Harness(lambda requests: [returned], None, outputs, strict=True)
        assert list(harness.infer(make_request(ONE, requested_output_names=["y"]))) == ["y"]
        for requested in (["z"], ["y", "z"], None):
            with pytest.raises(PyTritonValidationError, match=r"has the outputs \['y'\]"):
                harness.infer(make_request(ONE, requested_output_names=requested))

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            ({"y": [[1.0]]}, r"Output 'y' of request 0.*expected a numpy array, received list"),
            ({"y": None}, r"received NoneType"),
            ({"y": np.float32(1)}, r"batch axis in front"),
            ({"y": np.array([[b"a"]])}, r"'y'.*dtype"),
            ({"y": np.array([[1j]])}, r"dtype.*one that Triton can carry"),
            ({"y": np.array([["2020"]], "datetime64[Y]")}, r"dtype.*one that Triton can carry"),
            ([], r"Outputs length different"),
            (3, r"Unsupported output type"),
            (None, r"Unsupported output type"),
        ],
        ids=repr,
    )
    def test_what_the_server_refuses(self, returned: Any, message: str) -> None:
        with pytest.raises(PyTritonValidationError, match=message):
            self.result(returned)

    @pytest.mark.parametrize("returned", [None, {}, [], [{}, {}], np.zeros((1, 1))], ids=repr)
    def test_a_result_for_each_request(self, returned: Any) -> None:
        with pytest.raises(PyTritonValidationError, match=r"expected a list with a result for each of 1 requests"):
            Harness(lambda requests: returned).infer(ONE)

    def test_lists_need_the_outputs(self) -> None:
        assert self.result([np.zeros((1, 1))])["y"].tolist() == [[0]]
        assert self.result((np.zeros((1, 1)),))["y"].tolist() == [[0]]
        with pytest.raises(PyTritonValidationError, match=r"names of the outputs of model 'model' are not known"):
            self.result([np.zeros((1, 1))], outputs=None)

    def test_names_by_place(self) -> None:
        tensor = Tensor((1,), np.float32)
        harness = Harness(lambda requests: [[one["INPUT_1"], one["b"]] for one in requests],
                          [tensor, Tensor((1,), np.float32, "b")], [tensor, tensor])  # fmt: skip
        assert list(harness.infer({"INPUT_1": [[1]], "b": [[2]]})) == ["OUTPUT_1", "OUTPUT_2"]

    def test_strings(self) -> None:
        outputs = [Tensor((1,), bytes, "y")]
        for array in (np.array([["ä"]]), np.array([["ä".encode()]]), np.array([["ä"]], object)):
            result = self.result({"y": array}, outputs=outputs, strict=True)["y"]
            assert result.dtype == object
            assert result.tolist() == [["ä".encode()]]
        assert self.result({"y": np.zeros((0, 1), object)}, outputs=outputs)["y"].shape == (0, 1)
        with pytest.raises(PyTritonValidationError, match="objects with a NoneType"):
            self.result({"y": np.array([[None]])}, outputs=outputs)

    def test_response_parameters(self, request_type: Any) -> None:
        result = self.result(request_type({"y": np.zeros((1, 1))}, {"said": "yes"}))
        assert (result.parameters, result["y"].tolist()) == ({"said": "yes"}, [[0]])
        # The request itself is an answer; its own parameters are not.
        assert Harness(identity).infer(make_request(ONE, {"scale": 1})).parameters == {}

    def test_an_error_of_one_request(self) -> None:
        error = KeyError("just this one")
        harness = Harness(lambda requests: [{"y": one["x"]} if one["x"].sum() else error for one in requests])
        bad = {"x": np.zeros((1, 2))}
        with pytest.raises(KeyError, match="just this one"):
            harness.infer(bad)
        with pytest.raises(KeyError, match="just this one"):
            harness.infer([ONE, bad])
        results = harness.infer([ONE, bad], return_exceptions=True)
        assert isinstance(results[0], Result)
        assert results[1] is error

    def test_an_error_of_the_callable(self) -> None:
        with pytest.raises(ZeroDivisionError):
            Harness(batch(lambda x: 1 // 0)).infer([ONE, ONE], return_exceptions=True)


async def coroutine(requests: Any) -> Any:
    await asyncio.sleep(0)
    return [{"y": one["x"]} for one in requests]


def generator(requests: Any) -> Iterator[Any]:
    for step in range(3):
        yield [{"y": one["x"] + step} if step <= one["x"][0, 0] else None for one in requests]


async def async_generator(requests: Any) -> AsyncIterator[Any]:
    for step in generator(requests):
        await asyncio.sleep(0)
        yield step


class TestKinds:
    def test_coroutines(self) -> None:
        assert Harness(coroutine).infer(ONE)["y"].tolist() == [[1, 2]]
        assert Harness(lambda requests: coroutine(requests)).infer([ONE])[0]["y"].tolist() == [[1, 2]]
        assert [result["y"].tolist() for result in Harness(coroutine).stream(ONE)] == [[[1, 2]]]

    @pytest.mark.parametrize("infer", [generator, async_generator])
    def test_streams(self, infer: Any) -> None:
        harness = Harness(infer, X, Y, ModelConfig(decoupled=True))
        two = {"x": np.array([[2, 2]], np.float32)}
        assert [result["y"][0, 0] for result in harness.stream(ONE)] == [1, 2]
        steps: list[Any] = list(harness.stream([ONE, two]))
        assert [[None if result is None else result["y"][0, 0] for result in step] for step in steps] == [
            [1, 2],
            [2, 3],
            [None, 4],
        ]

        async def main() -> None:
            assert [result["y"][0, 0] async for result in harness.stream_async(ONE)] == [1, 2]
            found: list[Any] = [step async for step in harness.stream_async([ONE, two])]
            assert len(found) == 3

        asyncio.run(main())

    @pytest.mark.parametrize("infer", [generator, async_generator, batch(lambda x: iter(()))])
    def test_a_generator_of_a_model_that_is_not_decoupled(self, infer: Any) -> None:
        with pytest.raises(
            PyTritonValidationError, match=r"yielded (more than once|nothing), expected one result.*`stream`"
        ):
            Harness(infer).infer(ONE)
        with pytest.raises(PyTritonValidationError, match=r"expected one result"):
            asyncio.run(Harness(infer).infer_async(ONE))

    @pytest.mark.parametrize("infer", [identity, coroutine, batch(lambda x: iter([{"y": x}]))])
    def test_within_a_running_loop(self, infer: Any) -> None:
        async def main() -> None:
            assert (await Harness(infer).infer_async(ONE)).keys() <= {"x", "y"}
            assert len(await Harness(infer).infer_async([ONE, ONE])) == 2
            assert len([result async for result in Harness(infer).stream_async(ONE)]) == 1

        asyncio.run(main())

    @pytest.mark.parametrize("infer", [coroutine, async_generator])
    def test_the_wrong_method_within_a_running_loop(self, infer: Any) -> None:
        async def main() -> None:
            with pytest.raises(PyTritonRuntimeError, match="`infer_async` or `stream_async`"):
                Harness(infer).infer(ONE)
            with pytest.raises(PyTritonRuntimeError, match="`infer_async` or `stream_async`"):
                next(Harness(infer).stream(ONE))

        asyncio.run(main())
        gc.collect()

    def test_endless_streams_run_only_as_far_as_they_are_asked(self) -> None:
        made: list[int] = []
        closed: list[bool] = []
        variable: ContextVar[int] = ContextVar("variable", default=0)

        async def endless(requests: Any) -> AsyncIterator[Any]:
            task = asyncio.current_task()
            try:
                while True:
                    assert asyncio.current_task() is task
                    variable.set(variable.get() + 1)
                    made.append(variable.get())
                    yield [{"y": one["x"]} for one in requests]
            finally:
                await asyncio.sleep(0)
                closed.append(True)

        steps: Any = Harness(endless).stream(ONE)
        for count in range(1, 4):
            next(steps)
            assert made == list(range(1, count + 1))
        steps.close()
        assert closed == [True]

        async def main() -> None:
            steps: Any = Harness(endless).stream_async(ONE)
            await anext(steps)
            await steps.aclose()

        asyncio.run(main())
        assert closed == [True, True]
        assert made == [1, 2, 3, 1]
        assert variable.get() == 0

    def test_errors_between_steps(self) -> None:
        async def failing(requests: Any) -> AsyncIterator[Any]:
            yield [{"y": one["x"]} for one in requests]
            raise ZeroDivisionError

        def failing_too(requests: Any) -> Iterator[Any]:
            yield [{"y": one["x"]} for one in requests]
            raise ZeroDivisionError

        for infer in (failing, failing_too):
            steps = Harness(infer).stream(ONE)
            next(steps)
            with pytest.raises(ZeroDivisionError):
                next(steps)

    def test_cancelling_the_test_cancels_the_callable(self) -> None:
        ended: list[str] = []
        started = asyncio.Event()

        async def wait(requests: Any) -> Any:
            started.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        async def main() -> None:
            task = asyncio.ensure_future(Harness(wait).infer_async(ONE))
            await asyncio.wait_for(started.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        assert ended == ["cancelled"]

    def test_nothing_is_left_running(self) -> None:
        before = threading.active_count()
        for infer in (coroutine, generator, async_generator):
            list(Harness(infer).stream(ONE))
        assert threading.active_count() == before


class TestModel:
    def test_the_model_is_known_during_the_call_and_not_after(self) -> None:
        @batch
        def infer(x: Any) -> Any:
            config = get_model_config(infer)
            assert (config.model_name, config.max_batch_size, config.decoupled) == ("mine", 9, False)
            assert [spec.name for spec in config.inputs or ()] == ["x", "text"]
            return [x]

        harness = Harness(infer, X, Y, ModelConfig(max_batch_size=9), model_name="mine")
        assert harness.infer(ONE)["y"].tolist() == [[1, 2]]
        assert harness.model_config.model_name == "mine"
        with pytest.raises(PyTritonValidationError, match="not bound"):
            get_model_config(infer)

    def test_other_models_of_the_server(self) -> None:
        @triton_context
        def infer(requests: Any, triton_context: TritonContext) -> Any:
            assert triton_context.model_configs[identity].model_name == "other"
            assert triton_context.model_configs[infer].model_name == "mine"
            return requests

        context = TritonContext()
        context.model_configs[identity] = TritonModelConfig("other")
        Harness(infer, model_name="mine", triton_context=context).infer(ONE)
        assert infer not in context.model_configs

    def test_a_callable_that_brings_its_own_context(self) -> None:
        infer: Any = batch(lambda x: [x])
        infer.__triton_context__ = TritonContext()
        infer.__triton_context__.model_configs[infer] = TritonModelConfig("own", outputs=[])
        with pytest.raises(PyTritonValidationError, match="model 'own' has 0 outputs"):
            Harness(infer).infer(ONE)
        assert Harness(infer, outputs=Y).infer(ONE)["y"].tolist() == [[1, 2]]
        assert get_triton_context(infer) is infer.__triton_context__

    def test_every_call_has_a_context_of_its_own(self) -> None:
        variable: ContextVar[int] = ContextVar("variable", default=0)

        def infer(requests: Any) -> Any:
            assert variable.get() == 0
            variable.set(1)
            return requests

        harness = Harness(infer)
        harness.infer(ONE)
        harness.infer(ONE)
        assert variable.get() == 0

    def test_wrong_arguments(self) -> None:
        wrong: Any = 3
        with pytest.raises(PyTritonBadParameterError, match="Harness expected a callable"):
            Harness(wrong)
        with pytest.raises(PyTritonBadParameterError, match="max_batch_size"):
            Harness(identity, config=ModelConfig(max_batch_size=0))
        with pytest.raises(PyTritonBadParameterError, match=r"Tensor objects as outputs, received 3"):
            Harness(identity, X, [wrong])


def test_it_is_loaded_only_when_it_is_imported() -> None:
    code = """
        import sys
        import pytriton.decorators
        assert "pytriton.decorators.testing" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
