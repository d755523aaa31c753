"""The five clients and thousands of good answers with something changed: each is a result, or an error of ours."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from pytriton.client.exceptions import PyTritonClientConnectionError, PyTritonClientError, PyTritonClientTimeoutError
from support.faults.front_end.bodies import scramble
from support.faults.front_end.values import anything, dumps
from support.faults.hostile_grpc import hostile_grpc_server, model_config, response
from support.faults.hostile_http import (
    CLIENTS,
    DECOUPLED,
    GOOD_INFER,
    GOOD_STREAM,
    Caller,
    caller,
    chunked,
    config,
    event,
    hostile_server,
    http,
    inferred,
    output,
)
from support.waiting import PATIENCE_S

SEED = 20_240_607
GOOD = [[1.0, 2.0]]
LONGEST_ERROR = 20_000
DATA = b"\0\0\x80\x3f\0\0\0\x40"


def replaced(rng: random.Random, value: Any) -> Any:
    """The value with some of what is in it replaced by anything."""
    if rng.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return anything(rng)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], replaced(rng, value[at]), *value[at + 1 :]]
    key = rng.choice(list(value))
    if rng.random() < 0.15:
        return {name: content for name, content in value.items() if name != key}
    return {**value, key: replaced(rng, value[key])}


def answer(rng: random.Random, kind: str, place: str) -> bytes:
    """An answer for a place, with something wrong in its structure, in its bytes or in both."""
    is_stream = kind in DECOUPLED
    sent = http(json.dumps(config(is_stream)).encode())
    if place == "infer":
        sent = GOOD_STREAM if is_stream else GOOD_INFER
    roll = rng.random()
    if roll < 0.6:
        if place == "config":
            sent = http(dumps(replaced(rng, config(is_stream))))
        elif is_stream:
            sent = chunked(event(dumps(replaced(rng, {"model_name": "m", "model_version": "1", "y": [1.0, 2.0]}))))
        else:
            head = {"model_name": "m", "model_version": "1", "id": "1", "parameters": {"p": 1}, "outputs": [output()]}
            sent = inferred(dumps(replaced(rng, head)), DATA[: rng.choice([8, 8, 8, 7, 0])])
    if roll > 0.5:
        sent = scramble(rng, sent)
    return sent


def fuzz(kind: str, count: int) -> None:
    problems = []
    with hostile_server() as server:
        for number in range(count):
            rng = random.Random(f"{SEED}/{kind}/{number}")
            place = "infer" if rng.random() < 0.8 else "config"
            with caller(kind, server.url, inference_timeout_s=5, init_timeout_s=5) as client:
                server.answers[place] = answer(rng, kind, place)
                problems += [f"{number}: {problem}" for problem in problems_of(client)]
                server.answers.clear()
                if place == "infer" and not goes_on(client):
                    problems.append(f"{number}: the client cannot be used any more")
    assert not problems, f"seed {SEED}, {kind}:\n" + "\n".join(problems[:20])


def problems_of(client: Caller) -> list[str]:
    """What a call may not end with."""
    try:
        client.infer()
    except PyTritonClientError as error:
        return [f"a text of {len(str(error))} characters"] if len(str(error)) > LONGEST_ERROR else []
    except Exception as error:
        return [f"{type(error).__name__}: {error!s:.300}"]
    return []


def goes_on(client: Caller) -> bool:
    """Whether the client gets good answers again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.infer() == GOOD
        except PyTritonClientConnectionError:
            # The server ends the connection after a hostile answer, and the client may not have heard of it.
            return client.infer() == GOOD
        except PyTritonClientTimeoutError:
            # Its limit is for hostile answers, some of which never come to their end; a busy machine may need longer.
            if time.monotonic() > deadline:
                return False


@pytest.mark.parametrize("kind", CLIENTS)
def test_changed_answers(kind: str) -> None:
    fuzz(kind, 500)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", CLIENTS)
def test_changed_answers_in_masses(kind: str) -> None:
    fuzz(kind, 20_000)


def grpc_message(rng: random.Random, kind: str, method: str) -> bytes:
    message: Any = model_config(kind in DECOUPLED)
    if method != "ModelConfig":
        message = response(
            shape=[rng.choice([0, 1, 2, -1, 2**31, 2**63 - 1, -(2**63)]) for _ in range(rng.randrange(4))],
            datatype=rng.choice(["FP32", "BYTES", "INT8", "FP16", "", "X"]),
            data=[rng.randbytes(rng.randrange(20)) for _ in range(rng.choice([0, 1, 1, 1, 2]))],
        )
    if method == "ModelStreamInfer":
        message = service_pb2.ModelStreamInferResponse(infer_response=message)
    content: bytes = message.SerializeToString()
    return scramble(rng, content) if rng.random() < 0.6 or method == "ModelConfig" else content


@pytest.mark.parametrize("kind", CLIENTS)
def test_changed_messages(kind: str) -> None:
    problems = []
    with hostile_grpc_server() as server, caller(kind, server.url) as client:
        method = "ModelStreamInfer" if kind in DECOUPLED else "ModelInfer"
        for number in range(500):
            server.answers[method] = [grpc_message(random.Random(f"{SEED}/{kind}/{number}"), kind, method)]
            problems += [f"{number}: {problem}" for problem in problems_of(client)]
            server.answers.clear()
            assert client.infer() == GOOD
    assert not problems, f"seed {SEED}, {kind}:\n" + "\n".join(problems[:20])
