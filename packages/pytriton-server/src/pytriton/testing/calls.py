"""What a model asks of its server, answered by functions of a test."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pytriton.decorators.testing import make_request
from pytriton.proxy_backend.errors import CallFailedError
from pytriton.proxy_backend.transport.calls import Call, CallResult
from pytriton.proxy_backend.wire.layout import ErrorCode
from pytriton.testing.errors import ModelError

Answer = Callable[[Any], Any]


class HarnessCalls:
    """Stands in for the calls of a worker into its server, see `pytriton.proxy_backend.transport.calls.Calls`."""

    def __init__(self, functions: Mapping[str, Answer]) -> None:
        self._functions = dict(functions)
        self._unloaded: set[str] = set()
        self._numbers = itertools.count(1)
        self._families: dict[int, tuple[str, int]] = {}
        self._metrics: dict[int, tuple[str, tuple[tuple[str, str], ...]]] = {}
        self._lock = threading.Lock()
        # The values of the model's metrics by name and labels; of a histogram the values that were observed.
        self.metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}

    # ---- other models -----------------------------------------------------------------------------------------------

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        *,
        parameters: Mapping[str, Any] | None = None,
        request_id: str = "",
        correlation_id: int | str = 0,
        timeout_us: int = 0,
        stream: bool = False,
        on_response: Callable[[CallResult], object],
        **_rest: Any,
    ) -> Call:
        """Have the function of a model answer, in this thread; arguments as of `Calls.infer`."""
        call = Call(lambda _: None, on_response)
        request = make_request(
            inputs,
            parameters,
            requested_output_names=list(outputs) or None,
            request_id=request_id,
            correlation_id=correlation_id,
            timeout_us=timeout_us,
        )
        try:
            for result in self._answers(model, request, stream):
                on_response(result)
        except Exception as error:
            code = ErrorCode[error.code] if isinstance(error, ModelError) else ErrorCode.INTERNAL
            on_response(CallResult(CallFailedError(str(error), code=code), {}, {}, True))
        return call

    def _answers(self, model: str, request: Any, stream: bool) -> Iterator[CallResult]:
        if not self.is_model_ready(model):
            raise _refused(model, f"Failed for execute the inference request. Model '{model}' is not ready.")
        answer = self._functions[model](request)
        if isinstance(answer, Mapping):
            yield _result(answer, request, final=True)
            return
        if inspect.isgenerator(answer) or isinstance(answer, (list, tuple)):
            if not stream:
                raise _refused(
                    model,
                    f"Model {model} is using the decoupled. The current BLS request call doesn't support models using "
                    "the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                    "'async_exec' calls for decoupled models.'",
                )
            yield from _stream(answer, request)
            return
        raise TypeError(
            f"The function for the model {model!r} returned a {type(answer).__name__}: expected a mapping of arrays by "
            "name of the output, or a list (or generator) of these for a decoupled model."
        )

    def load_model(self, name: str, files: Mapping[str, bytes] | None = None, config: str = "") -> None:
        """Take a model for loaded that a function stands for."""
        if name not in self._functions:
            raise CallFailedError(
                f"failed to load '{name}', failed to poll from model repository", code=ErrorCode.INTERNAL
            )
        self._unloaded.discard(name)

    def unload_model(self, name: str, *, dependents: bool = False) -> None:
        """Take a model for unloaded."""
        self._unloaded.add(name)

    def is_model_ready(self, name: str, version: int = -1) -> bool:
        """Return whether a function stands for a model, which is not unloaded."""
        return name in self._functions and name not in self._unloaded

    # ---- metrics ----------------------------------------------------------------------------------------------------

    def metric_family(self, name: str, description: str, kind: int) -> int:
        """See `Calls.metric_family`."""
        number = next(self._numbers)
        self._families[number] = (name, kind)
        return number

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> int:
        """See `Calls.metric`."""
        name, kind = self._families[family]
        number = next(self._numbers)
        key = self._metrics[number] = (name, tuple(sorted(labels.items())))
        self.metrics.setdefault(key, [] if kind == 2 else 0.0)
        return number

    def metric_increment(self, metric: int, value: float) -> None:
        """See `Calls.metric_increment`."""
        with self._lock:
            self.metrics[self._metrics[metric]] += value

    def metric_set(self, metric: int, value: float) -> None:
        """See `Calls.metric_set`."""
        self.metrics[self._metrics[metric]] = value

    def metric_observe(self, metric: int, value: float) -> None:
        """See `Calls.metric_observe`."""
        self.metrics[self._metrics[metric]].append(value)

    def metric_value(self, metric: int) -> float:
        """See `Calls.metric_value`."""
        return float(self.metrics[self._metrics[metric]])

    def discard_metric_family(self, family: int) -> None:
        """Keep its counts, because a test reads them after the end of the model."""


def _refused(model: str, text: str) -> ModelError:
    """Return the error of a call that the server refuses, in the words of Triton's Python backend."""
    return ModelError(f"Model {model} - Error when running inference: {text}")


def _stream(answers: Iterable[Any], request: Any) -> Iterator[CallResult]:
    last: Mapping[str, Any] | None = None
    for answer in answers:
        if last is not None:
            yield _result(last, request, final=False)
        last = answer
    yield CallResult(None, {}, {}, True) if last is None else _result(last, request, final=True)


def _result(answer: Mapping[str, Any], request: Any, *, final: bool) -> CallResult:
    wanted = request.requested_output_names
    outputs = {name: _array(value) for name, value in answer.items() if wanted is None or name in wanted}
    return CallResult(None, outputs, getattr(answer, "parameters", {}), final)


def _array(value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "OSUT":
        return np.ascontiguousarray(array)
    if not hasattr(value, "__array__"):
        # As objects, because numpy cuts trailing zero bytes when it makes an S array.
        array = np.array(value, dtype=object)
    made = np.empty(array.shape, np.object_)
    made.ravel()[:] = [each if isinstance(each, bytes) else str(each).encode() for each in array.ravel().tolist()]
    return made
