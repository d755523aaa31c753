"""The steps in which a server takes the place of another one that goes on meanwhile.

Both listen at the same sockets, which the guard hands from one to the other, and one of them accepts. The sockets of
the models have paths that the second one needs as well: those of the first are renamed. Its workers stay with it until
it has answered everything and is gone, and then come to the path, as after a restart.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pytriton.exceptions import PyTritonValidationError
from pytriton.proxy_backend import ProxyBackendError
from pytriton.proxy_backend.transport.activity import ask_activity
from pytriton.proxy_backend.transport.calls import Calls
from pytriton.server.errors import TritonServerStartError, TritonServerTimeoutError, quote_log
from pytriton.server.lifecycle.startup import POLL_S, is_open
from pytriton.server.models.workers import StartCancelled
from pytriton.server.settings.config import TritonConfig
from pytriton.server.tritonserver.handover import Handover
from pytriton.server.tritonserver.ports import Endpoint
from pytriton.server.tritonserver.process import ServerProcess

__all__ = ["ParkedSockets", "check_same_places", "knock", "wait_idle", "wait_standing_by"]

logger = logging.getLogger(__name__)

_FIXED = frozenset({"allow_http", "allow_grpc", "allow_metrics", "allow_sagemaker", "allow_vertex_ai", "python_models"})
# As long as its name, since a socket's path has little room.
_SUFFIX, _PARKED_SUFFIX = ".sock", ".last"
_ANSWER_TIMEOUT_S = 0.5
# So long nothing is in flight, in seconds, until callers have gone to the new server.
_QUIET_S = 0.1
# So long callers may go on to send requests to the first one, in seconds, as they do over a channel of gRPC.
_BUSY_S = 0.5


def check_same_places(now: TritonConfig, wanted: TritonConfig) -> None:
    """Check that settings differ in nothing that callers of the running server know, or that cannot change.

    Raises:
        PyTritonValidationError: They do; the text names the field.
    """
    for field in dataclasses.fields(TritonConfig):
        is_place = field.name.endswith(("_port", "_address")) or field.name in _FIXED
        before, after = getattr(now, field.name), getattr(wanted, field.name)
        if is_place and before != after:
            raise PyTritonValidationError(
                f"TritonConfig.{field.name} of a server that is replaced while it serves must stay {before!r}; got "
                f"{after!r}. Stop the server and start it again for that.",
                expected=repr(before),
                received=after,
            )


class ParkedSockets:
    """The sockets of the models of a running server, renamed so that another one can have their paths.

    Args:
        endpoints: Their folder.
    """

    def __init__(self, endpoints: Path) -> None:
        self._paths: list[tuple[Path, Path]] = []
        for path in sorted(endpoints.glob(f"*{_SUFFIX}")):
            parked = path.with_suffix(_PARKED_SUFFIX)
            path.rename(parked)
            self._paths.append((path, parked))

    @property
    def freed(self) -> Sequence[Path]:
        """The paths that they had."""
        return [path for path, _ in self._paths]

    def activity(self) -> tuple[int, int]:
        """Return how many batches are in flight, and how many there have been."""
        answers = [ask_activity(parked, _ANSWER_TIMEOUT_S) for _, parked in self._paths]
        known = [answer for answer in answers if answer is not None]
        return sum(each.in_flight for each in known), sum(each.taken for each in known)

    def unload(self, names: Iterable[str]) -> None:
        """Have the server unload models, so that their workers leave it. Its ports are not its own any more."""
        for name in dict.fromkeys(names):
            for _, parked in self._paths:
                try:
                    calls = Calls(parked, "pytriton")
                except (OSError, ProxyBackendError):
                    # Unloaded with another version of its name.
                    continue
                try:
                    calls.unload_model(name)
                except ProxyBackendError as error:
                    logger.debug("The server that is replaced does not unload %r: %s", name, error)
                else:
                    break
                finally:
                    calls.close()

    def put_back(self) -> None:
        """Give them their paths back."""
        for path, parked in self._paths:
            with contextlib.suppress(FileNotFoundError):
                parked.rename(path)

    def remove(self) -> None:
        """Remove what is left of them, when the server is gone."""
        for _, parked in self._paths:
            parked.unlink(missing_ok=True)


def wait_standing_by(
    process: ServerProcess,
    handover: Handover,
    fronts: Iterable[Endpoint],
    others: Iterable[Endpoint],
    models: Sequence[Path],
    *,
    old: ServerProcess,
    timeout_s: float,
    cancelled: Callable[[], bool],
) -> None:
    """Wait until a server could take over: it listens, and has loaded its models.

    Args:
        process: The server.
        handover: What its guard tells.
        fronts: Where it is to listen together with the other one.
        others: Where it listens alone.
        models: The sockets of its models.
        old: The server that it is to follow.
        timeout_s: How long to wait, in seconds.
        cancelled: Asked again and again; True ends the wait.

    Raises:
        StartCancelled: `cancelled` said so.
        TritonServerStartError: One of the two has ended.
        TritonServerTimeoutError: The time is over.
    """
    deadline = time.monotonic() + timeout_s
    wanted = {endpoint.port for endpoint in fronts}
    waiting = list(others)
    while True:
        heard = {listener.getsockname()[1] for listener in handover.listeners}
        waiting = [endpoint for endpoint in waiting if not is_open(endpoint)]
        if wanted <= heard and not waiting and all(path.exists() for path in models):
            return
        if cancelled():
            raise StartCancelled
        if not old.is_running:
            raise TritonServerStartError(
                f"tritonserver {old.ending} while the one that was to replace it was starting.",
                exit_code=old.exit_code,
                log_lines=old.log_tail,
            )
        lines = process.log_tail
        if process.wait(POLL_S):
            lines = process.log_tail
            raise TritonServerStartError(
                f"The tritonserver that was to replace the running one {process.ending}; the running "
                f"one goes on.{quote_log(lines)}",
                exit_code=process.exit_code,
                log_lines=lines,
            )
        if time.monotonic() >= deadline:
            raise TritonServerTimeoutError(
                f"The tritonserver that was to replace the running one was not ready within {timeout_s:g} s; the "
                f"running one goes on.{quote_log(lines)}",
                log_lines=lines,
            )


def wait_idle(sockets: ParkedSockets, *, timeout_s: float, ended: Callable[[float], bool]) -> None:
    """Wait until a server that accepts no connections any more has answered what it has.

    Args:
        sockets: Those of its models.
        timeout_s: How long its requests may take, in seconds.
        ended: Waits for so many seconds; True ends it all.
    """
    begun = quiet_since = time.monotonic()
    seen = -1
    while True:
        in_flight, taken = sockets.activity()
        now = time.monotonic()
        if in_flight or taken != seen:
            quiet_since = now
        is_busy = taken != seen and now - begun >= _BUSY_S
        seen = taken
        if is_busy or now - quiet_since >= _QUIET_S or now - begun >= timeout_s or ended(POLL_S):
            return


def knock(endpoints: Iterable[Endpoint]) -> None:
    """Connect to each of these for a moment: who has been told to accept connections looks at what waits there."""
    for endpoint in endpoints:
        is_open(endpoint)
