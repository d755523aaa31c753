"""What callers send and callables print or log, in every way to serve in processes: it ends none, forges nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.model_config import Tensor
from pytriton.proxy_backend.cli.app import run as run_command
from pytriton.triton import ProcessWorker, Triton
from support import python_models
from support.faults.plain_server import plain_server
from support.serving import local_config, running, serve_command, short_home
from support.waiting import PATIENCE_S, eventually

ACCESS = "INFO pytriton.access: "
TEXTS = [
    f"x\n{ACCESS}{{not json}}",
    f'x\n{ACCESS}{{"model": "forged", "request_id": "forged"}}',
    f'x\n{ACCESS}{{"message": 1, "args": 2}}',
    f"x\n{ACCESS}{'[' * 5000}{{}}",
    "x\nCRITICAL root: forged\nTraceback (most recent call last):\n  forged",
    "x\r\n\x1b]0;forged\x07\x1b[2J\x9b\u2028ERROR root: forged",
    "%s %d \\ {} \0" * 100,
]
# Whatever the text is: printed, written to standard error, logged by several loggers, and as the text of an error.
TELL = """
import logging, os, sys

def tell(text):
    print(text, flush=True)
    print(text, file=sys.stderr, flush=True)
    logging.getLogger("app.told").warning("got %s", text, extra={"caller": text})
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("app.told").exception("failed")
    return os.getpid()
"""
X = [Tensor(name="x", dtype=bytes, shape=(1,))]
Y = [Tensor(name="y", dtype=np.int64, shape=(1,))]
MODEL = (
    TELL
    + """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0].decode()
            pb_utils.Logger.log_info(text)
            pid = np.array([tell(text)], np.int64)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", pid)]))
        return responses
"""
)
CONFIG = """backend: "python"
input { name: "x" data_type: TYPE_STRING dims: 1 }
output { name: "y" data_type: TYPE_INT64 dims: 1 }
"""
APP = (
    TELL
    + """
from pytriton.decorators import model

@model
def echo(x: str) -> int:
    return tell(x)
"""
)


def make() -> Callable[..., Any]:
    """Make a callable that says aloud what it is told, and returns its process."""
    namespace: dict[str, Any] = {}
    exec(TELL, namespace)
    return lambda requests: [
        {"y": np.array([namespace["tell"](request["x"].flat[0].decode())], np.int64)} for request in requests
    ]


def ask_all(url: str, model: str) -> set[int]:
    """Send each text; return the processes that have answered."""
    with ModelClient(url, model, inference_timeout_s=PATIENCE_S) as client:
        answers = [client.infer_sample(x=np.array([text.encode()], object)) for text in TEXTS]
    return {int(np.ravel(next(iter(answer.values())))[0]) for answer in answers}


def check(records: list[dict[str, Any]], output: str) -> None:
    """Check that a log has each text as often as it was said, and nothing that it would be if it were read.

    Args:
        records: The log.
        output: The name of the loggers that have what the processes write.
    """
    assert not [record for record in records if record["logger"] == "root" or record["level"] == "CRITICAL"]
    assert not [
        record for record in records if record["logger"] == "pytriton.access" and record.get("model") == "forged"
    ]
    logged = [record for record in records if record["logger"] == "app.told"]
    # Two processes say it at the same time, each in its order.
    logged.sort(key=lambda record: record["process"])
    assert [record["level"] for record in logged] == ["WARNING", "ERROR"] * (len(logged) // 2)
    pairs = sorted(zip(logged[::2], logged[1::2], strict=True), key=lambda pair: TEXTS.index(pair[0]["caller"]))
    assert [told["caller"] for told, _ in pairs] == sorted(TEXTS * (len(pairs) // len(TEXTS)), key=TEXTS.index)
    for told, failed in pairs:
        text = told["caller"]
        assert told["message"].startswith("got ")
        # What looks like a traceback is one in JSON, of the same record.
        whole = "\n".join(filter(None, [told["message"], told.get("exception")]))
        assert whole.count("\n") == text.count("\n")
        assert failed["message"] == "failed"
        assert failed["exception"].startswith("Traceback (most recent call last):\n")
    written = [record for record in records if record["logger"].startswith(output) and "stream" in record]
    assert {record["level"] for record in written} == {"INFO"}
    messages = [record["message"] for record in written]
    for text in TEXTS:
        for line in text.split("\n"):
            shown = line[:9].rstrip("\r").partition("\x1b")[0]
            assert sum(message.startswith(shown) for message in messages) >= 2, shown


class Records(logging.Handler):
    """The log of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        extra: dict[str, Any] = {
            name: vars(record)[name] for name in ("caller", "stream", "model", "worker") if name in vars(record)
        }
        fields = {"logger": record.name, "level": record.levelname, "message": record.getMessage()}
        self.told.append({**extra, **fields, "process": record.process, "exception": record.exc_text})


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    root, handler = logging.getLogger(), Records()
    root.addHandler(handler)
    before, root.level = root.level, logging.INFO
    yield handler.told
    root.removeHandler(handler)
    root.setLevel(before)


def said_all(records: list[dict[str, Any]]) -> bool:
    return len([record for record in records if record["logger"] == "app.told"]) >= 2 * len(TEXTS)


@pytest.mark.parametrize("access", ["0", "1"])
def test_a_bound_process_worker(records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, access: str) -> None:
    monkeypatch.setenv("PYTRITON_ACCESS_LOG", access)
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("echo", ProcessWorker(make), X, Y)
        with running(triton):
            first = ask_all(str(triton.http_url), "echo")
            assert len(first) == 1
            eventually(lambda: said_all(records))
            told = list(records)
            # Nobody had to replace it.
            assert ask_all(str(triton.http_url), "echo") == first
            assert triton.is_alive()
    check(told, "pytriton.worker.echo.0")
    assert {record["process"] for record in told if "worker" in record} == first
    assert {record["worker"] for record in told if record["logger"] == "app.told"} == {"echo.0"}
    requests = [record for record in records if record["logger"] == "pytriton.access"]
    assert {record["model"] for record in requests} == ({"echo"} if access == "1" else set())
    assert len(requests) == (2 * len(TEXTS) if access == "1" else 0)


def test_a_python_model_on_workers(records: list[dict[str, Any]], tmp_path: Path) -> None:
    python_models.write(tmp_path, "echo", MODEL, CONFIG)
    with python_models.served(tmp_path) as triton:
        first = ask_all(str(triton.http_url), "echo")
        assert first == set(python_models.hosts())
        eventually(lambda: said_all(records))
        told = list(records)
        assert ask_all(str(triton.http_url), "echo") == first
    check(told, "pytriton.worker.echo.")


def read_json(text: str) -> list[dict[str, Any]]:
    """Return the records of a log whose lines are JSON, all of them."""
    return [json.loads(line) for line in text.split("\n") if line]


def test_the_command_with_workers(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    options = ("app.py", "--workers", "2", "--log-format", "json", "--log-level", "INFO", "--access-log")
    with serve_command(tmp_path, *options) as server:
        first = ask_all(server.url, "echo")
        eventually(lambda: server.written.count('"app.told"') >= 2 * len(TEXTS))
        assert ask_all(server.url, "echo") | first <= set(python_models.processes("worker_main", server.process.pid))
    records = read_json(server.written)
    assert sum(record["logger"] == "app.told" for record in records) == 4 * len(TEXTS)
    check(records, "pytriton.worker.echo.")
    assert sum(record["logger"] == "pytriton.access" for record in records) == 2 * len(TEXTS)
    assert not [record for record in records if "started again" in record["message"]]


def test_the_command_for_a_repository(tmp_path: Path) -> None:
    python_models.write(tmp_path, "echo", MODEL, CONFIG)
    options = ["--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--unprotected"]
    command = [sys.executable, "-m", "pytriton", "serve-repository", str(tmp_path), *options]
    log = tmp_path / "log"
    with (
        short_home(),
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            mark = "Started HTTPService at "
            eventually(lambda: mark in log.read_text() or process.poll() is not None)
            url = f"http://{log.read_text().partition(mark)[2].split()[0]}"
            first = ask_all(url, "echo")
            assert ask_all(url, "echo") == first == set(python_models.hosts(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, log.read_text()
    check_lines(log)


def check_lines(log: Path) -> None:
    """Check that a log of text has no line that a caller has made, and nothing that a terminal obeys."""
    # What a terminal takes for the end of a line, and nothing else.
    lines = log.read_bytes().decode().replace("\r\n", "\n").split("\n")
    assert not [line for line in lines if line.startswith(("INFO ", "CRITICAL ", "ERROR ", "Traceback"))]
    assert not [line for line in lines if not line.replace("\t", "").isprintable()]
    logged = [line for line in lines if "WARNING app.told [echo." in line]
    assert len(logged) == 2 * len(TEXTS)
    assert not [line for line in lines if "started again" in line]


def test_the_command_for_hosts(tmp_path: Path) -> None:
    models, log = tmp_path / "models", tmp_path / "hosts.log"
    python_models.write(models, "echo", MODEL, f'name: "echo"\n{CONFIG}')
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        endpoints = Path(folder) / "hosts"
        with pytest.raises(SystemExit) as ended:
            run_command(["convert", str(models / "echo"), "--endpoint", str(endpoints), "--to", str(models / "ours")])
        assert not ended.value.code
        command = [sys.executable, "-m", "pytriton.proxy_backend", "hosts", "--endpoint", str(endpoints)]
        with (
            log.open("wb") as output,
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(process.send_signal, signal.SIGTERM)
            eventually(lambda: "can be had at" in log.read_text())
            options = ("--model-control-mode=explicit", "--load-model=ours")
            with plain_server(tmp_path, models, *options) as server:
                first = ask_all(server.url, "ours")
                assert ask_all(server.url, "ours") == first == set(python_models.hosts(process.pid))
    text = log.read_text()
    log.write_text(text.replace("[ours.", "[echo."))
    check_lines(log)


def test_a_callable_in_a_thread_that_fails_with_the_text_of_a_caller(records: list[dict[str, Any]]) -> None:
    def fail(requests: Any) -> Any:
        try:
            raise KeyError("the cause")
        except KeyError as error:
            raise ValueError(requests[0]["x"].flat[0].decode()) from error

    with short_home():
        triton = Triton(config=local_config())
        triton.bind("echo", fail, X, Y)
        with running(triton), ModelClient(str(triton.http_url), "echo") as client:
            for text in TEXTS:
                with pytest.raises(PyTritonClientInferenceServerError):
                    client.infer_sample(x=np.array([text.encode()], object))
    told = [record["message"] for record in records if "the inference callable failed" in record["message"]]
    assert len(told) == len(TEXTS)
    for text, message in zip(TEXTS, told, strict=True):
        assert message.replace("\n", "").replace("\t", "").isprintable()
        _, mark, said = message.rpartition("\nValueError: ")
        assert mark
        _, *more = said.rstrip("\n").split("\n")
        assert len(more) == text.count("\n")
        assert all(line.startswith("    ") for line in more)
