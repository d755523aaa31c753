"""Models that were converted: served by processes of ours in a tritonserver that somebody else starts."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.faults.plain_server import PlainServer, plain_server, reading_container
from support.http import call
from support.processes import is_running
from support.python_models import CONFIG, HEAD, ask, served, write
from support.python_models import hosts as started
from support.python_models import infer as ours
from support.python_models.converted import convert, hosts_at
from support.python_models.python_backend import why_no_python_backend
from support.waiting import PATIENCE_S, eventually

MODEL = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]
        self.name = args["model_name"]
        print("initialized", self.name, flush=True)

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if x[0] == 13:
                open(FOLDER + "/begun", "w").close()
                while not os.path.exists(FOLDER + "/go"):
                    time.sleep(0.01)
            if x[0] == 14:
                # What Triton's stub answers under numpy 2 is no tensor: an error says as much.
                text = f"{self.name}: {os.path.basename(os.readlink('/proc/self/exe'))}"
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * x)]))
        return responses

    def finalize(self):
        print("finalized", self.name, flush=True)
"""
)


@pytest.fixture
def endpoints() -> Iterator[Path]:
    """A folder for sockets, with a short path; nothing is left in it."""
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        yield Path(folder) / "hosts"
        assert not os.listdir(Path(folder) / "hosts")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A repository with a model."""
    repository = tmp_path / "models"
    write(repository, "double", MODEL.replace("FOLDER", repr(str(tmp_path))), f'name: "double"\n{CONFIG}')
    return repository


def infer(server: PlainServer, model: str, value: float) -> Any:
    """Return what comes of a value, or the error."""
    answer = server.infer(model, x=("FP32", [2], [value, 1]))[1]
    return answer if isinstance(answer, str) else answer["y"]


def in_background(function: Any, *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    """Call a function in a thread; what it returns comes into the list."""
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.append(function(*arguments)))
    thread.start()
    return thread, returned


EXPLICIT = "--model-control-mode=explicit"


def test_a_converted_model_is_served_beside_its_original(models: Path, endpoints: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in models.rglob("*") if path.is_file()}
    convert(models / "double", "--endpoint", endpoints)
    convert(models / "double", "--endpoint", endpoints, "--to", models / "again")
    regions = f"--backend-config=python,shm-region-prefix-name=pt{tmp_path.name}"
    with (
        hosts_at(endpoints, tmp_path / "hosts.log") as hosts,
        plain_server(tmp_path, models, EXPLICIT, regions) as server,
    ):
        for name in ("double_workers", "again"):
            assert server.load(name)[0] == 200
            assert infer(server, name, 2) == [4, 2]
            assert "python" in infer(server, name, 14)
        assert len(hosts.pids()) == 2
        if not why_no_python_backend():
            # Triton's own Python backend serves what was not converted.
            assert server.load("double")[0] == 200
            assert "triton_python_backend_stub" in infer(server, "double", 14)
            assert infer(server, "double_workers", 3) == [6, 2]
        assert server.unload("double_workers")[0] == 200
        eventually(lambda: hosts.said("finalized double_workers"))
        eventually(lambda: len(hosts.pids()) == 1)
        assert server.load("double_workers")[0] == 200
        assert infer(server, "double_workers", 4) == [8, 2]
        # A stop of the command lets them finish.
        thread, answers = in_background(infer, server, "again", 13)
        eventually((tmp_path / "begun").exists)
        hosts.process.send_signal(signal.SIGTERM)
        # Longer than for what has no caller any more.
        time.sleep(1.5)
        (tmp_path / "go").touch()
        assert hosts.process.wait(PATIENCE_S) == 0
        thread.join()
        assert answers == [[26, 2]]
        assert hosts.said("finalized again")
    assert {path: path.read_bytes() for path in before} == before
    # Triton's stub caches what it imports, ours does not.
    assert {path.parent.parent.parent.name for path in models.rglob("*.pyc")} <= {"double"}


def test_the_command_comes_and_goes_while_a_server_runs(models: Path, endpoints: Path, tmp_path: Path) -> None:
    convert(models / "double", "--endpoint", endpoints, "--attach-timeout", PATIENCE_S)
    with plain_server(tmp_path, models, EXPLICIT) as server:
        loading, loaded = in_background(server.load, "double_workers")
        eventually(lambda: "'double_workers' waits for a process" in server.log.read_text())
        with hosts_at(endpoints, tmp_path / "first.log") as first:
            loading.join()
            assert loaded[0][0] == 200
            assert infer(server, "double_workers", 2) == [4, 2]
            (host,) = first.pids()
            first.process.kill()
            first.process.wait()
            eventually(lambda: not is_running(host))
            waiting, answers = in_background(infer, server, "double_workers", 3)
            eventually(lambda: "the process that has started its host is gone" in server.log.read_text())
        with hosts_at(endpoints, tmp_path / "second.log"):
            waiting.join()
            assert answers == [[6, 2]]
        eventually(lambda: server.log.read_text().count("is gone, and the host with it") == 2)
        with hosts_at(endpoints, tmp_path / "third.log") as third:
            assert infer(server, "double_workers", 5) == [10, 2]
            assert server.unload("double_workers")[0] == 200
            eventually(lambda: third.said("finalized double_workers"))


def test_without_the_command_the_errors_name_it(models: Path, endpoints: Path, tmp_path: Path) -> None:
    convert(models / "double", "--endpoint", endpoints, "--attach-timeout", 0.2)
    with plain_server(tmp_path, models, EXPLICIT) as server:
        status, answer = server.load("double_workers")
        advice = f"`pytriton-proxy-backend hosts --endpoint {endpoints}` running, as user {os.geteuid()}?"
        assert status != 200
        assert "No such file or directory" in answer["error"]
        assert advice in answer["error"]
        with hosts_at(endpoints, tmp_path / "hosts.log"):
            assert server.load("double_workers")[0] == 200
            assert infer(server, "double_workers", 2) == [4, 2]
        said = eventually(lambda: error_with(advice, infer(server, "double_workers", 2)))
        assert "no worker is attached" in said
        # It is not held up by what nobody answers.
        assert server.unload("double_workers")[0] == 200
        server.wait_unloaded("double_workers")


def error_with(text: str, answer: Any) -> str:
    """Return an error that has a text, and nothing else."""
    return answer if isinstance(answer, str) and text in answer else ""


def test_a_model_that_fails_with_the_next_command_is_tried_again(models: Path, endpoints: Path, tmp_path: Path) -> None:
    convert(models / "double", "--endpoint", endpoints, "--attach-timeout", 0.2)
    file = models / "double_workers" / "1" / "model.py"
    with plain_server(tmp_path, models, EXPLICIT) as server:
        with hosts_at(endpoints, tmp_path / "first.log"):
            assert server.load("double_workers")[0] == 200
        whole = file.read_text()
        file.write_text(whole.replace('self.folder = args["model_repository"]', "raise ValueError('no weights')"))
        with hosts_at(endpoints, tmp_path / "second.log"):
            eventually(lambda: error_with("no weights", infer(server, "double_workers", 2)))
            file.write_text(whole)
            assert eventually(lambda: [each for each in (infer(server, "double_workers", 2),) if each == [4, 2]])


def test_servers_come_and_go_while_the_command_runs(models: Path, endpoints: Path, tmp_path: Path) -> None:
    convert(models / "double", "--endpoint", endpoints)
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    with hosts_at(endpoints, tmp_path / "hosts.log") as hosts:
        with plain_server(tmp_path, models, EXPLICIT, "--load-model=double_workers") as server:
            # Two servers share the folder of the model, and the command.
            with plain_server(elsewhere, models, EXPLICIT, "--load-model=double_workers") as other:
                assert infer(other, "double_workers", 1) == [2, 2]
                assert infer(server, "double_workers", 1) == [2, 2]
                assert len(hosts.pids()) == 2
            eventually(lambda: len(hosts.pids()) == 1)
            server.process.kill()
            eventually(lambda: not hosts.pids())
            eventually(lambda: os.listdir(endpoints) == ["hosts.sock"])
        with plain_server(tmp_path, models, EXPLICIT, "--load-model=double_workers") as server:
            assert infer(server, "double_workers", 2) == [4, 2]


def test_a_server_in_another_container(models: Path, endpoints: Path, tmp_path: Path) -> None:
    """They share the repository, which the server only reads, and the folder of the socket."""
    convert(models / "double", "--endpoint", endpoints)
    container = reading_container(models)
    with (
        hosts_at(endpoints, tmp_path / "hosts.log") as hosts,
        plain_server(tmp_path, models, EXPLICIT, "--load-model=double_workers", prefix=container) as server,
    ):
        assert infer(server, "double_workers", 2) == [4, 2]
        (host,) = hosts.pids()
        os.kill(host, signal.SIGKILL)
        eventually(lambda: not is_running(host))
        # The server, which has no descriptor of a process in another container, may see its end a moment later: what
        # is asked until then is told to be lost.
        while (answer := infer(server, "double_workers", 3)) != [6, 2]:
            assert "was lost while it worked on this request" in str(answer)


def test_a_repository_by_a_relative_path(models: Path, endpoints: Path, tmp_path: Path) -> None:
    convert(models / "double", "--endpoint", endpoints)
    options = (EXPLICIT, "--load-model=double_workers")
    with (
        hosts_at(endpoints, tmp_path / "hosts.log"),
        plain_server(tmp_path, Path(models.name), *options) as server,
    ):
        assert infer(server, "double_workers", 2) == [4, 2]


def test_a_server_of_ours_starts_the_processes_itself(models: Path, endpoints: Path, tmp_path: Path) -> None:
    """A repository that converted models lie in is served as it is; the command does not run."""
    convert(models / "double", "--endpoint", endpoints)
    endpoints.mkdir()
    with served(models, load_model=["double_workers"]) as triton:
        assert ours(triton, "double_workers", 2, 1) == [4, 2]
        assert ask(triton, "load", "double")[0] == 200
        assert ours(triton, "double", 3, 1) == [6, 2]
        assert len(started()) == 2


ODD = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(int(pb_utils.get_input_tensor_by_name(each, "x").as_numpy()[0])) for each in requests]

    def answer(self, case):
        if case == 1:
            return pb_utils.InferenceResponse([pb_utils.Tensor("other", np.zeros(1, np.float32))])
        if case == 2:
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([1, 2], ">f4"))])
        try:
            pb_utils.Tensor("text", np.array(["a\\ud83d"], np.object_))
        except Exception as error:
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError(f"case {case}: {error}"))
"""
)


def test_odd_outputs_end_as_with_a_server_of_ours(endpoints: Path, tmp_path: Path) -> None:
    """Undeclared outputs, those in another byte order, and texts without a form in UTF-8."""
    write(tmp_path / "models", "odd", ODD, f'name: "odd"\n{CONFIG}')
    convert(tmp_path / "models" / "odd", "--endpoint", endpoints)
    with (
        hosts_at(endpoints, tmp_path / "hosts.log") as hosts,
        plain_server(tmp_path, tmp_path / "models", EXPLICIT, "--load-model=odd_workers") as server,
    ):
        by_command = [server.infer("odd_workers", x=("FP32", [1], [case])) for case in (1, 2, 3)]
        eventually(lambda: hosts.said("(other), which are dropped"))
    with served(tmp_path / "models", load_model=["odd"]) as triton:
        body = [{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [case]}]} for case in (1, 2, 3)]
        by_server = [call(triton.http_url, "POST", "/v2/models/odd/infer", each) for each in body]
    assert by_command[0] == (200, {})
    assert by_command[1] == (200, {"y": [1, 2]})
    assert by_command[2][0] == by_server[2][0] != 200
    assert "case 3" in by_command[2][1]
    assert by_server[0][1]["outputs"] == []
    assert by_server[1][1]["outputs"][0]["data"] == [1, 2]
    assert by_server[2][1]["error"] == by_command[2][1]
