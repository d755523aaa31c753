"""Proxies that the environment names: none comes between a program and a server of its own host."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

import pytest

from pytriton.catalog.listing import read_sleep
from pytriton.client.utils import TritonUrl, create_client_from_url
from pytriton.console.watcher import MetricsSource
from pytriton.server.control.connect import connect
from pytriton.triton import Triton
from support.clients import ask_all, serving_all
from support.http import Forwards, serving
from support.waiting import PATIENCE_S

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@pytest.fixture(scope="module")
def proxy() -> Iterator[socket.socket]:
    """A proxy that nobody may come to; whoever does waits for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.setenv(name, f"http://127.0.0.1:{listening.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            patch.delenv(name, raising=False)
        yield listening
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.fixture(scope="module", params=["http", "grpc"])
def triton(request: pytest.FixtureRequest, proxy: socket.socket) -> Iterator[Triton]:
    """A server that is managed over the one protocol that it has."""
    with serving_all(**{f"allow_{'grpc' if request.param == 'http' else 'http'}": False}) as server:
        yield server


@pytest.fixture
def url(triton: Triton) -> str:
    return str(triton.http_url or triton.grpc_url)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::ffff:127.0.0.1]"])
def test_no_client_takes_one(url: str, host: str) -> None:
    url = url.replace("127.0.0.1", host)
    ask_all(url)
    with create_client_from_url(url) as lent:
        assert lent.is_model_ready("same")


def test_nor_does_the_command_line(url: str) -> None:
    command = [sys.executable, "-m", "pytriton", "infer", url, "same", "x=[1, 2]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    command = [sys.executable, "-m", "pytriton", "models", url, "same"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same" in done.stdout


@pytest.fixture
def elsewhere(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the same server with a name that the proxy of the environment alone knows."""
    parts = urlsplit(url)
    address = f"{parts.scheme}://triton.test:8000"
    asked: list[str] = []
    handler = type("Handler", (Forwards,), {"upstream": parts.netloc, "prefix": address, "asked": asked})
    with serving(handler) as proxy:
        for name in VARIABLES:
            monkeypatch.setenv(name, f"http://{proxy}")
        yield address
    assert asked


def test_the_command_line_takes_one_to_other_hosts(elsewhere: str) -> None:
    for command in (["infer", elsewhere, "same", "x=[1, 2]"], ["models", elsewhere, "same"]):
        done = subprocess.run(
            [sys.executable, "-m", "pytriton", *command],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_pages_of_metrics_take_one(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 'pytriton_worker_asleep{model="small",version="1",worker="0"} 1\n'
    asked: list[str] = []

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(Metrics) as proxy:
        for name in VARIABLES:
            monkeypatch.setenv(name, f"http://{proxy}")
        assert read_sleep(TritonUrl("http", "triton.test", 8002))[0] == {("small", 1)}
        assert MetricsSource("http://triton.test/metrics").read() == page
        assert read_sleep(TritonUrl("http", "127.1", int(proxy.partition(":")[2])))[0] == {("small", 1)}
    assert asked == ["http://triton.test:8002/metrics", "http://triton.test:80/metrics", "/metrics"]


def test_calls_that_manage_a_server_take_one(elsewhere: str, triton: Triton) -> None:
    with closing(connect(TritonUrl.from_url(elsewhere), triton.get_access_token(), None)) as control:
        assert control.is_listening(PATIENCE_S)
        assert control.is_ready()
        assert {it["name"] for it in control.all_statistics()} == {"same", "count"}
