"""A tritonserver that is alive but answers nothing: it is ended, and started again where that is wanted."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import Tensor
from pytriton.server.errors import TritonServerExitedError
from pytriton.triton import RestartPolicy, Triton
from support.processes import is_running
from support.serving import local_config, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

SILENT_S = 1.0


@batch
def same(x: Any) -> Any:
    return {"y": x}


def bound(**settings: Any) -> Triton:
    triton = Triton(config=local_config(), **settings)
    triton.bind("same", same, [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")])
    return triton


def ask(triton: Triton) -> Any:
    with ModelClient(str(triton.http_url), "same", init_timeout_s=PATIENCE_S) as client:
        return client.infer_sample(np.ones(1, np.float32))["y"].tolist()


def test_a_server_that_answers_nothing_is_ended() -> None:
    with short_home(), bound(unresponsive_timeout_s=SILENT_S) as triton:
        assert ask(triton) == [1.0]
        process = server_pid(triton)
        os.kill(process, signal.SIGSTOP)
        eventually(lambda: not triton.is_alive())
        assert not is_running(process)
        with pytest.raises(TritonServerExitedError, match=r"has not answered \d+ questions over"):
            triton.serve()


def test_a_server_that_answers_nothing_is_started_again() -> None:
    with short_home(), bound(unresponsive_timeout_s=SILENT_S, restart=RestartPolicy()) as triton:
        process = server_pid(triton)
        os.kill(process, signal.SIGSTOP)
        eventually(lambda: not is_running(process))
        assert ask(triton) == [1.0]


def test_a_server_that_answers_is_left_alone() -> None:
    with short_home(), bound(unresponsive_timeout_s=0.1) as triton:
        process = server_pid(triton)
        for _ in range(300):
            assert ask(triton) == [1.0]
        assert server_pid(triton) == process


@pytest.mark.parametrize("value", [-1, "1", True])
def test_times_that_are_none(value: Any) -> None:
    with pytest.raises(PyTritonBadParameterError, match="unresponsive_timeout_s"):
        Triton(unresponsive_timeout_s=value)
