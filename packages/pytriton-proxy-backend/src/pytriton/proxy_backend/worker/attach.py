"""A worker that a shell attaches to an endpoint that is there already: find it, serve, follow it, leave it."""

from __future__ import annotations

import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..description import description_path, read_description
from ..errors import AttachError, DescriptionError, ProxyBackendError, TargetError
from ..model import SOCKET_SUFFIX, ZMQ_SUFFIX, ModelSpec
from ..system.shortage import explain
from ..system.stop_signals import StopSignals
from .context import check_callable, make_context, make_infer_func, unrecoverable_errors
from .loading import load_target
from .worker import Worker

if TYPE_CHECKING:
    from ..python_proxy.keys import CurveKeys

_IPC = "ipc://"
_LOOK_S = 0.2
_FAILED = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """What a worker from a shell is to serve, and with what."""

    target: str  # the inference callable, `module:name` or `path/to/file.py:name`
    # The folder of the endpoints, a socket in it (`*.sock`, or `*.zmq` of a Python proxy), or the address
    # `tcp://host:port` or `ipc:///path`.
    endpoint: str
    model: str | None = None  # the model's name; `None` is the only one in the folder
    version: int | None = None  # its version; `None` is the only one
    description: Path | None = None  # the file that describes the model; `None` is the one beside the socket
    is_factory: bool = False  # whether the target makes the callable
    arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the factory
    attach_timeout_s: float = 30.0  # how long it may take until the worker is attached, in seconds
    stop_timeout_s: float = 30.0  # how long requests in flight may take after a signal, in seconds
    curve_keys: CurveKeys | None = None  # keys for a Python proxy that asks for them
    insecure: bool = False  # whether to attach to a `tcp://` address without keys


def find_endpoint(wanted: Attachment) -> tuple[Path | str, ModelSpec]:
    """Return the endpoint to attach to, and the model."""
    if "://" in wanted.endpoint:
        described = wanted.description
        if described is None and wanted.endpoint.startswith(_IPC):
            described = description_path(Path(wanted.endpoint.removeprefix(_IPC)))
        if described is None:
            raise DescriptionError(
                f"nothing beside the address {wanted.endpoint} describes its model: give the file pytriton.json of the "
                "model's version folder with --description"
            )
        return wanted.endpoint, _checked(read_description(described), wanted, wanted.endpoint)
    path = Path(wanted.endpoint).absolute()
    if not os.path.isdir(path):
        # A socket that is named itself may appear later.
        described = wanted.description or description_path(path)
        return _as_endpoint(path), _checked(read_description(described), wanted, str(described))
    return _find_in(path, wanted)


def _as_endpoint(socket: Path) -> Path | str:
    """Return a socket as `Worker` wants it: the path of a native proxy's, the address of a Python proxy's."""
    return f"{_IPC}{socket}" if socket.suffix == ZMQ_SUFFIX else socket


def _find_in(folder: Path, wanted: Attachment) -> tuple[Path | str, ModelSpec]:
    found: dict[tuple[str, int], tuple[tuple[bool, float], Path, ModelSpec]] = {}
    endings = tuple(description_path(Path(suffix)).name for suffix in (SOCKET_SUFFIX, ZMQ_SUFFIX))
    try:
        files = sorted(file for file in folder.iterdir() if file.name.endswith(endings))
    except OSError as error:
        raise AttachError(
            f"the endpoints in {folder} cannot be listed: "
            + explain(error, "They are for the user of the server: run the worker as that user")
        ) from error
    for file in files:
        socket = file.with_suffix("")
        try:
            spec = read_description(wanted.description or file)
            # A model that was changed while it was served has had several sockets; the last existing one counts.
            rank = (_is_socket(socket), file.stat().st_mtime)
        except (DescriptionError, FileNotFoundError):
            # It was removed just now.
            if file.exists():
                raise
            continue
        known = found.get((spec.name, spec.version))
        if known is None or known[0] < rank:
            found[spec.name, spec.version] = (rank, socket, spec)
    fitting = [
        (_as_endpoint(socket), spec)
        for (name, version), (_, socket, spec) in found.items()
        if wanted.model in (None, name) and wanted.version in (None, version)
    ]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(f"{name} (version {version})" for name, version in sorted(found)) or "none"
    what = "any model" if wanted.model is None else f"model '{wanted.model}'"
    what += "" if wanted.version is None else f" version {wanted.version}"
    if not fitting:
        raise AttachError(f"{folder} has no endpoint of {what}; there are: {there}")
    raise AttachError(f"{folder} has several endpoints of {what}: say which with --model and --version ({there})")


def serve_endpoint(wanted: Attachment) -> int:
    """Serve a model until SIGINT or SIGTERM, and then finish the requests in flight; a second signal ends it at once.

    Returns the exit code: 0 after a signal, 1 if the worker ended by itself.
    """
    # `python -m` looks here, too.
    sys.path.insert(0, os.getcwd())
    stop = StopSignals()
    with stop:
        return _Attached(wanted, *_load(wanted), stop.wanted).serve()


def _load(wanted: Attachment) -> tuple[Callable[..., Any], Any]:
    found = load_target(wanted.target)
    is_factory = wanted.is_factory and callable(found)
    infer_func, signature = make_infer_func(found, kwargs=wanted.arguments, is_factory=is_factory)
    if not callable(infer_func):
        raise TargetError(
            f"{wanted.target!r} {'made' if wanted.is_factory else 'is'} {infer_func!r}: expected an inference callable",
            target=wanted.target,
        )
    return infer_func, signature


class _Attached:
    """A worker, and another one wherever its model moves to."""

    def __init__(
        self, wanted: Attachment, infer_func: Callable[..., Any], signature: Any, stop: threading.Event
    ) -> None:
        self._wanted = wanted
        self._infer_func = infer_func
        self._signature = signature
        self._stop = stop

    def serve(self) -> int:
        deadline = time.monotonic() + self._wanted.attach_timeout_s
        place = self._wait_for_endpoint(deadline)
        if place is None:
            return 0
        worker = self._start(*place)
        try:
            self._wait_attached(worker, deadline)
            while worker.is_alive and not self._stop.wait(_LOOK_S):
                if worker.is_attached:
                    continue
                moved = self._moved_to(place)
                if moved is not None:
                    place = moved
                    worker.stop(self._wanted.stop_timeout_s)
                    worker = self._start(*place)
        finally:
            # If it has not ended by itself, it takes no more batches, and answers those that it has.
            ended = worker.stop(self._wanted.stop_timeout_s)
        if not ended:
            logger.error(
                "The callable is still busy %g s after the signal: its requests fail.", self._wanted.stop_timeout_s
            )
            return _FAILED
        if worker.error is not None:
            logger.error("The worker ended: %s: %s", type(worker.error).__name__, worker.error)
            return _FAILED
        return 0

    def _start(self, endpoint: Path | str, spec: ModelSpec) -> Worker:
        check_callable(self._infer_func, self._signature, spec, self._wanted.target)
        worker = Worker(
            self._infer_func,
            spec,
            endpoint,
            unrecoverable=unrecoverable_errors(),
            context=make_context(self._infer_func, spec),
            curve_keys=self._wanted.curve_keys,
            insecure=self._wanted.insecure,
        )
        logger.info("Attaching to model %s (version %d) at %s", spec.name, spec.version, endpoint)
        worker.start()
        return worker

    def _wait_for_endpoint(self, deadline: float) -> tuple[Path | str, ModelSpec] | None:
        while True:
            try:
                return find_endpoint(self._wanted)
            except (AttachError, DescriptionError):
                # The server may be starting.
                if time.monotonic() >= deadline:
                    raise
            if self._stop.wait(_LOOK_S):
                return None

    def _wait_attached(self, worker: Worker, deadline: float) -> None:
        while not worker.is_attached and not self._stop.is_set():
            remaining_s = deadline - time.monotonic()
            try:
                # In short steps, so that a signal is noticed.
                worker.wait_attached(max(0.0, min(_LOOK_S, remaining_s)))
            except AttachError:
                if remaining_s <= 0 or not worker.is_alive:
                    raise

    def _moved_to(self, place: tuple[Path | str, ModelSpec]) -> tuple[Path | str, ModelSpec] | None:
        """Return the endpoint of the model if it has moved or changed."""
        try:
            found = find_endpoint(self._wanted)
        except ProxyBackendError:
            # No socket is there at the moment.
            return None
        endpoint = found[0]
        if found == place:
            return None
        path = str(endpoint).removeprefix(_IPC)
        if "://" not in path and not _is_socket(Path(path)):
            # The description exists, but nobody listens there yet.
            return None
        return found


def _checked(spec: ModelSpec, wanted: Attachment, where: str) -> ModelSpec:
    if wanted.model in (None, spec.name) and wanted.version in (None, spec.version):
        return spec
    raise AttachError(
        f"{where} is about model '{spec.name}' version {spec.version}, not about model '{wanted.model}' version "
        f"{'of any number' if wanted.version is None else wanted.version}"
    )


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False
