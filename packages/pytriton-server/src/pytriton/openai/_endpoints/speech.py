"""Transcriptions of audio."""

from __future__ import annotations

import io
import json
import struct
import wave
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pytriton.openai._endpoints.desk import Desk, answered
from pytriton.openai._errors import OpenAIError, from_validation, model_failed
from pytriton.openai._formats.strict_json import STRICT, JsonAnswer
from pytriton.openai._gate import CALLER_GONE, EventStream, encoded_events
from pytriton.openai._models import SPOKEN, EndpointModel
from pytriton.openai._requests import TranscriptionRequest, unsupported
from pytriton.openai._texts import Part, read_parts

TRANSCRIPTIONS = "/v1/audio/transcriptions"
_FORMS = ("json", "text", "verbose_json", "srt", "vtt")
_MOST_FIELDS = 64
_LISTS = ("timestamp_granularities", "include")


def add_speech(app: FastAPI, desk: Desk) -> None:
    """Add the endpoint to an application."""

    @app.post(TRANSCRIPTIONS)
    async def transcribe(request: Request) -> Response:
        try:
            body, audio = await _read_form(request)
        except ClientDisconnect:
            return Response(status_code=CALLER_GONE)
        return await answered(request, _transcribe(desk, body, audio, request))


async def _read_form(request: Request) -> tuple[TranscriptionRequest, bytes]:
    """Return the fields of a form, and the file."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise _wrong("file", "a form, with the header Content-Type: multipart/form-data")
    try:
        async with request.form(max_files=1, max_fields=_MOST_FIELDS) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise _wrong("file", "a file with audio, as a part of the form that has a file name")
            audio = await file.read()
            return _read_fields(form), audio
    except HTTPException as error:
        if error.status_code != 400:
            raise
        raise _wrong("file", f"a form of at most {_MOST_FIELDS} fields and one file: {error.detail}") from None
    except ValueError as error:
        # The form parser raises it; only newer releases of Starlette turn it into an HTTPException.
        raise _wrong("file", f"a form of at most {_MOST_FIELDS} fields and one file: {error}") from None


def _read_fields(form: FormData) -> TranscriptionRequest:
    fields: dict[str, Any] = {}
    for name in form:
        short = name.removesuffix("[]")
        if name != "file" and short != "file":
            values = [value for value in form.getlist(name) if isinstance(value, str)]
            fields[short] = values if short in _LISTS else values[-1] if values else None
    try:
        return TranscriptionRequest.model_validate({name: it for name, it in fields.items() if it not in (None, "")})
    except ValidationError as error:
        raise from_validation(error.errors()) from None


async def _transcribe(desk: Desk, body: TranscriptionRequest, audio: bytes, request: Request) -> Response:
    link = await desk.find(body.model, TRANSCRIPTIONS)
    model = link.model
    form = body.response_format or "json"
    if form not in _FORMS:
        raise _wrong("response_format", f"one of {', '.join(_FORMS)}; got {form!r:.60}")
    if form in ("srt", "vtt") and "segments" not in model.output_names:
        raise unsupported("response_format", body.model, model.options, "It would have an output 'segments'. ")
    if not audio:
        raise _wrong("file", "audio; got an empty file")
    asked = desk.asked(_typed(body, model), link, request)
    given = {model.prompt.name: np.array([audio], object).reshape((1,) * len(model.prompt.shape))}
    told: dict[str, Any] = {}
    answers = _noted(desk.backend.ask(link, given, asked), told, model)
    parts = read_parts(answers, model, (), tools=frozenset(), tells_logprobs=False)
    if body.stream:
        events = _events(parts)
        return EventStream(await anext(events), events)
    text = ""
    counts: Mapping[str, int] = {}
    async with aclosing(parts):
        async for group in parts:
            text += "".join(part.text for part in group)
            counts = group[-1].counts
    return _answer(form, text, told, body, audio, counts)


def _typed(body: TranscriptionRequest, model: EndpointModel) -> TranscriptionRequest:
    """Convert the fields of a form, which are all texts, to values."""
    extra = body.model_extra or {}
    for name, value in extra.items():
        if name in model.options and model.options[name].dtype is not np.bytes_ and isinstance(value, str):
            try:
                extra[name] = STRICT.decode(value)
            except (ValueError, RecursionError):
                extra[name] = value
    return body


async def _noted(
    answers: AsyncGenerator[Mapping[str, Any], None], told: dict[str, Any], model: EndpointModel
) -> AsyncGenerator[Mapping[str, Any], None]:
    """Yield answers, and note their outputs besides the text."""
    names = [name for name in SPOKEN if name in model.output_names]
    async with aclosing(answers):
        async for answer in answers:
            for name in names:
                if name in answer:
                    _note(told, name, answer[name], model)
            yield answer


def _note(told: dict[str, Any], name: str, value: Any, model: EndpointModel) -> None:
    flat = np.ravel(value).tolist()
    if name == "duration":
        told[name] = float(flat[-1])
        return
    text = b"".join(flat).decode("utf-8", "replace")
    if name == "language":
        told[name] = text or told.get(name, "")
    elif text:
        try:
            found = STRICT.decode(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, list) or not all(isinstance(it, dict) for it in found):
            expected = f"expected {name} as JSON of a list of objects"
            raise model_failed(model.spec.model_name, f"{expected}; got {text!r:.100}.")
        # Each part of a stream reports its own.
        told[name] = [*told.get(name, []), *found]


def _answer(
    form: str, text: str, told: Mapping[str, Any], body: TranscriptionRequest, audio: bytes, counts: Mapping[str, int]
) -> Response:
    segments = [{"id": number, **segment} for number, segment in enumerate(told.get("segments", []))]
    if form == "text":
        return PlainTextResponse(f"{text}\n")
    if form in ("srt", "vtt"):
        return PlainTextResponse(_subtitles(segments, form, body.model))
    duration = told.get("duration", _duration(audio))
    usage: dict[str, Any] | None = None
    if {"prompt_tokens", "completion_tokens"} <= counts.keys():
        taken, made = counts["prompt_tokens"], counts["completion_tokens"]
        usage = {"type": "tokens", "input_tokens": taken, "output_tokens": made, "total_tokens": taken + made}
    elif duration is not None:
        usage = {"type": "duration", "seconds": duration}
    if form == "json":
        return JsonAnswer({"text": text, "usage": usage})
    language = told.get("language") or body.language
    if duration is None or language is None:
        missing = "duration" if duration is None else "language"
        raise model_failed(body.model, f"its output {missing!r} would be needed for a verbose_json of such audio.")
    answer = {"task": "transcribe", "language": language, "duration": duration, "text": text}
    answer["segments"] = segments
    if "words" in told:
        answer["words"] = told["words"]
    seconds = {"type": "duration", "seconds": duration}
    return JsonAnswer({**answer, "usage": seconds})


async def _events(parts: AsyncGenerator[list[Part], None]) -> AsyncGenerator[bytes, None]:
    text = ""
    is_begun = False
    try:
        async with aclosing(parts):
            async for group in parts:
                said = [part.text for part in group if part.text]
                text += "".join(said)
                if said:
                    is_begun = True
                    yield encoded_events([json.dumps({"type": "transcript.text.delta", "delta": it}) for it in said])
    except OpenAIError as error:
        if not is_begun:
            raise
        yield encoded_events([json.dumps(error.body)])
        return
    yield encoded_events([json.dumps({"type": "transcript.text.done", "text": text})])


def _duration(audio: bytes) -> float | None:
    """Return how long the audio of a WAV file is; None for others."""
    try:
        with wave.open(io.BytesIO(audio)) as file:
            return float(file.getnframes() / file.getframerate())
    except (wave.Error, EOFError, ArithmeticError, ValueError, struct.error):
        return None


def _subtitles(segments: list[dict[str, Any]], form: str, model: str) -> str:
    lines = ["WEBVTT", ""] if form == "vtt" else []
    for number, segment in enumerate(segments, 1):
        begin, end, text = (segment.get(name) for name in ("start", "end", "text"))
        if not (isinstance(begin, (int, float)) and isinstance(end, (int, float)) and isinstance(text, str)):
            raise model_failed(model, f"expected segments with start, end and text; got {segment!r:.100}.")
        lines += [str(number)] if form == "srt" else []
        lines += [f"{_clock(begin, form)} --> {_clock(end, form)}", text.strip(), ""]
    return "\n".join(lines) + "\n"


def _clock(seconds: float, form: str) -> str:
    whole = round(seconds * 1000)
    mark = "," if form == "srt" else "."
    return f"{whole // 3600000:02}:{whole // 60000 % 60:02}:{whole // 1000 % 60:02}{mark}{whole % 1000:03}"


def _wrong(where: str, expected: str) -> OpenAIError:
    return OpenAIError(400, f"{where}: expected {expected}.", param=where, code="invalid_value")
