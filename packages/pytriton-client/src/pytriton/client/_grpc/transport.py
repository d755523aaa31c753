"""KServe v2 over gRPC for synchronous clients."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc
from grpc._cython import cygrpc
from tritonclient.grpc import InferenceServerClient

from .._core.deadline import Watchdog
from .._core.forks import Lock, call_in_child
from .._core.requests import InferRequest, InferResponse
from .._core.spec import ModelSpec
from .._core.startup import Ask, Target
from .._core.tls import TlsSettings, read_certificates
from .._core.translate import Operation, closed_error, connection_error, grpc_error, server_error, timeout_error
from .._core.untrusted import DEFAULT_MAX_RESPONSE_BYTES
from .._core.url import TritonUrl
from .._route.proxies import describe_proxy
from ..exceptions import PyTritonClientError, PyTritonClientInferenceServerError
from . import calls
from .calls import GrpcCall, read_infer_response
from .forked import check_fork, is_usable, watch_forks
from .messages import (
    INFER_METHOD,
    STREAM_METHOD,
    channel_options,
    encode_infer_request,
    make_metadata,
    service_pb2,
    service_pb2_grpc,
)
from .patched import adapt_to_patches, check_stream

# How long to wait for the end of a call whose last response has come, in seconds.
STREAM_END_TIMEOUT_S = 5.0
# How long an abandoned stream may run on before it is cancelled, in seconds; most end by themselves in this time. If a
# cancellation reaches Triton 2.51 while the stream ends, Triton keeps the request for good, and the model cannot be
# unloaded any more.
ABANDONED_CALL_S = 0.1

# A message up to this size fits into the buffers of a socket, even if the server reads nothing.
MAX_BUFFERED_WRITE_BYTES = 1 << 16
_CHANNEL_CLOSE_TIMEOUT_S = 0.5

# These channels are never closed: forked children inherit them from their parents, or closing would wait for ever.
_left: list[Any] = []


def make_credentials(url: TritonUrl, tls: TlsSettings | None) -> grpc.ChannelCredentials | None:
    """Return the credentials of a channel to an encrypted address; ``None`` for one without encryption."""
    if not url.is_encrypted:
        return None
    return grpc.ssl_channel_credentials(*read_certificates(tls))


def make_tritonclient(url: TritonUrl, tls: TlsSettings | None) -> InferenceServerClient:
    """Return a client of tritonclient itself, for code that wants one."""
    return InferenceServerClient(
        url.without_scheme,
        creds=make_credentials(url, tls),
        channel_args=channel_options(url, DEFAULT_MAX_RESPONSE_BYTES),
    )


class GrpcTransport:
    """The ``Transport`` for gRPC: one channel, which threads may share."""

    def __init__(
        self,
        url: TritonUrl,
        headers: Mapping[str, str],
        tls: TlsSettings | None = None,
        max_response_bytes: int = DEFAULT_MAX_RESPONSE_BYTES,
        client: str = "ModelClient",
    ) -> None:
        self._url = url.with_scheme
        self._client = client
        self._note = describe_proxy(url)
        self._headers = dict(headers)
        self._credentials = make_credentials(url, tls)
        self._address = url.without_scheme
        self._options = channel_options(url, max_response_bytes)
        self._watchdog = Watchdog()
        self._starting = Lock()
        self._is_closed = False
        self._begin()
        call_in_child(self, GrpcTransport._leave_to_parent)

    def _leave_to_parent(self) -> None:
        # Closing it would end the connection of the parent.
        _left.append(self._channel)
        if is_usable():
            self._begin()

    def _begin(self) -> None:
        check_fork(self._url)
        watch_forks()
        adapt_to_patches()
        self._open_channel()
        self._background_calls: set[Any] = set()
        self._abandoned: set[threading.Thread] = set()
        self._has_unfinished = False

    def _open_channel(self) -> None:
        if self._credentials is None:
            self._channel = grpc.insecure_channel(self._address, self._options)
        else:
            self._channel = grpc.secure_channel(self._address, self._credentials, self._options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._stub.ModelInfer = self._channel.unary_unary(INFER_METHOD)  # bytes in and out
        # The method takes a stream of requests. A unary call sends the same bytes for one request, without a thread.
        self._open_stream = self._channel.unary_stream(
            STREAM_METHOD,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    def ask(self, step: Ask, target: Target) -> Any:
        """Return the answer to a question."""
        call = calls.ask(step, target)
        try:
            message = self._call(call)
        except PyTritonClientInferenceServerError as error:
            if calls.is_not_ready(step, error):
                return False
            raise
        return calls.read_answer(step, call.operation, message)

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Carry one inference request."""
        call = calls.infer(self._url, request, timeout_s)
        message = self._call(call, request.call.headers)
        return read_infer_response(call.operation, message, request.shared)

    def stream(self, spec: ModelSpec, request: InferRequest) -> GrpcStream:
        """Prepare an inference request that any number of responses may answer. The first ``receive`` sends it."""
        check_stream(self._url)
        message = encode_infer_request(request)
        operation = calls.stream_operation(self._url, request)

        def send() -> Any:
            return self._start(operation, lambda: self._open_stream, message, request.call.headers)

        return GrpcStream(send, operation, self._watchdog, self._translate, self._abandon)

    def close(self) -> None:
        """Close the channel; calls and streams in flight end with ``PyTritonClientClosedError``."""
        self._is_closed = True
        if not is_usable():
            return
        for abandoned in self._abandoned.copy():
            if abandoned.is_alive():
                abandoned.join(STREAM_END_TIMEOUT_S)
        for call in self._background_calls.copy():
            call.cancel()
        if self._has_unfinished:
            # close() waits for unfinished writes, and for events of calls whose reader Ctrl+C has ended: maybe for
            # ever.
            closing = threading.Thread(target=self._channel.close, name="pytriton-client-close", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending, or the machine has no thread left
                closing.start()
                closing.join(_CHANNEL_CLOSE_TIMEOUT_S)
        else:
            self._channel.close()
        self._watchdog.join()

    def _abandon(self, call: Any) -> None:
        self._has_unfinished = True
        abandoned = _AbandonedCall(call, self._watchdog, self._abandoned)
        try:
            abandoned.start()
        except RuntimeError:  # the interpreter is ending, or the machine has no thread left
            call.cancel()

    def _call(self, call: GrpcCall, headers: Mapping[str, str] | None = None) -> Any:
        operation, message = call.operation, call.message
        try:
            if call.size > MAX_BUFFERED_WRITE_BYTES:
                return self._call_in_background(call, headers or {})
            method = getattr(self._stub, call.method)
            return self._invoke(operation, method, message, headers or {}, timeout=operation.timeout_s)
        except grpc.RpcError as error:
            raise self._translate(operation, error) from error

    def _call_in_background(self, request: GrpcCall, headers: Mapping[str, str]) -> Any:
        """Make a call whose message may not fit into the buffers of the socket, and wait for its timeout only.

        gRPC does not end a call during a write, whatever its timeout. It ends the call later, when the server reads
        again or the connection breaks.
        """
        self._has_unfinished = True
        operation, name = request.operation, request.method
        timeout_s = operation.timeout_s
        call = self._start(
            operation, lambda: getattr(self._stub, name).future, request.message, headers, timeout=timeout_s
        )
        self._background_calls.add(call)
        try:
            if self._is_closed:  # the client was closed after the call began, so that close() may have missed it
                raise closed_error(operation.model_name, self._url, self._client)
            return call.result(timeout=timeout_s)
        except grpc.FutureTimeoutError as error:
            raise timeout_error(operation) from error
        except grpc.FutureCancelledError as error:
            raise closed_error(operation.model_name, self._url, self._client) from error
        finally:
            self._background_calls.discard(call)
            call.cancel()  # does nothing if the call is over

    def _start(
        self, operation: Operation, pick: Callable[[], Any], message: Any, headers: Mapping[str, str], **options: float
    ) -> Any:
        """Begin a call that a thread of gRPC serves."""
        with self._starting:
            try:
                return self._invoke(operation, pick(), message, headers, **options)
            except RuntimeError as error:
                _cancel_begun(error)
                # gRPC counts on the thread that it could not start: all later calls on this channel would wait for it.
                _left.append(self._channel)
                self._open_channel()
                raise connection_error(operation, str(error)) from error

    def _invoke(
        self,
        operation: Operation,
        method: Callable[..., Any],
        message: Any,
        headers: Mapping[str, str],
        **options: float,
    ) -> Any:
        if self._is_closed:
            raise closed_error(operation.model_name, self._url, self._client)
        check_fork(self._url)
        try:
            return method(message, metadata=make_metadata(self._headers, headers), **options)
        except ValueError as error:
            # A channel that another thread has just closed raises this, too.
            if self._is_closed:
                raise closed_error(operation.model_name, self._url, self._client) from error
            raise

    def _translate(self, operation: Operation, error: Any) -> PyTritonClientError:
        if self._is_closed:
            return closed_error(operation.model_name, self._url, self._client)
        operation = replace(operation, note=self._note, client=self._client)
        return grpc_error(operation, getattr(error.code(), "name", "UNKNOWN"), error.details() or "")


def _cancel_begun(error: RuntimeError) -> None:
    """Cancel the call that gRPC had begun before it could not start a thread for it.

    gRPC hands that call to nobody: it is a local variable of the function that raised the error.
    """
    for frame, _line in traceback.walk_tb(error.__traceback__):
        call = frame.f_locals.get("call")
        if isinstance(call, cygrpc.IntegratedCall):
            call.cancel(cygrpc.StatusCode.cancelled, str(error))


class GrpcStream:
    """The responses to one request, a ``ResponseStream``.

    The watchdog limits waits for single responses, because gRPC has timeouts for whole calls only.
    """

    def __init__(
        self,
        send: Callable[[], Any],
        operation: Operation,
        watchdog: Watchdog,
        translate: Callable[[Operation, Any], PyTritonClientError],
        abandon: Callable[[Any], None],
    ) -> None:
        self._send = send
        self._operation = operation
        self._watchdog = watchdog
        self._translate = translate
        self._abandon = abandon
        self._call: Any = None
        self._has_timed_out = False
        self._has_ended = False

    def receive(self, timeout_s: float) -> InferResponse | None:
        """Return the next response, or ``None`` after the last one."""
        if self._has_ended:
            return None
        operation = self._operation.with_timeout(timeout_s)
        if self._call is None:
            self._call = self._send()
        try:
            self._watchdog.begin(self, timeout_s)
        except RuntimeError as error:
            raise connection_error(operation, str(error)) from error
        try:
            message = next(self._call, None)
        except grpc.RpcError as error:
            self._has_ended = True
            if self._has_timed_out:
                raise timeout_error(operation) from error
            raise self._translate(operation, error) from error
        finally:
            self._watchdog.finish(self)
        if message is None:
            self._has_ended = True
            return None
        if message.error_message:
            self._await_end()
            # With triton_grpc_error Triton would send the status, too, but drop the results before the error.
            raise server_error(operation, None, message.error_message)
        response = read_infer_response(operation, message.infer_response)
        if response.is_final:
            self._await_end()
        return response

    def _await_end(self) -> None:
        """Wait for the end of the call, which follows the last response at once.

        If a call is cancelled while Triton 2.51 ends it, Triton keeps the request for good, and the model cannot be
        unloaded any more.
        """
        self._has_ended = True
        self._watchdog.begin(self, STREAM_END_TIMEOUT_S)
        try:
            next(self._call, None)
        except grpc.RpcError:
            self._call.cancel()  # the caller has the last response; the status of the call does not matter
        finally:
            self._watchdog.finish(self)

    def end_wait(self) -> None:
        """End a wait in another thread with a timeout."""
        self._has_timed_out = True
        self._call.cancel()

    def close(self) -> None:
        """Cancel the request if it is not over, and does not end by itself within ``ABANDONED_CALL_S``."""
        self._watchdog.forget(self)
        if self._call is not None and not self._has_ended:
            self._abandon(self._call)


class _AbandonedCall(threading.Thread):
    """A thread that reads an abandoned stream to its end, or cancels it after ``ABANDONED_CALL_S``."""

    def __init__(self, call: Any, watchdog: Watchdog, others: set[threading.Thread]) -> None:
        super().__init__(name="pytriton-client-leave", daemon=True)
        self._call = call
        self._watchdog = watchdog
        self._others = others

    def start(self) -> None:
        """Begin; the time runs from now."""
        self._others.add(self)
        try:
            self._watchdog.begin(self, ABANDONED_CALL_S)
            super().start()
        except RuntimeError:
            self._end()
            raise

    def run(self) -> None:
        """Read until the end."""
        try:
            with contextlib.suppress(grpc.RpcError):  # the status of the call does not matter
                for _ in self._call:
                    pass
        except ValueError:
            # Ctrl+C has ended a wait for a response that gRPC still waits for: no other thread can read it.
            self._call.cancel()
        finally:
            self._end()

    def end_wait(self) -> None:
        """Cancel the call."""
        self._call.cancel()

    def _end(self) -> None:
        self._watchdog.forget(self)
        self._others.discard(self)
