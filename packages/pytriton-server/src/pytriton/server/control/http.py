"""Calls to a server, and how they go over HTTP: readiness, load, unload, index, statistics.

They need nothing but the standard library; importing `pytriton.client` or tritonclient for them would cost more time
than the calls. Where HTTP is not allowed they go over gRPC (`control.grpc`).
"""

import base64
import contextlib
import http.client
import json
import math
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from pytriton.server.errors import TritonServerError
from pytriton.server.tritonserver.ports import Endpoint

if TYPE_CHECKING:
    from pytriton.client.management import Route

CALL_TIMEOUT_S = 5.0
"""The default limit of one call, in seconds."""

MAX_ANSWER_BYTES = 64 << 20
"""Longer answers are refused; those of a server about its models are never that long."""

_CHUNK_BYTES = 64 << 10


class ControlError(TritonServerError):
    """The server refused a call, or did not answer it."""

    def __init__(self, message: str, *, reason: str | None = None, status: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status

    @property
    def is_restricted(self) -> bool:
        """Whether the server keeps the call for those who have its token, in the word that Triton has for it."""
        return "restricted" in (self.reason or "")


@dataclass(frozen=True)
class ModelUpload:
    """A model that comes with the call that loads it."""

    config: str
    """Its configuration, in JSON."""
    files: Mapping[str, bytes]
    """Contents by path in the model's folder."""


@dataclass(frozen=True)
class VersionState:
    """One line of the server's list of models."""

    name: str
    version: int | None
    """None for a model that was never loaded."""
    state: str
    """`READY`, `LOADING`, `UNLOADING`, `UNAVAILABLE`, or empty for a model that was never loaded."""
    reason: str

    @property
    def is_loaded(self) -> bool:
        """Whether the server has it, or is about to."""
        return self.state not in ("UNAVAILABLE", "")


@dataclass(frozen=True)
class Activity:
    """How many requests a server has answered, and when the last one."""

    answered: int
    """How many requests it has answered, with an error or without."""
    age_s: float
    """How long ago the last answer was, in seconds, by the clock on the wall; infinity without any."""
    longest_mean_s: float
    """How long a request of the slowest model takes in the mean, in seconds."""
    models: frozenset[str] = frozenset()
    """Names of the models that are loaded."""


class Control(Protocol):
    """The calls to a server. Each raises `ControlError` if it is refused or not answered."""

    def is_listening(self, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Return whether the server answers at all."""

    def is_ready(self) -> bool:
        """Return whether the server says that it is ready."""

    def has_failed(self) -> bool:
        """Return whether the server reports that its setup failed and it serves nothing."""

    def server_version(self) -> str:
        """Return the version of the server, `"2.51.0"` for example."""

    def load(self, model_name: str, timeout_s: float, upload: ModelUpload | None = None) -> None:
        """Load all versions of a model, from the repository or from `upload`, and wait until they are loaded."""

    def unload(self, model_name: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Take all versions of a model out of service. Does not wait for its requests to finish."""

    def index(self, timeout_s: float = CALL_TIMEOUT_S) -> list[VersionState]:
        """List the models of the repository; uploaded models are not in it."""

    def is_model_ready(self, model_name: str, version: int | None = None) -> bool:
        """Return whether a version of a model is served and ready; None asks for the newest one."""

    def model_config(self, model_name: str) -> dict[str, Any]:
        """Return the configuration that a model has on the server."""

    def model_versions(self, model_name: str) -> list[int]:
        """Return the versions of a model that are loaded."""

    def statistics(self, model_name: str, model_version: int) -> dict[str, Any]:
        """Return Triton's statistics of one version of a model."""

    def all_statistics(self) -> list[dict[str, Any]]:
        """Return Triton's statistics of every version of every model that is loaded."""

    def activity(self) -> Activity:
        """Return how many requests all models of the server have answered so far."""

    def close(self) -> None:
        """Close connections."""


class HttpControl:
    """The calls over HTTP.

    Each call opens its own connection, because an open one would delay the end of the server.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None = None,
        route: "Route | None" = None,
    ) -> None:
        self._endpoint = endpoint
        self._route = route
        self._tls = tls
        self._headers = {**headers, "Connection": "close"}

    def is_listening(self, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Return whether the server answers at all."""
        try:
            self._call("GET", "/v2/health/live", None, timeout_s)
        except ssl.SSLError:
            # A server is there; the next call raises the error of the certificate.
            return True
        except (OSError, http.client.HTTPException):
            return False
        return True

    def is_ready(self) -> bool:
        """Return whether the server says that it is ready."""
        try:
            return self._call("GET", "/v2/health/ready")[0] == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False

    def has_failed(self) -> bool:
        """Return whether the server reports that its setup failed and it serves nothing."""
        try:
            status = self._call("GET", "/v2/health/live")[0]
        except (OSError, http.client.HTTPException):
            return False
        # Any other answer, such as a refusal, comes from a server that is up.
        return status in (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.SERVICE_UNAVAILABLE)

    def server_version(self) -> str:
        """Return the version of the server, `"2.51.0"` for example."""
        return str(self._checked("GET", "/v2")["version"])

    def load(self, model_name: str, timeout_s: float, upload: ModelUpload | None = None) -> None:
        """Load all versions of a model, from the repository or from `upload`, and wait until they are loaded."""
        body: dict[str, Any] = {}
        if upload is not None:
            files = {f"file:{path}": base64.b64encode(data).decode() for path, data in upload.files.items()}
            body = {"parameters": {"config": upload.config, **files}}
        self._checked("POST", f"/v2/repository/models/{quote(model_name, safe='')}/load", body, timeout_s)

    def unload(self, model_name: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Take all versions of a model out of service. Does not wait for its requests to finish."""
        self._checked("POST", f"/v2/repository/models/{quote(model_name, safe='')}/unload", {}, timeout_s)

    def index(self, timeout_s: float = CALL_TIMEOUT_S) -> list[VersionState]:
        """List the models of the repository; uploaded models are not in it."""
        return [
            VersionState(
                name=str(item.get("name")),
                version=int(item["version"]) if item.get("version") else None,
                state=str(item.get("state", "")),
                reason=str(item.get("reason", "")),
            )
            for item in self._checked("POST", "/v2/repository/index", {}, timeout_s)
        ]

    def is_model_ready(self, model_name: str, version: int | None = None) -> bool:
        """Return whether a version of a model is served and ready; None asks for the newest one."""
        of_version = "" if version is None else f"/versions/{version}"
        path = f"/v2/models/{quote(model_name, safe='')}{of_version}/ready"
        try:
            return self._call("GET", path)[0] == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException) as error:
            raise _unanswered("GET", path, CALL_TIMEOUT_S, error) from error

    def model_config(self, model_name: str) -> dict[str, Any]:
        """Return the configuration that a model has on the server."""
        config: dict[str, Any] = self._checked("GET", f"/v2/models/{quote(model_name, safe='')}/config")
        return config

    def model_versions(self, model_name: str) -> list[int]:
        """Return the versions of a model that are loaded."""
        metadata = self._checked("GET", f"/v2/models/{quote(model_name, safe='')}")
        return [int(version) for version in metadata.get("versions", ())]

    def statistics(self, model_name: str, model_version: int) -> dict[str, Any]:
        """Return Triton's statistics of one version of a model."""
        found = self._checked("GET", f"/v2/models/{quote(model_name, safe='')}/versions/{model_version}/stats")
        statistics: dict[str, Any] = found["model_stats"][0]
        return statistics

    def all_statistics(self) -> list[dict[str, Any]]:
        """Return Triton's statistics of every version of every model that is loaded."""
        statistics: list[dict[str, Any]] = self._checked("GET", "/v2/models/stats")["model_stats"]
        return statistics

    def activity(self) -> Activity:
        """Return how many requests all models of the server have answered so far."""
        return activity_of(self.all_statistics())

    def close(self) -> None:
        """Do nothing: there is no connection between two calls."""

    def _checked(self, method: str, path: str, body: object = None, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            status, answer = self._call(method, path, body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise _unanswered(method, path, timeout_s, error) from error
        if status != http.HTTPStatus.OK:
            reason = _reason(answer)
            raise ControlError(
                f"tritonserver refused {method} {path} with status {status}: {reason}",
                reason=reason,
                status=str(status),
            )
        try:
            return json.loads(answer) if answer else None
        except (ValueError, RecursionError) as error:
            raise ControlError(
                f"{self._endpoint.authority} answered {method} {path} with what is no JSON. Is it a Triton?"
            ) from error

    def _call(
        self, method: str, path: str, body: object = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        endpoint, route, headers = self._endpoint, self._route, self._headers
        data = None if body is None else json.dumps(body).encode()
        if route is None:
            connection = _connection(endpoint.host, endpoint.port, self._tls, timeout_s)
        else:
            connection = _connection_by(route, self._tls, timeout_s)
            path, headers = route.prefix + path, {**headers, **route.headers}
        with contextlib.closing(connection):
            return fetch(connection, method, path, data, headers, timeout_s=timeout_s)


def _connection(host: str, port: int, tls: ssl.SSLContext | None, timeout_s: float) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls)


def _connection_by(route: "Route", tls: ssl.SSLContext | None, timeout_s: float) -> http.client.HTTPConnection:
    connection = _connection(route.hostname, route.port, tls, timeout_s)
    if route.tunnel:
        connection.set_tunnel(route.url.hostname, route.url.port, dict(route.tunnel_headers))
    return connection


def fetch_page(
    route: "Route", path: str, tls: ssl.SSLContext | None = None, *, timeout_s: float, max_bytes: int
) -> tuple[int, bytes]:
    """Return status and body of a page, such as the metrics of a server, by the way that leads there."""
    headers = {"Connection": "close", **route.headers}
    with contextlib.closing(_connection_by(route, tls, timeout_s)) as connection:
        return fetch(connection, "GET", route.prefix + path, None, headers, timeout_s=timeout_s, max_bytes=max_bytes)


def fetch(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> tuple[int, bytes]:
    """Make a call, and return status and body of the answer.

    `timeout_s` limits the connection, the head and the body, each; a longer body than `max_bytes` is an error. The
    caller closes the connection.
    """
    connection.request(method, path, body, dict(headers))
    # A response with `Connection: close` detaches the socket, so its timeout is set here.
    sock = connection.sock
    response = connection.getresponse()
    deadline = time.monotonic() + timeout_s
    pieces: list[bytes] = []
    size = 0
    while piece := response.read1(_CHUNK_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise OSError(f"the answer is longer than {max_bytes:,} bytes")
        if response.isclosed():
            # The socket closes with the last byte, and newer Pythons refuse to set a timeout then.
            break
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(f"the answer did not end within {timeout_s:g} s")
        sock.settimeout(remaining_s)
    return response.status, b"".join(pieces)


def activity_of(statistics: Iterable[Mapping[str, Any]]) -> Activity:
    """Add up Triton's statistics of models, as their JSON has them."""
    answered, last_ms, longest_ns = 0, 0, 0.0
    models: set[str] = set()
    for model in statistics:
        models.add(str(model.get("name", "")))
        last_ms = max(last_ms, int(model.get("last_inference", 0)))
        kinds = model.get("inference_stats", {})
        counts = [int(kinds.get(kind, {}).get("count", 0)) for kind in ("success", "fail", "cancel")]
        answered += sum(counts)
        if counts[0]:
            longest_ns = max(longest_ns, int(kinds["success"].get("ns", 0)) / counts[0])
    age_s = max(0.0, time.time() - last_ms / 1000) if last_ms else math.inf
    return Activity(answered=answered, age_s=age_s, longest_mean_s=longest_ns * 1e-9, models=frozenset(models))


def queue_time_of(statistics: Mapping[str, Any]) -> tuple[int, float]:
    """Return how many requests of a model have left its queue, and how long they waited in it, in seconds."""
    queue = statistics.get("inference_stats", {}).get("queue", {})
    return int(queue.get("count", 0)), int(queue.get("ns", 0)) * 1e-9


def _unanswered(method: str, path: str, timeout_s: float, error: Exception) -> ControlError:
    return ControlError(
        f"tritonserver did not answer {method} {path} within {timeout_s:g} s: {error or type(error).__name__}."
    )


def _reason(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]).strip()
    except (ValueError, KeyError, TypeError):
        return answer.decode("utf-8", "replace").strip() or "no reason given"
