"""What is said of a server and its models in each state: the table of docs/kubernetes.md, over both protocols."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import tritonclient.grpc
from typer.testing import CliRunner

from pytriton.cli.app import app
from pytriton.model_config import ModelConfig
from pytriton.proxy_backend.cli.app import run as run_command
from pytriton.proxy_backend.hosting.supervisor import HostSupervisor
from pytriton.triton import ProcessWorker, RemoteTriton, RestartPolicy, Triton, TritonSecurityConfig
from support import process_models, python_models
from support.callables import X, Y, identity
from support.http import call, infer
from support.process_models import DIE
from support.processes import is_running
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually, wait_for_threads

OPEN = TritonSecurityConfig(restricted_endpoints=[])


class Said(NamedTuple):
    """What a server says, over HTTP and over gRPC alike."""

    live: bool
    ready: bool
    model: bool
    listed: str
    """By `pytriton models`."""


READY = Said(True, True, True, "READY")
WITHOUT_WORKER = GIVEN_UP = Said(True, False, False, "NOT READY")
ASLEEP = Said(True, True, True, "ASLEEP")
DRAINING = Said(True, False, True, "READY")


def said(triton: Triton, model: str) -> Said | str:
    """Ask everywhere; a text where two answers differ."""
    paths = "/v2/health/live", "/v2/health/ready", f"/v2/models/{model}/ready"
    http = [call(triton.http_url, "GET", path)[0] == 200 for path in paths]
    with contextlib.closing(tritonclient.grpc.InferenceServerClient(urlsplit(str(triton.grpc_url)).netloc)) as client:
        grpc = [client.is_server_live(), client.is_server_ready(), client.is_model_ready(model)]
    if http != grpc:
        return f"HTTP: {http}, gRPC: {grpc}"
    port = [] if triton.metrics_url is None else ["--metrics-port", str(urlsplit(triton.metrics_url).port)]
    output = CliRunner().invoke(app, ["models", str(triton.http_url), "--json", *port]).stdout
    live, ready, is_model = http
    return Said(live, ready, is_model, {entry["name"]: entry["state"] for entry in json.loads(output)}[model])


def is_attached(metrics_url: str | None) -> set[float]:
    """The gauge of the workers of model `m`, which the alert reads."""
    with urllib.request.urlopen(str(metrics_url), timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    return {float(line.split()[-1]) for line in lines if line.startswith('pytriton_worker_attached{model="m",')}


@pytest.fixture
def triton() -> Iterator[Triton]:
    config = local_config(allow_metrics=True, metrics_port=0)
    with short_home(), running(Triton(config=config, security_config=OPEN)) as triton:
        yield triton


def test_a_model_of_a_thread(triton: Triton) -> None:
    triton.bind("other", identity, X, Y)
    triton.bind("m", identity, X, Y)
    assert said(triton, "m") == READY
    model = triton._models["m", 1]
    model.stop_workers(PATIENCE_S)
    eventually(lambda: said(triton, "m") == WITHOUT_WORKER)
    # The server as a whole is not ready, its other model is.
    assert said(triton, "other") == READY._replace(ready=False)
    assert triton._life.session is not None
    model.start_workers(triton._life.session.deployment.endpoints, print)
    eventually(lambda: said(triton, "m") == READY)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_model_of_processes(triton: Triton, is_remote: bool, tmp_path: Path) -> None:
    marker = tmp_path / "broken"
    worker = ProcessWorker(process_models.make, max_crashes=3, crash_window_s=600, kwargs={"marker": str(marker)})
    with contextlib.ExitStack() as stack:
        binder: Any = triton
        if is_remote:
            binder = stack.enter_context(RemoteTriton(str(triton.http_url)))
        binder.bind("m", worker, X, Y)
        assert said(triton, "m") == READY
        assert is_attached(triton.metrics_url) == (set() if is_remote else {1.0})
        infer(triton.http_url, "m", DIE)
        eventually(lambda: said(triton, "m") == READY and infer(triton.http_url, "m", 3.0) == [6.0])
        marker.touch()
        infer(triton.http_url, "m", DIE)
        eventually(lambda: said(triton, "m") == WITHOUT_WORKER)
        eventually(lambda: "is given up" in str(infer(triton.http_url, "m", 3.0)))
        # Who answers now only says why, which makes no model ready. It has answered, so it is attached.
        assert said(triton, "m") == GIVEN_UP
        assert is_attached(triton.metrics_url) == (set() if is_remote else {0.0})
        marker.unlink()
        binder.rebind("m", worker)
        eventually(lambda: said(triton, "m") == READY)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_model_that_sleeps(triton: Triton, is_remote: bool) -> None:
    with contextlib.ExitStack() as stack:
        binder: Any = triton
        if is_remote:
            binder = stack.enter_context(RemoteTriton(str(triton.http_url)))
        config = ModelConfig(attach_timeout_s=PATIENCE_S)
        binder.bind("m", ProcessWorker(process_models.make, idle_timeout_s=0.2), X, Y, config=config)
        eventually(lambda: binder.describe().models[0].is_asleep)
        # A page of metrics is that of the program with the workers, which has none here.
        assert said(triton, "m") == (READY if is_remote else ASLEEP)
        assert is_attached(triton.metrics_url) == set()
        assert infer(triton.http_url, "m", 3.0) == [6.0]
        assert said(triton, "m") in (READY, ASLEEP)
        eventually(lambda: binder.describe().models[0].is_asleep)


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[HostSupervisor]:
    """What the command `pytriton-proxy-backend hosts` runs."""
    supervisor = HostSupervisor(folder)
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.close(PATIENCE_S)
        wait_for_threads()
        shutil.rmtree(folder)


FRAGILE = python_models.MODEL.replace(
    "    def execute", "    def initialize(self, args):\n        assert not os.path.exists(MARKER)\n\n    def execute"
)


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_model_of_the_python_backend(is_converted: bool, tmp_path: Path) -> None:
    """On workers, as `serve-repository` has it, and on the processes of `pytriton-proxy-backend hosts`."""
    marker, repository = tmp_path / "broken", tmp_path / "models"
    python_models.write(
        repository, "m", FRAGILE.replace("MARKER", repr(str(marker))), f'name: "m"\n{python_models.CONFIG}'
    )
    settings: dict[str, Any] = {"python_models": "workers"}
    name = "m_workers" if is_converted else "m"
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(short_home())
        if is_converted:
            supervisor = stack.enter_context(hosts(Path(f"{home}h")))
            with pytest.raises(SystemExit):
                run_command(["convert", str(repository / "m"), "--endpoint", str(supervisor.socket_path.parent)])
            settings = {}
            shutil.rmtree(repository / "m")
        config = local_config(model_repository=repository, allow_metrics=True, metrics_port=0, **settings)
        triton = stack.enter_context(Triton(config=config, security_config=OPEN))
        if not is_converted:
            assert is_attached(triton.metrics_url) == {1.0}
        assert said(triton, name) == READY
        marker.touch()
        call(triton.http_url, "POST", f"/v2/models/{name}/infer", {"inputs": [X13]})
        eventually(lambda: said(triton, name) == WITHOUT_WORKER)
        if not is_converted:
            assert is_attached(triton.metrics_url) == {0.0}
        marker.unlink()
        eventually(lambda: said(triton, name) == READY)


X13 = {"name": "x", "shape": [1], "datatype": "FP32", "data": [13]}


def test_a_server_that_is_being_stopped(triton: Triton) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(requests: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return identity(requests)

    triton.bind("m", wait, X, Y)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(infer, triton.http_url, "m", 3.0)
        assert begun.wait(PATIENCE_S)
        url = str(triton.http_url)
        stop = pool.submit(triton.stop)
        try:
            eventually(lambda: call(url, "GET", "/v2/health/ready")[0] == 400)
            assert call(url, "GET", "/v2/health/live")[0] == 200
        finally:
            go_on.set()
        assert answer.result(PATIENCE_S) == [3.0]
        stop.result(PATIENCE_S)
    with pytest.raises(ConnectionError):
        call(url, "GET", "/v2/health/live")


def test_a_server_that_is_gone() -> None:
    """Until the `RestartPolicy` has another one started, the page of metrics says so."""
    config = local_config(allow_metrics=True, metrics_port=0)
    with running(Triton(config=config, restart=RestartPolicy(first_delay_s=600, max_delay_s=600))) as triton:
        triton.bind("m", identity, X, Y)
        url, metrics, pid = str(triton.http_url), str(triton.metrics_url), server_pid(triton)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_running(pid))
        with pytest.raises(ConnectionError):
            call(url, "GET", "/v2/health/live")
        eventually(lambda: is_attached(metrics) == {0.0})
        with urllib.request.urlopen(metrics, timeout=PATIENCE_S) as page:
            assert 'pytriton_metrics_up{source="tritonserver"} 0.0' in page.read().decode()
