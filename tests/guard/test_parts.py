"""Each part of the guard can be switched off: the server serves on, says so, and does not do what the part does."""

from __future__ import annotations

import json
import logging
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pytriton.cli.checks.vulnerabilities import describe_vulnerabilities
from pytriton.client import ModelClient
from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.server.tritonserver.guard import GUARD_VARIABLE, Part
from pytriton.server.tritonserver.handover import Protection
from pytriton.triton import GuardConfig, Triton
from support.callables import identity
from support.faults.raw_http import ask
from support.serving import local_config, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

SWITCHED = (Part.REFUSE, Part.HANDOVER, Part.FRONTEND)
INFER = "/v2/models/same/infer"


@contextmanager
def without(*parts: Part, **config: Any) -> Iterator[Triton]:
    guard = GuardConfig(**{part.value: False for part in parts})
    triton = Triton(config=local_config(**config), guard=guard)
    x, y = (Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in "xy")
    triton.bind("same", identity, [x], [y], config=ModelConfig())
    with short_home(), triton:
        yield triton


def post(body: bytes) -> bytes:
    return f"POST {INFER} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def body_of(shape: list[int], data: list[float]) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": data}]}).encode()


def serves(triton: Triton) -> None:
    large = np.arange(200_000, dtype=np.float32)
    for url in (triton.http_url, triton.grpc_url):
        assert url is not None
        with ModelClient(url, "same", inference_timeout_s=PATIENCE_S) as client:
            for sample in (large[:1], large, large[:3]):
                np.testing.assert_array_equal(client.infer_sample(sample)["y"], sample)


def parts_in_force(triton: Triton) -> set[Part]:
    states = triton.guard_states()
    assert all(states.values()), states
    return {Protection[name].part for name in states}


def counted(triton: Triton, protocol: str, outcome: str) -> float:
    """Return how many requests ended in a way, over all models."""
    with urllib.request.urlopen(str(triton.metrics_url), timeout=PATIENCE_S) as page:
        text = page.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "pytriton_responses_total"
        and (sample.labels["protocol"], sample.labels["outcome"]) == (protocol, outcome)
    )


def fails(requests: Any) -> Any:
    raise ValueError("of no use")


@pytest.mark.parametrize("part", SWITCHED, ids=lambda part: part.value)
def test_a_server_without_a_part_serves_and_says_so(part: Part, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    # A command that another test has run in this process may have set its own.
    caplog.set_level(logging.DEBUG, "pytriton")
    with without(part) as triton:
        serves(triton)
        assert parts_in_force(triton) == set(Part) - {part}
    tried = next(text for text in caplog.messages if "The guard was tried out" in text)
    assert re.findall(r"(\w+) off", tried) == [part.value]
    assert any("active 1: " in text and f"{part.value} is off" in text for text in caplog.messages)


def test_a_server_without_any_part_serves_and_says_so() -> None:
    with without(*SWITCHED) as triton:
        serves(triton)
        assert parts_in_force(triton) == {Part.ANSWERS, Part.WORKAROUNDS}


def test_with_all_parts_none_is_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with without() as triton:
        assert parts_in_force(triton) == set(Part)
    assert not [text for text in caplog.messages if re.search(r"\b(is off|\w+ off[,.])", text)]


def test_without_refuse_requests_reach_triton_as_they_came() -> None:
    guard = GuardConfig(refuse=False, max_json_depth=3, max_request_bytes=1000, max_input_bytes=1000)
    triton = Triton(config=local_config(), guard=guard)
    x, y = (Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in "xy")
    triton.bind("same", identity, [x], [y])
    with short_home(), triton:
        # Deeper, longer and larger than the limits, which hold nobody.
        serves(triton)
        status, answer = ask(triton, post(b"[" * 10))
        assert status in (400, 500)
        assert "max_json_depth" not in answer
        status, answer = ask(triton, post(body_of([1, 2], [1, 2])))
        assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [1.0, 2.0])
        # The token is kept from others all the same.
        token = triton.get_access_token()
        assert token is not None
        assert token.encode() not in Path(f"/proc/{server_pid(triton)}/cmdline").read_bytes()


def test_without_handover_a_server_is_not_replaced() -> None:
    with without(Part.HANDOVER) as triton:
        with pytest.raises(PyTritonInvalidOperationError, match=r"GuardConfig\.handover"):
            triton.replace_server()
        serves(triton)


def test_without_frontend_it_is_known_how_requests_end() -> None:
    with without(Part.FRONTEND, allow_metrics=True, metrics_port=0) as triton:
        serves(triton)
        triton.bind("fails", fails, [Tensor(name="x", dtype=np.float32, shape=(1,))], [])
        # Triton itself has 400 for whatever fails in a model.
        body = b'{"x":[1]}'
        head = f"POST /v2/models/fails/generate HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        assert ask(triton, head.encode() + body)[0] == 500
        eventually(lambda: counted(triton, "http", "failed") == 1)
        assert counted(triton, "http", "ok") == 3


def test_the_check_of_vulnerabilities_names_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GUARD_VARIABLE, "refuse=0,page=0")
    text = "\n".join(describe_vulnerabilities(find_tritonserver(), verbose=False))
    assert "what these cover is NOT covered: refuse." in text
