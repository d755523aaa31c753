"""A workspace that somebody removes while its server serves, as those do who clean up."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytriton.server.errors import WorkspaceError
from pytriton.server.lifecycle.files import ServerFiles
from pytriton.server.workspace import Workspace
from pytriton.triton import ProcessWorker, RestartPolicy, Triton
from support import process_models, python_models
from support.callables import X, Y, identity
from support.http import call, infer
from support.process_models import DIE
from support.processes import is_running
from support.serving import local_config, running, server_pid, short_home
from support.waiting import eventually


@pytest.fixture
def triton(tmp_path: Path) -> Iterator[Triton]:
    repository = tmp_path / "models"
    python_models.write(repository, "listed", python_models.MODEL)
    config = local_config(python_models="workers", model_repository=repository)
    with short_home(), running(Triton(config=config, restart=RestartPolicy())) as triton:
        triton.bind("m", identity, X, Y)
        triton.bind("p", ProcessWorker(process_models.make, max_crashes=50), X, Y)
        yield triton


def remove(triton: Triton, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    shutil.rmtree(triton._workspace.path)
    eventually(lambda: "it was written anew" in caplog.text)


def test_what_is_lost_comes_back(triton: Triton, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    remove(triton, caplog)
    # A worker, a host, a model that is only bound now.
    infer(triton.http_url, "p", DIE)
    eventually(lambda: infer(triton.http_url, "p", 3.0) == [6.0])
    [host] = [pid for pid, command in python_models.hosts().items() if "'listed'" in command]
    os.kill(host, signal.SIGKILL)
    eventually(lambda: call(triton.http_url, "POST", "/v2/models/listed/infer", {"inputs": [ONE]})[0] == 200)
    assert host not in python_models.hosts()
    triton.bind("new", identity, X, Y)
    assert infer(triton.http_url, "new", 3.0) == [3.0]
    eventually(lambda: call(triton.http_url, "GET", "/v2/health/ready")[0] == 200)
    # Once more, and the server with it.
    pid = server_pid(triton)
    shutil.rmtree(triton._workspace.path)
    os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        # There is none for a while.
        with contextlib.suppress(AssertionError):
            return not is_running(pid) and triton.is_alive() and server_pid(triton) != pid
        return False

    eventually(is_back)
    assert [infer(triton.http_url, name, 3.0) for name in ("m", "p", "new")] == [[3.0], [6.0], [3.0]]
    assert call(triton.http_url, "POST", "/v2/models/listed/infer", {"inputs": [ONE]})[0] == 200


ONE = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}


def test_where_it_cannot_be_written_that_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def refuse(_: Workspace) -> None:
        calls.append(True)
        raise OSError(30, "Read-only file system")

    restore = Workspace.restore
    with short_home(), running(Triton(config=local_config())) as triton:
        triton.bind("m", identity, X, Y)
        monkeypatch.setattr(Workspace, "restore", refuse)
        shutil.rmtree(triton._workspace.path)
        eventually(lambda: "cannot be written anew: [Errno 30] Read-only file system. Workers that" in caplog.text)
        assert infer(triton.http_url, "m", 3.0) == [3.0]
        monkeypatch.setattr(Workspace, "restore", restore)
        assert triton._life.session is not None
        triton._life.session.files._restore_at = 0.0  # type: ignore[attr-defined] # that of a server of our own
        eventually(lambda: "it was written anew" in caplog.text)
    assert len(calls) == 1


@pytest.mark.parametrize("fault", ["disk", "server"])
def test_what_has_come_back_in_part_is_written_again(
    fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: ServerFiles) -> None:
        raise WorkspaceError("No space left on device.")

    with short_home(), running(Triton(config=local_config())) as triton:
        triton.bind("m", identity, X, Y)
        assert triton._life.session is not None
        files: ServerFiles = triton._life.session.files  # type: ignore[attr-defined] # that of a server of our own
        with monkeypatch.context() as patched:
            if fault == "disk":
                patched.setattr(ServerFiles, "write_models", refuse)
            else:
                patched.setattr("pytriton.server.lifecycle.files.CALL_TIMEOUT_S", 0.5)
                os.kill(server_pid(triton), signal.SIGSTOP)
            try:
                shutil.rmtree(triton._workspace.path)
                eventually(lambda: "cannot be written anew" in caplog.text)
            finally:
                os.kill(server_pid(triton), signal.SIGCONT)
        assert "Traceback" not in caplog.text
        files._restore_at = 0.0
        eventually(lambda: "it was written anew" in caplog.text)
        eventually(lambda: not files.are_lost)
        assert infer(triton.http_url, "m", 3.0) == [3.0]


def test_systemd_leaves_it_alone(tmp_path: Path) -> None:
    """It takes such a lock of a folder before it removes what is old in there, and passes over one that is locked."""
    workspace = Workspace(tmp_path / "workspace")
    workspace.create()
    folder = os.open(workspace.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        workspace.clean()
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(folder)
    assert not workspace.path.exists()
