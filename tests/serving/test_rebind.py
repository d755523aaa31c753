"""Models that come, change and go while the server runs: `bind`, `rebind` and `unbind` under load."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.decorators import model
from pytriton.exceptions import PyTritonBadParameterError, PyTritonInvalidOperationError, PyTritonValidationError
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.proxy_backend import read_description
from pytriton.triton import ProcessWorker, Triton, TritonModelLoadError
from support.callables import X, Y
from support.load import under_load
from support.processes import in_child
from support.serving import arena_mappings, local_config, queued, running, short_home
from support.waiting import PATIENCE_S, Held, eventually


def times(factor: float, pause_s: float = 0.0) -> Callable[[Any], Any]:
    """A callable that can be told from others by its answers."""

    def infer(requests: Any) -> Any:
        if pause_s:
            time.sleep(pause_s)
        return [{"y": request.data["x"] * np.float32(factor)} for request in requests]

    return infer


def times_async(factor: float, pause_s: float) -> Callable[[Any], Any]:
    async def infer(requests: Any) -> Any:
        await asyncio.sleep(pause_s)
        return [{"y": request.data["x"] * np.float32(factor)} for request in requests]

    return infer


def call(triton: Triton, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    assert triton.http_url is not None
    connection = http.client.HTTPConnection(triton.http_url.removeprefix("http://"), timeout=PATIENCE_S)
    headers = {"triton-access-token": triton.get_access_token() or ""}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if text else None
    finally:
        connection.close()


def ask(triton: Triton, model: str, version: int | None = None, value: float = 1.0) -> Any:
    """Gives the answer, or the text of the error."""
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]}
    place = f"/v2/models/{model}" + ("" if version is None else f"/versions/{version}")
    status, answer = call(triton, "POST", f"{place}/infer", {"inputs": [tensor]})
    return answer["outputs"][0]["data"][0] if status == 200 else answer["error"]


def is_ready(triton: Triton, model: str, version: int | None = None) -> bool:
    place = f"/v2/models/{model}" + ("" if version is None else f"/versions/{version}")
    return call(triton, "GET", f"{place}/ready")[0] == 200


def index(triton: Triton) -> dict[tuple[str, str], str]:
    models = call(triton, "POST", "/v2/repository/index", {})[1]
    return {(model["name"], model.get("version", "")): model.get("state", "") for model in models}


def sockets(home: Path) -> list[str]:
    return sorted(path.name for path in home.glob("*/endpoints/*.sock"))


def worker_threads(model: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"pytriton-{model}")]


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as folder:
        yield folder


@pytest.fixture
def triton(home: Path) -> Iterator[Triton]:
    """A running server with the model "m", which answers with what it is given."""
    triton = Triton(config=local_config())
    triton.bind("m", times(1), X, Y)
    with running(triton):
        yield triton


# ---- rebind --------------------------------------------------------------------------------------------------------


def test_rebind_under_load_loses_no_request(triton: Triton, home: Path) -> None:
    steps: list[tuple[Any, dict[str, Any]]] = [
        (times(2), {}),
        ([times(3), times(3, 0.002)], {}),
        (times(4, 0.005), {}),
        (times_async(5, 0.005), {}),
        ([times_async(6, 0.01), times(6)], {}),
        (times(7), {"config": ModelConfig(max_batch_size=8)}),
        (times(8, 0.005), {"config": ModelConfig(batcher=DynamicBatcher(max_queue_delay_microseconds=2000))}),
        (times_async(9, 0.005), {"strict": True}),
        ([times(10), times(10)], {"config": ModelConfig(attach_timeout_s=PATIENCE_S)}),
        (times(11), {"config": ModelConfig()}),
    ]
    with under_load(triton.http_url, triton.grpc_url, "m") as load:
        for factor, (callables, options) in enumerate(steps, 2):
            triton.rebind("m", callables, **options)
            returned = time.monotonic()
            load.wait_for_more()
            assert load.factors_since(returned) <= {float(factor)}
    assert load.failures == []
    assert len(load.answers) == load.sent
    assert {factor for _, factor in load.answers} <= {float(factor) for factor in range(1, len(steps) + 2)}
    assert triton.is_alive()
    assert len(sockets(home)) == 1
    assert len(worker_threads("m")) == 1


def test_bind_replaces_under_load_what_is_there(triton: Triton, home: Path) -> None:
    with under_load(triton.http_url, triton.grpc_url, "m") as load:
        for factor, config in ((2, None), (3, ModelConfig(max_batch_size=8)), (4, None)):
            triton.bind("m", times(factor), X, Y, config=config, replace=True)
            returned = time.monotonic()
            load.wait_for_more()
            assert load.factors_since(returned) <= {float(factor)}
    assert load.failures == []
    assert len(load.answers) == load.sent
    assert len(sockets(home)) == 1
    # What cannot be served leaves the old one in service.
    with pytest.raises(PyTritonValidationError):
        triton.bind("m", times(5), X, [Tensor((1,), object, "y"), Tensor((1,), object, "y")], replace=True)
    assert ask(triton, "m") == 4


def test_a_callable_may_replace_its_own_model(triton: Triton) -> None:
    def infer(requests: Any) -> Any:
        triton.bind("m", times(3), X, Y, replace=True)
        return times(2)(requests)

    triton.rebind("m", infer)
    assert ask(triton, "m") == 2
    eventually(lambda: ask(triton, "m") == 3)


@pytest.mark.parametrize("config", [None, ModelConfig(max_batch_size=7)], ids=["callable", "configuration"])
def test_the_old_callable_finishes_what_it_has(triton: Triton, config: ModelConfig | None) -> None:
    held = Held(times(2))
    triton.rebind("m", held)
    with ThreadPoolExecutor(3) as pool:
        old = pool.submit(ask, triton, "m")
        assert held.entered.wait(PATIENCE_S)
        rebinding = pool.submit(triton.rebind, "m", times(3), config=config)
        # The new callable is there while the old one is still at work.
        wanted = 4 if config is None else config.max_batch_size
        eventually(lambda: call(triton, "GET", "/v2/models/m/config")[1]["max_batch_size"] == wanted)
        assert pool.submit(ask, triton, "m").result(PATIENCE_S) == 3
        assert not old.done()
        assert not rebinding.done()
        held.release.set()
        assert old.result(PATIENCE_S) == 2
        rebinding.result(PATIENCE_S)
    assert ask(triton, "m") == 3


def test_a_callable_that_does_not_end_is_cut_off(triton: Triton, caplog: pytest.LogCaptureFixture) -> None:
    held = Held(times(2))
    triton.rebind("m", held)
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(ask, triton, "m")
        assert held.entered.wait(PATIENCE_S)
        triton.rebind("m", times(3), timeout_s=0.2)
        assert "was lost while it worked on this request" in old.result(PATIENCE_S)
    assert ask(triton, "m") == 3
    assert "still busy" in caplog.text
    held.release.set()


def test_other_tensors(triton: Triton) -> None:
    inputs = [Tensor(name="a", dtype=np.int64, shape=(2,)), Tensor(name="b", dtype=bytes, shape=(1,))]

    def infer(requests: Any) -> Any:
        return [{"sum": request.data["a"].sum(axis=1, keepdims=True)} for request in requests]

    triton.rebind("m", infer, inputs, [Tensor(name="sum", dtype=np.int64, shape=(1,))], config=ModelConfig())
    _, metadata = call(triton, "GET", "/v2/models/m")
    assert [(tensor["name"], tensor["datatype"]) for tensor in metadata["inputs"]] == [("a", "INT64"), ("b", "BYTES")]
    body = [
        {"name": "a", "shape": [1, 2], "datatype": "INT64", "data": [3, 4]},
        {"name": "b", "shape": [1, 1], "datatype": "BYTES", "data": ["x"]},
    ]
    status, answer = call(triton, "POST", "/v2/models/m/infer", {"inputs": body})
    assert (status, answer["outputs"][0]["data"]) == (200, [7])
    # What is not given stays.
    triton.rebind("m", lambda requests: [{"sum": np.array([[1]])} for _ in requests])
    assert call(triton, "POST", "/v2/models/m/infer", {"inputs": body})[1]["outputs"][0]["data"] == [1]


def failing(requests: Any) -> Any:
    raise RuntimeError("no weights")


def test_a_failed_rebind_leaves_the_old_callable(triton: Triton, home: Path) -> None:
    warm = ModelConfig(
        max_batch_size=5,
        model_warmup=[
            ModelWarmup(
                name="w", batch_size=1, count=1, inputs={"x": WarmupInput(dtype=np.float32, shape=(1,), zero_data=True)}
            )
        ],
    )
    (endpoints,) = home.glob("*/endpoints")
    before = sockets(home)
    with under_load(triton.http_url, triton.grpc_url, "m") as load:
        with pytest.raises(TritonModelLoadError, match="no weights"):
            triton.rebind("m", failing, config=warm)
        load.wait_for_more()
        # What workers from elsewhere are told is that of the model that is served.
        description = read_description(endpoints / "m.1.sock.json")
        with pytest.raises(TritonModelLoadError, match="no module 'no_such_module'"):
            triton.rebind("m", ProcessWorker("no_such_module:make"), strict=True)
        assert read_description(endpoints / "m.1.sock.json") == description
        assert not description.strict
        load.wait_for_more()
        # Triton tries to load it, and the proxy finds something in the place of its socket.
        (endpoints / "m~2.1.sock").write_text("in the way")
        with pytest.raises(TritonModelLoadError, match="exists and is not a socket") as caught:
            triton.rebind("m", times(2), config=ModelConfig(max_batch_size=6))
        assert caught.value.model_name == "m"
        load.wait_for_more()
        with pytest.raises(PyTritonValidationError, match="infer_func"):
            triton.rebind("m", None)
        with pytest.raises(PyTritonBadParameterError, match="max_batch_size"):
            triton.rebind("m", times(2), config=ModelConfig(max_batch_size=0))
        load.wait_for_more()
        (endpoints / "m~2.1.sock").unlink()
        assert sockets(home) == before
        assert len(worker_threads("m")) == 1
        assert triton.is_alive()
        assert call(triton, "GET", "/v2/models/m/config")[1]["max_batch_size"] == ModelConfig().max_batch_size
        # A further version does not make Triton load the first one again, and the next change is a whole one.
        triton.bind("m", times(1), X, Y, model_version=2)
        load.wait_for_more()
        triton.unbind("m", 2)
        load.wait_for_more()
        assert {factor for _, factor in load.answers} == {1.0}
        triton.rebind("m", times(3), config=ModelConfig(max_batch_size=6))
        returned = time.monotonic()
        load.wait_for_more()
        assert load.factors_since(returned) <= {3.0}
    assert load.failures == []
    assert len(load.answers) == load.sent


def test_what_cannot_be_rebound(triton: Triton) -> None:
    with pytest.raises(PyTritonInvalidOperationError, match=r"no model 'n'\. Bound are: 'm' \(1\)"):
        triton.rebind("n", times(2))
    with pytest.raises(PyTritonInvalidOperationError, match="no model 'm' of version 3"):
        triton.rebind("m", times(2), model_version=3)
    with pytest.raises(PyTritonBadParameterError, match="timeout_s must be a number of seconds"):
        triton.rebind("m", times(2), timeout_s=-1)
    triton.bind("m", times(2), X, Y, model_version=2)
    with pytest.raises(PyTritonInvalidOperationError, match=r"versions \[1, 2\]: say with model_version"):
        triton.rebind("m", times(3))
    with pytest.raises(PyTritonInvalidOperationError, match="version 2 differs from version 1"):
        triton.rebind("m", times(3), model_version=2, config=ModelConfig(max_batch_size=3))
    assert (ask(triton, "m", 1), ask(triton, "m", 2)) == (1, 2)


def test_one_of_several_versions(triton: Triton) -> None:
    triton.bind("m", times(2), X, Y, model_version=2)
    with under_load(triton.http_url, triton.grpc_url, "m", version=1) as load:
        triton.rebind("M", times(4), model_version=2)
        assert ask(triton, "m", 2) == 4
        # What is not in Triton's configuration may differ between versions.
        triton.rebind("m", times(5), model_version=2, config=ModelConfig(attach_timeout_s=PATIENCE_S))
        assert ask(triton, "m", 2) == 5
        load.wait_for_more()
    assert load.failures == []
    assert {factor for _, factor in load.answers} == {1.0}


# ---- unbind --------------------------------------------------------------------------------------------------------


def test_unbind_leaves_nothing(triton: Triton, home: Path) -> None:
    before = arena_mappings()
    triton.bind("gone", [times(2), times(2)], X, Y)
    with under_load(triton.http_url, triton.grpc_url, "m") as load:
        assert ask(triton, "gone") == 2
        assert is_ready(triton, "gone")
        triton.unbind("gone")
        assert not is_ready(triton, "gone")
        assert "gone" in ask(triton, "gone")
        assert index(triton) == {("m", "1"): "READY"}
        assert sockets(home) == ["m.1.sock"]
        assert not list(home.glob("*/models*/gone*"))
        assert worker_threads("gone") == []
        assert triton.is_alive()
        load.wait_for_more()
    assert load.failures == []
    triton.rebind("m", times(1))  # which also gives back what the load made it map
    eventually(lambda: len(arena_mappings()) <= len(before))
    with pytest.raises(PyTritonInvalidOperationError, match="no model 'gone'"):
        triton.unbind("gone")
    triton.bind("gone", times(3), X, Y)
    assert ask(triton, "gone") == 3


@pytest.mark.parametrize("leaving", [1, 2])
def test_other_versions_stay(triton: Triton, home: Path, leaving: int) -> None:
    triton.bind("m", times(2), X, Y, model_version=2)
    staying = 3 - leaving
    with under_load(triton.http_url, triton.grpc_url, "m", version=staying) as load:
        triton.unbind("m", leaving)
        assert not is_ready(triton, "m", leaving)
        assert is_ready(triton, "m", staying)
        assert is_ready(triton, "m")
        load.wait_for_more()
        triton.bind("m", times(7), X, Y, model_version=leaving)
        assert ask(triton, "m", leaving) == 7
        load.wait_for_more()
    assert load.failures == []
    assert len(load.answers) == load.sent
    assert {factor for _, factor in load.answers} == {float(staying)}
    triton.unbind("m")
    assert not is_ready(triton, "m")
    assert sockets(home) == []
    assert triton.is_alive()


def test_unbind_waits_for_what_is_in_flight(home: Path) -> None:
    held = Held(times(2))
    triton = Triton(config=local_config(allow_metrics=True, metrics_address="127.0.0.1", metrics_port=0))
    triton.bind("held", held, X, Y)
    with running(triton), ThreadPoolExecutor(3) as pool:
        first = pool.submit(ask, triton, "held")
        assert held.entered.wait(PATIENCE_S)
        second = pool.submit(ask, triton, "held")
        eventually(lambda: queued(triton, "held") == 1)
        unbinding = pool.submit(triton.unbind, "held")
        eventually(lambda: not is_ready(triton, "held"))
        assert "held" in ask(triton, "held")
        assert not unbinding.done()
        held.release.set()
        unbinding.result(PATIENCE_S)
        # The one that the callable had, and the one in Triton's queue.
        assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (2, 2)
        assert worker_threads("held") == []


def test_unbind_cuts_off_what_does_not_end(triton: Triton, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = Held(times(2))
    triton.bind("held", held, X, Y)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, triton, "held")
        assert held.entered.wait(PATIENCE_S)
        triton.unbind("held", timeout_s=0.2)
        assert "was lost while it worked on this request" in asking.result(PATIENCE_S)
    assert "have not been answered 0.2 s after" in caplog.text
    assert sockets(home) == ["m.1.sock"]
    held.release.set()
    triton.bind("held", times(3), X, Y)
    assert ask(triton, "held") == 3


def test_stop_ends_the_wait_of_unbind_but_not_the_request(triton: Triton) -> None:
    held = Held(times(2))
    triton.bind("held", held, X, Y)
    with ThreadPoolExecutor(3) as pool:
        asking = pool.submit(ask, triton, "held")
        assert held.entered.wait(PATIENCE_S)
        unbinding = pool.submit(triton.unbind, "held", timeout_s=600)
        eventually(lambda: not is_ready(triton, "held"))
        stopping = pool.submit(triton.stop)
        unbinding.result(PATIENCE_S)
        assert not stopping.done()
        held.release.set()
        assert asking.result(PATIENCE_S) == 2
        assert stopping.result(PATIENCE_S)


def test_what_cannot_be_unbound(triton: Triton) -> None:
    with pytest.raises(PyTritonInvalidOperationError, match="no model 'm' of version 2"):
        triton.unbind("m", 2)
    with pytest.raises(PyTritonBadParameterError, match="timeout_s"):
        triton.unbind("m", timeout_s="soon")  # type: ignore[arg-type]
    assert ask(triton, "m") == 1


# ---- both ----------------------------------------------------------------------------------------------------------


def test_before_the_start(home: Path) -> None:
    triton = Triton(config=local_config())
    triton.bind("m", times(1), X, Y)
    triton.bind("n", times(1), X, Y)
    triton.rebind("m", times(2), config=ModelConfig(max_batch_size=9))
    triton.unbind("n")
    with running(triton):
        assert ask(triton, "m") == 2
        assert index(triton) == {("m", "1"): "READY"}
        assert call(triton, "GET", "/v2/models/m/config")[1]["max_batch_size"] == 9
    triton.rebind("m", times(3))
    with running(triton):
        assert ask(triton, "m") == 3


def test_what_callables_see_of_other_models(home: Path) -> None:
    triton = Triton(config=local_config())
    shared, other = times(1), times(2)
    triton.bind("m", shared, X, Y)
    triton.bind("n", shared, X, Y)
    configs = triton._context.model_configs
    assert configs[shared].model_name == "n"
    triton.unbind("n")
    assert configs[shared].model_name == "m"
    triton.rebind("m", other)
    assert shared not in configs
    assert configs[other].model_name == "m"


def test_from_several_threads_at_once(triton: Triton, home: Path) -> None:
    def come_and_go(number: int) -> list[float]:
        answers = []
        name = f"n{number}"
        for factor in range(2, 6):
            triton.bind(name, times(factor), X, Y)
            answers.append(ask(triton, name))
            triton.rebind(name, times(10 * factor), config=ModelConfig(max_batch_size=2 + factor))
            answers.append(ask(triton, name))
            triton.unbind(name)
        return answers

    with under_load(triton.http_url, triton.grpc_url, "m") as load, ThreadPoolExecutor(3) as pool:
        for answers in pool.map(come_and_go, range(3)):
            assert answers == [2, 20, 3, 30, 4, 40, 5, 50]
    assert load.failures == []
    assert len(load.answers) == load.sent
    assert sockets(home) == ["m.1.sock"]


def test_a_failed_bind_leaves_nothing(triton: Triton, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig(
        model_warmup=[
            ModelWarmup(
                name="w", batch_size=1, count=1, inputs={"x": WarmupInput(dtype=np.float32, shape=(1,), zero_data=True)}
            )
        ]
    )
    with (
        caplog.at_level(logging.CRITICAL, "pytriton"),
        pytest.raises(TritonModelLoadError, match="no weights") as caught,
    ):
        triton.bind("n", failing, X, Y, config=config)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert index(triton) == {("m", "1"): "READY"}
    assert worker_threads("n") == []
    assert sockets(home) == ["m.1.sock"]
    triton.bind("n", times(2), X, Y)
    assert ask(triton, "n") == 2


def test_stop_ends_a_long_warm_up(home: Path) -> None:
    held = Held(times(1))
    config = ModelConfig(
        model_warmup=[
            ModelWarmup(
                name="w", batch_size=1, count=1, inputs={"x": WarmupInput(dtype=np.float32, shape=(1,), zero_data=True)}
            )
        ]
    )
    triton = Triton(config=local_config())
    with running(triton), ThreadPoolExecutor(1) as pool:
        binding = pool.submit(triton.bind, "n", held, X, Y, config=config)
        assert held.entered.wait(PATIENCE_S)
        assert triton.stop()
        with pytest.raises(TritonModelLoadError, match="stopped in the meantime"):
            binding.result(PATIENCE_S)
        held.release.set()
        eventually(lambda: worker_threads("n") == [])


def test_a_fork_owns_nothing(triton: Triton) -> None:
    def child() -> None:
        attempts: list[Callable[[], None]] = [
            lambda: triton.bind("n", times(1), X, Y),
            lambda: triton.rebind("m", times(1)),
            lambda: triton.unbind("m"),
            triton.run,
        ]
        for attempt in attempts:
            with pytest.raises(PyTritonInvalidOperationError):
                attempt()
        assert not triton.stop()
        assert not triton.is_alive()

    in_child(child)
    assert ask(triton, "m") == 1


def test_a_function_under_model_is_bound_again_alone() -> None:
    @model
    def square(x: float) -> float:
        return x * x

    before = square

    @model(name="square")
    def hundredfold(x: float) -> float:
        return 100 * x

    with short_home():
        triton = Triton(config=local_config())
        triton.bind(before)
        with running(triton), ModelClient(str(triton.http_url), "square") as client:
            assert client.infer_sample(3.0)["output"].tolist() == [9.0]
            triton.rebind(hundredfold)
            assert client.infer_sample(3.0)["output"].tolist() == [300.0]
            with pytest.raises(PyTritonValidationError, match="decorated with @model"):
                triton.rebind(times(2))
