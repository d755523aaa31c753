"""Load and unload our models on somebody else's server, together with other processes that serve them."""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.proxy_backend import LIBRARY_NAME, library_path
from pytriton.server.control.http import Control, ControlError, ModelUpload
from pytriton.server.lifecycle.deployment import Deployment, StopWanted
from pytriton.server.lifecycle.orphans import has_others
from pytriton.server.models.service import WorkerService
from pytriton.server.remote.sharing import (
    DIGEST_PARAMETER,
    ENDPOINT_PARAMETER,
    REPLACED_PARAMETER,
    Membership,
    ModelOnServer,
    ServerProcessWatch,
    load_lock,
    models_digest,
)
from pytriton.server.workspace import remove_abandoned

LOAD_DEADLINE_S = 60.0
"""How long a server may take to load or unload a model, in seconds."""

_POLL_S = 0.1
# How long the last process that serves a model may take to unload it.
_LEAVING_DEADLINE_S = 10.0
# A server that was started with another --model-control-mode says this.
_NOT_EXPLICIT = "explicit model load / unload is not allowed"

logger = logging.getLogger(__name__)


class RemoteModels:
    """The names on one server under which models of this process are served; it is a `deployment.Deployer`."""

    def __init__(
        self, control: Control, url: str, deployment: Callable[[], Deployment], *, replace_models: bool
    ) -> None:
        self._control = control
        self._url = url
        self._get_deployment = deployment
        self._replace_models = replace_models
        # For each name that may be loaded: an identifier of its configuration, and a number that grows when Triton has
        # to load all versions again.
        self._revisions: dict[str, tuple[str, int]] = {}
        # For each name: the shared lock of this process, and a watch of the server process that has loaded it.
        self._memberships: dict[str, Membership] = {}
        self._servers: dict[str, ServerProcessWatch] = {}
        # The server's report for each name, which holds until somebody replaces the model.
        self._deployed: dict[str, ModelOnServer] = {}
        # Names that replaced a model of the server's repository, which is restored at the end.
        self._replaced: set[str] = set()

    @property
    def _deployment(self) -> Deployment:
        return self._get_deployment()

    def claim(self, model: WorkerService) -> None:
        """Make sure that a model may get its name, and find out whether another process has loaded the same already."""
        name = model.name
        model.shared_endpoint = None
        if any(other.name == name for other in self._deployment.models):
            self._refuse_shared(name)
            return
        there = self._find(model)
        if model.shared_endpoint is None:
            if there is not None and not self._replace_models:
                raise PyTritonInvalidOperationError(
                    f"The server at {self._url} has a model {name!r} that was not bound here, and that is "
                    "not the same: to serve a model together, name, version, tensors and configuration have to agree. "
                    "Bind under another name, or make RemoteTriton with replace_models=True if that one may be "
                    "replaced, for example because the process that served it has died."
                )
            if there is not None and (there.has_replaced or self._is_in_repository(name, there)):
                self._replaced.add(name)
            self._revisions[name] = (secrets.token_hex(4), 0)

    def _is_in_repository(self, name: str, there: ModelOnServer) -> bool:
        """Return whether the server can load a name again by itself; it cannot if a client sent the files."""
        return there.digest is None and any(state.name == name and state.is_loaded for state in self._control.index())

    def deploy(self, name: str, models: Sequence[WorkerService], timeout_s: float) -> bool:
        """Make the server serve these versions under a name, and no others; see `deployment.Deployer`."""
        if not models:
            return self._unload(name, timeout_s)
        if len(models) == 1 and models[0].shared_endpoint is not None:
            # Another process has loaded the model.
            return True
        self._refuse_shared(name)
        origin, number = self._revisions[name]
        number = max([number, *(model.generation for model in models)])
        folder = self._deployment.endpoints
        membership = self._memberships.get(name)
        if membership is None or membership.folder != folder:
            self._memberships[name] = Membership(folder, name)
            if membership is not None:
                membership.close()
                remove_abandoned(membership.folder.parent)
        self._load(name, models, f"{origin}.{number}", timeout_s)
        self._revisions[name] = (origin, number)
        return True

    def has_others(self, names: Collection[str]) -> bool:
        """Return whether the server has, or may have, models beside these."""
        return has_others(self._control, names)

    def reconcile(self, name: str, *, was_unreachable: bool, stop_wanted: StopWanted) -> bool:
        """Load a name again if this process is responsible for it; return whether its workers will attach."""
        models = [model for model in self._deployment.models if model.name == name]
        membership = self._memberships[name]
        with load_lock(membership.folder, name, _LEAVING_DEADLINE_S) as is_acquired:
            there = self._served(name) if is_acquired else None
            if there is not None and there.endpoint is not None:
                if there.endpoint in self._endpoints_of(name):
                    for model in models:
                        if not model.workers.are_there:
                            # The memory budget had no room when they were to start at this socket.
                            self._deployment.move_workers(model, model.shared_endpoint, stop_wanted)
                    return True
                if len(models) == 1 and there.digest == self._digest(models) and self._join(models[0], there):
                    # Two processes loaded the name, and the other one was later.
                    self._deployment.move_workers(models[0], there.endpoint, stop_wanted)
                    return True
                return False
            if there is not None or not is_acquired:
                return False
            if not was_unreachable and not self._has_ended(name):
                # Somebody has unloaded it.
                return False
            logger.info("The server at %s was started again: model %s is loaded again.", self._url, name)
            self._load(name, models, f"{secrets.token_hex(4)}.0", LOAD_DEADLINE_S)
            return True

    def _has_ended(self, name: str) -> bool:
        """Return whether the server that had a model has ended, even if another one replaced it at once."""
        watch = self._servers.get(name)
        if watch is not None and watch.has_ended:
            return True
        # The process may have ended before it could be watched. Unloading a model removes its socket.
        return any(map(os.path.lexists, self._endpoints_of(name)))

    def forget_all(self) -> None:
        """Release all names without asking the server."""
        for name in list(self._memberships):
            self._forget(name)

    def _served(self, name: str) -> ModelOnServer | None:
        """Return the model of a name on the server; None if there is none."""
        is_ready = self._control.is_model_ready(name)
        try:
            # Asked even if the model is not ready, because newer servers say so of models without workers.
            return ModelOnServer.from_config(self._control.model_config(name))
        except ControlError as error:
            if error.reason is None:
                raise
            logger.debug("The server does not tell the configuration of %r: %s", name, error)
        is_there = is_ready or any(state.name == name for state in self._control.index())
        return ModelOnServer(None, None) if is_there else None

    def _find(self, model: WorkerService) -> ModelOnServer | None:
        """Return the model that already has the name; join it if a live process bound the same."""
        deadline = time.monotonic() + _LEAVING_DEADLINE_S
        while (there := self._served(model.name)) is not None and there.digest == self._digest([model]):
            if there.endpoint is not None and not os.path.lexists(there.endpoint):
                # The process that loaded it has died, and its files are removed.
                return None
            try:
                return there if self._join(model, there) or not there.is_within_reach else None
            except OSError as error:
                # The last process that serves it is about to unload it.
                logger.debug("Model %r cannot be joined: %s", model.name, error)
                if time.monotonic() >= deadline:
                    return there
                time.sleep(_POLL_S)
        return there

    def _join(self, model: WorkerService, there: ModelOnServer) -> bool:
        """Let a model use the socket of another process that has loaded it; False if there is none."""
        name = model.name
        if there.endpoint is None or not there.is_within_reach:
            return False
        membership = Membership(there.endpoint.parent, name)
        is_shared = membership.is_shared()
        if not is_shared or self._served(name) != there:
            membership.close()
            if is_shared:
                raise FileNotFoundError(f"{there.endpoint} is not that of the model any more")
            return False
        logger.info("Model %s is on the server already, bound by another process: both serve it from now on.", name)
        old = self._memberships.pop(name, None)
        if old is not None:
            old.close()
        self._memberships[name] = membership
        if there.has_replaced:
            self._replaced.add(name)
        self._revisions.setdefault(name, (secrets.token_hex(4), 0))
        self._deployed[name] = there
        model.shared_endpoint = there.endpoint
        self._watch_server(model)
        return True

    def _unload(self, name: str, timeout_s: float) -> bool:
        membership = self._memberships.get(name)
        if membership is None:
            # The name was never loaded.
            self._forget(name)
            return True
        if not membership.try_upgrade():
            self._forget(name)
            return False
        try:
            # If another process has replaced the model meanwhile, that one stays.
            if self._served(name) == self._deployed.get(name) and not self._restore_original(name, timeout_s):
                self._control.unload(name, timeout_s)
        except BaseException:
            with contextlib.suppress(BlockingIOError):
                membership.downgrade()
            raise
        self._forget(name)
        return True

    def _restore_original(self, name: str, timeout_s: float) -> bool:
        """Load the model of the server's own that had the name before; return whether that could be done."""
        if name not in self._replaced:
            return False
        try:
            # The server loads it beside our model, which answers its requests and is then unloaded, so no request is
            # lost.
            self._control.load(name, timeout_s)
        except ControlError as error:
            logger.warning(
                "The model %r of the server at %s, which was replaced by one from here, cannot be put back: %s",
                name, self._url, error,
            )  # fmt: skip
            return False
        logger.info("The server at %s serves its own model %s again.", self._url, name)
        return True

    def _endpoints_of(self, name: str) -> list[Path]:
        return [model.endpoint(self._deployment.endpoints) for model in self._deployment.models if model.name == name]

    def _forget(self, name: str) -> None:
        self._revisions.pop(name, None)
        self._replaced.discard(name)
        membership = self._memberships.pop(name, None)
        self._deployed.pop(name, None)
        if membership is not None:
            membership.close()
            # The process that made the folder may have left before.
            remove_abandoned(membership.folder.parent)
        watch = self._servers.pop(name, None)
        if watch is not None:
            watch.close()

    def _refuse_shared(self, name: str) -> None:
        membership = self._memberships.get(name)
        if membership is not None and membership.is_shared():
            raise PyTritonInvalidOperationError(
                f"Model {name!r} is served by another process, too, so its versions, tensors and configuration cannot "
                "be changed from here alone. Change the callable alone, or unbind it in all other processes first."
            )

    def _load(self, name: str, models: Sequence[WorkerService], revision: str, timeout_s: float) -> None:
        endpoint = models[0].endpoint(self._deployment.endpoints) if len(models) == 1 else None
        self._deployed[name] = ModelOnServer(endpoint, self._digest(models), name in self._replaced)
        try:
            self._control.load(name, timeout_s, self._upload(models, revision))
        except ControlError as error:
            if error.reason is None or _NOT_EXPLICIT not in error.reason:
                raise
            advice = f"{error.reason}. Start the server with --model-control-mode=explicit: it runs with none or poll"
            raise ControlError(advice, reason=advice, status=error.status) from error
        self._watch_server(models[0])

    def _watch_server(self, model: WorkerService) -> None:
        watch = self._servers.pop(model.name, None)
        if watch is not None:
            watch.close()
        self._servers[model.name] = ServerProcessWatch(model.endpoint(self._deployment.endpoints))

    def _digest(self, models: Sequence[WorkerService]) -> str:
        return models_digest(models, self._deployment.cache_bytes)

    def _upload(self, models: Sequence[WorkerService], revision: str) -> ModelUpload:
        files = {LIBRARY_NAME: library_path().read_bytes()}
        for model in models:
            model.definition.warn_without_cache(
                self._deployment.cache_bytes, "RemoteTriton(response_cache_bytes=<bytes>)"
            )
            for name, text in self._deployment.side_files(model):
                files[f"{model.version}/{name}"] = text.encode()
        # Triton only compares the configuration to decide whether to load a version again.
        parameters = {"pytriton_revision": revision, DIGEST_PARAMETER: self._digest(models)}
        if models[0].name in self._replaced:
            parameters[REPLACED_PARAMETER] = "true"
        if len(models) == 1:
            parameters[ENDPOINT_PARAMETER] = str(models[0].endpoint(self._deployment.endpoints))
        return ModelUpload(models[0].definition.config_json(parameters), files)
