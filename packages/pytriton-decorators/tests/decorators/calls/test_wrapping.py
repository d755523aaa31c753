"""Every kind of callable, each as ordinary, coroutine, generator and asynchronous generator function."""

import asyncio
import functools
import gc
import inspect
import pickle
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import batch, sample
from pytriton.decorators._calls.execution import EXHAUSTED, Plan
from pytriton.decorators._calls.wrapping import DecoratorTraits, decorator, undecorated
from pytriton.exceptions import PyTritonBadParameterError, PyTritonValidationError

KINDS = ["sync", "coroutine", "generator", "async generator"]


def make_functions(*leading: str) -> dict[str, Any]:
    """Functions of all kinds `(*leading, a, b)` that add."""
    head = "".join(f"{name}, " for name in leading)
    namespace: dict[str, Any] = {}
    exec(
        f"def sync({head}a, b):\n    return {{'total': a + b}}\n"
        f"async def coroutine({head}a, b):\n    return {{'total': a + b}}\n"
        f"def generator({head}a, b):\n    yield {{'total': a + b}}\n    yield {{'total': a - b}}\n"
        f"async def async_generator({head}a, b):\n    yield {{'total': a + b}}\n    yield {{'total': a - b}}\n",
        namespace,
    )
    return {kind: namespace[kind.replace(" ", "_")] for kind in KINDS}


def as_function(kind: str) -> Any:
    return batch(make_functions()[kind])


def as_method(kind: str) -> Any:
    return type("Model", (), {"infer": batch(make_functions("self")[kind])})().infer


def as_class_method_below(kind: str) -> Any:
    return type("Model", (), {"infer": batch(classmethod(make_functions("cls")[kind]))}).infer  # type: ignore[attr-defined]


def as_class_method_below_through_an_object(kind: str) -> Any:
    return type("Model", (), {"infer": batch(classmethod(make_functions("cls")[kind]))})().infer


def as_class_method_above(kind: str) -> Any:
    return type("Model", (), {"infer": classmethod(batch(make_functions("cls")[kind]))}).infer  # type: ignore[attr-defined, arg-type]


def as_static_method_below(kind: str) -> Any:
    return type("Model", (), {"infer": batch(staticmethod(make_functions()[kind]))})().infer


def as_static_method_above(kind: str) -> Any:
    return type("Model", (), {"infer": staticmethod(batch(make_functions()[kind]))}).infer  # type: ignore[attr-defined]


def as_bound_method_decorated_later(kind: str) -> Any:
    return batch(type("Model", (), {"infer": make_functions("self")[kind]})().infer)


def as_object(kind: str) -> Any:
    return batch(type("Model", (), {"__call__": make_functions("self")[kind]})())


def as_object_with_decorated_call(kind: str) -> Any:
    return type("Model", (), {"__call__": batch(make_functions("self")[kind])})().__call__


def as_partial(kind: str) -> Any:
    return batch(functools.partial(make_functions("unused")[kind], None))


def as_partial_of_decorated(kind: str) -> Any:
    return functools.partial(batch(make_functions()[kind]))


FORMS = [
    as_function,
    as_method,
    as_class_method_below,
    as_class_method_below_through_an_object,
    as_class_method_above,
    as_static_method_below,
    as_static_method_above,
    as_bound_method_decorated_later,
    as_object,
    as_object_with_decorated_call,
    as_partial,
    as_partial_of_decorated,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
class TestEveryCallable:
    def test_results(
        self, form: Any, kind: str, make_requests: Callable[..., Any], drain: Callable[[Any], list[Any]]
    ) -> None:
        for sizes in ((1, 2), (3,)):
            requests = make_requests(*sizes)
            steps = drain(form(kind)(requests))
            expected = [1, -1] if "generator" in kind else [1]
            assert len(steps) == len(expected)
            for results, sign in zip(steps, expected, strict=True):
                for request, result in zip(requests, results, strict=True):
                    np.testing.assert_array_equal(result["total"], request["a"] + sign * request["b"])

    def test_inspect_tells_the_kind(self, form: Any, kind: str) -> None:
        decorated = form(kind)
        assert inspect.iscoroutinefunction(decorated) == (kind == "coroutine")
        assert inspect.isgeneratorfunction(decorated) == (kind == "generator")
        assert inspect.isasyncgenfunction(decorated) == (kind == "async generator")

    def test_inspect_tells_the_signature(self, form: Any, kind: str) -> None:
        assert list(inspect.signature(form(kind)).parameters) == ["requests"]

    def test_what_is_returned_is_of_the_kind(
        self, form: Any, kind: str, make_requests: Callable[..., Any], drain: Callable[[Any], list[Any]]
    ) -> None:
        result = form(kind)(make_requests(1))
        assert inspect.iscoroutine(result) == (kind == "coroutine")
        assert isinstance(result, types.GeneratorType) == (kind == "generator")
        assert isinstance(result, types.AsyncGeneratorType) == (kind == "async generator")
        drain(result)

    def test_errors_of_the_callable_come_through(
        self, form: Any, kind: str, make_requests: Callable[..., Any], drain: Callable[[Any], list[Any]]
    ) -> None:
        requests = [{"a": np.array([[b"x"]], object), "b": np.array([[None]], object)}]
        with pytest.raises(TypeError, match=r"can't concat NoneType to bytes"):
            drain(form(kind)(requests))


class TestAppearance:
    def test_name_and_documentation_stay(self) -> None:
        @batch
        def infer(a: Any) -> Any:
            """Says what it does."""
            return {"a": a}

        assert infer.__name__ == "infer"  # type: ignore[attr-defined]
        assert infer.__doc__ == "Says what it does."

    def test_a_decorated_object_keeps_its_attributes(self) -> None:
        class Model:
            def __init__(self) -> None:
                self.weights = [1, 2]

            async def __call__(self, a: Any) -> Any:
                return {"a": a}

        model = Model()
        decorated: Any = batch(model)
        assert decorated.weights is model.weights
        decorated.weights = [3]
        assert model.weights == [3]
        assert isinstance(decorated, Model)
        assert undecorated(decorated) is model

    def test_the_signature_through_the_class_has_the_object(self) -> None:
        class Model:
            @batch
            def infer(self, a: Any) -> Any:
                return {"a": a}

        assert list(inspect.signature(Model.infer).parameters) == ["self", "requests"]
        assert list(inspect.signature(Model().infer.__func__).parameters) == ["self", "requests"]  # type: ignore[attr-defined]

    def test_the_function_of_a_bound_method_takes_the_object(self, make_requests: Callable[..., Any]) -> None:
        class Model:
            factor = 2

            @batch
            def infer(self, a: Any, b: Any) -> Any:
                return {"a": self.factor * a}

            @batch
            @classmethod
            def shared(cls, a: Any, b: Any) -> Any:
                return {"a": cls.factor * a}

        model: Any = Model()
        assert model.infer.__func__(model, make_requests(2))[0]["a"].tolist() == [[0], [2]]
        assert model.shared.__func__(Model, make_requests(2))[0]["a"].tolist() == [[0], [2]]

    def test_subclasses_can_call_the_decorated_method_of_their_base(self, make_requests: Callable[..., Any]) -> None:
        class Base:
            @batch
            def infer(self, a: Any, b: Any) -> Any:
                return {"a": a}

        class Derived(Base):
            def infer(self, requests: Any) -> Any:
                return super().infer(requests)

        assert len(Derived().infer(make_requests(1, 1))) == 2

    def test_only_callables_are_decorated(self) -> None:
        for decorate, name in ((batch, "batch"), (sample, "sample")):
            wrong: Any = {"a": 1}
            with pytest.raises(PyTritonBadParameterError, match=rf"@{name} decorates a callable"):
                decorate(wrong)

    def test_a_callable_written_in_c(self) -> None:
        decorated: Any = batch(dict)
        assert list(inspect.signature(decorated).parameters) == ["requests"]
        assert decorated([{"a": np.zeros((1, 1))}])[0].keys() == {"a"}

    def test_a_function_that_returns_a_coroutine(self, make_requests: Callable[..., Any]) -> None:
        async def work(a: Any) -> Any:
            return {"a": a}

        results: Any = batch(lambda a, b: work(a))(make_requests(1, 1))
        assert len(asyncio.run(results)) == 2


@batch
def module_level(a: Any, b: Any) -> Any:
    return {"total": a + b}


class ModuleLevel:
    @batch
    def infer(self, a: Any, b: Any) -> Any:
        return {"total": a + b}

    @batch
    @staticmethod
    def plain(a: Any, b: Any) -> Any:
        return {"total": a + b}


class ModuleLevelObject:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    async def __call__(self, a: Any, b: Any) -> Any:
        return {"total": a + self.offset}


class TestPickling:
    @pytest.fixture(autouse=True)
    def importable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # pytest's importlib mode may leave a test module out of sys.modules; pickle looks functions up there.
        module = types.ModuleType(__name__)
        vars(module).update(globals())
        monkeypatch.setitem(__import__("sys").modules, __name__, module)

    def test_functions_go_by_name(self) -> None:
        assert pickle.loads(pickle.dumps(module_level)) is module_level

    def test_methods_go_by_object_and_name(self, make_requests: Callable[..., Any]) -> None:
        for method in (ModuleLevel().infer, ModuleLevel.infer, ModuleLevel().plain):
            assert pickle.loads(pickle.dumps(method)).__qualname__ == method.__qualname__  # type: ignore[attr-defined]
        assert len(pickle.loads(pickle.dumps(ModuleLevel().infer))(make_requests(1, 1))) == 2

    def test_an_object_goes_with_what_it_holds(self, make_requests: Callable[..., Any]) -> None:
        loaded = pickle.loads(pickle.dumps(batch(ModuleLevelObject(3))))
        assert inspect.iscoroutinefunction(loaded)
        requests = make_requests(1, 1)
        results = asyncio.run(loaded(requests))
        assert [one["total"].tolist() for one in results] == [(one["a"] + 3).tolist() for one in requests]

    def test_what_is_below_has_to_be_found(self) -> None:
        with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
            pickle.dumps(batch(lambda a: {"a": a}))


def each_request_alone(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Plan:
    (requests,) = args
    return Plan(
        [(([request],), {}, None) for request in requests],
        lambda results: [row for part in results for row in ([None] if part is EXHAUSTED else part)],
    )


def one_by_one(func: Any) -> Any:
    return decorator(each_request_alone, DecoratorTraits("one_by_one", redecorate=one_by_one))(func)


class TestSeveralCalls:
    """A decorator that calls the callable below several times, as those that group requests do."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_results_are_put_together(
        self, kind: str, make_requests: Callable[..., Any], drain: Callable[[Any], list[Any]]
    ) -> None:
        decorated = one_by_one(as_function(kind))
        steps = drain(decorated(make_requests(1, 2)))
        assert [result["total"].ravel().tolist() for result in steps[0]] == [[0], [101, 202]]
        assert len(steps) == (2 if "generator" in kind else 1)
        assert inspect.iscoroutinefunction(decorated) == (kind == "coroutine")
        assert list(inspect.signature(decorated).parameters) == ["requests"]

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_generators_that_end_at_different_steps(
        self, asynchronous: bool, make_requests: Callable[..., Any], drain: Callable[[Any], list[Any]]
    ) -> None:
        closed = []

        def steps(requests: Any) -> Iterator[Any]:
            try:
                for _ in range(len(requests[0]["a"])):
                    yield [{}]
            finally:
                closed.append(True)

        async def async_steps(requests: Any) -> AsyncIterator[Any]:
            for step in steps(requests):
                yield step

        func = async_steps if asynchronous else steps
        assert drain(one_by_one(func)(make_requests(1, 3))) == [[{}, {}], [None, {}], [None, {}]]
        gc.collect()
        assert len(closed) == 2

    def test_a_failing_coroutine_closes_the_others(self, make_requests: Callable[..., Any]) -> None:
        async def fail(requests: Any) -> Any:
            raise ZeroDivisionError

        # A coroutine that is dropped unawaited warns, and warnings are errors here.
        with pytest.raises(ZeroDivisionError):
            asyncio.run(one_by_one(fail)(make_requests(1, 1, 1)))
        gc.collect()

    def test_a_call_that_is_refused_leaves_no_coroutine_behind(self, make_requests: Callable[..., Any]) -> None:
        @batch
        async def infer(a: Any, b: Any) -> Any:
            return {"a": a}

        with pytest.raises(PyTritonValidationError, match="Input 'a'"):
            asyncio.run(one_by_one(infer)([*make_requests(1), {"a": 1, "b": 2}]))
        gc.collect()

    def test_awaitables_of_ordinary_functions_are_closed_as_well(self, make_requests: Callable[..., Any]) -> None:
        async def work(fails: bool) -> Any:
            if fails:
                raise ZeroDivisionError
            return [{}]

        def late(requests: Any) -> Any:
            return work(fails=True)

        def early(requests: Any) -> Any:
            if len(requests[0]["a"]) > 1:
                raise ZeroDivisionError
            return work(fails=False)

        with pytest.raises(ZeroDivisionError):
            asyncio.run(one_by_one(late)(make_requests(1, 1, 1)))
        with pytest.raises(ZeroDivisionError):
            one_by_one(early)(make_requests(1, 1, 2))
        gc.collect()


class TestSteps:
    def test_closing_the_generator_closes_the_one_below(self, make_requests: Callable[..., Any]) -> None:
        below = ({"a": np.ones((1, 1))} for _ in range(3))
        steps: Any = batch(lambda a, b: below)(make_requests(1))
        assert len(next(steps)) == 1
        steps.close()
        assert inspect.getgeneratorstate(below) == inspect.GEN_CLOSED

    def test_closing_the_asynchronous_generator_closes_the_one_below(self, make_requests: Callable[..., Any]) -> None:
        closed = []

        async def forever() -> AsyncIterator[Any]:
            try:
                while True:
                    yield {"a": np.ones((1, 1))}
            finally:
                closed.append(True)

        async def main() -> None:
            below = forever()
            steps: Any = batch(lambda a, b: below)(make_requests(1))
            await steps.__anext__()
            await steps.aclose()
            assert closed == [True]

        asyncio.run(main())

    def test_a_bad_request_is_refused_by_the_call_of_a_generator_and_the_await_of_a_coroutine(self) -> None:
        with pytest.raises(PyTritonValidationError):
            as_function("generator")([])
        coroutine = as_function("coroutine")([])
        with pytest.raises(PyTritonValidationError):
            asyncio.run(coroutine)

    def test_a_wrong_step_raises_there(self, make_requests: Callable[..., Any]) -> None:
        @batch
        def infer(a: Any, b: Any) -> Iterator[Any]:
            yield {"a": a}
            yield {"a": a[:1]}

        steps = infer(make_requests(1, 1))
        assert len(next(steps)) == 2
        with pytest.raises(ValueError, match="Expected batch size: 2"):
            next(steps)
