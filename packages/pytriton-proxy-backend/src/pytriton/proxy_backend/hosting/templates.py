"""Which hosts are forked from a template, and which are started anew.

A command that serves forks a template from itself before it has a second thread, see `template_main.early_template`.
That one shares its memory with the command, so every host that it fits is forked from it, the only one, too.
"""

from __future__ import annotations

import logging
import threading

from ..process.child import Launch, StartedProcess, start_process
from ..process.template import Template, TemplateLostError

__all__ = ["OWN_LAUNCH", "Templates", "keep_early", "let_go_early"]

OWN_LAUNCH = Launch(environment={"PYTHONDONTWRITEBYTECODE": "1"})
"""How hosts are started of models that name no environment.

Nothing is written into the repository, where a server that polls it would take that for a change.
"""

logger = logging.getLogger(__name__)

# With so many hosts, a template takes less memory than it saves.
_LEAST = 3
# Somebody who ends templates may end the next one, too.
_TRIES = 2
# The template that this process has forked from itself.
_early: list[tuple[Launch, Template]] = []


def keep_early(launch: Launch, template: Template) -> None:
    """Have the hosts of all supervisors of this process forked from a template.

    Args:
        launch: How those hosts are started otherwise.
        template: The template; who has made it closes it.
    """
    _early.append((launch, template))


def let_go_early(template: Template) -> None:
    """Have no more hosts forked from it."""
    _early[:] = [each for each in _early if each[1] is not template]


class Templates:
    """The templates of the hosts of one supervisor: one for each way to start hosts of which there are several.

    A template takes as much memory as a host that has nothing to do, and a host that is forked takes a quarter of that
    for itself. So a host that is to be the only one is started anew where there is no early template, as is one that no
    template can be had for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # All that follows is guarded by the lock.
        self._templates: list[tuple[Launch, Template]] = []
        self._refused: list[Launch] = []
        self._users: list[Launch] = []

    def add_user(self, launch: Launch) -> None:
        """Note that there is one more host."""
        with self._lock:
            self._users.append(launch)

    def remove_user(self, launch: Launch) -> None:
        """Note that a host is gone for good; with the last one goes its template."""
        with self._lock:
            self._users.remove(launch)
            if launch in self._users:
                return
            unused = [template for each, template in self._templates if each == launch]
            self._templates = [each for each in self._templates if each[0] != launch]
            self._refused = [each for each in self._refused if each != launch]
        for template in unused:
            template.close()

    def start(self, launch: Launch, channel: int, job: int, label: str, *, is_one_of_many: bool) -> StartedProcess:
        """Start a host; as `start_process`.

        Args:
            launch: How to start it.
            channel: The descriptor of its channel.
            job: The descriptor of its job.
            label: What it is.
            is_one_of_many: Whether its model has several instances.

        Raises:
            OSError: It cannot be started.
        """
        for _ in range(_TRIES):
            template = self._find(launch, is_one_of_many)
            if template is None:
                break
            try:
                return template.fork(channel, job, label)
            except TemplateLostError:
                # Others may live by it. Where it has ended, so has whatever it has forked.
                if not template.has_ended():
                    raise
                self._remove(template)
        return start_process(launch, channel, job, label)

    def _remove(self, template: Template) -> None:
        with self._lock:
            self._templates = [each for each in self._templates if each[1] is not template]
        let_go_early(template)
        template.close()

    def _find(self, launch: Launch, is_one_of_many: bool) -> Template | None:
        # Others that need one wait for the one that is just started.
        with self._lock:
            for each, template in (*_early, *self._templates):
                if each == launch:
                    # Its forks have its environment, whatever has become of that of this process since.
                    return template if template.variables == launch.variables() else None
            if not (is_one_of_many or self._users.count(launch) >= _LEAST) or launch in self._refused:
                return None
            template = Template(launch)
            try:
                template.start()
            except OSError as error:
                # What keeps it from starting keeps a host as well, which says more about it.
                logger.debug("Hosts are started one by one: %s", error)
                self._refused.append(launch)
                return None
            self._templates.append((launch, template))
            return template
