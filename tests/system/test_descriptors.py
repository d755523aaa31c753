"""Where file descriptors run out, errors say so, and what to do, whoever has run out of them."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import resource
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from pytriton.proxy_backend.system.shortage import advise, explain
from pytriton.server.errors import TritonServerError
from pytriton.triton import Triton
from support.callables import X, Y, identity
from support.http import call, infer
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

CAUSE = "File descriptors have run out: a process may have {}. Raise the limit (ulimit -n)"

# Everything is imported before the limit is lowered to what is open then and a few more.
COMMON = """
import os, resource, sys
from pathlib import Path
import numpy as np
from pytriton.model_config import Tensor

X, Y = [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")]

def double(requests):
    return [{"y": request["x"] * 2} for request in requests]

def lower_limit(left):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # One of them is that of the folder.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + left, hard))

def attempt(function):
    try:
        function()
    except Exception as error:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        print(type(error).__name__, error, flush=True)
    else:
        print("done", flush=True)
"""
START = (
    COMMON
    + """
from pytriton.triton import Triton, TritonConfig
import pytriton.server.lifecycle.session, pytriton.server.tritonserver.process, pytriton.server.tritonserver.exec_shim

config = TritonConfig(
    http_address="127.0.0.1", grpc_address="127.0.0.1", metrics_address="127.0.0.1",
    http_port=0, grpc_port=0, metrics_port=0, allow_gpu_metrics=False,
)

def serve():
    with Triton(config=config) as triton:
        for number in range(int(sys.argv[1])):
            triton.bind(f"model{number}", double, X, Y)

if len(sys.argv) > 2:
    lower_limit(int(sys.argv[2]))
attempt(serve)
"""
)
IN_PROCESS = (
    COMMON
    + """
from pytriton import inprocess

def serve():
    with inprocess.Server() as server:
        server.bind("double", double, X, Y).infer(inputs={"x": np.ones((1, 2), np.float32)})

serve()
lower_limit(int(sys.argv[1]))
attempt(serve)
"""
)
WORKER = (
    COMMON
    + """
from pytriton.proxy_backend import Worker, ModelSpec

spec = ModelSpec(name="model", version=1, inputs=(), outputs=(), batching=True, max_batch_size=4)
worker = Worker(double, spec, Path(sys.argv[1]))
lower_limit(0)
worker.start()
attempt(lambda: worker.wait_attached(0.5))
worker.stop(10)
"""
)

CLIENT = (
    COMMON
    + """
from pytriton.client import ModelClient

def ask():
    with ModelClient("http://127.0.0.1:9", "model", init_timeout_s=0.5) as client:
        client.infer_sample([1.0])

try:
    ask()  # imports what it needs
except Exception:
    lower_limit(0)
attempt(ask)
"""
)


def run(script: str, *arguments: object, limit: int | None = None) -> str:
    """Runs a script with a limit of its own; gives what it has printed."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    if limit is not None:
        command = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout, done.stderr
    return done.stdout


def test_only_what_is_about_descriptors_gets_that_advice() -> None:
    assert advise("No such file or directory") == ""
    assert explain(OSError(errno.ENOSPC, "No space left on device"), "Is the disk full?") == (
        "No space left on device. Is the disk full?"
    )
    told = explain(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Is the disk full?")
    assert told.startswith("Too many open files. File descriptors have run out")
    assert "disk" not in told
    assert "whole machine" in explain(OSError(errno.ENFILE, os.strerror(errno.ENFILE)))
    assert str(TritonServerError("it ended.")) == "it ended."
    # Whoever catches it and raises it again says it once.
    error = TritonServerError("it ended.", log_lines=["[err] pipe: Too many open files"])
    assert str(error).startswith("it ended. File descriptors have run out")
    assert str(TritonServerError(str(error), log_lines=error.log_lines)) == str(error)


@pytest.mark.parametrize(("limit", "models"), [(16, 1), (28, 1), (64, 60)])
def test_a_server_under_a_low_limit_names_it(limit: int, models: int) -> None:
    """tritonserver has the same limit: it ends, does not accept, or does not load a model, by how much is left."""
    with short_home():
        said = run(START, models, limit=limit)
    assert CAUSE.format(limit) in said, said


@pytest.mark.parametrize("left", range(6))
def test_a_process_without_descriptors_names_them_when_it_starts_a_server(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without descriptors no folder can be removed, so the home of this test may be left with some.
    monkeypatch.setenv("PYTRITON_HOME", str(tmp_path))
    said = run(START, 1, left)
    assert "File descriptors have run out" in said, said


def test_a_server_in_process_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRITON_HOME", str(tmp_path))
    said = run(IN_PROCESS, 0)
    assert "File descriptors have run out" in said, said
    # Of the attempt nothing is left, though it could not even be locked.
    assert list(tmp_path.iterdir()) == []


def test_a_worker_names_them(tmp_path: Path) -> None:
    said = run(WORKER, tmp_path / "model.1.sock")
    assert "The last attempt: Too many open files. File descriptors have run out" in said, said


def test_a_client_names_them() -> None:
    said = run(CLIENT)
    assert "Too many open files. This process has run out of file descriptors: close clients" in said, said
    assert "Check that it runs" not in said


def test_a_server_may_open_as_many_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with running(Triton(config=local_config())) as triton:
            wanted = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
            assert resource.prlimit(server_pid(triton), resource.RLIMIT_NOFILE)[0] == wanted
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def status(url: str, path: str) -> int | None:
    """Return the status of an answer; `None` if there is none, as for a request that comes late."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return call(url, "GET", path)[0]
    return None


def test_callers_without_a_descriptor_are_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    """Not left waiting, and without a flood in the log; the metrics say how near it is."""
    config = local_config(allow_metrics=True, metrics_port=0)
    with running(Triton(config=config)) as triton, contextlib.ExitStack() as connections:
        triton.bind("m", identity, X, Y)
        url, pid = str(triton.http_url), server_pid(triton)
        left = 8
        limit = len(os.listdir(f"/proc/{pid}/fd")) + left
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        host, port = url.removeprefix("http://").split(":")
        for _ in range(4 * left):
            connections.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
        eventually(lambda: "Too many open files: callers over HTTP are turned away" in caplog.text)
        # Probes see that it is alive, and take no more callers to it; all others have to go.
        assert eventually(lambda: status(url, "/v2/health/live")) == 200
        assert eventually(lambda: status(url, "/v2/health/ready")) == 503
        with pytest.raises(OSError, match=r"reset|closed|aborted|Broken pipe"):
            infer(url, "m", 3.0)
        with urllib.request.urlopen(str(triton.metrics_url), timeout=PATIENCE_S) as page:
            told = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if "_files " in line[:40])
        assert float(told["pytriton_server_open_files"]) >= limit - 2
        assert float(told["pytriton_server_max_files"]) == limit
        connections.close()
        eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) < limit - 2)
        assert infer(url, "m", 3.0) == [3.0]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        # Not for each of them.
        assert caplog.text.count("callers over HTTP are turned away") < left
