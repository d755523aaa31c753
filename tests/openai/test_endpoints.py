"""The endpoints of the OpenAI API before a real server, asked by the official clients."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import random
import re
import socket
import threading
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytest.importorskip("openai")

import httpx
from fastapi import FastAPI
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import openai
from openai import AsyncOpenAI, OpenAI
from pytriton.client.exceptions import PyTritonClientClosedError
from pytriton.decorators import Shape, batch, model
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.openai import application
from pytriton.openai._backend import Asked, Backend, Link
from pytriton.openai._models import ENDPOINTS, EndpointModel
from pytriton.triton import Triton
from support.language import CharacterModel, WordVectors
from support.language.endpoints import Served, error_of
from support.serving import local_config, running
from support.waiting import PATIENCE_S, drive, eventually, eventually_async

CHARACTERS = CharacterModel()
VECTORS = WordVectors()
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Piece(TypedDict):
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


@model(parameters={"chat_template": TEMPLATE})
def writer(
    prompt: str, max_tokens: int = 40, temperature: float = 0.0, seed: int = 0, style: np.float32 | None = None
) -> Iterator[Piece]:
    for number, character in enumerate(CHARACTERS.continue_text(prompt, max_tokens, temperature, seed), 1):
        reason = "length" if number == max_tokens else ""
        yield Piece(text=character, prompt_tokens=len(prompt), completion_tokens=number, finish_reason=reason)


@model
def echo(text: str) -> str:
    if "fail" in text:
        raise ValueError("this text is bad")
    return text


def repeat(text: str) -> str:
    return text


class Unending:
    """A stream that goes on until somebody closes it."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.begun = threading.Event()

    def __call__(self, requests: Any) -> Iterator[list[dict[str, Any]]]:
        self.begun.set()
        try:
            while True:
                yield [{"text": np.array([b"on and "], object)} for _ in requests]
        finally:
            self.closed.set()


def silent(requests: Any) -> Iterator[list[dict[str, Any]]]:
    """Says nothing before it is cancelled."""
    WAITING.set()
    while not all(request.is_cancelled() for request in requests):
        STEP.wait(0.01)
    CANCELLED.set()
    yield [{"text": np.array([b""], object)} for _ in requests]


WAITING, CANCELLED, STEP = threading.Event(), threading.Event(), threading.Event()


@model
def pieces(text: str) -> Iterator[bytes]:
    """The text in its bytes, so that characters are cut; fails in the end where it is to."""
    for byte in text.encode():
        yield bytes([byte])
    if "fail" in text:
        raise ValueError("failed in the midst")


def shown(requests: Any) -> list[dict[str, Any]]:
    """Tells what it was asked with."""
    return [
        {"text": np.array([json.dumps({**request.parameters, "id": request.request_id}).encode()], object)}
        for request in requests
    ]


class Vector(TypedDict):
    vector: Annotated[NDArray[np.float32], Shape(16)]
    prompt_tokens: int


@model(max_batch_size=8)
def embed(text: str) -> Vector:
    return Vector(vector=VECTORS(text), prompt_tokens=VECTORS.count_words(text))


@batch
def rows(text: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {"vector": np.stack([VECTORS(row[0].decode()) for row in text])}


@model
def add(a: float, b: float) -> float:
    return a + b


UNENDING = Unending()
TEXT = Tensor(name="prompt", dtype=bytes, shape=(1,))


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    triton = Triton(config=local_config(grpc_header_forward_pattern="traceparent"))
    for each in (writer, echo, pieces, embed, add):
        triton.bind(each)
    given = [Tensor(name="text", dtype=bytes, shape=(1,))]
    vector = [Tensor(name="vector", dtype=np.float32, shape=(16,))]
    stream = ModelConfig(batching=False, decoupled=True)
    triton.bind("unending", UNENDING, inputs=[TEXT], outputs=given, config=stream)
    triton.bind("silent", silent, inputs=[TEXT], outputs=given, config=stream)
    triton.bind("shown", shown, inputs=[TEXT], outputs=given, config=ModelConfig(batching=False))
    triton.bind("rows", rows, inputs=given, outputs=vector, config=ModelConfig(max_batch_size=3))
    with running(triton):
        yield triton


@pytest.fixture(scope="module")
def served(triton: Triton) -> Iterator[Served]:
    with Served(triton) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client


def expected(prompt: str, number: int = 40, temperature: float = 0.0, seed: int = 0) -> str:
    return "".join(CHARACTERS.continue_text(prompt, number, temperature, seed))


def test_models_that_take_text_are_listed(client: OpenAI) -> None:
    found = client.models.list().data
    assert [it.id for it in found] == ["echo", "embed", "pieces", "rows", "shown", "silent", "unending", "writer"]
    one = client.models.retrieve("writer")
    assert Model.model_validate(one.model_dump(), strict=True).object == "model"
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="one input that is not optional"):
        client.models.retrieve("add")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_the_template_of_the_model(client: OpenAI, stream: bool) -> None:
    messages: Any = [
        {"role": "system", "content": "You are a server."},
        {"role": "user", "content": [{"type": "text", "text": "A worker "}, {"type": "text", "text": "that"}]},
    ]
    prompt = "<system>You are a server.<user>A worker that<assistant>"
    arguments: Any = {"model": "writer", "messages": messages, "max_completion_tokens": 30}
    if not stream:
        answer = client.chat.completions.create(**arguments)
        ChatCompletion.model_validate(answer.model_dump(), strict=True)
        assert answer.choices[0].message.content == expected(prompt, 30)
        assert answer.choices[0].finish_reason == "length"
        usage = answer.usage
    else:
        arguments["stream_options"] = {"include_usage": True}
        chunks = list(client.chat.completions.create(**arguments, stream=True))
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [it.choices[0].finish_reason for it in chunks[:-1] if it.choices[0].finish_reason] == ["length"]
        assert "".join(it.choices[0].delta.content or "" for it in chunks[:-1]) == expected(prompt, 30)
        assert chunks[-1].choices == []
        assert all(chunk.usage is None for chunk in chunks[:-1])
        usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(prompt), 30, len(prompt) + 30)


def test_the_default_template_and_a_model_with_one_answer(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hällo"}, {"role": "assistant", "content": "oh"}]
    whole = client.chat.completions.create(model="echo", messages=messages)
    assert whole.choices[0].message.content == "user: hällo\nassistant: oh\nassistant:"
    assert whole.choices[0].finish_reason == "stop"
    # Where the model does not count, it is an estimate: a token for each four characters.
    assert whole.usage is not None
    length = len("user: hällo\nassistant: oh\nassistant:")
    assert whole.usage.prompt_tokens == whole.usage.completion_tokens == -(-length // 4)
    chunks = list(
        client.chat.completions.create(
            model="echo", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(it.choices[0].delta.content or "" for it in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_with_several_choices(client: OpenAI, stream: bool) -> None:
    arguments: Any = {
        "model": "writer", "prompt": ["The worker", "A server"], "n": 2, "max_tokens": 12, "temperature": 1.0, "seed": 5
    }  # fmt: skip
    wanted = [expected(prompt, 12, 1.0, seed) for prompt in ("The worker", "A server") for seed in (5, 6)]
    if stream:
        texts = [""] * 4
        for chunk in client.completions.create(**arguments, stream=True):
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
        assert texts == wanted
        return
    answer = client.completions.create(**arguments)
    Completion.model_validate(answer.model_dump(), strict=True)
    assert [it.text for it in answer.choices] == wanted
    assert [it.index for it in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("The worker") + len("A server")
    assert answer.usage.completion_tokens == 4 * 12


def test_zeros_at_the_end_of_a_prompt(client: OpenAI) -> None:
    assert client.completions.create(model="echo", prompt="a\0b\0\0").choices[0].text == "a\0b\0\0"


def test_the_raw_stream_ends_with_done(served: Served) -> None:
    answer = served.post("/v1/completions", {"model": "pieces", "prompt": "äß", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(it.removeprefix("data: "))["choices"][0]["text"] for it in events[:-2]]
    # No half of a character is sent.
    assert texts == ["ä", "ß", ""]


@pytest.mark.parametrize(
    ("stop", "text"), [("wor", "Hello "), (["x", "lo w"], "Hel"), (["world!!"], "Hello world!"), ("H", "")]
)
def test_a_text_ends_before_a_stop_wherever_it_is_cut(client: OpenAI, stop: Any, text: str) -> None:
    whole = client.completions.create(model="pieces", prompt="Hello world!", stop=stop)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "stop")
    chunks = list(client.completions.create(model="pieces", prompt="Hello world!", stop=stop, stream=True))
    assert "".join(it.choices[0].text for it in chunks) == text


def test_a_stop_closes_the_stream_of_the_model(client: OpenAI) -> None:
    UNENDING.closed.clear()
    answer = client.completions.create(model="unending", prompt="go", stop=["and on and on and on"])
    assert answer.choices[0].text == "on "
    assert UNENDING.closed.wait(PATIENCE_S)


def test_a_caller_that_leaves_a_stream_closes_it(client: OpenAI) -> None:
    UNENDING.closed.clear()
    with client.chat.completions.create(
        model="unending", messages=[{"role": "user", "content": "go"}], stream=True
    ) as stream:
        for _ in zip(range(5), stream, strict=False):
            pass
        assert not UNENDING.closed.is_set()
    assert UNENDING.closed.wait(PATIENCE_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_before_the_first_answer_cancels_the_request(served: Served, stream: bool) -> None:
    WAITING.clear()
    CANCELLED.clear()
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=PATIENCE_S)
    body = json.dumps({"model": "silent", "prompt": "x", "stream": stream})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert WAITING.wait(PATIENCE_S)
    connection.close()
    assert CANCELLED.wait(PATIENCE_S)


def test_many_callers_at_once_with_the_asynchronous_client(served: Served) -> None:
    async def ask(client: AsyncOpenAI, seed: int) -> str:
        text = ""
        async for chunk in await client.completions.create(
            model="writer", prompt="The", max_tokens=20, temperature=1.0, seed=seed, stream=True
        ):
            text += chunk.choices[0].text
        return text

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(32)))

    assert asyncio.run(ask_all()) == [expected("The", 20, 1.0, seed) for seed in range(32)]


def test_what_a_model_does_not_declare_comes_as_parameters(served: Served) -> None:
    body = {"model": "shown", "prompt": "x", "temperature": 0.5, "top_p": 1, "max_tokens": 7, "user": "me"}
    answer = served.post("/v1/completions", body, x_request_id="mine-1")
    asked = json.loads(answer.json()["choices"][0]["text"])
    assert {name: asked[name] for name in ("temperature", "max_tokens", "top_p", "id")} == {
        "temperature": 0.5, "max_tokens": 7, "top_p": 1.0, "id": "mine-1"
    }  # fmt: skip
    assert "user" not in asked
    assert answer.headers["x-request-id"] == "mine-1"
    parent = f"00-{'1' * 32}-{'2' * 16}-01"
    traced = served.post("/v1/completions", body, traceparent=parent).json()["choices"][0]["text"]
    assert json.loads(traced)["traceparent"] == parent
    unsampled = served.post("/v1/completions", body, traceparent=parent[:-1] + "0").json()["choices"][0]["text"]
    assert "traceparent" not in json.loads(unsampled)
    assert answer.json()["id"] == "cmpl-mine-1"
    # What could not be a line of a log gets another id.
    other = served.post("/v1/completions", body, x_request_id="two words")
    assert len(other.headers["x-request-id"]) == 32


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_fails(served: Served, stream: bool) -> None:
    answer = served.post("/v1/completions", {"model": "echo", "prompt": "fail", "stream": stream})
    assert answer.status_code == 500
    assert "this text is bad" in error_of(answer)["message"]
    assert answer.headers["x-should-retry"] == "false"


def test_a_stream_that_fails_in_its_midst(client: OpenAI) -> None:
    stream = client.completions.create(model="pieces", prompt="fail", stream=True)
    texts = [next(stream).choices[0].text for _ in "fail"]
    assert "".join(texts) == "fail"
    with pytest.raises(openai.APIError, match="failed in the midst"):
        next(stream)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "text"),
    [
        ("chat/completions", {"messages": []}, 400, "messages", "at least 1 item"),
        (
            "chat/completions",
            {"messages": [{"role": "king", "content": "x"}]},
            400,
            "messages",
            "role: expected one of",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages", "content: expected a te"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages",
            r"content\[0\]: expected a part",
        ),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages", "no tools here"),
        ("completions", {}, 400, "prompt", "Field required"),
        ("completions", {"prompt": [1, 2]}, 400, "prompt", "got tokens"),
        ("completions", {"prompt": []}, 400, "prompt", "1 to 128"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt", "UTF-8"),
        ("completions", {"prompt": "x", "n": 0}, 400, "n", "greater than or equal to 1"),
        ("completions", {"prompt": ["x"] * 3, "n": 100}, 400, "n", "at most 128"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "greater"),
        ("completions", {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens", "integer; got '5'"),
        ("completions", {"prompt": "x", "temperature": 3}, 400, "temperature", "less than or equal to 2"),
        ("completions", {"prompt": "x", "stop": ["a", ""]}, 400, "stop", "of 1 to 1000 characters"),
        ("completions", {"prompt": "x", "logprobs": 2}, 400, "logprobs", "not supported by model 'writer'"),
        ("completions", {"prompt": "x", "echo": True}, 400, "echo", "not supported"),
        ("completions", {"prompt": "x", "suffix": "red"}, 400, "suffix", "max_tokens, seed, style, temperature"),
        ("completions", {"prompt": "x", "colour": "red"}, 200, None, ""),
        ("completions", {"prompt": "x", "seed": 2**62}, 200, None, ""),
        ("completions", {"prompt": "x", "\ud800": 1}, 400, None, ""),
        ("completions", {"prompt": "x", "model": "\ud800"}, 404, "model", "does not exist"),
        ("completions", {"prompt": "x", "style": 10**400}, 400, "style", "expected FP32"),
        ("completions", {"prompt": "x", "style": "loud"}, 400, "style", "expected FP32"),
        ("completions", {"prompt": "x", "style": [1, 2]}, 400, "style", "of the shape"),
        ("completions", {"prompt": "x", "style": 1}, 200, None, ""),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tools", "not supp"),
        ("embeddings", {"input": "x"}, 400, "model", "ask it at /v1/chat/completions or /v1/completions"),
    ],
)
def test_requests_that_are_refused(
    served: Served, path: str, body: dict[str, Any], status: int, param: str | None, text: str
) -> None:
    answer = served.post(f"/v1/{path}", {"model": "writer", **body})
    assert answer.status_code == status
    if status != 200:
        error = error_of(answer)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert re.search(text, error["message"]), error["message"]


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    nothing: dict[str, Any] = {
        "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"},
        "logit_bias": {}, "n": None, "store": False, "service_tier": "default", "modalities": ["text"], "audio": None,
        "verbosity": "medium", "reasoning_effort": "none", "stream_options": None, "user": "me", "metadata": {"a": "b"},
    }  # fmt: skip
    messages = [{"role": "user", "content": "x"}]
    answer = served.post("/v1/chat/completions", {"model": "echo", "messages": messages, **nothing})
    assert answer.status_code == 200, answer.text
    more = {"best_of": 1, "echo": False, "suffix": ""}
    assert served.post("/v1/completions", {"model": "echo", "prompt": "x", **more}).status_code == 200


# What the official client sends for each field that these endpoints have not.
CHAT_FIELDS: dict[str, Any] = {
    "audio": {"format": "mp3", "voice": "alloy"},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "logit_bias": {"50256": -100},
    "logprobs": True,
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "response_format": {"type": "json_object"},
    "stream_options": {"include_usage": True},
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "top_logprobs": 2,
    "web_search_options": {},
}
COMPLETION_FIELDS: dict[str, Any] = {
    "best_of": 3,
    "echo": True,
    "logit_bias": {"50256": -100},
    "logprobs": 0,
    "stream_options": {"include_usage": True},
    "suffix": "x",
}


@pytest.mark.parametrize("name", CHAT_FIELDS)
def test_a_field_of_chats_that_cannot_be_honoured_is_refused(client: OpenAI, name: str) -> None:
    fields = {name: CHAT_FIELDS[name]}
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "x"}], **fields)
    assert caught.value.param == name


@pytest.mark.parametrize("name", COMPLETION_FIELDS)
def test_a_field_of_completions_that_cannot_be_honoured_is_refused(client: OpenAI, name: str) -> None:
    fields = {name: COMPLETION_FIELDS[name]}
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        client.completions.create(model="echo", prompt="x", **fields)
    assert caught.value.param == name


def test_options_of_streams_that_cannot_be_honoured_are_refused(client: OpenAI) -> None:
    for told in ({"include_obfuscation": True}, {"include_usage": "yes"}, {"colour": True}):
        with pytest.raises(openai.BadRequestError, match="stream_options") as caught:
            client.completions.create(model="echo", prompt="x", stream=True, extra_body={"stream_options": told})
        assert caught.value.param == "stream_options"


def test_calls_of_tools_in_messages_need_a_template_that_shows_them(triton: Triton, client: OpenAI) -> None:
    called = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages: Any = [{"role": "assistant", "content": None, "tool_calls": called}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.tool_calls: expected none"):
        client.chat.completions.create(model="writer", messages=messages)
    template = "{{ messages[0].tool_calls[0].function.name }}{{ messages[0].content }}"
    triton.bind(model(name="caller", parameters={"chat_template": template})(repeat))
    answer = client.chat.completions.create(model="caller", messages=messages)
    assert answer.choices[0].message.content == "f"
    triton.unbind("caller")


def test_bodies_that_are_no_requests(served: Served) -> None:
    bad = served.post("/v1/completions", "{oops")
    assert (bad.status_code, error_of(bad)["code"]) == (400, "invalid_json")
    # What Python calls too deep depends on its version.
    for body, reason in (
        ("[" * 200_000, r"recursion|Stack overflow"),
        (b'{"prompt": "\xff"}', "utf-8"),
        ('{"a": NaN}', "NaN is no"),
    ):
        unread = served.post("/v1/completions", body)
        assert (unread.status_code, error_of(unread)["code"]) == (400, "invalid_json")
        assert re.search(reason, error_of(unread)["message"])
    other = served.post("/v1/completions", json.dumps({"model": "echo", "prompt": "x"}), content_type="text/plain")
    assert other.status_code == 400
    assert "Content-Type: application/json" in error_of(other)["message"]
    lost = served.post("/v1/complete", {})
    assert lost.status_code == 404
    assert "/v1/completions" in error_of(lost)["message"]
    wrong = httpx.get(f"{served.url}/v1/completions", timeout=PATIENCE_S)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    unknown = served.post("/v1/completions", {"model": "nobody", "prompt": "x"})
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


def test_fields_that_are_not_known_can_be_refused(triton: Triton) -> None:
    with Served(triton, strict=True) as served:
        answer = served.post("/v1/completions", {"model": "writer", "prompt": "x", "colour": "red"})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "colour")


def test_a_key_and_a_limit_and_chosen_models(triton: Triton) -> None:
    with Served(triton, api_key="secret", max_body_bytes=1000, models=["echo", "gone"]) as served:
        for key in ("wrong", "sécret"):
            answer = httpx.post(
                f"{served.url}/v1/completions",
                json={},
                headers={b"authorization": f"Bearer {key}".encode()},
                timeout=PATIENCE_S,
            )
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert error_of(answer)["code"] == "invalid_api_key"
        assert httpx.get(f"{served.url}/v1/models", timeout=PATIENCE_S).status_code == 401
        assert httpx.get(f"{served.url}/health", timeout=PATIENCE_S).status_code == 200
        assert httpx.head(f"{served.url}/health", timeout=PATIENCE_S).status_code == 200
        azure = {"api-key": "secret"}
        assert httpx.get(f"{served.url}/v1/models", headers=azure, timeout=PATIENCE_S).status_code == 200
        with served.client(api_key="secret") as client:
            assert [it.id for it in client.models.list()] == ["echo"]
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="writer", prompt="x")
            with pytest.raises(openai.APIStatusError, match="at most 1000 bytes") as caught:
                client.completions.create(model="echo", prompt="x" * 1000)
            assert caught.value.status_code == 413

            def parts() -> Iterator[bytes]:
                for _ in range(100):
                    yield b" " * 100

            # In parts, without a length before.
            headers = {"authorization": "Bearer secret", "content-type": "application/json"}
            answer = httpx.post(f"{served.url}/v1/completions", content=parts(), headers=headers, timeout=PATIENCE_S)
            assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")


def test_mounted_in_another_application_and_over_http(triton: Triton) -> None:
    mounted = application(str(triton.http_url), models=["echo", "pieces"], access_token=triton.get_access_token())
    app = FastAPI(lifespan=mounted.router.lifespan_context)
    app.mount("/ai", mounted)
    with Served(app) as served, served.client(base_url=f"{served.url}/ai/v1") as client:
        assert [it.id for it in client.models.list()] == ["echo", "pieces"]
        for name in ("echo", "pieces"):
            chunks = client.completions.create(model=name, prompt="wörd", stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == "wörd"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="nobody", prompt="x")


def test_models_that_were_asked_lately_are_read_before_a_request_would_wait(
    triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytriton.openai._backend._FRESH_S", 0.05)
    url, token = str(triton.grpc_url), triton.get_access_token()
    backend = Backend(url, names=None, aliases={}, access_token=token, tls=None, timeout_s=PATIENCE_S)
    read: list[str] = []
    reads = backend._read

    async def counted(name: str) -> EndpointModel:
        read.append(name)
        return await reads(name)

    monkeypatch.setattr(backend, "_read", counted)

    async def main() -> None:
        for name in ("echo", "pieces"):
            await backend.find(name)
        before = len(read)
        await eventually_async(lambda: {"echo", "pieces"} <= {*read[before + 2 :]})
        # Nobody has asked for a while.
        monkeypatch.setattr("pytriton.openai._backend._LATELY_S", -1.0)
        task = backend._refreshing
        await eventually_async(lambda: task is not None and task.done())
        # The next request begins it anew, and the end of the endpoints ends it.
        await backend.find("echo")
        assert backend._refreshing is not task
        await backend.close()

    drive(main)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_model_that_has_changed_a_moment_ago(triton: Triton, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton finds wrong before the change is known is the caller's to mend, by either protocol."""
    monkeypatch.setattr("pytriton.openai._backend._FRESH_S", 1e9)
    given, plain = [Tensor(name="text", dtype=bytes, shape=(1,))], ModelConfig(batching=False)

    def tensors(size: int) -> list[Tensor]:
        return [TEXT, Tensor(name="style", dtype=np.float32, shape=(size,), optional=True)]

    url = str(triton.http_url if scheme == "http" else triton.grpc_url)
    body = {"model": "changing", "prompt": "x", "style": [1, 2]}
    triton.bind("changing", shown, inputs=tensors(2), outputs=given, config=plain)
    with Served(application(url, access_token=triton.get_access_token())) as served:
        assert served.post("/v1/completions", body).status_code == 200
        triton.rebind("changing", shown, inputs=tensors(3), outputs=given, config=plain)
        answer = served.post("/v1/completions", body)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_value")
        assert "unexpected shape for input 'style'" in error_of(answer)["message"]
        triton.unbind("changing")
        answer = served.post("/v1/completions", body)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "unavailable")


@pytest.mark.parametrize("decoupled", [False, True])
def test_requests_that_have_found_a_model_before_it_is_bound_anew(
    triton: Triton, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are answered, whenever the model changes, and every connection is closed in the end."""
    monkeypatch.setattr("pytriton.openai._backend._FRESH_S", 0.0)
    backend = Backend(
        str(triton.grpc_url), names=None, aliases={}, access_token=triton.get_access_token(), tls=None, timeout_s=60.0
    )
    dice, clients = random.Random(1), []

    def connected(model: EndpointModel, connect: Any = backend._connect) -> Any:
        clients.append(connect(model))
        return clients[-1]

    monkeypatch.setattr(backend, "_connect", connected)

    def infer(requests: Any) -> Iterator[Any]:
        yield [{"text": request["prompt"]} for request in requests]

    def bind(call: Any, number: int) -> None:
        config = ModelConfig(batching=False, decoupled=decoupled, parameters={"chat_template": str(number)})
        call("turning", infer, inputs=[TEXT], outputs=[Tensor((1,), bytes, "text")], config=config)

    async def ask(link: Link, text: bytes) -> None:
        await asyncio.sleep(dice.random() * 0.02)
        asked = Asked({}, {}, {}, text.decode())
        answers = [answer async for answer in backend.ask(link, {"prompt": np.array([text], object)}, asked)]
        assert [answer["text"].tolist() for answer in answers] == [[text]]

    async def run() -> None:
        found, asking = [], []
        for number in range(6):
            links = await asyncio.gather(*(backend.find("turning") for _ in range(3)))
            found += links
            asking += [asyncio.ensure_future(ask(dice.choice(found), b"%d" % at)) for at in range(10)]
            await asyncio.to_thread(bind, triton.rebind, number + 1)
        await asyncio.gather(*asking)
        await backend.close()
        await asyncio.gather(*(ask(link, b"late") for link in found))

    bind(triton.bind, 0)
    asyncio.run(run())
    triton.unbind("turning")
    assert len(clients) > 6
    for client in clients:
        with pytest.raises(PyTritonClientClosedError):
            asyncio.run(client.wait_for_server(1.0))


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_does_not_answer(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for names in (None, ["echo"]):
        with Served(application(f"{scheme}://127.0.0.1:{port}", models=names)) as served:
            for answer in (
                served.post("/v1/completions", {"model": "echo", "prompt": "x"}),
                httpx.get(f"{served.url}/v1/models", timeout=PATIENCE_S),
            ):
                assert answer.status_code == 503
                assert error_of(answer)["code"] == "unavailable"
            assert httpx.get(f"{served.url}/health", timeout=PATIENCE_S).status_code == 503


def test_a_model_that_is_unloaded_and_bound_anew(triton: Triton, served: Served) -> None:
    body = {"model": "late", "prompt": "x"}
    given = [Tensor(name="text", dtype=bytes, shape=(1,))]
    plain = ModelConfig(batching=False)
    triton.bind("late", shown, inputs=[TEXT], outputs=given, config=plain)
    assert served.post("/v1/completions", body).status_code == 200
    triton.rebind("late", shown, inputs=[Tensor(name="other", dtype=bytes, shape=(1,))], outputs=given, config=plain)
    eventually(lambda: served.post("/v1/completions", body).status_code == 200)
    triton.unbind("late")
    eventually(lambda: served.post("/v1/completions", body).status_code == 404)


@batch
def wrong(text: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {"vector": np.full((len(text), 2), np.nan, np.float32)}


def test_a_vector_that_json_cannot_say(triton: Triton, served: Served) -> None:
    vector = [Tensor(name="vector", dtype=np.float32, shape=(2,))]
    triton.bind("wrong", wrong, inputs=[Tensor(name="text", dtype=bytes, shape=(1,))], outputs=vector)
    answer = served.post("/v1/embeddings", {"model": "wrong", "input": ["x", "y"]})
    assert answer.status_code == 500
    assert "not finite" in error_of(answer)["message"]
    triton.unbind("wrong")


def test_arguments_of_the_application(triton: Triton) -> None:
    with pytest.raises(PyTritonBadParameterError, match="api_key"):
        application(triton, api_key="")
    with pytest.raises(PyTritonBadParameterError, match="a Triton that runs"):
        application(Triton(config=local_config()))


@pytest.mark.parametrize("name", ["embed", "rows"])
def test_embeddings_of_one_text_and_of_many(client: OpenAI, name: str) -> None:
    texts = ["a worker", "sockets and memory", "the server", "threads of the process", "a model", "requests", "a batch"]
    for texts_asked in (texts[:1], texts):
        # As the official client asks without a word: base64.
        answer = client.embeddings.create(model=name, input=texts_asked)
        plain = client.embeddings.create(model=name, input=texts_asked, encoding_format="float")
        if name == "embed":
            CreateEmbeddingResponse.model_validate(plain.model_dump(), strict=True)
        assert [it.index for it in plain.data] == list(range(len(texts_asked)))
        for got, same, text in zip(answer.data, plain.data, texts_asked, strict=True):
            np.testing.assert_array_equal(np.array(got.embedding, np.float32), VECTORS(text))
            np.testing.assert_array_equal(np.array(same.embedding, np.float32), VECTORS(text))
    one = client.embeddings.create(model=name, input=texts[0])
    assert np.array(one.data[0].embedding, np.float32).shape == (16,)
    if name == "embed":
        count = sum(VECTORS.count_words(text) for text in texts)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    # A text is nearest to itself.
    vectors = np.array([it.embedding for it in answer.data], np.float32)
    assert (vectors @ vectors.T).argmax(1).tolist() == list(range(len(texts)))


def test_base64_is_of_little_endian_floats(served: Served) -> None:
    body = {"model": "embed", "input": "a worker", "encoding_format": "base64"}
    (data,) = served.post("/v1/embeddings", body).json()["data"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(data["embedding"]), "<f4"), VECTORS("a worker"))


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"input": [1, 2]}, "input", "got tokens"),
        ({"input": [[1, 2], [3]]}, "input", "got tokens"),
        ({"input": []}, "input", "1 to 2048"),
        ({"input": ""}, "input", "an empty text"),
        ({"input": "x", "dimensions": 4}, "dimensions", "gives vectors of 16"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "x", "model": "echo"}, "model", "gives texts"),
    ],
)
def test_requests_for_embeddings_that_are_refused(served: Served, body: Any, param: str, text: str) -> None:
    answer = served.post("/v1/embeddings", {"model": "embed", **body})
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert text in error["message"]


def test_an_error_that_nobody_foresaw_can_be_read_by_a_page(triton: Triton, caplog: pytest.LogCaptureFixture) -> None:
    app = application(
        str(triton.http_url), access_token=triton.get_access_token(), cors_origins=["https://app.example"]
    )

    @app.get("/raises")
    async def raises() -> None:
        raise RuntimeError("unforeseen")

    with Served(app) as served:
        answer = httpx.get(f"{served.url}/raises", headers={"Origin": "https://app.example"}, timeout=PATIENCE_S)
    assert (answer.status_code, error_of(answer)["message"]) == (500, "RuntimeError: unforeseen")
    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert answer.headers["x-request-id"]
    assert "unforeseen" in caplog.text


@pytest.mark.parametrize("path", sorted({path for paths in ENDPOINTS.values() for path in paths} | {"/tokenize"}))
def test_pages_of_other_sites_are_refused(served: Served, path: str) -> None:
    """Browsers send forms and texts for any page without a question beforehand."""

    def status(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a")
        answers = [
            httpx.post(
                f"{served.url}{path}", content=b"{}", headers={"Content-Type": kind, **named}, timeout=PATIENCE_S
            )
            for kind in kinds
        ]
        found = {answer.status_code for answer in answers}
        if 403 in found:
            assert {error_of(answer)["code"] for answer in answers} == {"other_site"}
        return found.pop() if len(found) == 1 else 0

    assert status(Origin="https://other.example") == 403
    assert status(Origin="null") == 403
    assert status(Sec_Fetch_Site="cross-site") == 403
    assert status(Sec_Fetch_Site="same-site", Origin=served.url) == 403
    # Pages of its own, and programs.
    assert status(Origin=served.url) != 403
    assert status(Sec_Fetch_Site="same-origin", Origin=served.url) != 403
    assert status(Sec_Fetch_Site="none") != 403
    assert status() != 403
    assert httpx.get(f"{served.url}/health", headers={"Origin": "https://other.example"}).status_code == 200


@pytest.mark.parametrize("cors_origins", [["https://app.example"], ["*"]])
def test_pages_of_origins_that_are_allowed_are_not(triton: Triton, cors_origins: list[str]) -> None:
    app = application(str(triton.http_url), access_token=triton.get_access_token(), cors_origins=cors_origins)
    with Served(app) as served:

        def status(origin: str) -> int:
            headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
            return httpx.post(f"{served.url}/v1/completions", headers=headers, timeout=PATIENCE_S).status_code

        assert status("https://app.example") == 400
        assert status("https://other.example") == (400 if cors_origins == ["*"] else 403)
