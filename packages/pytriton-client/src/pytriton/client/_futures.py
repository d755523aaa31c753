"""The futures client, which calls the synchronous client in threads."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ._base import BaseModelClient
from ._core.deadline import Deadline
from ._core.options import NO_OPTIONS, CallOptions, ParameterValue
from ._core.requests import ModelResult
from ._core.spec import ModelSpec
from ._core.telemetry import in_context_of_caller
from ._core.tls import TlsSettings
from ._core.translate import closed_error
from ._sync import ModelClient
from .exceptions import PyTritonClientQueueFullError, PyTritonClientTimeoutError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from typing_extensions import Self

DEFAULT_MAX_WORKERS = 128
DEFAULT_MAX_QUEUE_SIZE = 128

Result = TypeVar("Result")


class FuturesModelClient(BaseModelClient):
    """A client for one model that returns a future for each call.

    The calls are carried out in threads, which share the connections of one ``ModelClient``. A thread is started when a
    call comes and no thread is idle; when there are ``max_workers`` of them, calls queue::

        with FuturesModelClient("localhost", "AddSub") as client:
            futures = [client.infer_sample(a, b) for a, b in samples]
            results = [future.result() for future in futures]

    What goes wrong with a call is an error of its future. A future can be cancelled as long as its call has not begun.
    Several threads may use one client at a time.

    Args:
        url: As for ``BaseModelClient``, like all others that are not listed here.
        model_name: The model.
        model_version: The version; ``None`` is the latest one.
        max_workers: The most threads, and with them the most requests under way at one time; ``None`` for no limit.
        max_queue_size: The most calls that wait for a thread; ``None`` for no limit.
        non_blocking: Whether a call raises ``PyTritonClientQueueFullError`` at once when the queue is full. Else it
            blocks for up to ``inference_timeout_s``, or, where none is given, for as long as the calls before it may
            take, ``init_timeout_s`` and 60 s more, and raises then.
        lazy_init: Whether to contact the server no earlier than needed; else the constructor waits for the model.
        init_timeout_s: How long to wait for the server and the model before the first inference, in seconds.
        inference_timeout_s: How long an inference may take, in seconds, from when a thread begins with it.
        model_config: What is known about the model.
        ensure_model_is_ready: Whether to wait for the model before the first inference.
        access_token: Sent with every request.
        tls: Certificates for an ``https`` or ``grpcs`` address.
        max_response_bytes: The largest response that is taken, in bytes; ``None`` is 4 GiB.
        shared_memory: Whether tensors go through shared memory; see ``BaseModelClient``.
        trust_env: Whether the variables of the environment that name a proxy count; see ``BaseModelClient``.
        unknown_model_timeout_s: How long to wait for a model that a ready server has not; see ``BaseModelClient``.

    Raises:
        ValueError: ``max_workers`` or ``max_queue_size`` is not above zero.
        PyTritonClientInvalidUrlError: The address cannot be understood.
        PyTritonClientValueError: Another argument cannot be used.
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        model_version: str | None = None,
        *,
        max_workers: int | None = DEFAULT_MAX_WORKERS,
        max_queue_size: int | None = DEFAULT_MAX_QUEUE_SIZE,
        non_blocking: bool = False,
        lazy_init: bool = True,
        init_timeout_s: float | None = None,
        inference_timeout_s: float | None = None,
        model_config: object | None = None,
        ensure_model_is_ready: bool = True,
        access_token: str | None = None,
        tls: TlsSettings | None = None,
        max_response_bytes: int | None = None,
        shared_memory: bool | Literal["auto"] = False,
        trust_env: bool = True,
        unknown_model_timeout_s: float | None = None,
    ) -> None:
        _check_limit(max_workers, "max_workers")
        _check_limit(max_queue_size, "max_queue_size")
        self._non_blocking = non_blocking
        super().__init__(
            url,
            model_name,
            model_version,
            lazy_init=lazy_init,
            init_timeout_s=init_timeout_s,
            inference_timeout_s=inference_timeout_s,
            model_config=model_config,
            ensure_model_is_ready=ensure_model_is_ready,
            access_token=access_token,
            tls=tls,
            max_response_bytes=max_response_bytes,
            shared_memory=shared_memory,
            trust_env=trust_env,
            unknown_model_timeout_s=unknown_model_timeout_s,
        )
        self._queue_timeout_s = self._inference_timeout_s
        if inference_timeout_s is None:
            self._queue_timeout_s += self._init_timeout_s
        self._client = ModelClient.from_existing_client(self)
        self._model_info = self._client._model_info
        from ._futures_pool import CallPool

        self._pool = CallPool(max_workers, max_queue_size, self._client.close)
        # All views of a client share it. When the last view is garbage-collected, the threads end after their calls.
        self._lifetime = _Lifetime()
        weakref.finalize(self._lifetime, self._pool.close_soon).atexit = False

    @classmethod
    def from_existing_client(cls, existing_client: BaseModelClient) -> Self:
        """Make a client with the settings of another one, of this or any other class.

        It has threads and connections of its own. What the other one knows about the model is not asked again.

        Args:
            existing_client: Stays as it is. Only one of this class has settings for threads and the queue.
        """
        client = super().from_existing_client(existing_client)
        if isinstance(existing_client, FuturesModelClient):
            client._pool.max_workers = existing_client._pool.max_workers
            client._pool.max_queue_size = existing_client._pool.max_queue_size
            client._non_blocking = existing_client._non_blocking
            client._queue_timeout_s = existing_client._queue_timeout_s
        return client

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address and the settings; see ``BaseModelClient``."""
        make, arguments, state = super().__reduce__()
        return make, arguments, {**state, "_queue_timeout_s": self._queue_timeout_s}

    @property
    def _class_name(self) -> str:
        return "FuturesModelClient"

    def _own_settings(self) -> dict[str, Any]:
        return {
            "max_workers": self._pool.max_workers,
            "max_queue_size": self._pool.max_queue_size,
            "non_blocking": self._non_blocking,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self, wait: bool = True) -> None:
        """Take no more calls. Those that were taken are carried out, then the threads end and the connections close.

        A second call does nothing but wait where the first one did not.

        Args:
            wait: Whether to wait for that.
        """
        self._pool.close(wait=wait)

    def infer_sample(
        self,
        /,
        *inputs: object,
        parameters: Mapping[str, ParameterValue] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: object,
    ) -> Future[ModelResult]:
        """Infer one sample.

        Args:
            inputs: As in ``ModelClient.infer_sample``. They must not be changed before the future is done.
            parameters: As in ``ModelClient.infer_sample``.
            headers: As in ``ModelClient.infer_sample``.
            named_inputs: As in ``ModelClient.infer_sample``.

        Returns:
            A future of what ``ModelClient.infer_sample`` returns or raises.

        Raises:
            PyTritonClientQueueFullError: The queue has no room.
            PyTritonClientClosedError: The client is closed.
        """
        return self._submit(
            lambda client: client.infer_sample(*inputs, parameters=parameters, headers=headers, **named_inputs)
        )

    def infer_batch(
        self,
        /,
        *inputs: object,
        parameters: Mapping[str, ParameterValue] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: object,
    ) -> Future[ModelResult]:
        """Infer a batch of samples.

        Args:
            inputs: As in ``ModelClient.infer_batch``. They must not be changed before the future is done.
            parameters: As in ``ModelClient.infer_batch``.
            headers: As in ``ModelClient.infer_batch``.
            named_inputs: As in ``ModelClient.infer_batch``.

        Returns:
            A future of what ``ModelClient.infer_batch`` returns or raises.

        Raises:
            PyTritonClientQueueFullError: The queue has no room.
            PyTritonClientClosedError: The client is closed.
        """
        return self._submit(
            lambda client: client.infer_batch(*inputs, parameters=parameters, headers=headers, **named_inputs)
        )

    def model_config(self) -> Future[ModelSpec]:
        """Ask what the server says about the model: a future of ``ModelClient.model_config``.

        Raises:
            PyTritonClientQueueFullError: The queue has no room.
            PyTritonClientClosedError: The client is closed.
        """
        return self._submit(lambda client: client.model_config)

    def wait_for_server(self, timeout_s: float) -> Future[None]:
        """Wait until the server is ready: a future of ``ModelClient.wait_for_server``.

        Args:
            timeout_s: How long, in seconds, from when a thread begins with it.

        Raises:
            PyTritonClientQueueFullError: The queue has no room.
            PyTritonClientClosedError: The client is closed.
        """
        return self._submit(lambda client: client.wait_for_server(timeout_s))

    def wait_for_model(self, timeout_s: float) -> Future[None]:
        """Wait until the model is ready: a future of ``ModelClient.wait_for_model``.

        Args:
            timeout_s: How long, in seconds, from when a thread begins with it.

        Raises:
            PyTritonClientQueueFullError: The queue has no room.
            PyTritonClientClosedError: The client is closed.
        """
        return self._submit(lambda client: client.wait_for_model(timeout_s))

    def load_model(self, config: str | None = None, files: Mapping[str, bytes] | None = None) -> Future[None]:
        """Ask the server to load the model, or to load it anew: a future of ``ModelClient.load_model``.

        Args:
            config: As in ``ModelClient.load_model``.
            files: As in ``ModelClient.load_model``.

        Raises:
            PyTritonClientQueueFullError: The queue has no room.
            PyTritonClientClosedError: The client is closed.
        """
        return self._submit(lambda client: client.load_model(config, files))

    def unload_model(self) -> Future[None]:
        """Ask the server to unload the model: a future of ``ModelClient.unload_model``.

        Raises:
            PyTritonClientQueueFullError: The queue has no room.
            PyTritonClientClosedError: The client is closed.
        """
        return self._submit(lambda client: client.unload_model())

    def _submit(self, call: Callable[[ModelClient], Result]) -> Future[Result]:
        from ._futures_pool import PoolClosedError, PoolFullError

        options = self._options
        client = self._client
        if options is NO_OPTIONS:
            queue_timeout_s = self._queue_timeout_s
            run_call = functools.partial(call, client)
        else:
            # The timeout covers the whole call, including the wait in the queue.
            deadline = self._call_deadline()
            queue_timeout_s = self._queue_timeout_s if deadline is None else deadline.timeout_s
            run_call = functools.partial(_call_with_options, call, client, options, deadline)
        work = in_context_of_caller(run_call)
        try:
            return self._pool.submit(work, None if self._non_blocking else Deadline(queue_timeout_s))
        except PoolClosedError as error:
            raise closed_error(self._target.model_name, self._target.url, self._class_name) from error
        except PoolFullError as error:
            waited = "" if self._non_blocking else f" Waited {queue_timeout_s:g} s for room in it."
            raise PyTritonClientQueueFullError(
                f"Queue is full: max_workers={self._pool.max_workers} calls to the model {self._target.model} are "
                f"under way and max_queue_size={self._pool.max_queue_size} wait.{waited} Raise one of the two, or call "
                "less often.",
                **self._target.fields,
            ) from error
        except RuntimeError as error:
            raise PyTritonClientQueueFullError(
                f"No thread can be started for a call to the model {self._target.model}: {error}. End threads that are "
                "not needed, or raise the limit (ulimit -u, or that of the container).",
                **self._target.fields,
            ) from error


def _call_with_options(
    call: Callable[[ModelClient], Result], client: ModelClient, options: CallOptions, deadline: Deadline | None
) -> Result:
    if deadline is not None:
        if deadline.is_over:
            raise PyTritonClientTimeoutError(
                f"Waited {deadline.timeout_s:g} s for a thread to begin with the call: all of them were busy. Raise "
                "max_workers, or give the call more time.",
                url=client._target.url,
                model_name=client._target.model_name,
                model_version=client._target.model_version,
                timeout_s=deadline.timeout_s,
                waited_for="a free thread",
            )
        options = dataclasses.replace(options, timeout_s=deadline.remaining_s())
    view = client.with_options()
    view._options = options
    return call(view)


class _Lifetime:
    """All views of a client refer to this object, so its finalizer runs when the last of them is gone."""


def _check_limit(size: int | None, name: str) -> None:
    # This is a ValueError and not one of our errors because PyTriton raises that.
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size <= 0):
        raise ValueError(f"{name} must be greater than 0: expected a whole number or None, received {size!r}.")
