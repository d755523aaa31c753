"""The application with the endpoints."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.openai._backend import Asked, Backend, Link
from pytriton.openai._chats import read_chat
from pytriton.openai._errors import OpenAIError, from_validation, model_failed
from pytriton.openai._gate import CALLER_GONE, EventStream, Gate, until_gone
from pytriton.openai._generation import CHAT, COMPLETION, Generation
from pytriton.openai._models import ENDPOINTS
from pytriton.openai._requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Generating,
    encode_text,
    inputs_and_parameters,
)

if TYPE_CHECKING:
    from pytriton.client.management import TlsSettings
    from pytriton.triton import Triton

__all__ = ["application"]

DEFAULT_MAX_BODY_BYTES = 16 << 20
DEFAULT_TIMEOUT_S = 600.0
_HANDED_ON = ("traceparent", "tracestate")
_SAMPLED = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf](-.*)?")
_OWNER = "pytriton"
# Of an estimate, where a model counts none.
_CHARACTERS_PER_TOKEN = 4


def application(
    server: str | Triton,
    *,
    models: Sequence[str] | None = None,
    api_key: str | None = None,
    access_token: str | None = None,
    tls: TlsSettings | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    strict: bool = False,
) -> FastAPI:
    """Return an application of FastAPI that answers callers of the OpenAI API with the models of a tritonserver.

    Any ASGI server runs it. Where it is mounted in another application, `async with app.router.lifespan_context(app)`
    in that one's lifespan closes the connections in the end.

    Args:
        server: The address of any tritonserver, or a `Triton` that runs. Over gRPC, such as `grpc://localhost:8001`, a
            model learns at once that a caller has left; over HTTP a stream does with its next part.
        models: The models that may be asked; None are all that take a text and give a text or a vector.
        api_key: What callers have to send as a bearer token; None lets everybody ask who reaches the application.
        access_token: The token of the server, without which it tells nobody of its models; that of a `Triton` is known.
        tls: Certificates, for an encrypted address.
        timeout_s: How long an answer may take, and each part of one that is streamed, in seconds.
        max_body_bytes: The largest body of a request that is taken.
        strict: Whether a field that is not known is refused; else it has no effect, and is named once in the log.

    Raises:
        PyTritonBadParameterError: The `Triton` does not run, or `api_key` is empty.
        PyTritonClientError: The address or the certificates cannot be used.
    """
    if api_key is not None and (not api_key or api_key != api_key.strip()):
        raise PyTritonBadParameterError(
            "api_key must be a text without spaces around it, or None for everybody; got an empty one or such spaces."
        )
    if isinstance(server, str):
        url = server
    else:
        # Over gRPC the server learns at once that a caller has left, over HTTP with the next part of the answer.
        found = server.grpc_url or server.http_url if server.is_connected() else None
        if found is None:
            raise PyTritonBadParameterError(
                f"server must be the address of a tritonserver, or a Triton that runs; got {server!r}."
            )
        url, access_token = found, access_token or server.get_access_token()
    backend = Backend(url, names=models, access_token=access_token, tls=tls, timeout_s=timeout_s)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await backend.close()

    app = FastAPI(title="pytriton", description="Models of a tritonserver, by the OpenAI API.", lifespan=lifespan)
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=max_body_bytes)
    _add_errors(app)
    _add_routes(app, backend, strict=strict)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(OpenAIError)
    async def told(_request: Request, error: OpenAIError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await told(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        text = str(error.detail)
        if error.status_code == 404:
            paths = ", ".join(["/v1/models", *(path for paths in ENDPOINTS.values() for path in paths)])
            text = f"There is no {request.url.path} here. There are {paths} and /health."
        elif error.status_code == 400:
            # FastAPI's word for a body that Python's reader of JSON gave up: not UTF-8, or nested too deep.
            problem = OpenAIError(400, f"Expected a body of JSON in UTF-8; {error.__cause__}.", code="invalid_json")
            return await told(request, problem)
        told_on = OpenAIError(error.status_code, text)
        # Such as `Allow` of 405.
        told_on.headers |= error.headers or {}
        return await told(request, told_on)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # The traceback is in the log of the ASGI server.
        return await told(request, OpenAIError(500, f"{type(error).__name__}: {error}", code="internal_error"))


def _add_routes(app: FastAPI, backend: Backend, *, strict: bool) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return Response(status_code=200 if await backend.is_ready() else 503)

    @app.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(link) for link in await backend.find_all()]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return JSONResponse(_model(await backend.find(name)))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        async def prepare() -> Generation:
            link = await _find(backend, body.model, "/v1/chat/completions")
            told = read_chat(body, link.model)
            asked = _asked(body, link, request, strict=strict)
            asked = replace(asked, inputs={**asked.inputs, **told.inputs})
            return Generation(CHAT, backend, link, body, [told.prompt], asked, told.wishes)

        return await _generate(prepare, body, request)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        async def prepare() -> Generation:
            link = await _find(backend, body.model, "/v1/completions")
            return Generation(COMPLETION, backend, link, body, body.prompts, _asked(body, link, request, strict=strict))

        return await _generate(prepare, body, request)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        answer = await until_gone(request.receive, _embed(backend, body, request, strict=strict))
        return answer or Response(status_code=CALLER_GONE)


def _model(link: Link) -> dict[str, Any]:
    return {
        "id": link.model.spec.model_name,
        "object": "model",
        "created": link.created,
        "owned_by": _OWNER,
    }


async def _find(backend: Backend, name: str, endpoint: str) -> Link:
    """Return a model that an endpoint asks.

    Raises:
        OpenAIError: There is none of the name, it is not ready, or for another endpoint.
    """
    link = await backend.find(name)
    if endpoint not in link.model.endpoints:
        raise OpenAIError(
            400,
            f"Model {name!r} gives {'vectors' if link.model.kind == 'embedding' else 'texts'}: ask it at "
            f"{' or '.join(link.model.endpoints)}, not at {endpoint}.",
            param="model",
            code="invalid_value",
        )
    return link


def _asked(body: Generating | EmbeddingRequest, link: Link, request: Request, *, strict: bool) -> Asked:
    inputs, parameters = inputs_and_parameters(body, link.model, strict=strict)
    # Triton traces a request with a context in full, even where its flag says that nobody does.
    is_sampled = _SAMPLED.fullmatch(request.headers.get(_HANDED_ON[0], "")) is not None
    headers = {name: request.headers[name] for name in _HANDED_ON if is_sampled and name in request.headers}
    return Asked(inputs, parameters, headers, request.state.request_id)


async def _generate(prepare: Callable[[], Awaitable[Generation]], body: Generating, request: Request) -> Response:
    """Answer a request for texts, at once or as a stream."""

    async def begin() -> Response:
        generation = await prepare()
        if not body.stream:
            return JSONResponse(await generation.whole())
        events = generation.events()
        # What fails before the first part has a status of its own.
        return EventStream(await anext(events), events)

    return await until_gone(request.receive, begin()) or Response(status_code=CALLER_GONE)


async def _embed(backend: Backend, body: EmbeddingRequest, request: Request, *, strict: bool) -> Response:
    texts = [encode_text(text, "input") for text in body.texts]
    link = await _find(backend, body.model, "/v1/embeddings")
    size = link.model.output.shape[0]
    # Cutting a vector short is right for few models, and none says that it is one of them.
    if body.dimensions is not None and body.dimensions != size:
        raise OpenAIError(
            400,
            f"dimensions: model {body.model!r} gives vectors of {'one size' if size < 0 else size}, which are not cut: "
            f"leave it out; got {body.dimensions}.",
            param="dimensions",
            code="unsupported_parameter",
        )
    answers = await backend.ask_batch(link, texts, _asked(body, link, request, strict=strict))
    data = []
    for index, answer in enumerate(answers):
        vector = np.asarray(answer[link.model.output.name], "<f4").ravel()
        if not np.isfinite(vector).all():
            raise model_failed(body.model, f"it gave a vector for input[{index}] with numbers that are not finite.")
        shown = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    if link.model.counts:
        count = sum(int(np.sum(answer["prompt_tokens"])) for answer in answers)
    else:
        # Clients that add it up break without; so it is there, and the page says what it is.
        count = sum(-(-len(text.decode()) // _CHARACTERS_PER_TOKEN) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": usage})
