"""One model in every way to serve it: `echo`, which turns texts back to front, and says how many requests it had.

Each way is a context manager that gives what sends a request to it, by name. Batches are formed as `Batching` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.decorators import batch, group_by_keys
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy_backend import read_description
from pytriton.proxy_backend.cli.app import run as run_command
from pytriton.triton import ProcessWorker, RemoteTriton, Triton
from support import python_models
from support.bare_server import running_worker
from support.faults.plain_server import plain_server
from support.isolation.echo import DTYPES, SERVED, SHAPES, TEXTS, echo, echo_all
from support.isolation.raw_requests import GrpcSender, HttpSender, InProcessSender, Send, SharedInputs
from support.paths import TESTS
from support.python_models.converted import convert, hosts_at
from support.python_models.python_backend import why_no_python_backend
from support.servers import server_version
from support.serving import local_config, running, short_home

Senders: TypeAlias = Mapping[str, Send]


@dataclass
class Batching:
    """How Triton forms batches."""

    size: int  # rows with which one is full
    delay_us: int  # how long one waits to be full


# ---- the model ------------------------------------------------------------------------------------------------------


def plain(requests: Any) -> list[Any]:
    return echo_all({request.request_id or str(place): request for place, request in enumerate(requests)})


@group_by_keys
@batch
def by_rows(**inputs: Any) -> dict[str, Any]:
    [rows] = {len(array) for array in inputs.values()}
    return echo(inputs, rows)


async def coroutine(requests: Any) -> list[Any]:
    await asyncio.sleep(0)
    return plain(requests)


async def stream(requests: Any) -> AsyncIterator[list[Any]]:
    yield plain(requests)


CALLABLES: Mapping[str, Callable[..., Any]] = {"plain": plain, "batch": by_rows, "async": coroutine}


def make(name: str) -> Callable[..., Any]:
    """Return a callable, for processes."""
    return stream if name == "stream" else CALLABLES[name]


INPUTS = [Tensor(name=name, dtype=_dtype, shape=SHAPES[name], optional=True) for name, _dtype in DTYPES.items()]
OUTPUTS = [Tensor(name=f"{name}_out", dtype=_dtype, shape=SHAPES[name]) for name, _dtype in DTYPES.items()]
OUTPUTS += [Tensor(name=name, dtype=_dtype, shape=(1,)) for name, _dtype in SERVED.items()]

_TYPES = {"O": "STRING", "i": "INT32", "f": "FP16"}
_MODEL = f"""
import sys

import triton_python_backend_utils as pb_utils

sys.path.insert(0, {str(TESTS)!r})
from support.isolation.echo import echo_all


class TritonPythonModel:
    def execute(self, requests):
        asked = {{}}
        for place, request in enumerate(requests):
            asked[request.request_id() or str(place)] = {{each.name(): each.as_numpy() for each in request.inputs()}}
        answers = []
        for request, outputs in zip(requests, echo_all(asked)):
            if isinstance(outputs, ValueError):
                answers.append(pb_utils.InferenceResponse([], error=pb_utils.TritonError(str(outputs))))
                continue
            wanted = request.requested_output_names()
            answers.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, array) for name, array in outputs.items() if name in wanted]
            ))
        return answers
"""


def _config_text(batching: Batching | None) -> str:
    lines = ["max_batch_size: 64"]
    for kind, tensors in (("input", INPUTS), ("output", OUTPUTS)):
        for tensor in tensors:
            dims = ", ".join(map(str, tensor.shape))
            more = " optional: true" if kind == "input" else ""
            name = _TYPES[np.dtype(tensor.dtype if tensor.dtype is not bytes else object).kind]
            lines.append(f'{kind} {{ name: "{tensor.name}" data_type: TYPE_{name} dims: [ {dims} ]{more} }}')
    if batching is not None:
        limits = f"preferred_batch_size: {batching.size} max_queue_delay_microseconds: {batching.delay_us}"
        lines.append(f"dynamic_batching {{ {limits} }}")
    return "\n".join(lines)


# ---- ways to ask a server -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _asking(server: Any, *models: str, token: str | None = None) -> Iterator[dict[str, Send]]:
    http_url, grpc_url = getattr(server, "http_url", None) or server.url, server.grpc_url
    with contextlib.ExitStack() as stack:
        senders: dict[str, Send] = {}
        for model in models:
            shared = stack.enter_context(contextlib.closing(SharedInputs(http_url, f"{model}-inputs", token)))
            found: dict[str, HttpSender | GrpcSender] = {
                "HTTP": HttpSender(http_url, model),
                "gRPC": GrpcSender(grpc_url, model),
                "shared memory": HttpSender(http_url, model, place=shared),
            }
            for name, sender in found.items():
                senders[f"{model}, {name}"] = stack.enter_context(contextlib.closing(sender))
        yield senders


# ---- ways to serve --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def threads(folder: Path, batching: Batching, *, in_processes: bool = False) -> Iterator[Senders]:
    """Bind callables, in threads of this process or in processes of their own."""
    with short_home():
        triton = Triton(config=local_config())
        _bind(triton, batching, in_processes=in_processes)
        with running(triton), _asking_bound(triton) as senders:
            yield senders


def _bind(triton: Any, batching: Batching, *, in_processes: bool = False) -> None:
    batcher = DynamicBatcher(preferred_batch_size=[batching.size], max_queue_delay_microseconds=batching.delay_us)
    for name in (*CALLABLES, "stream"):
        infer = ProcessWorker(make, (name,)) if in_processes else make(name)
        config = ModelConfig(max_batch_size=64, batcher=batcher, decoupled=name == "stream")
        triton.bind(name, infer, INPUTS, OUTPUTS, config=config)


@contextlib.contextmanager
def _asking_bound(triton: Triton) -> Iterator[Senders]:
    with (
        _asking(triton, *CALLABLES, token=triton.get_access_token()) as senders,
        contextlib.closing(GrpcSender(triton.grpc_url, "stream", stream=True)) as in_streams,
    ):
        yield {**senders, "stream, gRPC": in_streams}


@contextlib.contextmanager
def processes(folder: Path, batching: Batching) -> Iterator[Senders]:
    """Bind callables in processes of their own."""
    with threads(folder, batching, in_processes=True) as senders:
        yield senders


@contextlib.contextmanager
def remote(folder: Path, batching: Batching) -> Iterator[Senders]:
    """Serve on a server that was started before."""
    with short_home():
        server = Triton(config=local_config())
        with running(server), RemoteTriton(str(server.http_url), access_token=server.get_access_token()) as triton:
            _bind(triton, batching)
            with _asking_bound(server) as senders:
                yield senders


@contextlib.contextmanager
def _dropped_in(folder: Path, batching: Batching, flavour: str) -> Iterator[Senders]:
    repository = folder / "models"
    repository.mkdir()
    with tempfile.TemporaryDirectory(prefix="pt") as sockets:
        options = ["--flavour", flavour, "--endpoint", sockets, "--max-batch-size", "64"]
        options += ["--max-queue-delay-us", str(batching.delay_us), "--preferred-batch-size", str(batching.size)]
        for name, dtype in DTYPES.items():
            kind = "str" if name in TEXTS else dtype.name
            dims = ",".join(map(str, SHAPES[name]))
            options += ["--input", f"{name}:{kind}:{dims}:optional", "--output", f"{name}_out:{kind}:{dims}"]
        options += ["--output", "served:int32:1", "--output", "ids:str:1"]
        with pytest.raises(SystemExit) as ended:
            run_command(["add", "--model-repository", str(repository), "--name", "echo", *options])
        assert not ended.value.code
        prefix = f"--backend-config=python,shm-region-prefix-name=pt{folder.name}"
        with plain_server(folder, repository, prefix) as server:
            model = read_description(repository / "echo" / "1" / "pytriton.json")
            end = "sock" if flavour == "native" else "zmq"
            address: Any = Path(sockets) / f"echo.1.{end}"
            if flavour == "python":
                address = f"ipc://{address}"
            with running_worker(plain, model, address), _asking(server, "echo") as senders:
                yield senders


@contextlib.contextmanager
def drop_in(folder: Path, batching: Batching) -> Iterator[Senders]:
    """Serve from somebody else's repository, by the native proxy."""
    with _dropped_in(folder, batching, "native") as senders:
        yield senders


@contextlib.contextmanager
def python_proxy(folder: Path, batching: Batching) -> Iterator[Senders]:
    """Serve from somebody else's repository, by the Python proxy."""
    if why_no_python_backend():
        pytest.skip(why_no_python_backend())
    if server_version() < (2, 54) and np.__version__ >= "2":
        pytest.skip("the Python backend of this server has no strings for numpy 2")
    with _dropped_in(folder, batching, "python") as senders:
        yield senders


@contextlib.contextmanager
def python_model(folder: Path, batching: Batching) -> Iterator[Senders]:
    """Serve a `model.py` on workers, and an ensemble of it."""
    repository = folder / "models"
    python_models.write(repository, "echo", _MODEL, f'backend: "python"\n{_config_text(batching)}')
    maps = [f'input_map {{ key: "{tensor.name}" value: "{tensor.name}" }}' for tensor in INPUTS]
    maps += [f'output_map {{ key: "{tensor.name}" value: "{tensor.name}" }}' for tensor in OUTPUTS]
    step = f'ensemble_scheduling {{ step {{ model_name: "echo" model_version: -1 {" ".join(maps)} }} }}'
    (repository / "ensemble" / "1").mkdir(parents=True)
    (repository / "ensemble" / "config.pbtxt").write_text(f'platform: "ensemble"\n{_config_text(None)}\n{step}')
    with (
        python_models.served(repository) as triton,
        _asking(triton, "echo", "ensemble", token=triton.get_access_token()) as senders,
    ):
        yield senders


@contextlib.contextmanager
def hosts(folder: Path, batching: Batching) -> Iterator[Senders]:
    """Serve a converted `model.py` from somebody else's repository, by a process of the command `hosts`."""
    original, repository = folder / "original", folder / "models"
    repository.mkdir()
    python_models.write(original, "echo", _MODEL, f'name: "echo"\nbackend: "python"\n{_config_text(batching)}')
    with tempfile.TemporaryDirectory(prefix="pt") as sockets:
        convert(original / "echo", "--endpoint", sockets, "--to", repository / "echo")
        with (
            hosts_at(Path(sockets), folder / "hosts.log"),
            plain_server(folder, repository) as server,
            _asking(server, "echo") as senders,
        ):
            yield senders


@contextlib.contextmanager
def in_process(folder: Path, batching: Batching) -> Iterator[Senders]:
    """Bind callables to a server in this process."""
    server = inprocess.Server()
    _bind(server, batching)
    with server:
        yield {f"{name}, in process": InProcessSender(server, name) for name in (*CALLABLES, "stream")}


WAYS = {
    "threads": threads,
    "processes": processes,
    "remote": remote,
    "drop-in": drop_in,
    "python-proxy": python_proxy,
    "model.py": python_model,
    "hosts": hosts,
    "in-process": in_process,
}
