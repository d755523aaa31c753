"""What a type checker sees of decorated callables; checked by mypy with the rest of the tests, never run."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators import (
    ConstantPadder,
    InferCallable,
    InferenceRequests,
    InferenceResults,
    ModelSignature,
    Shape,
    TritonContext,
    batch,
    fill_optionals,
    first_value,
    get_model_signature,
    get_requests,
    get_row_requests,
    group_by_keys,
    group_by_values,
    model,
    pad_batch,
    sample,
    triton_context,
)
from pytriton.decorators.testing import Harness, HarnessRequest, Result, make_request

if TYPE_CHECKING:
    from typing_extensions import assert_type

    Array = NDArray[np.float32]
    requests: InferenceRequests = [{"a": np.zeros((1, 1), np.float32)}]

    @batch
    def plain(a: Array) -> dict[str, Array]:
        return {"a": a}

    @batch
    async def coroutine(a: Array) -> list[Array]:
        return [a]

    @sample
    def generator(a: Array) -> Iterator[dict[str, Array]]:
        yield {"a": a}

    @batch
    async def async_generator(a: Array) -> AsyncIterator[dict[str, Array]]:
        yield {"a": a}

    class Model:
        @batch
        def infer(self, a: Array) -> dict[str, Array]:
            return {"a": a}

        @batch
        async def ainfer(self, a: Array) -> dict[str, Array]:
            return {"a": a}

        @batch
        @classmethod
        def shared(cls, a: Array) -> dict[str, Array]:
            return {"a": a}

        @staticmethod
        @batch
        def plain(a: Array) -> dict[str, Array]:
            return {"a": a}

    assert_type(plain, InferCallable[InferenceResults])
    assert_type(plain(requests), InferenceResults)
    assert_type(generator(requests), Iterator[InferenceResults])
    assert_type(async_generator(requests), AsyncIterator[InferenceResults])
    assert_type(Model().infer(requests), InferenceResults)
    assert_type(Model.shared(requests), InferenceResults)
    assert_type(Model.plain(requests), InferenceResults)
    assert_type(batch(lambda a: {"a": a})(requests), InferenceResults)
    assert_type(coroutine, InferCallable[Coroutine[Any, Any, InferenceResults]])

    async def awaiting() -> None:
        assert_type(await coroutine(requests), InferenceResults)
        assert_type(await Model().ainfer(requests), InferenceResults)

    callables: list[Callable[..., Any]] = [plain, coroutine, generator, async_generator, Model().infer, Model.shared]

    # Decorators that take what the callable below takes do not change its type.
    @fill_optionals(t=np.ones(1, np.float32))
    @group_by_keys
    @batch
    @pad_batch
    @group_by_values("t", pad_fn=ConstantPadder(0))
    @first_value("t")
    def stacked(a: Array, t: np.float32) -> dict[str, Array]:
        return {"a": a * t}

    @group_by_keys
    @batch
    @pad_batch(trim=False)
    async def stacked_async(a: Array) -> AsyncIterator[dict[str, Array]]:
        yield {"a": a}

    @triton_context
    def with_context(requests: InferenceRequests, triton_context: TritonContext) -> InferenceResults:
        assert_type(len(triton_context.row_requests), int)
        return [{"a": request["a"]} for request in requests]

    @group_by_values("t")
    def arrays(a: Array, t: Array) -> dict[str, Array]:
        return {"a": a * t}

    class Stacked:
        @fill_optionals(t=np.ones(1, np.float32))
        @batch
        @triton_context
        def infer(self, a: Array, t: Array, triton_context: TritonContext) -> dict[str, Array]:
            return {"a": a * t}

        @batch
        @triton_context
        @classmethod
        def shared(cls, a: Array, triton_context: TritonContext) -> dict[str, Array]:
            return {"a": a}

    assert_type(stacked, InferCallable[InferenceResults])
    assert_type(stacked(requests), InferenceResults)
    assert_type(stacked_async(requests), AsyncIterator[InferenceResults])
    assert_type(with_context(requests), InferenceResults)
    assert_type(arrays(a=np.zeros((1, 1), np.float32), t=np.zeros((1, 1), np.float32)), dict[str, Array])
    assert_type(Stacked().infer(requests), InferenceResults)
    assert_type(Stacked.shared(requests), InferenceResults)
    assert_type(get_row_requests(), list[Any])
    assert_type(len(get_requests()), int)

    harness = Harness(stacked)
    request = make_request({"a": [[1]]}, {"scale": 2})
    assert_type(request, HarnessRequest)
    assert_type(harness.infer(request), Result)
    assert_type(harness.infer({"a": np.zeros((1, 1))}), Result)
    assert_type(harness.infer([request, {"a": np.zeros((1, 1))}]), list[Result])
    assert_type(harness.infer([request], return_exceptions=True), list[Result | BaseException])
    assert_type(harness.stream(request), Iterator[Result])
    assert_type(harness.stream([request]), Iterator[list[Result | BaseException | None]])

    async def awaiting_harness() -> None:
        assert_type(await harness.infer_async(request), Result)
        assert_type(await harness.infer_async([request]), list[Result])
        assert_type(harness.stream_async(request), AsyncIterator[Result])

    # A model of its type hints is the function or class that it was.
    Vector = Annotated[Array, Shape(-1)]

    @model
    def shout(text: str, times: int = 1) -> str:
        return text.upper() * times

    @model(name="softmax", max_batch_size=64, execution_timeout_s=1.0)
    def softmax(logits: Vector) -> Vector:
        return logits

    @model(batched=True)
    async def tokens(texts: list[str]) -> AsyncIterator[list[str]]:
        yield texts

    @model
    class Sentiment:
        def __init__(self, weights: str) -> None: ...

        def __call__(self, text: str) -> float:
            return float(len(text))

    assert_type(shout("a"), str)
    assert_type(softmax(np.zeros(1, np.float32)), Array)
    assert_type(tokens(["a"]), AsyncIterator[list[str]])
    assert_type(Sentiment("path")("text"), float)
    assert_type(get_model_signature(shout), ModelSignature)
    shout(1)  # type: ignore[arg-type]
    Sentiment()  # type: ignore[call-arg]
    model(max_batch_size="4")  # type: ignore[call-overload]
    model(no_such_option=4)  # type: ignore[call-overload]
    assert_type(Harness(Sentiment("path")).infer({"text": ["a"]}), Result)
