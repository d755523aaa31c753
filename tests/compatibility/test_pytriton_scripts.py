"""Scripts as PyTriton's users write them run unchanged: each is started as its user would, and prints what it should.

The scripts in `pytriton_scripts/` use nothing but what PyTriton 0.7.0 offers. Their ports come from the environment.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.waiting import PATIENCE_S

SCRIPTS = Path(__file__).parent / "pytriton_scripts"

PRINTED = {
    "add_sub_notebook.py": """
        [('add', array([[2., 4.],
               [6., 8.]], dtype=float32)), ('sub', array([[0., 0.],
               [0., 0.]], dtype=float32))]
        128 True
        True
        False
        [3. 8.]
        {'product': array([3., 8.], dtype=float32)}
    """,
    "several_instances.py": """
        [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0]
        True
        [4 5 3]
        False
    """,
    "strings.py": """
        ['Hello, ADA', 'Hello, ŁUKASZ', 'Hello, 京'] [3, 6, 1]
        [b'Hello, BOB']
    """,
    "optional_inputs.py": """
        [b'a'] [b'a+b']
        [3.] [2.25]
        [1.5 1.5 1.5]
        [16]
    """,
    "streaming.py": """
        [0, 1, 2]
        [[[0]], [[1]]]
        [0, 1, 2]
        [[[0]], [[1]]]
        [0, 10, 20, 30]
    """,
    "futures.py": """
        328350
        square
        328350
        square
        [25 36]
        full: Queue is full
    """,
    "asyncio_client.py": """
        95.0
        halve 8
        True
        {'half': array([1.5], dtype=float32)}
    """,
    "priorities_cache_warmup.py": """
        warm-up: [(4, 2), (4, 2)]
        [1.0, 1.0] 1
        calls: 1
        [2. 2.]
    """,
    "remote.py": """
        [3. 6.]
        True True
        False False
        True
    """,
}
CLIENT_PRINTED = """
    [[2.0, 4.0]] [[b'custom-header=x;flag=True;size=3;']]
    [2. 4.]
"""


class Ports:
    """Ports that nobody else is given while they are held, and that a server may still listen on."""

    def __init__(self) -> None:
        self._held = ExitStack()

    def take(self) -> int:
        holder = self._held.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        return port

    def release(self) -> None:
        self._held.close()


@pytest.fixture
def ports() -> Iterator[Ports]:
    found = Ports()
    yield found
    found.release()


@pytest.fixture
def environment(ports: Ports) -> Iterator[dict[str, str]]:
    """What a container or a shell would set, with a short path for the sockets; nothing is left in it."""
    with tempfile.TemporaryDirectory(prefix="pt") as home:
        http = str(ports.take())
        settings = {f"PYTRITON_TRITON_CONFIG_{name}_ADDRESS": "127.0.0.1" for name in ("HTTP", "GRPC", "METRICS")}
        settings |= {"PYTRITON_TRITON_CONFIG_HTTP_PORT": http, "PYTRITON_TRITON_CONFIG_GRPC_PORT": "0"}
        settings |= {"PYTRITON_TRITON_CONFIG_METRICS_PORT": "0", "PYTRITON_HOME": home, "PYTHONUNBUFFERED": "1"}
        yield {**os.environ, **settings, "PORT": http, "GRPC_PORT": str(ports.take())}
        assert os.listdir(home) == []


def run(name: str, environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    # What a callable raises is logged with its traceback; this script has one that raises.
    assert "Traceback" not in done.stderr or name == "asyncio_client.py", done.stderr
    return done.stdout


def lines(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("name", PRINTED)
def test_a_script_prints_what_it_did(name: str, environment: dict[str, str]) -> None:
    assert lines(run(name, environment)) == lines(PRINTED[name])


def test_every_script_is_run() -> None:
    assert {path.name for path in SCRIPTS.glob("*.py")} == {*PRINTED, "server.py", "client.py"}


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "the callable"])
def test_a_server_script_and_its_client(end: str, environment: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    url = f"localhost:{environment['PORT']}"
    with log.open("w") as output:
        command = [sys.executable, str(SCRIPTS / "server.py"), "--port", environment["PORT"]]
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            extra = ["--break"] if end == "the callable" else []
            printed = run("client.py", environment, "--url", url, *extra)
            assert lines(printed) == lines(CLIENT_PRINTED) + ["True"] * len(extra)
            if end != "the callable":
                server.send_signal(getattr(signal, end))
            code = server.wait(PATIENCE_S)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
    if end == "the callable":
        assert code == 1
        assert "PyTritonUnrecoverableError: the device is lost" in log.read_text()
    else:
        assert code == 0, log.read_text()
        assert "Traceback" not in log.read_text()


def test_a_client_may_be_started_first(environment: dict[str, str], tmp_path: Path) -> None:
    url = f"localhost:{environment['PORT']}"
    command = [sys.executable, str(SCRIPTS / "client.py"), "--url", url]
    client = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)  # it waits by now, or will in a moment
    with (tmp_path / "log").open("w") as output:
        command = [sys.executable, str(SCRIPTS / "server.py"), "--port", environment["PORT"]]
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            printed, errors = client.communicate(timeout=PATIENCE_S)
            assert client.returncode == 0, errors
            assert lines(printed) == lines(CLIENT_PRINTED)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(PATIENCE_S)
            if client.poll() is None:
                client.kill()
                client.wait()
