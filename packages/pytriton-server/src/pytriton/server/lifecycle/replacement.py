"""The steps in which a server takes the place of another one that goes on meanwhile.

Both listen at the same sockets, which the guard hands from one to the other, and one of them accepts. The sockets of
the models have paths that the second one needs as well: those of the first are renamed. Its workers stay with it until
it has answered everything and is gone, and then come to the path, as after a restart. Those that wake or are started
again meanwhile come to it as well.
"""

import contextlib
import dataclasses
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pytriton.exceptions import PyTritonInvalidOperationError, PyTritonValidationError
from pytriton.proxy_backend import BACKEND_NAME, ProxyBackendError, library_path
from pytriton.proxy_backend.transport.activity import ask_activity
from pytriton.proxy_backend.transport.calls import Calls
from pytriton.proxy_backend.transport.places import PARKED_SUFFIX, SUFFIX
from pytriton.server.errors import TritonServerStartError, TritonServerTimeoutError, quote_log
from pytriton.server.lifecycle.deployment import Deployment
from pytriton.server.lifecycle.ending import END_S, EXIT_MARGIN_S, drain_s
from pytriton.server.lifecycle.files import ServerFiles
from pytriton.server.lifecycle.running import RunningServer
from pytriton.server.lifecycle.startup import POLL_S, find_server, is_open
from pytriton.server.models.workers import StartCancelled
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.response_cache import local_cache_bytes
from pytriton.server.tritonserver.backends import make_backends
from pytriton.server.tritonserver.command_line import build_command, is_controlled
from pytriton.server.tritonserver.guard import Part
from pytriton.server.tritonserver.handover import Handover, Role
from pytriton.server.tritonserver.ports import Endpoint
from pytriton.server.tritonserver.process import ServerProcess
from pytriton.server.workspace import Workspace

logger = logging.getLogger(__name__)

_FIXED = frozenset(
    {
        *("allow_http", "allow_grpc", "allow_metrics", "allow_sagemaker", "allow_vertex_ai"),
        *("python_models", "python_models_idle"),
    }
)
_ANSWER_TIMEOUT_S = 0.5
_ANSWERED_POLL_S = 0.05
# How long the replaced server may take to unload its models, in seconds. It is ended in any case.
_UNLOAD_TIMEOUT_S = 10.0
# When no request was in flight for so many seconds, all callers are taken to have gone to the new server.
_QUIET_S = 0.1
# How long callers may go on to send requests to the replaced server, in seconds, as a gRPC channel does.
_BUSY_S = 0.5
# When no model has had a request for so many seconds, what the guard still counts are none: Triton's own front end for
# gRPC keeps the last request of each stream that is open.
_NOTHING_LEFT_S = 2.0


def check_same_places(now: TritonConfig, wanted: TritonConfig) -> None:
    """Check that settings differ in nothing that callers of the running server know, or that cannot change."""
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


class _ParkedSockets:
    """The sockets of the models of a running server, renamed so that another one can have their paths."""

    def __init__(self, endpoints: Path) -> None:
        self._endpoints = endpoints
        self._paths: list[tuple[Path, Path]] = []

    def park(self) -> None:
        """Rename them."""
        for path in sorted(self._endpoints.glob(f"*{SUFFIX}")):
            parked = path.with_suffix(PARKED_SUFFIX)
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
        deadline = time.monotonic() + _UNLOAD_TIMEOUT_S
        for name in dict.fromkeys(names):
            for _, parked in self._paths:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    logger.warning(
                        "The server that is replaced did not unload its models within %g s: it is ended with them.",
                        _UNLOAD_TIMEOUT_S,
                    )
                    return
                try:
                    calls = Calls(parked, "pytriton")
                except (OSError, ProxyBackendError):
                    # Unloaded with another version of its name.
                    continue
                try:
                    calls.unload_model(name, timeout_s=left_s)
                except (ProxyBackendError, TimeoutError) as error:
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

    It listens at `fronts` together with the `old` one, whose end also ends the wait, and alone at `others`.
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


def wait_idle(sockets: _ParkedSockets, *, timeout_s: float, ended: Callable[[float], bool]) -> None:
    """Wait until a server that accepts no connections any more has answered what it has, or `ended` returns true."""
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


class Replacement:
    """A server that takes the place of a running one: its methods are the steps, in their order.

    `put_back` is for an error in a step up to `adopt`; `finish` follows `take_over`, whatever becomes of that.


    Raises:
        PyTritonInvalidOperationError: The running one cannot be replaced.
        PyTritonValidationError: The settings say other places, or are not acceptable.
        TritonServerNotFoundError: There is no tritonserver in `server_dir`.
    """

    # Made by `start` and `drain`.
    _handover: Handover
    _deadline: float

    def __init__(
        self,
        server: RunningServer,  # the running one
        deployment: Deployment,  # its models
        files: ServerFiles,  # what is in its workspace
        workspace: Workspace,  # the workspace, where the new one gets a folder for its backends
        config: TritonConfig,  # the settings of the new one
        server_dir: Path | None,  # the folder of the new one; None is the one that a start would take
    ) -> None:
        old, ports, folders, binary = server.process, server.ports, files.folders, files.binary
        if old is None or ports is None or folders is None or binary is None or not server.is_running:
            raise PyTritonInvalidOperationError("No server runs that could be replaced.")
        has_models = files.supervisor is None and is_controlled(config)
        if old.handover is None or Part.HANDOVER in old.guard.parts_off or not has_models:
            raise PyTritonInvalidOperationError(
                "The server cannot be replaced while it serves: that needs the guard with GuardConfig.handover, models "
                "that are bound (none by its folder), and TritonConfig.model_control_mode='explicit' or unset. Stop "
                "it, and start it again."
            )
        check_same_places(server.config, config)
        self.binary, self._guard = find_server(config, server.security, server.guard, server_dir)
        """The program of the new one, and what is loaded into it."""
        if self._guard.library is None:
            raise PyTritonInvalidOperationError(f"{self.binary.executable} cannot take over: {self._guard.obstacle}.")
        backends = Path(tempfile.mkdtemp(prefix="backends-", dir=workspace.path))
        make_backends(backends, self.binary, {BACKEND_NAME: library_path()})
        caches = self.binary.caches_dir if self.binary.caches_dir.is_dir() else None
        self._folders = dataclasses.replace(
            folders, executable=self.binary.executable, backends=backends, caches=caches
        )
        self._ports = ports.for_successor()
        self._server, self._files, self._workspace = server, files, workspace
        self._config, self._old_config = config, server.config
        self._old, self._old_handover, self._old_folders = old, old.handover, folders
        self._old_binary, self._old_ports, self._old_control = binary, ports, server.control
        self._names = [model.name for model in deployment.models]
        self._fronts = [each for each in (ports.http, ports.grpc) if each is not None]
        self.started: ServerProcess | None = None
        """The process of the new one; None before `start`."""
        self._sockets = _ParkedSockets(deployment.endpoints)

    @property
    def process(self) -> ServerProcess:
        """The process of the new one, once it is started."""
        if self.started is None:
            raise TritonServerStartError("The tritonserver that is to replace the running one was not started.")
        return self.started

    def start(self) -> None:
        """Start the new one beside the running one, whose sockets it gets the paths of."""
        self._files.resize_cache(local_cache_bytes(self._config.cache_config))
        self._sockets.park()
        # The new server has to load all models, or end and say why: nobody can ask it while it stands by.
        strict = dataclasses.replace(self._config, exit_on_error=self._config.exit_on_error is not False)
        command = build_command(strict, self._server.security, self._folders, self._ports, self._names)
        former = self._old_handover
        self._handover = Handover(former.listeners, role=Role.STANDING_BY, complete=former.is_complete)
        self.started = self._server.make_process(command, self._config, self._guard, self._handover)
        self.started.start()

    def stand_by(self, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Wait until the new one could take over."""
        wait_standing_by(
            self.process,
            self._handover,
            self._fronts,
            [each for each in self._ports if each not in self._fronts],
            self._sockets.freed,
            old=self._old,
            timeout_s=timeout_s,
            cancelled=cancelled,
        )
        self.process.wipe_secrets()

    def hand_over(self) -> None:
        """Let the new one accept what comes, in place of the running one."""
        self._handover.assign(Role.SERVING)
        self._old_handover.assign(Role.STANDING_BY)
        knock(self._fronts)

    def drain(self, cancelled: Callable[[], bool]) -> None:
        """Wait until the one before is quiet, or its callers do not leave it by themselves; the new one has to live."""
        new = self.process
        timeout_s = drain_s(self._config)
        self._deadline = time.monotonic() + timeout_s
        wait_idle(
            self._sockets,
            timeout_s=timeout_s,
            ended=lambda seconds: new.wait(seconds) or not self._old.is_running or cancelled(),
        )
        if cancelled():
            raise StartCancelled
        if not new.is_running:
            raise TritonServerStartError(
                f"The tritonserver that was to replace the running one {new.ending}; the running "
                f"one goes on.{quote_log(new.log_tail)}",
                exit_code=new.exit_code,
                log_lines=new.log_tail,
            )

    def adopt(self) -> None:
        """Make the new one the process that serves."""
        self._server.adopt(self.process, self._ports, self._config)
        self._files.belong_to(self.binary, self._folders)

    def put_back(self, cancelled: Callable[[], bool]) -> None:
        """End the new one, and let the one before serve as before."""
        # An interrupt may have come anywhere in `adopt`, or right after it.
        self._server.put_back(self._old, self._old_ports, self._old_config, self._old_control)
        self._files.belong_to(self._old_binary, self._old_folders)
        self._old_handover.assign(Role.SERVING)
        if self.started is not None:
            self.started.stop(EXIT_MARGIN_S, hurried=cancelled)
        self._sockets.put_back()
        knock(self._fronts)
        shutil.rmtree(self._folders.backends, ignore_errors=True)
        self._files.resize_cache(local_cache_bytes(self._old_config.cache_config))

    def release_ports(self) -> None:
        """Let go of the port that was reserved for the new one, when it has bound it or never will."""
        self._ports.release()

    def take_over(self) -> None:
        """Have the workers leave the one before at once: its end takes a second, for which they do not wait."""
        self._old_handover.assign(Role.LEFT)
        self._sockets.unload(self._names)

    def wait_answered(self, cancelled: Callable[[], bool]) -> None:
        """Wait until the one before has answered what it has got, also what waits in its queues."""
        seen, changed = (0, 0), time.monotonic()
        while self._old_handover.count_requests() and time.monotonic() < self._deadline:
            activity = self._sockets.activity()
            if activity[0] or activity != seen:
                seen, changed = activity, time.monotonic()
            is_stuck = time.monotonic() - changed >= _NOTHING_LEFT_S
            if is_stuck or self._old.wait(_ANSWERED_POLL_S) or cancelled():
                return

    def finish(self, cancelled: Callable[[], bool]) -> None:
        """End the one before, and remove what it had."""
        self._old.stop(END_S, hurried=cancelled)
        self._sockets.remove()
        shutil.rmtree(self._old_folders.backends, ignore_errors=True)
        # Without the folder of the first server, the workspace would count as removed, and be written anew.
        with contextlib.suppress(FileNotFoundError):
            self._workspace.backends_path.mkdir(mode=0o700, exist_ok=True)
        self._old_control.close()
