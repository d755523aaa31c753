"""Models of `model.py` files whose processes end while nobody calls them, and start again for the next request."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytriton.client.exceptions import PyTritonClientError
from pytriton.exceptions import PyTritonValidationError
from pytriton.proxy_backend.hosting.environments import ModelRefused
from pytriton.proxy_backend.hosting.models import IdleRule
from pytriton.proxy_backend.process import budget, host_process
from pytriton.server.errors import TritonServerError
from pytriton.triton import RestartPolicy, Triton, TritonConfig
from support.faults.plain_server import plain_server
from support.http import call
from support.processes import is_running
from support.python_models import CONFIG, EXECUTE, HEAD, MODEL, ask, hosts, infer, served, write
from support.python_models.converted import convert, hosts_at
from support.serving import server_pid
from support.waiting import PATIENCE_S, eventually

IDLE = "0.2s"
SLOW = """
    def initialize(self, args):
        (FOLDER / f"initialized-{args['model_instance_name']}-{os.getpid()}").touch()

    def finalize(self):
        (FOLDER / f"finalized-{os.getpid()}").touch()
"""


# A model that never comes up.
HANGS = {
    "initialize": """
    def initialize(self, args):
        time.sleep(3600)
""",
    "auto_complete_config": """
    @staticmethod
    def auto_complete_config(config):
        time.sleep(3600)
""",
}


def counting(folder: Path) -> str:
    """Return a model that leaves a file for each `initialize` and each `finalize`."""
    head = f"{HEAD}import pathlib\n\nFACTOR = np.float32(2)\nFOLDER = pathlib.Path({str(folder)!r})\n\n\n"
    return f"{head}class TritonPythonModel:{SLOW}{EXECUTE}"


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'


def is_ready(triton: Triton, name: str) -> bool:
    return call(triton.http_url, "GET", f"/v2/models/{name}/ready")[0] == 200


def test_its_processes_end_with_finalize_and_the_next_request_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    write(tmp_path / "models", "double", counting(tmp_path), CONFIG + "instance_group { count: 2 kind: KIND_CPU }\n")
    with served(tmp_path / "models", python_models_idle=IDLE) as triton:
        for round_number in range(1, 3):
            eventually(lambda: not hosts())
            assert is_ready(triton, "double")
            assert infer(triton, "double", 1, 2) == [2.0, 4.0]
            # One of the two was woken, or both where the first was asleep again.
            assert len(list(tmp_path.glob("initialized-*"))) >= 2 + round_number
        eventually(lambda: not hosts())
        assert len(list(tmp_path.glob("finalized-*"))) == len(list(tmp_path.glob("initialized-*")))
    assert "Instance 'double_0_1' of model 'double' (version 1) sleeps: no request came for 0.2 s" in caplog.text
    assert "is started again in" not in caplog.text


def large(mebibytes: int) -> str:
    """Return a model that takes so much memory."""
    weights = f"\n    def initialize(self, args):\n        self.weights = np.ones({mebibytes} << 18, np.float32)\n"
    return f"{HEAD}FACTOR = np.float32(2)\n\n\nclass TritonPythonModel:{weights}{EXECUTE}"


def test_hosts_share_a_memory_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three models and the memory of two: who was used least recently sleeps, and nothing is lost."""
    caplog.set_level(logging.INFO, "pytriton")
    for name in ("anna", "berta", "clara"):
        write(tmp_path, name, large(200))
    with served(tmp_path, memory_budget="600MiB") as triton:
        for name in ("anna", "berta", "clara", "anna", "berta"):
            assert is_ready(triton, name)
            assert infer(triton, name, 3) == [6.0]
            assert len(hosts()) <= 2
        with ThreadPoolExecutor(3) as callers:
            answers = callers.map(lambda name: infer(triton, name, 4), ["anna", "berta", "clara"] * 3)
            assert list(answers) == [[8.0]] * 9
    assert re.search(r"Instance '\w+_0' of model '\w+' .* sleeps: another model needs the memory", caplog.text)
    assert re.search(r"Instance '\w+_0' of model '\w+' .* is awake again, after", caplog.text)


def test_a_host_that_never_fits_is_refused_with_sizes(tmp_path: Path) -> None:
    write(tmp_path, "huge", large(200))
    told = r"need 2\d\d MiB, more than the memory budget of 100 MiB"
    with pytest.raises(TritonServerError, match=told), served(tmp_path, memory_budget="100MiB"):
        pass
    assert not hosts()


@pytest.mark.parametrize("stage", ["auto_complete_config", "initialize"])
def test_a_host_that_hangs_while_it_loads_is_refused_and_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    # Others wait for its size no longer than that.
    monkeypatch.setattr(budget, "_LONGEST_START_S", 1.0)
    write(tmp_path, "double", MODEL)
    hanging = f"{HEAD}class TritonPythonModel:\n{HANGS[stage]}{EXECUTE}"
    write(tmp_path, "hangs", hanging, CONFIG + parameter("PYTRITON_START_TIMEOUT_S", "4"))
    served_first = served(tmp_path, memory_budget="600MiB", model_control_mode="explicit", load_model=["double"])
    with served_first as triton, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(ask, triton, "load", "hangs")
        eventually(lambda: len(hosts()) == 2 or loading.done())
        assert ask(triton, "unload", "double")[0] == 200
        # One that starts meanwhile finds room.
        assert ask(triton, "load", "double")[0] == 200
        assert infer(triton, "double", 3) == [6.0]
        status, told = loading.result(PATIENCE_S)
        assert status == 400
        assert f"was still in the {stage} of its model.py after 4 s: it was killed. Set the parameter" in told["error"]
        assert "PYTRITON_START_TIMEOUT_S of its config.pbtxt higher" in told["error"]
        eventually(lambda: len(hosts()) == 1)
        assert infer(triton, "double", 3) == [6.0]


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_limit_of_the_start_that_is_no_time_is_a_load_error(tmp_path: Path, text: str) -> None:
    write(tmp_path, "double", MODEL, CONFIG + parameter("PYTRITON_START_TIMEOUT_S", text))
    message = f"parameter PYTRITON_START_TIMEOUT_S: expected a number of seconds above 0, got '{text}'"
    with pytest.raises(TritonServerError, match=re.escape(message)), served(tmp_path):
        pass


def test_requests_around_the_idle_time_are_all_answered(tmp_path: Path) -> None:
    write(tmp_path, "double", MODEL, CONFIG + "instance_group { count: 2 kind: KIND_CPU }\n")
    with served(tmp_path, python_models_idle=IDLE) as triton, ThreadPoolExecutor(4) as callers:
        for step in range(12):
            threading.Event().wait(0.15 + 0.02 * step)
            values = [100.0 + step * 4 + each for each in range(4)]
            answers = list(callers.map(lambda value: infer(triton, "double", value), values))
            assert answers == [[2 * value] for value in values]


def test_a_model_says_for_itself_when_it_sleeps(tmp_path: Path) -> None:
    write(tmp_path, "always", MODEL, CONFIG + parameter("PYTRITON_IDLE_TIMEOUT_S", "0"))
    write(tmp_path, "sleepy", MODEL)
    with served(tmp_path, python_models_idle=IDLE) as triton:
        eventually(lambda: len(hosts()) == 1)
        (pid,) = hosts()
        assert infer(triton, "always", 1) == [2.0]
        assert infer(triton, "sleepy", 1) == [2.0]
        eventually(lambda: set(hosts()) == {pid})
    write(tmp_path, "sleepy", MODEL, CONFIG + parameter("PYTRITON_IDLE_TIMEOUT_S", "0.2"))
    with served(tmp_path) as triton:
        eventually(lambda: len(hosts()) == 1)
        assert infer(triton, "sleepy", 1) == [2.0]


def test_what_sleeps_is_loaded_anew_unloaded_and_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "double", MODEL)
    with served(tmp_path, python_models_idle=IDLE) as triton:
        eventually(lambda: not hosts())
        write(tmp_path, "double", MODEL.replace("float32(2)", "float32(3)"))
        assert ask(triton, "load", "double")[0] == 200
        assert infer(triton, "double", 1) == [3.0]
        eventually(lambda: not hosts())
        assert ask(triton, "unload", "double")[0] == 200
        eventually(lambda: not is_ready(triton, "double"))
        assert hosts() == {}
        assert ask(triton, "load", "double")[0] == 200
        eventually(lambda: not hosts())
    assert hosts() == {}
    # That nobody holds the place of a process any more is no error.
    assert "is gone" not in caplog.text


def test_a_process_that_is_killed_while_it_wakes_is_replaced(tmp_path: Path) -> None:
    """The request goes on to wait, and the next process answers it."""
    begun = tmp_path / "begun"
    waits = f"{HEAD}import pathlib\n\nFACTOR = np.float32(2)\n\n\nclass TritonPythonModel:"
    waits += f"""
    def initialize(self, args):
        begun = pathlib.Path({str(begun)!r})
        if begun.with_name("wait").exists():
            begun.touch()
            time.sleep(600)
"""
    write(tmp_path / "models", "double", waits + EXECUTE, CONFIG + parameter("PYTRITON_ATTACH_TIMEOUT_S", "600"))
    with served(tmp_path / "models", python_models_idle=IDLE) as triton, ThreadPoolExecutor(1) as callers:
        eventually(lambda: not hosts())
        (tmp_path / "wait").touch()
        answer = callers.submit(infer, triton, "double", 4)
        eventually(begun.exists)
        (tmp_path / "wait").unlink()
        for pid in hosts():
            os.kill(pid, signal.SIGKILL)
        assert answer.result() == [8.0]


def test_a_finalize_that_never_returns_does_not_keep_it_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request that wakes it waits until the old process was killed, and is answered by the next one."""
    monkeypatch.setattr(host_process, "FINALIZE_TIMEOUT_S", 0.5)
    hangs = (
        f"\n    def finalize(self):\n        open({str(tmp_path / 'begun')!r}, 'w').close()\n        time.sleep(3600)\n"
    )
    write(tmp_path / "models", "double", MODEL + hangs, CONFIG + parameter("PYTRITON_ATTACH_TIMEOUT_S", "600"))
    with served(tmp_path / "models", python_models_idle=IDLE) as triton:
        (before,) = hosts()
        eventually((tmp_path / "begun").exists)
        assert infer(triton, "double", 4) == [8.0]
        assert not is_running(before)
        assert (
            "host 0 of model 'double' was still in the finalize of its model.py after 0.5 s: it is killed"
            in caplog.text
        )


def test_a_server_that_dies_while_models_sleep(tmp_path: Path) -> None:
    write(tmp_path, "double", MODEL)
    with served(tmp_path, python_models_idle=IDLE, restart=RestartPolicy()) as triton:
        eventually(lambda: not hosts())
        before = server_pid(triton)
        os.kill(before, signal.SIGKILL)
        eventually(lambda: not is_running(before))
        eventually(lambda: triton.is_alive() and _answers(triton))


def _answers(triton: Triton) -> bool:
    try:
        return infer(triton, "double", 1) == [2.0]
    except PyTritonClientError:
        return False


def test_a_model_that_sleeps_is_called_by_another_one(tmp_path: Path) -> None:
    asks = f"""{HEAD}
class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "x")
        called = pb_utils.InferenceRequest(model_name="double", inputs=[x], requested_output_names=["y"])
        answer = called.exec()
        assert not answer.has_error(), answer.error().message()
        return [pb_utils.InferenceResponse(answer.output_tensors())]
"""
    write(tmp_path, "asks", asks)
    write(tmp_path, "double", MODEL)
    with served(tmp_path, python_models_idle=IDLE) as triton:
        for _ in range(2):
            eventually(lambda: not hosts())
            assert infer(triton, "asks", 3) == [6.0]


def test_a_converted_model_sleeps_and_so_does_its_copy_after_another_start(tmp_path: Path) -> None:
    """The command that starts its processes is stopped while it sleeps; the next one serves the model again."""
    write(tmp_path / "models", "double", MODEL)
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        endpoints = Path(folder) / "hosts"
        convert(tmp_path / "models" / "double", "--endpoint", endpoints)
        with (
            hosts_at(endpoints, tmp_path / "first.log", "--idle", IDLE) as first,
            plain_server(tmp_path, tmp_path / "models", "--model-control-mode=explicit") as server,
        ):
            assert server.load("double_workers")[0] == 200
            for _ in range(2):
                eventually(lambda: not first.pids())
                assert server.infer("double_workers", x=("FP32", [2], [2, 1]))[1]["y"] == [4, 2]
            eventually(lambda: not first.pids())
            first.process.kill()
            first.process.wait()
            with hosts_at(endpoints, tmp_path / "second.log", "--idle", IDLE) as second:
                assert server.infer("double_workers", x=("FP32", [2], [3, 1]))[1]["y"] == [6, 2]
                eventually(lambda: not second.pids())
                assert server.infer("double_workers", x=("FP32", [2], [4, 1]))[1]["y"] == [8, 2]


def test_a_stop_while_a_model_wakes_tells_the_caller(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    waits = f"""{HEAD}import pathlib

FACTOR = np.float32(2)
BEGUN = pathlib.Path({str(begun)!r})


class TritonPythonModel:
    def initialize(self, args):
        if BEGUN.with_name("wait").exists():
            BEGUN.touch()
            time.sleep(600)
{EXECUTE}"""
    write(tmp_path / "models", "double", waits, CONFIG + parameter("PYTRITON_ATTACH_TIMEOUT_S", "600"))
    told: list[Exception] = []

    def ask_for_it(triton: Triton) -> None:
        try:
            infer(triton, "double", 4)
        except PyTritonClientError as error:
            told.append(error)

    with served(tmp_path / "models", python_models_idle=IDLE, exit_timeout_secs=1) as triton:
        eventually(lambda: not hosts())
        (tmp_path / "wait").touch()
        caller = threading.Thread(target=ask_for_it, args=(triton,))
        caller.start()
        eventually(begun.exists)
    caller.join()
    assert len(told) == 1
    assert hosts() == {}


def test_a_model_with_sequences_stays_awake(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pytriton")
    write(tmp_path, "double", MODEL, CONFIG + "max_batch_size: 4\nsequence_batching { direct {} }\n")
    write(tmp_path, "sleepy", MODEL)
    with served(tmp_path, python_models_idle=IDLE):
        eventually(lambda: len(hosts()) == 1)
        assert "'double' stays awake when it is idle: its process may hold the state of sequences" in caplog.text


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_parameter_that_is_no_time_is_a_load_error(tmp_path: Path, text: str) -> None:
    write(tmp_path, "double", MODEL, CONFIG + parameter("PYTRITON_IDLE_TIMEOUT_S", text))
    message = f"parameter PYTRITON_IDLE_TIMEOUT_S: expected a number of seconds, 0 for never, got '{text}'"
    with pytest.raises(TritonServerError, match=message), served(tmp_path):
        pass


def test_the_parameter_is_refused_where_sequences_have_a_state() -> None:
    config = '{"sequence_batching": {}, "parameters": {"PYTRITON_IDLE_TIMEOUT_S": {"string_value": "5"}}}'
    with pytest.raises(ModelRefused, match="the model cannot sleep, because its process may hold the state"):
        IdleRule.of(config, None)


def test_what_triton_runs_itself_cannot_sleep() -> None:
    with pytest.raises(PyTritonValidationError, match="python_models_idle is for models that workers serve"):
        TritonConfig(python_models="stub", python_models_idle="5m")
    with pytest.raises(PyTritonValidationError, match="expected a time above 0, such as 90s, 5m or 1h; got 'soon'"):
        TritonConfig(python_models_idle="soon")


def test_the_state_is_on_the_metrics_page(tmp_path: Path) -> None:
    write(tmp_path, "double", MODEL)
    settings = {"allow_metrics": True, "metrics_port": 0, "metrics_address": "127.0.0.1"}
    with served(tmp_path, python_models_idle=IDLE, **settings) as triton:
        eventually(lambda: not hosts())
        url = str(triton.metrics_url).rpartition("/metrics")[0]
        page = call(url, "GET", "/metrics")[1]
        assert 'pytriton_worker_asleep{model="double",version="1",worker="0"} 1.0' in page
        assert 'pytriton_worker_attached{model="double"' not in page
        labels = '{model="double",version="1"}'
        assert f"pytriton_model_memory_bytes{labels} 0.0" in page
        assert f"pytriton_model_wake_seconds_count{labels} 0.0" in page
        assert infer(triton, "double", 3) == [6.0]
        eventually(lambda: f"pytriton_model_wake_seconds_count{labels} 1.0" in call(url, "GET", "/metrics")[1])


def test_what_processes_of_models_take_is_on_the_metrics_page(tmp_path: Path) -> None:
    write(tmp_path, "large", large(100), CONFIG + "instance_group { count: 2 kind: KIND_CPU }\n")
    settings = {"allow_metrics": True, "metrics_port": 0, "metrics_address": "127.0.0.1"}
    with served(tmp_path, memory_budget="1GiB", **settings) as triton:
        page = call(str(triton.metrics_url).rpartition("/metrics")[0], "GET", "/metrics")[1]
        (taken,) = re.findall(r'^pytriton_model_memory_bytes\{model="large",version="1"\} (\S+)$', page, re.MULTILINE)
        # Two instances with 100 MiB each.
        assert 200 << 20 < float(taken) < 400 << 20


def test_hosts_of_converted_models_share_a_memory_budget(tmp_path: Path) -> None:
    for name in ("anna", "berta"):
        write(tmp_path / "models", name, large(200))
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        endpoints = Path(folder) / "hosts"
        for name in ("anna", "berta"):
            convert(tmp_path / "models" / name, "--endpoint", endpoints)
        with (
            hosts_at(endpoints, tmp_path / "log", "--memory-budget", "400MiB") as started,
            plain_server(tmp_path, tmp_path / "models", "--model-control-mode=explicit") as server,
        ):
            for name, is_new in (("anna", True), ("berta", True), ("anna", False)):
                assert not is_new or server.load(f"{name}_workers")[0] == 200
                assert server.infer(f"{name}_workers", x=("FP32", [2], [2, 1]))[1]["y"] == [4, 2]
                assert len(started.pids()) == 1
            assert started.said("sleeps: another model needs the memory")


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--idle", "soon", "expected a time above 0, such as 90s, 5m or 1h; got 'soon'"),
        ("--memory-budget", "much", "expected a number of bytes, or text such as 2GiB, 500MiB or 1.5GB; got 'much'"),
        ("--memory-budget", "1MiB", "expected at least 16 MiB, which a process takes by itself; got '1MiB'"),
    ],
)
def test_the_command_refuses_what_it_cannot_read(option: str, value: str, problem: str) -> None:
    command = [sys.executable, "-m", "pytriton.proxy_backend", "hosts", option, value]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"argument {option}: {problem}" in ended.stderr
