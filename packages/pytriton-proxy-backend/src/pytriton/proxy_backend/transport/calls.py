"""Calls of a worker into the server: inference with its models, loading and unloading them, metrics, its log.

They go over a connection of their own to the endpoint that the worker serves, or any other of the same server, so that
any thread may call at any time, whatever the connection for batches is at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..wire import messages
from ..wire.batch import RequestData
from ..wire.layout import Operation
from ..wire.record import Array, ParameterValue
from .call_connection import Call, CallConnection, CallResult

__all__ = ["Call", "CallResult", "Calls"]

logger = logging.getLogger(__name__)


class Calls:
    """The calls of a worker to its server. Thread-safe; all but `infer`, `log` and deleting metrics wait."""

    def __init__(self, endpoint: Path, name: str) -> None:
        """Connect to a native proxy backend; `name` is for its log."""
        self._connection = CallConnection(endpoint, name)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        *,
        version: int = -1,
        request_id: str = "",
        correlation_id: int | str = 0,
        flags: int = 0,
        priority: int = 0,
        timeout_us: int = 0,
        parameters: Mapping[str, ParameterValue] | None = None,
        parent: tuple[int, int] = (0, 0),
        stream: bool = False,
        on_response: Callable[[CallResult], object] | None = None,
    ) -> Call:
        """Have a model of the server infer; the inputs are copied before this returns.

        No outputs means all; version -1 is Triton's choice; priority 0 is the model's default. `parent` is the batch
        and request on whose behalf the call is traced. `on_response` gets each answer in the thread that reads them;
        without it, the returned call has them. An invalid request is answered with an error.
        """
        request = RequestData(
            inputs, outputs, request_id, priority, timeout_us, correlation_id, flags, "", parameters or {}
        )
        return self._connection.start(
            Operation.INFER, request, on_response, text=model, subject=version, parent=parent, stream=stream
        )

    def load_model(
        self,
        name: str,
        files: Mapping[str, bytes] | None = None,
        config: str = "",
    ) -> None:
        """Load a model, and wait for that.

        `files` (by path, such as `file:1/model.onnx`) and `config` replace those of the repository.
        """
        inputs: dict[str, Array] = {path: np.frombuffer(data, np.uint8) for path, data in (files or {}).items()}
        self._connection.ask(
            Operation.LOAD_MODEL, RequestData(inputs, parameters={"config": config} if config else {}), text=name
        )

    def unload_model(self, name: str, *, dependents: bool = False, timeout_s: float | None = None) -> None:
        """Ask the server to unload a model, and the models of an ensemble if `dependents`; its end may come later."""
        self._connection.ask(Operation.UNLOAD_MODEL, text=name, subject=int(dependents), timeout_s=timeout_s)

    def is_model_ready(self, name: str, version: int = -1) -> bool:
        """Return whether a model is ready."""
        return bool(self._connection.ask(Operation.MODEL_READY, text=name, subject=version))

    def metric_family(self, name: str, description: str, kind: int) -> int:
        """Make a metric family, which lasts as long as this connection, and return its number.

        `kind` 0 is a counter, 1 a gauge, 2 a histogram.
        """
        request = RequestData({}, parameters={"description": description})
        return self._connection.ask(Operation.METRIC_FAMILY, request, text=name, subject=kind)

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> int:
        """Make a metric of a family; returns its number. A histogram needs the upper bounds of its `buckets`."""
        inputs: dict[str, Array] = {} if buckets is None else {"buckets": np.array(buckets, np.float64)}
        return self._connection.ask(Operation.METRIC, RequestData(inputs, parameters=dict(labels)), subject=family)

    def metric_increment(self, metric: int, value: float) -> None:
        """Add to a metric."""
        self._connection.ask(Operation.METRIC_INCREMENT, subject=metric, value=value)

    def metric_set(self, metric: int, value: float) -> None:
        """Set a gauge."""
        self._connection.ask(Operation.METRIC_SET, subject=metric, value=value)

    def metric_observe(self, metric: int, value: float) -> None:
        """Observe a value of a histogram."""
        self._connection.ask(Operation.METRIC_OBSERVE, subject=metric, value=value)

    def metric_value(self, metric: int) -> float:
        """Return the value of a counter or a gauge."""
        return messages.as_float(self._connection.ask(Operation.METRIC_VALUE, subject=metric))

    def discard_metric(self, metric: int) -> None:
        """Delete a metric soon; a finalizer may call this at any point."""
        self._connection.discard(Operation.METRIC_DELETE, metric)

    def discard_metric_family(self, family: int) -> None:
        """Delete a metric family with all of its metrics, likewise."""
        self._connection.discard(Operation.METRIC_FAMILY_DELETE, family)

    def log(self, level: int, message: str, file: str = "", line: int = 0) -> None:
        """Write a record into Triton's log without waiting. Levels: 0 info, 1 warning, 2 error, 3 verbose."""
        request = RequestData({}, parameters={"message": message.replace("\0", "\\0")})
        self._connection.start(Operation.LOG, request, _log_refused, text=file, subject=level, value=float(line))

    def next_readiness_question(self, answered: int = 0, is_ready: bool = False, failure: str = "") -> int:
        """Wait until the server asks whether the model of this worker is ready; return the number of the question.

        The other arguments answer the question before; `answered` 0 is none.
        """
        return self._connection.ask(Operation.READINESS, subject=answered, value=float(is_ready), text=failure)

    def close(self) -> None:
        """Close the connection: running calls are cancelled and fail, and metrics are deleted."""
        self._connection.close()


def _log_refused(result: CallResult) -> None:
    if result.error is not None:
        logger.warning("the server did not take a record for its log: %s", result.error)
