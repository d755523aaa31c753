"""HAProxy and Envoy before two servers, by the files of deploy/: one is drained under load, and nobody notices."""

from __future__ import annotations

import http.client
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from support.http import call
from support.load import under_load
from support.paths import ROOT
from support.processes import envoy, free_ports, haproxy, require, while_running
from support.serving import ServedFile, is_ready, short_home
from support.waiting import PATIENCE_S, eventually

APP = """
from typing import Annotated, TypedDict

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators import Shape, model

Rows = Annotated[NDArray[np.float32], Shape("batch", 1)]

class Answer(TypedDict):
    y: Rows

@model(batched=True, max_batch_size=8)
def m(x: Rows) -> Answer:
    return {{"y": {factor} * x}}
"""


HAPROXY = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
ENVOY = ROOT / "deploy" / "envoy" / "envoy.yaml"


class Balanced:
    """Two servers, and the ports of a balancer before them."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.servers = []
        for factor in (2, 3):
            app = folder / f"app{factor}.py"
            app.write_text(APP.format(factor=factor))
            self.servers.append(ServedFile(app, home))
        self.http, self.grpc = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        first, second = self.servers
        found = {"HTTP_BIND": self.http, "GRPC_BIND": self.grpc}
        for name, server in (("FIRST", first), ("SECOND", second)):
            http_port, grpc_port, _ = server.ports
            found |= {
                f"{name}_HTTP": f"127.0.0.1:{http_port}",
                f"{name}_GRPC": f"127.0.0.1:{grpc_port}",
                f"{name}_HOST": "127.0.0.1",
                f"{name}_HTTP_PORT": str(http_port),
            }
        return {**os.environ, **found}

    @contextmanager
    def haproxy(self, folder: Path) -> Iterator[None]:
        with haproxy(HAPROXY, folder, self.serves, self.environment):
            yield

    @contextmanager
    def envoy(self, folder: Path) -> Iterator[None]:
        addresses = {8080: self.http, 8081: self.grpc}
        for first, server in zip((8000, 8010), self.servers, strict=True):
            addresses |= {first + number: f"127.0.0.1:{port}" for number, port in enumerate(server.ports)}
        command = envoy(folder, addresses)
        with (folder / "envoy.log").open("wb") as log, while_running(command, stdout=log, stderr=log):
            eventually(self.serves)
            yield

    def serves(self) -> bool:
        """Return whether both ports of the balancer lead to a server that is ready."""
        try:
            with closing(InferenceServerClient(self.grpc)) as client:
                return is_ready(self.http) and bool(client.is_server_ready())
        except InferenceServerException:
            return False


@pytest.fixture(params=["haproxy", "envoy"])
def balanced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Balanced]:
    if request.param == "haproxy":
        require("haproxy")
    with short_home() as home, ExitStack() as stack:
        balanced = Balanced(tmp_path, home)
        balanced.processes += [stack.enter_context(server.running()) for server in balanced.servers]
        with getattr(balanced, request.param)(tmp_path):
            yield balanced


def test_the_file_for_haproxy_can_be_used_as_it_is() -> None:
    """Without a variable it starts before two servers of this machine."""
    named = ("HTTP_BIND", "GRPC_BIND", "FIRST", "SECOND")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(named)}
    command = [require("haproxy"), "-c", "-f", str(HAPROXY)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


def test_the_file_for_envoy_can_be_used_as_it_is() -> None:
    command = [str(Path(sys.executable).with_name("envoy")), "--mode", "validate", "-c", str(ENVOY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\[(warning|error)\]", done.stderr), done.stderr


def test_a_server_is_drained_under_load(balanced: Balanced) -> None:
    first = balanced.processes[0]
    with under_load(f"http://{balanced.http}", f"grpc://{balanced.grpc}", "m") as load:
        # Both are asked.
        load.wait_for(lambda: {factor for _, factor in load.answers} == {2.0, 3.0})
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE_S) == 0
        load.wait_for_more(200)
    assert load.failures == []
    assert len(load.answers) == load.sent


def test_streams_of_one_connection_go_to_both(balanced: Balanced) -> None:
    tensor = InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with closing(InferenceServerClient(balanced.grpc)) as client:

        def factor_of_a_stream() -> float:
            client.start_stream(lambda result, error: answers.put((result, error)))
            found = set()
            for _ in range(3):
                client.async_stream_infer("m", [tensor])
                result, error = answers.get(timeout=PATIENCE_S)
                assert error is None
                found.add(float(result.as_numpy("y")[0, 0]))
            client.stop_stream()
            # All requests of a stream are one call, which one server answers.
            [factor] = found
            return factor

        first = factor_of_a_stream()
        eventually(lambda: factor_of_a_stream() != first)


def test_what_does_not_pass(balanced: Balanced) -> None:
    assert call(balanced.http, "POST", "/v2/models/m/generate", {"x": 2.0})[0] == 200
    operators = ("repository/index", "systemsharedmemory/status", "logging", "trace/setting", "models/m/trace/setting")
    for path in operators:
        assert call(balanced.http, "POST", f"/v2/{path}", {})[0] == 403
    with closing(InferenceServerClient(balanced.grpc)) as client:
        assert client.is_model_ready("m")
        for ask in (
            client.get_model_repository_index,
            client.get_system_shared_memory_status,
            client.get_log_settings,
            client.get_trace_settings,
            lambda: client.unload_model("m"),
        ):
            with pytest.raises(InferenceServerException, match=r"403|for operators") as caught:
                ask()
            # Those of the server's own say which header they expect.
            assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
    connection = http.client.HTTPConnection(balanced.http, timeout=PATIENCE_S)
    with closing(connection):
        connection.putrequest("POST", "/v2/models/m/generate")
        connection.putheader("Content-Length", str((64 << 20) + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413
