"""Servers without the page, and what it leaves out."""

from __future__ import annotations

import json

from pytriton.decorators import model
from pytriton.triton import GuardConfig, Triton, TritonSecurityConfig
from support.http import call
from support.serving import local_config, running, short_home


@model
def secret_name(text: str) -> str:
    return text


def test_a_server_without_it() -> None:
    triton = Triton(config=local_config(), guard=GuardConfig(page=False))
    triton.bind(secret_name)
    with short_home(), running(triton):
        assert [call(triton.http_url, "GET", path)[0] for path in ("/", "/docs")] == [404, 404]


def test_models_that_are_not_for_everybody() -> None:
    security = TritonSecurityConfig(access_token="secret", restricted_endpoints=["metadata"])
    triton = Triton(config=local_config(), security_config=security)
    triton.bind(secret_name)
    with short_home(), running(triton):
        for accept in ("text/html", "*/*"):
            status, answer = call(triton.http_url, "GET", "/", headers={"Accept": accept})
            assert status == 200
            assert "secret_name" not in json.dumps(answer)
