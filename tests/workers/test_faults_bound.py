"""Faults as those see them who bind a callable."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import Triton
from support.callables import double
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]
F4 = np.dtype("float32")


def test_a_bound_callable_that_is_stuck() -> None:
    """The same from `ModelConfig` on, where `is_alive` says it."""
    leave = threading.Event()

    def sometimes(requests: list[Request]) -> list[dict[str, Array]]:
        if requests[0]["x"][0, 0] == 13:
            leave.wait(PATIENCE_S)
        return double(requests)

    tensors = {
        "inputs": [Tensor(name="x", dtype=F4, shape=(-1,))],
        "outputs": [Tensor(name="y", dtype=F4, shape=(-1,))],
    }
    config = ModelConfig(execution_timeout_s=np.float32(2.5), repeatable=True)
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("m", [sometimes, sometimes], config=config, **tensors)  # type: ignore[call-overload] # as it is
        with running(triton):
            url = triton.grpc_url
            assert url is not None
            assert triton.is_alive()
            with tritonclient.grpc.InferenceServerClient(url.removeprefix("grpc://")) as client:

                def ask(value: float) -> float:
                    tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
                    tensor.set_data_from_numpy(np.array([[value]], F4))
                    return float(client.infer("m", [tensor], client_timeout=PATIENCE_S).as_numpy("y")[0, 0])

                with pytest.raises(InferenceServerException, match="execution timeout, 2500 ms"):
                    ask(13)
                eventually(lambda: not triton.is_alive())
                assert [ask(value) for value in range(5)] == [0, 2, 4, 6, 8]
                leave.set()
                eventually(triton.is_alive)
                assert ask(13) == 26


FULL_DISK = """
import resource, sys
import numpy as np
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonConfig
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # what a full disk is like: folders can be made, files not written
triton = Triton(config=TritonConfig(http_address="127.0.0.1", http_port=0, allow_grpc=False, allow_metrics=False))
triton.bind("m", lambda requests: requests, inputs=[Tensor(name="x", dtype=np.float32, shape=(1,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(1,))])
try:
    triton.run()
except Exception as error:
    print(type(error).__name__, error)
    sys.exit(0)
finally:
    triton.stop()
sys.exit("it ran")
"""


def test_a_workspace_on_a_full_disk() -> None:
    with short_home():
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("WorkspaceError "), done.stdout
    assert "File too large" in done.stdout
