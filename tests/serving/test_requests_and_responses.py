"""What callables may be, get and return, through the real server: each of them, whole and failing."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy.types import Request, Response
from pytriton.triton import Triton
from support.callables import (
    BAD,
    GOOD,
    KINDS,
    ONE,
    STRICT,
    UNCASTABLE,
    X,
    Y,
    function,
    name_of,
    yields_nothing,
    yields_twice,
)
from support.serving import local_config, running, short_home
from support.streams import Stream
from support.waiting import PATIENCE_S

Array = np.ndarray[Any, Any]

FOUR = DynamicBatcher(preferred_batch_size=[4], max_queue_delay_microseconds=20_000_000)

# ---- results of every form ------------------------------------------------------------------------------------------


class Results:
    """Returns what the test says."""

    def __init__(self) -> None:
        self.make: Callable[[list[Request]], Any] = function
        self.requests: list[Request] = []

    def __call__(self, requests: list[Request]) -> Any:
        # Copies, so that they hold on to no memory of the server's.
        self.requests = copy.deepcopy(requests)
        return self.make(requests)


loose, strict, batch, single, two, text = Results(), Results(), Results(), Results(), Results(), Results()


def give(result: Any, requests: list[Request]) -> Any:
    return result


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config())
        for kind, infer_func in KINDS.items():
            for decoupled in (False, True):
                triton.bind(name_of(kind, decoupled), infer_func, X, Y, config=ModelConfig(decoupled=decoupled))
        triton.bind("loose", loose, X, Y)
        triton.bind("strict", strict, X, Y, strict=True)
        triton.bind("batch", batch, X, Y, config=ModelConfig(max_batch_size=4, batcher=FOUR))
        triton.bind(
            "single",
            single,
            [Tensor(name="x", dtype=np.float32, shape=(-1, -1))],
            Y,
            config=ModelConfig(batching=False),
        )
        triton.bind("two", two, X, [*Y, Tensor(name="z", dtype=np.int32, shape=(-1,))])
        triton.bind("text", text, X, [Tensor(name="y", dtype=object, shape=(-1,))])
        triton.bind("yields_twice", yields_twice, X, Y)
        triton.bind("yields_nothing", yields_nothing, X, Y)
        triton.bind("tracebacks", function, X, Y, config=ModelConfig(send_tracebacks=True))
        with running(triton):
            yield triton


@pytest.fixture(scope="module")
def stream(triton: Triton) -> Iterator[Stream]:
    """For decoupled models only: a response of another kind on the same stream ends Triton 2.51 with an assertion."""
    with Stream(triton) as stream:
        yield stream


@pytest.fixture(scope="module")
def http(triton: Triton) -> Iterator[Any]:
    client = tritonclient.http.InferenceServerClient(
        str(triton.http_url).removeprefix("http://"), network_timeout=PATIENCE_S, connection_timeout=PATIENCE_S
    )
    yield client
    client.close()


Ask = Callable[[str, float], tuple[list[Any], str | None]]


@pytest.fixture(scope="module")
def ask(http: Any) -> Ask:
    """Asks a model that is not decoupled: its values, or the text of the error."""

    def send(name: str, value: float) -> tuple[list[Any], str | None]:
        try:
            output = http.infer(name, [tensor(value)]).as_numpy("y")
        except InferenceServerException as error:
            return [], error.message()
        return ([] if output is None else output.ravel().tolist()), None

    return send


@pytest.mark.parametrize("decoupled", [False, True], ids=["coupled", "decoupled"])
@pytest.mark.parametrize("kind", KINDS)
def test_callables_of_every_kind(kind: str, decoupled: bool, stream: Stream, ask: Ask) -> None:
    name = name_of(kind, decoupled)
    asked = stream.ask if decoupled else ask
    assert asked(name, 3) == ([6], None)
    values, error = asked(name, 13)
    assert values == []
    assert error is not None
    assert "the inference callable raised ValueError: thirteen" in error
    assert "Traceback" not in error
    assert asked(name, 4) == ([8], None)


def test_the_traceback_is_sent_where_the_model_says_so(ask: Ask) -> None:
    error = str(ask("tracebacks", 13)[1])
    assert "the inference callable raised ValueError: thirteen" in error
    assert "Traceback (most recent call last)" in error
    assert "in function" in error


@pytest.mark.parametrize(("name", "received"), [("yields_twice", "more than one"), ("yields_nothing", "none")])
def test_a_generator_of_a_coupled_model_yields_once(name: str, received: str, ask: Ask) -> None:
    for _ in range(2):
        assert f"exactly one result, it yielded {received}" in str(ask(name, 1)[1])


@pytest.mark.parametrize("form", GOOD)
def test_results_of_every_form(form: str, ask: Ask) -> None:
    result = GOOD[form]
    for name, results in (("loose", loose), ("strict", strict)):
        for whole in ([result], (result,)):
            results.make = functools.partial(give, whole)
            values, error = ask(name, 1)
            if name == "loose" or form in {*STRICT, "subclass", "masked"}:
                assert (values, error) == ([1], None)
            else:
                assert values == []
                assert "the declared one" in str(error)


@pytest.mark.parametrize("name", ["loose", "strict"])
def test_the_request_itself_is_a_result(name: str, ask: Ask) -> None:
    """Its names are those of inputs, so it fits where outputs are called like them."""
    results = {"loose": loose, "strict": strict}[name]
    results.make = lambda requests: requests
    values, error = ask(name, 1)
    assert values == []
    expected = "none of the outputs that are asked for" if name == "loose" else "not declared: x; missing: y"
    assert error is not None
    assert f"{expected}: expected y, got x" in error


@pytest.mark.parametrize("name", ["loose", "strict"])
@pytest.mark.parametrize("what", [*BAD, *UNCASTABLE])
def test_what_cannot_be_sent_is_an_error_and_nothing_hangs(what: str, name: str, ask: Ask) -> None:
    result, part = {**BAD, **UNCASTABLE}[what]
    results = {"loose": loose, "strict": strict}[name]
    results.make = lambda requests: result
    values, error = ask(name, 1)
    assert values == []
    assert f"model '{name}'" in str(error)
    assert part in str(error)
    results.make = function
    assert ask(name, 2) == ([4], None)


def test_scalars_are_outputs_of_a_model_without_batching(ask: Ask) -> None:
    for value in (np.float32(7), np.float64(7), np.int8(7), np.array(7), np.array([7])):
        single.make = functools.partial(give, [{"y": value}])
        assert ask("single", 1) == ([7], None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([[b"a\0", "b", b""]], object), [b"a\0", b"b", b""]),
        (np.array([["grüße", "x"]]), ["grüße".encode(), b"x"]),
        (np.array([["grüße"]], object), ["grüße".encode()]),
        (np.array([[b"abc", b""]]), [b"abc", b""]),
        (np.array([[np.str_("s"), np.bytes_(b"t")]], object), [b"s", b"t"]),
        (np.empty((1, 0), object), []),
        (np.empty((1, 0), "S3"), []),
        (np.empty((1, 0), "U3"), []),
    ],
)
def test_strings_of_every_form(value: Array, expected: list[bytes], ask: Ask) -> None:
    text.make = lambda requests: [{"y": value}]
    assert ask("text", 1) == (expected, None)


@pytest.mark.parametrize("value", [np.array([[None]], object), np.array([[b"a", 1]], object), np.zeros((1, 1))])
def test_what_is_no_string(value: Array, ask: Ask) -> None:
    text.make = lambda requests: [{"y": value}]
    error = str(ask("text", 1)[1])
    assert "output 'y', request 0 of the batch" in error
    assert "expected" in error


def tensor(value: float) -> Any:
    made = tritonclient.http.InferInput("x", [1, 1], "FP32")
    made.set_data_from_numpy(np.full((1, 1), value, np.float32))
    return made


# ---- one batch of four requests -------------------------------------------------------------------------------------


def ask_four(triton: Triton) -> list[Any]:
    """Sends 0, 1, 2 and 3 at once, which are one batch: their values, or the texts of their errors."""

    def ask(value: int) -> Any:
        with Stream(triton) as stream:
            stream.send("batch", value)
            return stream.next()

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(4)))


def test_an_error_of_its_own_leaves_the_other_requests_whole(triton: Triton) -> None:
    def answer(requests: list[Request]) -> list[Any]:
        made: list[Any] = []
        for request in requests:
            value = int(request["x"].item())
            if value == 1:
                made.append(PermissionError("not for you"))
            elif value == 2:
                made.append({"y": np.array([["no number"]])})
            else:
                made.append(Response({"y": request["x"]}, {"n": value, "s": "text", "b": True, "f": 0.5}))
        return made

    batch.make = answer
    first, second, third, fourth = ask_four(triton)
    assert len(batch.requests) == 4
    for event, value in ((first, 0), (fourth, 3)):
        assert (event.value, event.error) == (value, None)
        assert event.parameters == {"n": value, "s": "text", "b": True, "f": 0.5}
    assert "PermissionError: not for you" in second.error
    assert "its values cannot be cast" in third.error


def test_an_error_of_the_batch_is_that_of_each_request(triton: Triton) -> None:
    batch.make = lambda requests: 1 / 0
    assert all("ZeroDivisionError: division by zero" in event.error for event in ask_four(triton))


# ---- requests -------------------------------------------------------------------------------------------------------


def test_everything_about_a_request(http: Any) -> None:
    loose.make = lambda requests: [
        {"y": request["x"]} for request in requests if pickle.loads(pickle.dumps(request)).parameters
    ]
    http.infer(
        "loose",
        [tensor(5)],
        request_id="the-id",
        timeout=1_500_000,
        sequence_id=0,
        parameters={"a": "text", "b": 7, "c": True, "d": 0.25},
        outputs=[tritonclient.http.InferRequestedOutput("y")],
    )
    (request,) = loose.requests
    assert isinstance(request, Request)
    assert request["x"].tolist() == [[5]]
    assert {key: request.parameters[key] for key in "abcd"} == {"a": "text", "b": 7, "c": True, "d": 0.25}
    assert request.requested_output_names == ["y"]
    assert (request.request_id, request.timeout_us, request.priority) == ("the-id", 1_500_000, 0)
    assert (request.correlation_id, request.sequence_start, request.sequence_end) == (0, False, False)
    assert not request.is_cancelled()


def test_only_the_outputs_that_are_asked_for_are_checked_and_sent(http: Any) -> None:
    two.make = lambda requests: [[ONE, np.array([[7]])]]
    result = http.infer("two", [tensor(1)])
    assert (result.as_numpy("y").item(), result.as_numpy("z").item()) == (1, 7)
    result = http.infer("two", [tensor(1)], outputs=[tritonclient.http.InferRequestedOutput("z")])
    assert result.as_numpy("y") is None
    assert result.as_numpy("z").dtype == np.int32
    assert two.requests[0].requested_output_names == ["z"]
