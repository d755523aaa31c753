"""Helpers for code that uses tritonclient's own asyncio clients, under the names that PyTriton gave to them.

The functions take a ``tritonclient.http.aio`` or ``tritonclient.grpc.aio`` ``InferenceServerClient``.
``AsyncioModelClient`` has methods of its own for all of this and needs none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ._core.deadline import Deadline, check_timeout
from ._core.spec import ModelSpec, parse_model_config
from .exceptions import PyTritonClientModelNotReadyError
from .utils import (
    ModelState,
    find_model_state,
    is_not_ready_status,
    model_not_ready_error,
    server_not_ready_error,
    to_version_text,
)

__all__ = [
    "asyncio_get_model_config",
    "asyncio_get_model_state",
    "asyncio_wait_for_model_ready",
    "asyncio_wait_for_model_status_loaded",
    "asyncio_wait_for_server_ready",
]

_DEFAULT_TIMEOUT_S = 60.0
_POLL_S = 0.1

Result = TypeVar("Result")


async def asyncio_get_model_state(
    client: Any, model_name: str, model_version: str | None = None, headers: Mapping[str, str] | None = None
) -> ModelState:
    """Return the state of a model in the server's repository index; of its highest version where none is given.

    Args:
        client: An asyncio client of tritonclient.
        model_name: The model. One that the index does not know is ``UNAVAILABLE``.
        model_version: The version; ``None`` is the latest.
        headers: Sent with the request.
    """
    index = await client.get_model_repository_index(headers=headers)
    return find_model_state(index, model_name, model_version)


async def asyncio_get_model_config(
    client: Any,
    model_name: str,
    model_version: str | None = None,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    headers: Mapping[str, str] | None = None,
) -> ModelSpec:
    """Wait until a model is ready and return what the server says about it.

    Args:
        client: An asyncio client of tritonclient.
        model_name: The model.
        model_version: The version; ``None`` is the latest.
        timeout_s: How long to wait for all of it, in seconds.
        headers: Sent with every request.

    Raises:
        PyTritonClientModelNotReadyError: It was not ready in time.
    """
    deadline = Deadline(check_timeout(timeout_s, "timeout_s"))
    await _wait_for_model(client, model_name, model_version, deadline, _POLL_S, headers)
    version = to_version_text(model_version)
    try:
        config = await _within(deadline, client.get_model_config(model_name, version, headers=headers))
        if not isinstance(config, dict):
            answer = client.get_model_config(model_name, version, headers=headers, as_json=True)
            config = (await _within(deadline, answer))["config"]
    except TimeoutError as error:
        raise _not_ready_error(model_name, version, deadline) from error
    return parse_model_config(config, version or None)


async def asyncio_wait_for_server_ready(
    asyncio_client: Any,
    sleep_time_s: float = _POLL_S,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Wait until the server is ready.

    Args:
        asyncio_client: An asyncio client of tritonclient.
        sleep_time_s: How long to sleep between two questions, in seconds.
        timeout_s: How long to wait, in seconds.
        headers: Sent with every request.

    Raises:
        PyTritonClientTimeoutError: It was not ready in time.
    """
    deadline = Deadline(check_timeout(timeout_s, "timeout_s"))
    pause_s = check_timeout(sleep_time_s, "sleep_time_s")
    if not await _poll(lambda: asyncio_client.is_server_ready(headers=headers), deadline, pause_s):
        raise server_not_ready_error(deadline)


async def asyncio_wait_for_model_status_loaded(
    asyncio_client: Any,
    model_name: str,
    sleep_time_s: float = _POLL_S,
    model_version: str | None = None,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Wait until the server's repository index says that a model is ready.

    Args:
        asyncio_client: An asyncio client of tritonclient.
        model_name: The model.
        sleep_time_s: How long to sleep between two questions, in seconds.
        model_version: The version; ``None`` is the latest.
        timeout_s: How long to wait, in seconds.
        headers: Sent with every request.

    Raises:
        PyTritonClientModelNotReadyError: It was not ready in time.
    """
    deadline = Deadline(check_timeout(timeout_s, "timeout_s"))

    async def is_loaded() -> bool:
        state = await asyncio_get_model_state(asyncio_client, model_name, model_version, headers)
        return state is ModelState.READY

    if not await _poll(is_loaded, deadline, check_timeout(sleep_time_s, "sleep_time_s")):
        raise _not_ready_error(model_name, to_version_text(model_version), deadline)


async def asyncio_wait_for_model_ready(
    asyncio_client: Any,
    model_name: str,
    model_version: str | None = None,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Wait until a model is ready.

    Args:
        asyncio_client: An asyncio client of tritonclient.
        model_name: The model.
        model_version: The version; ``None`` is the latest.
        timeout_s: How long to wait, in seconds.
        headers: Sent with every request.

    Raises:
        PyTritonClientModelNotReadyError: It was not ready in time.
    """
    deadline = Deadline(check_timeout(timeout_s, "timeout_s"))
    await _wait_for_model(asyncio_client, model_name, model_version, deadline, _POLL_S, headers)


async def _wait_for_model(
    client: Any,
    model_name: str,
    model_version: str | None,
    deadline: Deadline,
    pause_s: float,
    headers: Mapping[str, str] | None,
) -> None:
    version = to_version_text(model_version)
    if not await _poll(lambda: client.is_model_ready(model_name, version, headers=headers), deadline, pause_s):
        raise _not_ready_error(model_name, version, deadline)


async def _poll(is_ready: Callable[[], Awaitable[bool]], deadline: Deadline, pause_s: float) -> bool:
    while True:
        try:
            if await _within(deadline, is_ready()):
                return True
        except Exception as error:
            if not _is_not_ready(error):
                raise
        if deadline.is_over:
            return False
        await asyncio.sleep(min(pause_s, deadline.remaining_s()))


async def _within(deadline: Deadline, answer: Awaitable[Result]) -> Result:
    """Await an answer, but not for longer than there is time; then raise ``TimeoutError``."""
    task = asyncio.ensure_future(answer)
    try:
        await asyncio.wait({task}, timeout=deadline.remaining_s())
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        await asyncio.wait({task})
        raise TimeoutError
    return task.result()


def _is_not_ready(error: Exception) -> bool:
    """Return whether an error means that server or model are not ready yet."""
    # Before Python 3.11, a timeout of asyncio is not the builtin one. aiohttp has errors that derive from neither.
    if isinstance(error, (OSError, asyncio.TimeoutError)) or type(error).__module__.startswith("aiohttp."):
        return True
    return is_not_ready_status(error, "StatusCode.DEADLINE_EXCEEDED")


def _not_ready_error(model_name: str, version: str, deadline: Deadline) -> PyTritonClientModelNotReadyError:
    detail = f"Timeout while waiting for model {model_name} to be ready: {deadline.timeout_s:g} s."
    return model_not_ready_error(model_name, version, deadline, detail)
