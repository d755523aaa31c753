"""Fields of requests that reach a model, those that ask for nothing, counts of tokens, further names of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytest.importorskip("openai")

from openai.types.chat import ChatCompletionChunk

import openai
from openai import OpenAI
from pytriton.decorators import Shape, model
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.openai import application
from pytriton.triton import Triton
from support.language.endpoints import Served, error_of
from support.serving import local_config, running

ASK: Any = [{"role": "user", "content": "x"}]


@model(name="told", parameters={"chat_template": "{{ messages[-1].content }}"})
def told(
    prompt: str,
    n: int = 0,
    stop: list[str] | None = None,
    stream: bool = False,
    model: str = "",
    max_tokens: int = 0,
    max_completion_tokens: int = 0,
    chat_template_kwargs: dict[str, Any] | None = None,
    user: str = "",
) -> str:
    """Tells what it was asked with; texts that end it backwards, for they would."""
    stops = None if stop is None else [text[::-1] for text in stop]
    got = {
        "n": n, "stop": stops, "stream": stream, "model": model, "max_tokens": max_tokens,
        "max_completion_tokens": max_completion_tokens, "chat_template_kwargs": chat_template_kwargs, "user": user,
    }  # fmt: skip
    return json.dumps(got)


@model
def plain(prompt: str) -> Iterator[str]:
    yield from ("one ", "two ", "three ", "four")


class Counted(TypedDict, total=False):
    text: str
    prompt_tokens: int
    completion_tokens: int


@model(parameters={"chat_template": "{{ messages[-1].content }}"})
def late(prompt: str) -> Iterator[Counted]:
    """Counts with its last part alone."""
    for word in ("one ", "two ", "three ", "four"):
        yield Counted(text=word)
    yield Counted(prompt_tokens=7, completion_tokens=4)


@model
def steady(prompt: str) -> Iterator[Counted]:
    for number, word in enumerate(("one ", "two ", "three "), 1):
        yield Counted(text=word, prompt_tokens=len(prompt), completion_tokens=number)


@model
def sized(text: str, dimensions: int = 6, encoding_format: str = "") -> Annotated[NDArray[np.float32], Shape(-1)]:
    # Of so many, it has at most eight.
    return np.full(min(dimensions, 8), len(encoding_format), np.float32)


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    triton = Triton(config=local_config())
    for each in (told, plain, late, steady, sized):
        triton.bind(each)
    with running(triton):
        yield triton


@pytest.fixture(scope="module")
def served(triton: Triton) -> Iterator[Served]:
    with Served(triton, aliases={"gpt-4o": "told", "plain": "steady"}) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client


def got(client: OpenAI, **asked: Any) -> dict[str, Any]:
    answer = client.chat.completions.create(**{"model": "told", "messages": ASK, **asked})
    content = answer.choices[0].message.content
    assert content is not None
    return dict(json.loads(content))


def test_known_fields_reach_a_model_that_declares_them(client: OpenAI) -> None:
    assert got(client) == {
        "n": 0, "stop": None, "stream": False, "model": "told", "max_tokens": 0, "max_completion_tokens": 0,
        "chat_template_kwargs": None, "user": "",
    }  # fmt: skip
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    all_of_them = got(client, n=2, stop=["\n\n", "END"], max_completion_tokens=5, user="me", extra_body=body)
    assert all_of_them == {
        "n": 2, "stop": ["\n\n", "DNE"], "stream": False, "model": "told", "max_tokens": 5, "max_completion_tokens": 5,
        "chat_template_kwargs": {"enable_thinking": True}, "user": "me",
    }  # fmt: skip
    assert got(client, stop="END")["stop"] == ["DNE"]
    stream = client.chat.completions.create(model="told", messages=ASK, stream=True)
    assert json.loads("".join(it.choices[0].delta.content or "" for it in stream))["stream"] is True


def test_a_size_of_vectors_reaches_a_model_that_declares_it(client: OpenAI, served: Served) -> None:
    for size in (None, 3, 8):
        arguments: Any = {} if size is None else {"dimensions": size}
        (data,) = client.embeddings.create(model="sized", input="x", encoding_format="float", **arguments).data
        assert data.embedding == [5.0] * (size or 6)
    answer = served.post("/v1/embeddings", {"model": "sized", "input": ["x", "y"], "dimensions": 9})
    assert answer.status_code == 500
    assert "a vector of 8 for input[0], where 9 are asked for" in error_of(answer)["message"]
    answer = served.post("/v1/embeddings", {"model": "sized", "input": "x", "dimensions": "many"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "dimensions")


def test_what_is_empty_asks_for_nothing(served: Served) -> None:
    empty: dict[str, Any] = {
        "stop": [], "tools": [], "functions": [], "logit_bias": {}, "response_format": {}, "stream_options": {},
        "modalities": [], "audio": {}, "prediction": {}, "documents": [], "logprobs": False, "top_logprobs": 0,
        "chat_template_kwargs": {}, "metadata": {}, "tool_choice": "", "function_call": "",
    }  # fmt: skip
    for body in (empty, {"stop": ""}, {"stream_options": {"include_usage": False, "continuous_usage_stats": None}}):
        answer = served.post("/v1/chat/completions", {"model": "told", "messages": ASK, **body})
        assert answer.status_code == 200, answer.text
    few = {"best_of": 0, "echo": False, "suffix": "", "logit_bias": {}, "stop": [], "logprobs": False}
    answer = served.post("/v1/completions", {"model": "told", "prompt": "x", **few})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"n": 0}, "n"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"stream_options": []}, "stream_options"),
        ({"user": 5}, "user"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_what_is_wrong_or_asks_for_something(served: Served, body: dict[str, Any], param: str) -> None:
    answer = served.post("/v1/chat/completions", {"model": "told", "messages": ASK, **body})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize(("model", "stop", "counts"), [
    ("late", None, (7, 4)),
    # It is closed before it counts: an estimate, of a prompt of eight characters and a text of as many.
    ("late", "three", (2, 2)),
    ("steady", "three", (8, 3)),
])  # fmt: skip
def test_counts_are_not_lost_with_a_stop(client: OpenAI, model: str, stop: str | None, counts: tuple[int, int]) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "12345678", **({} if stop is None else {"stop": stop})}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (*counts, sum(counts))


def test_counts_with_every_event(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"messages": ASK, "stream": True, "stream_options": options}
    for name, prompt, wanted in (
        ("late", 1, [1, 1, 2, 4, 5, 4, 4]),
        ("steady", len("user: x\nassistant:"), [1, 1, 2, 3, 3, 3]),
    ):
        chunks = list(client.chat.completions.create(model=name, **asked))
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
        assert len(usages) == len(chunks)
        assert [usage.completion_tokens for usage in usages] == wanted
        assert usages[-1].prompt_tokens == (7 if name == "late" else prompt)
    # As vLLM: without the first option, the second one says nothing.
    options.pop("include_usage")
    assert all(chunk.usage is None for chunk in client.chat.completions.create(model="steady", **asked))


def test_further_names_of_models(triton: Triton, client: OpenAI, served: Served) -> None:
    found = {it.id: it.root for it in client.models.list()}  # type: ignore[attr-defined]
    assert found == {
        "gpt-4o": "told", "late": "late", "plain": "steady", "sized": "sized", "steady": "steady", "told": "told"
    }  # fmt: skip
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    answer = client.chat.completions.create(model="gpt-4o", messages=ASK)
    assert answer.model == "gpt-4o"
    assert got(client, model="gpt-4o")["model"] == "gpt-4o"
    # The alias is meant where a model has the same name.
    assert client.completions.create(model="plain", prompt="x").choices[0].text == "one two three "
    for aliases, models in (
        ({"a": "told"}, ["plain"]),
        ({"": "told"}, None),
        ({"a": ""}, None),
        ({"\n": "told"}, None),
    ):
        with pytest.raises(PyTritonBadParameterError, match="aliases must be further names of models"):
            application(triton, aliases=aliases, models=models)
    settings: Any = {"aliases": {"gone": "nobody", "a": "told"}, "models": ["nobody", "told"]}
    with Served(triton, **settings) as other, other.client() as asking:
        assert [it.id for it in asking.models.list()] == ["a", "told"]
        with pytest.raises(openai.NotFoundError, match="'nobody' does not exist"):
            asking.completions.create(model="gone", prompt="x")
