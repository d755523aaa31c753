"""Looks at a server again and again, and keeps what it saw for those who look at the page."""

import contextlib
import http.client
import logging
import math
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from pytriton.catalog.listing import Counts, ListedModel, Tables, find_spec, find_versions, read_tables, with_sleep
from pytriton.client import ModelSpec
from pytriton.client.exceptions import PyTritonClientError
from pytriton.client.management import TritonUrl, find_route
from pytriton.console.samples import Point, Sample, WorkerCounts, read_metrics, read_statistics, since, total
from pytriton.server.control.http import Control, ControlError, VersionState, fetch_page

INTERVAL_S = 2.0
"""Seconds between two questions to the server while somebody has a page open."""

LOOK_S = 20.0
"""A look that takes longer than this many seconds is reported."""

MOST_POINTS = 5400
"""A chart keeps at most this many points: three hours."""

LEAST_POINTS = 300
"""At least this many points are kept if there are many models: ten minutes."""

MOST_MODELS = 1000
"""If there are more models, only their number is shown."""

# The limit for all models together; a point takes some hundred bytes.
_ALL_POINTS = 200_000
_LATELY_S = 60.0
_SPEC_AGE_S = 30.0
_STALE_A_POLL = 4
# If samples are further apart than this many intervals, nobody looked in between, and a mean says nothing.
_MOST_APART = 5
_METRICS_TIMEOUT_S = 5.0
_METRICS_BYTES = 32 << 20
_LOG_BYTES = 128 << 10
_LOG_LINES = 300

# Decoding the answers of a lying or foreign server raises these.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

Points: TypeAlias = "deque[tuple[float, Point | None]]"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class View:
    """The state that was seen at one time."""

    serial: int = 0
    """Counts the looks."""
    state: str = "UNKNOWN"
    """`READY`, `NOT READY`, `NO ANSWER`, or `UNKNOWN` before the first look."""
    problem: str = ""
    """Why there is no answer, or none that can be read."""
    notes: Sequence[str] = ()
    """What cannot be shown, and the reason."""
    version: str = ""
    """The version of the server."""
    models: Sequence[ListedModel] = ()
    loadable: frozenset[str] = frozenset()
    """Models of the repository, which can be loaded again."""
    workers: Sequence[WorkerCounts] = ()
    """The workers of a server of ours."""
    has_metrics: bool = False

    def model(self, name: str) -> ListedModel | None:
        """Return a model by its name."""
        return next((model for model in self.models if model.name == name), None)


@dataclass(frozen=True)
class MetricsSource:
    """A page of metrics in Prometheus' text form."""

    url: str
    tls: ssl.SSLContext | None = None

    def read(self) -> str:
        """Return the page."""
        parts = urlsplit(self.url)
        is_encrypted = parts.scheme == "https"
        port = parts.port or (http.client.HTTPS_PORT if is_encrypted else http.client.HTTP_PORT)
        status, page = fetch_page(
            find_route(TritonUrl(parts.scheme, parts.hostname or "", port)),
            parts.path or "/metrics",
            self.tls if is_encrypted else None,
            timeout_s=_METRICS_TIMEOUT_S,
            max_bytes=_METRICS_BYTES,
        )
        if status != http.HTTPStatus.OK:
            raise OSError(f"the page answers with status {status}")
        return page.decode()


@dataclass(frozen=True)
class LogFile:
    """The log of a server, in a file."""

    path: Path

    def last_lines(self) -> list[str]:
        """Return the last lines, or one that says why there are none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _LOG_BYTES))
                text = file.read(_LOG_BYTES).decode("utf-8", "replace")
        except OSError as error:
            return [f"{self.path}: {error.strerror or error}"]
        # The first line may be cut.
        return text.splitlines()[1 if size > _LOG_BYTES else 0 :][-_LOG_LINES:]


@dataclass
class _Known:
    """A specification, and when it was read."""

    versions: tuple[VersionState, ...]
    spec: ModelSpec | None
    problem: str
    time_s: float


@dataclass
class Watcher:
    """Looks at a server when `poll` is called, by one thread at a time. Any thread may read the results."""

    control: Control
    metrics: MetricsSource
    interval_s: float = INTERVAL_S
    view: View = field(default_factory=View, init=False)
    _points: dict[str, Points] = field(default_factory=dict, init=False)
    _last: Sample | None = field(default=None, init=False)
    _specs: dict[str, _Known] = field(default_factory=dict, init=False)
    _ended: dict[tuple[str, str, int], float] = field(default_factory=dict, init=False)
    _began: float | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def poll(self) -> View:
        """Look once, and return the result; this takes seconds if the server does not answer."""
        serial = self.view.serial + 1
        self._began = time.monotonic()
        try:
            view = replace(self._look(), serial=serial)
        except (ControlError, PyTritonClientError) as error:
            view = View(serial, "NO ANSWER", str(error))
        except (OSError, http.client.HTTPException) as error:
            view = View(serial, "NO ANSWER", f"{error or type(error).__name__}")
        except _UNREADABLE as error:
            logger.debug("An answer of the server cannot be read.", exc_info=True)
            view = View(serial, "NO ANSWER", f"An answer cannot be read ({type(error).__name__}). Is it a Triton?")
        finally:
            self._began = None
        if view.state == "NO ANSWER":
            self._last = None
            # When the server is gone, the page shows what was there before.
            view = replace(self.view, serial=serial, state=view.state, problem=view.problem, notes=())
        self.view = view
        return view

    def check(self) -> View:
        """Return the last result, and a problem if the current look takes too long."""
        began = self._began
        if began is not None and time.monotonic() - began > LOOK_S and self.view.state != "NO ANSWER":
            problem = f"The server has been answering for more than {LOOK_S:g} s."
            self.view = replace(self.view, serial=self.view.serial + 1, state="NO ANSWER", problem=problem)
        return self.view

    def forget(self, model: str) -> None:
        """Read a model again at the next look, such as after it was loaded."""
        self._specs.pop(model, None)

    def points(self, model: str = "") -> list[tuple[float, Point | None]]:
        """Return the points of a model, or of all models together: time in milliseconds since 1970, and the point."""
        with self._lock:
            return list(self._points.get(model, ()))

    def busiest(self, most: int) -> list[str]:
        """Return the models with the most requests lately."""
        with self._lock:
            sums = {
                name: sum(point.requests_s for _, point in points if point is not None)
                for name, points in self._points.items()
                if name
            }
        active = [name for name, requests in sums.items() if requests] or sums
        return sorted(active, key=lambda name: (-sums[name], name))[:most]

    # ---- the look ---------------------------------------------------------------------------------------------------

    def _look(self) -> View:
        if not self.control.is_listening():
            raise ControlError("The server does not answer.")
        is_ready = self.control.is_ready()
        version = self.view.version
        if not version or self.view.state == "NO ANSWER":
            with contextlib.suppress(ControlError):
                version = self.control.server_version()[:100]
        notes = []
        tables = read_tables(self.control)
        now = time.monotonic()
        sample, problem = self._read_metrics(now)
        if sample is None:
            sample = Sample(now) if tables.statistics is None else read_statistics(tables.statistics, now)
            less = "there are no charts" if tables.statistics is None else "charts show what Triton's statistics have"
            notes.append(f"No metrics at {self.metrics.url} ({problem}): {less}.")
        if tables.denial is not None:
            notes.append(
                "The server shows its list of models to those with its access token alone (PYTRITON_ACCESS_TOKEN): "
                f"these are the models of its metrics. It says: {tables.denial.reason or tables.denial}"
            )
        workers = self._take(sample)
        models = self._models(tables, [*sample.models, *(worker.model for worker in workers)])
        named = [(worker.model, worker.version, worker.asleep) for worker in workers if worker.version.isdecimal()]
        awake = {(name, int(version)) for name, version, is_asleep in named if not is_asleep}
        asleep = {(name, int(version)) for name, version, _ in named} - awake
        models = [replace(with_sleep(model, asleep), use=sample.uses.get(model.name)) for model in models]
        if len(models) > MOST_MODELS:
            notes.append(f"{len(models):,} models are there, {MOST_MODELS:,} of them are shown.")
        return View(
            state="READY" if is_ready else "NOT READY",
            notes=tuple(notes),
            version=version,
            models=tuple(models[:MOST_MODELS]),
            loadable=frozenset(state.name for state in tables.index or ()),
            workers=tuple(workers),
            has_metrics=sample.has_metrics,
        )

    def _read_metrics(self, now: float) -> tuple[Sample | None, str]:
        try:
            return read_metrics(self.metrics.read(), now), ""
        except (OSError, http.client.HTTPException, PyTritonClientError, *_UNREADABLE) as error:
            return None, str(error) or type(error).__name__

    def _models(self, tables: Tables, more: Iterable[str]) -> list[ListedModel]:
        known = tables.known()
        counts = tables.counts()
        for name in more:
            if name not in known:
                known[name] = []
        now = time.monotonic()
        stale = sorted(
            (name for name, each in self._specs.items() if now - each.time_s > _SPEC_AGE_S),
            key=lambda name: self._specs[name].time_s,
        )[:_STALE_A_POLL]
        for name in [*stale, *(name for name in self._specs if name not in known)]:
            self._specs.pop(name, None)
        return [self._model(name, known[name], counts.get(name), now) for name in sorted(known)[: MOST_MODELS + 1]]

    def _model(self, name: str, versions: Sequence[VersionState], counts: Counts | None, now: float) -> ListedModel:
        cached = self._specs.get(name)
        if cached is None or (versions and tuple(versions) != cached.versions):
            if not versions:
                try:
                    versions = find_versions(self.control, name)
                except ControlError as error:
                    if error.reason is None:
                        raise
                    versions = [VersionState(name, None, "UNAVAILABLE", error.reason)]
            spec, problem = find_spec(self.control, name, versions)
            cached = self._specs[name] = _Known(tuple(versions), spec, problem, now)
        return ListedModel(name, cached.versions, cached.spec, cached.problem, counts)

    def _take(self, sample: Sample) -> list[WorkerCounts]:
        """Add the points since the last sample, and return the workers."""
        last, self._last = self._last, sample
        time_ms = time.time() * 1e3
        seconds = 0.0 if last is None else sample.time_s - last.time_s
        is_gap = last is None or not 0 < seconds < _MOST_APART * max(self.interval_s, 1.0)
        most = max(LEAST_POINTS, min(MOST_POINTS, _ALL_POINTS // max(1, len(sample.models))))
        with self._lock:
            for name in [name for name in self._points if name and name not in sample.models]:
                del self._points[name]
            for name, counts in {"": total(sample), **dict(list(sample.models.items())[:MOST_MODELS])}.items():
                points = self._points.setdefault(name, deque(maxlen=most if name else MOST_POINTS))
                if is_gap or last is None:
                    # Otherwise a line would cross the time in which nobody looked.
                    if points:
                        points.append((time_ms, None))
                    continue
                before = total(last) if not name else last.models.get(name)
                points.append((time_ms, None if before is None else since(before, counts, seconds)))
        for key, worker in sample.workers.items():
            before_worker = None if is_gap or last is None else last.workers.get(key)
            if before_worker is not None:
                if worker.ends > before_worker.ends:
                    self._ended[key] = sample.time_s
                worker.ended_lately = sample.time_s - self._ended.get(key, -math.inf) < _LATELY_S
                worker.busy = min(1.0, max(0.0, worker.busy_s - before_worker.busy_s) / seconds)
        return [sample.workers[key] for key in sorted(sample.workers)]
