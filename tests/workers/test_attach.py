"""Workers that a shell attaches to a running server, and takes away again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.model_config import ModelConfig
from pytriton.proxy_backend import (
    AttachError,
    DescriptionError,
    ProxyBackendError,
    description_path,
    read_description,
    write_description,
)
from pytriton.proxy_backend.worker.attach import Attachment, find_endpoint, serve_endpoint
from pytriton.triton import Triton
from support import python_proxy
from support.callables import X, Y
from support.http import call, infer
from support.load import Load, under_load
from support.paths import TESTS
from support.process_models import HANG, NEVER_AGAIN, PID, Greeter
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

PROGRAMS = ["pytriton", "pytriton.proxy_backend"]


def times(factor: float, pause_s: float = 0.0) -> Callable[[Any], Any]:
    def infer(requests: Any) -> Any:
        time.sleep(pause_s)
        return [{"y": request.data["x"] * np.float32(factor)} for request in requests]

    return infer


@contextmanager
def worker(program: str, *arguments: str, target: str = "support.process_models:make") -> Iterator[Any]:
    """A worker as a shell starts it, in the folder of the tests."""
    command = [sys.executable, "-m", program, "worker", target, *arguments]
    with subprocess.Popen(
        command, cwd=TESTS, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def has_both(load: Load, since: int) -> bool:
    return {2.0, 3.0} <= {factor for _, factor in load.answers[since:]}


def output(process: Any) -> str:
    """What it wrote until its end."""
    return str(process.communicate(timeout=PATIENCE_S)[0])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Triton, Path]]:
    """A server, and the folder of its endpoints."""
    with short_home() as home:
        triton = Triton(config=local_config())
        triton.bind("own", times(2, 0.005), X, Y)
        triton.bind("other", times(1), X, Y, model_version=7, strict=True, config=ModelConfig(batching=False))
        with running(triton):
            (endpoints,) = home.glob("*/endpoints")
            yield triton, endpoints


# ---- the description -----------------------------------------------------------------------------------------------


def test_a_description_lies_beside_every_socket_as_long_as_it_is_there(served: tuple[Triton, Path]) -> None:
    triton, endpoints = served
    triton.bind("passing", times(1), X, Y)
    file = description_path(endpoints / "passing.1.sock")
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_description(file).max_batch_size == 4
    triton.rebind("passing", times(1), strict=True)
    assert read_description(file).strict
    triton.rebind("passing", times(1), config=ModelConfig(max_batch_size=9))
    (file,) = endpoints.glob("passing*.json")
    assert read_description(file).max_batch_size == 9
    triton.unbind("passing")
    assert list(endpoints.glob("passing*")) == []


def test_an_endpoint_is_found_by_what_is_said_of_it(served: tuple[Triton, Path]) -> None:
    _, endpoints = served

    def find(**options: Any) -> tuple[Path | str, Any]:
        return find_endpoint(Attachment(target="m:f", **{"endpoint": str(endpoints), **options}))

    for options in ({"model": "other"}, {"version": 7}, {"endpoint": str(endpoints / "other.7.sock")}):
        path, spec = find(**options)
        assert path == endpoints / "other.7.sock"
        assert (spec.name, spec.version, spec.batching, spec.strict) == ("other", 7, False, True)
    there = re.escape("other (version 7), own (version 1)")
    with pytest.raises(AttachError, match=f"several endpoints of any model.*{there}"):
        find()
    with pytest.raises(AttachError, match=f"no endpoint of model 'missing'; there are: {there}"):
        find(model="missing")
    with pytest.raises(AttachError, match=f"no endpoint of model 'own' version 2; there are: {there}"):
        find(model="own", version=2)
    with pytest.raises(AttachError, match="is about model 'other' version 7, not about model 'own'"):
        find(endpoint=str(endpoints / "other.7.sock"), model="own")
    with pytest.raises(DescriptionError, match="nothing beside the address"):
        find(endpoint="tcp://127.0.0.1:1")
    description = description_path(endpoints / "other.7.sock")
    assert find(endpoint="tcp://127.0.0.1:1", description=description)[0] == "tcp://127.0.0.1:1"


# ---- come and go ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", PROGRAMS)
def test_workers_come_and_go_under_load_without_a_failed_request(served: tuple[Triton, Path], program: str) -> None:
    triton, endpoints = served
    arguments = (f"--endpoint={endpoints}", "--model=own", "--factory", '--kwargs={"factor": 3.0}')
    with under_load(triton.http_url, triton.grpc_url, "own", threads=4) as load:
        for _ in range(2):
            with worker(program, *arguments) as process:
                load.wait_for(partial(has_both, load, len(load.answers)))
                process.send_signal(signal.SIGTERM)
                said = output(process)
                assert process.returncode == 0, said
                assert f"Serving model own (version 1) at {endpoints / 'own.1.sock'}" in said
            left = time.monotonic()
            load.wait_for_more()
            assert load.factors_since(left) == {2.0}
    assert load.failures == []
    assert len(load.answers) == load.sent


def test_a_detach_finishes_what_is_in_flight(served: tuple[Triton, Path], tmp_path: Path) -> None:
    triton, endpoints = served
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def infer(requests):\n"
        "    pathlib.Path(__file__).with_name('began').touch()\n"
        "    time.sleep(1)\n"
        "    return [{'y': request.data['x'] * 7} for request in requests]\n"
    )
    target = f"{tmp_path / 'slow.py'}:infer"
    with ThreadPoolExecutor(1) as pool, worker(PROGRAMS[1], f"--endpoint={endpoints}/own.1.sock", target=target) as w:
        deadline = time.monotonic() + PATIENCE_S
        asked: list[Any] = []
        while not (tmp_path / "began").exists():
            asked.append(infer(triton.http_url, "own", 1.0) if asked else pool.submit(infer, triton.http_url, "own", 1))
            assert time.monotonic() < deadline
            time.sleep(0.05)
        w.send_signal(signal.SIGINT)
        assert output(w)
        assert w.returncode == 0
        assert {tuple(answer if isinstance(answer, list) else answer.result(PATIENCE_S)) for answer in asked} <= {
            (2.0,),
            (7.0,),
        }


def test_a_worker_follows_its_model(served: tuple[Triton, Path]) -> None:
    triton, endpoints = served
    triton.bind("moving", times(0), X, Y)
    try:
        with worker(PROGRAMS[1], f"--endpoint={endpoints}", "--model=moving", "--factory") as process:
            eventually(lambda: infer(triton.http_url, "moving", PID) == [float(process.pid)])
            # Another configuration is served at another socket.
            triton.rebind("moving", times(0), config=ModelConfig(max_batch_size=3))
            eventually(lambda: infer(triton.http_url, "moving", PID) == [float(process.pid)])
            triton.unbind("moving")
            triton.bind("moving", times(0), X, Y)
            eventually(lambda: infer(triton.http_url, "moving", PID) == [float(process.pid)])
            process.send_signal(signal.SIGTERM)
            assert output(process).count("Serving model moving (version 1)") in (2, 3)
            assert process.returncode == 0
    finally:
        triton.unbind("moving")


def test_a_model_of_type_hints_is_attached(served: tuple[Triton, Path]) -> None:
    triton, endpoints = served
    triton.bind(Greeter)
    try:
        target = "support.process_models:Greeter"
        with (
            worker(PROGRAMS[0], f"--endpoint={endpoints}", "--model=greeter", target=target) as process,
            ModelClient(str(triton.http_url), "greeter") as client,
        ):

            def answer(_: object = None) -> str:
                return str(client.infer_sample(np.array(["you"]))["output"].item().decode())

            with ThreadPoolExecutor(4) as pool:
                eventually(lambda: f"Hello, you, from {process.pid}" in set(pool.map(answer, range(8))))
            process.send_signal(signal.SIGTERM)
            output(process)
            assert process.returncode == 0
    finally:
        triton.unbind("greeter")


# ---- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "model", "expected"),
    [
        ("support.process_models:missing", "own", "has no 'missing'"),
        ("support.missing:make", "own", "there is no module 'support.missing'"),
        ("support.process_models:PID", "own", "is -4.0: expected an inference callable"),
        ("support.process_models:softmax", "own", "the hints say that its inputs are logits: FP32[-1]; given were x:"),
        ("support.process_models:make", "missing", "there are: other (version 7), own (version 1)"),
    ],
)
def test_what_cannot_be_attached_is_told_in_time(
    served: tuple[Triton, Path], monkeypatch: pytest.MonkeyPatch, target: str, model: str, expected: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    _, endpoints = served
    with pytest.raises(ProxyBackendError, match=re.escape(expected)):
        serve_endpoint(Attachment(target=target, endpoint=str(endpoints), model=model, attach_timeout_s=0.2))


@pytest.mark.parametrize(
    ("program", "argument", "expected", "code"),
    [
        (PROGRAMS[0], "--model=missing", "pytriton: error: ", 1),
        (PROGRAMS[1], "--model=missing", "there are: other (version 7), own (version 1)", 1),
        (PROGRAMS[1], "--kwargs=[1]", "expected a JSON object", 2),
        (PROGRAMS[1], '--kwargs={"factor": 2}', "give --factory as well", 1),
    ],
)
def test_the_command_ends_with_the_reason(
    served: tuple[Triton, Path], program: str, argument: str, expected: str, code: int
) -> None:
    _, endpoints = served
    with worker(program, f"--endpoint={endpoints}", argument, "--attach-timeout=0.2") as process:
        assert expected in re.sub(r"\s+", " ", output(process))
        assert process.returncode == code


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_tcp_address_wants_keys_or_to_be_called_insecure(tmp_path: Path, program: str) -> None:
    description = tmp_path / "model.json"
    write_description(description, python_proxy.spec())
    with python_proxy.proxy("tcp://127.0.0.1:*", insecure=True) as served:
        arguments = (f"--endpoint={served.address}", f"--description={description}", "--factory")
        with worker(program, *arguments) as process:
            said = re.sub(r"\s+", " ", output(process))
            assert process.returncode == 1
            assert "--curve-secret-key and --curve-server-key" in said
            assert "--insecure" in said
        with worker(program, *arguments, "--insecure", '--kwargs={"factor": 3.0}') as process:
            assert served.send([2])[0].wait()["y"].tolist() == [[6]]
            process.send_signal(signal.SIGTERM)
            assert output(process)
            assert process.returncode == 0


def test_nobody_listens_any_more(served: tuple[Triton, Path], tmp_path: Path) -> None:
    _, endpoints = served
    (tmp_path / "own.1.sock.json").write_bytes(description_path(endpoints / "own.1.sock").read_bytes())
    with worker(PROGRAMS[1], f"--endpoint={tmp_path}", "--factory", "--attach-timeout=0.5") as process:
        said = output(process)
        assert process.returncode == 1
    waited = re.search(r"was not attached after ([\d.]+) s: nobody accepts it", said)
    assert waited is not None
    assert float(waited[1]) > 0.4
    # It has never been served from here.
    assert "Serving model" not in said


def test_a_model_of_a_python_proxy_is_found_like_any_other(tmp_path: Path) -> None:
    """By its name in the folder of the endpoints, by its socket, and by its address."""
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        address = f"ipc://{folder}/model.1.zmq"
        write_description(Path(folder, "model.1.zmq.json"), python_proxy.spec())
        for endpoint in (folder, f"{folder}/model.1.zmq", address):
            wanted = Attachment(target="m:f", endpoint=endpoint, model="model")
            assert find_endpoint(wanted) == (address, python_proxy.spec())
        with python_proxy.proxy(address) as served:
            for endpoint in (folder, f"{folder}/model.1.zmq"):
                arguments = (f"--endpoint={endpoint}", "--model=model", "--factory", '--kwargs={"factor": 3.0}')
                with worker(PROGRAMS[1], *arguments) as process:
                    assert served.send([2])[0].wait()["y"].tolist() == [[6]]
                    process.send_signal(signal.SIGTERM)
                    said = output(process)
                    assert process.returncode == 0, said
                assert f"Serving model model (version 1) at {address}" in said
                assert f"Detached from model model (version 1) at {address}" in said


def test_an_unrecoverable_error_ends_the_worker_and_not_the_model(served: tuple[Triton, Path]) -> None:
    triton, endpoints = served
    with worker(PROGRAMS[1], f"--endpoint={endpoints}", "--model=own", "--factory") as process:
        eventually(lambda: "the device is gone" in str(infer(triton.http_url, "own", NEVER_AGAIN)))
        assert "the device is gone" in output(process)
        assert process.returncode == 1
    assert infer(triton.http_url, "own", 1.0) == [2.0]
    assert triton.is_alive()


def test_a_second_signal_ends_a_busy_worker_at_once(served: tuple[Triton, Path]) -> None:
    triton, endpoints = served
    # Each request for itself, so that none hangs with another one.
    triton.bind("alone", times(0), X, Y, config=ModelConfig(batcher=None))
    try:
        with (
            ThreadPoolExecutor(2) as pool,
            worker(PROGRAMS[1], f"--endpoint={endpoints}", "--model=alone", "--factory") as process,
        ):
            eventually(lambda: infer(triton.http_url, "alone", PID) == [float(process.pid)])
            # The callable of this process answers one of them, the worker has the other one.
            hanging = [pool.submit(infer, triton.http_url, "alone", HANG)]
            while infer(triton.http_url, "alone", PID) != [0.0] or not hanging[-1].running():
                hanging.append(pool.submit(infer, triton.http_url, "alone", HANG))
            # Two, if it is quick enough to see them apart.
            while process.poll() is None:
                process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
            assert process.returncode in (-signal.SIGTERM, 0)
            assert all(isinstance(answer.result(PATIENCE_S), (str, list)) for answer in hanging)
    finally:
        triton.unbind("alone")
    assert call(triton.http_url, "GET", "/v2/models/own/ready")[0] == 200
    assert os.path.exists(endpoints / "own.1.sock")
