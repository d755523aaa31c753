"""The process of a host: what it says to its parent, what it loads, and how it ends."""

import asyncio
import json
import logging
import queue
import struct
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytriton.proxy_backend.process import child
from pytriton.proxy_backend.process.child import ChildProcess, Launch
from pytriton.proxy_backend.process.messages import FORMAT, PythonModelServing
from pytriton.proxy_backend.python_models.execution import CoroutineLoop
from pytriton.proxy_backend.python_models.host import PythonModel, answer_readiness
from pytriton.proxy_backend.python_models.server import SERVER, Phase
from pytriton.proxy_backend.wire.errors import ProxyBackendError
from support.processes import stop
from support.waiting import PATIENCE_S, eventually

logger = logging.getLogger("test")
ARGS = {"model_instance_name": "model_0_0", "model_instance_kind": "CPU", "model_version": "1"}

MODEL = """
import os, sys, threading
import numpy as np
import triton_python_backend_utils as pb_utils
from .beside import SECOND
import beside

class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        assert threading.current_thread() is threading.main_thread()
        assert __name__ == "1.model" and beside.SECOND == SECOND
        assert pb_utils.get_model_dir() == os.path.dirname(__file__)
        assert sys.argv == [""]

    def execute(self, requests):
        assert threading.current_thread() is threading.main_thread()
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy() * SECOND)], parameters=self.args)
            for r in requests
        ]

    def finalize(self):
        assert threading.current_thread() is threading.main_thread()
        open(pb_utils.get_model_dir() + "/finalized", "w").close()
"""


class Job:
    """A job as its process reads it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def to_text(self) -> str:
        return json.dumps({"format": FORMAT, "python_model": self.fields})


class Host:
    """A host, and what it has said."""

    def __init__(self, process: ChildProcess) -> None:
        self.process = process
        self.messages: list[dict[str, Any]] = []

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The first message of a kind that has not been waited for."""

        def found() -> Any:
            self.messages += self.process.poll(0.1)
            return next((message for message in self.messages if message["kind"] == kind), None)

        message = eventually(found)
        assert isinstance(message, dict)
        self.messages.remove(message)
        return message

    def end(self) -> int:
        """Wait for its end; returns the exit code."""

        def has_ended() -> bool:
            # It may have been reaped with the message that was waited for.
            if not self.process.has_ended:
                self.messages += self.process.poll(0.1)
            return self.process.has_ended

        assert eventually(has_ended)
        assert self.process.exit_code is not None
        return self.process.exit_code


@pytest.fixture
def start(tmp_path: Path, proxy: Any) -> Iterator[Callable[..., Host]]:
    """Starts hosts."""
    made = []

    def begin(source: str, *, serve: bool = True, auto_complete: bool = False, config: str = "", **files: str) -> Host:
        folder = tmp_path / "model" / "1"
        folder.mkdir(parents=True)
        for name, text in {"model": source, **files}.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        fields = {
            "model_name": "model",
            "model_version": 1,
            "model_file": str(folder / "model.py"),
            "model_dir": str(folder.parent),
            "model_config": config,
            "auto_complete": auto_complete,
            "serve": place(proxy) if serve else None,
            "log_level": 20,
        }
        process = ChildProcess(Launch(), Job(fields), "host", logger)  # type: ignore[arg-type]
        made.append(process)
        return Host(process)

    yield begin
    for process in made:
        process.close()


def place(proxy: Any) -> dict[str, Any]:
    args = {**ARGS, "model_config": json.dumps({"name": "model", "max_batch_size": 8})}
    return {"args": args, "endpoint": str(proxy.endpoint), "name": "host of model_0_0"}


def batch(golden: ModuleType, number: int) -> bytes:
    tensor = golden.Tensor("x", golden.FP32, [1, 2], struct.pack("<2f", 1.0, number))
    return bytes(golden.batch_record(number, [golden.Request(outputs=["y"])], [tensor]))


def test_a_model_from_its_load_to_its_end(
    start: Callable[..., Host], proxy: Any, golden: ModuleType, tmp_path: Path
) -> None:
    proxy.listen()
    host = start(MODEL, beside="SECOND = 2")
    peer = proxy.accept()
    peer.welcome()
    host.wait_for("hello")
    host.wait_for("ready")
    assert host.wait_for("attached")["value"] is True
    for number in range(1, 4):
        peer.batch(number, batch(golden, number))
        [response] = peer.responses(peer.answer())
        assert response.outputs["y"].tolist() == [[2, 2 * number]]
        assert response.parameters == place(proxy)["args"]
    host.process.stop(PATIENCE_S)
    assert peer.receive().kind == golden.DETACH
    peer.close()
    host.wait_for("done")
    assert host.end() == 0
    assert (tmp_path / "model" / "1" / "finalized").exists()


def test_processes_that_a_model_spawns(start: Callable[..., Host], proxy: Any) -> None:
    source = """
    import logging
    import multiprocessing
    import triton_python_backend_utils as pb_utils

    logging.basicConfig(format="model: %(message)s", level="INFO")

    def work(queue):
        queue.put((pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL, pb_utils.TritonError("a").message()))

    class TritonPythonModel:
        def initialize(self, args):
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=work, args=(queue,))
            process.start()
            logging.info("spawned %s", queue.get())
            process.join()
    """
    proxy.listen()
    host = start(source)
    peer = proxy.accept()
    peer.welcome()
    host.wait_for("ready")

    def is_told() -> bool:
        host.messages += host.process.poll(0.1)
        return "model: spawned (1, 'a')" in host.process.log_tail

    assert eventually(is_told)


def test_a_configuration_is_completed_and_then_served(
    start: Callable[..., Host], proxy: Any, golden: ModuleType
) -> None:
    source = (
        MODEL
        + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(8)
        return config
"""
    )
    config = {"name": "model", "max_batch_size": 0, "input": [], "output": []}
    host = start(source, beside="SECOND = 3", serve=False, auto_complete=True, config=json.dumps(config))
    told = host.wait_for("configured")
    assert told["changed"] is True
    assert json.loads(told["config"]) == {
        **config, "max_batch_size": 8, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    }  # fmt: skip
    proxy.listen()
    host.process.serve(PythonModelServing(**place(proxy)))
    peer = proxy.accept()
    peer.welcome()
    host.wait_for("ready")
    peer.batch(1, batch(golden, 1))
    [response] = peer.responses(peer.answer())
    assert response.outputs["y"].tolist() == [[3, 3]]


def test_a_model_that_completes_nothing(start: Callable[..., Host]) -> None:
    host = start("class TritonPythonModel:\n    pass", serve=False, auto_complete=True)
    told = host.wait_for("configured")
    assert (told["changed"], told["config"]) == (False, "")
    host.process.stop(PATIENCE_S)
    assert host.end() == 0


FOLDER = "<folder>"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def f(:\n    pass", "SyntaxError: invalid syntax (model.py, line 1)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'\n\nAt:\n"
         "  <folder>/model.py(1): <module>\n"),
        ("x = 1", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        ("class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no weights')",
         "ValueError: no weights\n\nAt:\n  <folder>/model.py(3): initialize\n"),
        ("class TritonPythonModel:\n    def __init__(self):\n        raise SystemExit(5)",
         "SystemExit: 5\n\nAt:\n  <folder>/model.py(3): __init__\n"),
        ("import triton_python_backend_utils as pb\nclass TritonPythonModel:\n    def initialize(self, args):\n"
         "        raise pb.TritonModelException('mine')",
         "TritonModelException: mine\n\nAt:\n  <folder>/model.py(4): initialize\n"),
    ],
    ids=["syntax", "import", "class", "initialize", "constructor", "exception"],
)  # fmt: skip
def test_a_model_that_does_not_load(start: Callable[..., Host], tmp_path: Path, source: str, text: str) -> None:
    host = start(source)
    failed = host.wait_for("failed")
    assert failed["stage"] == "load"
    shown = failed["text"].replace(str(tmp_path / "model" / "1"), FOLDER)
    assert [line for line in shown.splitlines() if "<frozen importlib" not in line] == text.splitlines()
    assert host.end() == 1


def test_a_file_that_is_not_there(start: Callable[..., Host], tmp_path: Path) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    fields = {
        "model_name": "m",
        "model_version": 1,
        "model_file": "/no/model.py",
        "model_dir": "/no",
        "model_config": "",
    }
    host = Host(ChildProcess(Launch(), Job(fields), "host", logger))  # type: ignore[arg-type]
    assert host.wait_for("failed")["text"] == "Python model file not found in '/no/model.py'"
    assert host.end() == 1
    host.process.close()


@pytest.mark.parametrize("value", ["config.as_dict()", "None"])
def test_what_is_no_configuration(start: Callable[..., Host], value: str) -> None:
    source = f"class TritonPythonModel:\n    def auto_complete_config(config):\n        return {value}"
    host = start(source, serve=False, auto_complete=True, config="{}")
    assert host.wait_for("failed")["text"] == (
        "auto_complete_config function in model 'model' must return a valid pb.ModelConfig object."
    )


def test_a_host_that_stands_still_is_not_waited_for(
    start: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_SERVE_TIMEOUT_S", 0.01)
    source = "class TritonPythonModel:\n    def auto_complete_config(config):\n        return config"
    host = start(source, serve=False, auto_complete=True, config="{}")
    host.wait_for("configured")
    stop(host.process.pid)
    # More than the socket takes.
    args = {"model_config": " " * 10_000_000}
    host.process.serve(PythonModelServing(args=args, endpoint="/there/is/none", name="host"))
    assert host.end() < 0


def detach(host: Host, proxy: Any) -> None:
    """Let a host attach, and have it stop; `finalize` is what is left."""
    peer = proxy.accept()
    peer.welcome()
    host.wait_for("attached")
    host.process.stop(PATIENCE_S)
    peer.receive()
    peer.close()


def test_readiness_is_not_the_business_of_a_model_that_is_finalized() -> None:
    """Neither a coroutine that was asked before, nor the model afterwards, keeps the server waiting."""
    asked: list[int] = []

    class Undecided:
        async def is_ready(self) -> None:
            asked.append(1)
            await asyncio.Event().wait()

    model = PythonModel.__new__(PythonModel)
    model._model = Undecided()
    questions: queue.Queue[int | None] = queue.Queue()
    answers: queue.Queue[tuple[int, bool, str]] = queue.Queue()

    def next_question(*answer: Any) -> int:
        answers.put(answer)
        question = questions.get()
        if question is None:
            raise ProxyBackendError("closed")
        return question

    loop = CoroutineLoop()
    with SERVER.replaced(SimpleNamespace(next_readiness_question=next_question), "m", Phase.SERVING):
        thread = threading.Thread(target=answer_readiness, args=(model, loop))
        thread.start()
        assert answers.get(timeout=PATIENCE_S) == (0, False, "")
        questions.put(1)
        eventually(lambda: bool(asked))
        SERVER.phase = Phase.FINALIZING
        loop.stop()
        assert answers.get(timeout=PATIENCE_S) == (1, True, "")
        questions.put(2)
        assert answers.get(timeout=PATIENCE_S) == (2, True, "")
        questions.put(None)
        thread.join(PATIENCE_S)
    loop.close()
    assert not thread.is_alive()
    assert asked == [1]


def test_an_error_in_finalize_is_logged(start: Callable[..., Host], proxy: Any) -> None:
    proxy.listen()
    host = start("class TritonPythonModel:\n    def finalize(self):\n        raise ValueError('too late')")
    detach(host, proxy)
    host.wait_for("done")
    assert host.end() == 0
    assert any("finalize failed: ValueError: too late" in line for line in host.process.log_tail)


def test_a_model_that_is_killed_by_its_parent_while_it_hangs(start: Callable[..., Host], proxy: Any) -> None:
    proxy.listen()
    source = "import time\nclass TritonPythonModel:\n    def finalize(self):\n        time.sleep(1e6)"
    host = start(source)
    detach(host, proxy)
    host.process.kill()
    assert host.end() < 0
