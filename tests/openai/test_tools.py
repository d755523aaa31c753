"""Tools, structured answers and all else that a chat may ask for and a model may answer beside its text."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypedDict

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytest.importorskip("openai")

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

import openai
from openai import OpenAI
from pytriton.decorators import model
from pytriton.triton import Triton
from support.language.endpoints import Served
from support.serving import local_config, running

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
ASK: Any = [{"role": "user", "content": "What is 19 and 23?"}]


class Told(TypedDict):
    text: str
    tool_calls: str
    finish_reason: str


@model
async def ruled(prompt: str, tools: list[dict[str, Any]] | None = None, tool_choice: str = "auto") -> Told:
    """Calls the first tool, until the conversation has its answer."""
    if tools is None or "tool: " in prompt:
        return Told(text=f"so: {prompt.splitlines()[-2]}", tool_calls="", finish_reason="")
    name = (
        tools[0]["function"]["name"]
        if tool_choice in ("auto", "required")
        else json.loads(tool_choice)["function"]["name"]
    )
    return Told(text="", tool_calls=json.dumps({"name": name, "arguments": {"a": 19, "b": 23}}), finish_reason="")


class Piece(TypedDict, total=False):
    text: str
    tool_calls: str
    reasoning_content: str
    refusal: str
    logprobs: str


@model
async def streamed(prompt: str, tools: str = "[]", logprobs: bool = False) -> AsyncIterator[Piece]:
    """Tells all that there is, in pieces."""
    if "forbidden" in prompt:
        yield Piece(refusal="I will ")
        yield Piece(refusal="not.")
        return
    yield Piece(reasoning_content="hm, ")
    yield Piece(reasoning_content="well: ")
    if json.loads(tools):
        begin = {"index": 0, "id": "call_x", "function": {"name": "add", "arguments": ""}}
        yield Piece(tool_calls=json.dumps([begin]))
        for piece in ('{"a": 19', ', "b"', ": 23}"):
            yield Piece(tool_calls=json.dumps([{"index": 0, "function": {"arguments": piece}}]))
        yield Piece(tool_calls=json.dumps({"name": "sub", "arguments": {"a": 1}}))
        return
    for word in ("forty", "two"):
        told: list[Any] = [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []}] if logprobs else []
        yield Piece(text=word, logprobs=json.dumps(told))


SHOWS_TOOLS = (
    "{% for tool in tools or [] %}<fn>{{ tool | tojson }}</fn>{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.a }}]{% endfor %}"
    "{% endfor %}"
)
WRITTEN = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 19, "b": "ü"}}\n</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 19, "b": "ü"}}; {"name": "add", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 19, "b": "ü"}}, {"name": "add", "arguments": {}}]',
}


@model(name="hermes", parameters={"chat_template": SHOWS_TOOLS, "tool_parser": "hermes"})
def hermes(prompt: str) -> Iterator[bytes]:
    yield from written("hermes", prompt)


@model(name="llama3", parameters={"chat_template": SHOWS_TOOLS, "tool_parser": "llama3"})
def llama3(prompt: str) -> Iterator[bytes]:
    yield from written("llama3", prompt)


@model(name="mistral", parameters={"chat_template": SHOWS_TOOLS, "tool_parser": "mistral"})
def mistral(prompt: str) -> Iterator[bytes]:
    yield from written("mistral", prompt)


def written(family: str, prompt: str) -> Iterator[bytes]:
    """Write calls where there are tools, else what only looks so, byte by byte."""
    text = (
        WRITTEN[family]
        if "<fn>" in prompt and "no call" not in prompt
        else "{[<tool_cal [TOOL_C <|python_ta } " + prompt
    )
    for byte in text.encode():
        yield bytes([byte])


@model
async def formed(prompt: str, response_format: dict[str, Any] | None = None) -> AsyncIterator[str]:
    """Writes what fits the schema, but for some prompts."""
    for piece in (
        '{"name": "Ada"',
        ', "age": ',
        '"old"}' if "wrong" in prompt else "36}",
        "" if response_format else "!",
    ):
        yield piece


@model
async def schemed(prompt: str, json_schema: str = "") -> str:
    return json.dumps({"name": "Ada", "age": len(json.loads(json_schema)["properties"])})


@model
async def files(prompt: str, images: list[bytes] | None = None, audio: list[bytes] | None = None) -> str:
    return f"{prompt} {images} {audio}"


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    triton = Triton(config=local_config())
    for each in (ruled, streamed, hermes, llama3, mistral, formed, schemed, files):
        triton.bind(each)
    with running(triton), Served(triton) as served, served.client() as client:
        yield client


def whole(client: OpenAI, **asked: Any) -> Any:
    """Return a choice, the same at once and as a stream."""
    answer = client.chat.completions.create(**asked)
    ChatCompletion.model_validate(answer.model_dump(exclude_unset=True), strict=True)
    choice = answer.choices[0]
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            if event.type == "chunk":
                ChatCompletionChunk.model_validate(event.chunk.model_dump(exclude_unset=True), strict=True)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == choice.finish_reason
    assert (final.message.content or None) == (choice.message.content or None)
    assert (final.message.refusal or None) == choice.message.refusal
    assert calls(final.message) == calls(choice.message)
    return choice


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def test_an_agent_of_several_turns(client: OpenAI) -> None:
    messages: Any = list(ASK)
    choice = whole(client, model="ruled", messages=messages, tools=[TOOL])
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert calls(choice.message) == [("add", {"a": 19, "b": 23})]
    [call] = choice.message.tool_calls
    messages += [choice.message]
    calling = whole(client, model="ruled", messages=messages).message.content
    assert calling == 'so: assistant: calls add {"a": 19, "b": 23}'
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "42"}]
    assert whole(client, model="ruled", messages=messages, tools=[TOOL]).message.content == "so: tool: 42"


def test_json_that_is_too_deep_is_the_callers_fault(client: OpenAI) -> None:
    def nested(levels: int) -> Any:
        value: Any = {}
        for _ in range(levels):
            value = {"a": value}
        return value

    for levels in (200, 800):
        arguments = json.dumps(nested(levels))
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages: Any = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
        with pytest.raises(openai.BadRequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
            client.chat.completions.create(model="hermes", messages=messages)
        tool = {"type": "function", "function": {"name": "add", "parameters": nested(levels)}}
        deep: Any
        for deep in ({"tools": [tool]}, {"metadata": nested(levels)}, {"tools": nested(levels)}):
            with pytest.raises(openai.BadRequestError, match="at most 128 levels of JSON"):
                client.chat.completions.create(model="hermes", messages=ASK, extra_body=deep)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps(nested(100))}}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert client.chat.completions.create(model="hermes", messages=messages).choices


def test_choices_of_tools(client: OpenAI) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    asked: dict[str, Any] = {"model": "ruled", "messages": ASK, "tools": [TOOL, other]}
    for choice, name in (("auto", "add"), ("required", "add"), (other, "other")):
        assert calls(whole(client, **asked, tool_choice=choice).message)[0][0] == name
    assert whole(client, **asked, tool_choice="none").message.tool_calls is None
    nobody = {"type": "function", "function": {"name": "nobody"}}
    wrong: Any
    for wrong in ("any", nobody, {"type": "custom"}):
        with pytest.raises(openai.BadRequestError, match="tool_choice: expected"):
            client.chat.completions.create(**asked, tool_choice=wrong)
    with pytest.raises(openai.BadRequestError, match="It would have an optional input 'tool_choice'"):
        client.chat.completions.create(**{**asked, "model": "hermes"}, tool_choice="required")
    for wrong in ({"type": "function"}, {"type": "retrieval"}, {"type": "function", "function": {"name": 1}}):
        with pytest.raises(openai.BadRequestError, match=r"tools\[0\]: expected"):
            client.chat.completions.create(**{**asked, "tools": [wrong]})
    with pytest.raises(openai.BadRequestError, match="It would have an optional input 'tools'"):
        client.chat.completions.create(**{**asked, "model": "formed"})


def test_pieces_of_calls_and_thoughts_are_official_deltas(client: OpenAI) -> None:
    choice = whole(client, model="streamed", messages=ASK, tools=[TOOL])
    assert calls(choice.message) == [("add", {"a": 19, "b": 23}), ("sub", {"a": 1})]
    assert choice.message.tool_calls[0].id == "call_x"
    assert choice.message.reasoning_content == "hm, well: "
    stream = client.chat.completions.create(model="streamed", messages=ASK, tools=[TOOL], stream=True)
    deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [(it.index, it.id is None, it.function and it.function.arguments) for it in deltas[:4]] == [
        (0, False, ""), (0, True, '{"a": 19'), (0, True, ', "b"'), (0, True, ": 23}"),
    ]  # fmt: skip


def test_refusals_and_logprobs(client: OpenAI) -> None:
    refused = whole(client, model="streamed", messages=[{"role": "user", "content": "forbidden"}])
    assert (refused.message.content, refused.message.refusal, refused.finish_reason) == (None, "I will not.", "stop")
    plain = client.chat.completions.create(model="streamed", messages=ASK).choices[0]
    assert (plain.message.content, plain.logprobs) == ("fortytwo", None)
    told = whole(client, model="streamed", messages=ASK, logprobs=True).logprobs
    assert [token.token for token in told.content] == ["forty", "two"]
    with pytest.raises(openai.BadRequestError, match="an output 'logprobs'"):
        client.chat.completions.create(model="ruled", messages=ASK, logprobs=True)
    with pytest.raises(openai.BadRequestError, match='beside "logprobs": true'):
        client.chat.completions.create(model="streamed", messages=ASK, top_logprobs=2)
    # There they would get lost.
    with pytest.raises(openai.BadRequestError, match=r"logprobs: not supported .* It is for /v1/chat/completions"):
        client.completions.create(model="streamed", prompt="x", logprobs=1)
    with pytest.raises(openai.BadRequestError, match=r"tools: not supported .* It is for /v1/chat/completions"):
        client.completions.create(model="streamed", prompt="x", extra_body={"tools": [{"type": "function"}]})


@pytest.mark.parametrize("family", WRITTEN)
def test_calls_that_are_written_into_the_text(client: OpenAI, family: str) -> None:
    choice = whole(client, model=family, messages=ASK, tools=[TOOL])
    assert calls(choice.message) == [("add", {"a": 19, "b": "ü"}), ("add", {})]
    assert choice.message.content == ("Let me see." if family == "hermes" else None)
    assert choice.finish_reason == "tool_calls"
    # Without tools, and where they only look so, they are text.
    for tools in ({}, {"tools": [TOOL]}):
        said: Any = [{"role": "user", "content": "no call"}]
        text = whole(client, model=family, messages=said, **tools).message
        assert text.content.startswith("{[<tool_cal [TOOL_C <|python_ta } <")
        assert text.tool_calls is None
    # The template has the arguments of earlier calls as values.
    history: Any = [*ASK, choice.message, {"role": "tool", "tool_call_id": "1", "content": "42"}]
    assert "[add 19]" in whole(client, model=family, messages=history).message.content


class Person(BaseModel):
    name: str
    age: int


def test_structured_answers(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(model="formed", messages=ASK, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)
    assert whole(client, model="formed", messages=ASK, response_format={"type": "json_object"}).message.content == (
        '{"name": "Ada", "age": 36}'
    )
    schema = {"name": "p", "schema": Person.model_json_schema()}
    form: Any = {"type": "json_schema", "json_schema": schema}
    assert json.loads(whole(client, model="schemed", messages=ASK, response_format=form).message.content)["age"] == 2
    wrong: Any = [{"role": "user", "content": "wrong"}]
    with pytest.raises(openai.InternalServerError, match=r"response_format: \$\.age: 'old' is not of type 'integer'"):
        client.chat.completions.create(model="formed", messages=wrong, response_format=form)
    with pytest.raises(openai.APIError, match=r"\$\.age"):
        list(client.chat.completions.create(model="formed", messages=wrong, response_format=form, stream=True))
    with pytest.raises(openai.BadRequestError, match="an optional input 'response_format'"):
        client.chat.completions.create(model="ruled", messages=ASK, response_format=form)


def test_schemas_that_are_hostile_or_wrong(client: OpenAI) -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"properties": {"a": deep}}
    bad: Any
    for bad in ({"type": "text/plain"}, {"type": "json_schema"}, schema_of({"type": 1}), schema_of(deep)):
        with pytest.raises(openai.BadRequestError, match="response_format: "):
            client.chat.completions.create(model="formed", messages=ASK, response_format=bad)
    # A pattern that takes for ever is not tried, and no address is asked.
    slow = schema_of({"properties": {"name": {"pattern": "^(([a-zA-Z])+)+$"}}})
    assert client.chat.completions.create(model="formed", messages=ASK, response_format=slow).choices
    for reference in ("http://127.0.0.1:1/schema", "#"):
        bad = schema_of({"$ref": reference})
        with pytest.raises(openai.BadRequestError, match=r"response_format: json_schema\.schema: it refers to"):
            client.chat.completions.create(model="formed", messages=ASK, response_format=bad)


def schema_of(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def test_files_in_messages(client: OpenAI) -> None:
    def data(content: bytes) -> str:
        return base64.b64encode(content).decode()

    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data(b'png')}"}}
    sound = {"type": "input_audio", "input_audio": {"data": data(b"wav"), "format": "wav"}}
    text = {"type": "text", "text": "what is this?"}
    messages: Any = [{"role": "user", "content": [text, image, sound, image]}]
    answer = client.chat.completions.create(model="files", messages=messages).choices[0].message.content
    assert answer == "user: what is this?\nassistant: [b'png', b'png'] [b'wav']"
    remote = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    for wrong, reason in ((remote, "the server fetches nothing"), ({"type": "file"}, "expected a part such as")):
        messages = [{"role": "user", "content": [wrong]}]
        with pytest.raises(openai.BadRequestError, match=reason):
            client.chat.completions.create(model="files", messages=messages)
    with pytest.raises(openai.BadRequestError, match="the only ones that model"):
        client.chat.completions.create(model="ruled", messages=[{"role": "user", "content": [image]}])  # type: ignore[list-item, misc]


def test_fields_that_nobody_knows_have_no_effect(client: OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        fields: Any = {
            "ignore_eos": True,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
        }
        assert client.chat.completions.create(model="formed", messages=ASK, extra_body=fields).choices
    assert caplog.text.count("'ignore_eos'") == 1
