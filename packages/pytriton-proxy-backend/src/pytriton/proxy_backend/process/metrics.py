"""Metrics that code in worker processes registers with `prometheus_client`: told by each process, summed in its parent.

Nothing here imports `prometheus_client`: a worker process has it where its code imports it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ProtocolError
from .messages import MAX_LINE_BYTES

__all__ = ["GATHERED", "Family", "GatheredMetrics", "MetricsReport", "Sample", "family_of"]

_INTERVAL_S = 1.0
# The largest share of its time that a process may spend on collecting, because the user's collectors may be slow.
_MOST_OF_TIME = 0.02
_PART_BYTES = MAX_LINE_BYTES // 4
# prometheus_client registers these itself; the page already has those of the parent.
_DEFAULTS = ("PROCESS_COLLECTOR", "PLATFORM_COLLECTOR", "GC_COLLECTOR")

_NOTHING = "[]"

logger = logging.getLogger(__name__)

# Metrics for which a warning was logged that their types differ between processes.
_told_of: set[str] = set()

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]
"""Its name, its labels in the order of their names, and its value."""


@dataclass(frozen=True)
class Family:
    """A metric with all its samples."""

    name: str  # its name, without what the names of samples end with
    type: str  # its type, as prometheus_client calls it
    documentation: str
    unit: str  # its unit, which may be empty
    samples: tuple[Sample, ...]


def family_of(metric: Any) -> Family:
    """Return a `Metric` of prometheus_client as one of ours."""
    samples = tuple(
        (str(sample.name), tuple(sorted(sample.labels.items())), float(sample.value)) for sample in metric.samples
    )
    return Family(metric.name, metric.type, metric.documentation, metric.unit, samples)


# ---- in the worker process -------------------------------------------------------------------------------------------


class Send(Protocol):
    """Sends the parent a message."""

    def __call__(self, kind: str, **fields: object) -> bool:
        """Return whether it is on its way."""


class MetricsReport:
    """Sends the metrics of this process's default registry to the parent when they have changed."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._next = 0.0
        self._told = [_NOTHING]
        self._has_failed = False

    def tell(self, *, at_once: bool = False) -> None:
        """Send the metrics unless it is too early; `at_once` sends them in any case."""
        began = time.monotonic()
        client = sys.modules.get("prometheus_client")
        if client is None or (began < self._next and not at_once):
            return
        try:
            parts = list(_parts(_registered(client))) or [_NOTHING]
        except Exception as error:
            # A collector of the user has failed. It may work the next time.
            if not self._has_failed:
                self._has_failed = True
                logger.warning("The metrics of this process cannot be had: %s: %s", type(error).__name__, error)
            parts = self._told
        self._next = time.monotonic() + max(_INTERVAL_S, (time.monotonic() - began) / _MOST_OF_TIME)
        if parts != self._told and all(
            self._send("metrics", value=part, first=number == 0, last=number == len(parts) - 1)
            for number, part in enumerate(parts)
        ):
            self._told = parts


def _registered(client: Any) -> Iterator[Family]:
    """Return the metrics that code in this process has registered; none while prometheus_client is being imported."""
    registry = getattr(client, "REGISTRY", None)
    if registry is None:
        return
    defaults = [collector for name in _DEFAULTS if (collector := getattr(client, name, None)) is not None]
    known = {metric.name for collector in defaults for metric in collector.collect()}
    for metric in registry.collect():
        if metric.name not in known:
            yield family_of(metric)


def _parts(families: Iterable[Family]) -> Iterator[str]:
    """Yield the texts of messages, each short enough; none if there are no metrics."""
    pieces: list[str] = []
    size = 0
    for family in families:
        for samples in _chunks(family.samples):
            piece = json.dumps([family.name, family.type, family.documentation, family.unit, samples])
            if len(piece) > _PART_BYTES:
                raise ValueError(f"a sample of {family.name!r} has labels of more than {_PART_BYTES} bytes")
            if pieces and size + len(piece) > _PART_BYTES:
                yield f"[{','.join(pieces)}]"
                pieces, size = [], 0
            pieces.append(piece)
            size += len(piece)
    if pieces:
        yield f"[{','.join(pieces)}]"


def _chunks(samples: tuple[Sample, ...]) -> Iterator[list[Sample]]:
    chunk: list[Sample] = []
    size = 0
    for sample in samples:
        size += len(json.dumps(sample))
        if chunk and size > _PART_BYTES // 2:
            yield chunk
            chunk, size = [], 0
        chunk.append(sample)
    yield chunk


# ---- in the parent ---------------------------------------------------------------------------------------------------


class ReceivedMetrics:
    """Joins the messages of one process."""

    def __init__(self) -> None:
        self._families: list[Family] = []

    def take(self, message: Mapping[str, Any]) -> list[Family] | None:
        """Take a message; return all metrics of the process if it is the last part."""
        try:
            if message["first"]:
                self._families = []
            self._families += [
                Family(
                    str(name),
                    str(kind),
                    str(documentation),
                    str(unit),
                    tuple(
                        (str(sample), tuple((str(key), str(text)) for key, text in labels), float(value))
                        for sample, labels, value in samples
                    ),
                )
                for name, kind, documentation, unit, samples in json.loads(message["value"])
            ]
            return self._families if message["last"] else None
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"metrics of a worker cannot be read: {type(error).__name__}: {error}") from error


class _Sum:
    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._samples: dict[str, dict[tuple[str, Labels], float]] = {}

    def add(self, families: Iterable[Family], labels: Labels | None) -> None:
        """Add metrics; those that are not summed get further labels, or are left out if these are `None`."""
        for family in families:
            known = self._families.setdefault(family.name, family)
            if known.type != family.type:
                if family.name in _told_of:
                    continue
                _told_of.add(family.name)
                logger.warning(
                    "The metric %r is a %s in one process and a %s in another one, which is left out",
                    family.name, known.type, family.type,
                )  # fmt: skip
                continue
            samples = self._samples.setdefault(family.name, {})
            for name, own, value in family.samples:
                if not _is_summed(family, name):
                    if labels is not None:
                        samples[name, tuple(sorted({**dict(labels), **dict(own)}.items()))] = value
                elif (name, own) not in samples:
                    samples[name, own] = value
                elif name.endswith("_created"):
                    samples[name, own] = min(samples[name, own], value)
                else:
                    samples[name, own] += value

    def families(self) -> list[Family]:
        """Return the sums."""
        return [
            Family(
                family.name,
                family.type,
                family.documentation,
                family.unit,
                tuple((name, labels, value) for (name, labels), value in self._samples[family.name].items()),
            )
            for family in self._families.values()
        ]


def _is_summed(family: Family, sample: str) -> bool:
    # A quantile of a summary has the name of the summary.
    return family.type in ("counter", "histogram") or (family.type == "summary" and sample != family.name)


class GatheredMetrics:
    """The metrics of all worker processes, ended ones included.

    Counters are summed; other metrics belong to one process, and end with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[Hashable, tuple[Labels, list[Family]]] = {}
        self._past = _Sum()

    def update(self, process: Hashable, labels: Mapping[str, str], families: list[Family]) -> None:
        """Store the current metrics of a process."""
        with self._lock:
            self._live[process] = tuple(labels.items()), families

    def end(self, process: Hashable) -> None:
        """Note that a process is gone."""
        with self._lock:
            _, families = self._live.pop(process, ((), []))
            self._past.add(families, None)

    def collect(self, own: Iterable[Family]) -> list[Family]:
        """Return the metrics of all processes."""
        total = _Sum()
        total.add(own, ())
        with self._lock:
            total.add(self._past.families(), None)
            for labels, families in self._live.values():
                total.add(families, labels)
        return total.families()

    @property
    def names(self) -> set[str]:
        """The names of all metrics that worker processes have, or had."""
        with self._lock:
            live = {family.name for _, families in self._live.values() for family in families}
            return live | {family.name for family in self._past.families()}


GATHERED = GatheredMetrics()
"""The metrics for this process, which has one, like the default registry of prometheus_client."""
