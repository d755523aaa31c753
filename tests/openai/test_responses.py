"""The Responses API, asked by the official client: texts, tools, structured answers, thoughts, events."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypedDict, get_args

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytest.importorskip("openai")

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

import openai
from openai import AsyncOpenAI, OpenAI
from pytriton.decorators import model
from pytriton.triton import Triton
from support.language.endpoints import Served, error_of
from support.serving import local_config, running
from support.waiting import PATIENCE_S

TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "strict": True,
}
ASK = "What is 19 and 23?"
EVENTS: TypeAdapter[Any] = TypeAdapter(get_args(ResponseStreamEvent)[0])


class Piece(TypedDict, total=False):
    text: str
    tool_calls: str
    reasoning_content: str
    refusal: str
    logprobs: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


TEMPLATE = (
    "{% for it in messages %}<{{ it.role }}>{% if it.reasoning_content %}({{ it.reasoning_content }}){% endif %}"
    "{{ it.content }}{% for call in it.tool_calls or [] %}[{{ call.function.name }}{{ call.function.arguments.a }}]"
    "{% endfor %}{% endfor %}"
)


@model(parameters={"chat_template": TEMPLATE})
async def ruled(
    prompt: str,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: str = "auto",
    response_format: dict[str, Any] | None = None,
    reasoning_effort: str = "",
    max_tokens: int = 0,
    logprobs: bool = False,
) -> AsyncIterator[Piece]:
    """Says by rule all that an answer may have."""
    if "fail" in prompt:
        yield Piece(text="well ")
        raise ValueError("failed in the midst")
    if "nothing" in prompt:
        return
    if "forbidden" in prompt:
        yield Piece(refusal="I will ")
        yield Piece(refusal="not.")
        return
    if response_format is not None:
        for piece in ('{"name": "Ada"', ', "age": 36}' if "wrong" not in prompt else "}"):
            yield Piece(text=piece)
        return
    if reasoning_effort:
        yield Piece(reasoning_content="hm, ")
        yield Piece(reasoning_content="well: ")
    if tools and "<tool>" not in prompt:
        names = [tool["function"]["name"] for tool in tools]
        if tool_choice == "required":
            yield Piece(text="Let me see.")
        for index, name in enumerate(names):
            begin = {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": '{"a": '}}
            yield Piece(tool_calls=json.dumps(begin))
        # Pieces of several calls, by turns.
        for index in range(len(names)):
            yield Piece(tool_calls=json.dumps({"index": index, "function": {"arguments": f"{19 + index}}}"}}))
        return
    words = f"so: {prompt}".split(" ")
    for number, word in enumerate(words[: max_tokens or None], 1):
        told: list[Any] = [{"token": word, "logprob": -0.5, "bytes": [1], "top_logprobs": []}] if logprobs else []
        reason = "length" if number == max_tokens else ""
        yield Piece(
            text=word + " " * (number < len(words)), logprobs=json.dumps(told), finish_reason=reason,
            prompt_tokens=7, completion_tokens=number,
        )  # fmt: skip


@model
async def plain(prompt: str, images: list[bytes] | None = None) -> str:
    return f"{prompt} {images}"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    triton = Triton(config=local_config())
    for each in (ruled, plain):
        triton.bind(each)
    with running(triton), Served(triton) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client


def told(client: OpenAI, given: Any = ASK, **asked: Any) -> Any:
    """Return an answer, the same at once and as a stream."""
    arguments: dict[str, Any] = {"model": "ruled", "input": given, **asked}
    whole = client.responses.create(**arguments)
    Response.model_validate(whole.model_dump(exclude_unset=True), strict=True)
    events = list(client.responses.create(**arguments, stream=True))
    for event in events:
        EVENTS.validate_python(event.model_dump(exclude_unset=True), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert events[-1].type == f"response.{whole.status}"
    assert shape(last) == shape(whole)
    # What grew with the events is what was said in the end.
    items: list[Any] = [event.item for event in events if event.type == "response.output_item.done"]
    items.sort(key=lambda item: [it.id for it in last.output].index(item.id))
    assert items == last.output
    for item in last.output:
        said = [getattr(event, "delta", "") for event in events if getattr(event, "item_id", "") == item.id]
        if item.type == "function_call":
            assert "".join(said) == item.arguments
        elif item.type == "message":
            assert "".join(said) == "".join(
                getattr(part, "text", getattr(part, "refusal", "")) for part in item.content
            )
    return whole


def shape(answer: Response) -> Any:
    """What of an answer does not change from one to the next."""
    kept = answer.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in kept["output"]:
        item.pop("id")
    return kept


def test_a_text_and_what_it_took(client: OpenAI) -> None:
    answer = told(client, instructions="Be terse.", temperature=0.5, metadata={"a": "b"})
    assert answer.output_text == f"so: <system>Be terse.<user>{ASK}"
    assert (answer.status, answer.instructions, answer.metadata) == ("completed", "Be terse.", {"a": "b"})
    assert answer.usage is not None
    assert answer.usage.input_tokens == 7
    assert answer.usage.output_tokens == len(answer.output_text.split(" "))
    short = told(client, max_output_tokens=2)
    assert (short.status, short.output_text) == ("incomplete", "so: <user>What ")
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"
    assert told(client, "nothing").output_text == ""


def text_of(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


def test_a_conversation_of_items(client: OpenAI) -> None:
    said = {"type": "output_text", "text": "42.", "annotations": []}
    items: Any = [
        {"role": "developer", "content": "Be terse."},
        {"type": "message", "role": "user", "content": [text_of("19 "), text_of("and 23?")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "add them"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "add", "arguments": '{"a": 19}'},
        {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": ", then"}]},
        {"type": "function_call", "call_id": "2", "name": "sub", "arguments": '{"a": 5}'},
        {"type": "function_call_output", "call_id": "1", "output": "42"},
        {"type": "function_call_output", "call_id": "2", "output": [text_of("18")]},
        {"role": "assistant", "content": [said], "type": "message", "id": "msg_1", "status": "completed"},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    assert told(client, items).output_text == (
        "so: <developer>Be terse.<user>19 and 23?<assistant>(add them, then)[add19][sub5]<tool>42<tool>18<assistant>42."
        "<user>Thanks"
    )


def test_tools_and_the_agent_that_calls_them(client: OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": ASK}]
    other = {"type": "function", "name": "sub", "parameters": {}, "strict": False}
    answer = told(client, items, tools=[TOOL, other])
    assert [(it.type, it.name, it.arguments, it.call_id) for it in answer.output] == [
        ("function_call", "add", '{"a": 19}', "call_0"), ("function_call", "sub", '{"a": 20}', "call_1")
    ]  # fmt: skip
    items += answer.output
    items += [{"type": "function_call_output", "call_id": it.call_id, "output": "42"} for it in answer.output]
    assert told(client, items, tools=[TOOL, other]).output_text.endswith("[add19][sub20]<tool>42<tool>42")
    chosen: Any = {"type": "function", "name": "sub"}
    assert json.loads(json.dumps(told(client, tools=[TOOL, other], tool_choice=chosen).output[0].name)) == "add"
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}]}
    assert [it.name for it in told(client, tools=[TOOL, other], tool_choice=allowed).output] == ["sub"]
    said = told(client, tools=[TOOL], tool_choice="required").output
    assert [it.type for it in said] == ["message", "function_call"]
    assert told(client, tools=[TOOL], tool_choice="none").output_text.startswith("so: ")
    with client.responses.stream(model="ruled", input=ASK, tools=[TOOL]) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert snapshots == ['{"a": ', '{"a": 19}']
    assert final.output[0].type == "function_call"


class Person(BaseModel):
    name: str
    age: int


def test_structured_answers(client: OpenAI) -> None:
    parsed = client.responses.parse(model="ruled", input=ASK, text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)
    with client.responses.stream(model="ruled", input=ASK, text_format=Person) as stream:
        done = [event.parsed for event in stream if event.type == "response.output_text.done"]
        assert done == [stream.get_final_response().output_parsed] == [Person(name="Ada", age=36)]
    assert json.loads(told(client, text={"format": {"type": "json_object"}}).output_text)["name"] == "Ada"
    with pytest.raises(openai.InternalServerError, match="'age' is a required property"):
        client.responses.parse(model="ruled", input="wrong", text_format=Person)
    with pytest.raises(openai.BadRequestError, match="not supported by model 'plain'") as caught:
        client.responses.parse(model="plain", input=ASK, text_format=Person)
    assert caught.value.param == "text"


def test_thoughts_refusals_and_logprobs(client: OpenAI) -> None:
    thought = told(client, reasoning={"effort": "low"})
    assert [it.type for it in thought.output] == ["reasoning", "message"]
    assert thought.output[0].content[0].text == "hm, well: "
    assert thought.usage is not None
    assert thought.usage.output_tokens_details.reasoning_tokens == 3
    refused = told(client, "forbidden").output
    assert refused[0].content[0].refusal == "I will not."
    spoken = told(client, include=["message.output_text.logprobs"], top_logprobs=0).output
    assert [it.token for it in spoken[0].content[0].logprobs] == f"so: <user>{ASK}".split(" ")
    assert told(client, include=["reasoning.encrypted_content"]).output[0].content[0].logprobs == []


def test_an_answer_that_fails(client: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="failed in the midst"):
        client.responses.create(model="ruled", input="fail")
    events = list(client.responses.create(model="ruled", input="fail", stream=True))
    assert events[-1].type == "response.failed"
    EVENTS.validate_python(events[-1].model_dump(exclude_unset=True), strict=True)
    assert events[-1].response.error is not None
    assert "failed in the midst" in events[-1].response.error.message


def test_images_and_the_asynchronous_client(served: Served) -> None:
    url = f"data:image/png;base64,{base64.b64encode(b'png').decode()}"

    async def ask() -> str:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
            content: Any = [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": url, "detail": "auto"},
            ]
            answer = await client.responses.create(model="plain", input=[{"role": "user", "content": content}])
            return answer.output_text

    assert asyncio.run(ask()) == "user: see\nassistant: [b'png']"


def test_the_raw_events(served: Served) -> None:
    answer = served.post("/v1/responses", {"model": "plain", "input": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    for event in answer.text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        assert json.loads(fields["data"])["type"] == fields["event"]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
        ({"conversation": "conv_1"}, "conversation", "keeps no answers"),
        ({"background": True}, "background", "keeps no answers"),
        ({"prompt": {"id": "p"}}, "prompt", "keeps no answers"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", ""),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "nothing is kept"),
        ({"input": [{"role": "king", "content": "x"}]}, "input", "input[0].role: expected one of"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content: expected a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input", "files"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input", "files"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "input[0]: expected a call"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input", "a list of parts"),
        ({"input": [{"type": "function_call_output", "output": 5}]}, "input", "input[0].output"),
        ({"tools": [{"type": "web_search"}]}, "tools", "there are none of OpenAI's here"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice: expected"),
        ({"tool_choice": "required"}, "tool_choice", "tools to choose from"),
        ({"text": {"format": {"type": "grammar"}}}, "text", "text.format: expected"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "response_format: expected"),
        ({"text": "x"}, "text", ""),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"temperature": 3}, "temperature", "less than"),
        ({"top_logprobs": 99}, "top_logprobs", "less than"),
        ({"n": 2}, "n", "one answer"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "include_obfuscation"),
        ({"model": "nobody"}, "model", "does not exist"),
    ],
)  # fmt: skip
def test_requests_that_are_refused(served: Served, body: dict[str, Any], param: str, reason: str) -> None:
    answer = served.post("/v1/responses", {"model": "ruled", "input": "x", **body})
    assert answer.status_code in (400, 404), answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert reason in error["message"]


def test_nothing_is_kept(client: OpenAI, served: Served) -> None:
    answer = client.responses.create(model="ruled", input="x", store=True, truncation="auto", user="me")
    assert answer.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="this server keeps none"):
        client.responses.retrieve(answer.id)
    assert httpx.delete(f"{served.url}/v1/responses/{answer.id}", timeout=PATIENCE_S).status_code == 404
