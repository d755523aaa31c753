"""Watch the workers of all models, so that the server says that it is not ready while one has none."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pytriton.proxy_backend.system.threads import keep_on
from pytriton.server.models.service import WorkerService

WATCH_PERIOD_S = 0.25
"""Polling period in seconds. A model counts as without workers when it has been found so twice."""

_SOCKETS = Path("/proc/net/unix")
_CONNECTED = "03"
_END_DEADLINE_S = 10.0

logger = logging.getLogger(__name__)


class WorkerWatch:
    """A thread that reports when some model has no worker, and when all have one again.

    `on_change` returns whether it could react; if not, it is called again.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[WorkerService]],
        endpoints: Path,
        on_change: Callable[[bool], bool],
        look_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._models = models
        self._endpoints = endpoints
        self._on_change = on_change
        self._look_first = look_first
        self._are_complete = True
        self._were_without: set[tuple[str, int]] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pytriton-worker-watch", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def stop(self) -> None:
        """End it. `on_change` is not called any more when this returns."""
        self._ending.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_DEADLINE_S)

    def _watch(self) -> None:
        while not self._ending.wait(WATCH_PERIOD_S):
            keep_on(self._look, "The watch of the workers of all models failed")

    def _look(self) -> None:
        self._look_first()
        # A model that is still being bound does not count while it warms up.
        lacking = [m for m in self._models() if m.workers.was_attached and not m.workers.has_attached]
        # Another process may have attached a worker.
        others = connections() if lacking else Counter()
        without = {
            model.key: model
            for model in lacking
            if others[str(model.endpoint(self._endpoints))] <= model.workers.has_stand_in
        }
        lasting = [model for key, model in without.items() if key in self._were_without]
        self._were_without = set(without)
        if bool(lasting) != self._are_complete or self._ending.is_set():
            return
        if lasting and self._are_complete:
            names = ", ".join(f"{model.name!r} (version {model.version})" for model in lasting)
            logger.warning("No worker is attached to model %s: the server says that it is not ready.", names)
        if self._on_change(not lasting):
            self._are_complete = not lasting


def sockets_at(endpoint: Path) -> list[tuple[str, str]]:
    """Return state and inode of the listening socket at a path, and of those that it has accepted."""
    return [(state, inode) for path, state, inode in _sockets() if path == str(endpoint)]


def connections() -> Counter[str]:
    """Count the connections to each socket that has a path, those of other processes included."""
    return Counter(path for path, state, _ in _sockets() if state == _CONNECTED)


def _sockets() -> Iterator[tuple[str, str, str]]:
    """Yield path, state and inode of the sockets that have a path; an accepted one has the path of its listener."""
    try:
        with _SOCKETS.open(encoding="utf-8", errors="replace") as table:
            for line in table:
                # Num RefCount Protocol Flags Type St Inode Path
                columns = line.rstrip("\n").split(maxsplit=7)
                if len(columns) == 8:
                    yield columns[7], columns[5], columns[6]
    except OSError as error:
        logger.debug("%s cannot be read: %s", _SOCKETS, error)
