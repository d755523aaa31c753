"""The application with the endpoints."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.openai._backend import Backend, Link
from pytriton.openai._endpoints.desk import Desk
from pytriton.openai._endpoints.ranks import add_ranks
from pytriton.openai._endpoints.responses import add_responses
from pytriton.openai._endpoints.speech import add_speech
from pytriton.openai._endpoints.texts import add_texts
from pytriton.openai._endpoints.tokens import add_tokens
from pytriton.openai._endpoints.vectors import add_vectors
from pytriton.openai._errors import OpenAIError, from_validation
from pytriton.openai._formats.strict_json import JsonAnswer, JsonRoute
from pytriton.openai._gate import Gate
from pytriton.openai._models import ENDPOINTS

if TYPE_CHECKING:
    from pytriton.client.management import TlsSettings
    from pytriton.triton import Triton

DEFAULT_MAX_BODY_BYTES = 16 << 20
DEFAULT_TIMEOUT_S = 600.0
_OWNER = "pytriton"


def application(
    server: str | Triton,
    *,
    models: Sequence[str] | None = None,
    aliases: Mapping[str, str] | None = None,
    api_key: str | None = None,
    access_token: str | None = None,
    tls: TlsSettings | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    strict: bool = False,
    cors_origins: Sequence[str] | None = None,
) -> FastAPI:
    """Return an application of FastAPI that answers callers of the OpenAI API with the models of a tritonserver.

    Any ASGI server runs it. Where it is mounted in another application, `async with app.router.lifespan_context(app)`
    in that one's lifespan closes the connections in the end.

    Args:
        server: The address of any tritonserver, or a `Triton` that runs. Over gRPC, such as `grpc://localhost:8001`, a
            model learns at once that a caller has left; over HTTP a stream does with its next part.
        models: The models that may be asked; None are all that take a text and give a text or a vector.
        aliases: Further names that models may be asked by, such as `{"gpt-4o": "writer"}`. Where a model has such a
            name itself, the alias is meant.
        api_key: What callers have to send as a bearer token; None lets everybody ask who reaches the application.
        access_token: The token of the server, without which it tells nobody of its models; that of a `Triton` is known.
        tls: Certificates, for an encrypted address.
        timeout_s: How long an answer may take, and each part of one that is streamed, in seconds.
        max_body_bytes: The largest body of a request that is taken.
        strict: Whether a field that is not known is refused; else it has no effect, and is named once in the log.
        cors_origins: Origins, such as `https://app.example`, whose pages browsers let read answers; `*` alone is any.
            None takes those of `server`, where it is a `Triton`.

    Raises:
        PyTritonBadParameterError: The `Triton` does not run, `api_key` is empty, or an alias is of no model that may
            be asked.
        PyTritonValidationError: A value of `cors_origins` is no origin.
        PyTritonClientError: The address or the certificates cannot be used.
    """
    if api_key is not None and (not api_key or api_key != api_key.strip()):
        raise PyTritonBadParameterError(
            "api_key must be a text without spaces around it, or None for everybody; got an empty one or such spaces."
        )
    if cors_origins:
        from pytriton.triton import TritonConfig

        # `TritonConfig` checks the origins.
        TritonConfig(cors_origins=list(cors_origins))
    aliases = dict(aliases or {})
    for alias, name in aliases.items():
        if not (alias and alias.isprintable() and name) or (models is not None and name not in models):
            raise PyTritonBadParameterError(
                f"aliases must be further names of models that may be asked; got {alias!r} for {name!r}."
            )
    if isinstance(server, str):
        url = server
    else:
        # Over gRPC, the server learns at once that a caller has left; over HTTP, with the next part.
        found = server.grpc_url or server.http_url if server.is_connected() else None
        if found is None:
            raise PyTritonBadParameterError(
                f"server must be the address of a tritonserver, or a Triton that runs; got {server!r}."
            )
        url, access_token = found, access_token or server.get_access_token()
    backend = Backend(url, names=models, aliases=aliases, access_token=access_token, tls=tls, timeout_s=timeout_s)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await backend.close()

    if cors_origins is None:
        cors_origins = () if isinstance(server, str) else server.describe().cors_origins
    app = FastAPI(title="pytriton", description="Models of a tritonserver, by the OpenAI API.", lifespan=lifespan)
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=max_body_bytes, cors_origins=tuple(cors_origins))
    if cors_origins:
        # The middleware that is added last runs first. So a browser's preflight request, which has no key, is answered
        # before the key is checked.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.router.route_class = JsonRoute
    _add_errors(app)
    _add_routes(app, Desk(backend, strict))
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(OpenAIError)
    async def told(_request: Request, error: OpenAIError) -> Response:
        return JsonAnswer(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await told(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        text = str(error.detail)
        if error.status_code == 404:
            paths = ", ".join(dict.fromkeys(["/v1/models", *(path for paths in ENDPOINTS.values() for path in paths)]))
            text = f"There is no {request.url.path} here. There are {paths} and /health."
        elif isinstance(error.__cause__, OpenAIError):
            return await told(request, error.__cause__)
        elif error.status_code == 400:
            # FastAPI says this of a body that Python's JSON parser refused: not UTF-8, or nested too deep.
            problem = OpenAIError(400, f"Expected a body of JSON in UTF-8; {error.__cause__}.", code="invalid_json")
            return await told(request, problem)
        told_on = OpenAIError(error.status_code, text)
        # For example, `Allow` with status 405.
        told_on.headers |= error.headers or {}
        return await told(request, told_on)


def _add_routes(app: FastAPI, desk: Desk) -> None:
    backend = desk.backend

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return Response(status_code=200 if await backend.is_ready() else 503)

    @app.get("/version")
    async def version() -> Response:
        return JsonAnswer({"version": importlib.metadata.version("pytriton-server")})

    @app.get("/v1/models")
    async def list_models() -> Response:
        found = await backend.find_all()
        return JsonAnswer({"object": "list", "data": [_model(name, link) for name, link in found.items()]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return JsonAnswer(_model(name, await backend.find(name)))

    for add in (add_texts, add_responses, add_vectors, add_ranks, add_speech, add_tokens):
        add(app, desk)


def _model(name: str, link: Link) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": link.created,
        "owned_by": _OWNER,
        # The model behind an alias.
        "root": link.model.spec.model_name,
        "max_model_len": link.model.most_tokens,
    }
