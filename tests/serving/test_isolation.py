"""Each request alone: what one caller sends is never read as a part of what another one has sent."""

from __future__ import annotations

import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import get_model_signature, model
from pytriton.inprocess import Server
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import ProcessWorker, Triton
from support.isolation.raw_requests import NO_CODE, HttpSender, InProcessSender, Send, strings, together
from support.isolation.reference import RawRequest, RawTensor
from support.isolation.ways import WAYS, Batching
from support.serving import local_config, running

ROWS = 8
# Batches are full long before that.
DELAY_US = 60_000_000


def text(*payloads: bytes) -> RawRequest:
    """Return a request with a row for each payload, which should be a string."""
    tensor = RawTensor("BYTES", (len(payloads), 1), b"".join(payloads))
    return RawRequest({"text": tensor}, outputs=["text_out", "served"])


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_that_reaches_for_the_texts_of_others(way: str, tmp_path: Path) -> None:
    with WAYS[way](tmp_path, Batching(ROWS, DELAY_US)) as senders:
        for name, send in senders.items():
            check_reach(name, send, own_rows=0)
            check_reach(name, send, own_rows=1)


def check_reach(name: str, send: Send, own_rows: int) -> None:
    """Three requests of one batch, of which the first got the text of the second, which got that of the third."""
    own = [strings(b"own")] * own_rows
    victim, other = b"victim-secret-0123", strings(b"evil-input") + strings(b"attacker")
    # Its length is that of its own bytes, of the next request, and of the length in the third: which has two strings
    # for whoever begins to read there.
    theirs = b"".join(own) + strings(victim)
    reach = 3 + len(theirs) + len(b"".join(own)) + 4
    expected = f"input 'text': string {own_rows} of {own_rows + 1}: expected {reach} bytes, as its length says, got 3"
    honest = [strings(b"honest")] * (ROWS - 3 * (1 + own_rows))
    requests = [
        text(*own, struct.pack("<I", reach) + b"abc"),
        text(*own, strings(victim)),
        text(*own, strings(other)),
        text(*honest),
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = together(send, requests, pool, pause_s=0.05)
    assert answers[0].outputs == {}, f"{name}: {answers[0].outputs}"
    assert answers[0].code in ("INVALID_ARG", NO_CODE), name
    if "incomplete string data" in answers[0].error:
        # Triton's Python backend sees it before the Python proxy does, and ends the batch. See docs/python_proxy.md.
        assert {answer.error for answer in answers} == {answers[0].error}, name
        return
    assert expected in answers[0].error, name
    sent = [[b"own"] * own_rows + [victim], [b"own"] * own_rows + [other], [b"honest"] * len(honest)]
    for answer, texts in zip(answers[1:], sent, strict=True):
        assert answer.error == "", name
        assert answer.outputs["text_out"].payload == strings(*(each[::-1] for each in texts)), name
    # All in one batch, without the one that could not be read.
    [served] = {answer.outputs["served"].payload[:4] for answer in answers[1:]}
    rows = ROWS - 1 - own_rows
    assert struct.unpack("<i", served)[0] == (rows if name.startswith("batch") else 3), name


def test_requests_that_are_too_large_together_and_one_that_is_by_itself() -> None:
    """Each that fits into the arena is served, whatever comes with it."""
    budget = 1 << 20
    sizes = [600_000, 600_000, 1_200_000, 10, 300_000, 300_000, 300_000, 0]
    config = ModelConfig(
        max_batch_size=64,
        arena_budget_bytes=budget,
        batcher=DynamicBatcher(preferred_batch_size=[len(sizes)], max_queue_delay_microseconds=DELAY_US),
    )

    def lengths(requests: Any) -> Any:
        return [{"length": np.array([[len(request["text"][0, 0])]])} for request in requests]

    triton = Triton(config=local_config())
    triton.bind("lengths", lengths, [Tensor((1,), bytes, "text")], [Tensor((1,), np.int64, "length")], config=config)
    requests = [RawRequest({"text": RawTensor("BYTES", (1, 1), strings(bytes(size)))}) for size in sizes]
    with (
        running(triton),
        contextlib.closing(HttpSender(triton.http_url, "lengths")) as send,
        ThreadPoolExecutor(len(sizes)) as pool,
    ):
        answers = together(send, requests, pool)
    for size, answer in zip(sizes, answers, strict=True):
        if size > budget:
            assert answer.code == "INVALID_ARG"
            assert "inputs of the batch take 1200" in answer.error
        else:
            assert answer.error == ""
            assert answer.outputs["length"].payload == struct.pack("<q", size)


# Hints that only the worker can hold an input against.
_OPTIONS: dict[str, Any] = {
    "max_batch_size": 64,
    "batcher": DynamicBatcher(preferred_batch_size=[ROWS], max_queue_delay_microseconds=DELAY_US),
}


@model(batched=True, **_OPTIONS)
def whole_texts(text: list[str], note: list[str] | None = None) -> list[str]:
    return [each.upper() for each in text]


@model(batched=True, **_OPTIONS)
async def coroutine_texts(text: list[str]) -> list[str]:
    return [each.upper() for each in text]


@model(**_OPTIONS)
def each_text(text: str) -> str:
    return text.upper()


@model(**_OPTIONS)
def each_dictionary(text: dict[str, Any]) -> str:
    return str(text["of"]).upper()


HINTED = [whole_texts, coroutine_texts, each_text, each_dictionary]


def make_hinted(number: int) -> Any:
    return HINTED[number]


@pytest.mark.parametrize("way", ["thread", "process", "in process"])
def test_what_its_hint_does_not_allow_ends_the_request_of_its_caller_alone(way: str) -> None:
    random = Random(way)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(ROWS))
        server: Any = stack.enter_context(Server()) if way == "in process" else Triton(config=local_config())
        for number, hinted in enumerate(HINTED):
            name, signature = hinted.__name__, get_model_signature(hinted)
            if way == "process":
                process = ProcessWorker(make_hinted, (number,))
                server.bind(name, process, signature.inputs, signature.outputs, config=signature.config)
            else:
                server.bind(name, hinted)
        if isinstance(server, Triton):
            stack.enter_context(running(server))
        for hinted in HINTED:
            name = hinted.__name__
            [output] = get_model_signature(hinted).outputs
            assert output.name is not None
            send: Any = (
                InProcessSender(server, name)
                if isinstance(server, Server)
                else stack.enter_context(contextlib.closing(HttpSender(server.http_url, name)))
            )
            for _ in range(4):
                wrong = {place for place in range(ROWS) if random.random() < 0.3}
                texts = [f"text {place}".encode() for place in range(ROWS)]
                sent = [b'{"of": "%b"}' % each for each in texts] if hinted is each_dictionary else [*texts]
                sent = [
                    random.choice([b"\xff\xfe", b"a\xc3"]) if place in wrong else sent[place] for place in range(ROWS)
                ]
                requests = [RawRequest({"text": RawTensor("BYTES", (1, 1), strings(each))}) for each in sent]
                answers = together(send, requests, pool)
                for place, answer in enumerate(answers):
                    if place in wrong:
                        assert answer.code == "INVALID_ARG", (name, answer)
                        assert "Input 'text': its hint is" in answer.error, (name, answer)
                    else:
                        assert answer.error == "", (name, answer)
                        assert answer.outputs[output.name].payload == strings(texts[place].upper()), name
