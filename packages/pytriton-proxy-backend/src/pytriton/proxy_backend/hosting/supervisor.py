"""The supervisor: starts hosts for the Python models of one server, and sees to their end."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import logging
import math
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import AttachError, HostingError
from ..model import MAX_ENDPOINT_BYTES
from ..process.budget import Account, MemoryBudget, NoRoomError, WakeCounts
from ..process.child import Launch
from ..process.host_process import FINALIZE_TIMEOUT_S, HostProcess
from ..process.log import WORKER_LOGGER
from ..process.messages import PythonModelJob
from ..process.sleep import Sleep, are_up
from ..system.forks import call_in_child, close_in_child, replace_descriptors
from ..system.peers import peer_credentials
from ..system.shortage import explain
from ..system.threads import keep_on
from .control import ControlError, Frame, FrameKind, has_ended, receive_frame, send_frame
from .environments import Environments, ModelRefused
from .forkservers import Forkservers
from .models import IdleRule, PythonModel, settings_text

__all__ = ["FINALIZE_TIMEOUT_S", "SOCKET_NAME", "HostSupervisor", "ServingHost", "check_folder"]

SOCKET_NAME = "hosts.sock"
"""Name of the socket in the folder of a supervisor."""

_STOPPED = "processes of Python models are being stopped"
# The names of instances' sockets, which tritonserver makes, and of folders with unpacked environments. The first part
# is new for each supervisor, because older sockets may still be in use.
_INSTANCE = re.compile(r"[0-9a-f]{6}-\d+\.\d+")
_ENVIRONMENTS = "environments-"
# The longest name of an instance's socket with the slash: a million models, a hundred instances.
_MAX_NAME = 18
_BACKLOG = 128
_POLL_S = 0.2
# The pause after a connection could not be accepted.
_PAUSE_S = 0.5
_JOIN_S = 20.0
# How long a host waits at most until others have made room for it.
_ROOM_S = 60.0
# The time for what a model does after its last answer.
_ABANDONED_S = 1.0
_FIELDS: dict[int, int] = {FrameKind.MODEL: 8, FrameKind.INSTANCE: 5}

logger = logging.getLogger(__name__)


@dataclass
class _Loaded:
    """A model whose instances may be asked for."""

    model: PythonModel
    config: str  # its configuration, completed
    idle: IdleRule  # when the hosts of its instances sleep
    spare: HostProcess | None  # the host that has completed the configuration, until an instance takes it
    wakes: WakeCounts = field(default_factory=WakeCounts)  # how its instances were woken
    numbers: itertools.count[int] = field(default_factory=itertools.count)  # numbers for its hosts


@dataclass(frozen=True)
class ServingHost:
    """A host that has served its instance, for those who count."""

    model_name: str  # the model
    model_version: int  # its version
    decoupled: bool  # whether a request of it may get any number of responses
    number: int  # which of the model's hosts it is, from 0 on
    host: HostProcess  # its processes, one after the other
    account: Account  # the same, as the budget sees them
    budget: MemoryBudget  # where they get their memory


class HostSupervisor:
    """Starts a host for each instance of a Python model, when the library inside tritonserver asks for one."""

    def __init__(
        self,
        folder: Path,
        advice: str = "",
        *,
        idle_timeout_s: float | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        """Prepare it; nothing happens before `start`.

        Its socket will lie in `folder`; `advice` ends the error if it cannot. The host of an instance sleeps after
        `idle_timeout_s` seconds without a request if its model says nothing about that; all get their memory from
        `budget`.
        """
        self._folder = folder
        self._advice = advice
        self._idle_timeout_s = idle_timeout_s
        self._budget = MemoryBudget() if budget is None else budget
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._lock_fd: int | None = None
        self._token = secrets.token_hex(3)
        self._numbers = itertools.count(1)
        self._environments = Environments(folder / f"{_ENVIRONMENTS}{self._token}")
        self._forkservers = Forkservers()
        self._lock = threading.Lock()
        # The lock guards all that follows.
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._models: dict[str, _Loaded] = {}
        self._hosts: dict[HostProcess, Launch] = {}
        self._serving: dict[HostProcess, ServingHost] = {}
        self._is_stopping = False
        self._is_cut = False
        self._deadline: float | None = None
        call_in_child(self, HostSupervisor._release_in_child)

    @property
    def socket_path(self) -> Path:
        """The path of the socket on which it listens."""
        return self._folder / SOCKET_NAME

    def start(self) -> None:
        """Make the folder and listen."""
        self._listener = self._listen()
        self._thread = threading.Thread(target=self._accept, name="pytriton-hosts", daemon=True)
        self._thread.start()

    def restore(self) -> None:
        """Make the folder again if somebody has removed it, and listen there; hosts go on."""
        self._let_go_folder()
        old, self._listener = self._listener, self._listen()
        if old is not None:
            # This wakes the thread that waits there.
            with contextlib.suppress(OSError):
                old.shutdown(socket.SHUT_RD)
            old.close()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_folder()
            # The file gets the permissions of the descriptor when bind makes it.
            os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)
            listener.bind(str(self.socket_path))
            listener.listen(_BACKLOG)
        except (OSError, HostingError) as error:
            listener.close()
            self._let_go_folder()
            if isinstance(error, HostingError):
                raise
            raise HostingError(
                f"The socket {self.socket_path} for the processes of Python models cannot be made: "
                + explain(error, self._advice),
                path=str(self.socket_path),
            ) from error
        close_in_child(listener)
        return listener

    def serving(self) -> list[ServingHost]:
        """Return the hosts of the instances that are loaded. From any thread."""
        with self._lock:
            return list(self._serving.values())

    def stop_loading(self) -> None:
        """End the hosts that are still loading, and start none from now on."""
        with self._lock:
            self._is_stopping = True

    def cut(self) -> None:
        """Make all hosts end, because nobody needs their results; `close` has to follow.

        A caller that still waits gets an error within a second.
        """
        with self._lock:
            self._is_stopping = self._is_cut = True
        self._end_connections()

    def close(self, timeout_s: float) -> None:
        """End all hosts and release everything. `timeout_s` covers requests in flight and `finalize`."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self.stop_loading()
        with self._lock:
            self._deadline = time.monotonic() + timeout_s
            hosts = list(self._hosts)
        connections = self._end_connections(listener)
        for host in hosts:
            # Their threads may stop them with longer limits; a second call can only shorten them.
            host.stop(self._patience_s(), in_flight_s=self._in_flight_s())
        for thread in (self._thread, *connections):
            if thread is not None:
                thread.join(_JOIN_S)
        listener.close()
        shutil.rmtree(self._folder / f"{_ENVIRONMENTS}{self._token}", ignore_errors=True)
        self.socket_path.unlink(missing_ok=True)
        _remove_dead_sockets(self._folder)
        self._let_go_folder()

    # ---- the folder -------------------------------------------------------------------------------------------------

    def _take_folder(self) -> None:
        """Take over the folder, and remove what a killed supervisor left; raise an error if another one uses it."""
        self._lock_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HostingError(
                f"Another process listens at {self.socket_path} already, and serves all models that ask there.",
                path=str(self.socket_path),
            ) from error
        except OSError as error:
            logger.debug("%s cannot be locked: %s", self._folder, error)
        if self.socket_path.exists() and not self.socket_path.is_socket():
            raise HostingError(
                f"{self.socket_path} exists and is no socket: remove it, if nobody needs it, or choose another folder.",
                path=str(self.socket_path),
            )
        self.socket_path.unlink(missing_ok=True)
        _remove_dead_sockets(self._folder)
        for left in self._folder.glob(f"{_ENVIRONMENTS}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _let_go_folder(self) -> None:
        descriptor, self._lock_fd = self._lock_fd, None
        if descriptor is not None:
            os.close(descriptor)

    def _release_in_child(self) -> None:
        replace_descriptors([self._lock_fd])

    # ---- connections ------------------------------------------------------------------------------------------------

    def _end_connections(self, *others: socket.socket) -> list[threading.Thread]:
        """Make the threads of all connections, and of other sockets, see their end; return those threads."""
        with self._lock:
            for channel in (*others, *self._connections.values()):
                with contextlib.suppress(OSError):
                    channel.shutdown(socket.SHUT_RD)
            return list(self._connections)

    def _accept(self) -> None:
        while (listener := self._listener) is not None and self._deadline is None:
            # Descriptors or threads may be used up for a while.
            if not keep_on(functools.partial(self._accept_one, listener), "A Python model cannot be served"):
                time.sleep(_PAUSE_S)

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            channel, _ = listener.accept()
        except OSError:
            if self._deadline is None and listener is self._listener:
                raise
            return
        close_in_child(channel)
        thread = threading.Thread(target=self._serve, args=(channel,), name="pytriton-host-control", daemon=True)
        with self._lock:
            try:
                if self._deadline is None:
                    thread.start()
                    self._connections[thread] = channel
                    return
            except BaseException:
                channel.close()
                raise
        channel.close()

    def _serve(self, channel: socket.socket) -> None:
        """Serve the requests of one connection until its end."""
        try:
            _check_peer(channel)
            frame = receive_frame(channel)
            if frame is None:
                return
            try:
                if frame.kind == FrameKind.MODEL:
                    self._serve_model(channel, _checked(frame))
                else:
                    self._serve_instance(channel, _checked(frame))
            except ModelRefused as error:
                send_frame(channel, FrameKind.ERROR, [str(error)])
        except (OSError, ControlError) as error:
            logger.error("The connection for a Python model is broken: %s", error)
        except Exception as error:
            logger.exception("A Python model cannot be served")
            with contextlib.suppress(OSError):
                send_frame(channel, FrameKind.ERROR, [f"{type(error).__name__}: {error}"])
        finally:
            with self._lock:
                self._connections.pop(threading.current_thread(), None)
            channel.close()

    def _serve_model(self, channel: socket.socket, fields: tuple[str, ...]) -> None:
        model = PythonModel.announced(fields, self._environments)
        endpoint = self._folder / f"{self._token}-{next(self._numbers)}"
        spare: HostProcess | None = None
        try:
            completed = ""
            if model.completes:
                spare = self._start(model, model.completion_job(_log_level(model, 0)), 0)
                self._wait(channel, spare, spare.wait_configured)
                completed = spare.completed_config
            config = completed or model.config
            loaded = _Loaded(model, config, IdleRule.of(config, self._idle_timeout_s), spare)
            if loaded.idle.why_not is not None:
                logger.info("Model %r stays awake when it is idle: %s", model.name, loaded.idle.why_not)
            with self._lock:
                self._models[str(endpoint)] = loaded
            send_frame(channel, FrameKind.OK, [completed, settings_text(loaded.config, endpoint)])
            _wait_end(channel)
        finally:
            with self._lock:
                unloaded = self._models.pop(str(endpoint), None)
            if unloaded is not None:
                spare = unloaded.spare
            if spare is not None:
                self._stop(spare)

    def _serve_instance(self, channel: socket.socket, fields: tuple[str, ...]) -> None:
        model_endpoint, instance, kind, device, endpoint = fields
        with self._lock:
            loaded = self._models.get(model_endpoint)
            host, number = None, 0
            if loaded is not None:
                host, loaded.spare = loaded.spare, None
                number = next(loaded.numbers)
        if loaded is None:
            raise ModelRefused(f"instance '{instance}' is of a model that is not loaded: {model_endpoint}")
        model, idle, sleep = loaded.model, loaded.idle, None
        serving = model.serving(loaded.config, instance, kind, device, endpoint)
        hosts = [] if host is None else [host]
        account = Account(
            model.name,
            pids=lambda: [pid for each in hosts if (pid := each.pid) is not None],
            is_up=lambda: are_up(hosts),
            wakes=loaded.wakes,
        )
        can_sleep = idle.idle_timeout_s is not None or (idle.can_sleep and self._budget.limit_bytes is not None)
        if can_sleep:
            # While it loads, it is one of those that sleep later: others wait for that.
            account.ask_to_sleep = _not_yet
        try:
            self._budget.open(account)
            self._admit(channel, account)
            if host is None:
                job = model.serving_job(serving, _log_level(model, number))
                host = self._start(model, job, number)
                hosts.append(host)
            else:
                host.serve(serving)
            self._wait(channel, host, host.wait_serving)
            self._budget.arrive(account, woken=False)
            self._budget.check(account)
            spec = model.spec(loaded.config)
            with self._lock:
                self._serving[host] = ServingHost(
                    model.name, model.version, spec.decoupled, number, host, account, self._budget
                )
            if can_sleep:
                timeouts_s = idle.idle_timeout_s, idle.attach_timeout_s
                sleep = Sleep(spec, Path(endpoint), *timeouts_s, self._budget, account, instance=instance)
                sleep.add(host)
                sleep.start()
            send_frame(channel, FrameKind.OK)
            _wait_end(channel)
        except NoRoomError as error:
            raise ModelRefused(str(error)) from error
        finally:
            if sleep is not None:
                sleep.cut()
            if host is not None:
                self._stop(host)
            if sleep is not None:
                sleep.stop()
            self._budget.close(account)
            # A server that lives removes it itself, or asks again.
            _remove_if_dead(Path(endpoint))

    # ---- hosts ------------------------------------------------------------------------------------------------------

    def _admit(self, channel: socket.socket, account: Account) -> None:
        """Wait until there is memory for a host, as long as the server wants it."""
        if not self._budget.admit(account, _ROOM_S, lambda: self._is_stopping or has_ended(channel), after_starts=True):
            raise ModelRefused(_STOPPED)

    def _start(self, model: PythonModel, job: PythonModelJob, number: int) -> HostProcess:
        start = functools.partial(self._forkservers.start, is_one_of_many=model.has_many_instances)
        host = HostProcess(job, number, launch=model.launch, start=start, start_timeout_s=model.start_timeout_s)
        with self._lock:
            if self._is_stopping:
                raise ModelRefused(_STOPPED)
            self._hosts[host] = model.launch
            self._forkservers.add_user(model.launch)
        host.start()
        return host

    def _stop(self, host: HostProcess) -> None:
        host.stop(self._patience_s(), in_flight_s=self._in_flight_s())
        with self._lock:
            self._serving.pop(host, None)
            launch = self._hosts.pop(host, None)
        if launch is not None:
            self._forkservers.remove_user(launch)

    def _patience_s(self) -> float:
        deadline = self._deadline
        left = FINALIZE_TIMEOUT_S if deadline is None else deadline - time.monotonic()
        return max(0.0, min(left, FINALIZE_TIMEOUT_S))

    def _in_flight_s(self) -> float:
        # Triton releases an instance when its requests are answered, so what is in flight then has no caller.
        return _ABANDONED_S if self._is_cut or self._deadline is None else math.inf

    def _wait(self, channel: socket.socket, host: HostProcess, step: Callable[[float], bool]) -> None:
        """Wait until a host has done a step, as long as the server wants it."""
        try:
            while not step(_POLL_S):
                if self._is_stopping or has_ended(channel):
                    # Its result is not needed, and it may never end.
                    host.stop(0.0)
                    raise ModelRefused(_STOPPED)
        except AttachError as error:
            raise ModelRefused(host.load_error or str(error)) from error


def check_folder(folder: Path) -> None:
    """Check that the sockets of a supervisor can lie in a folder."""
    length, most = len(os.fsencode(folder)), MAX_ENDPOINT_BYTES - _MAX_NAME
    if length > most:
        raise HostingError(
            f"expected a folder whose path has {most} bytes at most, because that of a unix socket in it has "
            f"{MAX_ENDPOINT_BYTES}, got one of {length}: {folder}. Choose a shorter one (--endpoint)",
            path=str(folder),
        )


def _check_peer(channel: socket.socket) -> None:
    uid = peer_credentials(channel).uid
    if uid != os.getuid():
        raise ControlError(f"expected a process of user {os.getuid()}, got one of user {uid}")


def _checked(frame: Frame) -> tuple[str, ...]:
    if len(frame.fields) != _FIELDS.get(frame.kind):
        known = ", ".join(f"kind {int(kind)} with {count}" for kind, count in _FIELDS.items())
        raise ModelRefused(
            f"expected a question of {known} fields, got kind {frame.kind} with {len(frame.fields)}: the library in "
            "the server and the process that supervises Python models are of different versions. Where the model "
            "was converted, write it anew with `pytriton-proxy-backend convert --replace`"
        )
    return frame.fields


def _remove_dead_sockets(folder: Path) -> None:
    """Remove the sockets of instances of servers that were killed."""
    # If the folder was removed, there is nothing.
    for path in folder.glob("*"):
        if _INSTANCE.fullmatch(path.name):
            _remove_if_dead(path)


def _not_yet() -> None:
    """Do nothing: a host that loads cannot sleep."""


def _remove_if_dead(path: Path) -> None:
    # A socket of another type: connecting fails with a different error if somebody listens.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            # Somebody listens there, or the socket is gone.
            return


def _wait_end(channel: socket.socket) -> None:
    """Wait until the other side closes the connection."""
    if channel.recv(1):
        raise ControlError("expected nothing more, got something")


def _log_level(model: PythonModel, number: int) -> int:
    return logging.getLogger(f"{WORKER_LOGGER}{model.name}.{number}").getEffectiveLevel()
