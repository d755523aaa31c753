"""`RemoteTriton`: bind inference callables to a server that somebody else started on this machine."""

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.proxy_backend.system.threads import keep_on
from pytriton.server.lifecycle.session import Session
from pytriton.server.settings.rules import check_timeout
from pytriton.server.workspace import Workspace
from pytriton.triton._base import STARTUP_TIMEOUT_S, TritonBase
from pytriton.triton._description import TritonDescription

if TYPE_CHECKING:
    from pytriton.client import TlsSettings
    from pytriton.server.remote.session import RemoteSession

RECONCILE_PERIOD_S = 0.25
"""How often the models on the server are looked after, in seconds."""

_COMEBACK_S = 1.0
_POLL_S = 0.01


class RemoteTriton(TritonBase):
    """Python callables as models of a Triton Inference Server that is running already, on this machine.

    ```python
    with RemoteTriton("http://localhost:8000", access_token=token) as triton:
        triton.bind("double", double, inputs=[Tensor((-1,), "float32")], outputs=[Tensor((-1,), "float32")])
        triton.serve()
    ```

    The server has to run with `--model-control-mode=explicit`, as the same user, and to see the workspace under the
    same path, because it makes its sockets there. It needs neither Triton's Python backend nor anything of ours: the
    native proxy backend is sent to it with each model. `stop` unloads the models; a process that is killed leaves them
    behind, without anybody to answer.

    Args:
        url: `[http|https|grpc|grpcs://]host[:port]`; HTTP without a scheme, ports 8000 and 8001 unless given.
        workspace: A path for the sockets, which must not exist yet and is removed at the end. None takes a new folder
            under `PYTRITON_HOME`, `XDG_CACHE_HOME/pytriton` or `~/.cache/pytriton`.
        access_token: The token that the server's protected endpoints ask for, if they do. None takes the one that a
            `Triton` or `pytriton serve` of this user on this host has left.
        replace_models: Whether a model of the same name that somebody else has put on the server may be replaced. One
            from the server's own repository is put back in the end.
        tls: Certificates for `https://` and `grpcs://`; None trusts the usual authorities.
        connect_timeout_s: How long to wait for the server, in seconds.
        response_cache_bytes: What the answers of each model with `ModelConfig(response_cache=True)` may take in the
            server's memory, in bytes. 0 keeps none.
        memory_budget: How much memory all worker processes of this object together may take, as for `Triton`.
        min_awake: How many models stay awake however long nobody calls them, as for `Triton`.

    Raises:
        PyTritonClientInvalidUrlError: `url` cannot be understood.
        PyTritonClientValueError: `tls` does not go with `url`, or its files cannot be read.
        PyTritonBadParameterError: `connect_timeout_s`, `response_cache_bytes`, `memory_budget` or `min_awake` is not
            acceptable.
        FileExistsError: `workspace` exists.
    """

    _CANCELLED = "stop() was called from another thread while the server was being connected to."
    # The end of somebody else's server can only be found by asking.
    _longest_period_s = 1.0

    def __init__(
        self,
        url: str,
        workspace: "Workspace | str | os.PathLike[str] | None" = None,
        access_token: str | None = None,
        *,
        replace_models: bool = False,
        tls: "TlsSettings | None" = None,
        connect_timeout_s: float = STARTUP_TIMEOUT_S,
        response_cache_bytes: int = 0,
        memory_budget: str | int | None = None,
        min_awake: int = 0,
    ) -> None:
        # Imported late, because a program that starts its own server needs no client.
        from pytriton.client.management import TritonUrl, check_tls, make_ssl_context

        check_timeout("connect_timeout_s", connect_timeout_s)
        self._url = TritonUrl.from_url(url)
        self._tls = check_tls(tls, self._url)
        if self._tls is not None:
            # A file that cannot be read is reported here, and not when it is used.
            make_ssl_context(self._tls)
        self._access_token = access_token
        self._replace_models = replace_models
        self._connect_timeout_s = connect_timeout_s
        if type(response_cache_bytes) is not int or not 0 <= response_cache_bytes < 1 << 63:
            raise PyTritonBadParameterError(
                f"response_cache_bytes must be a whole number of bytes, 0 for no cache; got {response_cache_bytes!r}.",
                parameter="response_cache_bytes",
                value=response_cache_bytes,
                rule="a whole number of bytes",
            )
        self._response_cache_bytes = response_cache_bytes
        self._remote: RemoteSession | None = None
        super().__init__(workspace, memory_budget=memory_budget, min_awake=min_awake)

    @property
    def url(self) -> str:
        """`scheme://host:port` of the server."""
        return self._url.with_scheme

    def describe(self) -> TritonDescription:
        """Return what is served and where, whether the server runs or not. From any thread."""
        return dataclasses.replace(
            super().describe(), urls={"grpc" if self.url.startswith("grpc") else "http": self.url}
        )

    def connect(self) -> None:
        """Wait for the server and load the bound models. Does nothing if that has been done.

        Call it again when `is_alive` has become False because the server was started anew, or a model unloaded.

        Raises:
            PyTritonClientTimeoutError: The server did not answer within `connect_timeout_s`.
            PyTritonClientInferenceServerError: It does not let its models be seen, for want of the right token most
                likely.
            PyTritonClientConnectionError: No encrypted connection came about.
            PyTritonInvalidOperationError: A model of somebody else has the name of a bound one; or this is a fork of
                the process that made this object.
            TritonModelLoadError: The server refused a model, for example because it does not run with
                `--model-control-mode=explicit`, or a callable failed in its warm-up.
            TritonServerStartError: `stop` was called in the meantime.
            WorkspaceError: The workspace cannot be made.
        """
        # In a fork, the lock may be held for ever by a thread of the parent.
        self._check_own()
        with self._life.lock:
            if self._remote is not None and self._life.session is not None:
                self._wait_complete(self._remote)
        self._connect()

    def is_alive(self) -> bool:
        """Tell whether the server answers, every bound model is loaded there, and its callables are attached.

        Without models, True before the first connection: nothing is missing that was asked for.
        """
        remote = self._remote
        if self._life.session is None or remote is None:
            return not self._models and remote is None
        models = list(self._models.values())
        if not remote.is_running or not models:
            return remote.is_running and remote.answers()
        return all(model.is_attached for model in models)

    def is_connected(self) -> bool:
        """Tell whether the server runs, as far as is known."""
        remote = self._remote
        return super().is_connected() and remote is not None and not remote.is_unreachable

    def _wait_complete(self, remote: "RemoteSession") -> None:
        """Give workers a moment to come back; otherwise the session ends, and a new one is made."""
        deadline = time.monotonic() + _COMEBACK_S
        while not self.is_alive() and time.monotonic() < deadline and remote.is_running:
            remote.reconcile()
            time.sleep(_POLL_S)
        if not self.is_alive():
            remote.give_up()

    def _open(self) -> Session:
        from pytriton.server.control.local_token import use_token
        from pytriton.server.remote.session import RemoteSession

        self._remote = RemoteSession(
            *use_token(self._url, self._access_token),
            self._tls,
            self._workspace,
            replace_models=self._replace_models,
            comeback_s=self._connect_timeout_s,
            cache_bytes=self._response_cache_bytes,
            on_unrecoverable=self._life.fail_for_good,
        )
        threading.Thread(target=self._watch, args=(self._remote,), name="pytriton-remote", daemon=True).start()
        return self._remote

    def _watch(self, remote: "RemoteSession") -> None:
        """Look after the models on the server, as long as the session lasts."""
        while not remote.ended.wait(RECONCILE_PERIOD_S) and remote.failure is None:
            # A thread that changes something holds the lock, and sees the problem itself.
            if self._life.lock.acquire(blocking=False):
                try:
                    if self._life.session is remote:
                        keep_on(remote.reconcile, "The models on the server cannot be looked after")
                finally:
                    self._life.lock.release()

    def _find_failure(self) -> BaseException | None:
        failure = super()._find_failure()
        remote = self._remote
        return failure if failure is not None or remote is None else remote.failure

    def _urls(self) -> Sequence[str]:
        return [self.url]

    def _startup_timeout_s(self) -> float:
        return self._connect_timeout_s
