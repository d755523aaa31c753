"""Answers that are given again: the same as without a cache, whatever becomes of requests and models."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http

from pytriton import inprocess
from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request, Response
from pytriton.triton import ProcessWorker, RemoteTriton, Triton
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, Held

Array = np.ndarray[Any, Any]

BUDGET = 1 << 20
CACHE = [f"local,size={BUDGET}"]
X = [Tensor((1,), np.float32, "x")]
Y = [Tensor((1,), np.float32, "y")]

# ---- what fails ------------------------------------------------------------------------------------------------------


class Failing:
    """Fails as often as it is told, then answers."""

    def __init__(self, kind: str, times: int = 2) -> None:
        self.kind = kind
        self.left = times
        self.calls = 0

    def __call__(self, requests: list[Request]) -> list[Any]:
        self.calls += 1
        if self.left:
            self.left -= 1
            if self.kind == "result":
                return [ValueError("not yet")] * len(requests)
            if self.kind == "late":
                time.sleep(0.5)
            elif self.kind == "strings":
                return [{"y": np.array([["text"]])}]
            else:
                raise ValueError("not yet")
        return [{"y": request["x"]} for request in requests]


class Dying:
    """Ends its process as long as a file is there, which it removes."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def __call__(self, requests: list[Request]) -> list[Any]:
        if self.path.exists():
            self.path.unlink()
            os._exit(3)
        return [{"y": request["x"]} for request in requests]


async def never_twice(requests: list[Request]) -> list[Any]:
    await asyncio.sleep(0)
    raise ValueError("never")


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    config = local_config(allow_metrics=True, metrics_address="127.0.0.1", metrics_port=0, cache_config=CACHE)
    with short_home(), running(Triton(config=config)) as server:
        yield server


names = (f"m{number}" for number in itertools.count())


@pytest.fixture
def model(triton: Triton) -> Iterator[str]:
    name = next(names)
    yield name
    triton.unbind(name)


def infer(triton: Triton, name: str, value: float) -> float:
    with ModelClient(str(triton.http_url), name, inference_timeout_s=PATIENCE_S) as client:
        return float(client.infer_sample(x=np.array([value], np.float32))["y"][0])


@pytest.mark.parametrize("kind", ["raise", "result", "late", "strings"])
def test_a_failure_is_not_given_again(triton: Triton, model: str, kind: str) -> None:
    failing = Failing(kind)
    config = ModelConfig(response_cache=True, execution_timeout_s=0.2 if kind == "late" else None)
    triton.bind(model, failing, X, Y, config=config, strict=kind == "strings")
    for _ in range(2):
        with pytest.raises(PyTritonClientInferenceServerError):
            infer(triton, model, 3)
    assert [infer(triton, model, 3) for _ in range(3)] == [3, 3, 3]
    # A worker that was late attaches anew, maybe while the third request is under way: its answer is then not kept.
    assert failing.calls == 3 or (kind == "late" and failing.calls == 4)


def test_a_failure_of_a_coroutine_is_not_given_again(triton: Triton, model: str) -> None:
    triton.bind(model, never_twice, X, Y, config=ModelConfig(response_cache=True))
    for _ in range(3):
        with pytest.raises(PyTritonClientInferenceServerError, match="never"):
            infer(triton, model, 3)


def test_a_lost_worker_leaves_no_answer(triton: Triton, model: str, tmp_path: Path) -> None:
    path = tmp_path / "dies"
    path.touch()
    worker = ProcessWorker(Dying, (str(path),))
    triton.bind(model, worker, X, Y, config=ModelConfig(response_cache=True))
    with pytest.raises(PyTritonClientInferenceServerError, match="lost"):
        infer(triton, model, 3)
    assert infer(triton, model, 3) == 3


def test_a_failure_in_process_is_not_given_again() -> None:
    failing = Failing("result")
    with inprocess.Server(cache_config={"local": {"size": BUDGET}}) as server:
        server.bind("failing", failing, X, Y, config=ModelConfig(response_cache=True))
        for _ in range(2):
            with pytest.raises(inprocess.TritonError, match="not yet"):
                list(server.model("failing").infer(inputs={"x": np.array([[3]], np.float32)}))
        for _ in range(2):
            [response] = server.model("failing").infer(inputs={"x": np.array([[3]], np.float32)})
            assert np.asarray(response.outputs["y"]).tolist() == [[3]]
    assert failing.calls == 3


# ---- what else belongs to an answer ----------------------------------------------------------------------------------


class Counting:
    """Answers with what a test says, and counts."""

    def __init__(self, factor: float = 1) -> None:
        self.factor = factor
        self.calls = 0

    def __call__(self, requests: list[Request]) -> list[Any]:
        self.calls += len(requests)
        return [
            Response({"y": request["x"] * np.float32(self.factor)}, parameters={"n": 1, "b": True, "s": "ä", "f": 0.5})
            for request in requests
        ]


def raw_infer(triton: Triton, name: str, value: float, **arguments: Any) -> Any:
    address = str(triton.http_url).removeprefix("http://")
    with tritonclient.http.InferenceServerClient(address, network_timeout=PATIENCE_S) as client:
        tensor = tritonclient.http.InferInput("x", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[value]], np.float32))
        return client.infer(name, [tensor], **arguments).get_response()


def test_a_hit_has_its_parameters_and_its_own_id(triton: Triton, model: str) -> None:
    counting = Counting()
    triton.bind(model, counting, X, Y, config=ModelConfig(response_cache=True))
    found = [raw_infer(triton, model, 3, request_id=str(number)) for number in range(3)]
    assert counting.calls == 1
    assert [response.pop("id") for response in found] == ["0", "1", "2"]
    assert found[0]["parameters"] == {"n": 1, "b": True, "s": "ä", "f": 0.5}
    assert found[1] == found[2] == found[0]


def test_sequences_are_not_given_answers_of_before(triton: Triton, model: str) -> None:
    counting = Counting()
    triton.bind(model, counting, X, Y, config=ModelConfig(response_cache=True))
    for arguments in ({"sequence_id": 7}, {"sequence_id": "seven"}, {"sequence_id": 7, "sequence_start": True}):
        for _ in range(2):
            raw_infer(triton, model, 3, **arguments)
    assert counting.calls == 6


def test_another_callable_has_no_answers_of_the_one_before(triton: Triton, model: str) -> None:
    config = ModelConfig(response_cache=True)
    triton.bind(model, Counting(1), X, Y, config=config)
    for factor in range(2, 8):
        assert infer(triton, model, 3) == 3 * (factor - 1)
        triton.rebind(model, Counting(factor))
        assert infer(triton, model, 3) == 3 * factor
    counting = Counting(9)
    triton.rebind(model, counting, config=ModelConfig())
    assert [infer(triton, model, 3) for _ in range(2)] == [27, 27]
    assert counting.calls == 2


def test_an_answer_under_way_is_not_one_of_the_next_callable(triton: Triton, model: str) -> None:
    held = Held(lambda requests: [{"y": request["x"]} for request in requests])
    triton.bind(model, held, X, Y, config=ModelConfig(response_cache=True))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(infer, triton, model, 3)
        assert held.entered.wait(PATIENCE_S)
        rebound = pool.submit(triton.rebind, model, Counting(2))
        held.release.set()
        rebound.result(PATIENCE_S)
        assert first.result(PATIENCE_S) == 3
    assert infer(triton, model, 3) == 6


def test_versions_and_models_have_answers_of_their_own(triton: Triton, model: str) -> None:
    for version in (1, 2):
        triton.bind(model, Counting(version), X, Y, model_version=version, config=ModelConfig(response_cache=True))
    for _ in range(2):
        for version in (1, 2):
            with ModelClient(str(triton.http_url), model, str(version)) as client:
                assert client.infer_sample(x=np.array([3], np.float32))["y"] == [3 * version]


def test_many_callers_at_once(triton: Triton, model: str) -> None:
    counting = Counting(2)
    triton.bind(model, counting, X, Y, config=ModelConfig(max_batch_size=16, response_cache=True))
    barrier = threading.Barrier(8)

    def ask(caller: int) -> int:
        barrier.wait(PATIENCE_S)
        with ModelClient(str(triton.http_url), model, inference_timeout_s=PATIENCE_S) as client:
            values = random.Random(caller).choices(range(20), k=100)
            return sum(client.infer_sample(x=np.array([value], np.float32))["y"][0] != 2 * value for value in values)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) == 0
    assert counting.calls < 400


def test_an_answer_that_does_not_fit_is_not_kept(triton: Triton, model: str) -> None:
    counting = Counting()
    tensors = [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")]
    triton.bind(model, counting, *tensors, config=ModelConfig(response_cache=True))
    large = np.ones(BUDGET // 4, np.float32)
    with ModelClient(str(triton.http_url), model, inference_timeout_s=PATIENCE_S) as client:
        for _ in range(2):
            assert np.array_equal(client.infer_sample(x=large)["y"], large)
        # The question fits, with its answer it does not.
        for _ in range(2):
            assert np.array_equal(
                client.infer_sample(x=large[: len(large) * 3 // 4])["y"], large[: len(large) * 3 // 4]
            )
    assert counting.calls == 4


# ---- what tells of it ------------------------------------------------------------------------------------------------


def cache_metrics(triton: Triton, name: str) -> dict[str, float]:
    with urllib.request.urlopen(str(triton.metrics_url), timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("nv_cache_") and f'model="{name}"' in line:
            found[line.partition("{")[0]] = float(line.rpartition(" ")[2])
    return found


def test_metrics_have_the_names_of_tritons_own(triton: Triton, model: str) -> None:
    triton.bind(model, Counting(), X, Y, config=ModelConfig(response_cache=True))
    for value in (1, 2, 1, 1):
        infer(triton, model, value)
    found = cache_metrics(triton, model)
    assert (found["nv_cache_num_hits_per_model"], found["nv_cache_num_misses_per_model"]) == (2, 2)
    assert found["nv_cache_hit_duration_per_model"] > 0
    assert found["nv_cache_miss_duration_per_model"] > 0
    # Loaded anew, with the first instance there until it is idle: the metrics of the second one stay.
    triton.rebind(model, Counting(), config=ModelConfig(response_cache=True, max_batch_size=3))
    for value in (1, 1):
        infer(triton, model, value)
    assert cache_metrics(triton, model)["nv_cache_num_hits_per_model"] >= 1


def test_statistics_count_a_hit_as_a_request_and_not_as_an_execution(triton: Triton, model: str) -> None:
    triton.bind(model, Counting(), X, Y, config=ModelConfig(response_cache=True))
    for _ in range(3):
        infer(triton, model, 1)
    address = str(triton.http_url).removeprefix("http://")
    headers = {"triton-access-token": str(triton.get_access_token())}
    with tritonclient.http.InferenceServerClient(address, network_timeout=PATIENCE_S) as client:
        [statistics] = client.get_inference_statistics(model, headers=headers)["model_stats"]
        assert client.get_model_config(model).get("response_cache") in (None, {"enable": False})
    assert statistics["execution_count"] == 1
    assert statistics["inference_stats"]["success"]["count"] == 3


@pytest.mark.parametrize("size", [-1, True, 1.5, "1"])
def test_sizes_that_are_none_are_refused(size: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match="response_cache_bytes"):
        RemoteTriton("http://localhost:1", response_cache_bytes=size)
