"""Who may send any name to `generate`, and who is told of the inputs of a model."""

from __future__ import annotations

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
