"""`Triton`: bind inference callables, start the server, serve."""

import logging
import os
from collections.abc import Sequence

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.errors import TritonServerExitedError, describe_exit, quote_log
from pytriton.server.lifecycle import TritonLifecyclePolicy
from pytriton.server.ports import Endpoint
from pytriton.server.process import ExitReport
from pytriton.server.security import TritonSecurityConfig
from pytriton.server.session import ServerSession
from pytriton.server.settings import TritonConfig
from pytriton.server.workspace import Workspace
from pytriton.triton._base import STARTUP_TIMEOUT_S, TritonBase

__all__ = ["Triton"]

logger = logging.getLogger(__name__)


class Triton(TritonBase):
    """A Triton Inference Server with Python callables as its models.

    ```python
    with Triton() as triton:
        triton.bind("double", double, inputs=[Tensor((-1,), "float32")], outputs=[Tensor((-1,), "float32")])
        triton.serve()
    ```

    The server is a child process; the callables run in this one, each in a thread of its own. Methods may be called
    from any thread. Two objects side by side do not meet as long as their ports differ.

    Args:
        config: Settings of the server. What is unset there is taken from `PYTRITON_TRITON_CONFIG_*` in the environment.
        workspace: A path for the server's files, which must not exist yet and is removed with the server. None takes a
            new folder under `PYTRITON_HOME`, `XDG_CACHE_HOME/pytriton` or `~/.cache/pytriton`.
        triton_lifecycle_policy: When the server is started.
        security_config: The access token, and what it protects. None makes a random token.

    Raises:
        FileExistsError: `workspace` exists.
        PyTritonValidationError: A setting is not acceptable, or an argument is of another type.
    """

    def __init__(
        self,
        *,
        config: TritonConfig | None = None,
        workspace: "Workspace | str | os.PathLike[str] | None" = None,
        triton_lifecycle_policy: TritonLifecyclePolicy | None = None,
        security_config: TritonSecurityConfig | None = None,
    ) -> None:
        for name, value, kind in (
            ("config", config, TritonConfig),
            ("security_config", security_config, TritonSecurityConfig),
            ("triton_lifecycle_policy", triton_lifecycle_policy, TritonLifecyclePolicy),
        ):
            if value is not None and not isinstance(value, kind):
                raise PyTritonValidationError(
                    f"Triton({name}=...) must be a {kind.__name__}, or None; got {type(value).__name__}.",
                    expected=kind.__name__,
                    received=type(value).__name__,
                )
        self._config = (TritonConfig() if config is None else config).with_environment()
        self._security = security_config or TritonSecurityConfig()
        self._server: ServerSession | None = None
        super().__init__(workspace, triton_lifecycle_policy)
        self._trace_config = self._config.trace_config

    @property
    def http_url(self) -> str | None:
        """`http://host:port` for clients on this machine; None while the server is not running, or without HTTP."""
        server = self._current()
        return _url("http", server.http) if server is not None else None

    @property
    def grpc_url(self) -> str | None:
        """`grpc://host:port` for clients on this machine; None while the server is not running, or without gRPC.

        With TLS it is `grpcs://host:port`.
        """
        server = self._current()
        scheme = "grpcs" if self._config.grpc_use_ssl or self._config.grpc_use_ssl_mutual else "grpc"
        return _url(scheme, server.grpc) if server is not None else None

    @property
    def metrics_url(self) -> str | None:
        """`http://host:port/metrics`; None while the server is not running, or without metrics."""
        server = self._current()
        base = _url("http", server.metrics) if server is not None else None
        return None if base is None else f"{base}/metrics"

    @property
    def sagemaker_url(self) -> str | None:
        """`http://host:port` of SageMaker's endpoints; None while the server is not running, or without them."""
        server = self._current()
        return _url("http", server.sagemaker) if server is not None else None

    @property
    def vertex_ai_url(self) -> str | None:
        """`http://host:port` of Vertex AI's endpoints; None while the server is not running, or without them."""
        server = self._current()
        return _url("http", server.vertex_ai) if server is not None else None

    def get_access_token(self) -> str | None:
        """Gives the token that protected endpoints ask for; None if there is none."""
        return self._security.access_token

    def run(self) -> None:
        """Starts the server in the background and returns when all bound models are served. Does nothing if it runs.

        The server is stopped by `stop`, at the end of the `with` block, or when the interpreter ends.

        Raises:
            TritonServerNotFoundError: There is no tritonserver on this machine.
            TritonServerStartError: It ended instead of answering (with exit code and last log lines), a port is taken,
                or `stop` was called in the meantime.
            TritonServerTimeoutError: It did not answer within `STARTUP_TIMEOUT_S`.
            TritonModelLoadError: It refused a model, or a callable failed in its warm-up.
            WorkspaceError: The workspace cannot be made or written.
            PyTritonValidationError: Two settings exclude each other, or name a file that is not there.
            PyTritonInvalidOperationError: This is a fork of the process that made this object.
        """
        self._connect()

    def connect(self) -> None:
        """Kept for old scripts: the same as `run`."""
        self.run()

    def _open(self) -> ServerSession:
        if self._config.log_verbose:
            logger.warning(
                "Triton Inference Server is running with enabled verbose logs (log_verbose_level=%d). It may "
                "affect inference performance.",
                self._config.log_verbose,
            )
        self._server = ServerSession(
            self._config,
            self._security,
            self._workspace,
            on_exit=self._note_exit,
            on_unrecoverable=self._note_unrecoverable,
        )
        return self._server

    def _current(self) -> ServerSession | None:
        return self._server if self._session is not None else None

    def _urls(self) -> Sequence[str]:
        return [url for url in (self.http_url, self.grpc_url) if url is not None]

    def _startup_timeout_s(self) -> float:
        return STARTUP_TIMEOUT_S

    def _note_exit(self, report: ExitReport) -> None:
        failure = TritonServerExitedError(
            f"tritonserver {describe_exit(report.exit_code)} although nobody stopped it.{quote_log(report.log_lines)}",
            exit_code=report.exit_code,
            log_lines=report.log_lines,
        )
        logger.error("%s", failure)
        self._fail(failure)


def _url(scheme: str, endpoint: Endpoint | None) -> str | None:
    return None if endpoint is None else f"{scheme}://{endpoint.authority}"
