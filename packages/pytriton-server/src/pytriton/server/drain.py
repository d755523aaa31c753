"""The time between the order to stop and the end: not ready any more, and still answering."""

import logging
import time
from collections.abc import Callable

from pytriton.server.control import Control, ControlError

__all__ = ["LONGEST_LINGER_S", "QUIET_S", "linger"]

LONGEST_LINGER_S = 5.0
"""How long requests go on to be accepted after SIGTERM, in seconds, where nothing else is said."""
QUIET_S = 1.0
"""After so long without a request, in seconds, whoever sends them has gone elsewhere; where nothing else is said."""

_POLL_S = 0.05
# A model that takes long for a request is heard of only so often.
_REQUESTS_OF_QUIET = 2.0

logger = logging.getLogger(__name__)


def linger(control: Control, limit_s: float | None, *, most_s: float, ended: Callable[[float], bool]) -> None:
    """Lets a server that says that it is not ready go on, until those who have seen it send their requests elsewhere.

    Args:
        control: How the server is asked.
        limit_s: How long, in seconds. None is for as long as requests come, up to `LONGEST_LINGER_S`: not at all where
            none came in the last `QUIET_S`.
        most_s: The most of all, in seconds.
        ended: Waits for so many seconds; True ends it all.
    """
    begun = time.monotonic()
    deadline = begun + min(most_s, LONGEST_LINGER_S if limit_s is None else limit_s)
    # Triton tells the time of the last answer by the clock on the wall; how many there were needs no clock.
    seen = -1
    heard = begun
    while (left := deadline - time.monotonic()) > 0:
        if limit_s is None:
            try:
                activity = control.activity()
            except ControlError as error:
                logger.debug("The server does not tell whether requests come: %s", error)
                return
            now = time.monotonic()
            quiet_s = max(QUIET_S, _REQUESTS_OF_QUIET * activity.longest_mean_s)
            if seen < 0:
                heard = now - min(quiet_s, max(0.0, activity.age_s))
            elif activity.answered != seen:
                heard = now
            seen = activity.answered
            if not seen or now - heard >= quiet_s:
                return
        if ended(min(_POLL_S, left)):
            return
