"""Threads that look after something: one that raises does not leave it unattended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.cli import reloading
from pytriton.cli.reloading import Reloader
from pytriton.client import DecoupledModelClient, ModelClient, _futures_pool
from pytriton.client._core.deadline import Watchdog as ClientWatchdog
from pytriton.inprocess.callables.batches import DirectSink
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy_backend import AttachError, ConnectionLostError, ModelSpec, Worker
from pytriton.proxy_backend.hosting.supervisor import HostSupervisor
from pytriton.proxy_backend.process import forkserver
from pytriton.proxy_backend.process.child import Launch
from pytriton.proxy_backend.python_models import host
from pytriton.proxy_backend.python_models.execution import CoroutineLoop
from pytriton.proxy_backend.python_models.server import Phase
from pytriton.proxy_backend.system.threads import keep_on
from pytriton.proxy_backend.worker.watch import ConnectionWatch, LoopWatch
from pytriton.server.lifecycle import watchdog
from pytriton.server.models import worker_watch
from pytriton.server.models.worker_watch import WorkerWatch
from pytriton.server.observe.metrics_page import MetricsPage
from pytriton.server.tritonserver.process import ExitReport, ServerProcess
from pytriton.triton import RemoteTriton, Triton, _beside
from pytriton.triton import _remote as remote_module
from support import python_models
from support.callables import double
from support.paths import TESTS
from support.python_proxy import proxy, worker
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually, wait_for_threads

ROOT = TESTS.parent


def failing_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises what nobody expects, and from the second call on does what another one does."""
    calls: list[bool] = []

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(True)
        if len(calls) == 1:
            raise ZeroDivisionError("injected")
        return function(*arguments, **named)

    return call


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What the log says; in the end it must have the error that was injected."""
    with caplog.at_level(logging.INFO):
        yield lambda: caplog.text
    errors = [record.exc_info[1] for record in caplog.get_records("call") if record.exc_info]
    assert any(isinstance(error, ZeroDivisionError) for error in errors)


def test_every_thread_is_in_the_table() -> None:
    """The table of docs/architecture.md says of each thread what becomes of its charge where it raises."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Threads")[2].partition("\n## ")[0]
    started: dict[str, str] = {}
    for file in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        text = file.read_text()
        for place in re.finditer(r"threading\.Thread\(", text):
            found = re.search(r'name=(?:f?"([^"]+)"|name\b)', text[place.end() : place.end() + 400])
            assert found is not None, f"{file}: a thread without a name"
            name = re.sub(r"\{.*?\}", "...", found[1] or "pytriton-client-futures-...")
            started[name] = str(file.relative_to(ROOT))
    missing = {name: file for name, file in started.items() if f"`{name}`" not in table}
    assert not missing, f"not in the table of docs/architecture.md: {missing}"
    listed = set(re.findall(r"^\| `([^`]+)`", table, re.M))
    assert listed <= set(started) | {"(native)"}, listed - set(started)


def test_what_a_step_raises_is_told(told: Callable[[], str]) -> None:
    step = failing_once(lambda: None)
    assert not keep_on(step, "Something")
    assert keep_on(step, "Something")
    assert "Something; it goes on" in told()


# ---- clients ---------------------------------------------------------------------------------------------------------


def test_the_watchdog_of_clients_ends_the_next_wait(told: Callable[[], str]) -> None:
    class Watched:
        def __init__(self) -> None:
            self.ended = threading.Event()

        def end_wait(self) -> None:
            self.ended.set()
            if self is first:
                raise ZeroDivisionError("injected")

    watchdog, first, second = ClientWatchdog(), Watched(), Watched()
    watchdog.begin(first, 0.0)
    assert first.ended.wait(PATIENCE_S)
    watchdog.begin(second, 0.0)
    assert second.ended.wait(PATIENCE_S)
    for each in (first, second):
        watchdog.forget(each)
    watchdog.join()


def test_a_thread_of_the_futures_client_makes_the_next_call(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_futures_pool._WorkItem, "run", failing_once(_futures_pool._WorkItem.run))
    pool = _futures_pool.CallPool(max_workers=1, max_queue_size=None, release=lambda: None)
    pool.submit(lambda: 1, None)
    assert pool.submit(lambda: 2, None).result(PATIENCE_S) == 2
    pool.abandon()


# ---- workers ---------------------------------------------------------------------------------------------------------

SPEC = ModelSpec(name="m", version=1, inputs=(), outputs=(), batching=False, max_batch_size=0, decoupled=False)


def test_a_worker_that_cannot_begin_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(lambda requests: requests, SPEC, tmp_path / "socket")
    monkeypatch.setattr(worker, "_make_service", failing_once(lambda: None))
    worker.start()
    with pytest.raises(AttachError) as caught:
        worker.wait_warm(PATIENCE_S)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    eventually(lambda: not worker.is_alive)
    assert isinstance(worker.error, ZeroDivisionError)


def test_a_connection_that_cannot_be_watched_is_closed(told: Callable[[], str]) -> None:
    is_shut = threading.Event()
    connection: Any = SimpleNamespace(hangup_waiter=lambda: failing_once(lambda: None), shutdown=is_shut.set)
    watch = ConnectionWatch(connection, "pytriton-m-watch", lambda: None)
    assert is_shut.wait(PATIENCE_S)
    watch.end()


def test_the_watch_of_an_event_loop_asks_again(told: Callable[[], str]) -> None:
    asked = threading.Event()

    def count(work: object) -> int:
        asked.set()
        return 1

    class Work:
        __len__ = failing_once(count)

    async def serve() -> None:
        with LoopWatch("m", Work()):
            while not asked.is_set():
                await asyncio.sleep(0.01)

    asyncio.run(serve())
    assert "The event loop of model m could not be asked" in told()


@pytest.mark.parametrize("where", ["threads", "in process"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_callable_that_stops_its_loop_goes_on(where: str, is_stream: bool) -> None:
    async def answer(requests: Any) -> Any:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return [{"y": request["x"] + 1} for request in requests]

    async def stream(requests: Any) -> Any:
        yield await answer(requests)

    x, y = Tensor((1,), np.int64, "x"), Tensor((1,), np.int64, "y")
    infer, config = (stream if is_stream else answer), ModelConfig(decoupled=is_stream)
    inputs = {"x": np.array([[41]])}
    if where == "in process":
        with inprocess.Server() as server:
            server.bind("m", infer, [x], [y], config=config)
            for _ in range(3):
                response, *_ = server.model("m").infer(inputs=inputs)
                assert np.asarray(response.outputs["y"]).item() == 42
        return
    with short_home(), running(Triton(config=local_config())) as triton:
        triton.bind("m", infer, [x], [y], config=config)
        kind: Any = DecoupledModelClient if is_stream else ModelClient
        with kind(triton.http_url, "m") as client:
            for _ in range(3):
                answers = client.infer_batch(**inputs)
                [result] = answers if is_stream else [answers]
                assert result["y"].item() == 42


def test_the_loop_of_coroutines_goes_on_after_an_exit() -> None:
    async def leave() -> None:
        sys.exit(3)

    async def answer() -> int:
        await asyncio.sleep(0)
        return 5

    loop = CoroutineLoop()
    with pytest.raises(SystemExit):
        loop.run(leave())
    errors: list[BaseException] = []
    loop.run_in_background(leave(), errors.append)
    assert loop.run(answer()) == 5
    eventually(lambda: [type(error) for error in errors] == [SystemExit])
    loop.stop()
    wait_for_threads()
    assert loop._loop is not None
    loop._loop.close()


def test_a_supervisor_of_hosts_takes_the_next_connection(
    told: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = HostSupervisor(tmp_path)
    served = threading.Event()

    def serve(channel: socket.socket) -> None:
        channel.close()
        served.set()

    monkeypatch.setattr(supervisor, "_serve", serve)
    accept = failing_once(supervisor._accept_one)
    monkeypatch.setattr(supervisor, "_accept_one", accept)
    supervisor.start()
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(str(supervisor.socket_path))
        assert served.wait(PATIENCE_S)
    supervisor.close(0.0)
    wait_for_threads()


def test_a_forkserver_that_cannot_begin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_open_messages", failing_once(lambda: None))
    made = forkserver.Forkserver(Launch())
    with pytest.raises(OSError, match="ZeroDivisionError: injected"):
        made.start()


def test_a_host_that_nobody_looks_after_is_replaced(tmp_path: Path) -> None:
    source = python_models.MODEL.replace(
        "                os._exit(3)",
        """                import gc
                [child] = [each for each in gc.get_objects() if type(each).__name__ == "_Child"]
                child._note_cut = None""",
    )
    assert "_note_cut" in source
    python_models.write(tmp_path, "model", source)
    config = local_config(python_models="workers", model_repository=tmp_path)
    with Triton(config=config) as triton:
        [before] = python_models.hosts()
        python_models.infer(triton, "model", 13)
        eventually(lambda: python_models.hosts() and before not in python_models.hosts())
        assert python_models.infer(triton, "model", 1) == [2]


def test_a_python_proxy_lets_one_worker_go_for_its_message(
    told: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others serve on, and so does the next one that attaches."""
    with tempfile.TemporaryDirectory(prefix="pt") as short, proxy(f"ipc://{short}/model.1.zmq") as made:
        monkeypatch.setattr(made.endpoint, "_greet", failing_once(made.endpoint._greet))
        with worker(double, made.address):
            monkeypatch.setattr(made.endpoint, "_take", failing_once(made.endpoint._take))
            [caller] = made.send([1.0, 2.0])
            assert "what it has sent cannot be taken: ZeroDivisionError: injected" in str(caller.wait())
            [caller] = made.send([3.0, 4.0])
            assert caller.wait()["y"].tolist() == [[6, 8]]
    assert "a worker cannot be greeted; it goes on" in told()


def test_a_python_proxy_that_fails_is_not_ready_and_says_so(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="pt") as short, proxy(f"ipc://{short}/model.1.zmq") as made:
        [waiting] = made.send([1.0, 2.0])
        monkeypatch.setattr(made.endpoint, "_expire", failing_once(made.endpoint._expire))
        assert "its endpoint failed, load it again: ZeroDivisionError: injected" in str(waiting.wait())
        eventually(lambda: not made.endpoint.is_ready())
        [caller] = made.send([1.0, 2.0])
        assert "its endpoint failed, load it again: ZeroDivisionError: injected" in str(caller.wait())


def test_a_model_that_cannot_be_asked_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has an answer to each question, whatever comes of the model."""
    given: list[tuple[bool, str]] = []

    def next_question(number: int, is_ready: bool, failure: str) -> int:
        if number:
            given.append((is_ready, failure))
        if number == 2:
            raise ConnectionLostError("over")
        return number + 1

    calls = SimpleNamespace(next_readiness_question=next_question)
    monkeypatch.setattr(host, "SERVER", SimpleNamespace(calls=lambda: calls, phase=Phase.SERVING))
    model: Any = SimpleNamespace(is_ready=failing_once(lambda loop: (True, "")))
    host.answer_readiness(model, CoroutineLoop())
    assert given == [(False, "the model cannot be asked: ZeroDivisionError: injected"), (True, "")]


# ---- servers ---------------------------------------------------------------------------------------------------------


def test_the_watch_of_workers_goes_on(told: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "WATCH_PERIOD_S", 0.01)
    changed: list[bool] = []
    model: Any = SimpleNamespace(
        name="m", version=1, key=("m", 1),
        workers=SimpleNamespace(was_attached=True, has_attached=False, has_stand_in=0),
        endpoint=lambda folder: folder / "m",
    )  # fmt: skip

    def note(whether: bool) -> bool:
        changed.append(whether)
        return True

    watch = WorkerWatch(failing_once(lambda: [model]), tmp_path, note)
    watch.start()
    eventually(lambda: changed == [False])
    watch.stop()


def test_the_watch_reads_no_table_while_all_models_have_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "WATCH_PERIOD_S", 0.01)
    read, looked = [], threading.Event()

    def sockets() -> list[tuple[str, str, str]]:
        read.append(1)
        return []

    monkeypatch.setattr(worker_watch, "_sockets", sockets)
    models: list[Any] = [
        SimpleNamespace(
            name=f"m{number}", version=1, key=(f"m{number}", 1),
            workers=SimpleNamespace(was_attached=True, has_attached=True, has_stand_in=0),
            endpoint=lambda folder: folder / "m",
        )
        for number in range(100)
    ]  # fmt: skip

    def look() -> list[Any]:
        looked.set()
        return models

    watch = WorkerWatch(look, tmp_path, lambda _: True)
    watch.start()
    for _ in range(3):
        looked.clear()
        assert looked.wait(PATIENCE_S)
    assert not read
    for model in models:
        model.workers.has_attached = False
    eventually(lambda: len(read) > 2)
    watch.stop()
    before = len(read)
    watch._look()
    # Once for all models, however many have no worker.
    assert len(read) == before + 1


def test_the_metrics_page_answers_the_next_request(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    page = MetricsPage(listener, lambda: b"a 1\n")
    monkeypatch.setattr(page, "_accept", failing_once(page._accept))
    page.start()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        assert answer.read() == b"a 1\n"
    page.close()


SERVER = "import sys, time; print('I1126 10:00:00.000000 1 main.cc:1] \"up\"', flush=True); time.sleep(600)"


def test_a_server_whose_output_cannot_be_read_is_ended_and_said_so(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[ExitReport] = []
    process = ServerProcess([sys.executable, "-c", SERVER], os.environ, on_exit=reports.append)
    monkeypatch.setattr(process, "_take_line", failing_once(lambda text: None))
    process.start()
    [report] = eventually(lambda: reports)
    assert (report.exit_code, report.expected) == (-9, False)
    assert "its output cannot be read: ZeroDivisionError: injected" in "\n".join(report.log_lines)
    process.stop(1.0)


def test_a_filter_that_fails_does_not_end_the_server(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise ZeroDivisionError("injected")

    output = logging.getLogger("pytriton.tritonserver")
    caplog.set_level(logging.INFO, output.name)
    output.addFilter(refuse)
    process = ServerProcess([sys.executable, "-c", SERVER], os.environ)
    try:
        process.start()
        eventually(lambda: process.log_tail)
        assert process.is_running
    finally:
        output.removeFilter(refuse)
        process.stop(1.0)
    assert "ZeroDivisionError: injected" in capsys.readouterr().err


def test_the_models_on_a_remote_server_are_looked_after(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "RECONCILE_PERIOD_S", 0.01)
    ended, reconciled = threading.Event(), threading.Event()
    session: Any = SimpleNamespace(ended=ended, failure=None, reconcile=failing_once(reconciled.set))
    triton = RemoteTriton("http://localhost:1")
    triton._life.session = session
    thread = threading.Thread(target=triton._watch, args=(session,))
    thread.start()
    assert reconciled.wait(PATIENCE_S)
    ended.set()
    thread.join(PATIENCE_S)
    triton._life.session = None


def test_a_restart_that_fails_is_the_end(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Triton(config=local_config())
    monkeypatch.setattr(triton, "_restart_if_dead", failing_once(lambda: None))
    triton._restart()
    assert isinstance(triton._life.failure, ZeroDivisionError)


def test_changes_of_files_are_seen_all_the_same(
    told: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchfiles = pytest.importorskip("watchfiles")
    monkeypatch.setattr(reloading, "_PAUSE_S", 0.01)
    monkeypatch.setattr(watchfiles, "watch", failing_once(watchfiles.watch))
    file = tmp_path / "watched.py"
    file.write_text("x = 1\n")
    monkeypatch.setattr(reloading, "folder_of", lambda target: tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", os.environ.get("PYTHONDONTWRITEBYTECODE", ""))
    reloaded = threading.Event()

    def reload() -> str:
        reloaded.set()
        return ""

    with Reloader(str(file)).watching(reload):
        begun = time.monotonic()
        while not reloaded.wait(0.2):
            file.write_text(f"x = {time.monotonic()}\n")
            assert time.monotonic() < begun + PATIENCE_S


def test_the_execution_timeout_in_process_is_looked_after(told: Callable[[], str]) -> None:
    go_on = threading.Event()

    def wait(requests: list[Any]) -> list[Any]:
        assert go_on.wait(PATIENCE_S)
        return requests

    tensors = [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "x")]
    with pytest.MonkeyPatch.context() as patch, inprocess.Server() as server:
        patch.setattr(DirectSink, "fail_late", failing_once(DirectSink.fail_late))
        model = server.bind("m", wait, *tensors, config=ModelConfig(batching=False, execution_timeout_s=0.05))
        with contextlib.ExitStack() as stack:
            stack.callback(go_on.set)
            with pytest.raises(inprocess.TritonError, match="took longer than the model's execution timeout"):
                list(model.infer(inputs={"x": np.zeros(1, np.float32)}))


def test_the_watchdog_of_a_server_goes_on(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LEAST_PAUSE_S", 0.01)
    asked = threading.Event()
    watch = watchdog.Watchdog(failing_once(asked.set), 0.01)
    watch.start()
    assert asked.wait(PATIENCE_S)
    watch.stop()
    watch._thread.join(PATIENCE_S)


def test_a_program_beside_a_server_that_cannot_be_started_is_started_again(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(command: list[str], **settings: Any) -> Any:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[-1]

    monkeypatch.setattr(_beside, "_PAUSE_S", 0.01)
    monkeypatch.setattr(_beside, "subprocess", SimpleNamespace(Popen=failing_once(start), DEVNULL=-3))
    with _beside.run_beside(Triton(), ["program"], name="a program", restart=False):
        eventually(lambda: started)
    assert [each.poll() for each in started] == [-signal.SIGTERM]


def test_the_console_looks_again(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pytest.importorskip("pytriton.console.pages")
    polled = threading.Event()
    watcher = SimpleNamespace(interval_s=0.01, poll=failing_once(polled.set))
    monkeypatch.setattr(pages._Looking, "is_wanted", staticmethod(failing_once(lambda: True)))
    looking = pages._Looking(watcher)
    looking.start()
    assert polled.wait(PATIENCE_S)
    looking.stop()
    looking._thread.join(PATIENCE_S)


def test_a_question_of_the_console_has_its_error() -> None:
    pages = pytest.importorskip("pytriton.console.pages")
    with pytest.raises(ZeroDivisionError, match="injected"):
        asyncio.run(pages._in_thread(failing_once(lambda: None)))


def test_a_trial_of_the_console_has_its_error(told: Callable[[], str]) -> None:
    trials = pytest.importorskip("pytriton.console.trials")
    spec: Any = None
    trial = trials.Trial(failing_once(lambda: None), spec, {}, is_batch=False)
    trial.start()
    eventually(lambda: trial.is_done)
    assert trial.error == "ZeroDivisionError: injected"
