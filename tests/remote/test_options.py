"""Every option of `bind` and `ModelConfig` is served, or refused, or said to mean nothing, in every way to serve."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientError
from pytriton.decorators import batch
from pytriton.exceptions import PyTritonBadParameterError, PyTritonInvalidOperationError
from pytriton.model_config import Cost, DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.model_config.parser import ModelConfigParser
from pytriton.triton import ProcessWorker, RemoteTriton, Triton
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

X, Y = [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")]
BAD, SLOW, MORE = 13.0, 14.0, 15.0
names = (f"m{number}" for number in itertools.count())


@batch
def answer(x: Any) -> dict[str, Any]:
    value = float(x.flat[0])
    if value == BAD:
        raise ValueError("thirteen")
    if value == SLOW:
        time.sleep(1.0)
    return {"y": x * 2, **({"z": x} if value == MORE else {})}


def whole(requests: Any) -> list[dict[str, Any]]:
    return [{"y": request["x"] * 2} for request in requests]


def stream(requests: Any) -> Iterator[list[dict[str, Any]]]:
    yield whole(requests)


def make_answer() -> Any:
    return answer


def make_whole() -> Any:
    return whole


def make_stream() -> Any:
    return stream


class Way:
    """One way to serve: `bind`, and what came of it."""

    def __init__(self, server: Any, url: str | None, kind: str) -> None:
        self.server, self.url, self.kind = server, url, kind
        self._bound: list[str] = []

    def bind(self, function: Any = answer, tensors: Any = (X, Y), **options: Any) -> str:
        """Bind a callable under a new name; return the name."""
        name = options.pop("model_name", None) or next(names)
        served = ProcessWorker(f"{__file__}:make_{function.__name__}") if self.kind == "processes" else function
        self.server.bind(name, served, *tensors, **options)
        self._bound.append(name)
        return str(name)

    def unbind_all(self) -> None:
        """Take all models away, and their processes."""
        for name in dict.fromkeys(self._bound):
            self.server.unbind(name)

    def config(self, name: str) -> dict[str, Any]:
        """Return the configuration that Triton has."""
        if self.url is None:
            return dict(self.server.model(name).config())
        with urllib.request.urlopen(f"{self.url}/v2/models/{name}/config", timeout=PATIENCE_S) as page:
            return dict(json.load(page))

    def ask(self, name: str, *shape: int, value: float = 1.0, version: int | None = None) -> float:
        """Ask the model; return the first number of its answer."""
        x = np.full(shape or (1, 1), value, np.float32)
        if self.url is None:
            [response] = self.server.model(name, version or -1).infer(inputs={"x": x})
            return float(np.asarray(response.outputs["y"]).flat[0])
        with ModelClient(
            self.url, name, None if version is None else str(version), inference_timeout_s=PATIENCE_S
        ) as client:
            ask: Callable[..., Any] = client.infer_batch if x.ndim > 1 else client.infer_sample
            return float(ask(x=x)["y"].flat[0])

    def error(self, name: str, value: float) -> str:
        """Return the error that a value gets."""
        with pytest.raises((PyTritonClientError, inprocess.TritonError)) as caught:
            self.ask(name, value=value)
        return str(caught.value)

    def settings(self, **options: Any) -> list[str]:
        """Return what the proxy backend of a new model is told, line by line."""
        name = self.bind(config=ModelConfig(**options))
        [model] = self.server._models.find(name, None)
        [(_, text)] = model.side_files(Path("/tmp"))
        return str(text).splitlines()


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    config = local_config(cache_config=["local,size=1048576"])
    with short_home(), running(Triton(config=config)) as triton:
        yield triton


@pytest.fixture(params=["threads", "processes", "remote", "in process"])
def way(request: pytest.FixtureRequest, triton: Triton) -> Iterator[Way]:
    with contextlib.ExitStack() as stack:
        if request.param == "in process":
            way = Way(stack.enter_context(inprocess.Server()), None, request.param)
            stack.callback(way.unbind_all)
            yield way
            return
        server: Any = triton
        if request.param == "remote":
            remote = RemoteTriton(str(triton.http_url), access_token=triton.get_access_token())
            server = stack.enter_context(remote)
        way = Way(server, triton.http_url, request.param)
        stack.callback(way.unbind_all)
        yield way


# ---- what shows that an option is served -----------------------------------------------------------------------------

Caplog = pytest.LogCaptureFixture
WARM = [ModelWarmup("warm", 1, {"x": WarmupInput(np.float32, (1,), zero_data=True)}, 1)]


def batching(way: Way, _: Caplog) -> None:
    name = way.bind(whole, config=ModelConfig(batching=False))
    assert way.config(name)["max_batch_size"] == 0
    assert way.ask(name, 1) == 2


def max_batch_size(way: Way, _: Caplog) -> None:
    name = way.bind(config=ModelConfig(max_batch_size=2))
    assert way.config(name)["max_batch_size"] == 2
    assert way.ask(name, 2, 1) == 2
    with pytest.raises(Exception, match=r"batch-size must be <= 2|at most 2|max_batch_size"):
        way.ask(name, 3, 1)


def batcher(way: Way, _: Caplog) -> None:
    policy = QueuePolicy(TimeoutAction.REJECT, 7_000_000, True, 3)
    for has_batches in (True, False):
        given = DynamicBatcher(
            max_queue_delay_microseconds=5 if has_batches else 0,
            preferred_batch_size=[2] if has_batches else None,
            preserve_ordering=True,
            priority_levels=1,
            default_priority_level=1,
            default_queue_policy=policy,
            priority_queue_policy={1: dataclasses.replace(policy, max_queue_size=2)},
        )
        assert all(getattr(given, each.name) for each in dataclasses.fields(given)) == has_batches
        name = way.bind(whole, config=ModelConfig(batching=has_batches, batcher=given))
        assert ModelConfigParser.from_dict(way.config(name)).batcher == given
        assert way.ask(name, *((1, 1) if has_batches else (1,))) == 2


def cost(way: Way, _: Caplog) -> None:
    free = [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")]
    given = ModelConfig(cost=Cost("x", limit=3, outputs=["y"]))
    name = way.bind(tensors=free, config=given)
    assert way.config(name)["input"][0]["allow_ragged_batch"]
    assert way.ask(name, 1, 3) == 2
    with pytest.raises(Exception, match="a batch of this model may cost 3, and this request costs 4"):
        way.ask(name, 1, 4)
    with pytest.raises(PyTritonBadParameterError, match="None for a decoupled model"):
        way.bind(stream, tensors=free, config=dataclasses.replace(given, decoupled=True))


def response_cache(way: Way, _: Caplog) -> None:
    with contextlib.suppress(PyTritonBadParameterError, PyTritonInvalidOperationError):
        name = way.bind(config=ModelConfig(response_cache=True))
        assert way.ask(name) == way.ask(name) == 2


def decoupled(way: Way, _: Caplog) -> None:
    name = way.bind(stream, config=ModelConfig(decoupled=True))
    assert way.config(name)["model_transaction_policy"]["decoupled"]


def model_warmup(way: Way, _: Caplog) -> None:
    broken = WarmupInput(np.float32, (1,), zero_data=True)
    with pytest.raises(Exception, match="model_warmup"):
        way.bind(config=ModelConfig(model_warmup=[ModelWarmup("warm", 1, {"nothing": broken}, 1)]))
    assert way.ask(way.bind(config=ModelConfig(model_warmup=WARM))) == 2


def warmup_timeout_s(way: Way, _: Caplog) -> None:
    many = dataclasses.replace(WARM[0], count=10**9)
    if way.kind == "processes":
        # Beside the time that the factory may take.
        described = ProcessWorker(f"{__file__}:make_answer", start_timeout_s=1.0)
        with pytest.raises(Exception, match=r"not ready within 1\.2 s"):
            way.server.bind(next(names), described, X, Y, config=ModelConfig(model_warmup=[many], warmup_timeout_s=0.2))
        return
    with pytest.raises(Exception, match="warm-up"):
        way.bind(config=ModelConfig(model_warmup=[many], warmup_timeout_s=0.2))


def send_tracebacks(way: Way, _: Caplog) -> None:
    assert "Traceback" in way.error(way.bind(config=ModelConfig(send_tracebacks=True)), BAD)
    assert "Traceback" not in way.error(way.bind(), BAD)


def execution_timeout_s(way: Way, _: Caplog) -> None:
    assert "execution timeout" in way.error(way.bind(config=ModelConfig(execution_timeout_s=0.05)), SLOW)


def parameters(way: Way, _: Caplog) -> None:
    name = way.bind(config=ModelConfig(parameters={"colour": "blue"}))
    assert way.config(name)["parameters"]["colour"] == {"string_value": "blue"}


def of_workers(option: str, value: Any, setting: str) -> Callable[[Way, Caplog], None]:
    def check(way: Way, caplog: Caplog) -> None:
        if way.url is not None:
            assert setting in way.settings(**{option: value})
            return
        way.bind(config=ModelConfig(**{option: value}))
        [told] = [record.getMessage() for record in caplog.records if option in record.getMessage()]
        assert "mean nothing in process" in told

    return check


CONFIG = {
    "batching": batching,
    "max_batch_size": max_batch_size,
    "batcher": batcher,
    "cost": cost,
    "response_cache": response_cache,
    "decoupled": decoupled,
    "model_warmup": model_warmup,
    "warmup_timeout_s": warmup_timeout_s,
    "arena_budget_bytes": of_workers("arena_budget_bytes", 1 << 20, "arena_budget_bytes = 1048576"),
    "attach_timeout_s": of_workers("attach_timeout_s", 3.5, "attach_timeout_ms = 3500"),
    "repeatable": of_workers("repeatable", True, "repeatable = true"),
    "stream_backlog_bytes": of_workers("stream_backlog_bytes", 8192, "stream_backlog_bytes = 8192"),
    "stream_stall_timeout_s": of_workers("stream_stall_timeout_s", 2.5, "stream_stall_timeout_ms = 2500"),
    "send_tracebacks": send_tracebacks,
    "execution_timeout_s": execution_timeout_s,
    "parameters": parameters,
}


def model_version(way: Way, _: Caplog) -> None:
    assert way.ask(way.bind(model_version=3), version=3) == 2


def strict(way: Way, _: Caplog) -> None:
    assert "not declared: z" in way.error(way.bind(strict=True), MORE)
    assert way.ask(way.bind(), value=MORE) == 2 * MORE


def trace_config(way: Way, _: Caplog) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        way.bind(trace_config=["nonsense"])


def replace(way: Way, _: Caplog) -> None:
    name = way.bind()
    if way.url is None:
        with pytest.raises(TypeError, match="replace"):
            way.bind(whole, model_name=name, replace=True)
        return
    way.bind(whole, model_name=name, replace=True)
    assert eventually(lambda: way.ask(name, value=BAD) == 2 * BAD)


def copy_inputs(way: Way, _: Caplog) -> None:
    if way.url is not None:
        with pytest.raises(TypeError, match="copy_inputs"):
            way.bind(copy_inputs=True)
        return
    assert way.ask(way.bind(copy_inputs=True)) == 2


BIND = {
    "model_version": model_version,
    "strict": strict,
    "trace_config": trace_config,
    "replace": replace,
    "copy_inputs": copy_inputs,
}


def test_every_option_has_its_test() -> None:
    assert CONFIG.keys() == {field.name for field in dataclasses.fields(ModelConfig)}
    known = {"self", "model_name", "infer_func", "inputs", "outputs", "config", *BIND}
    for kind in (Triton, RemoteTriton, inprocess.Server):
        assert inspect.signature(kind.bind).parameters.keys() <= known, kind


@pytest.mark.parametrize("option", [*CONFIG, *BIND])
def test_an_option_is_served_or_refused(option: str, way: Way, caplog: pytest.LogCaptureFixture) -> None:
    {**CONFIG, **BIND}[option](way, caplog)
