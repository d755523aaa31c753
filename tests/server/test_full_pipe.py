"""Nobody reads the log of a server: its requests are served, and it ends when it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from support.serving import short_home
from support.waiting import PATIENCE_S

MODEL = """
import logging
import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import ProcessWorker, Triton, TritonConfig

def fail(requests):
    if requests[0]["x"][0] < 0:
        raise ValueError("x" * 3000)
    return [{"y": request["x"]} for request in requests]

def make():
    return fail

def bound():
    triton = Triton(config=TritonConfig(
        http_address="127.0.0.1", http_port=0, grpc_address="127.0.0.1", grpc_port=0, allow_metrics=False,
        log_verbose=1,
    ))
    x, y = Tensor((1,), np.float32, "x"), Tensor((1,), np.float32, "y")
    triton.bind("threads", fail, [x], [y], config=ModelConfig(batching=False))
    triton.bind("processes", ProcessWorker(make), [x], [y], config=ModelConfig(batching=False))
    return triton

if __name__ == "__main__":
    LOGGING
    with bound() as triton:
        print(triton.http_url, flush=True)
        triton.serve()
"""
# As programs set up their log: not at all, for all, and for this package alone.
LOGS = {
    "nothing": "pass",
    "root": "logging.basicConfig(level=logging.INFO)",
    "ours": "logging.getLogger('pytriton').addHandler(logging.StreamHandler())",
}


@contextmanager
def served(folder: Path, log: str, *, leave_room: bool) -> Iterator[tuple[subprocess.Popen[bytes], str, int]]:
    script = folder / "served.py"
    script.write_text(MODEL.replace("LOGGING", log))
    reader, writer = os.pipe()
    try:
        with short_home():
            process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=writer)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().decode().strip()
            assert url, os.read(reader, 65536).decode()
            if not leave_room:
                os.set_blocking(writer, False)
                with suppress(BlockingIOError):
                    while True:
                        os.write(writer, b"." * 4096)
                os.set_blocking(writer, True)
            yield process, url, reader
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("leave_room", [False, True])
def test_nobody_reads_standard_error(log: str, leave_room: bool, tmp_path: Path) -> None:
    with served(tmp_path, LOGS[log], leave_room=leave_room) as (process, url, reader):
        for model in ("threads", "processes"):
            with ModelClient(url, model, inference_timeout_s=PATIENCE_S) as client:
                for _ in range(60):
                    with pytest.raises(PyTritonClientInferenceServerError):
                        client.infer_sample(np.full(1, -1, np.float32))
                assert client.infer_sample(np.ones(1, np.float32))["y"] == [1]
        if log == "root":
            # Whoever reads again learns how much there was.
            os.set_blocking(reader, False)
            told = b""
            with ModelClient(url, "threads") as client:
                while b"records of the log were left out: nobody has read" not in told:
                    with pytest.raises(PyTritonClientInferenceServerError):
                        client.infer_sample(np.full(1, -1, np.float32))
                    # A thread writes the log: nothing may have come yet.
                    with suppress(BlockingIOError):
                        told += os.read(reader, 1 << 20)
                for _ in range(100):
                    with pytest.raises(PyTritonClientInferenceServerError):
                        client.infer_sample(np.full(1, -1, np.float32))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
