"""One session with a tritonserver that somebody else started on this machine, from the first contact to the end."""

import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable

from pytriton.client.exceptions import (
    PyTritonClientConnectionError,
    PyTritonClientInferenceServerError,
    PyTritonClientTimeoutError,
)
from pytriton.client.management import TlsSettings, TritonUrl
from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.server.control.connect import connect
from pytriton.server.control.http import CALL_TIMEOUT_S, ControlError
from pytriton.server.errors import TritonServerError, TritonServerExitedError
from pytriton.server.lifecycle.deployment import HURRIED_DEADLINE_S, WORKER_DEADLINE_S, Deployment
from pytriton.server.lifecycle.session import DRAIN_DEADLINE_S
from pytriton.server.models.service import WorkerService
from pytriton.server.models.workers import StartCancelled
from pytriton.server.remote.models import LOAD_DEADLINE_S, RemoteModels
from pytriton.server.workspace import Workspace

MISSING_DEADLINE_S = 5.0
"""Seconds that a model may be missing on a running server, because reloading it takes a moment."""

_POLL_S = 0.1
_ANSWER_AGE_S = 1.0

logger = logging.getLogger(__name__)


class RemoteSession:
    """A session with a server that somebody else started.

    The call that loads a model sends its configuration, the native proxy backend and the side files. The server needs
    nothing of ours on its disk, and nothing stays there.
    """

    def __init__(
        self,
        url: TritonUrl,
        access_token: str | None,
        tls: TlsSettings | None,
        workspace: Workspace,
        *,
        replace_models: bool,
        comeback_s: float,
        cache_bytes: int,
        on_unrecoverable: Callable[[BaseException], None],
    ) -> None:
        self._url = url
        self._comeback_s = comeback_s
        self._workspace = workspace
        self._stop_wanted: Callable[[], bool] = lambda: False
        self._control = connect(url, access_token, tls)
        self._models = RemoteModels(
            self._control, url.with_scheme, lambda: self._deployment, replace_models=replace_models
        )
        self._deployment = Deployment(
            self._models,
            workspace.endpoints_path,
            control=lambda: self._control,
            is_running=self._has_answered,
            log_tail=list,
            on_unrecoverable=on_unrecoverable,
            cache_bytes=cache_bytes,
        )
        self._is_up = False
        self._has_started = False
        self._failure: TritonServerError | None = None
        self.ended = threading.Event()
        """Set by `close`."""
        self._answered_at = 0.0
        self._complete_at = 0.0
        self._unreachable_since: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether the server has got its models and was not found to be gone."""
        return self._has_started and self._is_up and self._failure is None

    @property
    def is_unreachable(self) -> bool:
        """Whether the server does not answer right now, and is expected back."""
        return self._unreachable_since is not None

    @property
    def deployment(self) -> Deployment:
        """The models on the server."""
        return self._deployment

    def start(self, models: Iterable[WorkerService], *, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Wait for the server and load `models`; see `Session.start`. Only the server has to answer in `timeout_s`."""
        self._stop_wanted = cancelled
        self._workspace.create()
        self._wait_listening(timeout_s, cancelled)
        try:
            self._control.index()
        except ControlError as error:
            raise self._unusable(error) from error
        self._is_up = True
        self._complete_at = time.monotonic()
        for model in models:
            self._models.claim(model)
            self._deployment.load(model, timeout_s=LOAD_DEADLINE_S, stop_wanted=cancelled)
        self._has_started = True

    def claim(self, model: WorkerService) -> None:
        """Make sure that a model may get its name; see `RemoteModels.claim`."""
        self._models.claim(model)

    def reconcile(self) -> None:
        """Load again what the server has lost by a restart.

        A problem that lasts too long ends the session, see `failure`.
        """
        if not self.is_running:
            return
        now = time.monotonic()
        missing = [model for model in self._deployment.models if not model.is_attached]
        if not missing and self._unreachable_since is None:
            if not self._deployment.models and not self._control.is_listening():
                self._mark_unreachable(now)
            self._complete_at = now
            return
        if not self._control.is_listening():
            self._mark_unreachable(now)
            return
        if not missing:
            self._mark_reachable()
            return
        try:
            names = dict.fromkeys(model.name for model in missing)
            is_waiting = [
                self._models.reconcile(
                    name, was_unreachable=self._unreachable_since is not None, stop_wanted=self._stop_wanted
                )
                for name in names
            ]
        except StartCancelled:
            return
        except (TritonServerError, PyTritonInvalidOperationError, OSError) as error:
            logger.warning("The models cannot be loaded again yet: %s", error)
            self._mark_unreachable(now)
            return
        if all(is_waiting):
            self._mark_reachable()
        elif now - self._complete_at > MISSING_DEADLINE_S:
            self.give_up()

    def give_up(self) -> None:
        """End the session if something is missing."""
        models = self._deployment.models
        if self._failure is not None or (models and all(model.is_attached for model in models)):
            return
        if not self._control.is_listening():
            self._failure = TritonServerExitedError(
                f"The tritonserver at {self._url.with_scheme} does not answer any more. Start it again, then connect "
                "again: it has forgotten the models."
            )
        elif models and not self._workspace.exists():
            self._failure = TritonServerError(
                f"The workspace {self._workspace.path} was removed while it serves models of the server "
                f"at {self._url.with_scheme}, with the sockets that their workers attach to. Connect again, and keep "
                "what cleans up away from that folder, or set PYTRITON_HOME to another one."
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
        """Why the session has ended by itself."""
        return self._failure

    def answers(self) -> bool:
        """Ask the server whether it answers."""
        return self._control.is_listening()

    def close(self, *, hurried: Callable[[], bool], linger_s: float | None = 0.0) -> None:
        """See `Session.close`. `linger_s` has no effect: the readiness of this server is not ours to change."""
        self.ended.set()
        try:
            if self._is_up and self._deployment.models and self._control.is_listening():
                self._deployment.unload_all(
                    timeout_s=LOAD_DEADLINE_S, drain_timeout_s=DRAIN_DEADLINE_S, stop_wanted=hurried
                )
        finally:
            self._is_up = False
            try:
                self._deployment.stop_workers(HURRIED_DEADLINE_S if hurried() else WORKER_DEADLINE_S)
            finally:
                self._models.forget_all()
                self._control.close()
                self._workspace.clean()

    def _mark_unreachable(self, now: float) -> None:
        if self._unreachable_since is None:
            self._unreachable_since = now
            logger.warning("The tritonserver at %s does not answer any more. It is waited for.", self._url.with_scheme)
        elif now - self._unreachable_since > self._comeback_s:
            self.give_up()

    def _mark_reachable(self) -> None:
        self._complete_at = time.monotonic()
        if self._unreachable_since is not None:
            self._unreachable_since = None
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
        # Over gRPC, a server that wants a token answers with the same status.
        if isinstance(error.__cause__, ssl.SSLError) or (error.reason or "").startswith("failed to connect"):
            advice = (
                "If an authority of your own has signed the server's certificate, name it with "
                "RemoteTriton(tls=TlsSettings(ca_file=...))"
                if self._url.is_encrypted
                else "If the server encrypts, use grpcs://"
            )
            return PyTritonClientConnectionError(
                f"The server at {url} listens, but no connection to it came about: {str(error).rstrip('.')}. {advice}.",
                url=url,
            )
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

    def _has_answered(self) -> bool:
        """Return whether the server answered a moment ago."""
        if not self._is_up or self._failure is not None:
            return False
        now = time.monotonic()
        if now - self._answered_at > _ANSWER_AGE_S:
            if not self._control.is_listening():
                return False
            self._answered_at = now
        return True
