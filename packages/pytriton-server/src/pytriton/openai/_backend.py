"""The server behind the endpoints: which models it has, and how they are asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytriton.catalog.listing import known_models
from pytriton.client import AsyncioDecoupledModelClient, AsyncioModelClient
from pytriton.client.exceptions import PyTritonClientError
from pytriton.client.management import DirectStreamsClient, TlsSettings, TritonUrl, check_tls
from pytriton.openai._errors import OpenAIError, from_client_error
from pytriton.openai._models import EndpointModel, UnfitModelError, read_model
from pytriton.server.control.connect import connect
from pytriton.server.control.http import ControlError

# Metadata of a model may be this old. A question before every request would cost as much as a small model.
_FRESH_S = 1.0
# Those of models that somebody has asked lately are read again before that, so that requests do not wait for it.
_LATELY_S = 60.0
_MOST_KEPT_FRESH = 8
_DENIED = ("401", "403", "UNAUTHENTICATED", "PERMISSION_DENIED")


class Link:
    """A model, and the client that asks it.

    A model that was bound anew has another link; the client of the old one is closed after its last answer. A request
    that had found the old one before that may still ask it, by another client.
    """

    def __init__(self, model: EndpointModel, connect: Callable[[EndpointModel], AsyncioModelClient]) -> None:
        self.model = model
        self.checked = self.asked = time.monotonic()
        self.created = int(time.time())
        self._connect = connect
        self._client: AsyncioModelClient | None = None
        self._users = 0
        self._is_retired = False

    @asynccontextmanager
    async def used(self) -> AsyncIterator[AsyncioModelClient]:
        """Return the client, which stays open during the block."""
        self._users += 1
        try:
            if self._client is None:
                self._client = self._connect(self.model)
            yield self._client
        finally:
            self._users -= 1
            await self._close_unused()

    async def retire(self) -> None:
        """Close the client as soon as nobody uses it."""
        self._is_retired = True
        await self._close_unused()

    async def _close_unused(self) -> None:
        if self._is_retired and not self._users and self._client is not None:
            client, self._client = self._client, None
            await client.close()


@dataclass(frozen=True)
class Asked:
    """What goes to a model beside the text."""

    inputs: Mapping[str, npt.NDArray[Any]]  # optional inputs
    parameters: Mapping[str, Any]  # parameters of the request
    headers: Mapping[str, str]  # what is handed on to the server, such as those of traces
    request_id: str  # the id in the server's messages and in the callable


class Backend:
    """The models of a tritonserver, for callers of the OpenAI API.

    `timeout_s` limits an answer, and each part of a stream.
    """

    def __init__(
        self,
        url: str,
        *,
        names: Sequence[str] | None,
        aliases: Mapping[str, str],
        access_token: str | None,
        tls: TlsSettings | None,
        timeout_s: float,
    ) -> None:
        parsed = TritonUrl.from_url(url)
        self._url = parsed.with_scheme
        self._names = None if names is None else frozenset(names)
        self._aliases = aliases
        self._access_token = access_token
        self._tls = tls
        self._timeout_s = timeout_s
        self._control = connect(parsed, access_token, check_tls(tls, parsed))
        self._links: dict[str, Link] = {}
        self._refreshing: asyncio.Task[None] | None = None

    async def is_ready(self) -> bool:
        """Ask whether the server is ready."""
        return await asyncio.to_thread(self._control.is_ready)

    async def find(self, name: str) -> Link:
        """Return a model that can be asked."""
        name = self._aliases.get(name, name)
        now = time.monotonic()
        link = self._links.get(name)
        if link is None or now - link.checked >= _FRESH_S:
            if link is not None:
                # Requests that come meanwhile use the metadata that are there.
                link.checked = now
            link = await self._update(name)
        link.asked = now
        self._keep_fresh()
        return link

    def _keep_fresh(self) -> None:
        """Have models that were asked lately read again from time to time."""
        loop = asyncio.get_running_loop()
        if self._refreshing is None or self._refreshing.done() or self._refreshing.get_loop() is not loop:
            self._refreshing = loop.create_task(self._refresh())

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_FRESH_S / 2)
            since = time.monotonic() - _LATELY_S
            lately = sorted((link.asked, name) for name, link in self._links.items() if link.asked >= since)
            if not lately:
                return
            for _, name in lately[-_MOST_KEPT_FRESH:]:
                # The next request for a model that has gone reads it once more, and gets the error.
                with suppress(OpenAIError):
                    await self._update(name)

    async def _update(self, name: str) -> Link:
        """Read a model from the server."""
        try:
            model = await self._read(name)
        except OpenAIError:
            await self._drop(name)
            raise
        # Another request may have updated the model already.
        old = self._links.get(name)
        if old is not None and old.model == model:
            old.checked = time.monotonic()
            return old
        # Before the old one is closed, which takes time in which others look for it.
        link = self._links[name] = Link(model, self._connect)
        if old is not None:
            await old.retire()
        return link

    async def find_all(self) -> dict[str, Link]:
        """Return the models that can be asked now, by all of their names."""
        if self._names is not None:
            names = sorted(self._names)
        else:
            try:
                known = await asyncio.to_thread(known_models, self._control)
            except ControlError as error:
                if error.status in _DENIED or error.reason is not None:
                    text = "The server does not tell which models it has: give the endpoints its access token, or names"
                    raise OpenAIError(500, f"{text} of models. {error}", code="models_unknown", retry=False) from error
                raise _unreachable(error) from error
            names = sorted(name for name, versions in known.items() if any(it.is_loaded for it in versions))
        links = {}
        for name in sorted({*names, *self._aliases}):
            try:
                links[name] = await self.find(name)
            except OpenAIError as error:
                # A model that is not ready, or gone, is not listed.
                if error.status == 503 and error.param is None:
                    raise
        return links

    async def ask(
        self, link: Link, inputs: Mapping[str, npt.NDArray[Any]], asked: Asked
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the answers of a model: one, or any number of a decoupled model.

        Closing the iterator cancels the request.
        """
        name = link.model.spec.model_name
        try:
            async with link.used() as client:
                view = client.with_options(
                    request_id=asked.request_id, parameters=asked.parameters, headers=asked.headers
                )
                every = {**asked.inputs, **inputs}
                if isinstance(view, AsyncioDecoupledModelClient):
                    async with aclosing(view.infer_sample(**every)) as results:
                        async for result in results:
                            yield result
                else:
                    yield await view.infer_sample(**every)
        except PyTritonClientError as error:
            raise from_client_error(error, name) from error

    async def ask_texts(
        self, link: Link, inputs: Mapping[str, npt.NDArray[Any]], asked: Asked
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the texts of a decoupled model that tells nothing else; those that come together, at once.

        Closing the iterator cancels the request.
        """
        try:
            async with link.used() as client:
                view = client.with_options(
                    request_id=asked.request_id, parameters=asked.parameters, headers=asked.headers
                )
                assert isinstance(view, DirectStreamsClient)
                name = link.model.output.name
                async with aclosing(view.infer_texts(name, **asked.inputs, **inputs)) as groups:
                    async for texts in groups:
                        yield texts
        except PyTritonClientError as error:
            raise from_client_error(error, link.model.spec.model_name) from error

    async def ask_batch(self, link: Link, texts: Sequence[Sequence[bytes]], asked: Asked) -> list[Mapping[str, Any]]:
        """Return the answer of a model for each sample; as many as it takes at once travel together."""
        model = link.model
        most = model.spec.max_batch_size if model.spec.batching else 1

        async def ask(part: Sequence[Sequence[bytes]], client: AsyncioModelClient) -> list[Mapping[str, Any]]:
            given = {
                tensor.name: np.array([sample[at] for sample in part], object).reshape((-1,) + (1,) * len(tensor.shape))
                for at, tensor in enumerate(model.texts)
            }
            if not model.spec.batching:
                return [await client.infer_sample(**asked.inputs, **{name: array[0] for name, array in given.items()})]
            rows = {name: np.repeat(value[np.newaxis], len(part), 0) for name, value in asked.inputs.items()}
            result = await client.infer_batch(**rows, **given)
            return [{name: values[row] for name, values in result.items()} for row in range(len(part))]

        async with link.used() as client:
            view = client.with_options(request_id=asked.request_id, parameters=asked.parameters, headers=asked.headers)
            tasks = [asyncio.ensure_future(ask(texts[at : at + most], view)) for at in range(0, len(texts), most)]
            try:
                answers = await asyncio.gather(*tasks)
            except PyTritonClientError as error:
                raise from_client_error(error, model.spec.model_name) from error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return [answer for part in answers for answer in part]

    async def close(self) -> None:
        """Close the connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        for name in list(self._links):
            await self._drop(name)
        self._control.close()

    async def _drop(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is not None:
            await link.retire()

    def _connect(self, model: EndpointModel) -> AsyncioModelClient:
        kind = DirectStreamsClient if model.spec.decoupled else AsyncioModelClient
        return kind(
            self._url,
            model.spec.model_name,
            model_config=model.spec,
            ensure_model_is_ready=False,
            access_token=self._access_token,
            tls=self._tls,
            inference_timeout_s=self._timeout_s,
        )

    async def _read(self, name: str) -> EndpointModel:
        """Ask the server for a model, and classify it."""
        if not name.isprintable() or not name or (self._names is not None and name not in self._names):
            raise _unknown(name)
        try:
            config = await asyncio.to_thread(self._control.model_config, name)
            # Reading a tokenizer's file takes time, so a thread does it.
            return await asyncio.to_thread(read_model, config)
        except ControlError as error:
            if error.reason is None:
                raise _unreachable(error) from error
            if not await asyncio.to_thread(self._knows, name, error.reason):
                raise _unknown(name) from error
            raise OpenAIError(
                503, f"Model {name!r} is not ready: {error.reason}", param="model", code="unavailable"
            ) from error
        except UnfitModelError as error:
            raise OpenAIError(
                404,
                f"Model {name!r} is on the server and cannot be asked here, where models take a text and give a text "
                f"or a vector: {error}.",
                param="model",
                code="model_not_found",
            ) from error
        except PyTritonClientError as error:
            raise from_client_error(error, name) from error

    def _knows(self, name: str, reason: str) -> bool:
        """Return whether the server has a model that it cannot serve now, as far as it says."""
        try:
            return name in known_models(self._control)
        except ControlError:
            # Triton reveals models only to callers with a token; of unknown models it says that they are not found.
            return "is not found" not in reason


def _unknown(name: str) -> OpenAIError:
    return OpenAIError(
        404,
        f"The model {name!r} does not exist on this server. GET /v1/models has those that do.",
        param="model",
        code="model_not_found",
    )


def _unreachable(error: ControlError) -> OpenAIError:
    return OpenAIError(503, f"The server of the models does not answer: {error}", code="unavailable")
