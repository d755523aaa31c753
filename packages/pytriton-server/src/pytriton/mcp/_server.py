"""The application: which tools there are now, and how they are called."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from typing import Any

import mcp_types as types
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from sse_starlette.sse import AppStatus
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from pytriton.catalog.listing import ModelWatch
from pytriton.client import AsyncioDecoupledModelClient, AsyncioModelClient, ModelSpec
from pytriton.client.exceptions import PyTritonClientError
from pytriton.client.management import TlsSettings, TritonUrl, check_tls
from pytriton.mcp._gate import Gate
from pytriton.mcp._tools import ToolError, ToolModel, read_model, tool_names
from pytriton.server.control.connect import connect
from pytriton.server.control.http import ControlError
from pytriton.server.control.local_token import use_token

__all__ = ["PATH", "ToolModels", "application", "serve_stdio"]

PATH = "/mcp"
"""Where tools are served."""

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
# Of how many models the configuration is read again each time, those first that were read longest ago.
_MOST_CONFIGS = 16
# At the end, calls in flight may take this long, and answers are written within the second.
_END_S = 4.0
_WRITE_S = 0.2
_MOST_BODY_BYTES = 16 << 20
_MOST_ANSWER_BYTES = 64 << 20
_MOST_RESPONSES = 100_000
_MOST_SESSIONS = 1000
_SESSION_HEADER = "mcp-session-id"


def application(
    models: ToolModels, *, api_key: str | None, hosts: Collection[str], cors_origins: Collection[str]
) -> tuple[ASGIApp, Callable[[], Coroutine[Any, Any, None]]]:
    """Return the application that offers the models of a server as tools, and what ends its streams in order."""
    # The SDK's streams would end at the first signal, with the calls in them.
    AppStatus.enable_automatic_graceful_drain = False
    server = _ToolServer(models)
    app: ASGIApp = server.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=_MOST_BODY_BYTES,
        # The gate does that: the SDK compares with a list, and any address of this machine may be the right one.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    app = Gate(app, api_key, hosts, cors_origins)
    if cors_origins:
        # The last one is the first that a request meets: browsers ask without the key whether they may ask.
        app = CORSMiddleware(
            app,
            allow_origins=list(cors_origins),
            allow_methods=["DELETE", "GET", "OPTIONS", "POST"],
            allow_headers=["*"],
            expose_headers=[_SESSION_HEADER],
        )
    return app, server.end


def serve_stdio(models: ToolModels) -> None:
    """Offer models to the agent that has started this process, until it closes the standard input."""

    async def run() -> None:
        server = _ToolServer(models)
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    asyncio.run(run())


class ToolModels:
    """The models of a server as they were a second ago."""

    def __init__(
        self,
        url: str,
        names: Collection[str],
        access_token: str | None,
        tls: TlsSettings | None,
        timeout_s: float,
        *,
        finds_token: bool,
    ) -> None:
        self._given = self._used = (TritonUrl.from_url(url), access_token)
        self._finds_token = finds_token
        self._names = frozenset(names)
        self._tls = tls
        self.timeout_s = timeout_s
        self._connect()
        self._read: dict[str, ToolModel | str] = {}
        self._looked = float("-inf")
        self._lock = asyncio.Lock()

    async def look(self) -> dict[str, ToolModel | str]:
        """Return the models that are loaded by the names of their tools, or why one cannot be called."""
        async with self._lock:
            if time.monotonic() - self._looked >= _LOOK_S:
                await self._look()
                self._looked = time.monotonic()
            return {tool: self._read[model] for tool, model in tool_names(self._read).items()}

    def _connect(self) -> None:
        url, access_token = self._used
        self._control = connect(url, access_token, check_tls(self._tls, url))
        self._listing = ModelWatch(self._control)

    async def _look(self) -> None:
        if self._finds_token and (found := use_token(*self._given)) != self._used:
            # A server that was started again has another one.
            self._used = found
            self._control.close()
            self._connect()
        if self._names:  # a server with a token may tell nobody else what it has
            loaded = self._names
        else:
            known = await asyncio.to_thread(self._listing.known)
            loaded = frozenset(name for name, versions in known.items() if any(it.is_loaded for it in versions))
        for name in [*list(self._read)[:_MOST_CONFIGS], *(self._read.keys() - loaded)]:
            self._read.pop(name, None)
        for name in sorted(loaded - self._read.keys()):
            try:
                self._read[name] = read_model(await asyncio.to_thread(self._control.model_config, name))
            except ControlError as error:
                if error.reason is None:
                    raise
                self._read[name] = f"Model {name!r} is not ready: {error.reason}"
            except PyTritonClientError as error:
                self._read[name] = f"Model {name!r} cannot be called: {error.message}"

    async def infer(self, model: ToolModel, arguments: Mapping[str, Any], report: Any) -> types.CallToolResult:
        """Call a model for one sample; `report` is awaited for each response of a stream."""
        kind = AsyncioDecoupledModelClient if model.spec.decoupled else AsyncioModelClient
        url, access_token = self._used
        client = kind(
            url.with_scheme,
            model.spec.model_name,
            model_config=model.spec,
            ensure_model_is_ready=False,
            access_token=access_token,
            tls=self._tls,
            inference_timeout_s=self.timeout_s,
        )
        ordered, named = _arguments(model.spec, model.read_inputs(arguments))
        async with client:
            if not isinstance(client, AsyncioDecoupledModelClient):
                return model.as_result([await client.infer_sample(*ordered, **named)])
            results, size = [], 0
            async with contextlib.aclosing(client.infer_sample(*ordered, **named)) as responses:
                async for response in responses:
                    results.append(response)
                    size += sum(_size(value) for value in response.values())
                    if len(results) > _MOST_RESPONSES or size > _MOST_ANSWER_BYTES:
                        raise ToolError(
                            f"Model {model.spec.model_name!r} gives more than {_MOST_RESPONSES:,} responses, or more "
                            f"than {_MOST_ANSWER_BYTES >> 20} MiB: a tool has one answer."
                        )
                    await report(len(results), model.as_result([response]))
            return model.as_result(results)

    def close(self) -> None:
        """Close the connection by which models are looked for."""
        self._control.close()


class _ToolServer(Server[None]):
    def __init__(self, models: ToolModels) -> None:
        self._models = models
        self._bus = InMemorySubscriptionBus()
        self._handler = ListenHandler(self._bus)
        self._listeners = 0
        self._sessions: OrderedDict[str, Any] = OrderedDict()
        # Calls that go on to their end although nobody waits for them, so that their connections are closed.
        self._calls: set[asyncio.Future[Any]] = set()
        super().__init__(
            "pytriton",
            version=importlib.metadata.version("pytriton-server"),
            instructions="Each tool is a model of a Triton Inference Server, called for one sample.",
            lifespan=self._life,
            on_list_tools=self._list,
            on_call_tool=self._call,
            on_subscriptions_listen=self._listen,
        )
        # No input is expected in a header of HTTP, for which the SDK would list all tools before each call.
        self.get_tool_input_schema = lambda name: None

    def create_initialization_options(self, notification_options: Any = None, *others: Any, **more: Any) -> Any:
        """Say to callers of the protocol before 2026 that they are told of changes."""
        return super().create_initialization_options(NotificationOptions(tools_changed=True), *others, **more)

    @contextlib.asynccontextmanager
    async def _life(self, _: Server[None]) -> AsyncIterator[None]:
        watcher = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.wait([watcher, *self._calls], timeout=_LOOK_S)
            self._models.close()

    async def end(self) -> None:
        """Wait for the calls in flight, then end the streams by which callers hear of changes."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=_END_S)
        await asyncio.sleep(_WRITE_S)
        self._handler.close()
        AppStatus.should_exit = True

    async def _watch(self) -> None:
        """Tell callers when there are other tools, or tools with other inputs."""
        before: list[types.Tool] | None = None
        problem = ""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._sessions and not self._listeners:
                before = None
                continue
            try:
                now: list[types.Tool] | None = self._tools(await self._models.look())
                told = ""
            except ControlError as error:
                now, told = before, str(error)
            if told != problem:
                problem = told
                logger.warning("%s", f"No tools are found: {told}" if told else "The server answers again.")
            if before is not None and now != before:
                await self._bus.publish(ToolsListChanged())
                for session in list(self._sessions.values()):
                    await session.send_tool_list_changed()
            before = now

    async def _listen(self, context: Any, params: Any) -> Any:
        self._listeners += 1
        try:
            return await self._handler(context, params)
        finally:
            self._listeners -= 1

    @staticmethod
    def _tools(models: Mapping[str, ToolModel | str]) -> list[types.Tool]:
        return [model.as_tool(name) for name, model in models.items() if isinstance(model, ToolModel)]

    async def _list(self, context: Any, params: Any) -> types.ListToolsResult:
        try:
            models = await self._models.look()
        except ControlError as error:
            raise MCPError(types.INTERNAL_ERROR, _unreachable(error)) from error
        session = _session_of(context)
        if session is not None:
            self._sessions[session] = context.session
            self._sessions.move_to_end(session)
            while len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return types.ListToolsResult(tools=self._tools(models))

    async def _call(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        async def report(count: int, part: types.CallToolResult) -> None:
            text = part.content[0]
            await context.session.report_progress(
                count, message=text.text if isinstance(text, types.TextContent) else None
            )

        try:
            models = await self._models.look()
            if params.name not in models:
                raise MCPError(
                    types.INVALID_PARAMS, f"There is no tool {params.name!r}; tools/list has those there are."
                )
            model = models[params.name]
            if isinstance(model, str):
                raise ToolError(model)
            # In a task of its own: the connection is closed in order after the caller has cancelled, too.
            task = asyncio.ensure_future(self._models.infer(model, params.arguments or {}, report))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            return await asyncio.wait_for(task, self._models.timeout_s)
        except ControlError as error:
            problem = _unreachable(error)
        except ToolError as error:
            problem = str(error)
        except PyTritonClientError as error:
            problem = getattr(error, "server_message", None) or error.message
        except asyncio.TimeoutError:
            problem = f"Tool {params.name!r} did not answer within {self._models.timeout_s:g} s."
        return types.CallToolResult(content=[types.TextContent(type="text", text=problem)], is_error=True)


def _session_of(context: Any) -> str | None:
    """Return by which session a caller is told of changes; None for callers of newer protocols, who listen for them."""
    if context.request is not None:
        session: str | None = context.request.headers.get(_SESSION_HEADER)
        return session
    # The standard streams have one session.
    return None if context.session.protocol_version in MODERN_PROTOCOL_VERSIONS else ""


def _arguments(spec: ModelSpec, inputs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the inputs as arguments of a client's call, of which some names have another meaning."""
    taken = inputs.keys() & {"headers", "parameters"}
    if not taken:
        return [], inputs
    if len(inputs) < len(spec.inputs):
        raise ToolError(
            f"Model {spec.model_name!r} has an input {taken.pop()!r}, so all of its inputs have to be given."
        )
    return [inputs[it.name] for it in spec.inputs], {}


def _unreachable(error: ControlError) -> str:
    if error.reason is not None:
        told = "The server does not tell which models it has: give the command mcp its access token, or names by"
        return f"{told} --model. {error}"
    return f"The server of the models does not answer: {error}"


def _size(value: Any) -> int:
    """Return roughly how many bytes an output takes."""
    return sum(map(len, value.ravel().tolist())) if value.dtype.hasobject else int(value.nbytes)
