"""Models for Triton's Python backend on workers: loaded, served, replaced, unloaded and ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.exceptions import PyTritonInvalidOperationError, PyTritonValidationError
from pytriton.model_config import Tensor
from pytriton.proxy_backend.hosting import supervisor
from pytriton.server.errors import TritonModelLoadError
from pytriton.triton import RestartPolicy, Triton
from support.http import call
from support.python_models import CONFIG, MODEL, TENSORS, ask, hosts, infer, served, stop_while_asked, write
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually


def test_an_unmodified_model_is_served(tmp_path: Path) -> None:
    life = (
        "    def initialize(self, args):\n"
        "        with open(args['model_repository'] + '/' + args['model_instance_name'] + '.json', 'w') as file:\n"
        "            json.dump({**args, 'pid': os.getpid()}, file)\n"
        "\n"
        "    def finalize(self):\n"
        "        open(os.path.join(pb_utils.get_model_dir(), 'finalized'), 'a').write('x')\n"
        "\n"
        "    def is_ready(self):\n"
        "        return True\n"
    )
    parameters = 'parameters { key: "a" value: { string_value: "b" } }'
    config = CONFIG + "instance_group { count: 2 kind: KIND_CPU }\n" + parameters
    write(tmp_path, "double", MODEL + life, config)
    with served(tmp_path) as triton:
        for value in range(20):
            assert infer(triton, "double", value % 13, 2) == [2 * (value % 13), 4]
        told = [json.loads((tmp_path / "double" / f"double_0_{number}.json").read_text()) for number in range(2)]
        assert {each.pop("pid") for each in told} == set(hosts())
        for number, args in enumerate(told):
            assert json.loads(args.pop("model_config"))["parameters"]["a"] == {"string_value": "b"}
            assert args == {
                "model_instance_kind": "CPU",
                "model_instance_name": f"double_0_{number}",
                "model_instance_device_id": "0",
                "model_repository": str(tmp_path / "double"),
                "model_version": "1",
                "model_name": "double",
            }
        assert ask(triton, "unload", "double")[0] == 200
        eventually(lambda: not hosts())
        assert (tmp_path / "double" / "1" / "finalized").read_text() == "xx"


def test_models_are_loaded_reloaded_and_unloaded_by_calls(tmp_path: Path) -> None:
    write(tmp_path, "later", MODEL)
    write(tmp_path, "first", MODEL)
    with served(tmp_path, load_model=["first"]) as triton:
        assert infer(triton, "first", 1) == [2]
        first = set(hosts())
        assert ask(triton, "load", "later")[0] == 200
        assert infer(triton, "later", 1) == [2]
        (before,) = hosts().keys() - first
        write(tmp_path, "later", MODEL.replace("float32(2)", "float32(5)"))
        assert ask(triton, "load", "later")[0] == 200
        assert infer(triton, "later", 1) == [5]
        eventually(lambda: before not in hosts())
        assert ask(triton, "unload", "later")[0] == 200
        eventually(lambda: len(hosts()) == 1)
        assert infer(triton, "first", 1) == [2]


def test_versions_are_served_side_by_side(tmp_path: Path) -> None:
    config = CONFIG + "version_policy { all { } }"
    write(tmp_path, "both", MODEL, config)
    write(tmp_path, "both", MODEL.replace("float32(2)", "float32(3)"), config, version=2)
    with served(tmp_path) as triton:
        assert infer(triton, "both", 1, version=1) == [2]
        assert infer(triton, "both", 1, version=2) == [3]
        assert len(hosts()) == 2


def test_a_repository_is_polled(tmp_path: Path) -> None:
    folder = write(tmp_path, "first", MODEL)
    with served(tmp_path, model_control_mode="poll", repository_poll_secs=1) as triton:
        assert infer(triton, "first", 1) == [2]
        write(tmp_path, "second", MODEL.replace("float32(2)", "float32(3)"))
        eventually(lambda: call(triton.http_url, "GET", "/v2/models/second/ready")[0] == 200)
        assert infer(triton, "second", 1) == [3]
        (folder / "model.py").write_text(MODEL.replace("float32(2)", "float32(7)"))
        eventually(lambda: infer(triton, "first", 1) == [7])


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="the C library is another one")
def test_memory_that_loading_has_freed_is_given_back(tmp_path: Path) -> None:
    # What is kept lies above what is freed, so that the C library cannot give it back by itself.
    life = (
        "    def initialize(self, args):\n"
        "        parts = [bytes(1000) for _ in range(100_000)]\n"
        "        self.kept = parts[-1]\n"
    )
    write(tmp_path, "double", MODEL + life)
    with served(tmp_path) as triton:
        assert infer(triton, "double", 1) == [2]
        (host,) = hosts()
        resident = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{host}/status").read_text())
        assert resident is not None
        assert int(resident[1]) < 70_000


BROKEN: dict[str, tuple[str, str]] = {
    "does not import": ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
    "syntax": ("def f(:\n", r"model\.py.*line 1|line 1.*model\.py"),
    "no class": ("class Other:\n    pass\n", "TritonPythonModel"),
    "raises in initialize": (
        MODEL + "\n    def initialize(self, args):\n        raise ValueError('no weights')\n",
        "no weights",
    ),
    "exits in initialize": (
        MODEL + "\n    def initialize(self, args):\n        os._exit(7)\n",
        "ended with exit code 7",
    ),
    "exits at its import": ("import os\nos._exit(8)\n", "ended with exit code 8"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_loaded_says_why(what: str, tmp_path: Path) -> None:
    text, said = BROKEN[what]
    write(tmp_path, "broken", text)
    with short_home(), pytest.raises(TritonModelLoadError) as caught:
        Triton(config=local_config(python_models="workers", model_repository=tmp_path)).run()
    assert re.search(said, str(caught.value), re.DOTALL)
    assert not hosts()


def test_what_a_stop_cuts_off_is_told(tmp_path: Path) -> None:
    """One that hangs costs no other model its end, and its caller is answered by the server, not by its death."""
    life = "\n    def finalize(self):\n        open(os.path.join(pb_utils.get_model_dir(), 'finalized'), 'w').close()\n"
    hangs = f"open('{tmp_path}/begun', 'w').close()\n                time.sleep({PATIENCE_S})"
    write(tmp_path, "hangs", MODEL.replace("os._exit(3)", hangs) + life)
    write(tmp_path, "double", MODEL + life)
    said: list[str] = []

    def call_hanging() -> None:
        with pytest.raises(PyTritonClientInferenceServerError) as caught:
            infer(triton, "hangs", 13)
        said.append(str(caught.value))

    settings = {"model_control_mode": "explicit", "load_model": ["*"], "exit_timeout_secs": 1}
    with served(tmp_path, **settings) as triton:
        caller = threading.Thread(target=call_hanging)
        caller.start()
        eventually((tmp_path / "begun").exists)
        triton.stop()
        caller.join()
    assert "worker" in said[0]
    assert [path.parent.parent.name for path in tmp_path.glob("*/1/finalized")] == ["double"]
    assert not hosts()


def test_a_model_that_was_mended_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, "broken", BROKEN["raises in initialize"][0])
    write(tmp_path, "whole", MODEL)
    with served(tmp_path, exit_on_error=False) as triton:
        assert infer(triton, "whole", 1) == [2]
        status, answer = ask(triton, "load", "broken")
        assert status == 400
        assert "no weights" in answer["error"]
        write(tmp_path, "broken", MODEL)
        assert ask(triton, "load", "broken")[0] == 200
        assert infer(triton, "broken", 1) == [2]


def test_a_configuration_is_completed(tmp_path: Path) -> None:
    completing = MODEL.replace(
        "class TritonPythonModel:",
        "class TritonPythonModel:\n"
        "    @staticmethod\n"
        "    def auto_complete_config(config):\n"
        "        config.set_max_batch_size(4)\n"
        "        config.add_input({'name': 'x', 'data_type': 'TYPE_FP32', 'dims': [-1]})\n"
        "        config.add_output({'name': 'y', 'data_type': 'TYPE_FP32', 'dims': [-1]})\n"
        "        return config\n",
    ).replace("x[0] == 13", "x[0, 0] == 13")
    write(tmp_path, "completed", completing, 'backend: "python"')
    with served(tmp_path) as triton:
        status, config = call(triton.http_url, "GET", "/v2/models/completed/config")
        assert (status, config["max_batch_size"]) == (200, 4)
        assert [tensor["name"] for tensor in config["input"] + config["output"]] == ["x", "y"]
        assert infer(triton, "completed", 1, 2) == [2, 4]


def test_a_host_that_ends_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, "double", MODEL)
    with served(tmp_path) as triton:
        assert infer(triton, "double", 1) == [2]
        (before,) = hosts()
        # More often than a process worker of a bound model may end.
        for _ in range(6):
            with pytest.raises(PyTritonClientInferenceServerError, match="worker"):
                infer(triton, "double", 13)
            # It waits for the next one.
            assert infer(triton, "double", 1) == [2]
        (after,) = hosts()
        os.kill(after, signal.SIGKILL)
        # Its command line goes before its socket does.
        eventually(lambda: not Path(f"/proc/{after}").exists())
        assert infer(triton, "double", 2) == [4]
        assert before not in hosts()


def test_a_server_that_dies_takes_its_hosts_along(tmp_path: Path) -> None:
    write(tmp_path, "double", MODEL)
    with served(tmp_path, restart=RestartPolicy()) as triton:
        (before,) = hosts()
        os.kill(server_pid(triton), signal.SIGKILL)
        eventually(lambda: before not in hosts())
        eventually(lambda: triton.is_alive() and hosts() and _is_served(triton))
        assert infer(triton, "double", 1) == [2]


def _is_served(triton: Triton) -> bool:
    try:
        return bool(call(triton.http_url, "GET", "/v2/models/double/ready")[0] == 200)
    except OSError:
        return False


@pytest.mark.parametrize("where", ["finalize", "initialize"])
def test_a_model_that_hangs_does_not_keep_the_server(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "FINALIZE_TIMEOUT_S", 1.0)
    hang = f"\n    def {where}(self, *args):\n        open('{tmp_path}/begun', 'w').close()\n        time.sleep(3600)\n"
    write(tmp_path, "hangs", MODEL + hang)
    with served(tmp_path, load_model=[]) as triton:
        if where == "finalize":
            assert ask(triton, "load", "hangs")[0] == 200
            assert ask(triton, "unload", "hangs")[0] == 200
            eventually(lambda: not hosts())
            assert "is still busy after the time to stop: it is killed" in caplog.text
            return
        in_background(lambda: ask(triton, "load", "hangs"))
        eventually((tmp_path / "begun").exists)
    assert not hosts()


@pytest.mark.parametrize(
    "rest", ["threading.Thread(target=time.sleep, args=(3600,)).start()", "atexit.register(time.sleep, 3600)"]
)
def test_what_a_model_has_started_does_not_keep_its_process(
    rest: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = f"\n    def initialize(self, args):\n        import atexit\n        import threading\n\n        {rest}\n"
    write(tmp_path, "stays", MODEL + life)
    with served(tmp_path) as triton:
        assert infer(triton, "stays", 1) == [2]
        assert ask(triton, "unload", "stays")[0] == 200
        eventually(lambda: not hosts())
        eventually(lambda: "something that its code has started still runs" in caplog.text)


def test_the_log_has_the_traceback_of_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fails = (
        "\n    def initialize(self, args):\n"
        "        try:\n            open('/no/weights')\n"
        "        except OSError as error:\n            raise ValueError('no weights') from error\n"
    )
    write(tmp_path, "raises", MODEL + fails)
    write(tmp_path, "syntax", BROKEN["syntax"][0])
    with served(tmp_path, load_model=[]) as triton:
        for name in ("raises", "syntax"):
            assert ask(triton, "load", name)[0] == 400
    told = [record.getMessage() for record in caplog.records if "did not come up" in record.getMessage()]
    assert "its model.py failed: ValueError: no weights" in told[0]
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/no/weights'\n" in told[0]
    assert "its model.py failed: SyntaxError" in told[1]
    assert f'File "{tmp_path}/syntax/1/model.py", line 1' in told[1]
    # What is ours helps nobody there.
    assert all("proxy_backend/" not in text for text in told)


def test_a_long_load_error_reaches_its_caller(tmp_path: Path) -> None:
    """Over gRPC an error is a header, which clients take 8 KiB of."""
    write(tmp_path, "calls", MODEL + "\n    def initialize(self, args):\n        self.initialize(args)\n")
    with served(tmp_path, load_model=[]) as triton:
        headers = {"triton-grpc-protocol-triton-access-token": str(triton.get_access_token())}
        with (
            tritonclient.grpc.InferenceServerClient(str(triton.grpc_url).partition("//")[2]) as client,
            pytest.raises(
                InferenceServerException, match=r"(?s)RecursionError.* \[\.\.\.\] .*model\.py\(\d+\): initialize"
            ),
        ):
            client.load_model("calls", headers=headers)


def in_background(function: Callable[[], object]) -> None:
    """Call a function, whose answer nobody waits for, in a thread."""

    def run() -> None:
        with contextlib.suppress(OSError):
            function()

    threading.Thread(target=run, daemon=True).start()


def test_executions_are_counted_whether_they_fail_or_not(tmp_path: Path) -> None:
    write(tmp_path, "double", MODEL.replace("os._exit(3)", "raise ValueError('thirteen')"))
    with served(tmp_path) as triton:
        assert infer(triton, "double", 1) == [2]
        with pytest.raises(PyTritonClientInferenceServerError, match="thirteen"):
            infer(triton, "double", 13)
        headers = {"triton-access-token": str(triton.get_access_token())}
        status, answer = call(triton.http_url, "GET", "/v2/models/double/stats", headers=headers)
        (counted,) = answer["model_stats"]
        assert (status, counted["execution_count"], counted["inference_count"]) == (200, 2, 1)
        assert counted["inference_stats"]["fail"]["count"] == 1
        assert [each["compute_infer"]["count"] for each in counted["batch_stats"]] == [2]


@pytest.mark.parametrize("mode", ["explicit", "poll"])
def test_a_stop_waits_for_requests_in_flight(tmp_path: Path, mode: str) -> None:
    # Longer than Triton's Python backend is waited for whose processes have died.
    waits = f"open('{tmp_path}/begun', 'w').close()\n                time.sleep(4)"
    write(tmp_path, "slow", MODEL.replace("os._exit(3)", waits))
    with served(tmp_path, model_control_mode=mode) as triton:
        assert stop_while_asked(triton, "slow", tmp_path / "begun") == [[26]]


def test_ensembles_and_bound_callables_stand_beside_them(tmp_path: Path) -> None:
    steps = "".join(
        f'step {{ model_name: "{name}" model_version: -1 input_map {{ key: "{a}" value: "{b}" }} '
        f'output_map {{ key: "{c}" value: "{d}" }} }}\n'
        for name, a, b, c, d in (("double", "x", "x", "y", "middle"), ("double", "x", "middle", "y", "y"))
    )
    write(tmp_path, "double", MODEL)
    (tmp_path / "chain" / "1").mkdir(parents=True)
    (tmp_path / "chain" / "config.pbtxt").write_text(
        f'platform: "ensemble"\n{TENSORS}ensemble_scheduling {{\n{steps}}}'
    )
    with served(tmp_path) as triton:
        assert infer(triton, "chain", 1, 2) == [4, 8]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_a_repository(tmp_path: Path, number: signal.Signals) -> None:
    life = "\n    def finalize(self):\n        print('finalized by', os.getpid(), flush=True)\n"
    write(tmp_path, "double", MODEL + life)
    options = ["--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--access-token=secret"]
    with short_home():
        command = [sys.executable, "-m", "pytriton", "serve-repository", str(tmp_path), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            written = ""
            while not (found := re.search(r"Started HTTPService at (\S+:\d+)", written)):
                line = process.stdout.readline()
                assert line, written
                written += line
            url = f"http://{found[1]}"
            with ModelClient(url, "double", inference_timeout_s=PATIENCE_S) as client:
                assert client.infer_sample(x=np.array([1], np.float32))["y"].tolist() == [2]
            assert call(url, "POST", "/v2/repository/models/double/unload", {})[0] == 403
            (host,) = hosts(process.pid)
            process.send_signal(number)
            written = process.stdout.read()
            assert process.wait(PATIENCE_S) == 0, written
        assert f"finalized by {host}" in written


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path, "broken", BROKEN["raises in initialize"][0])
    command = [sys.executable, "-m", "pytriton", "serve-repository", str(tmp_path), "--http-port=0", "--grpc-port=0"]
    with short_home():
        done = subprocess.run(
            [*command, "--metrics-port=0", "--log-level=ERROR"], capture_output=True, text=True, check=False
        )
        budget = subprocess.run(
            [*command, "--python-models=stub", "--memory-budget=1GiB"], capture_output=True, text=True, check=False
        )
    assert done.returncode == 1
    assert re.search(r"^Error: tritonserver cannot load model 'broken'.*no weights", done.stderr, re.MULTILINE)
    assert budget.returncode == 2
    assert "--memory-budget is for --python-models workers" in budget.stderr


def test_models_are_bound_by_their_folders(tmp_path: Path) -> None:
    double = write(tmp_path, "double", MODEL).parent
    triple = write(tmp_path, "triple", MODEL.replace("float32(2)", "float32(3)")).parent
    broken = write(tmp_path, "broken", BROKEN["raises in initialize"][0]).parent
    before = sorted(tmp_path.rglob("*"))
    triton = Triton(config=local_config())
    triton.bind_model(double)
    with pytest.raises(PyTritonInvalidOperationError, match="There is a model 'double' already"):
        triton.bind_model(tmp_path / "double")
    with pytest.raises(PyTritonValidationError, match="there is none at"):
        triton.bind_model(tmp_path / "nothing")
    with pytest.raises(PyTritonInvalidOperationError, match="There is a model 'Double' already, which is no"):
        triton.bind("Double", lambda **_: {}, [Tensor((-1,), np.float32)], [Tensor((-1,), np.float32)])
    with short_home(), running(triton):
        assert infer(triton, "double", 2) == [4]
        triton.bind_model(str(triple))
        assert infer(triton, "triple", 2) == [6]
        with pytest.raises(TritonModelLoadError, match="no weights"):
            triton.bind_model(broken)
        triton.unbind_model("double")
        eventually(lambda: len(hosts()) == 1)
        with pytest.raises(PyTritonInvalidOperationError, match="has added no model 'double', but triple"):
            triton.unbind_model("double")
        triton.stop()
        triton.run()
        assert infer(triton, "triple", 2) == [6]
    assert sorted(tmp_path.rglob("*")) == before


def test_what_python_models_may_be() -> None:
    settings: Mapping[str, Any] = {"python_models": "mine"}
    with pytest.raises(PyTritonValidationError, match="must be one of stub, workers; got 'mine'"):
        local_config(**settings)
