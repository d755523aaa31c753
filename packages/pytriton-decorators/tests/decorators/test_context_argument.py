import asyncio
import inspect
from collections.abc import AsyncIterator
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import TritonContext, batch, group_by_keys, group_by_values, sample, triton_context
from pytriton.decorators.serving import set_served_model
from pytriton.exceptions import PyTritonBadParameterError, PyTritonRuntimeError, PyTritonValidationError
from pytriton.model_config.triton_model_config import TritonModelConfig


def served(infer: Any, *args: Any) -> Any:
    context = copy_context()
    context.run(set_served_model, infer, TritonModelConfig("mine"))
    return context.run(infer, *args)


@batch
@triton_context
def below(x: Any, triton_context: TritonContext) -> Any:
    assert triton_context.model_configs[below].model_name == "mine"
    return {"y": x + len(triton_context.requests)}


@triton_context
@batch
def above(x: Any, triton_context: TritonContext) -> Any:
    assert triton_context.model_configs[above].model_name == "mine"
    return {"y": x + len(triton_context.requests)}


@triton_context
def alone(requests: Any, triton_context: TritonContext) -> Any:
    assert triton_context.model_configs[alone].model_name == "mine"
    assert [one["x"].shape for one in triton_context.row_requests] == [(1, 1), (2, 1), (2, 1)]
    return [{"y": one["x"] + len(triton_context.requests)} for one in requests]


@triton_context
@group_by_keys
@batch
@group_by_values("x")
def at_the_top(x: Any, triton_context: TritonContext) -> Any:
    assert len(triton_context.row_requests) == len(x)
    return {"y": x + 2}


@pytest.mark.parametrize("infer", [below, above, alone, at_the_top], ids=["below", "above", "alone", "at the top"])
def test_anywhere_among_the_decorators(infer: Any) -> None:
    results = served(infer, [{"x": np.zeros((1, 1))}, {"x": np.ones((2, 1))}])
    assert [result["y"].ravel().tolist() for result in results] == [[2], [3, 3]]
    with pytest.raises(PyTritonValidationError, match=r"not bound.*Triton\.bind"):
        infer([{"x": np.zeros((1, 1))}])


def test_parameters_of_requests(request_type: Any) -> None:
    @sample
    @triton_context
    def infer(x: Any, triton_context: TritonContext) -> Any:
        (request,) = triton_context.requests
        assert triton_context.row_requests == [request]
        return {"y": x * request.parameters["scale"]}

    assert served(infer, [request_type({"x": np.array(3)}, {"scale": 2})])[0]["y"] == 6


def test_coroutines_generators_and_methods(request_type: Any) -> None:
    class Model:
        @triton_context
        @batch
        async def infer(self, x: Any, triton_context: TritonContext) -> Any:
            await asyncio.sleep(0)
            assert triton_context.model_configs[self.infer].model_name == "mine"
            return {"y": x + len(triton_context.requests)}

        @batch
        @triton_context
        async def stream(self, x: Any, triton_context: TritonContext) -> AsyncIterator[Any]:
            yield {"y": x + len(triton_context.requests)}

        @batch
        @triton_context
        @classmethod
        def shared(cls, x: Any, triton_context: TritonContext) -> Any:
            return {"y": x + len(triton_context.requests)}

    model: Any = Model()
    requests = [request_type({"x": np.zeros((1, 1))})]

    async def run(requests: Any) -> Any:
        set_served_model(model.infer, TritonModelConfig("mine"))
        assert (await model.infer(requests))[0]["y"].item() == 1
        return [step async for step in model.stream(requests)]

    assert asyncio.run(run(requests))[0][0]["y"].item() == 1
    assert served(model.shared, requests)[0]["y"].item() == 1
    assert served(Model.shared, requests)[0]["y"].item() == 1


def test_a_server_that_has_the_batch_in_one_piece() -> None:
    context = copy_context()
    context.run(set_served_model, above, TritonModelConfig("mine"))
    whole: Any = above
    outputs = context.run(whole.__pytriton_whole__, {"x": np.zeros((3, 1))}, [1, 2], lambda: [{}, {}])
    assert outputs["y"].ravel().tolist() == [2, 2, 2]
    assert whole.__pytriton_whole__.func is not None
    alone_too: Any = alone
    assert alone_too.__pytriton_whole__ is None


def test_the_attribute_of_a_unit_test_is_found() -> None:
    @triton_context
    def infer(requests: Any, triton_context: Any) -> Any:
        return triton_context

    decorated: Any = infer
    decorated.__triton_context__ = context = TritonContext()
    assert decorated([{}]) is context


def test_the_argument_is_not_in_the_signature() -> None:
    assert list(inspect.signature(alone).parameters) == ["requests"]
    assert list(inspect.signature(above).parameters) == ["requests"]

    class Model:
        @triton_context
        def infer(self, requests: Any, triton_context: Any) -> Any: ...

    assert list(inspect.signature(Model.infer).parameters) == ["self", "requests"]
    assert list(inspect.signature(Model().infer).parameters) == ["requests"]


def test_only_callables_are_decorated() -> None:
    wrong: Any = 3
    with pytest.raises(PyTritonBadParameterError, match="@triton_context decorates a callable"):
        triton_context(wrong)


def test_requests_outside_of_a_call() -> None:
    with pytest.raises(PyTritonRuntimeError, match="no current requests"):
        _ = TritonContext().requests
    with pytest.raises(PyTritonRuntimeError, match="no current requests"):
        _ = TritonContext().row_requests
