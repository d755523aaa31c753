"""Transcriptions of audio: forms with a file, the official client, and what callers send that is none."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypedDict

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytest.importorskip("openai")
pytest.importorskip("python_multipart")

from openai.types.audio import Transcription, TranscriptionVerbose

import openai
from openai import OpenAI
from pytriton.decorators import model
from pytriton.triton import Triton
from support.language.endpoints import Served, error_of
from support.serving import local_config, running
from support.waiting import PATIENCE_S

WORDS = ("one", "two", "three")


def sound(seconds: float = 1.5) -> bytes:
    """The bytes of a WAV file."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(int(seconds * 8000) * 2))
    return written.getvalue()


class Piece(TypedDict, total=False):
    text: str
    segments: str
    words: str
    language: str
    duration: float


@model
async def listener(
    audio: bytes, language: str = "", prompt: str = "", temperature: float = 0.0, beams: int = 1
) -> AsyncIterator[Piece]:
    """Hears a word for each half second, and tells what it was asked with."""
    if audio.startswith(b"fail"):
        raise ValueError("this is no sound")
    for number in range(len(audio) // 8000):
        segment = {"start": number / 2, "end": number / 2 + 0.5, "text": WORDS[number]}
        yield Piece(text=f"{WORDS[number]} ", segments=json.dumps([segment]))
    words = [{"word": WORDS[0], "start": 0.0, "end": 0.5}]
    yield Piece(text=f"[{prompt} {temperature} {beams}]", language=language or "english", words=json.dumps(words))


@model
def plain(file: bytes) -> str:
    return f"{len(file)} bytes"


@model
def echo(text: str) -> str:
    return text


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    triton = Triton(config=local_config())
    for each in (listener, plain, echo):
        triton.bind(each)
    with running(triton), Served(triton, max_body_bytes=200_000) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client


def test_a_text_of_audio(client: OpenAI) -> None:
    answer = client.audio.transcriptions.create(model="listener", file=("a.wav", sound()))
    Transcription.model_validate(answer.model_dump(exclude_unset=True), strict=True)
    assert answer.text == "one two three [ 0.0 1]"
    assert answer.usage is not None
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 1.5)  # type: ignore[union-attr]
    asked: Any = {"prompt": "it counts", "temperature": 0.5, "language": "de", "extra_body": {"beams": 3}}
    answer = client.audio.transcriptions.create(model="listener", file=("a.wav", sound()), **asked)
    assert answer.text == "one two three [it counts 0.5 3]"
    assert client.audio.transcriptions.create(model="plain", file=b"x" * 300).text == "300 bytes"


def test_the_forms_of_an_answer(client: OpenAI) -> None:
    def asked(form: Any, **more: Any) -> Any:
        return client.audio.transcriptions.create(
            model="listener", file=("a.wav", sound()), response_format=form, **more
        )

    assert asked("text") == "one two three [ 0.0 1]\n"
    verbose = asked("verbose_json", timestamp_granularities=["word", "segment"])
    assert isinstance(verbose, TranscriptionVerbose)
    assert (verbose.language, verbose.duration, verbose.text) == ("english", 1.5, "one two three [ 0.0 1]")
    assert verbose.segments is not None
    assert verbose.words is not None
    assert [(it.id, it.start, it.end, it.text) for it in verbose.segments] == [
        (0, 0.0, 0.5, "one"), (1, 0.5, 1.0, "two"), (2, 1.0, 1.5, "three")
    ]  # fmt: skip
    assert [it.word for it in verbose.words] == ["one"]
    assert asked("srt").startswith("1\n00:00:00,000 --> 00:00:00,500\none\n\n2\n00:00:00,500 --> ")
    assert asked("vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\none\n\n")
    for form in ("srt", "diarized_json"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.audio.transcriptions.create(model="plain", file=sound(), response_format=form)
        assert caught.value.param == "response_format"


def test_a_stream_of_events(client: OpenAI) -> None:
    events = list(client.audio.transcriptions.create(model="listener", file=("a.wav", sound()), stream=True))
    assert [event.delta for event in events if event.type == "transcript.text.delta"] == [
        "one ", "two ", "three ", "[ 0.0 1]"
    ]  # fmt: skip
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == "one two three [ 0.0 1]"


def test_audio_that_a_model_cannot_take(client: OpenAI, served: Served) -> None:
    with pytest.raises(openai.InternalServerError, match="this is no sound"):
        client.audio.transcriptions.create(model="listener", file=b"fail")
    # How long another one is than a WAV file nobody knows.
    with pytest.raises(openai.InternalServerError, match="'duration' would be needed"):
        client.audio.transcriptions.create(model="listener", file=b"mp3", response_format="verbose_json")
    with pytest.raises(openai.BadRequestError, match="gives texts: ask it at"):
        client.audio.transcriptions.create(model="echo", file=sound())
    with pytest.raises(openai.BadRequestError, match="an empty file"):
        client.audio.transcriptions.create(model="plain", file=("a.wav", b""))
    with pytest.raises(openai.APIStatusError) as caught:
        client.audio.transcriptions.create(model="plain", file=bytes(300_000))
    assert caught.value.status_code == 413
    answer = served.post("/v1/chat/completions", {"model": "plain", "messages": [{"role": "user", "content": "x"}]})
    assert "gives transcriptions: ask it at /v1/audio/transcriptions" in error_of(answer)["message"]


FORM = "multipart/form-data; boundary=x"
FILE = '--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nsound\r\n'
MODEL = '--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nplain\r\n'


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("application/json", '{"model": "plain"}', "file"),
        ("multipart/form-data", MODEL, "file"),
        (FORM, "", "file"),
        (FORM, "nonsense", "file"),
        (FORM, f"{MODEL}--x--\r\n", "file"),
        (FORM, f"{FILE}--x--\r\n", "model"),
        (FORM, f"{FILE}{FILE}{MODEL}--x--\r\n", "file"),
        (FORM, f"{MODEL.replace('model', 'file')}{MODEL}--x--\r\n", "file"),
        (FORM, f"{FILE}{FILE.replace('file', 'model', 1)}--x--\r\n", "file"),
        (FORM, f"{FILE}{MODEL * 100}--x--\r\n", "file"),
        (FORM, f"{FILE}{MODEL}{MODEL.replace('model', 'temperature')}--x--\r\n", "temperature"),
        (FORM, f"{FILE}{MODEL}{MODEL.replace('model', 'stream')}--x--\r\n", "stream"),
        (FORM, f"{FILE}{MODEL}{MODEL.replace('model', 'response_format')}--x--\r\n", "response_format"),
    ],
)
def test_forms_that_are_none(served: Served, kind: str, body: str, param: str) -> None:
    answer = httpx.post(
        f"{served.url}/v1/audio/transcriptions", content=body.encode(), headers={"content-type": kind},
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
