"""The examples that the commands run: a model that adds and subtracts, in this process and in one of its own."""

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pytriton.cli.checks.steps import StepFailed, Steps
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

_MODEL = "add_sub"
_START_DEADLINE_S = 120.0
_STOP_DEADLINE_S = 60.0

_SCRIPT = """\
import json
import logging

import numpy as np

from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

logging.basicConfig(level=logging.INFO)


@batch
def add_sub(a, b):
    return {"add": a + b, "sub": a - b}


# For this machine only, on free ports: leave the settings out to serve on 8000, 8001 and 8002 of all interfaces.
config = TritonConfig(
    http_address="127.0.0.1", http_port=0, grpc_address="127.0.0.1", grpc_port=0, allow_metrics=False
)
with Triton(config=config) as triton:
    triton.bind(
        model_name="add_sub",
        infer_func=add_sub,
        inputs=[Tensor(name="a", dtype=np.float32, shape=(-1,)), Tensor(name="b", dtype=np.float32, shape=(-1,))],
        outputs=[Tensor(name="add", dtype=np.float32, shape=(-1,)), Tensor(name="sub", dtype=np.float32, shape=(-1,))],
        config=ModelConfig(max_batch_size=16),
    )
    print(json.dumps([triton.http_url, triton.grpc_url]), flush=True)
    triton.serve()
"""


class _ExampleError(Exception):
    """An example did something else than it should."""


def example_add_sub(steps: Steps, _folder: Path) -> None:
    """Serve the model in this process and call it over HTTP and gRPC."""
    steps.heading("A model in this process:")
    with contextlib.suppress(StepFailed), contextlib.ExitStack() as stack:
        with steps.step("start tritonserver"):
            triton = Triton(config=_local_config())
            stack.callback(triton.stop)
            triton.run()
        with steps.step("load a model"):
            triton.bind(
                _MODEL,
                _add_sub,
                [Tensor((-1,), np.float32, "a"), Tensor((-1,), np.float32, "b")],
                [Tensor((-1,), np.float32, "add"), Tensor((-1,), np.float32, "sub")],
                config=ModelConfig(max_batch_size=16),
            )
        with steps.step("see that the guard is in force"):
            _check_guard(triton)
        _call_both(steps, [triton.http_url, triton.grpc_url])
        with steps.step("stop"):
            triton.stop()


def example_add_sub_script(steps: Steps, folder: Path) -> None:
    """Serve the model with a script in a process of its own, call it, and end it with SIGTERM."""
    steps.heading("A model in a script of its own:")
    script, log = folder / "add_sub.py", folder / "add_sub.log"
    with contextlib.suppress(StepFailed), contextlib.ExitStack() as stack:
        with steps.step("start the script"):
            script.write_text(_SCRIPT, encoding="utf-8")
            process = stack.enter_context(_process(script, log))
            urls = _first_line(process, log)
        _call_both(steps, urls)
        with steps.step("end it with SIGTERM"):
            process.send_signal(signal.SIGTERM)
            code = process.wait(_STOP_DEADLINE_S)
            if code != 0:
                raise _ExampleError(f"Expected exit code 0 from {script.name}, got {code}. {_log_end(log)}")


@batch
def _add_sub(a: "np.ndarray[Any, Any]", b: "np.ndarray[Any, Any]") -> dict[str, Any]:
    return {"add": a + b, "sub": a - b}


def _local_config() -> TritonConfig:
    return TritonConfig(
        http_address="127.0.0.1", http_port=0, grpc_address="127.0.0.1", grpc_port=0, allow_metrics=False
    )


def _check_guard(triton: Triton) -> None:
    missing = [name for name, is_in_force in triton.guard_states().items() if not is_in_force]
    if missing:
        raise _ExampleError(f"These protections of the guard are not in force: {', '.join(missing)}.")


def _call_both(steps: Steps, urls: "list[str | None]") -> None:
    for protocol, url in zip(("HTTP", "gRPC"), urls, strict=True):
        with steps.step(f"call it over {protocol}"):
            if url is None:
                raise _ExampleError(f"The server does not serve {protocol}: is it switched off in the environment?")
            _call(url)


def _call(url: str) -> None:
    a, b = np.arange(8, dtype=np.float32).reshape(2, 4), np.full((2, 4), 2, dtype=np.float32)
    with ModelClient(url, _MODEL, init_timeout_s=30.0, inference_timeout_s=30.0) as client:
        result = client.infer_batch(a=a, b=b)
    for name, expected in (("add", a + b), ("sub", a - b)):
        if not np.array_equal(result[name], expected):
            raise _ExampleError(f"Output {name!r}: expected {expected.tolist()}, got {result[name].tolist()}.")


@contextlib.contextmanager
def _process(script: Path, log: Path) -> "Iterator[subprocess.Popen[str]]":
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=errors, cwd=script.parent, text=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _first_line(process: "subprocess.Popen[str]", log: Path) -> "list[str | None]":
    """Wait for the addresses that the script prints when it serves."""
    if process.stdout is None:
        raise _ExampleError("The script has no output.")
    deadline = time.monotonic() + _START_DEADLINE_S
    while not select.select([process.stdout], [], [], 0.1)[0]:
        if time.monotonic() > deadline:
            raise _ExampleError(f"The script did not serve within {_START_DEADLINE_S:g} s. {_log_end(log)}")
    line = process.stdout.readline()
    if not line:
        raise _ExampleError(f"The script ended with exit code {process.wait(_STOP_DEADLINE_S)}. {_log_end(log)}")
    urls: list[str | None] = json.loads(line)
    return urls


def _log_end(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    return "Its last lines:" + "".join(f"\n        {line}" for line in lines)
