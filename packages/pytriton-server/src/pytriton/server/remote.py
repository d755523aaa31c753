"""Models on a tritonserver that somebody else started on this machine; from the first contact to the end."""

import logging
import secrets
import ssl
import time
from collections.abc import Callable, Iterable, Sequence

from pytriton.client._url import TritonUrl
from pytriton.client.exceptions import PyTritonClientInferenceServerError, PyTritonClientTimeoutError
from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.proxy_backend import LIBRARY_NAME, library_path
from pytriton.server.bound_model import BoundModel
from pytriton.server.control import Control, ControlError, HttpControl, ModelUpload
from pytriton.server.errors import TritonServerError, TritonServerExitedError
from pytriton.server.hosting import HURRIED_DEADLINE_S, WORKER_DEADLINE_S, ModelHost
from pytriton.server.ports import Endpoint
from pytriton.server.readiness import StartCancelled
from pytriton.server.security import TRITON_ACCESS_HEADER
from pytriton.server.session import DRAIN_DEADLINE_S
from pytriton.server.settings import TritonConfig
from pytriton.server.workspace import Workspace

__all__ = ["MISSING_DEADLINE_S", "RemoteSession"]

MISSING_DEADLINE_S = 5.0
"""How long a model may be missing, in seconds: when somebody loads it again, its workers are away for a moment."""

_POLL_S = 0.1
_LOAD_DEADLINE_S = 60.0
_ANSWER_AGE_S = 1.0

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
        on_unrecoverable: Called when a callable raised PyTritonUnrecoverableError.
    """

    def __init__(
        self,
        url: TritonUrl,
        access_token: str | None,
        workspace: Workspace,
        *,
        replace_models: bool,
        on_unrecoverable: Callable[[BaseException], None],
    ) -> None:
        self._url = url
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
        self._answered_at = 0.0
        self._complete_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the server has got its models and was not found to be gone."""
        return self._has_started and self._is_up and self._failure is None

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
            self.claim(model.name)
            self._host.load(model, timeout_s=_LOAD_DEADLINE_S, stop_wanted=cancelled)
        self._has_started = True

    def claim(self, name: str) -> None:
        """Makes sure that a name may be used, or is ours already.

        Raises:
            PyTritonInvalidOperationError: A model of somebody else has it.
            TritonServerError: The server refused to tell, or did not answer.
        """
        if any(model.name == name for model in self._host.models):
            return
        if not self._replace_models and (
            self._control.is_model_ready(name) or any(state.name == name for state in self._control.index())
        ):
            raise PyTritonInvalidOperationError(
                f"The server at {self._url.with_scheme} has a model {name!r} that was not bound here. Bind under "
                "another name, or make RemoteTriton with replace_models=True if that one may be replaced, for example "
                "because the process that served it has died."
            )
        self._revisions[name] = (secrets.token_hex(4), 0)

    def place(self, name: str, models: Sequence[BoundModel], timeout_s: float) -> None:
        """Makes the server serve these versions under a name, and no others; see `hosting.Placement`."""
        if not models:
            self._control.unload(name, timeout_s)
            del self._revisions[name]
            return
        origin, number = self._revisions[name]
        number = max([number, *(model.generation for model in models)])
        self._control.load(name, timeout_s, self._upload(models, f"{origin}.{number}"))
        self._revisions[name] = (origin, number)

    def check(self, *, patience_s: float | None = None) -> TritonServerError | None:
        """Tells what has become of the server and of the models on it; None if all is well.

        Args:
            patience_s: How long a model may have been missing, in seconds; None is `MISSING_DEADLINE_S`.
        """
        if patience_s is None:
            patience_s = MISSING_DEADLINE_S
        models = self._host.models
        now = time.monotonic()
        if self._failure is not None or not self._is_up:
            return self._failure
        if models and all(model.is_attached for model in models):
            self._complete_at = now
        elif not self._control.is_listening():
            self._failure = TritonServerExitedError(
                f"The tritonserver at {self._url.with_scheme} does not answer any more. Start it again, then connect "
                "again: it has forgotten the models."
            )
        elif not models:
            self._complete_at = now
        elif now - self._complete_at > patience_s:
            names = ", ".join(sorted({repr(model.name) for model in models if not model.is_attached}))
            self._failure = TritonServerError(
                f"The tritonserver at {self._url.with_scheme} does not serve {names} from here any more: somebody has "
                "unloaded or replaced what was bound, or the server was started again. Connect again to load it."
            )
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
        try:
            if self._is_up and self._host.models and self._control.is_listening():
                self._host.unload_all(timeout_s=_LOAD_DEADLINE_S, patience_s=DRAIN_DEADLINE_S, stop_wanted=hurried)
        finally:
            self._is_up = False
            try:
                self._host.stop_workers(HURRIED_DEADLINE_S if hurried() else WORKER_DEADLINE_S)
            finally:
                self._control.close()
                self._workspace.clean()

    def _wait_listening(self, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._control.is_listening():
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
        return ModelUpload(models[0].config_json(revision), files)

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
