"""Drain a server that is to end: go on for those who have not noticed, then wait for requests and their answers."""

import enum
import logging
import time
from collections.abc import Callable, Collection

from pytriton.proxy_backend.hosting.supervisor import HostSupervisor
from pytriton.server.control.http import Control, ControlError
from pytriton.server.lifecycle.deployment import Deployment, pause_s
from pytriton.server.lifecycle.orphans import DEAD_STUBS, ORPHANED, DeadStubs, OrphanedRequests
from pytriton.server.tritonserver.ports import ReservedPorts, tcp_sockets
from pytriton.server.tritonserver.process import ServerProcess

LONGEST_LINGER_S = 5.0
"""How long requests are still accepted after SIGTERM by default, in seconds."""
QUIET_S = 1.0
"""After this many seconds without a request, callers count as gone by default."""
CUT_DEADLINE_S = 2.0
"""How long the server may take to fail requests whose workers were cut off, and then to end, in seconds. A caller that
keeps a gRPC stream open keeps the model of its first request loaded, and the server up, for as long as it likes."""

_POLL_S = 0.05
_DRAIN_POLL_S = 0.02
_CALL_TIMEOUT_S = 2.0
# Requests that take longer are waited for model by model.
_IDLE_WAIT_S = 1.0
# A model is taken to be quiet after so many times the time that one of its requests takes: slow ones finish rarely.
_REQUESTS_OF_QUIET = 2.0

# The states of the kernel's net/tcp_states.h: established, or half closed by one side.
_OPEN_STATES = frozenset({"01", "04", "05", "08", "09", "0B"})

logger = logging.getLogger(__name__)


def linger(control: Control, limit_s: float | None, *, most_s: float, ended: Callable[[float], bool]) -> None:
    """Keep a server running that says that it is not ready, until its callers have gone elsewhere.

    `limit_s` is the time in seconds; None waits as long as requests come, up to `LONGEST_LINGER_S`, and not at all if
    none came in the last `QUIET_S`.
    """
    begun = time.monotonic()
    deadline = begun + min(most_s, LONGEST_LINGER_S if limit_s is None else limit_s)
    # Triton reports the time of the last answer by the wall clock, so the number of answers is compared instead.
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


class DrainResult(enum.Enum):
    """How the requests of a server ended."""

    ANSWERED = enum.auto()
    CUT = enum.auto()
    """Some were not answered in time, or the server has some that never will be: it does not end by itself soon."""
    UNKNOWN = enum.auto()
    """It could not be asked."""


def drain_requests(
    process: ServerProcess,
    control: Control,
    deployment: Deployment,
    ports: ReservedPorts,
    *,
    deadline: float,
    hurried: Callable[[], bool],
    supervisor: HostSupervisor | None = None,
) -> DrainResult:
    """Take all models out of service, and wait until their answers are sent.

    After the deadline, the workers are cut off: their callers get an error, and the server can end, which a pending
    request would prevent.
    """
    was_cut = False
    fronts = {each.port for each in (ports.http, ports.grpc, ports.sagemaker, ports.vertex_ai) if each is not None}
    grpc = {ports.grpc.port} if ports.grpc is not None else set()
    orphaned = OrphanedRequests()
    try:
        ready = {state.name for state in control.index(_CALL_TIMEOUT_S) if state.state == "READY"}
        others = ready.difference(model.name for model in deployment.models)
        stubs = DeadStubs(process.pid, control, others if supervisor is None else ())
        # tritonserver copies its list of models for each that it unloads, which takes long where there are many.
        process.is_idle = not others and _await_idle(process, hurried)
        for name in () if process.is_idle else ready:
            control.unload(name, _CALL_TIMEOUT_S)
        while process.is_running and not process.is_idle and not hurried():
            begun = time.monotonic()
            # The index omits what is no longer in the repository.
            pending = {state.name for state in control.index(_CALL_TIMEOUT_S) if state.is_loaded} | set(
                deployment.unloading()
            )
            if not pending:
                # When it gets its signal, the server sleeps for a second if there are connections; it must first notice
                # that the one of this call is closed.
                process.wait(_DRAIN_POLL_S)
                break
            names = ", ".join(map(repr, sorted(pending)))
            # If a caller reads a stream slowly, the server still holds answers, and only the server knows.
            if not has_connections(grpc) and not has_unsent(fronts) and deployment.has_only_orphaned(orphaned):
                logger.warning(ORPHANED, names)
                return DrainResult.CUT
            pause = pause_s(begun, _DRAIN_POLL_S)
            if stubs.poll(pending):
                logger.warning(DEAD_STUBS, names)
                return DrainResult.CUT
            if time.monotonic() >= deadline:
                if was_cut:
                    return DrainResult.CUT
                logger.warning("Requests of %s are still being served: they are cut off now.", names)
                deployment.cut_workers()
                if supervisor is not None:
                    supervisor.cut()
                was_cut = True
                deadline = time.monotonic() + CUT_DEADLINE_S
            process.wait(pause)
    except ControlError as error:
        logger.warning("The server cannot be asked to finish its requests, so it is stopped at once: %s", error)
        if not was_cut:
            return DrainResult.UNKNOWN
    _wait_sent(process, fronts, deadline, hurried)
    return DrainResult.ANSWERED


def _await_idle(process: ServerProcess, hurried: Callable[[], bool]) -> bool:
    """Have the server refuse requests; return whether it soon has none, as far as its guard counts them."""
    handover = process.handover
    if handover is None or handover.count_requests() is None:
        return False
    handover.end_requests()
    deadline = time.monotonic() + _IDLE_WAIT_S
    while (count := handover.count_requests()) and process.is_running and not hurried() and time.monotonic() < deadline:
        process.wait(_DRAIN_POLL_S)
    # As when all models are unloaded, see above.
    process.wait(_DRAIN_POLL_S)
    return count == 0


def _wait_sent(process: ServerProcess, ports: Collection[int], deadline: float, hurried: Callable[[], bool]) -> None:
    """Wait until callers have got the answers that the server has: its end does not wait for slow readers."""
    while process.is_running and not hurried() and has_unsent(ports):
        if time.monotonic() >= deadline:
            logger.warning("Callers have not read their answers in time: they are cut off now.")
            return
        process.wait(_DRAIN_POLL_S)


def has_connections(ports: Collection[int]) -> bool:
    """Return whether somebody is connected to one of these TCP ports of this machine."""
    return any(each.state in _OPEN_STATES for each in tcp_sockets(ports))


def has_unsent(ports: Collection[int]) -> bool:
    """Return whether a connection to one of these ports has bytes that the peer has not received."""
    return any(each.unsent_bytes for each in tcp_sockets(ports) if each.state in _OPEN_STATES)
