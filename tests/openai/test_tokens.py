"""Models that declare a tokenizer: counts, tokens in place of texts, and the endpoints that tell tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytest.importorskip("openai")
pytest.importorskip("tokenizers")

import tokenizers

import openai
from openai import OpenAI
from pytriton.decorators import Shape, model
from pytriton.openai.server import UnfitModelError, endpoints_of
from pytriton.triton import Triton
from support.language.endpoints import Served, error_of
from support.serving import local_config, running
from support.waiting import PATIENCE_S

TEXT = "The server sends the batch to the worker, and the worker sends the answer to the server. Größe 漢字"
TEMPLATE = (
    "<s>{% for message in messages %}{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def make_tokenizer(path: Path) -> Any:
    """Write a tokenizer that was trained in a moment, which puts `<s>` before a text and cuts and fills batches."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_padding(length=64)
    made.enable_truncation(4)
    made.save(str(path))
    made.no_padding()
    made.no_truncation()
    return made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    made = make_tokenizer(path)
    made.path = path
    return made


@pytest.fixture(scope="module")
def served(tokenizer: Any) -> Iterator[Served]:
    config = json.dumps({"model_max_length": 512})

    @model(parameters={"chat_template": TEMPLATE, "tokenizer": str(tokenizer.path), "tokenizer_config": config})
    def echo(prompt: str) -> Iterator[str]:
        # In pieces that cut tokens.
        for at in range(0, len(prompt), 3):
            yield prompt[at : at + 3]

    @model(max_batch_size=4, parameters={"tokenizer": str(tokenizer.path.parent)})
    def lengths(text: str) -> Annotated[NDArray[np.float32], Shape(1)]:
        return np.array([len(text)], np.float32)

    @model
    def plain(text: str) -> str:
        return text

    @model
    def plain_lengths(text: str) -> Annotated[NDArray[np.float32], Shape(1)]:
        return np.array([len(text)], np.float32)

    triton = Triton(config=local_config())
    for each in (echo, lengths, plain, plain_lengths):
        triton.bind(each)
    with running(triton), Served(triton) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client


def test_counts_by_the_tokenizer(client: OpenAI, tokenizer: Any) -> None:
    messages: Any = [{"role": "user", "content": TEXT}]
    prompt = f"<s>{TEXT}\n>"
    wanted = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    answer = client.chat.completions.create(model="echo", messages=messages)
    assert answer.choices[0].message.content == prompt
    assert answer.usage is not None
    # What it puts before a text is in the template already.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (wanted, wanted)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model="echo", prompt=TEXT, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    whole = len(tokenizer.encode(TEXT, add_special_tokens=False).ids)
    assert len(counts) == len(chunks)
    assert counts[:-1] == sorted(counts[:-1])
    assert counts[-1] == whole
    assert all(chunk.usage.prompt_tokens == whole + 1 for chunk in chunks if chunk.usage is not None)
    vectors = client.embeddings.create(model="lengths", input=[TEXT, "The"])
    assert vectors.usage.prompt_tokens == whole + 1 + len(tokenizer.encode("The").ids)


def test_tokens_in_place_of_texts(client: OpenAI, tokenizer: Any) -> None:
    tokens = [tokenizer.encode(text).ids for text in (TEXT, "worker")]
    assert client.embeddings.create(model="lengths", input=tokens[0]).data[0].embedding == [len(TEXT)]
    found = client.embeddings.create(model="lengths", input=tokens).data
    assert [it.embedding for it in found] == [[len(TEXT)], [len("worker")]]
    texts = client.completions.create(model="echo", prompt=[it[1:] for it in tokens]).choices
    assert [it.text for it in texts] == [TEXT, "worker"]
    size = tokenizer.get_vocab_size()
    for name, wrong, reason in (
        ("lengths", [[size]], f"got a token {size}, where the tokenizer of the model has {size}"),
        ("lengths", [-1], "got a token -1"),
        ("lengths", [[]], r"got \[\]"),
        ("lengths", [1, "x"], "got 1"),
        ("lengths", [[1, True]], r"got \[1, True\]"),
        ("plain_lengths", [1, 2], r"send the text \(LangChain does with .*check_embedding_ctx_length=False"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            client.embeddings.create(model=name, input=wrong)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match=r"declares no tokenizer that reads them: send the text\."):
        client.completions.create(model="plain", prompt=[1, 2])


def test_the_endpoints_that_tell_tokens(served: Served, tokenizer: Any) -> None:
    def told(path: str, **body: Any) -> Any:
        answer = served.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    tokens = tokenizer.encode(TEXT).ids
    whole = told("/tokenize", model="echo", prompt=TEXT)
    assert whole == {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None}
    bare = told("/tokenize", model="lengths", prompt=TEXT, add_special_tokens=False, return_token_strs=True)
    assert (bare["tokens"], bare["max_model_len"]) == (tokens[1:], None)
    assert bare["token_strs"] == [tokenizer.id_to_token(it) for it in tokens[1:]]
    messages = [{"role": "user", "content": "worker"}]
    chat = told("/tokenize", model="echo", messages=messages)
    assert told("/detokenize", model="echo", tokens=chat["tokens"]) == {"prompt": "<s>worker\n>"}
    bare = told("/tokenize", model="echo", messages=messages, add_generation_prompt=False)
    assert told("/detokenize", model="echo", tokens=bare["tokens"]) == {"prompt": "<s>worker\n"}
    assert told("/detokenize", model="echo", tokens=[]) == {"prompt": ""}
    assert told("/tokenize", model="echo", prompt="", add_special_tokens=False)["tokens"] == []
    versions = httpx.get(f"{served.url}/version", timeout=PATIENCE_S).json()
    assert list(versions) == ["version"]


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        ("/tokenize", {"model": "echo"}, "prompt", "a prompt or messages"),
        (
            "/tokenize",
            {"model": "echo", "prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            "prompt",
            "one",
        ),
        ("/tokenize", {"model": "echo", "prompt": "\ud800"}, "prompt", "UTF-8"),
        ("/tokenize", {"model": "echo", "prompt": 5}, "prompt", "string"),
        ("/tokenize", {"model": "echo", "messages": []}, "messages", "at least 1"),
        ("/tokenize", {"model": "echo", "messages": [{"role": "king"}]}, "messages", "role"),
        ("/tokenize", {"model": "plain", "prompt": "x"}, "model", "declares none"),
        ("/tokenize", {"prompt": "x"}, "model", "there are 2 models that declare a tokenizer"),
        ("/detokenize", {"model": "echo", "tokens": [10**6]}, "tokens", "a token 1000000"),
        ("/detokenize", {"model": "echo", "tokens": [2**70]}, "tokens", "a token"),
        ("/detokenize", {"model": "echo", "tokens": [1.5]}, "tokens", "integer"),
        ("/detokenize", {"model": "echo", "tokens": "1"}, "tokens", "list"),
    ],
)
def test_requests_about_tokens_that_are_refused(
    served: Served, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    answer = served.post(path, body)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
    assert reason in error_of(answer)["message"]
    assert served.post(path, {**body, "model": "nobody"}).status_code in (400, 404)


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    config: dict[str, Any] = {
        "name": "m", "input": [{"name": "text", "data_type": "TYPE_STRING", "dims": ["1"]}],
        "output": [{"name": "out", "data_type": "TYPE_STRING", "dims": ["1"]}],
    }  # fmt: skip
    for path in (tmp_path, tmp_path / "gone.json", tmp_path / "tokenizer.json", "\0"):
        config["parameters"] = {"tokenizer": {"string_value": str(path)}}
        with pytest.raises(UnfitModelError, match=r"its tokenizer .*cannot be read"):
            endpoints_of(config)
    # One that has changed is read anew.
    make_tokenizer(tmp_path / "tokenizer.json")
    config["parameters"] = {"tokenizer": {"string_value": str(tmp_path)}}
    assert endpoints_of(config)
