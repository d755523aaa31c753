"""Metrics of the user's own, beside those of Triton: they are in `Server.metrics()`.

They belong to the process and not to a server, so they can be made before a server is started and outlive it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.api import Api, load_api
from pytriton.inprocess.capi.c_types import MetricArgsHandle, MetricFamilyHandle, MetricHandle
from pytriton.inprocess.capi.enums import MetricKind
from pytriton.inprocess.capi.errors import InvalidArgumentError, UnsupportedError, encoded_text, wrong_argument
from pytriton.inprocess.capi.parameters import c_parameters


class _Family:
    """A family of the C API, deleted with the last object that uses it.

    All objects of one name share it: a second family would free metrics that the first one still uses.
    """

    def __init__(self, api: Api, kind: MetricKind, name: bytes, description: bytes) -> None:
        handle = MetricFamilyHandle()
        api.TRITONSERVER_MetricFamilyNew(ctypes.byref(handle), kind, name, description)
        self.address = handle.value
        weakref.finalize(self, _delete, api.TRITONSERVER_MetricFamilyDelete, handle, os.getpid())


class _Families:
    """All families of the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_name: weakref.WeakValueDictionary[tuple[str, MetricKind], _Family] = weakref.WeakValueDictionary()


class MetricFamily:
    """Metrics of the same name and kind, which differ in their labels.

    Args:
        kind: Kind of all of its metrics.
        name: Name, of letters, digits, `_` and `:`.
        description: What is measured, for the `# HELP` line. That of the first family of a name stays.

    Raises:
        InvalidArgumentError: If an argument is of the wrong type, the name is not valid, or there is a family of the
            name and another kind.
    """

    def __init__(self, kind: MetricKind, name: str, description: str) -> None:
        if not isinstance(kind, MetricKind):
            raise wrong_argument("kind", "a member of MetricKind", kind, where="MetricFamily")
        c_name = encoded_text("name", name, where="MetricFamily")
        c_description = encoded_text("description", description, where="MetricFamily")
        self._kind = kind
        self._name = name
        api = load_api()
        families = process.shared("metric families", _Families)
        with families.lock:
            family = families.by_name.get((name, kind))
            if family is None:
                try:
                    family = _Family(api, kind, c_name, c_description)
                except InvalidArgumentError as error:
                    raise InvalidArgumentError(
                        f"MetricFamily: expected a name of letters, digits, '_' and ':' that no family of another kind "
                        f"has, received {name!r} for a {kind.name}: {error.message}",
                        expected="a valid name",
                        received=name,
                        where="MetricFamily",
                    ) from error
                families.by_name[(name, kind)] = family
        self._family = family

    @property
    def kind(self) -> MetricKind:
        """Kind of the metrics."""
        return self._kind

    @property
    def name(self) -> str:
        """Name of the metrics."""
        return self._name

    def __repr__(self) -> str:
        return f"MetricFamily({self._kind.name}, {self._name!r})"


class Metric:
    """One metric: a number, or the counts of a histogram. It is in the metrics as long as this object lives.

    Two objects with the same family and labels are the same metric.

    Args:
        family: The family.
        labels: Values by name of the label.
        buckets: Upper bounds of the buckets of a histogram, rising. The bucket without a bound is always there.

    Raises:
        InvalidArgumentError: If an argument is of the wrong type, a label is not valid, the buckets do not rise, or
            they are missing for a histogram or given for another kind.
    """

    def __init__(
        self, family: MetricFamily, labels: Mapping[str, str] | None = None, buckets: Iterable[float] | None = None
    ) -> None:
        if not isinstance(family, MetricFamily):
            raise wrong_argument("family", "a MetricFamily", family, where="Metric")
        where = f"metric {family.name!r}"
        labels = {} if labels is None else labels
        if not isinstance(labels, Mapping):
            raise wrong_argument("labels", "a dict from str to str", labels, where=where)
        for key, value in labels.items():
            encoded_text("the name of a label", key, where=where)
            encoded_text(f"label {key!r}", value, where=where)
        bounds = _checked_buckets(family.kind, buckets, where)
        # Triton wants the family to exist until the metric is deleted.
        self._family = family
        self._where = where
        self._api = load_api()
        self._handle = MetricHandle()
        self._create(labels, bounds)
        weakref.finalize(
            self, _delete, self._api.TRITONSERVER_MetricDelete, self._handle, os.getpid(), keep=family._family
        )

    def _create(self, labels: Mapping[str, str], bounds: list[float]) -> None:
        api = self._api
        arguments = MetricArgsHandle()
        if bounds:
            api.TRITONSERVER_MetricArgsNew(ctypes.byref(arguments))
        try:
            if bounds:
                array = (ctypes.c_double * len(bounds))(*bounds)
                api.TRITONSERVER_MetricArgsSetHistogram(arguments, array, len(bounds))
            with c_parameters(api, labels) as (parameters, count):
                api.TRITONSERVER_MetricNewWithArgs(
                    ctypes.byref(self._handle), self._family._family.address, parameters, count, arguments
                )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"{self._where}: expected labels with names of letters, digits and '_', received {dict(labels)!r}: "
                f"{error.message}",
                expected="valid labels",
                received=dict(labels),
                where=self._where,
            ) from error
        finally:
            if arguments:
                api.TRITONSERVER_MetricArgsDelete(arguments)

    @property
    def kind(self) -> MetricKind:
        """Kind of the metric."""
        return self._family.kind

    @property
    def value(self) -> float:
        """The value of a counter or gauge.

        Raises:
            UnsupportedError: If it is a histogram, whose counts are in `Server.metrics()`.
        """
        self._require("value", MetricKind.COUNTER, MetricKind.GAUGE)
        value = ctypes.c_double()
        self._api.TRITONSERVER_MetricValue(self._handle, ctypes.byref(value))
        return value.value

    def increment(self, value: float) -> None:
        """Add to a counter or gauge.

        Args:
            value: How much; not negative for a counter.

        Raises:
            InvalidArgumentError: If the value is not a number, or negative for a counter.
            UnsupportedError: If it is a histogram.
        """
        self._require("increment", MetricKind.COUNTER, MetricKind.GAUGE)
        amount = _number(value, self._where)
        # Triton refuses negative numbers but accepts NaN, which a counter could never leave.
        if self.kind is MetricKind.COUNTER and not amount >= 0:
            raise wrong_argument("the value", "a number that is not negative, for a counter", value, where=self._where)
        self._api.TRITONSERVER_MetricIncrement(self._handle, amount)

    def set_value(self, value: float) -> None:
        """Set a gauge.

        Args:
            value: The new value.

        Raises:
            InvalidArgumentError: If the value is not a number.
            UnsupportedError: If it is no gauge.
        """
        self._require("set_value", MetricKind.GAUGE)
        self._api.TRITONSERVER_MetricSet(self._handle, _number(value, self._where))

    def observe(self, value: float) -> None:
        """Count a value in the buckets of a histogram.

        Args:
            value: The observed value.

        Raises:
            InvalidArgumentError: If the value is not a number.
            UnsupportedError: If it is no histogram.
        """
        self._require("observe", MetricKind.HISTOGRAM)
        self._api.TRITONSERVER_MetricObserve(self._handle, _number(value, self._where))

    def _require(self, operation: str, *kinds: MetricKind) -> None:
        if self.kind not in kinds:
            names = " or ".join(kind.name for kind in kinds)
            raise UnsupportedError(
                f"{self._where}: expected a metric of kind {names} for {operation}, received one of kind "
                f"{self.kind.name}.",
                expected=kinds,
                received=self.kind,
                where=self._where,
            )


def _checked_buckets(kind: MetricKind, buckets: Iterable[float] | None, where: str) -> list[float]:
    if kind is not MetricKind.HISTOGRAM:
        if buckets is not None:
            raise InvalidArgumentError(
                f"{where}: expected buckets for a histogram only, received {buckets!r} for a {kind.name}.",
                expected=None,
                received=buckets,
                where=where,
            )
        return []
    if not isinstance(buckets, Iterable) or isinstance(buckets, (str, bytes)):
        raise wrong_argument("buckets", "a list of numbers, as the metric is a histogram", buckets, where=where)
    bounds = [_number(bound, where) for bound in buckets]
    if (
        not bounds
        or not all(math.isfinite(bound) for bound in bounds)
        or any(not low < high for low, high in itertools.pairwise(bounds))
    ):
        raise InvalidArgumentError(
            f"{where}: expected buckets that are finite and rise, at least one, received {bounds}. The bucket without "
            "a bound is always there.",
            expected="rising, finite numbers",
            received=bounds,
            where=where,
        )
    return bounds


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise wrong_argument("the value", "a number", value, where=where) from None


def _delete(function: Any, handle: ctypes.c_void_p, made_in: int, keep: object = None) -> None:
    # In a forked child, a thread that does not exist there may hold the lock.
    if os.getpid() == made_in:
        function(handle)
