"""Metrics of a model among those of the server; and models that a model loads, unloads and asks after."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..wire.errors import ProxyBackendError
from .errors import TritonModelException, text_of
from .server import SERVER

_T = TypeVar("_T")


class MetricKind(enum.IntEnum):
    """What a metric does."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


def _asked(what: str, function: Callable[..., _T], *arguments: Any) -> _T:
    try:
        return function(*arguments)
    except ProxyBackendError as error:
        raise SERVER.failed(what, error) from error


class MetricFamily:
    """A family of metrics, which lasts as long as this object.

    Args:
        name: Its name.
        description: What it is about.
        kind: `COUNTER`, `GAUGE` or `HISTOGRAM`.

    Raises:
        TritonModelException: The server refuses it.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        if not isinstance(kind, MetricKind):
            raise TypeError(f"MetricFamily: expected a kind of MetricFamily, got a {type(kind).__name__}")
        texts = text_of(name, "MetricFamily(name)"), text_of(description, "MetricFamily(description)")
        self._kind = kind
        self._metrics: list[Metric] = []
        self._calls = SERVER.calls()
        self._number = _asked("Error when creating MetricFamily", self._calls.metric_family, *texts, int(kind))

    def Metric(self, labels: Any = None, buckets: Any = None) -> Metric:  # noqa: N802 - the name is Triton's
        """Make a metric of the family.

        Args:
            labels: A dictionary of its labels, all of them text.
            buckets: The upper bounds of a histogram's buckets, in rising order.

        Raises:
            TritonModelException: They are something else, or the server refuses it.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is None:
            if self._kind is MetricKind.HISTOGRAM:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
        elif not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        elif self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        for name, value in (labels or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise SERVER.failed(
                    "Error when creating Metric",
                    TypeError(f"labels are text, got {value!r} of type {type(value).__name__} for {name!r}"),
                )
        made = Metric(self._calls, self._number, labels or {}, buckets)
        self._metrics.append(made)
        return made

    def __del__(self) -> None:
        # If its constructor failed, there is nothing to delete.
        number = getattr(self, "_number", None)
        if number is None:
            return
        for metric in self._metrics:
            metric.clear()
        self._calls.discard_metric_family(number)


class Metric:
    """A metric of a family; see `MetricFamily.Metric`."""

    def __init__(self, calls: Any, family: int, labels: Mapping[str, str], buckets: list[float] | None) -> None:
        self._calls = calls
        self._number: int | None = _asked("Error when creating Metric", calls.metric, family, labels, buckets)

    def clear(self) -> None:
        """Forget the metric, because its family was deleted."""
        self._number = None

    def increment(self, value: float) -> None:
        """Add to it.

        Raises:
            TritonModelException: The server refuses it, or its family is deleted; as for all that follow.
        """
        _asked("Failed to increment metric value", self._calls.metric_increment, self._live(), float(value))

    def set(self, value: float) -> None:
        """Set it; for gauges."""
        _asked("Failed to set metric value", self._calls.metric_set, self._live(), float(value))

    def observe(self, value: float) -> None:
        """Observe a value; for histograms."""
        _asked("Failed to observe metric value", self._calls.metric_observe, self._live(), float(value))

    def value(self) -> float:
        """Return its value."""
        return float(_asked("Failed to get metric value", self._calls.metric_value, self._live()))

    def _live(self) -> int:
        if self._number is None:
            raise TritonModelException(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' "
                "object should be deleted AFTER its corresponding 'Metric' objects have been deleted."
            )
        return self._number


# ---- models of the server --------------------------------------------------------------------------------------------


def load_model(model_name: str, config: str = "", files: Any = None) -> None:
    """Have the server load a model, and wait for that.

    Args:
        model_name: Its name.
        config: Its configuration as a JSON text, in place of that in the repository.
        files: The content of files by path, such as `file:1/model.onnx`, in place of those in the repository.

    Raises:
        TritonModelException: It cannot be loaded.
    """
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    _asked(
        "Failed to load model",
        SERVER.calls().load_model,
        text_of(model_name, "load_model"),
        None if files is None else {text_of(path, "load_model, files"): content for path, content in files.items()},
        text_of(config, "load_model"),
    )


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Have the server unload a model.

    Args:
        model_name: Its name.
        unload_dependents: Whether those that only it needs are unloaded as well, as the models of an ensemble.

    Raises:
        TritonModelException: It cannot be unloaded.
    """
    calls = SERVER.calls()
    _asked(
        "Failed to unload model",
        lambda: calls.unload_model(text_of(model_name, "unload_model"), dependents=unload_dependents),
    )


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a model of the server is ready.

    Args:
        model_name: Its name.
        model_version: Its version; the empty text is the one that the server chooses.

    Raises:
        TritonModelException: There is no such model, or the version is no number.
    """
    what = "Failed to check model readiness"
    version = -1
    model_version = text_of(model_version, "is_model_ready")
    if model_version:
        refused = f"failed to get model version from specified version string '{model_version}'"
        try:
            version = int(model_version)
        except ValueError:
            reason = "(details: stol), version should be an integral value > 0"
            raise SERVER.failed(what, ValueError(f"{refused} {reason}")) from None
        if version < 0:
            raise SERVER.failed(what, ValueError(f"{refused}, version should be an integral value > 0"))
    return bool(_asked(what, SERVER.calls().is_model_ready, text_of(model_name, "is_model_ready"), version))
