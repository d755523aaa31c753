"""Inference callables in processes of their own, which come, work, die, come again and leave."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient
from pytriton.exceptions import PyTritonBadParameterError, PyTritonUnrecoverableError, PyTritonValidationError
from pytriton.model_config import ModelConfig
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.triton import ProcessWorker, Triton, TritonModelLoadError, TritonWorkerError
from support import process_models
from support.callables import X, Y
from support.faults.interpreters import make_interpreter
from support.http import call, infer, tensor
from support.load import Load, under_load
from support.process_models import DIE, EXIT, HANG, NEVER_AGAIN, PID, RAISE, STOPPED
from support.processes import is_running
from support.python_models import worker_processes
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually


def answered_or_failed(load: Load, count: int) -> bool:
    return len(load.answers) >= count or bool(load.failures)


def pids(triton: Triton, model: str, count: int) -> set[int]:
    """The processes that serve a model, once so many of them have answered."""
    found: set[int] = set()

    def ask(_: object) -> None:
        answer = infer(triton.http_url, model, PID)
        assert isinstance(answer, list), answer
        found.add(int(answer[0]))

    with ThreadPoolExecutor(4) as pool:
        eventually(lambda: list(pool.map(ask, range(8))) and len(found) >= count)
    return found


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    """A running server; each test binds a model of its own."""
    with short_home():
        triton = Triton(config=local_config(allow_metrics=True, metrics_port=0, metrics_address="127.0.0.1"))
        with running(triton):
            yield triton
            assert worker_processes() == set()


@pytest.fixture
def bind(triton: Triton) -> Iterator[Callable[..., None]]:
    """Binds a model, which is taken away after the test."""
    bound: list[str] = []

    def bind(name: str, infer_func: Any, **options: Any) -> None:
        triton.bind(name, infer_func, X, Y, **options)
        bound.append(name)

    yield bind
    for name in bound:
        triton.unbind(name)
        assert worker_processes() == set()


# ---- what works ----------------------------------------------------------------------------------------------------


def test_callables_of_all_kinds_serve_one_model(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def own(requests: Any) -> Any:
        # Gives the processes their share, however fast it is itself.
        time.sleep(0.02)
        return [{"y": request.data["x"] * 0 + os.getpid()} for request in requests]

    described = ProcessWorker(
        process_models.make, [2.5], copies=2, env={"COLOUR": ["red", "green"], "HOME": None}, working_dir=tmp_path
    )
    with caplog.at_level(logging.INFO, "pytriton.worker"):
        bind("kinds", [own, described])
    served = pids(triton, "kinds", 3)
    assert len(served) == 3
    assert os.getpid() in served
    assert served - {os.getpid()} == worker_processes()
    lines = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    # Numbered as they stand among all callables of the model.
    assert ("pytriton.worker.kinds.1", "INFO", f"made with 2.5 red {tmp_path}") in lines
    assert ("pytriton.worker.kinds.2", "INFO", f"made with 2.5 green {tmp_path}") in lines
    # What they log comes under its own name.
    assert lines.count(("weights", "ERROR", "loaded")) == 2
    workers = {vars(record)["worker"] for record in caplog.records if record.name == "weights"}
    assert workers == {"kinds.1", "kinds.2"}
    # By one of the processes, and not by the callable of this one.
    eventually(lambda: "raised ValueError: this value is bad" in str(infer(triton.http_url, "kinds", RAISE)))


def test_what_they_count_is_on_the_metrics_page(triton: Triton, bind: Callable[..., None]) -> None:
    bind("counted", ProcessWorker("support.process_models:make"))
    (pid,) = pids(triton, "counted", 1)

    def counts() -> dict[str, float]:
        _, text = call(f"http://{str(triton.metrics_url).removeprefix('http://').partition('/')[0]}", "GET", "/metrics")
        mark = '{model="counted",version="1",worker="0"} '
        return {line.partition("{")[0]: float(line.partition(mark)[2]) for line in text.splitlines() if mark in line}

    before = eventually(lambda: (found := counts()).get("pytriton_requests_total", 0) >= 8 and found)
    assert before["pytriton_worker_attached"] == 1
    assert (before["pytriton_worker_pid"], before["pytriton_worker_ends_total"]) == (pid, 0)
    assert before["pytriton_input_bytes_total"] == 4 * before["pytriton_requests_total"]
    os.kill(pid, signal.SIGKILL)
    # Only when it is gone, so that no request of ours is lost with it.
    eventually(lambda: not is_running(pid))
    eventually(lambda: isinstance(infer(triton.http_url, "counted", 1.0), list))
    # The totals go on where the dead process left them.
    eventually(lambda: counts()["pytriton_requests_total"] > before["pytriton_requests_total"])
    now = counts()
    assert now["pytriton_worker_ends_total"] == 1
    assert now["pytriton_worker_pid"] not in (pid, os.getpid())


def test_an_async_generator_serves_a_decoupled_model(triton: Triton, bind: Callable[..., None]) -> None:
    bind("streams", ProcessWorker(process_models.make_async), config=ModelConfig(decoupled=True))
    with DecoupledModelClient(str(triton.grpc_url), "streams") as client:
        answers = [float(answer["y"][0]) for answer in client.infer_sample(np.ones(1, np.float32))]
    assert answers[:2] == [1.0, 2.0]
    assert answers[2] in worker_processes()


def test_the_warm_up_runs_in_the_process(triton: Triton, bind: Callable[..., None], tmp_path: Path) -> None:
    data = tmp_path / "x.npy"
    np.save(data, np.full(3, 7, np.float32))
    given = WarmupInput(dtype=np.float32, shape=(3,), input_data_file=str(data))
    warmup = ModelWarmup(name="w", batch_size=2, count=2, inputs={"x": given})
    calls = tmp_path / "calls"
    bind("warm", ProcessWorker(process_models.Model, (str(calls),)), config=ModelConfig(model_warmup=[warmup]))
    (pid,) = worker_processes()
    assert calls.read_text().splitlines() == [f"{pid} 1 {[[7.0] * 3] * 2}"] * 2


def test_another_interpreter_needs_neither_server_nor_client(
    triton: Triton, bind: Callable[..., None], tmp_path: Path
) -> None:
    python = make_interpreter(tmp_path / "env")
    (tmp_path / "own.py").write_text(
        "import sys\n"
        "from pytriton.decorators import batch\n"
        "def make():\n"
        "    try:\n"
        "        import pytriton.triton\n"
        "    except ImportError:\n"
        "        return batch(lambda x: {'y': x * 0 + 42})\n"
    )
    bind("foreign", ProcessWorker("own:make", python=python, working_dir=tmp_path))
    (pid,) = worker_processes()
    assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] == os.fsencode(python)
    assert infer(triton.http_url, "foreign", 1.0) == [42.0]


# ---- what dies -----------------------------------------------------------------------------------------------------


def test_killed_processes_cost_the_requests_that_they_had_and_come_again(
    triton: Triton, bind: Callable[..., None]
) -> None:
    bind("killed", ProcessWorker(process_models.make, copies=2, max_crashes=50))
    first = pids(triton, "killed", 2)
    with under_load(triton.http_url, triton.grpc_url, "killed", threads=1) as load:
        for pid in first:
            wanted = len(load.answers) + 20
            os.kill(pid, signal.SIGKILL)
            eventually(partial(answered_or_failed, load, wanted))
    # Every request has one outcome; a failed one names the process.
    assert load.sent == len(load.answers) + len(load.failures)
    assert len(load.failures) <= 2
    for failure in load.failures:
        assert any(f"(pid {pid}) was lost" in failure and "process_models:make" in failure for pid in first)
    assert {factor for _, factor in load.answers} == {2.0}
    eventually(lambda: len(worker_processes()) == 2)
    assert not pids(triton, "killed", 2) & first
    assert triton.is_alive()


def test_a_process_hears_signals_that_its_program_blocks(bind: Callable[..., None]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        bind("masked", ProcessWorker(process_models.make))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    [pid] = worker_processes()
    assert "SigBlk:\t0000000000000000" in Path(f"/proc/{pid}/status").read_text()


def test_a_process_that_ends_too_often_is_given_up_with_the_reason(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    bind("fragile", ProcessWorker(process_models.make, max_crashes=2, crash_window_s=600))
    assert "was lost" in infer(triton.http_url, "fragile", EXIT)
    assert triton.is_alive()
    assert infer(triton.http_url, "fragile", 3.0) == [6.0]
    assert "was lost" in infer(triton.http_url, "fragile", DIE)
    eventually(lambda: not triton.is_alive())
    reason = "worker process 0 of model 'fragile' is given up after 2 ends within 600 s; the last time was killed by"
    eventually(lambda: reason in str(infer(triton.http_url, "fragile", 3.0)))
    assert any(reason in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert any("ended with exit code 3; it is started again in 0.1 s" in r.getMessage() for r in caplog.records)
    # A new one is served again.
    triton.rebind("fragile", ProcessWorker(process_models.make, [5.0]))
    assert triton.is_alive()
    assert infer(triton.http_url, "fragile", 3.0) == [15.0]


def test_an_interpreter_that_is_gone_is_named_and_may_come_back(
    triton: Triton, bind: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python, aside = tmp_path / "python", tmp_path / "aside"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    folder = str(Path(process_models.__file__).parent.parent)
    bind("other", ProcessWorker(process_models.make, python=str(python), working_dir=folder, max_crashes=100))
    (pid,) = worker_processes()
    python.rename(aside)
    os.kill(pid, signal.SIGKILL)
    told = f"worker process 0 of model 'other' cannot be started: {python}: No such file or directory"
    eventually(lambda: told in caplog.text)
    aside.rename(python)
    assert eventually(lambda: infer(triton.http_url, "other", 3.0) == [6.0])


def test_a_factory_that_fails_later_is_tried_again(triton: Triton, bind: Callable[..., None], tmp_path: Path) -> None:
    marker = tmp_path / "broken"
    bind("later", ProcessWorker(process_models.make, kwargs={"marker": str(marker)}, max_crashes=100))
    (pid,) = worker_processes()
    marker.touch()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_running(pid))
    eventually(lambda: len({*worker_processes()}) == 1)
    assert triton.is_alive()
    marker.unlink()
    assert eventually(lambda: infer(triton.http_url, "later", 3.0) == [6.0])


@pytest.mark.parametrize("deed", [HANG, STOPPED])
def test_a_process_that_takes_longer_than_a_batch_may_take_is_replaced(
    triton: Triton, bind: Callable[..., None], deed: float
) -> None:
    bind("slow", ProcessWorker(process_models.make), config=ModelConfig(execution_timeout_s=1.0))
    (pid,) = worker_processes()
    assert isinstance(infer(triton.http_url, "slow", deed), str)
    eventually(lambda: not is_running(pid))
    assert eventually(lambda: infer(triton.http_url, "slow", 3.0) == [6.0])


@pytest.mark.parametrize(
    ("factory", "options", "reason"),
    [
        ("support.process_models:fail", {}, "its factory failed: RuntimeError: there are no weights"),
        ("support.process_models:fall", {}, "ended with exit code 7. Its last 1 line:\n  the last words"),
        ("support.process_models:make_nothing", {}, "returned 7: expected an inference callable"),
        ("support.process_models:missing", {}, "has no 'missing'"),
        ("support.missing:make", {}, "there is no module 'support.missing'"),
        ("support.process_models:make", {"kwargs": {"colour": 1}}, "unexpected keyword argument 'colour'"),
        ("support.process_models:make", {"python": "/bin/false"}, "received a program that ends with exit code 1"),
        ("time:sleep", {"args": (600,), "start_timeout_s": 0.5}, "was not ready within 0.5 s"),
    ],
)
def test_what_does_not_come_up_fails_the_bind_at_once(
    triton: Triton, factory: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TritonModelLoadError, match="did not come up") as caught:
        triton.bind("broken", ProcessWorker(factory, **options), X, Y)
    assert reason in str(caught.value)
    assert worker_processes() == set()
    assert call(triton.http_url, "GET", "/v2/models/broken/ready")[0] != 200
    assert triton.is_alive()


def test_rebind_and_unbind_under_load_lose_nothing(triton: Triton, bind: Callable[..., None]) -> None:
    bind("moved", ProcessWorker(process_models.make, [2.0]))
    with under_load(triton.http_url, triton.grpc_url, "moved", threads=1) as load:
        old = worker_processes()
        triton.rebind("moved", ProcessWorker(process_models.make, [3.0]))
        assert not any(map(is_running, old))
        load.wait_for_more()
        with pytest.raises(TritonModelLoadError, match="there are no weights"):
            triton.rebind("moved", ProcessWorker(process_models.fail))
        load.wait_for_more()
        triton.rebind("moved", ProcessWorker(process_models.make, [4.0]), config=ModelConfig(max_batch_size=8))
        load.wait_for_more()
    assert load.failures == []
    assert {factor for _, factor in load.answers} == {2.0, 3.0, 4.0}
    assert len(worker_processes()) == 1


def test_a_busy_process_is_killed_when_its_time_is_over(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    bind("busy", ProcessWorker(process_models.make, kwargs={"child": True}))
    (pid,) = worker_processes()
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert len(children) == 1
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(infer, triton.http_url, "busy", HANG)
        # Where the process has not got the request yet, it has none to finish, and ends as it should all the same.
        eventually(hanging.running)
        time.sleep(0.5)
        triton.rebind("busy", ProcessWorker(process_models.make, [9.0]), timeout_s=0.2)
        assert isinstance(hanging.result(PATIENCE_S), str)
    eventually(lambda: not is_running(pid))
    # What it has started goes with it.
    eventually(lambda: not is_running(children[0]))
    assert infer(triton.http_url, "busy", 1.0) == [9.0]


# ---- the server and its owner --------------------------------------------------------------------------------------


def test_serve_raises_what_ended_a_worker_for_good() -> None:
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("once", ProcessWorker(process_models.make, max_crashes=1), X, Y)
        triton.run()
        killer = threading.Timer(0.1, lambda: infer(triton.http_url, "once", DIE))
        killer.start()
        with pytest.raises(TritonWorkerError, match="is given up after 1 ends") as caught:
            triton.serve(monitoring_period_s=0.1)
        killer.join(PATIENCE_S)
        assert caught.value.model_name == "once"
        assert caught.value.exit_code == -signal.SIGKILL
        assert caught.value.crashes == 1
        assert worker_processes() == set()

        triton = Triton(config=local_config())
        triton.bind("never", ProcessWorker(process_models.make), X, Y)
        triton.run()
        assert "the device is gone" in infer(triton.http_url, "never", NEVER_AGAIN)
        with pytest.raises(PyTritonUnrecoverableError, match="the device is gone"):
            triton.serve()
        assert worker_processes() == set()


SCRIPT = """
import json, sys, numpy as np
from pytriton.model_config import Tensor
from pytriton.triton import ProcessWorker, Triton, TritonConfig
{guard}
def make():
    return lambda requests: [{{"y": request.data["x"] * 5}} for request in requests]
if {condition}:
    x, y = (Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in "xy")
    triton = Triton(config=TritonConfig(http_address="127.0.0.1", http_port=0, allow_grpc=False, allow_metrics=False))
    triton.bind("m", ProcessWorker(make, copies=2), [x], [y])
    triton.run()
    print(triton.http_url, flush=True)
    sys.stdin.read()
"""


def start_script(tmp_path: Path, condition: str) -> subprocess.Popen[str]:
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT.format(guard="", condition=condition))
    environment = {**os.environ, "PYTRITON_HOME": str(tmp_path / "h")}
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_no_process_outlives_a_killed_parent_and_a_script_is_its_own_module() -> None:
    with short_home() as home, start_script(home, '__name__ == "__main__"') as script:
        assert script.stdout is not None
        url = script.stdout.readline().strip()
        assert infer(url, "m", 3.0) == [15.0]
        left = worker_processes(script.pid)
        assert len(left) == 2
        script.kill()
        script.wait(PATIENCE_S)
        eventually(lambda: not any(map(is_running, left)))
        # The rest of the workspace is for the next owner to sweep.
        subprocess.run(["rm", "-rf", str(home / "h"), str(home / "serve.py")], check=True)


def test_a_script_without_a_guard_is_told_so() -> None:
    with short_home() as home, start_script(home, "True") as script:
        _, errors = script.communicate(timeout=PATIENCE_S)
        assert script.returncode != 0
        assert 'put what the script does under `if __name__ == "__main__":`' in errors
        subprocess.run(["rm", "-rf", str(home / "h"), str(home / "serve.py")], check=True)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        (lambda: None, {}, "no lambda"),
        ("no colon", {}, "ProcessWorker.factory must be 'module:name'"),
        (7, {}, "ProcessWorker.factory must be"),
        (process_models.Model("x").__call__, {}, "another object"),
        ("m:f", {"args": "text"}, "ProcessWorker.args must be a tuple or list"),
        ("m:f", {"args": (1, {2, 3})}, "args[1] is {2, 3}, which is a builtins.set"),
        ("m:f", {"args": [np.float32(1)]}, "args[0]"),
        ("m:f", {"args": [float("nan")]}, "args[0] is nan"),
        ("m:f", {"kwargs": {"a": {"b": [Path("c")]}}}, "kwargs['a']['b'][0] is PosixPath('c')"),
        ("m:f", {"kwargs": {"a": {1: 2}}}, "kwargs['a'] has the key 1, which is a int"),
        ("m:f", {"kwargs": [1]}, "ProcessWorker.kwargs must be a dictionary"),
        ("m:f", {"copies": 0}, "ProcessWorker.copies must be an integer of at least 1"),
        ("m:f", {"copies": True}, "ProcessWorker.copies"),
        ("m:f", {"copies": 2.0}, "ProcessWorker.copies"),
        ("m:f", {"copies": 2, "env": {"A": ["1"]}}, "ProcessWorker.env['A'] must be one text, or a list of 2"),
        ("m:f", {"copies": 2, "env": [{"A": "1"}]}, "a list of 2 dictionaries"),
        ("m:f", {"env": {"A": 1}}, "ProcessWorker.env['A'] must be text, or None"),
        ("m:f", {"env": {"A=B": "1"}}, "'A=B'"),
        ("m:f", {"python": "/nowhere/python"}, "ProcessWorker.python must be the path"),
        ("m:f", {"python": 3}, "ProcessWorker.python must be the path"),
        ("m:f", {"working_dir": "/nowhere"}, "ProcessWorker.working_dir must be a folder that exists"),
        ("m:f", {"max_crashes": 0}, "ProcessWorker.max_crashes"),
        ("m:f", {"crash_window_s": "1"}, "ProcessWorker.crash_window_s"),
        ("m:f", {"start_timeout_s": float("inf")}, "ProcessWorker.start_timeout_s"),
    ],
)
def test_bad_descriptions(factory: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PyTritonBadParameterError) as caught:
        ProcessWorker(factory, **options)
    assert said in str(caught.value)
    assert str(caught.value.parameter).startswith("ProcessWorker.")


def test_good_descriptions() -> None:
    described = ProcessWorker(
        process_models.make,
        (1, 2.5, "a", None, [True], (1, 2)),
        {"deep": {"er": []}},
        copies=np.int64(2),
        env=[{"A": "1"}, {"A": None}],
        python=sys.executable,
    )
    assert described.target == "support.process_models:make"
    assert described.copies == 2
    assert described.environments == [{"A": "1"}, {"A": None}]
    assert json.loads(json.dumps(described.args)) == [1, 2.5, "a", None, [True], [1, 2]]
    assert repr(described) == "ProcessWorker('support.process_models:make', copies=2)"
    with pytest.raises(PyTritonValidationError, match="each also a ProcessWorker"):
        Triton(config=local_config()).bind("m", [described, 7], X, Y)  # type: ignore[list-item] # that is the point


def test_a_request_of_several_rows_is_one_batch(triton: Triton, bind: Callable[..., None]) -> None:
    bind("rows", ProcessWorker(process_models.make))
    rows = {**tensor("x", 1.0, 2.0, 3.0), "shape": [3, 1]}
    status, answer = call(triton.http_url, "POST", "/v2/models/rows/infer", {"inputs": [rows]})
    assert status == 200
    assert answer["outputs"][0]["data"] == [2.0, 4.0, 6.0]
