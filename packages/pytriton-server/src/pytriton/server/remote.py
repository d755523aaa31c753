"""Models on a tritonserver that somebody else started on this machine; from the first contact to the end."""

import contextlib
import logging
import os
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from pytriton.client._url import TritonUrl
from pytriton.client.exceptions import PyTritonClientInferenceServerError, PyTritonClientTimeoutError
from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.proxy_backend import LIBRARY_NAME, library_path
from pytriton.server.bound_model import BoundModel
from pytriton.server.control import CALL_TIMEOUT_S, Control, ControlError, HttpControl, ModelUpload
from pytriton.server.errors import TritonServerError, TritonServerExitedError
from pytriton.server.hosting import HURRIED_DEADLINE_S, WORKER_DEADLINE_S, ModelHost
from pytriton.server.ports import Endpoint
from pytriton.server.readiness import StartCancelled
from pytriton.server.security import TRITON_ACCESS_HEADER
from pytriton.server.session import DRAIN_DEADLINE_S
from pytriton.server.settings import TritonConfig
from pytriton.server.sharing import (
    DIGEST_PARAMETER,
    ENDPOINT_PARAMETER,
    Membership,
    ServedModel,
    ServerProcessWatch,
    digest_of,
    exclusively,
)
from pytriton.server.stranded import has_others
from pytriton.server.workspace import Workspace, remove_abandoned

__all__ = ["MISSING_DEADLINE_S", "RemoteSession"]

MISSING_DEADLINE_S = 5.0
"""How long a model may be missing on a server that runs on, in seconds: whoever loads it again needs a moment."""

_POLL_S = 0.1
_LOAD_DEADLINE_S = 60.0
_ANSWER_AGE_S = 1.0
# How long somebody who was the last to serve a model may take to unload it.
_LEAVING_DEADLINE_S = 10.0

logger = logging.getLogger(__name__)


class RemoteSession:
    """One stay of models on a server that somebody else started.

    Triton gets each model with the call that loads it: its configuration, the native proxy backend and the side files.
    The server needs nothing of ours on its disk, and nothing stays there.

    Args:
        url: Where the server listens.
        access_token: The token that its protected endpoints ask for, if they do.
        workspace: The folder for the sockets, which is made by `start` and removed by `close`.
        replace_models: Whether models of the same names that others have put there may be replaced.
        comeback_s: How long the server may be away, in seconds, until it counts as gone.
        on_unrecoverable: Called when a callable raised PyTritonUnrecoverableError.
    """

    def __init__(
        self,
        url: TritonUrl,
        access_token: str | None,
        workspace: Workspace,
        *,
        replace_models: bool,
        comeback_s: float,
        on_unrecoverable: Callable[[BaseException], None],
    ) -> None:
        self._url = url
        self._comeback_s = comeback_s
        self._workspace = workspace
        self._replace_models = replace_models
        self._control = _control(url, access_token)
        self._host = ModelHost(
            self,
            workspace.endpoints_path,
            is_running=self._has_answered,
            log_tail=list,
            on_unrecoverable=on_unrecoverable,
        )
        self._is_up = False
        self._has_started = False
        self._failure: TritonServerError | None = None
        # Of the names that may be loaded and unloaded: what tells their configuration from that of others, and a number
        # that grows when Triton is to load all versions again.
        self._revisions: dict[str, tuple[str, int]] = {}
        # Of the same names: that we are among those who serve them, and the server that has loaded them.
        self._memberships: dict[str, Membership] = {}
        self._servers: dict[str, ServerProcessWatch] = {}
        # What the server tells of them as long as nobody replaces them.
        self._placed: dict[str, ServedModel] = {}
        self.ended = threading.Event()
        """Set by `close`."""
        self._answered_at = 0.0
        self._complete_at = 0.0
        self._away_since: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether the server has got its models and was not found to be gone."""
        return self._has_started and self._is_up and self._failure is None

    @property
    def is_away(self) -> bool:
        """Whether the server does not answer right now, and is expected back."""
        return self._away_since is not None

    @property
    def host(self) -> ModelHost:
        """The models on the server."""
        return self._host

    def start(self, models: Iterable[BoundModel], *, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Waits for the server and loads `models`. After an error, `close` has to follow.

        Args:
            models: The models that are bound already.
            timeout_s: How long the server may take to answer, in seconds.
            cancelled: Asked again and again; True ends the wait.

        Raises:
            StartCancelled: `cancelled` said so.
            PyTritonClientTimeoutError: The server did not answer in time.
            PyTritonClientInferenceServerError: It does not let us see its models, for want of the right token most
                likely.
            PyTritonInvalidOperationError: A model of somebody else has the name of one of ours.
            TritonModelLoadError: It refused a model, or a worker.
            WorkspaceError: The workspace cannot be made.
        """
        self._workspace.create()
        self._wait_listening(timeout_s, cancelled)
        try:
            self._control.index()
        except ControlError as error:
            raise self._unusable(error) from error
        self._is_up = True
        self._complete_at = time.monotonic()
        for model in models:
            self.claim(model)
            self._host.load(model, timeout_s=_LOAD_DEADLINE_S, stop_wanted=cancelled)
        self._has_started = True

    def claim(self, model: BoundModel) -> None:
        """Makes sure that a model may get its name, and finds out whether another process has loaded the same already.

        Raises:
            PyTritonInvalidOperationError: A model of somebody else has it, or another process serves the name as well.
            TritonServerError: The server refused to tell, or did not answer.
        """
        name = model.name
        model.shared_endpoint = None
        if any(other.name == name for other in self._host.models):
            self._refuse_shared(name)
            return
        there = self._find(model)
        if model.shared_endpoint is None:
            if there is not None and not self._replace_models:
                raise PyTritonInvalidOperationError(
                    f"The server at {self._url.with_scheme} has a model {name!r} that was not bound here, and that is "
                    "not the same: to serve a model together, name, version, tensors and configuration have to agree. "
                    "Bind under another name, or make RemoteTriton with replace_models=True if that one may be "
                    "replaced, for example because the process that served it has died."
                )
            self._revisions[name] = (secrets.token_hex(4), 0)

    def place(self, name: str, models: Sequence[BoundModel], timeout_s: float) -> bool:
        """Makes the server serve these versions under a name, and no others; see `hosting.Placement`."""
        if not models:
            return self._take_off(name, timeout_s)
        if len(models) == 1 and models[0].shared_endpoint is not None:
            # Another process has loaded it.
            return True
        self._refuse_shared(name)
        origin, number = self._revisions[name]
        number = max([number, *(model.generation for model in models)])
        folder = self._host.endpoints
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
        """Tells whether the server has, or may have, models beside these."""
        return has_others(self._control, names)

    def mend(self) -> None:
        """Loads again what the server has forgotten because it was started again. Does nothing if nothing is missing.

        What is wrong for too long ends the session; see `failure`.
        """
        if not self.is_running:
            return
        now = time.monotonic()
        missing = [model for model in self._host.models if not model.is_attached]
        if not missing and self._away_since is None:
            if not self._host.models and not self._control.is_listening():
                self._note_away(now)
            self._complete_at = now
            return
        if not self._control.is_listening():
            self._note_away(now)
            return
        if not missing:
            self._note_back()
            return
        try:
            is_waiting = [self._mend_name(name) for name in dict.fromkeys(model.name for model in missing)]
        except (TritonServerError, PyTritonInvalidOperationError, OSError) as error:
            logger.warning("The models cannot be loaded again yet: %s", error)
            self._note_away(now)
            return
        if all(is_waiting):
            self._note_back()
        elif now - self._complete_at > MISSING_DEADLINE_S:
            self.give_up()

    def give_up(self) -> None:
        """Ends the session where not everything is as it should be."""
        models = self._host.models
        if self._failure is not None or (models and all(model.is_attached for model in models)):
            return
        if not self._control.is_listening():
            self._failure = TritonServerExitedError(
                f"The tritonserver at {self._url.with_scheme} does not answer any more. Start it again, then connect "
                "again: it has forgotten the models."
            )
        elif models:
            names = ", ".join(sorted({repr(model.name) for model in models if not model.is_attached}))
            self._failure = TritonServerError(
                f"The tritonserver at {self._url.with_scheme} does not serve {names} from here any more: somebody has "
                "unloaded or replaced what was bound. Connect again to load it."
            )
        if self._failure is not None:
            logger.error("%s", self._failure)

    @property
    def failure(self) -> TritonServerError | None:
        """Why the session is over although nobody has closed it."""
        return self._failure

    def answers(self) -> bool:
        """Asks the server whether it answers."""
        return self._control.is_listening()

    def close(self, *, hurried: Callable[[], bool], linger_s: float | None = 0.0) -> None:
        """Takes the models off the server when their requests are answered.

        Args:
            hurried: Asked again and again; True ends all patience.
            linger_s: Without effect: the readiness of this server is not ours to change.
        """
        self.ended.set()
        try:
            if self._is_up and self._host.models and self._control.is_listening():
                self._host.unload_all(timeout_s=_LOAD_DEADLINE_S, patience_s=DRAIN_DEADLINE_S, stop_wanted=hurried)
        finally:
            self._is_up = False
            try:
                self._host.stop_workers(HURRIED_DEADLINE_S if hurried() else WORKER_DEADLINE_S)
            finally:
                for name in list(self._memberships):
                    self._forget(name)
                self._control.close()
                self._workspace.clean()

    def _served(self, name: str) -> ServedModel | None:
        """Gives what the server has under a name, if anything."""
        if not self._control.is_model_ready(name):
            return ServedModel(None, None) if any(state.name == name for state in self._control.index()) else None
        try:
            return ServedModel.from_config(self._control.model_config(name))
        except ControlError as error:
            if error.reason is None:
                raise
            logger.debug("The server does not tell the configuration of %r: %s", name, error)
            return ServedModel(None, None)

    def _find(self, model: BoundModel) -> ServedModel | None:
        """Gives what is in the way of a model. Where it is the same, bound by a process that lives, joins that."""
        deadline = time.monotonic() + _LEAVING_DEADLINE_S
        while (there := self._served(model.name)) is not None and there.digest == digest_of([model]):
            if there.endpoint is not None and not os.path.lexists(there.endpoint):
                # Whoever loaded it is dead, and the files are removed already.
                return None
            try:
                return there if self._join(model, there) or not there.is_within_reach else None
            except OSError as error:
                # Somebody is about to be the last to leave, and to unload it.
                logger.debug("Model %r cannot be joined: %s", model.name, error)
                if time.monotonic() >= deadline:
                    return there
                time.sleep(_POLL_S)
        return there

    def _join(self, model: BoundModel, there: ServedModel) -> bool:
        """Lets a model be served at the socket of another process that has loaded it; False if there is none any more.

        Raises:
            OSError: It is about to be unloaded.
        """
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
        self._revisions.setdefault(name, (secrets.token_hex(4), 0))
        self._placed[name] = there
        model.shared_endpoint = there.endpoint
        self._look_at_server(model)
        return True

    def _take_off(self, name: str, timeout_s: float) -> bool:
        membership = self._memberships.get(name)
        if membership is None:
            # It was never loaded.
            self._forget(name)
            return True
        if not membership.leave_as_last():
            self._forget(name)
            return False
        try:
            # Not what somebody else has put there in the meantime.
            if self._served(name) == self._placed.get(name):
                self._control.unload(name, timeout_s)
        except BaseException:
            with contextlib.suppress(BlockingIOError):
                membership.stay()
            raise
        self._forget(name)
        return True

    def _endpoints_of(self, name: str) -> list[Path]:
        return [model.endpoint(self._host.endpoints) for model in self._host.models if model.name == name]

    def _forget(self, name: str) -> None:
        self._revisions.pop(name, None)
        membership = self._memberships.pop(name, None)
        self._placed.pop(name, None)
        if membership is not None:
            membership.close()
            # If whoever made the folder has left before.
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

    def _mend_name(self, name: str) -> bool:
        """Brings a name back where that is ours to do; tells whether its workers may be expected to attach."""
        models = [model for model in self._host.models if model.name == name]
        membership = self._memberships[name]
        with exclusively(membership.folder, name, _LEAVING_DEADLINE_S) as is_our_turn:
            there = self._served(name) if is_our_turn else None
            if there is not None and there.endpoint is not None:
                if there.endpoint in self._endpoints_of(name):
                    return True
                if len(models) == 1 and there.digest == digest_of(models) and self._join(models[0], there):
                    # Both had the same idea, and the other one was later.
                    self._host.move(models[0], there.endpoint)
                    return True
                return False
            if there is not None or not is_our_turn:
                return False
            watch = self._servers.get(name)
            if self._away_since is None and (watch is None or not watch.has_ended):
                # Somebody has unloaded it.
                return False
            logger.info("The server at %s was started again: model %s is loaded again.", self._url.with_scheme, name)
            self._load(name, models, f"{secrets.token_hex(4)}.0", _LOAD_DEADLINE_S)
            return True

    def _load(self, name: str, models: Sequence[BoundModel], revision: str, timeout_s: float) -> None:
        endpoint = models[0].endpoint(self._host.endpoints) if len(models) == 1 else None
        self._placed[name] = ServedModel(endpoint, digest_of(models))
        self._control.load(name, timeout_s, self._upload(models, revision))
        self._look_at_server(models[0])

    def _look_at_server(self, model: BoundModel) -> None:
        watch = self._servers.pop(model.name, None)
        if watch is not None:
            watch.close()
        self._servers[model.name] = ServerProcessWatch(model.endpoint(self._host.endpoints))

    def _note_away(self, now: float) -> None:
        if self._away_since is None:
            self._away_since = now
            logger.warning("The tritonserver at %s does not answer any more. It is waited for.", self._url.with_scheme)
        elif now - self._away_since > self._comeback_s:
            self.give_up()

    def _note_back(self) -> None:
        self._complete_at = time.monotonic()
        if self._away_since is not None:
            self._away_since = None
            logger.info("The tritonserver at %s answers again.", self._url.with_scheme)

    def _wait_listening(self, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._control.is_listening(max(_POLL_S, min(CALL_TIMEOUT_S, deadline - time.monotonic()))):
            if cancelled():
                raise StartCancelled
            if time.monotonic() >= deadline:
                raise PyTritonClientTimeoutError(
                    f"No tritonserver answered at {self._url.with_scheme} within {timeout_s:g} s. Is it running, and "
                    "is the address right?",
                    url=self._url.with_scheme,
                    timeout_s=timeout_s,
                    waited_for="server",
                    missing="server",
                )
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    def _unusable(self, error: ControlError) -> Exception:
        url = self._url.with_scheme
        if error.reason is None:
            return PyTritonClientTimeoutError(
                f"The tritonserver at {url} listens, but does not answer: {error}", url=url, missing="server"
            )
        return PyTritonClientInferenceServerError(
            f"The server at {url} does not let its models be seen: {error.reason}. If it is protected, pass its token "
            "as RemoteTriton(access_token=...); Triton.get_access_token() has it.",
            url=url,
            status=error.status,
            server_message=error.reason,
        )

    def _upload(self, models: Sequence[BoundModel], revision: str) -> ModelUpload:
        files = {LIBRARY_NAME: library_path().read_bytes()}
        for model in models:
            for name, text in model.side_files(self._host.endpoints):
                files[f"{model.version}/{name}"] = text.encode()
        # Triton looks at the configuration alone to see whether it has to load a version again.
        parameters = {"pytriton_revision": revision, DIGEST_PARAMETER: digest_of(models)}
        if len(models) == 1:
            parameters[ENDPOINT_PARAMETER] = str(models[0].endpoint(self._host.endpoints))
        return ModelUpload(models[0].config_json(parameters), files)

    def _has_answered(self) -> bool:
        """Tells whether the server answers, as of a moment ago."""
        if not self._is_up or self._failure is not None:
            return False
        now = time.monotonic()
        if now - self._answered_at > _ANSWER_AGE_S:
            if not self._control.is_listening():
                return False
            self._answered_at = now
        return True


def _control(url: TritonUrl, access_token: str | None) -> Control:
    headers = {TRITON_ACCESS_HEADER: access_token} if access_token else {}
    endpoint = Endpoint(setting="url", address=url.hostname, port=url.port, picked=False)
    if url.protocol == "http":
        return HttpControl(endpoint, headers, ssl.create_default_context() if url.is_encrypted else None)
    # Not at the top: its import takes longer than everything else here together.
    from pytriton.server.control_grpc import GrpcControl

    return GrpcControl(endpoint, headers, TritonConfig(), public_tls=url.is_encrypted)
