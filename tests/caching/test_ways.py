"""Answers that are given again, in every way to serve: the same as without a cache, whatever is asked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.proxy_backend import endpoint_path, read_description
from pytriton.proxy_backend.cli.app import run as run_command
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.triton import ProcessWorker, RemoteTriton, Triton
from support import python_models
from support.bare_server import running_worker
from support.faults.plain_server import plain_server
from support.isolation.raw_requests import GrpcSender, HttpSender, InProcessSender, Send, SharedInputs, strings
from support.isolation.reference import Answer, RawRequest, RawTensor
from support.python_models.converted import convert, hosts_at
from support.serving import local_config, running, short_home

Array = np.ndarray[Any, Any]

BUDGET = 1 << 20
CACHE = [f"local,size={BUDGET}"]

# ---- one model in every way to serve it ------------------------------------------------------------------------------

INPUTS = [Tensor((-1,), np.float32, "x"), Tensor((-1,), bytes, "text", optional=True)]
OUTPUTS = [Tensor((-1,), np.float32, "y"), Tensor((2,), np.int64, "about"), Tensor((1,), np.int64, "call")]
KINDS = ("plain", "batch", "async")

calls = itertools.count()


def answer(x: Array, text: Array | None, scale: float) -> dict[str, Array]:
    """All but `call`, which tells one execution from another, follows from the request."""
    number = next(calls)
    if x.ravel()[0] < 0:
        raise ValueError(f"negative, call {number}")
    length = 0 if text is None else sum(len(each) * (place + 1) for place, each in enumerate(text.ravel()))
    about = np.full((len(x), 2), (x.shape[1], length), np.int64)
    return {"y": x * np.float32(scale), "about": about, "call": np.full((len(x), 1), number, np.int64)}


def plain(requests: list[Request]) -> list[Any]:
    results: list[Any] = []
    for request in requests:
        given = request.parameters.get("scale", 1)
        scale = float(given) * (10 if isinstance(given, str) else 1)
        try:
            outputs = answer(request["x"], request.get("text"), scale)
        except ValueError as error:
            results.append(error)
            continue
        wanted = request.requested_output_names
        results.append({name: array for name, array in outputs.items() if not wanted or name in wanted})
    return results


@batch
def by_rows(x: Array, text: Array | None = None) -> dict[str, Array]:
    return answer(x, text, 1)


async def coroutine(requests: list[Request]) -> list[Any]:
    await asyncio.sleep(0)
    return plain(requests)


def make(kind: str) -> Callable[..., Any]:
    """Return a callable, for processes."""
    made: dict[str, Callable[..., Any]] = {"plain": plain, "batch": by_rows, "async": coroutine}
    return made[kind]


def bind(triton: Any, *, in_processes: bool = False) -> None:
    for kind, cached in itertools.product(KINDS, (True, False)):
        infer = ProcessWorker(make, (kind,)) if in_processes else make(kind)
        config = ModelConfig(max_batch_size=8, response_cache=cached)
        triton.bind(name_of(kind, cached), infer, INPUTS, OUTPUTS, config=config)


def name_of(kind: str, cached: bool) -> str:
    return kind if cached else f"{kind}-always"


Pairs = Mapping[str, tuple[Send, Send]]


@contextlib.contextmanager
def asking(server: Any, kinds: tuple[str, ...], token: str | None = None) -> Iterator[Pairs]:
    http_url = getattr(server, "http_url", None) or server.url
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(contextlib.closing(SharedInputs(http_url, "cache-inputs", token)))
        makers: dict[str, Callable[[str], Any]] = {
            "HTTP": lambda model: HttpSender(http_url, model),
            "gRPC": lambda model: GrpcSender(server.grpc_url, model),
            "shared memory": lambda model: HttpSender(http_url, model, place=shared),
        }
        pairs = {}
        for kind, (way, maker) in itertools.product(kinds, makers.items()):
            senders = [
                stack.enter_context(contextlib.closing(maker(name_of(kind, cached)))) for cached in (True, False)
            ]
            pairs[f"{kind}, {way}"] = (senders[0], senders[1])
        yield pairs


@contextlib.contextmanager
def threads(folder: Path, *, in_processes: bool = False) -> Iterator[Pairs]:
    with short_home():
        triton = Triton(config=local_config(cache_config=CACHE))
        bind(triton, in_processes=in_processes)
        with running(triton), asking(triton, KINDS, triton.get_access_token()) as pairs:
            yield pairs


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Pairs]:
    with threads(folder, in_processes=True) as pairs:
        yield pairs


@contextlib.contextmanager
def remote(folder: Path) -> Iterator[Pairs]:
    with short_home():
        server = Triton(config=local_config(cache_config=CACHE))
        token = server.get_access_token()
        with (
            running(server),
            RemoteTriton(str(server.http_url), access_token=token, response_cache_bytes=BUDGET) as triton,
        ):
            bind(triton)
            with asking(server, KINDS, token) as pairs:
                yield pairs


def with_cache() -> list[str]:
    """Return the options that give a server Triton's cache."""
    return [f"--cache-config=local,size={BUDGET}", f"--cache-directory={find_tritonserver().caches_dir}"]


@contextlib.contextmanager
def drop_in(folder: Path) -> Iterator[Pairs]:
    repository = folder / "models"
    repository.mkdir()
    with tempfile.TemporaryDirectory(prefix="pt") as sockets, contextlib.ExitStack() as stack:
        options = ["--endpoint", sockets, "--input", "x:float32:-1", "--input", "text:str:-1:optional"]
        options += ["--output", "y:float32:-1", "--output", "about:int64:2", "--output", "call:int64:1"]
        options += ["--max-batch-size", "8"]
        for cached in (True, False):
            more = ["--response-cache", str(BUDGET)] if cached else []
            name = name_of("plain", cached)
            with pytest.raises(SystemExit) as ended:
                run_command(["add", "--model-repository", str(repository), "--name", name, *options, *more])
            assert not ended.value.code
        server = stack.enter_context(plain_server(folder, repository, *with_cache()))
        for cached in (True, False):
            name = name_of("plain", cached)
            model = read_description(repository / name / "1" / "pytriton.json")
            stack.enter_context(running_worker(plain, model, endpoint_path(Path(sockets), name, 1)))
        yield stack.enter_context(asking(server, ("plain",)))


MODEL = """
import itertools

import numpy as np
import triton_python_backend_utils as pb_utils

calls = itertools.count()


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        import json
        number = next(calls)
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        text = pb_utils.get_input_tensor_by_name(request, "text")
        if x.ravel()[0] < 0:
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError(f"negative, call {number}"))
        given = json.loads(request.parameters()).get("scale", 1)
        scale = float(given) * (10 if isinstance(given, str) else 1)
        length = 0
        if text is not None:
            length = sum(len(each) * (place + 1) for place, each in enumerate(text.as_numpy().ravel()))
        outputs = {
            "y": x * np.float32(scale),
            "about": np.full((len(x), 2), (x.shape[1], length), np.int64),
            "call": np.full((len(x), 1), number, np.int64),
        }
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, outputs[name]) for name in outputs if name in wanted])
"""
MODEL_CONFIG = """backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 }
input { name: "text" data_type: TYPE_STRING dims: -1 optional: true }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
output { name: "about" data_type: TYPE_INT64 dims: 2 }
output { name: "call" data_type: TYPE_INT64 dims: 1 }
"""
PARAMETER = f'parameters {{ key: "PYTRITON_RESPONSE_CACHE_BYTES" value {{ string_value: "{BUDGET}" }} }}'


def write_python_models(repository: Path) -> None:
    for cached in (True, False):
        name = name_of("plain", cached)
        config = f'name: "{name}"\n{MODEL_CONFIG}' + (PARAMETER if cached else "")
        python_models.write(repository, name, MODEL, config)


@contextlib.contextmanager
def python_model(folder: Path) -> Iterator[Pairs]:
    repository = folder / "models"
    write_python_models(repository)
    with (
        python_models.served(repository, cache_config=CACHE) as triton,
        asking(triton, ("plain",), triton.get_access_token()) as pairs,
    ):
        yield pairs


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[Pairs]:
    repository = folder / "models"
    repository.mkdir()
    write_python_models(folder / "originals")
    with tempfile.TemporaryDirectory(prefix="pt") as sockets:
        for original in (folder / "originals").iterdir():
            convert(original, "--endpoint", sockets, "--to", repository / original.name)
        with (
            hosts_at(Path(sockets), folder / "hosts.log"),
            plain_server(folder, repository, *with_cache()) as server,
            asking(server, ("plain",)) as pairs,
        ):
            yield pairs


@contextlib.contextmanager
def in_process(folder: Path) -> Iterator[Pairs]:
    server = inprocess.Server(cache_config={"local": {"size": BUDGET}})
    bind(server)
    with server:
        yield {
            f"{kind}, in process": (InProcessSender(server, kind), InProcessSender(server, name_of(kind, False)))
            for kind in KINDS
        }


WAYS = {
    "threads": threads,
    "processes": processes,
    "remote": remote,
    "drop-in": drop_in,
    "model.py": python_model,
    "hosts": hosts,
    "in-process": in_process,
}

# ---- the same answers ------------------------------------------------------------------------------------------------


def requests_of(random_: random.Random) -> list[RawRequest]:
    """Return requests that are easily taken for each other."""
    values = np.array([random_.randint(1, 9) for _ in range(6)], np.float32)
    payloads = [values.tobytes(), (-values).tobytes()]
    texts = [None, RawTensor("BYTES", (1, 2), strings(b"ab", b"c")), RawTensor("BYTES", (1, 2), strings(b"a", b"bc"))]
    outputs = [(), ("y",), ("about", "y"), ("call",)]
    parameters: list[dict[str, Any]] = [{}, {"scale": 2}, {"scale": 3}, {"scale": "2"}, {"scale": 2, "other": True}]
    made = []
    for _ in range(24):
        text = random_.choice(texts)
        shape = (1, 6) if text is not None else random_.choice([(2, 3), (3, 2), (6, 1), (1, 6)])
        inputs = {"x": RawTensor("FP32", shape, random_.choice(payloads))}
        if text is not None:
            inputs["text"] = text
        request = RawRequest(inputs, random_.choice(outputs), parameters=random_.choice(parameters))
        made.append(request)
    return made


def key_of(request: RawRequest) -> str:
    return repr((sorted(request.inputs.items()), sorted(request.outputs), sorted(request.parameters.items())))


@pytest.mark.parametrize("way", WAYS)
def test_same_answers_with_cache_and_without(way: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("PYTRITON_CACHE_SEED", "1"))
    with WAYS[way](tmp_path) as pairs:
        for name, (cached, always) in pairs.items():
            random_ = random.Random(f"{seed} {name}")
            pool = requests_of(random_)
            given: dict[str, Answer] = {}
            for turn in range(72):
                request = random_.choice(pool)
                found, expected = cached(request), always(request)
                where = f"{way}, {name}, seed {seed}, turn {turn}: {request}"
                assert comparable(found) == comparable(expected), where
                before = given.setdefault(key_of(request), found)
                if found.error:
                    # It was executed again.
                    assert before is found or before.error != found.error, where
                else:
                    assert before.outputs == found.outputs, where


def comparable(answer: Answer) -> tuple[dict[str, RawTensor], str, str]:
    outputs = {name: tensor for name, tensor in answer.outputs.items() if name != "call"}
    # It begins with the name of the model, and ends with the number of the call.
    return outputs, answer.code, answer.error.replace("-always'", "'").partition(", call")[0]


# ---- Triton's own cache ----------------------------------------------------------------------------------------------

BLOCK = "\nresponse_cache { enable: true }\n"


@pytest.mark.parametrize("has_cache", [True, False])
def test_tritons_cache_is_refused_for_a_drop_in_model(has_cache: bool, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    with tempfile.TemporaryDirectory(prefix="pt") as sockets:
        options = ["--endpoint", sockets, "--input", "x:float32:-1", "--output", "y:float32:-1"]
        with pytest.raises(SystemExit):
            run_command(["add", "--model-repository", str(repository), "--name", "edited", *options])
        with (repository / "edited" / "config.pbtxt").open("a") as config:
            config.write(BLOCK)
        options = ["--model-control-mode=explicit", *(with_cache() if has_cache else ())]
        with plain_server(tmp_path, repository, *options) as server:
            status, told = server.load("edited")
    assert (status == 200) is not has_cache
    if has_cache:
        assert "response_cache { enable: true }" in str(told)
        assert "--response-cache" in str(told)


def test_tritons_cache_is_refused_for_a_model_on_workers(tmp_path: Path) -> None:
    python_models.write(tmp_path, "block", MODEL, MODEL_CONFIG + BLOCK)
    python_models.write(tmp_path, "number", MODEL, MODEL_CONFIG + PARAMETER.replace(str(BUDGET), "much"))
    with python_models.served(tmp_path, cache_config=CACHE, exit_on_error=False) as triton:
        told = {name: str(python_models.ask(triton, "load", name)[1]) for name in ("block", "number")}
    assert "PYTRITON_RESPONSE_CACHE_BYTES, with a number of bytes" in told["block"]
    assert "expected a number of bytes, got 'much'" in told["number"]
