"""What a type checker sees of decorated callables; checked by mypy with the rest of the tests, never run."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators import InferCallable, InferenceRequests, InferenceResults, batch, sample

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
