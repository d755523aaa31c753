"""The worker: registers the models of a server with Dynamo, and hands requests on. Nothing else imports Dynamo."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop
from tritonclient.grpc import service_pb2

from dynamo import llm, runtime  # type: ignore[import-not-found, import-untyped, unused-ignore]
from dynamo.llm import exceptions as dynamo_errors  # type: ignore[import-not-found, import-untyped, unused-ignore]
from pytriton.catalog.listing import ModelWatch
from pytriton.client.management import (
    Deadline,
    Http2Channel,
    Http2Error,
    TlsSettings,
    TritonUrl,
    check_tls,
    make_ssl_context,
)
from pytriton.dynamo._messages import UnfitRequestError, as_card_config, as_message, as_response
from pytriton.server.control.connect import connect
from pytriton.server.control.http import ControlError

__all__ = ["WorkerSettings", "run"]

logger = logging.getLogger("pytriton.dynamo")

_COMPONENT = "pytriton"
_LOOK_S = 1.0
_TIMEOUT_S = 10.0
_NO_LIMIT_S = 1e7  # the server, or the caller, ends it
_MOST_BYTES = 2**31 - 1
_MOST_AT_ONCE = 64
_WATCH_AFTER_S = 0.02
# The configurations of this many models are asked for again each time.
_MOST_CONFIGS = 16
_SERVICE = "/inference.GRPCInferenceService"
# Front ends learn within this time that a worker leaves. Requests that they still send meanwhile are answered.
_LEAVE_S = 1.0
_ACCESS_HEADER = "triton-access-token"
# With this header Triton ends a stream with the status code of an error. Without it, it sends the text of the error
# alone.
_STATUS_OF_ERRORS = ("triton_grpc_error", "true")
_FINAL = "triton_final_response"
_EMPTY_END = "triton_enable_empty_final_response"
# Callers read a status from the word before its text: InvalidRequest, Unavailable, ...
_KINDS = {
    "INVALID_ARGUMENT": dynamo_errors.InvalidArgument,
    "DEADLINE_EXCEEDED": dynamo_errors.ConnectionTimeout,
    "CANCELLED": dynamo_errors.Cancelled,
    "UNAVAILABLE": dynamo_errors.CannotConnect,
}


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker serves, and where Dynamo keeps its workers."""

    url: TritonUrl  # address of a server, for gRPC
    names: frozenset[str] = frozenset()  # the models that are registered; all that are ready if there are none
    namespace: str = "dynamo"  # Dynamo's
    discovery: str = "etcd"  # where front ends find workers: `etcd`, `file`, `kubernetes`, `mem`
    access_token: str | None = None
    tls: TlsSettings | None = None  # certificates for an encrypted address


@dataclass
class _Offer:
    """A version of a model under the name that front ends know it by."""

    name: str
    model: str
    version: str
    config: bytes
    is_decoupled: bool


@dataclass
class _Served:
    """An endpoint, which lives to the end of the worker, and the task that serves it."""

    endpoint: Any
    task: asyncio.Future[None]


def run(settings: WorkerSettings) -> None:
    """Serve the models of a server to Dynamo until SIGINT or SIGTERM."""

    async def serve() -> None:
        await _Worker(settings).run()  # made here, because gRPC takes the loop that runs

    uvloop.run(serve())


class _Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        url = settings.url
        self._settings = settings
        tls = check_tls(settings.tls, url)
        self._control = connect(url, settings.access_token, tls)
        self._listing = ModelWatch(self._control)
        ssl_context = None
        if url.is_encrypted:
            ssl_context = make_ssl_context(tls)
            ssl_context.set_alpn_protocols(["h2"])
        # gRPC's own library takes each answer through a thread of its own, which costs more than all else here.
        self._channel = Http2Channel(url, ssl_context, _MOST_BYTES)
        self._metadata = [(_ACCESS_HEADER, settings.access_token)] if settings.access_token else []
        self._offers: dict[str, _Offer] = {}
        self._served: dict[str, _Served] = {}
        self._runtime: Any = None
        self._problem = ""
        # The configurations by model and version, the oldest first.
        self._configs: dict[tuple[str, int], Any] = {}

    async def run(self) -> None:
        """Look after the models until a signal comes."""
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        settings = self._settings
        self._runtime = runtime.DistributedRuntime(loop, settings.discovery, os.environ.get("DYN_REQUEST_PLANE", "tcp"))
        try:
            while not stopped.is_set():
                await self._look()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stopped.wait(), _LOOK_S)
            for name in list(self._offers):
                await self._withdraw(name)
            await asyncio.sleep(_LEAVE_S)
        finally:
            self._runtime.shutdown()
            if self._served:  # their tasks end after the requests in flight
                await asyncio.wait([served.task for served in self._served.values()], timeout=_TIMEOUT_S)
            await self._channel.close()
            self._control.close()

    # -- which models there are --------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Register what is ready, and withdraw what is not."""
        try:
            wanted = await self._find()
            problem = ""
        except (ControlError, Http2Error, TimeoutError) as error:
            wanted, problem = {}, str(error)
        if problem != self._problem:
            self._problem = problem
            text = f"No model is offered to Dynamo: {problem}" if problem else "The server answers again."
            logger.warning("%s", text)
        for name, offer in list(self._offers.items()):
            if wanted.get(name) != offer:
                await self._withdraw(name)
        for name, offer in wanted.items():
            if name not in self._offers:
                await self._offer(offer)

    async def _find(self) -> dict[str, _Offer]:
        """Return the offers for all versions of models that are ready, by name.

        Front ends know no versions: the newest one has the model's name, and those beside it NAME:VERSION.
        """
        known = await asyncio.to_thread(self._listing.known)
        wanted = self._settings.names
        ready = {
            model: sorted(it.version for it in states if it.state == "READY" and it.version is not None)
            for model, states in known.items()
            if not wanted or model in wanted
        }
        current = {(model, version) for model, versions in ready.items() for version in versions}
        # The oldest configurations are asked for again, because a model may have been loaded with other tensors.
        for key in [*list(self._configs)[:_MOST_CONFIGS], *(self._configs.keys() - current)]:
            self._configs.pop(key, None)
        offers = {}
        for model, versions in ready.items():
            for version in versions:
                if (model, version) not in self._configs:
                    self._configs[model, version] = await self._ask_config(model, version)
                config = self._configs[model, version]
                name = model if version == versions[-1] else f"{model}:{version}"
                decoupled = config.model_transaction_policy.decoupled
                offers[name] = _Offer(name, model, str(version), as_card_config(config, name), decoupled)
        return offers

    async def _ask_config(self, model: str, version: int) -> Any:
        request = service_pb2.ModelConfigRequest(name=model, version=str(version))
        async with contextlib.aclosing(self._call("ModelConfig", request, self._metadata)) as answers:
            (answer,) = [service_pb2.ModelConfigResponse.FromString(data) async for data in answers]
        return answer.config

    async def _offer(self, offer: _Offer) -> None:
        self._offers[offer.name] = offer  # before a request can come
        served = self._served.get(offer.name)
        if served is None:
            path = f"{self._settings.namespace}.{_COMPONENT}.{_slug(offer.name)}"
            endpoint = self._runtime.endpoint(path)
        else:
            endpoint = served.endpoint
        card = {"name": "", "inputs": [], "outputs": [], "triton_model_config": offer.config}
        await llm.register_model(
            llm.ModelInput.Tensor,
            llm.ModelType.TensorBased,
            endpoint,
            offer.name,
            worker_type=llm.WorkerType.Aggregated,
            tensor_model_config=card,
        )
        if served is None:
            task = asyncio.ensure_future(endpoint.serve_endpoint(functools.partial(self._answer, offer.name)))
            self._served[offer.name] = _Served(endpoint, task)
        else:
            await endpoint.register_endpoint_instance()
        logger.info("Model %s is offered to Dynamo.", offer.name)

    async def _withdraw(self, name: str) -> None:
        """Have front ends send no more requests; those that come all the same are answered with an error."""
        del self._offers[name]
        endpoint = self._served[name].endpoint
        await endpoint.unregister_endpoint_instance()
        await llm.unregister_model(endpoint)
        logger.info("Model %s is no longer offered to Dynamo.", name)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _answer(self, name: str, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Answer one request; Dynamo calls this."""
        offer = self._offers.get(name)
        if offer is None:
            raise dynamo_errors.CannotConnect(f"model {name!r} is not ready on this worker")
        try:
            message = as_message(request, offer.model, offer.version)
        except UnfitRequestError as error:
            raise dynamo_errors.InvalidArgument(str(error)) from None
        metadata = [*self._metadata, *(context.trace_headers() or {}).items()]
        method = "ModelInfer"
        if offer.is_decoupled:
            method, metadata = "ModelStreamInfer", [*metadata, _STATUS_OF_ERRORS]
        try:
            async with contextlib.aclosing(self._call(method, message, metadata, context)) as answers:
                async for data in answers:
                    if not offer.is_decoupled:
                        yield as_response(service_pb2.ModelInferResponse.FromString(data), name)
                        continue
                    part = service_pb2.ModelStreamInferResponse.FromString(data)
                    if part.error_message:
                        raise dynamo_errors.Unknown(part.error_message)
                    if part.infer_response.outputs or _is_wanted(part.infer_response, message):
                        yield as_response(part.infer_response, name)
        except Http2Error as error:
            raise _KINDS.get(error.status, dynamo_errors.Unknown)(_text_of(error)) from None
        except TimeoutError:
            raise dynamo_errors.CannotConnect(f"no connection to the server within {_TIMEOUT_S:g} s") from None

    async def _call(
        self, method: str, message: Any, metadata: Sequence[tuple[str, str]], context: Any = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the messages with which the server answers; the call ends with the generator, and with its caller."""
        data = message.SerializeToString()
        for may_repeat in (True, False):
            call = await self._channel.call(f"{_SERVICE}/{method}", metadata, data, Deadline(_TIMEOUT_S))
            stop_watching = _watch(context, call.reset) if context is not None else None
            try:
                while answers := await call.receive_some(_NO_LIMIT_S, _MOST_AT_ONCE):
                    for answer in answers:
                        yield answer
                return
            except Http2Error as error:
                if not (may_repeat and error.is_untouched):
                    raise
            finally:
                if stop_watching is not None:
                    stop_watching()
                call.reset()  # nothing, if it is over


def _watch(context: Any, on_left: Callable[[], object]) -> Callable[[], None]:
    """Have `on_left` called if the caller leaves; return what ends that.

    Dynamo's runtime watches a caller with a task and two wake-ups of its threads, which cost as much as a small
    request. So that begins when a request has taken longer than most.
    """
    watching: list[asyncio.Future[Any]] = []

    def begin() -> None:
        left = asyncio.ensure_future(context.async_killed_or_stopped())
        left.add_done_callback(lambda _: on_left())
        watching.append(left)

    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, begin)

    def stop() -> None:
        timer.cancel()
        for left in watching:
            left.cancel()

    return stop


def _is_wanted(response: Any, request: Any) -> bool:
    """Whether the caller asked for the empty message that ends its answers."""
    return _EMPTY_END in request.parameters and _FINAL in response.parameters


def _slug(name: str) -> str:
    """Return the name of an endpoint: the characters that Dynamo allows, and no other one's beginning."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{re.sub('[^a-z0-9_-]', '_', name.lower())}_{digest}"


def _text_of(error: Http2Error) -> str:
    """Return what a caller is told; Dynamo's words for errors are fewer than the statuses."""
    return error.text if error.status in _KINDS else f"{error.status}: {error.text}"
