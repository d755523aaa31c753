"""Readiness: it ends before a server does, and while a model has no worker; nobody loses a request over it."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.proxy_backend import Worker
from pytriton.server.control.http import HttpControl, activity_of
from pytriton.server.lifecycle import drain, readiness
from pytriton.server.models.worker_watch import WATCH_PERIOD_S, WorkerWatch, connections
from pytriton.triton import Triton, TritonSecurityConfig
from support.bare_server import BareServer, serving
from support.callables import X, Y, identity
from support.servers import since
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, Held, eventually, wait_for_threads

CALLERS = 6


def status(address: str, path: str = "/v2/health/ready") -> int:
    """Gives the status of a GET; 0 if nobody answers."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@pytest.fixture(autouse=True)
def _home() -> Iterator[None]:
    with short_home():
        yield
    wait_for_threads()


# ---- another server takes over ---------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
import numpy as np
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonConfig

factor = np.float32(sys.argv[1])

def infer(requests):
    time.sleep(0.002)
    return [{"y": request["x"] * factor} for request in requests]

config = TritonConfig(
    http_address="127.0.0.1", grpc_address="127.0.0.1", http_port=0, grpc_port=0, allow_metrics=False
)
triton = Triton(config=config)
triton.bind("m", infer, [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")])
triton.run()
print(triton.http_url, triton.grpc_url, flush=True)
triton.serve()
print("served", flush=True)
"""


class Server:
    """A program that serves until it is told to stop."""

    def __init__(self, factor: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(factor)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.http, self.grpc = (url.rpartition("/")[2] for url in self.process.stdout.readline().split())

    def end(self) -> tuple[int, str]:
        out, error = self.process.communicate(timeout=PATIENCE_S)
        # A program without a log says in one line where it serves.
        return self.process.returncode, out + re.sub(r"pytriton: m served at .*\n", "", error)


class Balancer:
    """Passes each new connection on to the first server that says that it is ready, as of its last question."""

    def __init__(self, servers: list[Server]) -> None:
        self._servers = servers
        self.ready: list[Server] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.02)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._look), threading.Thread(target=self._accept)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listening.close()

    def _look(self) -> None:
        while True:
            self.ready = [server for server in self._servers if status(server.http) == 200]
            if self._ending.wait(0.1):
                return

    def _accept(self) -> None:
        with ThreadPoolExecutor(2 * CALLERS) as pool:
            while not self._ending.is_set():
                try:
                    client = self._listening.accept()[0]
                except TimeoutError:
                    continue
                pool.submit(self._serve, client, self.ready[0])

    def _serve(self, client: socket.socket, chosen: Server) -> None:
        host, _, port = chosen.http.rpartition(":")
        with client, socket.create_connection((host, int(port)), PATIENCE_S) as server:
            others = {client: server, server: client}
            while True:
                for source in select.select(list(others), [], [], PATIENCE_S)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    others[source].sendall(data)


class Callers:
    """Threads that ask again and again, each time over a new connection, until they are told to stop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.sent = 0
        self.answers: Counter[float] = Counter()
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def wait_for_more(self, factor: float, count: int = 100) -> None:
        goal = self.answers[factor] + count
        eventually(lambda: self.answers[factor] >= goal or bool(self.failures))

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                self.sent += 1
            try:
                code, answer = ask(self._address, "m")
                factor = answer["outputs"][0]["data"][0]
            except (OSError, KeyError, http.client.HTTPException) as error:
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}")
                continue
            with self._lock:
                self.answers[factor] += code == 200


def ask(address: str, model: str) -> tuple[int, Any]:
    """Asks a model about 1, over a connection of its own."""
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_another_server_takes_over_without_a_failed_request() -> None:
    with contextlib.ExitStack() as stack:
        servers = [Server(2), Server(3)]
        for server in servers:
            stack.callback(server.process.communicate)
            stack.callback(server.process.kill)
        balancer = Balancer(servers)
        stack.callback(balancer.close)
        eventually(lambda: len(balancer.ready) == 2)
        callers = Callers(balancer.address)
        stack.callback(callers.end)
        callers.wait_for_more(2.0)
        servers[0].process.send_signal(signal.SIGTERM)
        callers.wait_for_more(3.0)
        code, output = servers[0].end()
        callers.wait_for_more(3.0)
        callers.end()
        assert callers.failures == []
        assert callers.answers[2.0] + callers.answers[3.0] == callers.sent
        assert (code, output) == (0, "served\n")
        # Without requests there is nobody to wait for, and nothing is lost by not waiting.
        servers[1].process.send_signal(signal.SIGTERM)
        assert servers[1].end() == (0, "served\n")


# ---- the order of things ---------------------------------------------------------------------------------------------


def test_readiness_ends_first_and_requests_are_finished() -> None:
    held = Held(identity)
    triton = Triton(config=local_config())
    triton.bind("held", held, X, Y)
    triton.bind("m", identity, X, Y)
    with running(triton), ThreadPoolExecutor(2) as pool:
        url = str(triton.http_url)
        assert status(url) == 200
        asking = pool.submit(ask, url, "held")
        assert held.entered.wait(PATIENCE_S)
        stopping = pool.submit(triton.stop)
        eventually(lambda: status(url) != 200)
        # Also when the models are out of service, one by one.
        eventually(lambda: status(url, "/v2/models/m/ready") != 200)
        for _ in range(20):
            assert status(url) == 400
        assert not stopping.done()
        held.release.set()
        assert asking.result(PATIENCE_S)[0] == 200
        assert stopping.result(PATIENCE_S)


def test_a_stop_refuses_new_requests_and_unloads_no_model_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_IDLE_WAIT_S", PATIENCE_S)
    unload = mock.Mock()
    monkeypatch.setattr(HttpControl, "unload", unload)
    held = Held(identity)
    triton = Triton(config=local_config())
    triton.bind("held", held, X, Y)
    triton.bind("m", identity, X, Y)
    with running(triton), ThreadPoolExecutor(2) as pool:
        url, grpc_url = str(triton.http_url), str(triton.grpc_url)
        asking = pool.submit(ask, url, "held")
        assert held.entered.wait(PATIENCE_S)
        stopping = pool.submit(triton.stop)
        # Whoever came before the stop is answered, and is waited for.
        eventually(lambda: ask(url, "m") == (503, {"error": "The server is being stopped and takes no more requests."}))
        with ModelClient(grpc_url, "m") as client, pytest.raises(PyTritonClientInferenceServerError, match="stopped"):
            client.infer_sample(np.ones(1, np.float32))
        assert not stopping.done()
        held.release.set()
        assert asking.result(PATIENCE_S)[0] == 200
        assert stopping.result(PATIENCE_S)
    unload.assert_not_called()


def test_requests_are_accepted_while_it_is_not_ready() -> None:
    triton = Triton(config=local_config(), linger_s=3)
    triton.bind("m", identity, X, Y)
    with running(triton):
        url = str(triton.http_url)
        assert ask(url, "m")[0] == 200
        triton._life.orders.signals.append(signal.SIGTERM)
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(triton.stop)
            eventually(lambda: status(url) != 200)
            assert ask(url, "m")[0] == 200
            assert status(url, "/v2/models/m/ready") == 200
            assert stopping.result(PATIENCE_S)
        triton._life.orders.signals.clear()


def test_how_long_to_linger_is_checked() -> None:
    for value in (-1, True, "1"):
        with pytest.raises(PyTritonBadParameterError, match="linger_s must be a number of seconds"):
            Triton(linger_s=value)  # type: ignore[arg-type] # as a user may


def test_activity_is_read_from_statistics() -> None:
    nothing = activity_of([{"name": "m", "version": "1", "last_inference": 0, "inference_stats": {}}])
    assert (nothing.answered, nothing.age_s, nothing.longest_mean_s) == (0, float("inf"), 0.0)
    kinds = {"success": {"count": 4, "ns": 2_000_000_000}, "fail": {"count": "1", "ns": "5"}, "queue": {"count": 9}}
    last_ms = int(time.time() * 1000) - 5000
    some = activity_of([{"last_inference": last_ms, "inference_stats": kinds}, {}])
    assert (some.answered, some.longest_mean_s) == (5, 0.5)
    assert 5 <= some.age_s <= time.time() - last_ms / 1000


# ---- workers ---------------------------------------------------------------------------------------------------------


def test_a_model_without_workers_makes_the_server_not_ready() -> None:
    triton = Triton(config=local_config())
    triton.bind("m", identity, X, Y)
    triton.bind("other", identity, X, Y)
    with running(triton):
        url = str(triton.http_url)
        model = triton._models["m", 1]
        endpoint = model.endpoint(triton._workspace.endpoints_path)
        assert connections()[str(endpoint)] == 1
        for _ in range(2):
            assert status(url) == 200
            model.stop_workers(PATIENCE_S)
            eventually(lambda: status(url) == 400)
            assert ask(url, "other")[0] == 200
            model.start_workers(triton._workspace.endpoints_path, print)
            eventually(lambda: status(url) == 200)
            assert ask(url, "m")[0] == 200
        # One that is none of ours is as good.
        model.stop_workers(PATIENCE_S)
        eventually(lambda: status(url) == 400)
        stranger = Worker(identity, model.definition.spec, endpoint)
        stranger.start()
        eventually(lambda: status(url) == 200)
        assert connections()[str(endpoint)] == 1
        assert stranger.stop(PATIENCE_S)
        eventually(lambda: status(url) == 400)
        # It ends as usual.
    assert triton.http_url is None


def _index(url: str) -> set[str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v2/repository/index", "{}")
        return {model["name"] for model in json.loads(connection.getresponse().read())}


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.51.0", False), ("2.67.9", False), ("2.68.0", True), ("2.70.0dev", True), ("3.0", True), ("unknown", False)],
)
def test_which_servers_ask_their_models(version: str, expected: bool) -> None:
    control = mock.create_autospec(HttpControl, instance=True)
    control.server_version.return_value = version
    assert readiness._asks_models(control) is expected


def test_what_does_not_ask_its_models_says_in_their_list_why_it_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    # A newer server is taken for an older one: what is done for that one does no harm.
    monkeypatch.setattr(readiness, "_ASKS_MODELS_SINCE", (99, 0))
    triton = Triton(config=local_config(), security_config=TritonSecurityConfig(restricted_endpoints=[]))
    triton.bind("m", identity, X, Y)
    with running(triton):
        url = str(triton.http_url)
        triton._models["m", 1].stop_workers(PATIENCE_S)
        eventually(lambda: status(url) == 400)
        eventually(lambda: _index(url) == {"m", "pytriton-no-workers"})
        triton._models["m", 1].start_workers(triton._workspace.endpoints_path, print)
        eventually(lambda: status(url) == 200)
        # The model that kept it from being ready goes from the list a moment later.
        eventually(lambda: _index(url) == {"m"})


@since(2, 68)
def test_a_newer_server_says_which_model_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    triton = Triton(config=local_config(), security_config=TritonSecurityConfig(restricted_endpoints=[]))
    triton.bind("m", identity, X, Y)
    triton.bind("other", identity, X, Y)
    with running(triton):
        url = str(triton.http_url)
        assert status(url, "/v2/models/m/ready") == 200
        triton._models["m", 1].stop_workers(PATIENCE_S)
        eventually(lambda: status(url, "/v2/models/m/ready") == 400)
        assert status(url, "/v2/models/other/ready") == 200
        eventually(lambda: status(url) == 400)
        eventually(lambda: any("No worker is attached to model 'm'" in text for text in caplog.messages))
        time.sleep(2 * WATCH_PERIOD_S)
        assert _index(url) == {"m", "other"}
        triton._models["m", 1].start_workers(triton._workspace.endpoints_path, print)
        eventually(lambda: status(url) == 200)
        eventually(lambda: any("Every model has a worker again" in text for text in caplog.messages))
        assert status(url, "/v2/models/m/ready") == 200


@since(2, 64)
def test_a_model_that_no_worker_has_attached_to_yet_is_not_ready(tmp_path: Path) -> None:
    server = BareServer(tmp_path)
    server.add("m")
    with serving(server):
        url = f"http://{server.url}"
        eventually(lambda: status(url, "/v2/models/m/ready") == 400)
        with server.worker("m", identity):
            eventually(lambda: status(url, "/v2/models/m/ready") == 200)
        eventually(lambda: status(url, "/v2/models/m/ready") == 400)


def test_replaced_models_leave_the_server_ready() -> None:
    triton = Triton(config=local_config())
    triton.bind("m", identity, X, Y)
    over = threading.Event()

    def watch(url: str) -> list[int]:
        seen = []
        while not over.is_set():
            seen.append(status(url))
        return seen

    with running(triton), ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch, str(triton.http_url))
        try:
            for config in (ModelConfig(max_batch_size=8), None, ModelConfig(max_batch_size=2)):
                triton.rebind("m", identity, config=config)
        finally:
            over.set()
        assert set(watching.result(PATIENCE_S)) == {200}


def test_a_model_that_is_being_unbound_needs_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    triton = Triton(config=local_config())
    for name in ("leaving", "staying"):
        triton.bind(name, identity, X, Y)
    unload, look = HttpControl.unload, WorkerWatch._look
    looks = threading.Semaphore(0)

    def counted(watch: WorkerWatch) -> None:
        looks.release()
        look(watch)

    def slow(control: HttpControl, *args: Any) -> None:
        unload(control, *args)
        assert triton._life.session is not None
        eventually(lambda: not triton._models["leaving", 1].workers.has_attached)
        while looks.acquire(blocking=False):
            pass
        for _ in range(4):
            assert looks.acquire(timeout=PATIENCE_S)

    with running(triton):
        with mock.patch.object(HttpControl, "unload", slow), mock.patch.object(WorkerWatch, "_look", counted):
            triton.unbind("leaving")
        eventually(lambda: status(str(triton.http_url)) == 200)
    assert "No worker is attached" not in caplog.text


def test_a_model_that_is_being_bound_takes_no_readiness_away(caplog: pytest.LogCaptureFixture) -> None:
    warming, go_on = threading.Event(), threading.Event()

    def warmed_up(requests: Any) -> Any:
        warming.set()
        assert go_on.wait(PATIENCE_S)
        return identity(requests)

    warmup = ModelWarmup("w", 1, {"x": WarmupInput(np.float32, (1,), zero_data=True)}, count=1)
    triton = Triton(config=local_config())
    with running(triton), ThreadPoolExecutor(1) as pool:
        url = str(triton.http_url)
        bound = pool.submit(triton.bind, "new", warmed_up, X, Y, config=ModelConfig(model_warmup=[warmup]))
        try:
            assert warming.wait(PATIENCE_S)
            # Long enough for the server to be told of a model without workers.
            time.sleep(4 * WATCH_PERIOD_S)
            assert status(url) == 200
        finally:
            go_on.set()
        bound.result(PATIENCE_S)
        assert not [record for record in caplog.records if "No worker is attached" in record.message]
        triton._models["new", 1].stop_workers(PATIENCE_S)
        eventually(lambda: status(url) == 400)
