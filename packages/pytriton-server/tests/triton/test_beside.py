"""Programs beside a server; the server itself need not run for that."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytriton.triton import Triton, TritonSecurityConfig, _beside, run_beside
from support.waiting import PATIENCE_S, eventually

# Writes what it knows of itself, whole or not at all, and waits for the signal that ends it.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path

told = {"pid": os.getpid(), "session": os.getsid(0), "environment": dict(os.environ)}
Path("telling").write_text(json.dumps(told))
Path("telling").rename(f"told{sys.argv[1]}")
signal.pause()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_beside, "_PAUSE_S", 0.01)
    return tmp_path


def told(number: int = 0) -> Any:
    path = Path(f"told{number}")
    eventually(path.exists)
    return json.loads(path.read_text())


def is_running(pid: int) -> bool:
    try:
        # Nobody may be there to wait for one whose parent was killed.
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_it_lives_as_long_as_the_block() -> None:
    triton = Triton(security_config=TritonSecurityConfig(access_token="secret"))
    with run_beside(triton, [sys.executable, "-c", PROGRAM, "0"], name="a program"):
        program = told()
        assert is_running(program["pid"])
        assert program["environment"]["PYTRITON_ACCESS_TOKEN"] == "secret"
        # Ctrl+C in a terminal goes to the processes of its session.
        assert program["session"] != os.getsid(0)
    assert not is_running(program["pid"])


@pytest.mark.parametrize(
    ("url", "set_before", "no_proxy", "no_grpc_proxy"),
    [
        ("grpc://10.1.2.3:8001", {}, "10.1.2.3", "10.1.2.3"),
        ("grpcs://[fe80::1]:8001", {"NO_PROXY": "a,b"}, "a,b,fe80::1", "a,b,fe80::1"),
        ("grpc://host:80", {"NO_PROXY": "a,b", "no_grpc_proxy": "c"}, "a,b,host", "c,host"),
    ],
)
def test_it_reaches_the_server_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, url: str, set_before: dict[str, str], no_proxy: str, no_grpc_proxy: str
) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    triton: Any = SimpleNamespace(grpc_url=url, http_url=None, get_access_token=lambda: None)
    with run_beside(triton, [sys.executable, "-c", PROGRAM, "0"], name="a program"):
        environment = told()["environment"]
    assert (environment["no_proxy"], environment["no_grpc_proxy"]) == (no_proxy, no_grpc_proxy)
    assert "PYTRITON_ACCESS_TOKEN" not in environment


def test_one_that_ends_by_itself_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    # Each run takes the next number.
    program = PROGRAM.replace("sys.argv[1]", "len(list(Path().glob('told*')))")
    with run_beside(Triton(), [sys.executable, "-c", program], name="a program"):
        first = told(0)["pid"]
        os.kill(first, signal.SIGKILL)
        second = told(1)["pid"]
        assert first != second
    assert not is_running(second)
    assert "The process of a program ended with exit code -9: it is started again." in caplog.messages


def test_one_that_ends_again_and_again_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    given_up = threading.Event()
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with run_beside(Triton(), command, name="a program", on_given_up=given_up.set):
        assert given_up.wait(PATIENCE_S)
    assert "The process of a program has ended 5 times within 60 s: it is given up" in caplog.messages[-1]
    assert caplog.messages[-2] == "The process of a program ended with exit code 3."


def test_one_that_is_not_to_be_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with run_beside(Triton(), [sys.executable, "-c", "raise SystemExit(3)"], name="a program", restart=False):
        eventually(lambda: caplog.messages)
    assert caplog.messages == ["The process of a program ended with exit code 3."]


def test_it_inherits_a_socket() -> None:
    answer = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).accept()[0].sendall(b'here')"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        command = [sys.executable, "-c", answer, str(number)]
        with (
            run_beside(Triton(), command, name="a program", descriptors=[number], restart=False),
            socket.create_connection(listener.getsockname(), timeout=PATIENCE_S) as caller,
        ):
            assert caller.recv(100) == b"here"


def test_one_that_takes_no_notice_of_the_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_beside, "_END_S", 0.1)
    program = PROGRAM.replace("told = ", "signal.signal(signal.SIGTERM, signal.SIG_IGN); told = ")
    program = program.replace("signal.pause()", "[signal.pause() for _ in iter(int, 1)]")
    with run_beside(Triton(), [sys.executable, "-c", program, "0"], name="a program"):
        pid = told()["pid"]
    assert not is_running(pid)


OWNER = """
import os, sys
from pytriton.triton import Triton, run_beside

with run_beside(Triton(), [sys.executable, "-c", sys.argv[1], "0"], name="a program"):
    sys.stdin.read()
    os.kill(os.getpid(), 9)
"""


def test_it_ends_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, PROGRAM], stdin=subprocess.PIPE) as owner:
        pid = told()["pid"]
        owner.communicate(timeout=PATIENCE_S)
    assert owner.returncode == -signal.SIGKILL
    eventually(lambda: not is_running(pid))
