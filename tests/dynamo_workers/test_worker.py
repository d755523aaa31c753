"""Models as workers of NVIDIA Dynamo, asked through its front end: `hatch run dynamo:test`."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("dynamo.frontend")

import grpc
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from pytriton.client import AsyncioModelClient, DecoupledModelClient, FuturesModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.clients.dynamo import Cell, front_end, tensor
from support.http import call
from support.processes import free_ports, require, while_running
from support.serving import local_config, running
from support.waiting import PATIENCE_S, drive, eventually

pytestmark = [pytest.mark.slow(seconds=60), pytest.mark.filterwarnings("ignore")]

APP = """
import os, time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pytriton.decorators import Shape, model

Rows = Annotated[NDArray[np.float32], Shape("batch", 4)]
Half = Annotated[NDArray[np.float16], Shape(2)]


@model(batched=True, max_batch_size=64)
def add(a: Rows, b: Rows) -> Rows:
    return a + b


@model
def shout(text: str) -> str:
    if text == "bad":
        raise ValueError("no such text")
    return text.upper()


@model
def double(x: Half) -> Half:
    return x * 2


@model
def words(text: str) -> Iterator[str]:
    try:
        for word in text.split():
            yield word
        while "for ever" in text:
            time.sleep(0.01)
            yield "more"
    finally:
        Path(os.environ["PYTRITON_HOME"], "left").touch()


@model
def process(text: str) -> int:
    time.sleep(0.005)
    return os.getpid()
"""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    folder = tmp_path_factory.mktemp("dynamo")
    file = folder / "app.py"
    file.write_text(APP)
    with front_end(folder) as cell, cell.serving(file) as (_, home):
        cell.environment["HOME_OF_TEST"] = str(home)
        yield cell


def text(value: str) -> list[grpcclient.InferInput]:
    return [tensor("text", np.array([value.encode()], object))]


def ask_stream(cell: Cell, model: str, inputs: list[Any], **options: Any) -> tuple[Any, queue.Queue[Any]]:
    client = grpcclient.InferenceServerClient(cell.url)
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result))
    client.async_stream_infer(model, inputs, **options)
    return client, answers


def test_tensors_of_tritonclient(cell: Cell) -> None:
    ones = np.ones((3, 4), np.float32)
    with cell.client("add", "shout", "double") as client:
        added = client.infer("add", [tensor("a", ones), tensor("b", 2 * ones)], request_id="one")
        shouted = client.infer("shout", text("h\u00e9"), outputs=[grpcclient.InferRequestedOutput("output")])
        doubled = client.infer("double", [tensor("x", np.array([1.5, 2], np.float16))])
        metadata = client.get_model_metadata("add")

    np.testing.assert_array_equal(added.as_numpy("output"), 3 * ones)
    assert added.get_response().id == "one"
    assert shouted.as_numpy("output").tolist() == ["H\u00c9".encode()]
    assert doubled.as_numpy("output").tolist() == [3, 4]
    assert doubled.as_numpy("output").dtype == np.float16
    assert [(it.name, it.datatype, list(it.shape)) for it in metadata.inputs] == [
        ("a", "FP32", [-1, 4]), ("b", "FP32", [-1, 4])
    ]  # fmt: skip


def test_our_clients(cell: Cell) -> None:
    url, ones = f"grpc://{cell.url}", np.ones((2, 4), np.float32)
    with cell.client("add", "shout", "words", "double"):
        pass
    with ModelClient(url, "add") as client:
        np.testing.assert_array_equal(client.infer_batch(ones, ones)["output"], 2 * ones)
    with FuturesModelClient(url, "shout") as futures:
        assert futures.infer_sample("later").result(PATIENCE_S)["output"].tolist() == [b"LATER"]
    with DecoupledModelClient(url, "words") as stream:
        assert [part["output"].item() for part in stream.infer_sample("one two")] == [b"one", b"two"]

    async def main() -> None:
        async with AsyncioModelClient(url, "double") as client:
            answer = await client.infer_sample(np.array([1, 2], np.float16))
            assert answer["output"].tolist() == [2, 4]

    drive(main)


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        ("shout", text("bad"), "Internal: INTERNAL: model 'shout': the inference callable raised ValueError: no such"),
        ("shout", [tensor("text", np.array([1], np.int32))], "InvalidRequest: .* data-type is 'INT32', but model"),
        ("add", [tensor("a", np.ones((1, 4), np.float32))], r"InvalidRequest: .* missing required input.* \['b'\]"),
        ("add", [tensor(name, np.ones((65, 4), np.float32)) for name in "ab"], "InvalidRequest: .*64"),
        ("unknown", text("x"), "Model 'unknown' not found"),
    ],
)
def test_errors_say_what_the_server_says(cell: Cell, model: str, inputs: list[Any], expected: str) -> None:
    with cell.client("add", "shout") as client, pytest.raises(InferenceServerException, match=expected):
        client.infer(model, inputs)
    with (
        pytest.raises(PyTritonClientInferenceServerError, match="no such text"),
        ModelClient(f"grpc://{cell.url}", "shout") as ours,
    ):
        ours.infer_sample("bad")


def test_streams_end_as_the_caller_asks(cell: Cell) -> None:
    with cell.client("words"):
        pass
    for wants_end, expected in ((False, ["one", "two"]), (True, ["one", "two", None])):
        client, answers = ask_stream(
            cell, "words", text("one two"), request_id="w", enable_empty_final_response=wants_end
        )
        found = [answers.get(timeout=PATIENCE_S) for _ in expected]
        client.stop_stream()
        assert answers.empty()
        assert all(answer.get_response().id == "w" for answer in found)
        outputs = [answer.as_numpy("output") for answer in found]
        assert [None if output is None else output.item().decode() for output in outputs] == expected
        ends = [answer.get_response().parameters["triton_final_response"].bool_param for answer in found]
        assert ends == [output is None for output in outputs]


def test_the_callable_learns_that_the_caller_has_left(cell: Cell) -> None:
    with cell.client("words"):
        pass
    left = Path(cell.environment["HOME_OF_TEST"], "left")
    client, answers = ask_stream(cell, "words", text("for ever"))
    assert answers.get(timeout=PATIENCE_S).as_numpy("output").item() == b"for"
    left.unlink(missing_ok=True)

    client.stop_stream(cancel_requests=True)

    eventually(left.exists)


def test_what_kills_a_server_or_its_worker_loses_no_request(cell: Cell, tmp_path: Path) -> None:
    """Every request is answered, or told an error; afterwards the other server answers them all."""
    file = tmp_path / "app.py"
    file.write_text(APP)
    outcomes: Counter[str] = Counter()
    processes: set[int] = set()
    stop, count = threading.Event(), 0

    def call() -> None:
        nonlocal count
        with grpcclient.InferenceServerClient(cell.url) as client:
            while not stop.is_set():
                count += 1
                try:
                    answer = client.infer("process", text("x"), client_timeout=PATIENCE_S)
                    processes.add(int(answer.as_numpy("output").item()))
                    outcomes["answered"] += 1
                except InferenceServerException as error:
                    outcomes["late" if "Deadline" in str(error) else "told"] += 1

    callers = [threading.Thread(target=call) for _ in range(4)]
    with cell.client("process"), cell.serving(file) as (second, _):

        def both_answer() -> bool:
            assert second.poll() is None
            return len(processes) == 2

        for caller in callers:
            caller.start()
        try:
            eventually(both_answer)
            worker = eventually(lambda: worker_of(second.pid))
            os.kill(worker, signal.SIGKILL)
            # Another one takes its place, and is found.
            eventually(lambda: worker_of(second.pid) not in (None, worker))
            processes.clear()
            eventually(both_answer)

            second.kill()
            killed = outcomes.copy()
            eventually(lambda: outcomes["answered"] > killed["answered"] + 100)
        finally:
            stop.set()
            for caller in callers:
                caller.join(PATIENCE_S)
        assert not any(caller.is_alive() for caller in callers)
        assert outcomes.total() == count
        assert outcomes["late"] == 0

        # The front end forgets it when its lease ends.
        def all_answered() -> bool:
            try:
                return all(client.infer("process", text("x")) for _ in range(20))
            except InferenceServerException:
                return False

        with cell.client("process") as client:
            eventually(all_answered)


def worker_of(server: int) -> int | None:
    """Return the process of the worker that runs beside a server."""
    found = subprocess.run(["ps", "-eww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    for line in found.stdout.splitlines():
        process, parent, arguments = line.split(None, 2)
        if int(parent) == server and " pytriton dynamo grpc://" in arguments:
            return int(process)
    return None


def test_any_server_by_its_address(cell: Cell, tmp_path: Path) -> None:
    """Parameters reach the callable, versions are told apart, brain floats keep their bits, and models come and go."""

    def scale(requests: Any) -> list[dict[str, npt.NDArray[Any]]]:
        return [{"y": request["x"] * np.float32(request.parameters.get("by", 1))} for request in requests]

    x, y = Tensor((2,), np.float32, "x"), Tensor((2,), np.float32, "y")
    triton = Triton(config=local_config())
    config = ModelConfig(max_batch_size=4)
    triton.bind("scale", scale, [x], [y], config=config)
    triton.bind(
        "scale",
        lambda requests: [{"y": -request["x"]} for request in requests],
        [x],
        [y],
        config=config,
        model_version=3,
    )
    with running(triton):
        command = [sys.executable, "-m", "pytriton", "dynamo", str(triton.grpc_url)]
        token = {"PYTRITON_ACCESS_TOKEN": triton.get_access_token() or ""}
        with while_running(command, env={**cell.environment, **token}), cell.client("scale", "scale:1") as client:
            row = [tensor("x", np.array([[1, 2]], np.float32))]
            assert client.infer("scale", row).as_numpy("y").tolist() == [[-1, -2]]
            assert client.infer("scale:1", row, parameters={"by": 3}).as_numpy("y").tolist() == [[3, 6]]
            assert client.infer("scale:1", row, parameters={"by": 0.5}).as_numpy("y").tolist() == [[0.5, 1]]

            triton.bind("later", scale, [x], [y], config=config)
            eventually(lambda: cell.has(client, "later"))
            triton.unbind("scale", model_version=3)
            eventually(lambda: not cell.has(client, "scale:1"))

            def is_the_older_one() -> bool:
                # The name is withdrawn before it is registered for the other version.
                with contextlib.suppress(InferenceServerException):
                    return bool(client.infer("scale", row).as_numpy("y").tolist() == [[1, 2]])
                return False

            eventually(is_the_older_one)
            triton.unbind("later")
            eventually(lambda: not cell.has(client, "later"))
        with cell.client() as client:
            eventually(lambda: not cell.has(client, "scale"))


def test_brain_floats_keep_their_bits(cell: Cell) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    triton = Triton(config=local_config())
    tensors = [Tensor((3,), bfloat16, "a")]
    triton.bind(
        "same",
        lambda requests: [dict(request) for request in requests],
        tensors,
        tensors,
        config=ModelConfig(batching=False),
    )
    request = service_pb2.ModelInferRequest(model_name="same")
    request.inputs.add(name="a", datatype="BF16", shape=[3])
    request.raw_input_contents.append(bytes((0x80, 0x3F, 0xC0, 0x3F, 0xFF, 0x7F)))
    with running(triton):
        command = [sys.executable, "-m", "pytriton", "dynamo", str(triton.grpc_url), "--model=same"]
        token = {"PYTRITON_ACCESS_TOKEN": triton.get_access_token() or ""}
        with (
            while_running(command, env={**cell.environment, **token}),
            cell.client("same"),
            grpc.insecure_channel(cell.url) as channel,
        ):
            answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)

    assert answer.outputs[0].datatype == "BF16"
    assert answer.raw_output_contents[0] == request.raw_input_contents[0]


def test_found_by_etcd(tmp_path: Path) -> None:
    etcd = require("etcd", "etcd-server")
    url, peers = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    command = [etcd, "--data-dir", tmp_path / "etcd", "--listen-client-urls", url, "--advertise-client-urls", url]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"default={peers}", "--logger", "zap", "--log-level", "error"]
    file = tmp_path / "app.py"
    file.write_text(APP)
    variables = [("DYN_DISCOVERY_BACKEND", "etcd"), ("ETCD_ENDPOINTS", url)]
    with while_running(command):
        eventually(lambda: answers(url))
        with front_end(tmp_path, variables) as cell:
            with cell.serving(file), cell.client("shout") as client:
                assert client.infer("shout", text("x")).as_numpy("output").tolist() == [b"X"]
            with cell.client() as client:
                eventually(lambda: not cell.has(client, "shout"))


def answers(url: str) -> bool:
    """Return whether etcd answers."""
    try:
        return call(url, "GET", "/health")[0] == 200
    except OSError:
        return False
