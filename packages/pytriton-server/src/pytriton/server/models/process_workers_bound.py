"""The process workers of a bound model: their jobs, and who answers when all of them are given up."""

import contextvars
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytriton.exceptions import PyTritonRuntimeError, PyTritonUnrecoverableError
from pytriton.model_config import ModelConfig
from pytriton.model_config.dtypes import array_dtype
from pytriton.proxy_backend import ModelSpec, Worker, WorkerProcessError
from pytriton.proxy_backend.description import render_description
from pytriton.proxy_backend.process.messages import WorkerJob
from pytriton.proxy_backend.process.worker_process import RestartLimits, WorkerProcess
from pytriton.server.models.process_workers import ProcessWorker

__all__ = ["StandIn", "make_worker_process"]

# How much longer than a batch may take a process may be silent.
_SILENCE_MARGIN_S = 2.0


def make_worker_process(
    described: ProcessWorker,
    copy: int,
    *,
    number: int,
    spec: ModelSpec,
    config: ModelConfig,
    endpoint: Path,
    trace_config: Sequence[str],
    on_unrecoverable: Callable[[BaseException], None],
    on_given_up: Callable[[WorkerProcessError], None],
) -> WorkerProcess:
    """Make one worker process, without starting it.

    Args:
        described: What the user said about it.
        copy: Which of its copies, from 0 on.
        number: Its place among the model's workers, from 0 on.
        spec: The model.
        config: How the model is served.
        endpoint: Where the proxy listens.
        trace_config: Where its spans go.
        on_unrecoverable: Called when its callable raised PyTritonUnrecoverableError.
        on_given_up: Called when it is not started again for another reason.
    """
    logger = logging.getLogger(f"pytriton.worker.{spec.name}.{number}")
    job = WorkerJob(
        target=described.target,
        model=render_description(spec),
        endpoint=str(endpoint),
        name=f"process {number}, {described.target}",
        args=described.args,
        kwargs=described.kwargs,
        sys_path=described.sys_path,
        log_level=logger.getEffectiveLevel(),
        warmups=_warmups(config),
        trace_config=list(trace_config),
    )
    timeout_s = config.execution_timeout_s
    warmup_s = float(config.warmup_timeout_s) if config.model_warmup else 0.0
    limits = RestartLimits(
        max_crashes=described.limits.max_crashes,
        crash_window_s=described.limits.crash_window_s,
        start_timeout_s=described.limits.start_timeout_s + warmup_s,
        silence_timeout_s=None if timeout_s is None else float(timeout_s) + _SILENCE_MARGIN_S,
    )
    return WorkerProcess(
        job,
        spec.name,
        number,
        launch=described.launch(copy),
        limits=limits,
        on_unrecoverable=lambda text: on_unrecoverable(PyTritonUnrecoverableError(text)),
        on_given_up=on_given_up,
    )


def _warmups(config: ModelConfig) -> list[dict[str, Any]]:
    return [
        {
            "name": warmup.name,
            "batch_size": int(warmup.batch_size),
            "count": int(warmup.count),
            "inputs": {
                name: {
                    "dtype": "bytes" if (dtype := array_dtype(given.dtype)).kind == "O" else dtype.name,
                    "shape": [int(size) for size in given.shape],
                    "zero_data": bool(given.zero_data),
                    "random_data": bool(given.random_data),
                    # The process may have another working directory.
                    "input_data_file": None
                    if given.input_data_file is None
                    else os.path.abspath(given.input_data_file),
                }
                for name, given in warmup.inputs.items()
            },
        }
        for warmup in config.model_warmup or ()
    ]


class StandIn:
    """Answers every request of a model with the reason, once nobody else is left to answer it.

    Args:
        spec: The model.
        endpoint: Where the proxy listens.
    """

    def __init__(self, spec: ModelSpec, endpoint: Path) -> None:
        self._spec = spec
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._is_stopped = False

    def start(self, error: WorkerProcessError) -> None:
        """Begin to answer with `error`; a second call, or one after `stop`, does nothing."""
        # Without the output of the process: callers are told why, not what it wrote.
        reason = PyTritonRuntimeError(error.reason)

        def refuse(requests: Sequence[Any]) -> list[Any]:
            return [reason for _ in requests]

        with self._lock:
            if self._worker is not None or self._is_stopped:
                return
            self._worker = Worker(refuse, self._spec, self._endpoint, context=contextvars.Context())
            self._worker.start()

    def stop(self, timeout_s: float) -> None:
        """End it, for good."""
        with self._lock:
            self._is_stopped = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop(timeout_s)
