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
    """What a worker may ask of the server. Thread-safe; all but `infer`, `log` and the discarding of metrics wait."""

    def __init__(self, endpoint: Path, name: str) -> None:
        """Connect.

        Args:
            endpoint: The socket of a native proxy backend.
            name: What the worker calls itself, for logs.

        Raises:
            AttachError: If the proxy backend refuses, or takes no calls as an older one.
            OSError: If nobody listens there, or the system is out of descriptors or memory.
        """
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
        """Have a model of the server infer. The inputs are copied before this returns.

        Args:
            model: Its name.
            inputs: Its inputs by name.
            outputs: The outputs that are wanted; all where there are none.
            version: Its version; -1 is the one that Triton chooses.
            request_id: Id of the request.
            correlation_id: Of a sequence.
            flags: Of a sequence, `RequestFlag`.
            priority: Of the request; 0 is the model's default.
            timeout_us: How long it may wait in the model's queue, in microseconds.
            parameters: Request parameters.
            parent: Number of the batch, and place of the request in it, for which this is done: it is traced with that.
            stream: Whether any number of responses may come, as from a decoupled model.
            on_response: Called with each answer, in the thread that reads them; the call itself then has none.

        Returns:
            The call. What is wrong with the request is its answer, an error.

        Raises:
            ArenaFullError: If the inputs do not fit into the budget of shared memory.
            ConnectionLostError: If the server is gone.
            TypeError: If Triton has no such dtype.
            ValueError: If a string or the name of the model cannot be carried.
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
        """Load a model, and wait until that is done.

        Args:
            name: Its name.
            files: Files of it by path, as `file:1/model.onnx`, in place of those in the repository.
            config: Its configuration as JSON, in place of that in the repository.

        Raises:
            CallFailedError: If it cannot be loaded.
        """
        inputs: dict[str, Array] = {path: np.frombuffer(data, np.uint8) for path, data in (files or {}).items()}
        self._connection.ask(
            Operation.LOAD_MODEL, RequestData(inputs, parameters={"config": config} if config else {}), text=name
        )

    def unload_model(self, name: str, *, dependents: bool = False, timeout_s: float | None = None) -> None:
        """Have a model unloaded. Its end may come later.

        Args:
            name: Its name.
            dependents: Whether the models of an ensemble are unloaded with it.
            timeout_s: How long to wait for the answer, in seconds; as long as the server runs by default.

        Raises:
            CallFailedError: If that cannot be.
            TimeoutError: If there is no answer in time.
        """
        self._connection.ask(Operation.UNLOAD_MODEL, text=name, subject=int(dependents), timeout_s=timeout_s)

    def is_model_ready(self, name: str, version: int = -1) -> bool:
        """Return whether a model is ready.

        Raises:
            CallFailedError: If there is no such model.
        """
        return bool(self._connection.ask(Operation.MODEL_READY, text=name, subject=version))

    def metric_family(self, name: str, description: str, kind: int) -> int:
        """Make a metric family, which lasts as long as this connection: `kind` 0 counts, 1 is a gauge, 2 a histogram.

        Returns:
            Its number.

        Raises:
            CallFailedError: If Triton refuses it; the same for all that follows.
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
        """Delete a metric, soon; may be called by a finalizer, at whatever place."""
        self._connection.discard(Operation.METRIC_DELETE, metric)

    def discard_metric_family(self, family: int) -> None:
        """Delete a metric family with all of its metrics, likewise."""
        self._connection.discard(Operation.METRIC_FAMILY_DELETE, family)

    def log(self, level: int, message: str, file: str = "", line: int = 0) -> None:
        """Write a record into Triton's log; does not wait for that.

        Args:
            level: Triton's: 0 informs, 1 warns, 2 is an error, 3 is verbose.
            message: The text.
            file: The source file that it comes from.
            line: The line there.
        """
        request = RequestData({}, parameters={"message": message.replace("\0", "\\0")})
        self._connection.start(Operation.LOG, request, _log_refused, text=file, subject=level, value=float(line))

    def next_readiness_question(self, answered: int = 0, is_ready: bool = False, failure: str = "") -> int:
        """Wait until the server asks whether the model of this worker is ready; return the number of the question.

        Args:
            answered: The question that the others answer; 0 is none.
            is_ready: Whether it is.
            failure: Why that could not be found out, instead.

        Raises:
            CallFailedError: If the proxy backend is older, and never asks.
            ConnectionLostError: If the server is gone, or this was closed.
        """
        return self._connection.ask(Operation.READINESS, subject=answered, value=float(is_ready), text=failure)

    def close(self) -> None:
        """End the connection: what is under way is cancelled, and fails. Metrics that were made here go."""
        self._connection.close()


def _log_refused(result: CallResult) -> None:
    if result.error is not None:
        logger.warning("the server did not take a record for its log: %s", result.error)
