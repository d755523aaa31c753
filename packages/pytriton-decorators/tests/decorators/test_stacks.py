"""Stacks of decorators, in every order that makes sense, on every form and kind of callable."""

import copy
import functools
import inspect
import pickle
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import (
    batch,
    fill_optionals,
    first_value,
    get_row_requests,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
    triton_context,
)
from pytriton.decorators.testing import Harness, make_request
from pytriton.exceptions import PyTritonRuntimeError, PyTritonValidationError
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

INPUTS = [
    Tensor((2,), np.float32, "x"),
    Tensor((1,), np.float32, "t", optional=True),
    Tensor((1,), np.int64, "extra", optional=True),
]
OUTPUTS = [Tensor((2,), np.float32, "y"), Tensor((1,), np.int64, "rows")]
CONFIG = ModelConfig(max_batch_size=8, batcher=DynamicBatcher(preferred_batch_size=[4]))
DECOUPLED = ModelConfig(max_batch_size=8, batcher=DynamicBatcher(preferred_batch_size=[4]), decoupled=True)

DEFAULT = np.array([5], np.float32)
FILL = fill_optionals(t=DEFAULT)
BY_VALUE = group_by_values("t")
FIRST = first_value("t")


def stacked(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator of several, the first of them outermost."""
    return lambda func: functools.reduce(lambda below, decorate: decorate(below), reversed(decorators), func)


STACKS: dict[str, Callable[[Any], Any]] = {
    "fill, batch": stacked(FILL, batch),
    "fill, batch, context": stacked(FILL, batch, triton_context),
    "context, fill, batch": stacked(triton_context, FILL, batch),
    "fill, context, batch": stacked(FILL, triton_context, batch),
    "keys, fill, batch": stacked(group_by_keys, FILL, batch),
    "fill, keys, batch": stacked(FILL, group_by_keys, batch),
    "keys, batch": stacked(group_by_keys, batch),
    "keys, context, batch": stacked(group_by_keys, triton_context, batch),
    "keys, batch, values": stacked(group_by_keys, batch, BY_VALUE),
    "fill, batch, values, first": stacked(FILL, batch, BY_VALUE, FIRST),
    "fill, batch, values, pad": stacked(FILL, batch, BY_VALUE, pad_batch),
    "fill, batch, pad, values": stacked(FILL, batch, pad_batch, BY_VALUE),
    "fill, batch, pad": stacked(FILL, batch, pad_batch),
    "keys, batch, pad": stacked(group_by_keys, batch, pad_batch),
    "fill, batch, values, first, pad": stacked(FILL, batch, BY_VALUE, FIRST, pad_batch),
    "keys, batch, values, pad, first": stacked(group_by_keys, batch, BY_VALUE, pad_batch, FIRST),
    "everything": stacked(triton_context, group_by_keys, FILL, batch, BY_VALUE, triton_context, FIRST, pad_batch),
}
KINDS = ["sync", "coroutine", "generator", "async generator"]


def work(x: Any, t: Any = DEFAULT[0], extra: Any = None, triton_context: Any = None) -> dict[str, Any]:
    """Row by row, so that grouping and padding cannot be seen in the result, the number of rows apart."""
    requests = get_row_requests()
    assert len(requests) == len(x)
    if triton_context is not None:
        assert triton_context.row_requests == requests
    scale = np.array([[one.parameters.get("scale", 1)] for one in requests], np.float32)
    return {"y": (x + t) * scale, "rows": np.full((len(x), 1), len(x))}


def functions(leading: str = "") -> dict[str, Any]:
    namespace: dict[str, Any] = {"work": work}
    exec(
        f"def sync({leading}**inputs):\n    return work(**inputs)\n"
        f"async def coroutine({leading}**inputs):\n    return work(**inputs)\n"
        f"def generator({leading}**inputs):\n    yield work(**inputs)\n    yield work(**inputs)\n"
        f"async def async_generator({leading}**inputs):\n    yield work(**inputs)\n    yield work(**inputs)\n",
        namespace,
    )
    return {kind: namespace[kind.replace(" ", "_")] for kind in KINDS}


def made(**members: Any) -> Any:
    return type("Model", (), members)


FORMS: dict[str, Callable[[str, Any], Any]] = {
    "function": lambda kind, decorate: decorate(functions()[kind]),
    "method": lambda kind, decorate: made(infer=decorate(functions("self, ")[kind]))().infer,
    "class method below": lambda kind, decorate: made(infer=decorate(classmethod(functions("cls, ")[kind])))().infer,
    "class method above": lambda kind, decorate: made(infer=classmethod(decorate(functions("cls, ")[kind]))).infer,
    "static method below": lambda kind, decorate: made(infer=decorate(staticmethod(functions()[kind])))().infer,
    "static method above": lambda kind, decorate: made(infer=staticmethod(decorate(functions()[kind]))).infer,
    "object": lambda kind, decorate: decorate(made(__call__=functions("self, ")[kind])()),
    "object with a decorated call": lambda kind, decorate: made(__call__=decorate(functions("self, ")[kind]))(),
    "partial": lambda kind, decorate: decorate(functools.partial(functions("unused, ")[kind], None)),
    "partial of the decorated": lambda kind, decorate: functools.partial(decorate(functions()[kind])),
}


def requests() -> list[Any]:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    return [
        make_request({"x": x[:1]}, {"scale": 2}),
        make_request({"x": x[1:3], "t": np.array([[1], [1]], np.float32)}, {"scale": 3}),
        make_request({"x": x[3:4], "extra": [[7]]}),
        make_request({"x": x[4:6], "t": np.array([[1], [1]], np.float32)}, {"scale": 10}),
    ]


def expected(given: list[Any]) -> list[list[list[float]]]:
    return [((one["x"] + one.data.get("t", DEFAULT)) * one.parameters.get("scale", 1)).tolist() for one in given]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STACKS)
class TestStacks:
    @pytest.mark.parametrize("form", ["function", "method", "object"])
    def test_every_request_gets_what_it_would_get_alone(self, name: str, kind: str, form: str) -> None:
        given = requests()
        if "keys" not in name and name != "everything":
            # Only groups take requests with different inputs together; the default is filled in.
            given = [one for one in given if "extra" not in one]
        infer = FORMS[form](kind, STACKS[name])
        harness = Harness(infer, INPUTS, OUTPUTS, DECOUPLED if "generator" in kind else CONFIG, strict=True)
        steps = list(harness.stream(given))
        assert len(steps) == (2 if "generator" in kind else 1)
        for step in steps:
            results: list[Any] = step
            assert [result["y"].tolist() for result in results] == expected(given)
            if "pad" in name and "pad, values" not in name:
                assert {size for result in results for size in result["rows"].ravel()} <= {4, 8}

    def test_inspect_sees_through(self, name: str, kind: str) -> None:
        infer = STACKS[name](functions()[kind])
        assert list(inspect.signature(infer).parameters) == ["requests"]
        assert inspect.iscoroutinefunction(infer) == (kind == "coroutine")
        assert inspect.isgeneratorfunction(infer) == (kind == "generator")
        assert inspect.isasyncgenfunction(infer) == (kind == "async generator")
        assert infer.__name__ == kind.replace(" ", "_")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["everything", "keys, batch, values, pad, first"])
def test_every_form_of_callable(name: str, form: str, kind: str) -> None:
    given = requests()
    infer = FORMS[form](kind, STACKS[name])
    harness = Harness(infer, INPUTS, OUTPUTS, DECOUPLED if "generator" in kind else CONFIG)
    for step in harness.stream(given):
        results: list[Any] = step
        assert [result["y"].tolist() for result in results] == expected(given)


class TestSample:
    CONFIG = ModelConfig(batching=False)

    def infer(self, decorate: Any, func: Any, *given: Any) -> Any:
        harness = Harness(decorate(func), INPUTS, [Tensor((2,), np.float32, "y")], self.CONFIG)
        return [result["y"].tolist() for result in harness.infer(list(given))]

    def test_in_every_order(self) -> None:
        given = [{"x": np.ones(2, np.float32)}, {"x": np.ones(2, np.float32), "t": np.zeros(1, np.float32)}]
        for decorate in (
            stacked(FILL, sample),
            stacked(triton_context, FILL, sample),
            stacked(group_by_keys, FILL, sample, triton_context),
            stacked(sample, FILL, triton_context),
        ):
            assert self.infer(decorate, lambda x, t, triton_context=None: [x + t], *given) == [[6, 6], [1, 1]]

    def test_decorators_for_batches_say_no(self) -> None:
        for decorate in (stacked(sample, first_value("x")), stacked(sample, pad_batch)):
            with pytest.raises(PyTritonRuntimeError, match=r"batching=False"):
                self.infer(decorate, lambda x: [x], {"x": np.ones(2, np.float32)})


class TestWrongOrders:
    @pytest.mark.parametrize("decorate", [BY_VALUE, pad_batch], ids=["group_by_values", "pad_batch"])
    def test_arrays_above_requests(self, decorate: Any) -> None:
        with pytest.raises(PyTritonRuntimeError, match=r"Place @\w+ below @batch"):
            Harness(decorate(batch(lambda x: {"y": x})), INPUTS).infer({"x": [[1, 2]]})

    def test_requests_below_arrays(self) -> None:
        for decorate in (group_by_keys, batch, sample):
            with pytest.raises(PyTritonValidationError, match=r"goes above those that take arrays"):
                Harness(batch(decorate(lambda x: {"y": x})), INPUTS).infer({"x": [[1, 2]]})


# --- copying and pickling --------------------------------------------------------------------------------------------


@STACKS["everything"]
def everything(**inputs: Any) -> Any:
    return work(**inputs)


@STACKS["everything"]
async def everything_async(**inputs: Any) -> AsyncIterator[Any]:
    yield work(**inputs)


class Owner:
    def __init__(self, offset: float) -> None:
        self.offset = offset

    @batch
    @group_by_values("t")
    @first_value("t")
    def infer(self, x: Any, t: Any) -> Any:
        return {"y": x + t + self.offset}

    def plain(self, **inputs: Any) -> Any:
        return work(**inputs)

    @FILL
    @batch
    def stream(self, x: Any, t: Any) -> Iterator[Any]:
        yield {"y": x + t + self.offset}


class TestPickling:
    @pytest.fixture(autouse=True)
    def importable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # pytest's importlib mode may leave a test module out of sys.modules; pickle looks functions up there.
        module = types.ModuleType(__name__)
        vars(module).update(globals())
        monkeypatch.setitem(__import__("sys").modules, __name__, module)

    def test_functions(self) -> None:
        for func in (everything, everything_async):
            assert pickle.loads(pickle.dumps(func)) is func

    def test_owners_and_their_methods(self) -> None:
        owner = pickle.loads(pickle.dumps(Owner(3)))
        one = {"x": np.zeros((1, 2)), "t": np.ones((1, 1))}
        assert owner.infer([one])[0]["y"].tolist() == [[4, 4]]
        assert pickle.loads(pickle.dumps(owner.infer))([one])[0]["y"].tolist() == [[4, 4]]

    def test_what_has_no_name_of_its_own_is_decorated_again(self) -> None:
        one = {"x": [[0, 0]], "t": [[1]]}
        for decorate in STACKS.values():
            for func in (functools.partial(work), Owner(0).plain, work):
                decorated = decorate(func)
                loaded = pickle.loads(pickle.dumps(decorated))
                assert inspect.signature(loaded) == inspect.signature(decorated)
                (result,) = Harness(loaded, INPUTS, OUTPUTS).infer([one])
                (expected,) = Harness(decorated, INPUTS, OUTPUTS).infer([one])
                assert result["y"].tolist() == expected["y"].tolist()


class TestCopying:
    ONE = {"x": np.zeros((1, 2)), "t": np.ones((1, 1))}  # noqa: RUF012

    def test_functions_are_their_own_copies(self) -> None:
        for func in (everything, everything_async):
            assert copy.copy(func) is func
            assert copy.deepcopy(func) is func
            assert copy.deepcopy({"infer": func})["infer"] is func

    def test_methods_go_with_their_objects(self) -> None:
        owner = Owner(3)
        holder = {"owner": owner, "infer": owner.infer}
        copied: Any = copy.deepcopy(holder)
        copied["owner"].offset = 10
        assert copied["infer"]([self.ONE])[0]["y"].tolist() == [[11, 11]]
        assert owner.infer([self.ONE])[0]["y"].tolist() == [[4, 4]]
        shallow: Any = copy.copy(owner.infer)
        assert shallow([self.ONE])[0]["y"].tolist() == [[4, 4]]
        unbound: Any = Owner.infer
        assert copy.deepcopy(unbound)(owner, [self.ONE])[0]["y"].tolist() == [[4, 4]]

    def test_objects_and_methods_that_were_decorated_later(self) -> None:
        class Model:
            offset = 3

            def __call__(self, x: Any, t: Any) -> Any:
                return {"y": x + t + self.offset}

        model = Model()
        for decorated in (batch(model), batch(model.__call__), batch(functools.partial(model))):
            one: Any = decorated
            other: Any = copy.deepcopy(decorated)
            model.offset = 7
            assert one([self.ONE])[0]["y"].tolist() == [[8, 8]]
            assert other([self.ONE])[0]["y"].tolist() == [[4, 4]]
            model.offset = 3
        shallow: Any = copy.copy(batch(model))
        shallow.offset = 9
        assert (shallow([self.ONE])[0]["y"].tolist(), model.offset) == ([[10, 10]], 3)


class TestWholeBatches:
    """The call of a server that has the batch in one piece goes through as many decorators as can be."""

    def offered(self, func: Any) -> bool:
        return func.__pytriton_whole__ is not None

    def test_which_stacks_offer_it(self) -> None:
        sync = functions()["sync"]
        for decorate in STACKS.values():
            assert self.offered(decorate(sync))
            assert not self.offered(decorate(functions()["coroutine"]))
        for above in (FILL, group_by_keys, triton_context):
            assert not self.offered(above(sync))
            assert not self.offered(above(sample(sync)))
        assert self.offered(Owner(1).infer)
        assert self.offered(Owner(1).stream)
        assert not self.offered(Owner.infer)

    def test_not_through_a_decorator_of_somebody_else(self) -> None:
        import wrapt  # type: ignore[import-untyped, unused-ignore]

        @wrapt.decorator  # type: ignore[untyped-decorator, unused-ignore]
        def foreign(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            return wrapped(*args, **kwargs)

        assert not self.offered(group_by_keys(foreign(batch(functions()["sync"]))))

    @pytest.mark.parametrize("name", STACKS)
    def test_the_outputs_are_the_same(self, name: str) -> None:
        infer = STACKS[name](functions()["sync"])
        harness = Harness(infer, INPUTS, OUTPUTS, CONFIG)
        given = [one for one in requests() if "t" in one]
        x, t = (np.concatenate([one[key] for one in given]) for key in "xt")
        context = harness._context()
        outputs = context.run(infer.__pytriton_whole__, {"x": x, "t": t}, [2, 2], lambda: given)
        assert type(outputs) is dict
        assert outputs["y"].tolist() == [row for rows in expected(given) for row in rows]
