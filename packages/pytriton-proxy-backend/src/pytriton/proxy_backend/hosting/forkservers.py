"""Which hosts are forked from a forkserver, and which are started anew.

A command that serves forks a forkserver from itself before it has a second thread (`forkserver_main.early_forkserver`).
This early forkserver shares its memory with the command, so every host with the same launch is forked from it, even a
single one.
"""

from __future__ import annotations

import logging
import threading

from ..process.child import Launch, StartedProcess, start_process
from ..process.forkserver import Forkserver, ForkserverLostError

OWN_LAUNCH = Launch(environment={"PYTHONDONTWRITEBYTECODE": "1"})
"""How hosts are started of models that name no environment.

Nothing is written into the repository, where a server that polls it would take that for a change.
"""

logger = logging.getLogger(__name__)

# From this number of hosts on, a forkserver saves more memory than it takes.
_LEAST = 3
# Something kills the forkservers if the second one dies as well, so there is no third.
_TRIES = 2
# The forkserver that this process has forked from itself.
_early: list[tuple[Launch, Forkserver]] = []


def keep_early(launch: Launch, forkserver: Forkserver) -> None:
    """Make the supervisors of this process fork such hosts from a forkserver; its maker closes it."""
    _early.append((launch, forkserver))


def let_go_early(forkserver: Forkserver) -> None:
    """Have no more hosts forked from it."""
    _early[:] = [each for each in _early if each[1] is not forkserver]


class Forkservers:
    """The forkservers of the hosts of one supervisor: one for each way to start hosts of which there are several.

    A forkserver takes as much memory as an idle host, and a forked host takes a quarter of that for itself. So a single
    host is started anew if there is no early forkserver; so is a host whose forkserver cannot be started.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The lock guards all that follows.
        self._forkservers: list[tuple[Launch, Forkserver]] = []
        self._refused: list[Launch] = []
        self._users: list[Launch] = []

    def add_user(self, launch: Launch) -> None:
        """Note that there is one more host."""
        with self._lock:
            self._users.append(launch)

    def remove_user(self, launch: Launch) -> None:
        """Note that a host is gone for good; with the last one goes its forkserver."""
        with self._lock:
            self._users.remove(launch)
            if launch in self._users:
                return
            unused = [forkserver for each, forkserver in self._forkservers if each == launch]
            self._forkservers = [each for each in self._forkservers if each[0] != launch]
            self._refused = [each for each in self._refused if each != launch]
        for forkserver in unused:
            forkserver.close()

    def start(self, launch: Launch, channel: int, job: int, label: str, *, is_one_of_many: bool) -> StartedProcess:
        """Start a host; as `start_process`."""
        for _ in range(_TRIES):
            forkserver = self._find(launch, is_one_of_many)
            if forkserver is None:
                break
            try:
                return forkserver.fork(channel, job, label)
            except ForkserverLostError:
                # A forkserver that lives may have other forks; one that has ended took them along.
                if not forkserver.has_ended():
                    raise
                self._remove(forkserver)
        return start_process(launch, channel, job, label)

    def _remove(self, forkserver: Forkserver) -> None:
        with self._lock:
            self._forkservers = [each for each in self._forkservers if each[1] is not forkserver]
        let_go_early(forkserver)
        forkserver.close()

    def _find(self, launch: Launch, is_one_of_many: bool) -> Forkserver | None:
        # Hosts that need a forkserver wait for one that is being started.
        with self._lock:
            for each, forkserver in (*_early, *self._forkservers):
                if each == launch:
                    # Its forks have its environment, so a later change in this process makes it useless.
                    return forkserver if forkserver.variables == launch.variables() else None
            if not (is_one_of_many or self._users.count(launch) >= _LEAST) or launch in self._refused:
                return None
            forkserver = Forkserver(launch)
            try:
                forkserver.start()
            except OSError as error:
                # The same problem will stop the host as well, with a better error.
                logger.debug("Hosts are started one by one: %s", error)
                self._refused.append(launch)
                return None
            self._forkservers.append((launch, forkserver))
            return forkserver
