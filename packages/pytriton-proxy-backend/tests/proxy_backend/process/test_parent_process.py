"""A worker that asks a parent for a fork, where none can come."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from pytriton.proxy_backend.process.child import Launch
from pytriton.proxy_backend.process.messages import WorkerJob
from pytriton.proxy_backend.process.parent_process import ParentProcess
from pytriton.proxy_backend.process.worker_process import RestartLimits


def test_a_parent_that_never_comes_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """It lives, and sleeps; the worker is started as a program after the time that a start may take."""
    job = WorkerJob(target="json:dumps", model="", endpoint="/nowhere", name="w")
    parent = ParentProcess(job, "m", 0, launch=Launch(), limits=RestartLimits(start_timeout_s=0.2))
    parent.sleep()
    parent.enter()
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack() as opened:
        opened.callback(parent.leave)
        job_fd = os.memfd_create("job")
        opened.callback(os.close, job_fd)
        process = parent.start_fork(Launch(), theirs.fileno(), job_fd, "label", lambda: False)
        # It has no job to do.
        assert process.wait() != 0
        assert process.stdout is not None
        process.stdout.close()
    assert "has a parent that was not ready within 0.2 s. So each process that starts imports everything" in caplog.text
