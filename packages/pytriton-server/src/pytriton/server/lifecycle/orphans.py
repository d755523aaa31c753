"""What a server would be waited for without end: requests that nobody can answer, models whose processes are dead.

Triton 2.51 never frees a request whose gRPC stream is cancelled in the moment in which it ends, nor, for that reason,
its model: who waits for the last request of that model waits in vain.

Where a stub of Triton's Python backend has died, Triton cannot unload the model and does not end in order, see
`pytriton.server.tritonserver.stubs`.
"""

import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from pytriton.proxy_backend.transport.activity import ask_activity
from pytriton.server.control.http import Control, ControlError
from pytriton.server.errors import TritonServerError
from pytriton.server.lifecycle.readiness import GATE_NAMES
from pytriton.server.tritonserver.stubs import stubs_of

QUIET_S = 3.0
"""After this many seconds without a request in flight, the remaining requests count as orphaned."""
ORPHANED = (
    "Triton does not let go of model %s, of which all requests are answered: a gRPC stream is open, or was cancelled "
    "in the moment in which it ended. It is not waited for any longer."
)
"""For the log."""
DEAD_STUBS = "The process of model %s has died, and Triton waits for it without end. It is not waited for any longer."
"""For the log."""

_ASK_EVERY_S = 0.25
_ANSWER_TIMEOUT_S = 0.5
# If a server answers later than this, nobody knows what it did meanwhile.
_LONGEST_GAP_S = 2.0
# Time between the end of a stub and the message that its model has ended.
_STUB_QUIET_S = 1.0

logger = logging.getLogger(__name__)


class OrphanedRequests:
    """Detects, for one wait, that requests of a server can never be answered.

    Triton's queue gives requests to proxy backends, and these to workers. A request waits in the queue only while
    workers are busy, or as long as the batcher may delay it. If the proxy backends report for longer than that that
    they got nothing new and have answered everything, no request is left that could be answered.
    """

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._quiet_since: float | None = None
        self._taken: dict[Path, int] = {}

    def poll(self, endpoints: Mapping[Path, float]) -> bool:
        """Ask the proxy backends, if it is time to; return whether all they still have is orphaned."""
        now = time.monotonic()
        gap_s = now - self._asked_at
        if not endpoints or gap_s < _ASK_EVERY_S:
            return False
        self._asked_at = now
        taken: dict[Path, int] = {}
        is_quiet = gap_s <= _LONGEST_GAP_S
        for endpoint in endpoints:
            activity = ask_activity(endpoint, _ANSWER_TIMEOUT_S)
            if activity is None or activity.in_flight:
                self._quiet_since = None
                return False
            taken[endpoint] = activity.taken
            is_quiet = is_quiet and self._taken.get(endpoint) == activity.taken
        self._taken = taken
        if self._quiet_since is None or not is_quiet:
            self._quiet_since = time.monotonic()
            return False
        return now - self._quiet_since >= QUIET_S + max(endpoints.values())


class DeadStubs:
    """Detects, for one wait, that models cannot be unloaded because their stubs have died."""

    def __init__(self, pid: int | None, control: Control, names: Collection[str]) -> None:
        self._pid = pid
        self._models = {name for name in names if _is_of_python_backend(control, name)}
        self._since: float | None = None

    def poll(self, pending: Collection[str]) -> bool:
        """Return whether all models that are waited for have had no stub for long enough.

        The name of a stub does not show its model; stubs of models that are unloaded end soon.
        """
        if not set(pending) <= self._models or any(stubs_of(self._pid)):
            self._since = None
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since >= _STUB_QUIET_S


def has_others(control: Control, names: Collection[str]) -> bool:
    """Return whether a server has, or may have, models beside these: an ensemble could still send them requests."""
    try:
        there = {state.name for state in control.index() if state.is_loaded}
        there |= control.activity().models
    except TritonServerError as error:
        logger.debug("The server does not tell which models it has: %s", error)
        return True
    return bool(there.difference(names, GATE_NAMES))


def _is_of_python_backend(control: Control, name: str) -> bool:
    try:
        return bool(control.model_config(name).get("backend") == "python")
    except ControlError as error:
        logger.debug("Model %r is not known to be one of the Python backend: %s", name, error)
        return False
