"""Helpers for code that uses tritonclient's own clients, under the names that PyTriton gave to them.

The functions take a ``tritonclient.http`` or ``tritonclient.grpc`` ``InferenceServerClient``, such as
``create_client_from_url`` returns. ``ModelClient`` has methods of its own for all of this and needs none of them.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Mapping
from typing import Any

from ._base import DEFAULT_INIT_TIMEOUT_S, LATEST_MODEL_VERSION
from ._core.deadline import Deadline, check_timeout
from ._core.spec import ModelSpec, parse_model_config
from ._core.tls import TlsSettings, check_tls
from ._core.url import TritonUrl
from ._transport import make_tritonclient
from .exceptions import PyTritonClientModelNotReadyError, PyTritonClientTimeoutError

__all__ = [
    "LATEST_MODEL_VERSION",
    "ModelState",
    "TritonUrl",
    "create_client_from_url",
    "get_model_config",
    "get_model_state",
    "parse_grpc_response",
    "parse_http_response",
    "wait_for_model_ready",
    "wait_for_server_ready",
]

_DEFAULT_NETWORK_TIMEOUT_S = 60.0
_DEFAULT_WAIT_FOR_SERVER_READY_TIMEOUT_S = 60.0
_DEFAULT_WAIT_FOR_MODEL_TIMEOUT_S = DEFAULT_INIT_TIMEOUT_S
_POLL_S = 0.1


class ModelState(enum.Enum):
    """The state of a model in Triton's repository index."""

    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"
    READY = "READY"


def create_client_from_url(url: str, network_timeout_s: float | None = None, tls: TlsSettings | None = None) -> Any:
    """Return a client of tritonclient for an address; nothing is sent yet.

    Args:
        url: As for ``ModelClient``.
        network_timeout_s: For connecting and for each read over HTTP, in seconds; ``None`` is 60. gRPC takes its limit
            with each call.
        tls: Certificates for an ``https`` or ``grpcs`` address.

    Raises:
        PyTritonClientInvalidUrlError: The address cannot be understood.
        PyTritonClientValueError: Another argument cannot be used.
    """
    parsed = TritonUrl.from_url(url)
    check_tls(tls, parsed)
    timeout_s = _DEFAULT_NETWORK_TIMEOUT_S if network_timeout_s is None else network_timeout_s
    return make_tritonclient(parsed, check_timeout(timeout_s, "network_timeout_s"), tls)


def wait_for_server_ready(
    client: Any, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
) -> None:
    """Wait until the server is ready.

    Args:
        client: A client of tritonclient.
        timeout_s: How long, in seconds; ``None`` is 60. The client's own network timeout comes on top.
        headers: Sent with every request.

    Raises:
        PyTritonClientTimeoutError: It was not ready in time.
    """
    deadline = _deadline(timeout_s, _DEFAULT_WAIT_FOR_SERVER_READY_TIMEOUT_S)
    if not _poll(lambda: bool(client.is_server_ready(headers=headers)), deadline):
        raise server_not_ready_error(deadline)


def wait_for_model_ready(
    client: Any,
    model_name: str,
    model_version: str | None = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Wait until a model is ready.

    Args:
        client: A client of tritonclient.
        model_name: The model.
        model_version: The version; ``None`` is the latest.
        timeout_s: How long, in seconds; ``None`` is 300. The client's own network timeout comes on top.
        headers: Sent with every request.

    Raises:
        PyTritonClientModelNotReadyError: It was not ready in time.
    """
    deadline = _deadline(timeout_s, _DEFAULT_WAIT_FOR_MODEL_TIMEOUT_S)
    version = to_version_text(model_version)
    if not _poll(lambda: bool(client.is_model_ready(model_name, version, headers=headers)), deadline):
        raise model_not_ready_error(model_name, version, deadline, f"Waited {deadline.timeout_s:g} s.")


def get_model_state(
    client: Any, model_name: str, model_version: str | None = None, headers: Mapping[str, str] | None = None
) -> ModelState:
    """Return the state of a model in the server's repository index; of its highest version where none is given.

    Args:
        client: A client of tritonclient.
        model_name: The model. One that the index does not know is ``UNAVAILABLE``.
        model_version: The version; ``None`` is the latest.
        headers: Sent with the request.
    """
    return find_model_state(client.get_model_repository_index(headers=headers), model_name, model_version)


def parse_http_response(models: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], ModelState]:
    """Return the states in the answer of ``get_model_repository_index`` over HTTP.

    Args:
        models: The list that tritonclient returned.

    Returns:
        The state of each version, by the name of the model and the version. A model that was never loaded has neither
        a version nor a state, and is left out.
    """
    states = ((model["name"], model.get("version"), model.get("state")) for model in models)
    return {(name, version): ModelState(state) for name, version, state in states if version and state}


def parse_grpc_response(models: Iterable[Any]) -> dict[tuple[str, str], ModelState]:
    """Return the states in the answer of ``get_model_repository_index`` over gRPC.

    Args:
        models: The field ``models`` of the message that tritonclient returned.

    Returns:
        As ``parse_http_response``.
    """
    return {(model.name, model.version): ModelState(model.state) for model in models if model.version and model.state}


def get_model_config(
    client: Any,
    model_name: str,
    model_version: str | None = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> ModelSpec:
    """Wait until a model is ready and return what the server says about it.

    Args:
        client: A client of tritonclient.
        model_name: The model.
        model_version: The version; ``None`` is the latest.
        timeout_s: How long to wait, in seconds; ``None`` is 300.
        headers: Sent with every request.

    Raises:
        PyTritonClientModelNotReadyError: It was not ready in time.
    """
    wait_for_model_ready(client, model_name, model_version, timeout_s, headers)
    version = to_version_text(model_version)
    config = client.get_model_config(model_name, version, headers=headers)
    if not isinstance(config, dict):
        config = client.get_model_config(model_name, version, headers=headers, as_json=True)["config"]
    return parse_model_config(config, version or None)


def _deadline(timeout_s: float | None, default_s: float) -> Deadline:
    return Deadline(check_timeout(default_s if timeout_s is None else timeout_s, "timeout_s"))


# asyncio_utils uses these, too.


def find_model_state(index: Any, model_name: str, model_version: str | None) -> ModelState:
    """Return the state of a model in what ``get_model_repository_index`` returned, over either protocol."""
    states = parse_http_response(index) if isinstance(index, list) else parse_grpc_response(index.models)
    versions = {int(version): state for (name, version), state in states.items() if name == model_name}
    requested = to_version_text(model_version)
    return versions.get(int(requested) if requested else max(versions, default=0), ModelState.UNAVAILABLE)


def to_version_text(model_version: str | None) -> str:
    """Return a version as tritonclient takes it: ``""`` for the latest."""
    return "" if model_version in (None, LATEST_MODEL_VERSION) else str(model_version)


def server_not_ready_error(deadline: Deadline) -> PyTritonClientTimeoutError:
    """Make the error of a wait for a server that has timed out."""
    return PyTritonClientTimeoutError(
        f"Waiting for server to be ready timed out. Waited {deadline.timeout_s:g} s.",
        timeout_s=deadline.timeout_s,
        waited_for="server ready",
        missing="server",
    )


def model_not_ready_error(
    model_name: str, version: str, deadline: Deadline, detail: str
) -> PyTritonClientModelNotReadyError:
    """Make the error of a wait for a model that took too long; ``detail`` ends its text."""
    return PyTritonClientModelNotReadyError(
        f"Waiting for model {model_name}/{version or LATEST_MODEL_VERSION} to be ready timed out. {detail}",
        model_name=model_name,
        model_version=version or None,
        timeout_s=deadline.timeout_s,
        waited_for="model ready",
    )


def is_not_ready_status(error: Exception, *others: str) -> bool:
    """Return whether an error of tritonclient says that the server or the model is not ready yet."""
    status = getattr(error, "status", None)
    return callable(status) and status() in ("StatusCode.UNAVAILABLE", "StatusCode.NOT_FOUND", *others)


def _poll(is_ready: Any, deadline: Deadline) -> bool:
    while True:
        try:
            if is_ready():
                return True
        except Exception as error:
            if not isinstance(error, OSError) and not is_not_ready_status(error):
                raise
        if deadline.is_over:
            return False
        time.sleep(min(_POLL_S, deadline.remaining_s()))
