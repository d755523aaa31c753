"""What a model asks of the server, with one of the test's own: requests to other models, metrics, models, the log."""

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from pytriton.proxy_backend.errors import ConnectionLostError
from pytriton.proxy_backend.python_models.execution import CoroutineLoop
from pytriton.proxy_backend.python_models.host import answer_readiness
from pytriton.proxy_backend.python_models.server import SERVER, Phase
from pytriton.proxy_backend.wire.errors import ProxyBackendError
from support.waiting import PATIENCE_S, eventually


class Refused(ProxyBackendError):
    """What the server refuses."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Result(NamedTuple):
    """As `transport.calls.CallResult`."""

    error: Any
    outputs: dict[str, Any]
    parameters: dict[str, Any]
    final: bool


class FakeCall:
    """As `transport.calls.Call`."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeCalls:
    """As `transport.calls.Calls`: what it is asked is kept, and answered by another thread."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: list[Result] = []
        self.refusal: Exception | None = None
        self.call = FakeCall()

    def infer(self, model: str, inputs: Any, outputs: Any, *, on_response: Callable[[Any], object], **more: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append((model, {name: array.tolist() for name, array in inputs.items()}, outputs, more))
        threading.Thread(target=lambda: [on_response(answer) for answer in self.answers]).start()
        return self.call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any, **more: Any) -> Any:
            if self.refusal is not None:
                raise self.refusal
            self.asked.append((name, *arguments, *more.items()))
            return len(self.asked)

        return ask


@pytest.fixture
def calls(utils: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCalls]:
    made = FakeCalls()
    monkeypatch.setattr(SERVER, "_calls", made)
    monkeypatch.setattr(SERVER, "_endpoint", Path("/endpoint"))
    monkeypatch.setattr(SERVER, "name", "model_0_0")
    monkeypatch.setattr(SERVER, "phase", Phase.SERVING)
    return made


def request(utils: ModuleType, **fields: Any) -> Any:
    given = {"inputs": [utils.Tensor("x", np.arange(2))], "requested_output_names": ["y"], "model_name": "other"}
    return utils.InferenceRequest(**{**given, **fields})


def answer(value: int, *, final: bool = True, **parameters: Any) -> Result:
    return Result(None, {"y": np.array([value])}, parameters, final)


def values(responses: Any) -> list[Any]:
    return [[tensor.as_numpy().tolist() for tensor in response.output_tensors()] for response in responses]


# ---- whether it is ready ---------------------------------------------------------------------------------------------

READINESS = """
    class TritonPythonModel:
        answers = iter([True, False, 1, None])

        def is_ready(self):
            for answer in self.answers:
                return answer
            raise ValueError("no weights")
"""


class AskingCalls:
    """As `transport.calls.Calls`: asks some times, and is lost then."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.answers: list[tuple[Any, ...]] = []

    def next_readiness_question(self, *answer: Any) -> int:
        self.answers.append(answer)
        if not self.left:
            raise ConnectionLostError("the server is gone")
        self.left -= 1
        return len(self.answers) + 100


def answers_of(model: Any, times: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls = AskingCalls(times)
    monkeypatch.setattr(SERVER, "_calls", calls)
    monkeypatch.setattr(SERVER, "phase", Phase.SERVING)
    loop = CoroutineLoop()
    try:
        answer_readiness(model, loop)
    finally:
        loop.stop()
        eventually(lambda: not any(thread.name == "pytriton-coroutines" for thread in threading.enumerate()))
        if loop._loop is not None:
            loop._loop.close()
            asyncio.set_event_loop(None)
    return calls.answers


def test_a_model_says_whether_it_is_ready(make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(READINESS)
    model.initialize({})
    assert model.tells_readiness
    none, *answers, failed = answers_of(model, 5, monkeypatch)
    wrong = "is_ready() must return a boolean value"
    assert none == (0, False, "")
    assert answers == [(101, True, ""), (102, False, ""), (103, False, wrong), (104, False, wrong)]
    number, is_ready, text = failed
    assert (number, is_ready) == (105, False)
    assert text.startswith("ValueError: no weights\n\nAt:\n")
    assert text.count("model.py") == 1


def test_a_coroutine_says_whether_it_is_ready(make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(
        """
        import asyncio

        class TritonPythonModel:
            async def is_ready(self):
                await asyncio.sleep(0)
                return asyncio.get_running_loop().is_running()
        """
    )
    model.initialize({})
    assert answers_of(model, 1, monkeypatch)[1:] == [(101, True, "")]


def test_most_models_say_nothing_of_it(make_model: Callable[..., Any]) -> None:
    model = make_model("class TritonPythonModel: ...")
    model.initialize({})
    assert not model.tells_readiness


# ---- requests to other models ----------------------------------------------------------------------------------------


def test_a_request_is_answered(utils: ModuleType, calls: FakeCalls) -> None:
    calls.answers = [answer(5, a=1)]
    asked = request(
        utils, request_id="r", correlation_id="s", model_version=3, flags=1, timeout=9, parameters={"p": "q"},
        requested_output_names=["z", b"y"], model_name=b"other",
    )  # fmt: skip
    response = asked.exec()
    assert not response.has_error()
    assert utils.get_output_tensor_by_name(response, "y").as_numpy().tolist() == [5]
    assert response.parameters() == '{"a":1}'
    more = {
        "version": 3, "request_id": "r", "correlation_id": "s", "flags": 1, "timeout_us": 9, "parameters": {"p": "q"},
        "parent": (0, 0), "stream": False,
    }  # fmt: skip
    assert calls.asked == [("other", {"x": [0, 1]}, ["y", "z"], more)]


def test_an_error_is_a_response(utils: ModuleType, calls: FakeCalls) -> None:
    calls.answers = [Result(Refused("not ready", 4), {}, {}, True)]
    response = request(utils).exec()
    assert (response.error().message(), response.error().code()) == ("not ready", utils.TritonError.UNAVAILABLE)
    calls.refusal = Refused("no memory")
    response = request(utils).exec()
    assert (response.error().message(), response.error().code()) == ("no memory", utils.TritonError.INTERNAL)
    tensor = utils.Tensor("x", np.zeros(1))
    assert "two inputs of the same name" in request(utils, inputs=[tensor, tensor]).exec().error().message()


def test_responses_of_a_decoupled_model(utils: ModuleType, calls: FakeCalls) -> None:
    calls.answers = [answer(1, final=False), answer(2, final=False), Result(None, {}, {}, True)]
    responses = request(utils).exec(decoupled=True)
    assert values(responses) == [[[1]], [[2]], []]
    # From the first one again.
    assert values(responses) == [[[1]], [[2]], []]
    assert calls.asked[0][3]["stream"] is True


def test_the_rest_of_responses_is_cancelled(utils: ModuleType, calls: FakeCalls) -> None:
    calls.answers = [answer(1, final=False)]
    responses = request(utils).exec(decoupled=True)
    assert values([next(responses)]) == [[[1]]]
    responses.cancel()
    assert calls.call.cancelled


def test_asynchronous_requests(utils: ModuleType, calls: FakeCalls) -> None:
    async def ask() -> list[Any]:
        answers = await asyncio.wait_for(asyncio.gather(*[request(utils).async_exec() for _ in range(3)]), PATIENCE_S)
        streams = await asyncio.wait_for(request(utils).async_exec(decoupled=True), PATIENCE_S)
        calls.refusal = Refused("no memory")
        failed = await request(utils).async_exec()
        return [values(answers), values(streams), failed.error().message()]

    calls.answers = [answer(1)]
    assert asyncio.run(ask()) == [[[[1]]] * 3, [[[1]]], "no memory"]
    with pytest.raises(RuntimeError, match="no running event loop"):
        request(utils).async_exec()


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.FINALIZING])
def test_only_what_executes_asks_other_models(utils: ModuleType, calls: FakeCalls, phase: Phase) -> None:
    SERVER.phase = phase
    with pytest.raises(utils.TritonModelException, match=r"^BLS is only supported during the 'execute' function\.$"):
        request(utils).exec()


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics(utils: ModuleType, calls: FakeCalls) -> None:
    family = utils.MetricFamily(name="n", description="d", kind=utils.MetricFamily.COUNTER)
    metric = family.Metric(labels={"a": "b"})
    metric.increment(2)
    metric.set(3)
    metric.observe(4)
    assert metric.value() == 6
    histogram = utils.MetricFamily("h", "d", utils.MetricFamily.HISTOGRAM)
    histogram.Metric(buckets=[1.0, 2.0])
    assert calls.asked == [
        ("metric_family", "n", "d", 0), ("metric", 1, {"a": "b"}, None), ("metric_increment", 2, 2.0),
        ("metric_set", 2, 3.0), ("metric_observe", 2, 4.0), ("metric_value", 2), ("metric_family", "h", "d", 2),
        ("metric", 7, {}, [1.0, 2.0]),
    ]  # fmt: skip
    del family
    gc.collect()
    assert calls.asked[-1] == ("discard_metric_family", 1)
    with pytest.raises(
        utils.TritonModelException, match="Invalid metric operation as the corresponding 'MetricFamily'"
    ):
        metric.increment(1)


def test_what_is_no_metric(utils: ModuleType, calls: FakeCalls) -> None:
    gauge = utils.MetricFamily("n", "d", utils.MetricFamily.GAUGE)
    histogram = utils.MetricFamily("n", "d", utils.MetricFamily.HISTOGRAM)
    refused: list[tuple[Any, Any, Any, str]] = [
        (gauge, [], None, "Failed to create metric. Labels must be a dictionary."),
        (histogram, {}, None, "Failed to create metric. Missing required buckets."),
        (histogram, {}, (1.0,), "Failed to create metric. Buckets must be a list."),
        (gauge, {}, [1.0], "Failed to create metric. Unexpected buckets found."),
    ]
    for family, labels, buckets, message in refused:
        with pytest.raises(utils.TritonModelException) as failure:
            family.Metric(labels=labels, buckets=buckets)
        assert str(failure.value) == message
    with pytest.raises(utils.TritonModelException, match="labels are text, got 5 of type int for 'a'"):
        gauge.Metric(labels={"a": 5})
    metric = gauge.Metric()
    calls.refusal = Refused("why")
    whole = "Failed to process the request for model 'model_0_0', message: why"
    for begin, function in [
        ("Error when creating MetricFamily", lambda: utils.MetricFamily("n", "d", utils.MetricFamily.GAUGE)),
        ("Error when creating Metric", gauge.Metric),
        ("Failed to increment metric value", lambda: metric.increment(1)),
        ("Failed to set metric value", lambda: metric.set(1)),
        ("Failed to observe metric value", lambda: metric.observe(1)),
        ("Failed to get metric value", metric.value),
    ]:
        with pytest.raises(utils.TritonModelException) as failure:
            function()
        assert str(failure.value) == f"{begin}: {whole}"
    with pytest.raises(TypeError, match="expected a kind of MetricFamily, got a int"):
        utils.MetricFamily("n", "d", 0)
    calls.refusal = None


# ---- models of the server, its log -----------------------------------------------------------------------------------


def test_models_of_the_server(utils: ModuleType, calls: FakeCalls) -> None:
    utils.load_model("m", "{}", {"file:1/x": b"x"})
    utils.load_model(model_name="m", config="{}")
    utils.unload_model("m")
    utils.unload_model("m", unload_dependents=True)
    assert utils.is_model_ready("m")
    assert utils.is_model_ready(model_name="m", model_version="2")
    assert calls.asked == [
        ("load_model", "m", {"file:1/x": b"x"}, "{}"), ("load_model", "m", None, "{}"),
        ("unload_model", "m", ("dependents", False)), ("unload_model", "m", ("dependents", True)),
        ("is_model_ready", "m", -1), ("is_model_ready", "m", 2),
    ]  # fmt: skip


def test_what_the_server_refuses(utils: ModuleType, calls: FakeCalls) -> None:
    whole = "Failed to process the request for model 'model_0_0', message: "
    with pytest.raises(
        utils.TritonModelException, match="failed to load model 'm', files should be a dictionary of file"
    ):
        utils.load_model("m", files=["x"])
    with pytest.raises(
        utils.TritonModelException, match=f"Failed to check model readiness: {whole}failed to get model"
    ):
        utils.is_model_ready("m", "latest")
    with pytest.raises(utils.TritonModelException, match="'-2', version should be an integral value > 0"):
        utils.is_model_ready("m", "-2")
    calls.refusal = Refused("why")
    for begin, function in [
        ("Failed to load model", utils.load_model),
        ("Failed to unload model", utils.unload_model),
        ("Failed to check model readiness", utils.is_model_ready),
    ]:
        with pytest.raises(utils.TritonModelException, match=f"^{begin}: {whole}why$"):
            function("m")


def test_without_a_server(utils: ModuleType) -> None:
    with pytest.raises(utils.TritonModelException, match="the server can be called from `initialize` on, not while"):
        utils.load_model("m")


def test_the_log_of_the_server(utils: ModuleType, calls: FakeCalls) -> None:
    logger = utils.Logger
    frame = inspect.currentframe()
    assert frame is not None
    logger.log_warn("a")
    line = frame.f_lineno - 1
    logger.log("b", logger.VERBOSE)
    logger.log("c")
    assert calls.asked == [
        ("log", 1, "a", __file__, line), ("log", 3, "b", __file__, line + 2), ("log", 0, "c", __file__, line + 3),
    ]  # fmt: skip
