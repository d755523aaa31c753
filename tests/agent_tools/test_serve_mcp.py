"""`pytriton serve --mcp` and `pytriton mcp`, with the client of the official SDK and real servers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("mcp")

import anyio
import httpx
import httpx2
import numpy as np
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from typer.testing import CliRunner

from pytriton.cli.app import app
from pytriton.decorators import model
from pytriton.mcp._server import ToolModels
from pytriton.mcp.command import API_KEY_VARIABLE
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.control.http import ControlError
from pytriton.triton import ProcessWorker, Triton, TritonSecurityConfig
from support import process_models
from support.paths import ROOT
from support.processes import while_running
from support.python_models import is_asleep
from support.serving import ServeCommand, local_config, running, serve_command
from support.waiting import PATIENCE_S, eventually

MODES = ("auto", "legacy")
PNG = b"\x89PNG\r\n\x1a\n"
APP = '''
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators import Shape, model

Rows = Annotated[NDArray[np.float32], Shape("batch", 3)]
Table = Annotated[NDArray[np.int32], Shape(-1, 2)]


@model
def shout(text: str, times: int = 1) -> str:
    """Say a text louder.

    And as often as `times` says.
    """
    return text.upper() * times


@model(batched=True, max_batch_size=8)
def double(a: Rows) -> Rows:
    return a * 2


@model
def turn(table: Table) -> Table:
    return table[::-1]


@model
def words(text: str) -> Iterator[str]:
    for word in text.split():
        yield f"{word} "


@model
def count(to: int) -> Iterator[int]:
    yield from range(to)


@model
def paint(color: str) -> bytes:
    return b"\\x89PNG\\r\\n\\x1a\\n" + color.encode()


@model
def size(image: bytes) -> int:
    return len(image)


@model
def keys(data: dict[str, Any]) -> dict[str, Any]:
    return {"keys": sorted(data)}


@model
def ratio(a: float, b: float) -> float:
    return float(np.float64(a) / np.float64(b))


@model
def awkward(parameters: list[int], headers: str = "") -> str:
    return f"{headers}{sum(parameters)}"


@model
def forever(name: str) -> Iterator[str]:
    try:
        while True:
            yield "on "
    finally:
        Path(name).touch()


@model
def gated(path: str) -> Iterator[str]:
    yield "here, "
    while not Path(path).exists():
        time.sleep(0.01)
    yield "gone"


@model
def failing(text: str) -> str:
    raise ValueError(f"{text} is not liked")
'''

Ask = Callable[..., Awaitable[Any]]


def endpoint(server: ServeCommand) -> str:
    return str(eventually(lambda: re.search(r"MCP +(http://\S+)", server.written))[1])


def by_stdio(url: str, *options: str, **variables: str) -> StdioServerParameters:
    """Return how an agent starts the command that answers by its standard streams."""
    environment = {**os.environ, **variables}
    return StdioServerParameters(
        command=sys.executable, args=["-m", "pytriton", "mcp", url, "--stdio", *options], env=environment
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, StdioServerParameters]]:
    """The address of the tools of `APP`, the folder in which its models run, and the command for standard streams."""
    folder = tmp_path_factory.mktemp("app")
    (folder / "app.py").write_text(APP)
    with serve_command(folder, "app.py", "--mcp", "0") as server:
        grpc = str(eventually(lambda: re.search(r"gRPC +(grpc://\S+)", server.written))[1])
        yield endpoint(server), folder, by_stdio(grpc, PYTRITON_HOME=os.environ["PYTRITON_HOME"])


@pytest.fixture(params=["http", "stdio"])
def offered(served: tuple[str, Path, StdioServerParameters], request: pytest.FixtureRequest) -> tuple[Any, Path]:
    """How agents get at those tools, in each way."""
    url, folder, command = served
    return url if request.param == "http" else command, folder


@contextlib.asynccontextmanager
async def connected(url: Any, mode: str = "auto", **options: Any) -> AsyncIterator[Client]:
    with anyio.fail_after(PATIENCE_S):
        async with Client(url, mode=mode, **options) as client:
            yield client


def call(url: Any, name: str, arguments: dict[str, Any], mode: str = "auto") -> Any:
    async def run() -> Any:
        async with connected(url, mode) as client:
            return await client.call_tool(name, arguments)

    return asyncio.run(run())


def text_of(result: Any) -> str:
    return str(result.content[0].text)


def test_tools_are_models_with_docstrings_and_schemas(offered: tuple[Any, Path]) -> None:
    async def run() -> dict[str, Any]:
        async with connected(offered[0]) as client:
            return {tool.name: tool for tool in (await client.list_tools()).tools}

    tools = asyncio.run(run())
    assert sorted(tools) == sorted(re.findall(r"^def (\w+)", APP, re.MULTILINE))
    shout = tools["shout"]
    assert (shout.title, shout.description) == ("shout", "Say a text louder.\n\nAnd as often as `times` says.")
    assert shout.input_schema == {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "str  BYTES[1]"},
            "times": {"type": "integer", "description": "int  INT64[1]"},
        },
        "required": ["text"],
        "additionalProperties": False,
    }
    assert shout.output_schema == {
        "type": "object",
        "properties": {"output": {"type": "string", "description": "str  BYTES[1]"}},
        "required": ["output"],
    }
    assert tools["turn"].description == "The model turn."
    # The axis of the batch is not there.
    (double,) = tools["double"].input_schema["properties"].values()
    assert (double["items"], double["minItems"], double["maxItems"]) == ({"type": "number"}, 3, 3)
    table = tools["turn"].input_schema["properties"]["table"]
    limits = {"minimum": -(2**31), "maximum": 2**31 - 1}
    assert table["items"] == {"type": "array", "items": {"type": "integer", **limits}, "minItems": 2, "maxItems": 2}
    assert "minItems" not in table
    assert tools["size"].input_schema["properties"]["image"]["contentEncoding"] == "base64"
    assert tools["keys"].input_schema["properties"]["data"]["type"] == "object"
    assert tools["count"].output_schema["properties"]["responses"]["type"] == "array"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "arguments", "structured", "text"),
    [
        ("shout", {"text": "hé", "times": 2}, {"output": "HÉHÉ"}, "HÉHÉ"),
        ("shout", {"text": "a", "times": None}, {"output": "A"}, "A"),
        ("double", {"a": [1, 2.5, 3]}, {"output": [2.0, 5.0, 6.0]}, '{"output": [2.0, 5.0, 6.0]}'),
        ("turn", {"table": [[1, 2], [3, 4]]}, {"output": [[3, 4], [1, 2]]}, '{"output": [[3, 4], [1, 2]]}'),
        ("words", {"text": "to be or"}, {"output": "to be or "}, "to be or "),
        ("words", {"text": ""}, {"output": ""}, ""),
        ("count", {"to": 2}, {"responses": [{"output": 0}, {"output": 1}]}, None),
        ("count", {"to": 0}, {"responses": []}, None),
        ("size", {"image": "aGVsbG8="}, {"output": 5}, '{"output": 5}'),
        ("size", {"image": "data:image/png;base64,aGVsbG8="}, {"output": 5}, '{"output": 5}'),
        ("keys", {"data": {"b": 1, "a": [None]}}, {"output": {"keys": ["a", "b"]}}, None),
        ("awkward", {"parameters": [1, 2], "headers": "="}, {"output": "=3"}, "=3"),
        ("ratio", {"a": -1, "b": 0}, {"output": "-Infinity"}, "-Infinity"),
        ("ratio", {"a": 0, "b": 0}, {"output": "NaN"}, "NaN"),
    ],
)
def test_a_call_is_an_inference(
    offered: tuple[Any, Path], mode: str, name: str, arguments: dict[str, Any], structured: Any, text: str | None
) -> None:
    # The client holds the result against the schema of the output as well.
    result = call(offered[0], name, arguments, mode)
    assert not result.is_error
    assert result.structured_content == structured
    assert text_of(result) == (json.dumps(structured) if text is None else text)


def test_an_image_is_content_of_its_own(offered: tuple[Any, Path]) -> None:
    result = call(offered[0], "paint", {"color": "red"})
    data = base64.b64encode(PNG + b"red").decode()
    assert result.structured_content == {"output": data}
    assert [it.type for it in result.content] == ["text", "image"]
    assert (result.content[1].data, result.content[1].mime_type) == (data, "image/png")
    assert data not in text_of(result)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("shout", {}, "Model shout needs 'text'. Its inputs: text: str as BYTES[1], times?: int as INT64[1]."),
        ("shout", {"text": "a", "loud": 1}, "Model shout has no input 'loud'."),
        ("shout", {"text": "a", "times": "b"}, "Input 'times': expected values of int64 (its hint is int)"),
        ("double", {"a": [[1, 2, 3]]}, "Input 'a': expected the shape [3], received [1, 3]."),
        ("turn", {"table": [[1, 2], [3]]}, "Input 'table': expected values of int32"),
        ("turn", {"table": [[1, 2**40]]}, "Input 'table': expected values in the range of int32"),
        ("awkward", {"parameters": [1]}, "has an input 'parameters', so all of its inputs have to be given."),
        ("size", {"image": "?"}, "Input 'image': expected bytes as base64"),
        ("size", {"image": 7}, "Input 'image': expected a string of base64, received int."),
        ("failing", {"text": "it"}, "model 'failing': the inference callable raised ValueError: it is not liked"),
    ],
)
def test_an_error_is_one_of_the_tool(
    offered: tuple[Any, Path], name: str, arguments: dict[str, Any], told: str
) -> None:
    result = call(offered[0], name, arguments)
    assert result.is_error
    assert result.structured_content is None
    assert told in text_of(result)


def test_a_tool_that_is_not_there(offered: tuple[Any, Path]) -> None:
    async def run() -> None:
        async with connected(offered[0]) as client:
            with pytest.raises(MCPError, match="There is no tool 'whisper'"):
                await client.call_tool("whisper", {})

    asyncio.run(run())


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_a_stream_are_progress(offered: tuple[Any, Path], mode: str) -> None:
    told: list[tuple[float, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    async def run() -> Any:
        async with connected(offered[0], mode) as client:
            return await client.call_tool("words", {"text": "one by one"}, progress_callback=note)

    assert asyncio.run(run()).structured_content == {"output": "one by one "}
    assert told == [(1, "one "), (2, "by "), (3, "one ")]


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_is_cancelled_ends_in_the_model(offered: tuple[Any, Path], mode: str) -> None:
    url, folder = offered
    name = f"closed-{mode}-{type(url).__name__}"

    async def run() -> None:
        begun = asyncio.Event()

        async def note(progress: float, total: float | None, message: str | None) -> None:
            begun.set()

        async with connected(url, mode) as client:
            asked = asyncio.ensure_future(client.call_tool("forever", {"name": name}, progress_callback=note))
            await begun.wait()
            assert not (folder / name).exists()
            asked.cancel()
            await asyncio.wait([asked])
            while not (folder / name).exists():
                await asyncio.sleep(0.01)
            assert (await client.call_tool("shout", {"text": "on"})).structured_content == {"output": "ON"}

    asyncio.run(run())


def test_an_agent_finds_tools_and_corrects_itself(offered: tuple[Any, Path]) -> None:
    """A loop as agents have it, whose language model is a rule: it reads descriptions, schemas and errors alone."""

    async def run() -> list[str]:
        async with connected(offered[0]) as client:
            tools = (await client.list_tools()).tools
            (tool,) = (it for it in tools if "louder" in (it.description or ""))
            arguments: dict[str, Any] = {}
            said = []
            for _ in range(3):
                result = await client.call_tool(tool.name, arguments)
                said.append(text_of(result))
                if not result.is_error:
                    break
                # What the error names, of the type that the schema has.
                for missing in re.findall(r"needs '(\w+)'", text_of(result)):
                    kind = tool.input_schema["properties"][missing]["type"]
                    arguments[missing] = {"string": "please", "integer": 1}[kind]
            (measure,) = (it for it in tools if "image" in it.input_schema["properties"])
            image = (await client.call_tool("paint", {"color": said[-1]})).content[1]
            said.append(text_of(await client.call_tool(measure.name, {"image": getattr(image, "data", "")})))
            return said

    assert asyncio.run(run()) == [
        "Model shout needs 'text'. Its inputs: text: str as BYTES[1], times?: int as INT64[1].",
        "PLEASE",
        json.dumps({"output": len(PNG + b"PLEASE")}),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_a_server_waits_for_calls_and_not_for_listeners(tmp_path: Path, mode: str) -> None:
    (tmp_path / "app.py").write_text(APP)

    async def run(server: ServeCommand) -> Any:
        begun = asyncio.Event()

        async def note(progress: float, total: float | None, message: str | None) -> None:
            begun.set()

        async def listen(client: Client) -> None:
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    raise AssertionError("nothing has changed")

        async with connected(endpoint(server), mode) as client:
            await client.list_tools()
            listening = asyncio.ensure_future(listen(client)) if mode == "auto" else None
            asked = asyncio.ensure_future(client.call_tool("gated", {"path": "gate"}, progress_callback=note))
            await begun.wait()
            server.process.send_signal(signal.SIGTERM)
            while "stopping the server" not in server.written:
                await asyncio.sleep(0.01)
            (tmp_path / "gate").touch()
            answer = await asked
            if listening is not None:
                await listening
            return answer

    with serve_command(tmp_path, "app.py", "--mcp", "0") as server:
        assert asyncio.run(run(server)).structured_content == {"output": "here, gone"}
        # A second signal would end it out of order.
        assert server.process.wait(PATIENCE_S) == 0


# ---- models that come and go ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def before(triton: Triton, *options: str, **variables: str) -> Iterator[str]:
    """Run the command `mcp` before a server that runs, and return the address of the tools."""
    command = [sys.executable, "-m", "pytriton", "mcp", str(triton.grpc_url), "--port=0", *options]
    token = triton.get_access_token()
    with while_running(
        ["env", *(f"{name}={value}" for name, value in variables.items()), f"PYTRITON_ACCESS_TOKEN={token}", *command],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = str(process.stdout.readline())
        found = re.search(r"MCP +(http://\S+)", line)
        assert found, line
        yield found[1]


@model
def early(text: str) -> str:
    return f"early {text}"


@model
def late(text: str) -> str:
    """Come later."""
    return f"late {text}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["http", "stdio"])
def test_callers_learn_of_models_that_come_and_go(mode: str, way: str) -> None:
    async def run(triton: Triton, url: Any) -> None:
        changes: asyncio.Queue[str] = asyncio.Queue()

        async def note(message: Any) -> None:
            changes.put_nowait(type(message).__name__)

        async def names(client: Client) -> list[str]:
            return [it.name for it in (await client.list_tools(cache_mode="bypass")).tools]

        async def listen(client: Client) -> None:
            async with client.listen(tools_list_changed=True) as events:
                changes.put_nowait("listening")
                async for event in events:
                    changes.put_nowait(type(event).__name__)

        async with connected(url, mode, **({"message_handler": note} if mode == "legacy" else {})) as client:
            listening = asyncio.ensure_future(listen(client)) if mode == "auto" else None
            if listening is not None:
                assert await changes.get() == "listening"
            assert client.server_capabilities.tools is not None
            assert client.server_capabilities.tools.list_changed
            assert await names(client) == ["early"]
            # The look with which others are compared has to be over.
            await asyncio.sleep(2.5)
            triton.bind(late)
            assert "ListChanged" in await changes.get()
            assert await names(client) == ["early", "late"]
            assert text_of(await client.call_tool("late", {"text": "one"})) == "late one"
            triton.unbind("early")
            assert "ListChanged" in await changes.get()
            assert await names(client) == ["late"]
            with pytest.raises(MCPError, match="There is no tool 'early'"):
                await client.call_tool("early", {"text": "one"})
            if listening is not None:
                listening.cancel()

    triton = Triton(config=local_config())
    triton.bind(early)
    with running(triton), contextlib.ExitStack() as opened:
        if way == "http":
            asyncio.run(run(triton, opened.enter_context(before(triton))))
        else:
            asyncio.run(
                run(triton, by_stdio(str(triton.grpc_url), PYTRITON_ACCESS_TOKEN=str(triton.get_access_token())))
            )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None])
def test_one_that_answers_by_its_standard_streams_ends(
    served: tuple[str, Path, StdioServerParameters], number: int | None
) -> None:
    """It ends by a signal although its input stays open, and with its input; it writes nothing that is not for MCP."""
    command = [served[2].command, *served[2].args]
    with while_running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        if number is None:
            process.stdin.close()
        else:
            process.send_signal(number)
        assert process.wait(PATIENCE_S) == (0 if number is None else -number)
        assert process.stdout.read() == b""


def test_a_server_that_was_started_again_has_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytriton.mcp._server._LOOK_S", 0.0)
    triton = Triton(config=local_config())
    triton.bind(early)
    with running(triton):
        models = ToolModels(str(triton.grpc_url), (), "another", None, PATIENCE_S, finds_token=True)
        with contextlib.closing(models):
            with pytest.raises(ControlError):
                asyncio.run(models.look())
            monkeypatch.setattr("pytriton.mcp._server.use_token", lambda url, token: (url, triton.get_access_token()))
            assert list(asyncio.run(models.look())) == ["early"]


@pytest.mark.parametrize("option", ["--port=9000", "--address=0.0.0.0", "--host=a", "--api-key-file=b", "--cors=c"])
def test_options_of_ports_are_not_for_standard_streams(option: str) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["mcp", "grpc://localhost:1", "--stdio", option])
    assert done.exit_code == 2
    assert f"{option.partition('=')[0]} is for callers over HTTP" in done.output


def test_a_model_without_hints_and_names_that_are_no_tools() -> None:
    def echo(**inputs: Any) -> dict[str, Any]:
        """Say it again."""
        return {"said": inputs["text"], "file": inputs["image"]}

    echo_model: Any = echo
    texts = [Tensor(name="text", dtype=bytes, shape=(1,)), Tensor(name="image", dtype=bytes, shape=(1,))]
    outputs = [Tensor(name="said", dtype=bytes, shape=(1,)), Tensor(name="file", dtype=bytes, shape=(1,))]
    from pytriton.decorators import batch

    triton = Triton(config=local_config())
    for name in ("an.echo", "an_echo"):
        triton.bind(name, batch(echo_model), texts, outputs, config=ModelConfig(max_batch_size=4))

    async def run(url: str) -> Any:
        async with connected(url) as client:
            tools = (await client.list_tools()).tools
            assert [(it.name, it.title) for it in tools] == [("an_echo", "an_echo"), ("an_echo_2", "an.echo")]
            assert {it.description for it in tools} == {"Say it again."}
            return await client.call_tool("an_echo_2", {"text": "hi", "image": "/w=="})

    with running(triton), before(triton) as url:
        # Bytes are told from text by what they are.
        assert asyncio.run(run(url)).structured_content == {"said": "hi", "file": {"base64": "/w=="}}


def test_a_call_has_a_deadline(tmp_path: Path) -> None:
    released = tmp_path / "released"

    @model
    def waits(text: str) -> str:
        eventually(released.exists)
        return text

    triton = Triton(config=local_config())
    triton.bind(waits)
    with running(triton), before(triton, "--timeout=0.3") as url:
        result = call(url, "waits", {"text": "a"})
        assert result.is_error
        assert "0.3" in text_of(result)
        released.touch()


def test_a_server_that_is_gone_is_an_error_of_the_tool() -> None:
    triton = Triton(config=local_config())
    triton.bind(early)
    with contextlib.ExitStack() as opened:
        with running(triton):
            url = opened.enter_context(before(triton))
            assert text_of(call(url, "early", {"text": "a"})) == "early a"
        result = call(url, "early", {"text": "a"})
        assert result.is_error
        assert "server" in text_of(result)

        async def run() -> None:
            async with connected(url) as client:
                with pytest.raises(MCPError, match="The server of the models does not answer"):
                    await client.list_tools()

        asyncio.run(run())


def test_a_model_that_sleeps_wakes_and_a_worker_that_dies_is_an_error() -> None:
    x, y = Tensor(name="x", dtype=np.float32, shape=(1,)), Tensor(name="y", dtype=np.float32, shape=(1,))
    triton = Triton(config=local_config())
    worker = ProcessWorker(process_models.make, starts_asleep=True)
    triton.bind("m", worker, [x], [y], config=ModelConfig(attach_timeout_s=PATIENCE_S))

    async def run(url: str) -> tuple[Any, Any, Any]:
        async with connected(url) as client:
            (tool,) = (await client.list_tools()).tools
            assert is_asleep(triton, tool.name)
            return (
                await client.call_tool("m", {"x": 3}),
                await client.call_tool("m", {"x": process_models.DIE}),
                await client.call_tool("m", {"x": 4}),
            )

    with running(triton), before(triton) as url:
        woken, lost, again = asyncio.run(run(url))
    assert woken.structured_content == {"y": 6.0}
    assert lost.is_error
    assert "worker" in text_of(lost)
    assert again.structured_content == {"y": 8.0}


def test_a_server_that_does_not_tell_its_models() -> None:
    triton = Triton(config=local_config(), security_config=TritonSecurityConfig(access_token="secret"))
    triton.bind(early)

    async def run(url: str) -> tuple[Any, list[str]]:
        async with connected(url) as client:
            result = await client.call_tool("early", {"text": "a"})
            return result, [] if result.is_error else [it.name for it in (await client.list_tools()).tools]

    with running(triton):
        with before(triton, "--access-token=wrong") as url:
            result, _ = asyncio.run(run(url))
            assert result.is_error
            assert "give the command mcp its access token, or names by --model" in text_of(result)
        with before(triton, "--access-token=wrong", "--model=early") as url:
            result, names = asyncio.run(run(url))
            assert (text_of(result), names) == ("early a", ["early"])


# ---- who may call ---------------------------------------------------------------------------------------------------

CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "shout", "arguments": {"text": "a"}}}
ACCEPTS = {"Accept": "application/json, text/event-stream"}


def post(url: str, headers: dict[str, str]) -> int:
    return httpx.post(url, json=CALL, headers=ACCEPTS | headers, timeout=PATIENCE_S).status_code


def test_pages_of_other_sites_are_refused(served: tuple[str, Path, StdioServerParameters]) -> None:
    url = served[0]
    own = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
    refused = (
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": own.replace("127.0.0.1", "localhost")},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": own},
    )
    assert [post(url, headers) for headers in refused] == [403] * len(refused)
    # A name of the page's own for this address.
    assert post(url, {"Host": "rebound.example"}) == 421
    assert post(url, {"Host": "rebound.example:80", "Origin": "http://rebound.example:80"}) == 421
    # No session has been opened, so those that pass are refused by the protocol.
    passing: tuple[dict[str, str], ...] = (
        {},
        {"Origin": own},
        {"Sec-Fetch-Site": "same-origin", "Origin": own},
        {"Host": "localhost:1"},
    )
    assert {post(url, headers) for headers in passing} <= {200, 400}


def test_a_key_a_further_name_and_an_origin() -> None:
    triton = Triton(config=local_config())
    triton.bind(early)
    with running(triton):
        with before(triton, **{API_KEY_VARIABLE: "secret"}) as url:
            assert post(url, {}) == 401
            assert post(url, {"Authorization": "Bearer wrong"}) == 401
            assert post(url, {"Authorization": "Bearer secret", "Host": "tools.example"}) in (200, 400)

            # As the page has it, which programs for agents read from a file.
            written = (ROOT / "docs" / "mcp.md").read_text().partition("```json")[2].partition("```")[0]
            asked = json.loads(written.partition("\n")[2])["mcpServers"]["models"]
            assert (asked["type"], urlsplit(asked["url"]).path) == ("http", urlsplit(url).path)
            headers = {name: value.replace("KEY", "secret") for name, value in asked["headers"].items()}

            async def names() -> list[str]:
                async with (
                    httpx2.AsyncClient(headers=headers) as http,
                    connected(streamable_http_client(url, http_client=http)) as client,
                ):
                    return [it.name for it in (await client.list_tools()).tools]

            assert asyncio.run(names()) == ["early"]
        with before(triton, "--host=tools.example", "--cors=https://app.example", "--model=early") as url:
            assert post(url, {"Host": "tools.example"}) in (200, 400)
            assert post(url, {"Origin": "https://app.example"}) in (200, 400)
            asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
            answer = httpx.options(url, headers=asked, timeout=PATIENCE_S)
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
            assert text_of(call(url, "early", {"text": "a"})) == "early a"


# ---- the command line -----------------------------------------------------------------------------------------------


def checked(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "app.py").write_text(APP)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", str(folder / "app.py"), "--check", *options])
    return done.exit_code, done.output


def test_check_says_which_tools_there_are(tmp_path: Path) -> None:
    code, told = checked(tmp_path, "--mcp", "0")
    assert code == 0, told
    assert "MCP: shout is the tool shout\n" in told
    assert "MCP: turn is the tool turn, which has no docstring" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--mcp", "8000"], "the port 8000 is to be that of the MCP endpoint and one of the server as well"),
        (["--mcp-host", "a.example"], "--mcp-host is for --mcp"),
        (["--mcp", "0", "--mcp-key-file", "nothing"], "the API key cannot be read from nothing"),
    ],
)
def test_options_that_are_not_acceptable(tmp_path: Path, options: list[str], told: str) -> None:
    code, output = checked(tmp_path, *options)
    assert code != 0
    assert told in " ".join(output.replace("│", " ").split())
