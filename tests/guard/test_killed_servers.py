"""A server that is killed ends its callers' connections at once, whatever its children go on with."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientConnectionError
from pytriton.triton import Triton
from support.python_models.python_backend import why_no_python_backend
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

CONFIG = """\
backend: "python"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [-1] }]
"""
# Its child inherits what its stub has from the server, and outlives both.
MODEL = """\
import pathlib
import subprocess
import time

class TritonPythonModel:
    def initialize(self, args):
        silent = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        child = subprocess.Popen(["sleep", "600"], close_fds=False, **silent)
        pathlib.Path({folder!r}, f"child-{{child.pid}}").touch()

    def execute(self, requests):
        pathlib.Path({folder!r}, "executes").touch()
        time.sleep(600)
"""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_children_of_a_killed_server_keep_no_caller_waiting(tmp_path: Path, protocol: str) -> None:
    if reason := why_no_python_backend():
        pytest.skip(reason)
    version = tmp_path / "models" / "sleeper" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(MODEL.format(folder=str(tmp_path)))
    with short_home(), running(Triton(config=local_config(model_repository=tmp_path / "models"))) as triton:
        url = str(triton.http_url if protocol == "http" else triton.grpc_url)
        token = triton.get_access_token()
        try:
            with ModelClient(url, "sleeper", access_token=token, inference_timeout_s=PATIENCE_S) as client:
                # Over the connection that the request goes over, so that the stub begins while there is one.
                client.load_model()

                def kill() -> None:
                    eventually(lambda: (tmp_path / "executes").exists())
                    os.kill(server_pid(triton), signal.SIGKILL)

                killing = threading.Thread(target=kill)
                killing.start()
                # Not a timeout.
                with pytest.raises(PyTritonClientConnectionError):
                    client.infer_sample(np.ones(2, np.float32))
                killing.join()
        finally:
            for path in tmp_path.glob("child-*"):
                os.kill(int(path.name.partition("-")[2]), signal.SIGKILL)
