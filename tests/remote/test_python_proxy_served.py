"""The Python proxy in Triton's own Python backend, in a tritonserver that somebody else starts."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient, ModelClient
from pytriton.proxy_backend import Worker, read_description
from pytriton.proxy_backend.cli.app import run as run_command
from support.bare_server import running_worker
from support.faults.plain_server import PlainServer, plain_server
from support.python_models.python_backend import why_no_python_backend
from support.python_proxy import wait_line, worker_process
from support.servers import since
from support.waiting import PATIENCE_S, eventually

DTYPES = ("bool", "uint8", "int16", "int64", "uint64", "float16", "float32", "float64")


pytestmark = pytest.mark.skipif(bool(why_no_python_backend()), reason=why_no_python_backend() or "it can run")


class Served:
    """A server, its repository, and the folder of its endpoints."""

    def __init__(self, server: PlainServer, repository: Path, sockets: Path) -> None:
        self.server = server
        self.repository = repository
        self.sockets = sockets

    def add(self, name: str, *options: str) -> None:
        """Puts a model there and loads it."""
        add(self.repository, self.sockets, name, *options)
        status, text = self.server.load(name)
        assert status == 200, text

    def address(self, name: str) -> str:
        return f"ipc://{self.sockets}/{name}.1.zmq"

    def worker(self, name: str, infer: Any) -> AbstractContextManager[Worker]:
        model = read_description(self.repository / name / "1" / "pytriton.json")
        return running_worker(infer, model, self.address(name))


def add(repository: Path, sockets: Path, name: str, *options: str) -> None:
    arguments = ["add", "--flavour", "python", "--model-repository", str(repository), "--name", name]
    with pytest.raises(SystemExit) as ended:
        run_command([*arguments, "--endpoint", str(sockets), *options])
    assert not ended.value.code


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    repository = folder / "models"
    repository.mkdir()
    prefix = f"--backend-config=python,shm-region-prefix-name=pt{folder.name}"
    with tempfile.TemporaryDirectory(prefix="pt") as sockets:
        # All at once: each starts a process of its own.
        numbers = [part for dtype in DTYPES for part in ("--input", f"{dtype}:{dtype}:-1")]
        numbers += [part for dtype in DTYPES for part in ("--output", f"{dtype}_out:{dtype}:-1")]
        add(repository, Path(sockets), "numbers", *numbers)
        add(repository, Path(sockets), "model", "--input", "x:float32:-1", "--output", "y:float32:-1")
        add(repository, Path(sockets), "stream", "--input", "n:int32:1", "--output", "i:int32:1", "--decoupled")
        options = ("--model-control-mode=explicit", "--load-model=*", prefix)
        with plain_server(folder, repository, *options) as server:
            yield Served(server, repository, Path(sockets))


def test_numeric_tensors_of_every_type_survive(served: Served) -> None:
    """With numpy 1, and with numpy 2 under a stub that was built for 1."""

    def infer(requests: Any) -> Any:
        return [{f"{name}_out": array[:, ::-1] for name, array in request.items()} for request in requests]

    values = {dtype: np.array([[0, 1, 1], [1, 0, 3]]).astype(dtype) for dtype in DTYPES}
    empty = {dtype: np.zeros((1, 0), dtype) for dtype in DTYPES}
    with served.worker("numbers", infer), ModelClient(served.server.url, "numbers") as client:
        for batch in (values, empty):
            result = client.infer_batch(**batch)
            for dtype, array in batch.items():
                assert result[f"{dtype}_out"].dtype == array.dtype
                np.testing.assert_array_equal(result[f"{dtype}_out"], array[:, ::-1])
        large = {dtype: np.ones((4, 100_000), dtype) for dtype in DTYPES}
        result = client.infer_batch(**large)
        assert all((result[f"{dtype}_out"] == 1).all() for dtype in DTYPES)


def test_tritons_cache_is_refused(served: Served) -> None:
    add(served.repository, served.sockets, "edited", "--input", "x:float32:-1", "--output", "y:float32:-1")
    with (served.repository / "edited" / "config.pbtxt").open("a") as config:
        config.write("response_cache { enable: true }\n")
    status, text = served.server.load("edited")
    assert status == 400
    assert "its configuration has response_cache { enable: true }" in str(text)


def test_errors_and_the_absence_of_workers_reach_the_client(served: Served) -> None:
    def infer(requests: Any) -> Any:
        raise ValueError("not today")

    row = ("FP32", [1, 1], [1])
    with served.worker("model", infer):
        status, text = served.server.infer("model", x=row)
        assert status == 500
        assert "ValueError: not today" in text


def test_a_killed_worker_and_the_one_that_follows(served: Served, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with worker_process(tmp_path, served.address("model")) as process:
            assert served.server.infer("model", x=("FP32", [1, 2], [1, 2])) == (200, {"y": [2, 4]})
            lost = pool.submit(served.server.infer, "model", x=("FP32", [1, 1], [-1]))
            wait_line(process, "busy")
            process.send_signal(signal.SIGKILL)
            status, text = lost.result(PATIENCE_S)
            assert status == 503
            assert f"pid {process.pid}" in text
        with worker_process(tmp_path, served.address("model")):
            for value in range(5):
                assert served.server.infer("model", x=("FP32", [1, 1], [value])) == (200, {"y": [2 * value]})


def test_streams_reach_the_client_response_by_response(served: Served) -> None:
    async def count(requests: Any) -> Any:
        for index in range(int(requests[0]["n"][0, 0])):
            yield [{"i": np.array([[index]], np.int32)} for _ in requests]

    with served.worker("stream", count), DecoupledModelClient(served.server.grpc_url, "stream") as client:
        for length in (5, 0, 50):
            found = [int(part["i"][0]) for part in client.infer_sample(np.array([length], np.int32))]
            assert found == list(range(length))


@since(2, 67)
def test_a_model_is_ready_while_it_has_a_worker(served: Served) -> None:
    def ready() -> int:
        return served.server.call("GET", "/v2/models/model/ready")[0]

    def infer(requests: Any) -> Any:
        return [{"y": request["x"]} for request in requests]

    eventually(lambda: ready() == 400)
    with served.worker("model", infer):
        eventually(lambda: ready() == 200)
    eventually(lambda: ready() == 400)


def test_strings_are_served_or_refused_when_the_model_is_loaded(served: Served) -> None:
    add(served.repository, served.sockets, "text", "--input", "t:str:1", "--output", "t:str:1")
    status, text = served.server.load("text")
    if status == 200:
        with served.worker("text", lambda requests: [{"t": request["t"]} for request in requests]):
            assert served.server.infer("text", t=("BYTES", [1, 1], ["naïve"])) == (200, {"t": ["naïve"]})
        return
    assert int(np.__version__.split(".")[0]) >= 2, text
    error = text["error"] if isinstance(text, dict) else text
    assert "string tensors (t" in error
    assert "numpy<2" in error
    assert "native flavour" in error


def test_a_model_is_unloaded_and_loaded_again(served: Served) -> None:
    def double(requests: Any) -> Any:
        return [{"y": request["x"] * 2} for request in requests]

    row = ("FP32", [1, 2], [1, 2])
    with served.worker("model", double):
        assert served.server.infer("model", x=row) == (200, {"y": [2, 4]})
        assert served.server.unload("model")[0] == 200
        served.server.wait_unloaded("model")
        assert served.server.load("model")[0] == 200
        # The worker attaches again by itself.
        assert served.server.infer("model", x=row) == (200, {"y": [2, 4]})
