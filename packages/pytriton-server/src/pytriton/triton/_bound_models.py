"""The bound models of one `Triton` or `RemoteTriton`, by name and version."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytriton.exceptions import PyTritonBadParameterError, PyTritonInvalidOperationError
from pytriton.proxy_backend.process.budget import MemoryBudget
from pytriton.server.errors import TritonModelLoadError
from pytriton.server.lifecycle.session import DRAIN_DEADLINE_S, Session
from pytriton.server.models.arguments import Servable
from pytriton.server.models.callers import CallingModel
from pytriton.server.models.notebooks import in_notebook
from pytriton.server.models.service import WorkerService
from pytriton.server.models.workers import StartCancelled
from pytriton.server.settings.memory import MEMORY_BUDGET_VARIABLE

WAIT_FORM_MODEL_TIMEOUT_S = 60.0
"""How long a model may take to load on a running server, in seconds."""

logger = logging.getLogger(__name__)


class BoundModels(dict[tuple[str, int], WorkerService]):
    """Bound models by `WorkerService.key`; callables see them in their `TritonContext`.

    The methods that change something take the session of the running server, or None, and are called by one thread at a
    time.
    """

    def __init__(self, endpoints: Path) -> None:
        super().__init__()
        self._endpoints = endpoints
        # The models of the last stop: a notebook may bind them again.
        self._stopped: set[WorkerService] = set()

    def note_stop(self) -> None:
        """Note that the server of these models has stopped, so that they may be bound again."""
        self._stopped = set(self.values())

    def bind(
        self,
        model: WorkerService,
        session: Session | None,
        *,
        replace: bool,
        taken: Collection[str],
        stop_wanted: Callable[[], bool],
    ) -> bool:
        """Add a model, and serve it if a server runs.

        Returns whether it is new, and did not replace a model of a running server.
        """
        old = self.get(model.key)
        if old is not None and (session is not None or old not in self._stopped):
            if not replace and not in_notebook():
                raise PyTritonInvalidOperationError(
                    "Cannot add model with the same name twice. "
                    f"There is a model {old.name!r} of version {model.version} already: choose another name or version "
                    "(names that differ only in case count as the same), or replace it by rebind() or "
                    "bind(..., replace=True)."
                )
            if not replace:
                print(f"Model {old.name!r} was bound already: it is replaced, as by bind(..., replace=True).")
            model.succeed(old)
            self.replace(old, model, session, drain_timeout_s=DRAIN_DEADLINE_S, stop_wanted=stop_wanted)
            return False
        self.check_same_config(model)
        if model.name.lower() in map(str.lower, taken):
            raise PyTritonInvalidOperationError(
                f"There is a model {model.name!r} already, which is no bound callable: choose another name."
            )
        # Checked before the start, so that a path that is too long for sockets is an error at once.
        model.side_files(self._endpoints)
        if session is not None:
            try:
                session.claim(model)
                session.deployment.load(model, timeout_s=WAIT_FORM_MODEL_TIMEOUT_S, stop_wanted=stop_wanted)
            except StartCancelled:
                raise _stopped_meanwhile(model) from None
        self.put(model)
        model.definition.publish()
        return True

    def rebind(
        self,
        name: str,
        version: int | None,
        session: Session | None,
        served: Servable,
        changes: Mapping[str, Any],
        *,
        drain_timeout_s: float,
        stop_wanted: Callable[[], bool],
    ) -> None:
        """Replace the callable of a model, see `TritonBase.rebind`."""
        candidates = self.find(name, version)
        if len(candidates) > 1:
            versions = sorted(model.version for model in candidates)
            raise PyTritonInvalidOperationError(
                f"Model {name!r} is bound with versions {versions}: say with model_version which of them is "
                "to be replaced."
            )
        old = candidates[0]
        new = old.successor(served, **changes)
        self.replace(old, new, session, drain_timeout_s=drain_timeout_s, stop_wanted=stop_wanted)

    def replace(
        self,
        old: WorkerService,
        new: WorkerService,
        session: Session | None,
        *,
        drain_timeout_s: float,
        stop_wanted: Callable[[], bool],
    ) -> None:
        """Let a model take the place of another one of its name and version."""
        self.check_same_config(new)
        try:
            if session is not None:
                session.deployment.replace(
                    old,
                    new,
                    timeout_s=WAIT_FORM_MODEL_TIMEOUT_S,
                    drain_timeout_s=drain_timeout_s,
                    stop_wanted=stop_wanted,
                )
        except StartCancelled:
            raise _stopped_meanwhile(new) from None
        finally:
            if session is None or new in session.deployment.models:
                self.put(new)
        logger.info("Model %s (version %d) is served by another callable now.", new.name, new.version)

    def unbind(
        self,
        models: Collection[WorkerService],
        session: Session | None,
        *,
        drain_timeout_s: float,
        stop_wanted: Callable[[], bool],
    ) -> None:
        """Take models of one name away."""
        try:
            if session is not None:
                session.deployment.unload(
                    list(models),
                    timeout_s=WAIT_FORM_MODEL_TIMEOUT_S,
                    drain_timeout_s=drain_timeout_s,
                    stop_wanted=stop_wanted,
                )
        finally:
            self.remove([model for model in models if session is None or model not in session.deployment.models])
        for model in models:
            logger.info("Model %s (version %d) is not served any more.", model.name, model.version)

    def is_alone(self, caller: CallingModel | None, name: str, version: int | None) -> bool:
        """Return whether the calling model is the only one of this name and version."""
        return caller is not None and [each.definition for each in self.find(name, version)] == [caller]

    def find(self, name: str, version: int | None) -> list[WorkerService]:
        """Return the bound versions of a name, or the one that is asked for."""
        models = [
            model
            for model in list(self.values())
            if model.name.lower() == str(name).lower() and version in (None, model.version)
        ]
        if not models:
            what = repr(name) if version is None else f"{name!r} of version {version!r}"
            there = sorted({f"{model.name!r} ({model.version})" for model in self.values()})
            raise PyTritonInvalidOperationError(
                f"There is no model {what}. Bound are: {', '.join(there) or 'none'}. Give the name and version that "
                "were given to bind()."
            )
        return models

    def check_same_config(self, model: WorkerService) -> None:
        """Raise an error if another version of the name has other tensors or another configuration."""
        for other in self.values():
            if other.name != model.name or other.key == model.key:
                continue
            differences = model.definition.differences(other.definition)
            if differences:
                raise PyTritonInvalidOperationError(
                    f"Model {model.name!r}: version {model.version} differs from version {other.version} in "
                    f"{', '.join(differences)}, but Triton keeps one description for all versions of a name. Bind it "
                    "under another name."
                )

    def check_budget(self, budget: MemoryBudget, others: Sequence[str] | None, *, from_environment: bool) -> None:
        """Refuse settings for the memory of worker processes where there are models, and none has such a process.

        Args:
            budget: The settings.
            others: What else is served, without such processes; `None` where something of it has some.
            from_environment: Whether they are for all programs: then they are only a warning.
        """
        if others is None:
            return
        definitions = [model.definition for model in list(self.values())]
        names = [*map(repr, dict.fromkeys(each.name for each in definitions)), *others]
        settings = (
            ("memory_budget", budget.limit_bytes, "has_processes", "is served by processes"),
            ("min_awake", budget.min_awake or None, "is_movable", "may sleep"),
        )
        for name, value, needed, what in settings:
            if value is None or not names:
                continue
            if not any(getattr(each, needed) for each in definitions):
                if from_environment and name == "memory_budget":
                    logger.warning("%s has no effect: none of the bound models %s.", MEMORY_BUDGET_VARIABLE, what)
                    continue
                raise PyTritonBadParameterError(
                    f"{name} is for models in processes of their own, and none of those that are there {what}: "
                    f"{', '.join(names)}. Give them some (ProcessWorker, pytriton serve --workers 1, or "
                    f'TritonConfig(python_models="workers") for a model.py), or leave {name} out. Threads of this '
                    "process, and what Triton runs itself, cannot be ended.",
                    parameter=name,
                    value=value,
                    rule="unset without worker processes",
                )
        uncounted = [*(repr(each.name) for each in definitions if not each.has_processes), *others]
        if budget.limit_bytes is not None and uncounted:
            logger.info("The memory budget does not count %s: no processes of their own.", ", ".join(uncounted))

    def put(self, model: WorkerService) -> None:
        """Add a model, or let it take the place of the one with its key."""
        old = self.get(model.key)
        self[model.key] = model
        if old is not None:
            old.definition.unpublish()
            self._publish_all()

    def remove(self, models: Iterable[WorkerService]) -> None:
        """Remove models."""
        for model in models:
            del self[model.key]
            model.definition.unpublish()
        self._publish_all()

    def _publish_all(self) -> None:
        # A callable that serves several models sees the configuration that was bound last.
        for model in self.values():
            model.definition.publish()


def _stopped_meanwhile(model: WorkerService) -> TritonModelLoadError:
    reason = "the server was stopped in the meantime"
    return TritonModelLoadError(
        f"Model {model.name!r} (version {model.version}) cannot be served: {reason}.",
        model_name=model.name,
        model_version=model.version,
        reason=reason,
    )
