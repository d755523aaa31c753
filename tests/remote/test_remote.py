"""`RemoteTriton`: models on a tritonserver that somebody else has started."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from pytriton.client import TlsSettings
from pytriton.client.exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientInvalidUrlError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from pytriton.exceptions import PyTritonBadParameterError, PyTritonInvalidOperationError, PyTritonUnrecoverableError
from pytriton.model_config import ModelConfig
from pytriton.proxy_backend import Worker, endpoint_path, read_description
from pytriton.proxy_backend.cli.app import run as run_command
from pytriton.server.models.worker_watch import connections
from pytriton.server.remote import session as remote_module
from pytriton.server.remote.sharing import ServerProcessWatch
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.triton import (
    RemoteTriton,
    RestartPolicy,
    Triton,
    TritonBase,
    TritonModelLoadError,
    TritonServerError,
    TritonServerExitedError,
    TritonServerStartError,
)
from support.callables import X, Y
from support.faults.relay import Relay
from support.load import under_load
from support.processes import free_ports
from support.servers import server_version
from support.serving import arena_mappings, local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, Held, eventually, wait_for_threads


def times(factor: float) -> Callable[[Any], Any]:
    """A callable that can be told from others by its answers."""

    def infer(requests: Any) -> Any:
        return [{"y": request.data["x"] * np.float32(factor)} for request in requests]

    return infer


class Server:
    """Addresses of a server, and questions to it as its own operator would ask them."""

    def __init__(self, http_port: int, grpc_port: int, token: str | None = None) -> None:
        self.http_url = f"http://127.0.0.1:{http_port}"
        self.grpc_url = f"grpc://127.0.0.1:{grpc_port}"
        self.token = token

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.http_url.removeprefix("http://"), timeout=PATIENCE_S)
        headers = {"triton-access-token": self.token or ""}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text
        finally:
            connection.close()

    def ask(self, model: str, version: int | None = None) -> Any:
        """Gives the answer to 1, or the text of the error."""
        tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}
        place = f"/v2/models/{model}" + ("" if version is None else f"/versions/{version}")
        status, answer = self.call("POST", f"{place}/infer", {"inputs": [tensor]})
        return answer["outputs"][0]["data"][0] if status == 200 else answer["error"]

    def is_ready(self, model: str) -> bool:
        return self.call("GET", f"/v2/models/{model}/ready")[0] == 200

    def unload(self, model: str) -> None:
        assert self.call("POST", f"/v2/repository/models/{model}/unload", {})[0] == 200


@contextmanager
def foreign_server(folder: Path, *options: str) -> Iterator[Server]:
    """A tritonserver as an operator starts it: an empty model repository, and no backend of ours."""
    (folder / "models").mkdir(exist_ok=True)
    (folder / "backends").mkdir(exist_ok=True)
    for _ in range(3):
        http_port, grpc_port = free_ports(2)
        command = [
            str(find_tritonserver().executable),
            f"--model-repository={folder / 'models'}",
            f"--backend-directory={folder / 'backends'}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            f"--http-port={http_port}",
            f"--grpc-port={grpc_port}",
            "--allow-metrics=false",
            *options,
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        server = Server(http_port, grpc_port)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while process.poll() is None:
                try:
                    if server.call("GET", "/v2/health/ready")[0] == 200:
                        break
                except OSError:
                    pass
                assert time.monotonic() < deadline, "tritonserver did not come up"
                time.sleep(0.02)
            else:
                continue  # somebody else has taken a port in the meantime
            yield server
            return
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    raise AssertionError((folder / "log").read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with foreign_server(tmp_path_factory.mktemp("foreign"), "--model-control-mode=explicit") as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with short_home():
        yield
    wait_for_threads()
    gc.collect()  # an error that a callable raised may hold its frames, and these the inputs, in a cycle
    assert arena_mappings() == []


@pytest.fixture
def protected() -> Iterator[tuple[Triton, Server]]:
    """A server of another `Triton` object with a model of its own and a token."""
    triton = Triton(config=local_config())
    triton.bind("own", times(100), X, Y)
    with running(triton):
        assert triton.http_url is not None
        assert triton.grpc_url is not None
        ports = [int(url.rpartition(":")[2]) for url in (triton.http_url, triton.grpc_url)]
        yield triton, Server(ports[0], ports[1], triton.get_access_token())


# ---- the way there and back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_models_come_and_go(server: Server, protocol: str) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    with RemoteTriton(url=url) as triton:
        assert isinstance(triton, TritonBase)
        assert triton.url == url
        assert triton.is_connected()
        assert triton.is_alive()
        triton.bind("m", times(2), X, Y)
        assert triton.is_alive()
        assert server.ask("m") == 2
        triton.bind("n", [times(3), times(3)], X, Y, config=ModelConfig(max_batch_size=16))
        assert server.ask("n") == 3
        assert server.call("GET", "/v2/models/n/config")[1]["max_batch_size"] == 16
        triton.unbind("n")
        assert not server.is_ready("n")
        assert server.ask("m") == 2
    assert not triton.is_alive()
    assert not triton.is_connected()
    assert not server.is_ready("m")


def test_models_bound_before_the_connection(server: Server) -> None:
    triton = RemoteTriton(server.http_url)
    # As with PyTriton: nothing is missing yet.
    assert triton.is_alive()
    assert not triton.is_connected()
    triton.bind("m", times(2), X, Y)
    triton.bind("m", times(3), X, Y, model_version=2)
    assert not triton.is_alive()
    for _ in range(2):
        triton.connect()
        triton.connect()
        assert triton.is_alive()
        assert (server.ask("m", 1), server.ask("m", 2), server.ask("m")) == (2, 3, 3)
        assert triton.stop()
        assert not triton.stop()
        assert not server.is_ready("m")


def test_a_name_is_bound_again_after_stop(server: Server) -> None:
    """As in a notebook: the second one replaces the first, and the other model stays."""
    triton = RemoteTriton(server.http_url)
    triton.bind("m", times(2), X, Y)
    triton.bind("n", times(3), X, Y)
    triton.connect()
    assert triton.stop()
    triton.bind("m", times(4), X, Y)
    with pytest.raises(PyTritonInvalidOperationError, match="twice"):
        triton.bind("m", times(5), X, Y)
    with triton:
        assert (server.ask("m"), server.ask("n")) == (4, 3)
        with pytest.raises(PyTritonInvalidOperationError, match="twice"):
            triton.bind("n", times(5), X, Y)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_changes_under_load_lose_no_request(protected: tuple[Triton, Server], protocol: str) -> None:
    _, server = protected
    url = server.http_url if protocol == "http" else server.grpc_url
    with RemoteTriton(url, access_token=server.token) as triton:
        triton.bind("m", times(2), X, Y)
        with under_load(server.http_url, server.grpc_url, "m", version=1) as load:
            triton.bind("m", times(9), X, Y, model_version=2)
            assert server.ask("m", 2) == 9
            load.wait_for_more()
            # Triton loads all versions again here; the workers of the first one follow.
            triton.rebind("m", times(10), model_version=2, config=ModelConfig(attach_timeout_s=PATIENCE_S))
            assert server.ask("m", 2) == 10
            load.wait_for_more()
            triton.unbind("m", 2)
            assert not server.is_ready("m") or server.call("GET", "/v2/models/m/versions/2/ready")[0] != 200
            load.wait_for_more()
            assert {factor for _, factor in load.answers} == {2.0}
            for factor, config in (
                (3, None),
                (4, ModelConfig(max_batch_size=8)),
                (5, ModelConfig(attach_timeout_s=PATIENCE_S)),
            ):
                triton.rebind("m", times(factor), config=config)
                returned = time.monotonic()
                load.wait_for_more()
                assert load.factors_since(returned) <= {float(factor)}
        assert load.failures == []
        assert len(load.answers) == load.sent
        assert server.ask("own") == 100
    assert not server.is_ready("m")
    assert server.ask("own") == 100


def test_stop_answers_what_is_in_flight(server: Server) -> None:
    held = Held(times(2))
    triton = RemoteTriton(server.grpc_url)
    triton.bind("m", held, X, Y)
    triton.connect()
    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(server.ask, "m")
        assert held.entered.wait(PATIENCE_S)
        stopping = pool.submit(triton.stop)
        eventually(lambda: not server.is_ready("m"))
        assert not stopping.done()
        held.release.set()
        assert asking.result(PATIENCE_S) == 2
        assert stopping.result(PATIENCE_S)


# ---- others on the same server -------------------------------------------------------------------------------------


def test_two_on_one_server(server: Server) -> None:
    with RemoteTriton(server.http_url) as first, RemoteTriton(server.grpc_url) as second:
        first.bind("a", times(2), X, Y)
        second.bind("b", times(3), X, Y)
        with pytest.raises(PyTritonInvalidOperationError, match="has a model 'a' that was not bound here"):
            second.bind("a", times(4), X, Y, config=ModelConfig(max_batch_size=7))
        assert (server.ask("a"), server.ask("b")) == (2, 3)
        first.stop()
        assert not server.is_ready("a")
        assert second.is_alive()
        assert server.ask("b") == 3
        second.bind("a", times(4), X, Y)
        assert server.ask("a") == 4


def test_a_model_without_workers_stays_that_of_whoever_bound_it(server: Server) -> None:
    """A newer server says that it is not ready, and one that came with an upload is in no list of models."""
    with RemoteTriton(server.http_url) as first:
        first.bind("lonely", times(2), X, Y)
        first._models["lonely", 1].stop_workers(PATIENCE_S)
        if server_version() >= (2, 64):
            eventually(lambda: server.call("GET", "/v2/models/lonely/ready")[0] == 400)
        for url in (server.http_url, server.grpc_url):
            refused = pytest.raises(PyTritonInvalidOperationError, match="has a model 'lonely' that was not bound here")
            with RemoteTriton(url) as second, refused:
                second.bind("lonely", times(3), X, Y, config=ModelConfig(max_batch_size=2))


def test_a_model_of_the_server_is_not_replaced_unless_allowed(protected: tuple[Triton, Server]) -> None:
    _, server = protected
    triton = RemoteTriton(server.http_url, access_token=server.token)
    triton.bind("n", times(1), X, Y)
    triton.bind("own", times(2), X, Y)
    with pytest.raises(PyTritonInvalidOperationError, match="has a model 'own'"):
        triton.connect()
    assert not triton.is_connected()
    assert not server.is_ready("n")
    assert server.ask("own") == 100
    with RemoteTriton(server.http_url, None, server.token, replace_models=True) as triton:
        triton.bind("own", times(2), X, Y)
        assert server.ask("own") == 2
    # Its own one is there again.
    assert server.ask("own") == 100


def put_into_repository(folder: Path, sockets: Path, name: str) -> Path:
    """Lets an operator have a model of their own; gives the file that describes it to workers."""
    (folder / "models").mkdir(exist_ok=True)
    with pytest.raises(SystemExit) as ended:
        run_command(
            f"add --model-repository={folder}/models --name={name} --endpoint={sockets} "
            "--input=x:float32:-1 --output=y:float32:-1".split()
        )
    assert not ended.value.code
    return folder / "models" / name / "1" / "pytriton.json"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_operators_model_is_put_back_by_the_last_who_serves_in_its_place(tmp_path: Path, protocol: str) -> None:
    with contextlib.ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pt")))
        description = read_description(put_into_repository(tmp_path, sockets, "m"))
        put_into_repository(tmp_path, sockets, "idle")
        server = stack.enter_context(foreign_server(tmp_path, "--model-control-mode=explicit", "--load-model=m"))
        worker = Worker(times(100), description, endpoint_path(sockets, "m", 1))
        worker.start()
        stack.callback(worker.stop, PATIENCE_S)
        assert server.ask("m") == 100
        url = server.http_url if protocol == "http" else server.grpc_url
        with RemoteTriton(url, replace_models=True) as second:
            with RemoteTriton(url, replace_models=True) as first:
                first.bind("m", times(2), X, Y)
                first.bind("idle", times(2), X, Y)
                assert server.ask("m") == 2
                # It serves the same, and did not see what was there before.
                second.bind("m", times(2), X, Y)
                # With other tensors Triton loads it again, which changes nothing about whose name it is.
                first.bind("n", times(3), X, Y)
            assert server.ask("m") == 2
            # The operator has not loaded it.
            assert not server.is_ready("idle")
            second.rebind("m", times(5), config=ModelConfig(max_batch_size=7))
            assert server.ask("m") == 5
        assert server.ask("m") == 100
        # With unbind as well; and one that cannot be put back is told.
        with RemoteTriton(url, replace_models=True) as third:
            third.bind("m", times(2), X, Y)
            third.unbind("m")
            assert server.ask("m") == 100


def test_an_operators_model_that_cannot_be_put_back_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(prefix="pt") as sockets:
        put_into_repository(tmp_path, Path(sockets), "m")
        with foreign_server(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server:
            with RemoteTriton(server.http_url, replace_models=True) as triton:
                triton.bind("m", times(2), X, Y)
                shutil.rmtree(tmp_path / "models" / "m")
            assert not server.is_ready("m")
    assert "'m' of the server" in caplog.text
    assert "cannot be put back" in caplog.text


ORPHAN = """
import sys, time
import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import RemoteTriton

tensors = dict(inputs=[Tensor((-1,), np.float32, "x")], outputs=[Tensor((-1,), np.float32, "y")])
triton = RemoteTriton(sys.argv[1])
config = ModelConfig(attach_timeout_s=0.2)
triton.bind("orphan", lambda requests: [{"y": requests[0].data["x"]}], **tensors, config=config)
triton.connect()
print("connected", flush=True)
triton.serve()
"""


def test_models_of_a_killed_process_can_be_replaced(server: Server, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, server.http_url],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        assert server.ask("orphan") == 1
        process.kill()
    assert "no worker is attached" in server.ask("orphan")
    with RemoteTriton(server.http_url, replace_models=True) as triton:
        triton.bind("orphan", times(2), X, Y)
        assert server.ask("orphan") == 2
    assert not server.is_ready("orphan")


# ---- one model, several processes ------------------------------------------------------------------------------------


def ask_all(server: Server, model: str, count: int = 40) -> set[Any]:
    """The different answers to many questions at once."""
    with ThreadPoolExecutor(8) as pool:
        return set(pool.map(lambda _: server.ask(model), range(count)))


def test_two_serve_one_model_together(server: Server) -> None:
    with RemoteTriton(server.http_url) as second:
        with RemoteTriton(server.grpc_url) as first:
            first.bind("m", slowly(times(2)), X, Y)
            second.bind("m", slowly(times(3)), X, Y)
            assert ask_all(server, "m") == {2, 3}
            # What concerns one of them is for that one to change, the rest is not.
            second.rebind("m", slowly(times(4)))
            assert ask_all(server, "m") == {2, 4}
            for one in (first, second):
                with pytest.raises(PyTritonInvalidOperationError, match="served by another process, too"):
                    one.bind("m", times(5), X, Y, model_version=2)
                with pytest.raises(PyTritonInvalidOperationError, match="served by another process, too"):
                    one.rebind("m", times(5), config=ModelConfig(max_batch_size=9))
            assert ask_all(server, "m") == {2, 4}
            with under_load(server.http_url, server.grpc_url, "m") as load:
                assert first.stop()
                load.wait_for_more()
            assert load.failures == []
            assert len(load.answers) == load.sent
        assert second.is_alive()
        assert ask_all(server, "m") == {4}
        first = RemoteTriton(server.http_url)
        first.bind("m", slowly(times(6)), X, Y)
        first.connect()
        assert ask_all(server, "m") == {4, 6}
        # Who loaded it is of no importance, who is the last is.
        with under_load(server.http_url, server.grpc_url, "m") as load:
            second.unbind("m")
            load.wait_for_more()
        assert load.failures == []
        assert ask_all(server, "m") == {6}
        # Alone with it, everything can be changed again.
        first.rebind("m", times(7), config=ModelConfig(max_batch_size=9))
        first.bind("m", times(8), X, Y, model_version=2, config=ModelConfig(max_batch_size=9))
        assert (server.ask("m", 1), server.ask("m", 2)) == (7, 8)
        first.stop()
        assert not server.is_ready("m")


def test_the_last_of_many_takes_the_model_with_it(server: Server) -> None:
    many = [RemoteTriton(server.http_url) for _ in range(4)]
    for place, one in enumerate(many):
        one.bind("m", times(place), X, Y)
        one.connect()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda one: one.stop(), many))
    assert not server.is_ready("m")


def slowly(infer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """So slow that nobody answers all requests alone."""

    def call(requests: Any) -> Any:
        time.sleep(0.005)
        return infer(requests)

    return call


SHARER = """
import sys, time
import numpy as np
from pytriton.model_config import Tensor
from pytriton.triton import RemoteTriton

def infer(requests):
    time.sleep(0.005)
    return [{"y": request.data["x"]} for request in requests]

triton = RemoteTriton(sys.argv[1])
triton.bind("m", infer, [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")])
triton.connect()
print("connected", flush=True)
triton.serve()
"""


@contextmanager
def sharer(url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that serves the model `m`, and is killed."""
    with subprocess.Popen([sys.executable, "-c", SHARER, url], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "connected\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("killed", ["first", "second"])
def test_one_that_is_killed_leaves_the_model_to_the_other(server: Server, killed: str) -> None:
    with contextlib.ExitStack() as stack:
        if killed == "first":
            process = stack.enter_context(sharer(server.http_url))
        triton = stack.enter_context(RemoteTriton(server.http_url))
        triton.bind("m", slowly(times(2)), X, Y)
        if killed == "second":
            process = stack.enter_context(sharer(server.http_url))
        assert ask_all(server, "m") == {1, 2}
        process.kill()
        process.wait(PATIENCE_S)
        eventually(lambda: connections()[str(triton._models["m", 1].endpoint(triton._workspace.endpoints_path))] == 1)
        # Somebody who comes then removes what the dead have left, but not what is in use.
        with RemoteTriton(server.http_url) as other:
            other.bind("m", slowly(times(3)), X, Y)
            assert ask_all(server, "m") == {2, 3}
        assert ask_all(server, "m") == {2}
        assert triton.is_alive()
    assert not server.is_ready("m")


def test_the_same_model_of_a_killed_process_is_taken_over(server: Server) -> None:
    with sharer(server.http_url) as process:
        process.kill()
        process.wait(PATIENCE_S)
        with RemoteTriton(server.http_url) as triton:
            triton.bind("m", times(2), X, Y)
            assert server.ask("m") == 2
    assert not server.is_ready("m")


def test_what_somebody_else_has_put_in_its_place_stays(server: Server) -> None:
    with RemoteTriton(server.http_url, replace_models=True) as second:
        with RemoteTriton(server.http_url) as first:
            first.bind("m", times(2), X, Y)
            second.bind("m", times(3), X, Y, config=ModelConfig(max_batch_size=7))
            assert server.ask("m") == 3
            eventually(lambda: not first.is_alive())
        assert server.ask("m") == 3
        assert second.is_alive()


# ---- the server is started again -------------------------------------------------------------------------------------


def answers(server: Server, model: str, version: int | None = None) -> Any:
    """As `Server.ask`, of a server that may be away."""
    try:
        return server.ask(model, version)
    except (OSError, http.client.HTTPException) as error:
        return error


def test_models_come_back_with_the_server() -> None:
    policy = RestartPolicy(max_crashes=10, first_delay_s=0.0)
    with contextlib.ExitStack() as stack:
        own = Triton(config=local_config(), restart=policy)
        stack.enter_context(running(own))
        url, token = str(own.http_url), own.get_access_token()
        server = Server(int(url.rpartition(":")[2]), 0, token)
        first, second = (stack.enter_context(RemoteTriton(url, access_token=token)) for _ in range(2))
        first.bind("a", times(2), X, Y)
        first.bind("a", times(3), X, Y, model_version=2)
        first.bind("m", slowly(times(4)), X, Y)
        second.bind("m", slowly(times(5)), X, Y)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        serving = pool.submit(first.serve)
        for _ in range(3):
            os.kill(server_pid(own), signal.SIGKILL)
            eventually(lambda: answers(server, "a", 1) == 2 and answers(server, "a", 2) == 3)
            eventually(lambda: answers(server, "m") in (4, 5) and ask_all(server, "m") == {4, 5})
            eventually(lambda: own.is_alive() and first.is_alive() and second.is_alive())
        assert not serving.done()
        first.stop()
        serving.result(PATIENCE_S)
        assert not server.is_ready("a")
        assert ask_all(server, "m") == {5}
        second.stop()
        assert not server.is_ready("m")


def test_the_end_of_a_process_is_seen_however_soon_another_is_there() -> None:
    own = Triton(config=local_config(), restart=RestartPolicy(first_delay_s=0.0))
    own.bind("own", times(2), X, Y)
    with running(own):
        endpoint = own._models["own", 1].endpoint(own._workspace.endpoints_path)
        watch = ServerProcessWatch(endpoint)
        eventually(lambda: not watch.has_ended)
        os.kill(server_pid(own), signal.SIGKILL)
        eventually(lambda: watch.has_ended)
        eventually(lambda: connections()[str(endpoint)] == 1)
        assert watch.has_ended
        watch.close()
    assert not ServerProcessWatch(endpoint).has_ended  # of nobody nothing is known


def test_a_bind_while_the_server_is_away_says_so() -> None:
    own = Triton(config=local_config())
    with running(own):
        triton = RemoteTriton(str(own.http_url), access_token=own.get_access_token())
        triton.bind("m", times(2), X, Y)
        triton.connect()
        own.stop()
        eventually(lambda: not triton.is_alive() and not triton.is_connected())
        with pytest.raises(TritonServerError, match="did not answer"):
            triton.bind("n", times(2), X, Y)
        assert triton.stop()


def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        triton = RemoteTriton(f"http://127.0.0.1:{listening.getsockname()[1]}", connect_timeout_s=0.5)
        with pytest.raises(PyTritonClientTimeoutError, match="No tritonserver answered"):
            triton.connect()


# ---- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["", "ftp://localhost", "localhost:99999", "http://", None])
def test_bad_addresses(url: Any) -> None:
    with pytest.raises(PyTritonClientInvalidUrlError):
        RemoteTriton(url)


def test_default_ports() -> None:
    assert RemoteTriton("localhost").url == "http://localhost:8000"
    assert RemoteTriton("grpc://localhost").url == "grpc://localhost:8001"


def test_bad_timeouts() -> None:
    with pytest.raises(PyTritonBadParameterError, match="connect_timeout_s must be a number"):
        RemoteTriton("localhost", connect_timeout_s=-1)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_nobody_there(scheme: str) -> None:
    (port,) = free_ports(1)
    triton = RemoteTriton(f"{scheme}://127.0.0.1:{port}", connect_timeout_s=0.3)
    triton.bind("m", times(1), X, Y)
    with pytest.raises(PyTritonClientTimeoutError, match=r"No tritonserver answered at .* within 0\.3 s") as caught:
        triton.serve()
    assert (caught.value.missing, caught.value.timeout_s) == ("server", 0.3)
    assert not triton.is_connected()


def test_stop_ends_the_wait_for_a_server() -> None:
    (port,) = free_ports(1)
    triton = RemoteTriton(f"127.0.0.1:{port}", connect_timeout_s=600)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(triton.connect)
        eventually(lambda: triton._life.session is not None)
        triton.stop()
        with pytest.raises(TritonServerStartError, match="stop"):
            connecting.result(PATIENCE_S)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_token_of_a_server_of_the_same_user_is_found(protected: tuple[Triton, Server], protocol: str) -> None:
    owner, server = protected
    path = owner.access_token_path
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o600
    with RemoteTriton(server.http_url if protocol == "http" else server.grpc_url) as triton:
        triton.bind("double", times(2), X, Y)
        assert server.ask("double") == 2
    assert owner.stop()
    assert owner.access_token_path is None
    assert not path.exists()


@pytest.mark.parametrize("token", [None, "wrong"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_the_token(protected: tuple[Triton, Server], protocol: str, token: str | None) -> None:
    _, server = protected
    triton = RemoteTriton(server.http_url if protocol == "http" else server.grpc_url, access_token=token)
    # The home of another user has no token.
    with short_home(), pytest.raises(PyTritonClientInferenceServerError, match="access_token") as caught:
        triton.connect()
    assert caught.value.status == ("403" if protocol == "http" else "UNAVAILABLE")
    assert "restricted" in str(caught.value.server_message)
    assert not triton.stop()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_encrypted_connections(protected: tuple[Triton, Server], tmp_path: Path, protocol: str) -> None:
    _, server = protected
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2", "http/1.1"])
    certificate.configure_cert(context)
    plain_url = server.http_url if protocol == "http" else server.grpc_url
    with Relay(plain_url, context) as relay:
        url = f"{protocol}s://127.0.0.1:{relay.port}"
        with RemoteTriton(url, access_token=server.token, tls=TlsSettings(ca_file=tmp_path / "ca.pem")) as triton:
            triton.bind("sealed", times(2), X, Y)
            assert server.ask("sealed") == 2.0
            triton.rebind("sealed", times(3))
            assert server.ask("sealed") == 3.0
        with pytest.raises(PyTritonClientConnectionError, match=r"tls=TlsSettings\(ca_file"):
            RemoteTriton(url, access_token=server.token).connect()
    with pytest.raises(PyTritonClientConnectionError, match=r"tls=TlsSettings\(ca_file"):
        RemoteTriton(plain_url.replace("://", "s://"), access_token=server.token).connect()
    with pytest.raises(PyTritonClientValueError, match="without encryption"):
        RemoteTriton(plain_url, tls=TlsSettings())


@pytest.mark.parametrize("mode", ["none", "poll"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_whose_models_are_fixed(tmp_path: Path, mode: str, protocol: str) -> None:
    with foreign_server(tmp_path, f"--model-control-mode={mode}") as server:
        triton = RemoteTriton(server.http_url if protocol == "http" else server.grpc_url)
        with triton, pytest.raises(TritonModelLoadError, match=r"is not allowed.*--model-control-mode=explicit"):
            triton.bind("m", times(1), X, Y)


def test_a_failed_bind_leaves_nothing(server: Server, tmp_path: Path) -> None:
    workspace = Path(os.environ["PYTRITON_HOME"]) / "w"
    with RemoteTriton(server.http_url, workspace) as triton:
        triton.bind("m", times(1), X, Y)
        # The server cannot make the socket.
        for name in ("n.1.sock", "n~1.1.sock"):
            (workspace / "endpoints" / name).mkdir()
        with pytest.raises(TritonModelLoadError, match="exists and is not a socket"):
            triton.bind("n", times(1), X, Y, config=ModelConfig(max_batch_size=3))
        for name in ("n.1.sock", "n~1.1.sock"):
            (workspace / "endpoints" / name).rmdir()
        assert not server.is_ready("n")
        assert triton.is_alive()
        triton.bind("n", times(2), X, Y)
        assert server.ask("n") == 2
    assert not workspace.exists()


def test_the_end_of_the_server(tmp_path: Path) -> None:
    first = Triton(config=local_config())
    first.run()
    assert first.http_url is not None
    port = int(first.http_url.rpartition(":")[2])
    triton = RemoteTriton(first.http_url, access_token=first.get_access_token(), connect_timeout_s=1)
    triton.bind("m", times(2), X, Y)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            triton.serve(monitoring_period_s=0.1)
        except TritonServerError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    eventually(triton.is_alive)
    os.kill(server_pid(first), signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not triton.is_alive()
    assert not triton.is_connected()
    assert isinstance(errors[0], TritonServerExitedError)
    assert f"The tritonserver at http://127.0.0.1:{port} does not answer any more" in str(errors[0])
    first.stop()


def test_connecting_again_to_a_server_that_was_started_again() -> None:
    first = Triton(config=local_config())
    first.run()
    assert first.http_url is not None
    port = int(first.http_url.rpartition(":")[2])
    with RemoteTriton(first.http_url, access_token=first.get_access_token()) as triton:
        triton.bind("m", times(2), X, Y)
        first.stop()
        eventually(lambda: not triton.is_alive())
        second = Triton(config=local_config(http_port=port), security_config=first._security)
        with running(second):
            triton.connect()
            assert triton.is_alive()
            assert Server(port, 0).ask("m") == 2
            triton.stop()


def test_a_model_that_somebody_unloads(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "MISSING_DEADLINE_S", 0.3)
    with RemoteTriton(server.http_url) as triton:
        triton.bind("m", times(2), X, Y)
        server.unload("m")
        eventually(lambda: not triton.is_alive())
        with pytest.raises(TritonServerError, match="does not serve 'm' from here any more"):
            triton.serve(monitoring_period_s=0.1)
        triton.connect()
        assert server.ask("m") == 2


def test_an_unrecoverable_error_ends_serve(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def lost(requests: Any) -> Any:
        raise PyTritonUnrecoverableError("the device is gone")

    with RemoteTriton(server.http_url) as triton:
        triton.bind("m", lost, X, Y)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(server.ask, "m")
            with pytest.raises(PyTritonUnrecoverableError, match="the device is gone"):
                triton.serve()
            assert "the device is gone" in asking.result(PATIENCE_S)
    assert not server.is_ready("m")
    # What was logged holds the error, and with it the inputs.
    caplog.clear()
