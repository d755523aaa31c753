import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import TritonContext, batch, get_requests, get_row_requests, sample
from pytriton.exceptions import PyTritonRuntimeError


def test_parameters_reach_a_callable_under_batch(request_type: Any) -> None:
    @batch
    def infer(a: Any) -> Any:
        scale = np.array([[request.parameters["scale"]] for request in get_requests()])
        return {"scaled": a * scale}

    requests = [request_type({"a": np.ones((1, 1))}, {"scale": scale}) for scale in (2, 3)]
    assert [result["scaled"].item() for result in infer(requests)] == [2, 3]


def test_the_context_gives_the_same_requests() -> None:
    @sample
    def infer(a: Any) -> Any:
        assert TritonContext().requests is get_requests()
        return {"found": get_requests()[0]["a"]}

    assert infer([{"a": np.ones(2)}])[0]["found"].shape == (2,)


def test_there_are_none_outside(make_requests: Callable[..., Any]) -> None:
    batch(lambda a, b: {"a": a})(make_requests(1))
    with pytest.raises(PyTritonRuntimeError, match=r"no current requests.*@batch"):
        get_requests()


def test_they_are_gone_after_an_error(make_requests: Callable[..., Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        batch(lambda a, b: 1 // 0)(make_requests(1))
    with pytest.raises(PyTritonRuntimeError):
        get_requests()


def test_a_call_within_a_call_sees_its_own(make_requests: Callable[..., Any]) -> None:
    counts = []

    @batch
    def inner(a: Any, b: Any) -> Any:
        counts.append(len(get_requests()))
        return {"a": a}

    @batch
    def outer(a: Any, b: Any) -> Any:
        inner(make_requests(1, 1, 1))
        counts.append(len(get_requests()))
        return {"a": a}

    outer(make_requests(1, 1))
    assert counts == [3, 2]


def test_a_generator_has_them_in_its_steps_and_its_caller_between_them_has_not(
    make_requests: Callable[..., Any],
) -> None:
    @batch
    def infer(a: Any, b: Any) -> Iterator[Any]:
        for _ in range(2):
            yield {"count": a * 0 + len(get_requests())}

    steps = infer(make_requests(1, 1))
    for _ in range(2):
        assert [result["count"].item() for result in next(steps)] == [2, 2]
        with pytest.raises(PyTritonRuntimeError):
            get_requests()


def test_interleaved_tasks_have_each_their_own(make_requests: Callable[..., Any]) -> None:
    @batch
    async def infer(a: Any, b: Any) -> Any:
        await asyncio.sleep(0)
        return {"count": a * 0 + len(get_requests())}

    @batch
    async def stream(a: Any, b: Any) -> AsyncIterator[Any]:
        for _ in range(2):
            await asyncio.sleep(0)
            yield {"count": a * 0 + len(get_requests())}

    async def count_stream(size: int) -> list[int]:
        counts = []
        async for results in stream(make_requests(*[1] * size)):
            counts.append(int(results[0]["count"].item()))
            with pytest.raises(PyTritonRuntimeError):
                get_requests()
        return counts

    async def main() -> None:
        results = await asyncio.gather(*[infer(make_requests(*[1] * size)) for size in (1, 2, 3)])
        assert [int(result[0]["count"].item()) for result in results] == [1, 2, 3]
        assert list(await asyncio.gather(count_stream(2), count_stream(3))) == [[2, 2], [3, 3]]

    asyncio.run(main())


def test_the_request_of_every_row(request_type: Any) -> None:
    @batch
    def infer(a: Any) -> Any:
        scale = np.array([[request.parameters["scale"]] for request in get_row_requests()])
        assert TritonContext().row_requests == get_row_requests()
        return {"scaled": a * scale}

    requests = [request_type({"a": np.ones((rows, 1))}, {"scale": scale}) for rows, scale in ((2, 5), (0, 6), (1, 7))]
    assert [result["scaled"].ravel().tolist() for result in infer(requests)] == [[5, 5], [], [7]]


def test_the_request_of_every_row_without_inputs_and_without_batching(request_type: Any) -> None:
    @batch
    def tick() -> Any:
        return {"tick": np.array([[request.parameters["n"]] for request in get_row_requests()])}

    assert [result["tick"].item() for result in tick([request_type({}, {"n": n}) for n in (1, 2)])] == [1, 2]

    @sample
    def infer(a: Any) -> Any:
        return {"a": a * len(get_row_requests())}

    assert infer([{"a": np.ones(3)}])[0]["a"].tolist() == [1, 1, 1]


def test_they_are_made_once_however_often_and_wherever_they_are_asked_for() -> None:
    made: list[Any] = []
    contexts: list[Any] = []

    def requests() -> Any:
        made.append([{}, {}])
        return made[-1]

    @batch
    def infer(a: Any) -> Any:
        contexts.append(copy_context())
        assert contexts[0].run(get_requests) is get_requests() is made[0]
        assert copy_context().run(get_row_requests) == made[0]
        return {"a": a}

    infer.__pytriton_whole__({"a": np.zeros((2, 1))}, [1, 1], requests)  # type: ignore[attr-defined] # not for users
    assert len(made) == 1


class Pause:
    """Suspends the coroutine that awaits it, for good."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def test_a_coroutine_that_nobody_finishes_is_closed_in_any_context(make_requests: Callable[..., Any]) -> None:
    @batch
    async def infer(a: Any, b: Any) -> Any:
        await Pause()

    coroutine: Any = infer(make_requests(1))
    copy_context().run(coroutine.send, None)
    # As the garbage collector does.
    coroutine.close()
    with pytest.raises(PyTritonRuntimeError):
        get_requests()


def test_a_copied_context_carries_them(make_requests: Callable[..., Any]) -> None:
    kept = []

    @batch
    def infer(a: Any, b: Any) -> Any:
        kept.append(copy_context())
        return {"a": a}

    infer(make_requests(1, 1))
    assert len(kept[0].run(get_requests)) == 2
