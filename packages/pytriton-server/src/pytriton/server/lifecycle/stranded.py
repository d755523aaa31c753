"""Requests that a server keeps although nobody can answer them any more.

Triton 2.51 never lets go of a request whose gRPC stream is cancelled in the moment in which it ends, nor, for that
reason, of its model: who waits for the last request of that model waits in vain.
"""

import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from pytriton.proxy_backend.transport.activity import ask_activity
from pytriton.server.control.http import Control
from pytriton.server.errors import TritonServerError
from pytriton.server.lifecycle.readiness_gate import GATE_NAMES

__all__ = ["QUIET_S", "STRANDED", "StrandedRequests", "has_others"]

QUIET_S = 3.0
"""How long nothing may be in flight, in seconds, until what a server still holds counts as stranded."""
STRANDED = (
    "Triton does not let go of model %s, of which all requests are answered: a gRPC stream is open, or was cancelled "
    "in the moment in which it ended. It is not waited for any longer."
)
"""For the log."""

_ASK_EVERY_S = 0.25
_ANSWER_TIMEOUT_S = 0.5
# Of a server that answers later than that it is not known what it did meanwhile.
_LONGEST_GAP_S = 2.0

logger = logging.getLogger(__name__)


class StrandedRequests:
    """Finds out that requests which a server still holds can never be answered. For one wait.

    An answer comes from a worker, which has its requests from the proxy backend, and that from Triton's queue. A
    request waits in the queue while the workers are busy, and no longer than the model's batcher may hold it back for
    others. So where the proxy backends say again and again, for longer than that, that all they have got is answered,
    and got nothing more, there is nothing that could be.
    """

    def __init__(self) -> None:
        self._asked_at = time.monotonic()
        self._quiet_since: float | None = None
        self._taken: dict[Path, int] = {}

    def look(self, endpoints: Mapping[Path, float]) -> bool:
        """Ask the proxy backends, if it is time to; tells whether all they still hold is stranded.

        Args:
            endpoints: For the socket of each model that is waited for, how long Triton's batcher may hold a request
                back, in seconds.
        """
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


def has_others(control: Control, names: Collection[str]) -> bool:
    """Tell whether a server has models beside these, or may have: an ensemble could send them requests yet.

    Args:
        control: How it is asked.
        names: Names of models that are no ensembles.
    """
    try:
        there = {state.name for state in control.index() if state.is_loaded}
        there |= control.activity().models
    except TritonServerError as error:
        logger.debug("The server does not tell which models it has: %s", error)
        return True
    return bool(there.difference(names, GATE_NAMES))
