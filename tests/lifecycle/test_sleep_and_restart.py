"""Servers, and programs with servers, that end while the workers of a model sleep."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytriton.exceptions import PyTritonError
from pytriton.proxy_backend.worker import placeholder
from pytriton.triton import ProcessWorker, RemoteTriton, RestartPolicy, Triton, TritonSecurityConfig
from support import process_models
from support.callables import X, Y
from support.http import infer
from support.processes import is_running, while_running
from support.python_models import is_asleep, parent_processes, processes, worker_processes
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

IDLE_S = 0.2


@pytest.mark.parametrize("kind", ["process", "parent"])
def test_a_server_that_is_started_again_finds_its_model_asleep(kind: str) -> None:
    restart = RestartPolicy(first_delay_s=0.1)
    with short_home(), running(Triton(config=local_config(), restart=restart)) as triton:
        triton.bind("m", ProcessWorker(process_models.make, idle_timeout_s=IDLE_S, sleep=kind), X, Y)
        eventually(lambda: is_asleep(triton))
        pid = server_pid(triton)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_running(pid))
        # Nobody wakes for a server that is started again.
        eventually(lambda: triton.is_connected() and triton.is_alive() and is_asleep(triton))
        eventually(lambda: answer_or_error(str(triton.http_url)) == [6.0])
        eventually(lambda: is_asleep(triton))
        # A new server takes it over, asleep.
        triton.replace_server()
        eventually(lambda: answer_or_error(str(triton.http_url)) == [6.0])
    # A killed one was the child of another, which has ended.
    eventually(lambda: not worker_processes() and not parent_processes())


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_server_that_ends_while_workers_wake(tmp_path: Path, is_remote: bool) -> None:
    """Its place is lost then, and nobody takes the model for one that is served."""
    gate = tmp_path / "gate"
    gate.touch()
    with short_home(), contextlib.ExitStack() as stack:
        security = TritonSecurityConfig(restricted_endpoints=[])
        restart = RestartPolicy(first_delay_s=0.1)
        triton = stack.enter_context(running(Triton(config=local_config(), security_config=security, restart=restart)))
        binder: Any = stack.enter_context(RemoteTriton(str(triton.http_url))) if is_remote else triton
        worker = ProcessWorker(process_models.make, kwargs={"gate": str(gate)}, idle_timeout_s=IDLE_S)
        binder.bind("m", worker, X, Y)
        eventually(lambda: binder.describe().models[0].is_asleep and not worker_processes())
        gate.unlink()
        caller = threading.Thread(target=lambda: answer_or_error(str(triton.http_url)))
        caller.start()
        eventually(worker_processes)
        sleep = binder._models["m", 1].workers._sleep
        assert sleep is not None
        assert sleep.holds_place
        pid = server_pid(triton)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_running(pid) and not sleep.holds_place)
        caller.join(PATIENCE_S)
        gate.touch()
        eventually(lambda: answer_or_error(str(triton.http_url)) == [6.0])


def test_a_server_that_cannot_wake_anybody_takes_the_place_of_one_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = RestartPolicy(first_delay_s=0.1)
    with short_home(), running(Triton(config=local_config(), restart=restart)) as triton:
        triton.bind("m", ProcessWorker(process_models.make, idle_timeout_s=IDLE_S), X, Y)
        eventually(lambda: is_asleep(triton))
        # The same as one that does not know the bit: the capability is not in its welcome.
        monkeypatch.setattr(placeholder, "Capability", SimpleNamespace(ASLEEP=1 << 40))
        os.kill(server_pid(triton), signal.SIGKILL)
        eventually(worker_processes)
        eventually(lambda: answer_or_error(str(triton.http_url)) == [6.0])


PROGRAM = """
import sys, time
from pytriton.triton import ProcessWorker, Triton
from support import process_models
from support.callables import X, Y
from support.serving import local_config

if __name__ == "__main__":
    triton = Triton(config=local_config())
    triton.bind("m", ProcessWorker(process_models.make, idle_timeout_s=0.2, sleep=sys.argv[1]), X, Y)
    triton.run()
    while not triton.describe().models[0].is_asleep:
        time.sleep(0.01)
    print(triton.http_url, flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("kind", ["process", "parent"])
@pytest.mark.parametrize("is_waking", [False, True])
def test_nothing_is_left_of_a_killed_program_whose_model_sleeps(is_waking: bool, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    # A killed program leaves its workspace behind, which the next one would remove.
    with tempfile.TemporaryDirectory(prefix="pt") as home:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTRITON_HOME": home}
        with while_running([sys.executable, script, kind], stdout=subprocess.PIPE, env=environment) as program:
            assert program.stdout is not None
            url = program.stdout.readline().decode().strip()
            server = set(processes("tritonserver", program.pid))
            outcome: list[Any] = []
            caller = threading.Thread(target=lambda: outcome.append(answer_or_error(url)))
            if is_waking:
                caller.start()
                eventually(lambda: worker_processes(program.pid))
            workers = worker_processes(program.pid) | parent_processes(program.pid)
            assert len(parent_processes(program.pid)) == (2 if kind == "parent" else 0)
            program.kill()
            program.wait()
        eventually(lambda: not any(map(is_running, server | workers)))
        if is_waking:
            caller.join(PATIENCE_S)
            # It was answered just before, or its connection has ended with the server.
            (answer,) = outcome
            assert answer == [6.0] or isinstance(answer, (str, OSError))


def answer_or_error(url: str) -> Any:
    try:
        return infer(url, "m", 3.0)
    except (OSError, http.client.HTTPException) as error:
        return error


def test_a_stop_while_the_parent_of_workers_starts(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    worker = ProcessWorker(process_models.make, kwargs={"gate": str(gate)}, idle_timeout_s=IDLE_S, sleep="parent")
    with short_home(), running(Triton(config=local_config())) as triton:

        def bind() -> None:
            with pytest.raises(PyTritonError):
                triton.bind("m", worker, X, Y)

        binder = threading.Thread(target=bind)
        binder.start()
        eventually(lambda: len(parent_processes()) == 2)
        triton.stop()
        binder.join(PATIENCE_S)
        assert not binder.is_alive()
    eventually(lambda: not worker_processes() and not parent_processes())
