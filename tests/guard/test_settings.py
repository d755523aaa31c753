"""Settings of what the guard answers: which names `generate` takes, who is told of models, and the page."""

from __future__ import annotations

import json

from pytriton.decorators import model
from pytriton.triton import GuardConfig, Triton, TritonSecurityConfig
from support.http import call
from support.serving import local_config, running, short_home


@model
def shout(text: str, times: int = 1) -> str:
    return text.upper() * times


def ask(triton: Triton, body: object) -> tuple[int, str]:
    status, answer = call(triton.http_url, "POST", "/v2/models/shout/generate", body)
    return status, answer.get("output", answer.get("error"))


def test_a_server_that_takes_any_name() -> None:
    triton = Triton(config=local_config(), guard=GuardConfig(generate_extra_names=True))
    triton.bind(shout)
    with short_home(), running(triton):
        assert ask(triton, {"text": "a", "tiems": 3}) == (200, "A")
        status, error = ask(triton, {"txet": "a"})
        assert status == 400
        assert error.startswith("'txet' is no input of the model 'shout': did you mean 'text'?")


def test_who_may_not_ask_for_the_inputs_is_not_told_of_them() -> None:
    security = TritonSecurityConfig(access_token="secret", restricted_endpoints=["metadata", "model-config"])
    triton = Triton(config=local_config(), security_config=security)
    triton.bind(shout)
    with short_home(), running(triton):
        for body in ({"txet": "a"}, {"text": 5}, {"text": "a", "tiems": 3}):
            status, error = ask(triton, body)
            assert status == 400
            assert not any(told in error for told in ("times", "did you mean"))


@model
def secret_name(text: str) -> str:
    return text


def test_a_server_without_the_page() -> None:
    triton = Triton(config=local_config(), guard=GuardConfig(page=False))
    triton.bind(secret_name)
    with short_home(), running(triton):
        assert [call(triton.http_url, "GET", path)[0] for path in ("/", "/docs")] == [404, 404]


def test_a_page_without_models_that_are_not_for_everybody() -> None:
    security = TritonSecurityConfig(access_token="secret", restricted_endpoints=["metadata"])
    triton = Triton(config=local_config(), security_config=security)
    triton.bind(secret_name)
    with short_home(), running(triton):
        for accept in ("text/html", "*/*"):
            status, answer = call(triton.http_url, "GET", "/", headers={"Accept": accept})
            assert status == 200
            assert "secret_name" not in json.dumps(answer)
