"""What a running server has: its models, their signatures and statistics."""

import http.client
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pytriton.catalog.tensors import describe_signature
from pytriton.client import ModelSpec, TensorSpec
from pytriton.client.exceptions import PyTritonClientError
from pytriton.client.management import TritonUrl, find_route, parse_model_config
from pytriton.proxy_backend.process.budget import size_text
from pytriton.server.control.http import Control, ControlError, VersionState, fetch_page

_TITLES = ("MODEL", "STATE", "VERSIONS", "OK", "FAILED", "AVERAGE", "SIGNATURE")
_USE = ("WORKERS", "MEMORY", "USED", "WOKEN")
_NUMBERS = ("OK", "FAILED", "AVERAGE", *_USE)
_UNKNOWN = "-"
NOT_READY = "NOT READY"
"""The state of a version that is loaded but has no worker."""
ASLEEP = "ASLEEP"
"""The state of a version that is ready, and whose workers have ended until a request comes."""
_ASLEEP_REASON = "no request came for a while, so its workers have ended; the next request starts them"
_WORKER_ASLEEP = re.compile(
    r'^pytriton_worker_asleep\{model="([^"]*)",version="(\d+)",worker="\d+"\} (\S+)$', re.MULTILINE
)
_USES = re.compile(r'^(pytriton_model_\w+)\{model="([^"]*)",version="\d+"\} (\S+)$', re.MULTILINE)
_METRICS_TIMEOUT_S = 2.0
_STATISTICS_S = 10.0
_METRICS_BYTES = 32 << 20
_NOT_READY_REASON = "no worker is attached, or the model says so itself"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ListedModel:
    """A model as a server has it."""

    name: str
    versions: Sequence[VersionState]
    """Its versions; if it was never loaded, one without a number."""
    spec: ModelSpec | None
    problem: str
    """Why there is no `spec`."""
    counts: "Counts | None"
    """How many requests it has answered; None if the server does not say."""
    use: "ModelUse | None" = None
    """How its worker processes are used; None if they never sleep, or the server does not say."""

    @property
    def state(self) -> str:
        """The state of all versions, or the state of each if they differ."""
        states = {version.state or "NOT LOADED" for version in self.versions}
        if len(states) == 1:
            return states.pop()
        return ", ".join(f"{version.version}: {version.state}" for version in self.versions)


@dataclass
class Counts:
    """Requests of all versions of a model."""

    succeeded: int = 0
    failed: int = 0
    nanoseconds: int = field(default=0, repr=False)

    def add(self, statistics: Mapping[str, Any]) -> None:
        """Add Triton's statistics of one version."""
        kinds = statistics.get("inference_stats", {})
        self.succeeded += int(kinds.get("success", {}).get("count", 0))
        self.failed += int(kinds.get("fail", {}).get("count", 0))
        self.nanoseconds += int(kinds.get("success", {}).get("ns", 0))

    @property
    def average_ms(self) -> float | None:
        """How long a request that succeeded was in the server in the mean; None without any."""
        return self.nanoseconds / self.succeeded / 1e6 if self.succeeded else None


@dataclass
class ModelUse:
    """What all versions of a model that may sleep take, and how often they were woken."""

    memory_bytes: float = 0
    last_used: float = 0.0
    """When somebody called it last, as seconds of the Unix epoch."""
    wake_ups: float = 0
    wake_s: float = 0.0
    """How long all wake-ups took together, in seconds."""
    workers: int = 0
    """How many of its worker processes do not sleep."""
    most_workers: int = 0
    """How many it may have."""

    def take(self, name: str, value: float) -> None:
        """Take a sample of a page of metrics."""
        if name == "pytriton_model_memory_bytes":
            self.memory_bytes += value
        elif name == "pytriton_model_last_used_timestamp_seconds":
            self.last_used = max(self.last_used, value)
        elif name == "pytriton_model_wake_seconds_count":
            self.wake_ups += value
        elif name == "pytriton_model_wake_seconds_sum":
            self.wake_s += value

    @property
    def memory(self) -> str:
        """The memory for people; `-` without any."""
        return size_text(int(self.memory_bytes)) if self.memory_bytes else _UNKNOWN

    @property
    def woken(self) -> str:
        """How often it was woken, and how long that took in the mean."""
        return f"{self.wake_ups:.0f} x {self.wake_s / self.wake_ups:.3g} s" if self.wake_ups else _UNKNOWN

    def used(self, now: float) -> str:
        """How long ago it was used, for people."""
        seconds = max(0.0, now - self.last_used)
        for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
            if seconds >= size:
                return f"{seconds / size:.0f} {unit} ago"
        return f"{seconds:.0f} s ago"


@dataclass(frozen=True)
class Tables:
    """The answers of a server about all its models."""

    index: Sequence[VersionState] | None
    """The models of the repository; None if the server does not list them for this caller."""
    statistics: Sequence[Mapping[str, Any]] | None
    """Triton's statistics of the versions that are loaded; likewise."""
    denial: ControlError | None
    """Why neither is there."""

    def known(self) -> dict[str, list[VersionState]]:
        """Return the versions of each model."""
        known: dict[str, list[VersionState]] = {}
        for state in self.index or ():
            known.setdefault(state.name, []).append(state)
        # A model that a client loaded together with its files is in no list of the repository.
        listed = set(known)
        for item in self.statistics or ():
            name = str(item["name"])
            if name not in listed:
                known.setdefault(name, []).append(VersionState(name, int(item["version"]), "READY", ""))
        return known

    def counts(self) -> dict[str, Counts]:
        """Return how many requests each model has answered."""
        counts: dict[str, Counts] = {}
        for item in self.statistics or ():
            counts.setdefault(str(item["name"]), Counts()).add(item)
        return counts


def known_models(control: Control) -> dict[str, list[VersionState]]:
    """Return the versions of each model that the server lists."""
    tables = read_tables(control)
    if tables.denial:
        raise tables.denial
    return tables.known()


class ModelWatch:
    """Asks which models a server has, for callers who ask each second.

    The statistics cost the server most, and name beside its list only the models that a client has loaded with their
    files. They are asked for every ten seconds, and each time while there is such a model.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._asked = float("-inf")
        self._has_unlisted = False

    def known(self) -> dict[str, list[VersionState]]:
        """Return the versions of each model that the server lists."""
        now = time.monotonic()
        is_due = self._has_unlisted or now - self._asked >= _STATISTICS_S
        tables = read_tables(self._control, with_statistics=is_due)
        if tables.denial:
            raise tables.denial
        known = tables.known()
        if tables.statistics is not None:
            self._asked = now
            self._has_unlisted = not known.keys() <= {state.name for state in tables.index or ()}
        return known


def list_models(control: Control, names: Collection[str] = ()) -> list[ListedModel]:
    """Return the models of a server."""
    tables = read_tables(control)
    if not names and tables.denial:
        raise tables.denial
    known, counts = tables.known(), tables.counts()
    models = []
    for name in names or sorted(known):
        versions = known.get(name) or find_versions(control, name)
        spec, problem = find_spec(control, name, versions)
        models.append(ListedModel(name, versions, spec, problem, counts.get(name)))
    return models


def models_as_json(models: Iterable[ListedModel]) -> str:
    """Return the models as JSON."""
    return json.dumps([_as_json(model) for model in models], indent=2)


def models_as_text(models: Sequence[ListedModel]) -> str:
    """Return the models as a table."""
    if not models:
        return "The server has no models."
    titles: tuple[str, ...] = _TITLES
    rows = [_row(model) for model in models]
    if any(model.use for model in models):
        now = time.time()
        titles = (*titles[:-1], *_USE, titles[-1])
        rows = [(*row[:-1], *_use_cells(model.use, now), row[-1]) for row, model in zip(rows, models, strict=True)]
    rows = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if title in _NUMBERS else cell.ljust(width)
            for title, cell, width in zip(titles, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def read_tables(control: Control, *, with_statistics: bool = True) -> Tables:
    """Ask a server about all its models; without statistics only where it lists them."""
    index, denial = _try(control.index)
    if denial is not None and denial.reason is None:
        raise denial  # nobody answered, so a second question is useless
    statistics = _try(control.all_statistics)[0] if with_statistics or index is None else None
    tables = Tables(index, statistics, None if index is not None or statistics is not None else denial)
    # The list of the repository counts loaded models as ready.
    if tables.denial is None and not control.is_ready():
        checked = [_asked(control, state) for versions in tables.known().values() for state in versions]
        tables = replace(tables, index=checked)
    return tables


def _asked(control: Control, state: VersionState) -> VersionState:
    """Return the state of a version, as the server reports it for that version if possible."""
    if state.state != "READY" or state.version is None or control.is_model_ready(state.name, state.version):
        return state
    return replace(state, state=NOT_READY, reason=_NOT_READY_REASON)


def _try(call: Callable[[], Answer]) -> tuple[Answer | None, ControlError | None]:
    try:
        return call(), None
    except ControlError as error:
        return None, error


def read_sleep(url: TritonUrl) -> tuple[frozenset[tuple[str, int]], dict[str, ModelUse]]:
    """Return from a page of metrics which models sleep, by name and version, and how each of them is used by name.

    Returns nothing if the page cannot be read.
    """
    try:
        status, page = fetch_page(find_route(url), "/metrics", timeout_s=_METRICS_TIMEOUT_S, max_bytes=_METRICS_BYTES)
    except (OSError, http.client.HTTPException, PyTritonClientError):
        return frozenset(), {}
    text = page.decode(errors="replace") if status == http.HTTPStatus.OK else ""
    found = _WORKER_ASLEEP.findall(text)
    awake = {(name, int(version)) for name, version, value in found if float(value) == 0}
    uses: dict[str, ModelUse] = {}
    for metric, name, value in _USES.findall(text):
        uses.setdefault(name, ModelUse()).take(metric, float(value))
    for name, _, value in found:
        if (use := uses.get(name)) is not None:
            use.workers, use.most_workers = use.workers + (float(value) == 0), use.most_workers + 1
    return frozenset((name, int(version)) for name, version, _ in found) - awake, uses


def with_sleep(model: ListedModel, asleep: Collection[tuple[str, int]]) -> ListedModel:
    """Return a model with the state of those of its versions that sleep."""
    versions = [
        replace(each, state=ASLEEP, reason=_ASLEEP_REASON)
        if each.state == "READY" and (each.name, each.version) in asleep
        else each
        for each in model.versions
    ]
    return replace(model, versions=versions)


def find_versions(control: Control, name: str) -> list[VersionState]:
    """Return the versions of a model that is in no list, or in one that is not for everybody."""
    versions = control.model_versions(name)
    return [_asked(control, VersionState(name, version, "READY", "")) for version in versions]


def find_spec(control: Control, name: str, versions: Iterable[VersionState]) -> tuple[ModelSpec | None, str]:
    """Return the specification of a model, or None and the reason why it is unknown."""
    if not any(version.is_loaded for version in versions):
        return None, "; ".join(sorted({version.reason for version in versions if version.reason}))
    try:
        return parse_model_config(control.model_config(name), None), ""
    except ControlError as error:
        return None, error.reason or str(error)
    except PyTritonClientError as error:  # for example a data type that numpy lacks
        return None, str(error)


def _row(model: ListedModel) -> tuple[str, ...]:
    counts = model.counts
    numbers = [_UNKNOWN] * (len(_NUMBERS) - len(_USE))
    if counts is not None:
        average = _UNKNOWN if counts.average_ms is None else f"{counts.average_ms:,.2f} ms"
        numbers = [f"{counts.succeeded:,}", f"{counts.failed:,}", average]
    return (
        model.name,
        model.state,
        ", ".join(str(version.version) for version in model.versions if version.version is not None) or _UNKNOWN,
        *numbers,
        " ".join(model.problem.split()) if model.spec is None else describe_signature(model.spec),
    )


def _use_cells(use: ModelUse | None, now: float) -> tuple[str, ...]:
    if use is None:
        return (_UNKNOWN,) * len(_USE)
    workers = f"{use.workers} of {use.most_workers}" if use.most_workers else _UNKNOWN
    return (workers, use.memory, use.used(now), use.woken)


def _as_json(model: ListedModel) -> dict[str, Any]:
    spec, counts = model.spec, model.counts
    return {
        "name": model.name,
        "state": model.state,
        "versions": [
            {"version": version.version, "state": version.state, "reason": version.reason} for version in model.versions
        ],
        "signature": None
        if spec is None
        else {
            "max_batch_size": spec.max_batch_size,
            "decoupled": spec.decoupled,
            "inputs": [{**_tensor(tensor), "optional": tensor.optional} for tensor in spec.inputs],
            "outputs": [_tensor(tensor) for tensor in spec.outputs],
        },
        "problem": model.problem or None,
        "statistics": None
        if counts is None
        else {"succeeded": counts.succeeded, "failed": counts.failed, "average_ms": counts.average_ms},
        "use": None
        if model.use is None
        else {
            "memory_bytes": int(model.use.memory_bytes),
            "last_used": model.use.last_used,
            "wake_ups": int(model.use.wake_ups),
            "wake_s": model.use.wake_s,
            "workers": model.use.workers,
            "most_workers": model.use.most_workers,
        },
    }


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    hint = {"hint": tensor.hint} if tensor.hint else {}
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), **hint}
