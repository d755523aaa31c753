"""From the start of a server to its end: warm-ups, reloads, signals, one object used again and again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.triton import (
    Triton,
    TritonBase,
    TritonDescription,
    TritonLifecyclePolicy,
    TritonModelLoadError,
    VertextAILifecyclePolicy,
)
from support.callables import X, Y, identity
from support.load import under_load
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually, wait_for_threads

WARMUP = [
    ModelWarmup(name="w", batch_size=2, count=3, inputs={"x": WarmupInput(np.float32, shape=(1,), zero_data=True)})
]


def call(url: str | None, method: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
    assert url is not None
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        headers = {"triton-access-token": token or ""}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if text.startswith(("{", "[")) else text
    finally:
        connection.close()


def ask(url: str | None, model: str, value: float = 1.0) -> Any:
    """Gives the answer, or the text of the error."""
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]}
    status, answer = call(url, "POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
    return answer["outputs"][0]["data"][0] if status == 200 else answer["error"]


@pytest.fixture(autouse=True)
def home() -> Iterator[Path]:
    with short_home() as folder:
        yield folder
    wait_for_threads()


# ---- one object, several lives --------------------------------------------------------------------------------------


def test_a_triton_is_a_triton_base() -> None:
    triton = Triton(config=local_config())
    assert isinstance(triton, TritonBase)
    assert not triton.is_alive()
    assert not triton.is_connected()
    assert not triton.stop()


def test_as_in_a_notebook() -> None:
    triton = Triton(config=local_config())
    for factor in (1, 2):
        triton.bind(f"m{factor}", identity, X, Y)
        triton.connect()
        triton.run()
        assert triton.is_alive()
        assert ask(triton.http_url, "m1", factor) == factor
        assert ask(triton.http_url, f"m{factor}") == 1
        assert triton.stop()
        assert triton.http_url is None
    another = Triton(config=local_config())
    another.bind("m1", identity, X, Y)
    with running(another):
        assert ask(another.http_url, "m1") == 1


def test_serve_again_after_stop() -> None:
    triton = Triton(config=local_config())
    triton.bind("m", identity, X, Y)
    periods: list[dict[str, Any]] = [{}, {"monitoring_period_s": 0.05}, {"monitoring_period_sec": 0.05}]
    for options in periods:
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(triton.serve, **options)
            eventually(triton.is_alive)
            assert ask(triton.http_url, "m") == 1
            assert triton.stop()
            serving.result(PATIENCE_S)
        assert not triton.is_alive()
    with pytest.raises(PyTritonBadParameterError, match="more than 0 seconds"):
        triton.serve(0)


def test_what_is_beside_a_server_lives_as_long_as_it_serves() -> None:
    triton = Triton(config=local_config(allow_metrics=True, metrics_port=0))
    triton.bind("m", identity, X, Y)
    entered: Queue[TritonDescription] = Queue()
    left = threading.Event()

    @contextlib.contextmanager
    def beside() -> Iterator[None]:
        entered.put(triton.describe())
        try:
            yield
        finally:
            left.set()

    began = time.monotonic() - 3600
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(triton.serve, beside=beside, since=began)
        found = entered.get(timeout=PATIENCE_S)
        assert ask(found.urls["http"], "m") == 1
        assert not left.is_set()
        assert triton.stop()
        serving.result(PATIENCE_S)
    assert left.is_set()
    assert found.is_running
    assert found.start_s > 3600
    assert [model.is_ready for model in found.models] == [True]
    assert {"http", "grpc", "metrics"} == found.urls.keys()
    assert [urlsplit(url).port for url in found.urls.values()] == list(found.ports)
    assert not triton.describe().urls


@pytest.mark.parametrize(
    "policy",
    [TritonLifecyclePolicy(launch_triton_on_startup=False), VertextAILifecyclePolicy],
    ids=["late", "vertex"],
)
def test_the_files_are_there_before_a_late_start(home: Path, policy: TritonLifecyclePolicy) -> None:
    with Triton(config=local_config(), triton_lifecycle_policy=policy) as triton:
        assert not triton.is_connected()
        triton.bind("m", identity, X, Y)
        triton.bind("m", identity, X, Y, model_version=2)
        triton.run()
        files = sorted(str(path.relative_to(path.parents[2])) for path in home.glob("*/models/m/*/*"))
        assert files == ["m/1/pytriton.conf", "m/2/pytriton.conf"]
        # Nothing was loaded by a call: the server has found them when it started.
        assert triton.is_alive()
        assert ask(triton.http_url, "m") == 1


def test_many_threads_start_and_stop_one_object() -> None:
    triton = Triton(config=local_config())
    triton.bind("m", identity, X, Y)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: triton.run(), range(6)))
        assert ask(triton.http_url, "m") == 1
        assert sorted(pool.map(lambda _: triton.stop(), range(6))) == [False] * 5 + [True]


# ---- warm-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["start", "bind"])
def test_a_model_is_ready_only_when_it_is_warm(when: str) -> None:
    seen: list[int] = []

    def infer(requests: Any) -> Any:
        # Slow enough that an answer before the end of the warm-up would be seen.
        time.sleep(0.05)
        seen.append(sum(len(request.data["x"]) for request in requests))
        return identity(requests)

    triton = Triton(config=local_config())
    config = ModelConfig(model_warmup=WARMUP)
    if when == "start":
        triton.bind("m", infer, X, Y, config=config)
    with running(triton):
        if when == "bind":
            triton.bind("m", infer, X, Y, config=config)
        assert seen == [2, 2, 2]
        assert ask(triton.http_url, "m", 7) == 7
        # The new callable is warm before the first request.
        triton.rebind("m", infer)
        assert seen == [2, 2, 2, 1, 2, 2, 2]


def test_a_failed_warm_up_fails_the_start() -> None:
    def cold(requests: Any) -> Any:
        raise RuntimeError("no weights")

    triton = Triton(config=local_config())
    triton.bind("m", [identity, cold], X, Y, config=ModelConfig(model_warmup=WARMUP))
    with pytest.raises(TritonModelLoadError, match="no weights") as caught:
        triton.run()
    assert (caught.value.model_name, caught.value.model_version) == ("m", 1)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not triton.is_connected()
    triton.rebind("m", identity)
    with running(triton):
        assert ask(triton.http_url, "m") == 1


# ---- reloads that others ask for -------------------------------------------------------------------------------------


def test_a_reload_by_a_client_loses_no_request() -> None:
    triton = Triton(config=local_config())
    triton.bind("m", identity, X, Y)
    with running(triton):
        config = call(triton.http_url, "GET", "/v2/models/m/config")[1]
        with under_load(triton.http_url, triton.grpc_url, "m") as load:
            for size in (8, 16, 5):
                config["max_batch_size"] = size
                body = {"parameters": {"config": json.dumps(config)}}
                path = "/v2/repository/models/m/load"
                assert call(triton.http_url, "POST", path, body, triton.get_access_token())[0] == 200
                assert call(triton.http_url, "GET", "/v2/models/m/config")[1]["max_batch_size"] == size
                load.wait_for_more()
        assert load.failures == []
        assert len(load.answers) == load.sent
        eventually(triton.is_alive)


# ---- whole programs --------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.triton import Triton, TritonConfig

def slow(requests):
    print("called", flush=True)
    time.sleep(600)

config = TritonConfig(
    http_address="127.0.0.1", grpc_address="127.0.0.1", http_port=0, grpc_port=0, allow_metrics=False,
    exit_timeout_secs=600,
)
tensors = dict(inputs=[Tensor((-1,), np.float32, "x")], outputs=[Tensor((-1,), np.float32, "y")])
warmup = [ModelWarmup("w", 1, {"x": WarmupInput(np.float32, shape=(1,), zero_data=True)}, 1)]
triton = Triton(config=config)
mode = sys.argv[1]
if mode == "warm-up in serve":
    triton.bind("slow", slow, **tensors, config=ModelConfig(model_warmup=warmup))
    triton.serve()
    print("served", flush=True)
elif mode == "warm-up in bind":
    triton.run()
    print(triton.http_url, flush=True)
    try:
        triton.bind("slow", slow, **tensors, config=ModelConfig(model_warmup=warmup))
    except KeyboardInterrupt:
        print("interrupted", triton.is_alive(), flush=True)
else:
    triton.bind("slow", slow, **tensors)
    triton.run()
    print(triton.http_url, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    programs: list[subprocess.Popen[str]] = []

    def begin(mode: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        programs.append(
            subprocess.Popen([sys.executable, "-c", PROGRAM, mode], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        )
        return programs[-1]

    yield begin
    for program in programs:
        program.kill()
        program.communicate()


def line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def servers_of(pid: int) -> list[int]:
    """The tritonserver processes that a process has started and that are still there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(status[1]) == pid and status[0] != "Z" and b"tritonserver" in command:
            found.append(int(folder.name))
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_long_warm_up(start: Callable[[str], subprocess.Popen[str]], number: signal.Signals) -> None:
    program = start("warm-up in serve")
    assert line(program) == "called"
    program.send_signal(number)
    out, err = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, out) == (0, "served\n"), err


def test_ctrl_c_in_a_bind_leaves_the_server(start: Callable[[str], subprocess.Popen[str]]) -> None:
    program = start("warm-up in bind")
    url = line(program)
    assert line(program) == "called"
    assert call(url, "GET", "/v2/health/ready")[0] == 200
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, out) == (0, "interrupted True\n"), err


def test_ctrl_c_ends_the_patience_of_the_end_of_the_interpreter(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    program = start("exit")
    url = line(program)
    (server,) = servers_of(program.pid)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(asked, url)
        assert line(program) == "called"
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
        # It waits for the request now, which takes ten minutes.
        eventually(lambda: call(url, "GET", "/v2/models/slow/ready")[0] != 200)
        while program.poll() is None:
            os.kill(program.pid, signal.SIGINT)
            # The next one, if need be, must neither come with this one nor cut off the end that this one has begun.
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(30)
        program.communicate(timeout=PATIENCE_S)
        assert asking.result(PATIENCE_S) != 1
    eventually(lambda: is_gone(server))


def asked(url: str) -> Any:
    try:
        return ask(url, "slow")
    except (OSError, http.client.HTTPException) as error:
        return error
