"""Processes that are forked, and killed while their children go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.model_config import ModelConfig
from pytriton.proxy_backend import description_path, write_description
from pytriton.server.tritonserver.ports import reserve_ports
from pytriton.triton import ProcessWorker, RemoteTriton, Triton
from support.bare_server import BareServer, serving
from support.callables import X, Y
from support.faults.forks import (
    BUSY,
    DIES_BY_SIGTERM,
    DOUBLE,
    FORK,
    FORK_AND_RETURN,
    MULTIPROCESSING,
    RAW_FORK,
    is_there,
    killed_in_the_end,
    read_word,
)
from support.faults.forks import (
    infer as infer_func,
)
from support.http import call, infer
from support.paths import TESTS
from support.processes import in_child
from support.python_proxy import proxy, spec
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

# From Python 3.12 on, a fork of a process with threads is warned of, and that is what this is about.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

KINDS = pytest.mark.parametrize("kind", [FORK, RAW_FORK], ids=["fork", "raw"])


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a Python program in the folder of the tests, and kills it in the end."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=TESTS, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told(call: Any) -> str:
    """The error that a call ends with: the server's, or that the connection ended."""
    try:
        answer = call.result(PATIENCE_S)
    except (OSError, HTTPException) as error:
        return str(error)
    assert isinstance(answer, str), answer
    return answer


# ---- what a child has open -----------------------------------------------------------------------------------------


def open_files() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def test_a_child_has_nothing_of_ours_open(tmp_path: Path) -> None:
    with short_home():
        before = open_files()
        triton = Triton(config=local_config(allow_metrics=True, metrics_port=0))
        # With a time limit, the connection is watched through a descriptor of its own.
        triton.bind("thread", infer_func, X, Y, config=ModelConfig(execution_timeout_s=PATIENCE_S))
        triton.bind("process", ProcessWorker("support.faults.forks:make", working_dir=TESTS), X, Y)
        with running(triton):
            for model in ("thread", "process"):
                assert infer(triton.http_url, model, *[DOUBLE] * 300_000)[:2] == [2 * DOUBLE] * 2
            ours = {fd: link for fd, link in open_files().items() if before.get(fd) != link}

            def child() -> None:
                found = {fd: link for fd, link in open_files().items() if fd in ours}
                # Numbers that are still taken are closed, once, by the objects that know them.
                triton.stop()
                assert {link for link in found.values() if link != "/dev/null"} == set()

            in_child(child)
            assert len(ours) > 8
            assert not any("memfd:pytriton-arena" in link for link in ours.values()), ours
            for model in ("thread", "process"):
                assert infer(triton.http_url, model, DOUBLE) == [2 * DOUBLE]


# ---- a server of our own -------------------------------------------------------------------------------------------

SERVER = """
import sys
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonConfig
from support.faults.forks import announce, fork, infer
import numpy as np
ports = dict(zip(("http_port", "grpc_port", "metrics_port"), map(int, sys.argv[2:])))
addresses = dict.fromkeys(("http_address", "grpc_address", "metrics_address"), "127.0.0.1")
with Triton(config=TritonConfig(**ports, **addresses, allow_metrics="metrics_port" in ports)) as triton:
    triton.bind("m", infer, [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")])
    triton.run()
    if float(sys.argv[1]):
        print("child", fork(float(sys.argv[1])), flush=True)
    announce(triton.http_url)
    triton.serve()
"""


def free_ports(count: int) -> list[str]:
    reserved = [reserve_ports(local_config(allow_grpc=False)) for _ in range(count)]
    ports = [str(one.http.port) for one in reserved if one.http is not None]
    for one in reserved:
        one.release()
    return ports


def tritonserver_of(parent: int) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            is_child = (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(parent)
            if is_child and (folder / "comm").read_text().strip() == "tritonserver":
                return int(folder.name)
    raise AssertionError(f"process {parent} has no tritonserver")


@pytest.mark.parametrize("place", ["main", "callable"])
@pytest.mark.parametrize("kind", [FORK, MULTIPROCESSING, RAW_FORK], ids=["fork", "multiprocessing", "raw"])
def test_a_killed_program_starts_again_although_its_child_goes_on(kind: float, place: str, home: Path) -> None:
    # The page of metrics is a socket of the program's own, which a library that forks takes along.
    ports = free_ports(2 if kind == RAW_FORK else 3)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(program("-c", SERVER, str(kind if place == "main" else 0), *ports))
        if place == "main":
            stack.enter_context(killed_in_the_end(int(read_word(first, "child"))))
        url = read_word(first, "serving")
        if place == "callable":
            assert infer(url, "m", kind) == [2 * kind]
            stack.enter_context(killed_in_the_end(int(read_word(first, "child"))))
        pool = stack.enter_context(ThreadPoolExecutor())
        in_flight = pool.submit(infer, url, "m", BUSY)
        read_word(first, "busy")
        server = tritonserver_of(first.pid)
        first.kill()
        assert told(in_flight)
        eventually(lambda: not is_there(server))
        second = stack.enter_context(program("-c", SERVER, "0", *ports))
        assert infer(read_word(second, "serving"), "m", DOUBLE) == [2 * DOUBLE]
        second.send_signal(signal.SIGTERM)
        assert second.wait(PATIENCE_S) == 0
        if kind != RAW_FORK:
            # The second has removed what the first had left, too.
            assert os.listdir(home) == []


def test_a_child_ends_by_sigterm_while_its_parent_serves(home: Path) -> None:
    with program("-c", SERVER, "0", *free_ports(2)) as process:
        url = read_word(process, "serving")
        assert infer(url, "m", DIES_BY_SIGTERM) == [signal.SIGTERM]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


LEAVING = """
import os, sys
import numpy as np
from pytriton.model_config import Tensor
from pytriton.triton import ProcessWorker, Triton, TritonConfig
from support.faults.forks import announce, infer
addresses = dict(http_address="127.0.0.1", grpc_address="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0)
tensors = [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")]
with Triton(config=TritonConfig(**addresses)) as triton:
    triton.bind("m", infer, *tensors)
    triton.bind("process", ProcessWorker("support.faults.forks:make"), *tensors)
    triton.run()
    pid = os.fork()
    if pid == 0:
        # Through the with block and the handlers of the interpreter's end.
        sys.exit(3)
    print("left", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    announce(triton.http_url)
    triton.serve()
"""


def test_a_child_that_ends_as_any_program_leaves_the_server_alone(home: Path) -> None:
    with program("-c", LEAVING) as process:
        assert read_word(process, "left") == "3"
        url = read_word(process, "serving")
        for model in ("m", "process"):
            assert infer(url, model, DOUBLE) == [2 * DOUBLE]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert os.listdir(home) == []


REMOTE = """
import sys
from pytriton.model_config import Tensor
from pytriton.triton import RemoteTriton
from support.faults.forks import fork, infer
import numpy as np
with RemoteTriton(sys.argv[1], access_token=sys.argv[2]) as triton:
    triton.bind("m", infer, [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")])
    triton.connect()
    print("child", fork(), flush=True)
    triton.serve()
"""


def test_models_of_a_killed_program_are_taken_over_although_its_child_goes_on() -> None:
    with short_home(), contextlib.ExitStack() as stack:
        server = stack.enter_context(running(Triton(config=local_config())))
        url, token = server.http_url, server.get_access_token()
        assert url is not None
        assert token is not None
        first = stack.enter_context(program("-c", REMOTE, url, token))
        stack.enter_context(killed_in_the_end(int(read_word(first, "child"))))
        pool = stack.enter_context(ThreadPoolExecutor())
        in_flight = pool.submit(infer, url, "m", BUSY)
        read_word(first, "busy")
        first.kill()
        # Its socket is closed before the lock of its workspace: who comes in between cannot clean up after it.
        first.wait()
        assert "was lost while it worked on this request" in told(in_flight)
        with RemoteTriton(url, access_token=token) as second:
            second.bind("m", infer_func, X, Y)
            assert infer(url, "m", DOUBLE) == [2 * DOUBLE]
        # Nobody else serves it, so it is gone with the second.
        assert call(url, "GET", "/v2/models/m/ready")[0] != 200


# ---- workers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[BareServer]:
    server = BareServer(tmp_path)
    server.add("m", attach_timeout_s=0.5)
    with serving(server):
        write_description(description_path(server.endpoint("m")), server.models["m"])
        yield server


def attached_worker(endpoint: str, *more: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return program(
        "-m", "pytriton.proxy_backend", "worker", "support.faults.forks:infer", "--endpoint", endpoint, *more
    )


@KINDS
def test_a_killed_worker_is_lost_although_its_child_goes_on(bare: BareServer, kind: float) -> None:
    url = f"http://{bare.url}"
    held = bare.held()
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(attached_worker(str(bare.endpoint("m"))))
        bare.wait_for_log("attached, protocol")
        assert infer(url, "m", kind) == [2 * kind]
        stack.enter_context(killed_in_the_end(int(read_word(worker, "child"))))
        pool = stack.enter_context(ThreadPoolExecutor())
        in_flight = pool.submit(infer, url, "m", BUSY)
        read_word(worker, "busy")
        worker.kill()
        error = told(in_flight)
        assert f"(pid {worker.pid}) was lost while it worked on this request" in error
        assert ("its process has ended" if kind == RAW_FORK else "it closed its connection") in error
        assert "no worker is attached" in infer(url, "m", DOUBLE)
        bare.wait_until_held(held)
        stack.enter_context(attached_worker(str(bare.endpoint("m"))))
        eventually(lambda: infer(url, "m", DOUBLE) == [2 * DOUBLE])


def test_a_child_that_returns_from_the_callable_is_no_second_worker(bare: BareServer) -> None:
    with attached_worker(str(bare.endpoint("m"))) as worker:
        bare.wait_for_log("attached, protocol")
        assert infer(f"http://{bare.url}", "m", FORK_AND_RETURN) == [2 * FORK_AND_RETURN]
        children = {int(read_word(worker, "child")) for _ in range(2)}
        for pid in children:
            eventually(lambda pid=pid: not is_there(pid))  # type: ignore[misc]
        assert infer(f"http://{bare.url}", "m", DOUBLE) == [2 * DOUBLE]
        assert bare.log().count("attached, protocol") == 1
        assert "is gone" not in bare.log()


@KINDS
def test_the_python_proxy_loses_a_killed_worker_although_its_child_goes_on(kind: float, tmp_path: Path) -> None:
    description = tmp_path / "model.json"
    write_description(description, spec())
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(proxy(f"ipc://{tmp_path}/s"))
        worker = stack.enter_context(attached_worker(listening.address, "--description", str(description)))
        listening.wait_workers(1)
        (caller,) = listening.send([kind])
        assert caller.wait()["y"].tolist() == [[2 * kind]]
        stack.enter_context(killed_in_the_end(int(read_word(worker, "child"))))
        (busy,), thread = listening.start([BUSY])
        stack.callback(thread.join)
        read_word(worker, "busy")
        worker.kill()
        assert "was lost while it worked on this request" in busy.wait()[1]
        listening.wait_workers(0)


@KINDS
def test_a_killed_worker_process_is_started_again_although_its_child_goes_on(kind: float, tmp_path: Path) -> None:
    with short_home(), contextlib.ExitStack() as stack:
        triton = Triton(config=local_config())
        # Away from the log of the worker, which is this test's.
        report = tmp_path / "report"
        worker = ProcessWorker(
            "support.faults.forks:make", working_dir=TESTS, env={"PYTRITON_TEST_REPORT": str(report)}
        )
        triton.bind("m", worker, X, Y)
        stack.enter_context(running(triton))
        assert infer(triton.http_url, "m", DIES_BY_SIGTERM) == [signal.SIGTERM]
        assert infer(triton.http_url, "m", kind) == [2 * kind]
        _, child, parent = report.read_text().split()
        stack.enter_context(killed_in_the_end(int(child)))
        pool = stack.enter_context(ThreadPoolExecutor())
        in_flight = pool.submit(infer, triton.http_url, "m", BUSY)
        eventually(lambda: "busy" in report.read_text())
        os.kill(int(parent), signal.SIGKILL)
        assert "was lost while it worked on this request" in told(in_flight)
        assert infer(triton.http_url, "m", DOUBLE) == [2 * DOUBLE]


def test_a_child_is_told_of_its_parent_although_the_connection_was_being_changed() -> None:
    held, forked = threading.Event(), threading.Event()
    triton = RemoteTriton("localhost:1")

    def change() -> None:
        with triton._life.lock:
            held.set()
            forked.wait(PATIENCE_S)

    def connect() -> None:
        with pytest.raises(PyTritonInvalidOperationError, match="which owns the server and the inference"):
            triton.connect()

    changing = threading.Thread(target=change)
    changing.start()
    assert held.wait(PATIENCE_S)
    try:
        in_child(connect)
    finally:
        forked.set()
        changing.join()
        triton.stop()
