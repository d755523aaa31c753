"""What a browser, or curl, gets at `/` and `/docs` of a server."""

from __future__ import annotations

import base64
import hashlib
import html
import http.client
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pytriton.decorators import Shape, model
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.callables import identity
from support.faults.raw_http import ask, ask_ahead
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@model
def shout(text: str, times: int = 1) -> str:
    return text.upper() * times


@model(max_batch_size=8)
def total(x: Annotated[NDArray[np.float32], Shape(-1)]) -> float:
    return float(x.sum())


@model
def spell(word: str) -> Iterator[str]:
    yield from word


def odd(requests: Any) -> list[Any]:
    return [{"y": next(iter(request.data.values()))} for request in requests]


def get(triton: Triton, path: str, **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    assert triton.http_url is not None
    connection = http.client.HTTPConnection(triton.http_url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers
    finally:
        connection.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    triton = Triton(config=local_config())
    for function in (shout, total, spell):
        triton.bind(function)
    evil = [Tensor(name="<script>alert('1')</script>", dtype=np.float32, shape=(2,))]
    triton.bind("odd", odd, evil, [Tensor(name="y", dtype=np.float32, shape=(2,))], config=ModelConfig(batching=False))
    with short_home(), running(triton):
        yield triton


@pytest.mark.parametrize("path", ["/", "/docs", "/?a=1"])
def test_a_page_for_browsers(served: Triton, path: str) -> None:
    status, page, headers = get(served, path, **BROWSER, Host="<script>evil</script>")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert all(f"<h2>{name}</h2>" in page for name in ("odd", "shout", "spell", "total"))
    assert "evil" not in page
    assert "<td>times</td><td>int</td><td>INT64[1]</td>" in page
    assert f"http://localhost:{str(served.http_url).rpartition(':')[2]}</span>" in page
    assert "127.0.0.1" not in page
    scripts = re.findall("<script[^>]*>(.*?)</script>", page)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == 1
    assert f"script-src 'sha256-{digest}'" in headers["Content-Security-Policy"]


def test_its_lines_work_in_a_shell(served: Triton) -> None:
    page = get(served, "/", **BROWSER)[1]
    lines = [html.unescape(re.sub("<[^>]*>", "", line)) for line in re.findall("(?s)<pre>(.*?)</pre>", page)]
    answers = {}
    for line in lines:
        told = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True, timeout=PATIENCE_S)
        answer = json.loads(told.stdout.split("\n\n")[0].removeprefix("data: "))
        answers[answer.pop("model_name")] = answer
    outputs = {name: answer.get("output", answer.get("y")) for name, answer in answers.items()}
    assert outputs == {"odd": [1.0, 2.0], "shout": "HELLO", "spell": "h", "total": 3.0}


def test_json_for_programs(served: Triton) -> None:
    for accept in ("*/*", "application/json"):
        status, text, headers = get(served, "/", Accept=accept)
        assert (status, headers["Content-Type"], headers["Vary"]) == (200, "application/json", "Accept")
        models = {entry.pop("name"): entry for entry in json.loads(text)["models"]}
    assert models["shout"] == {
        "versions": ["1"],
        "ready": True,
        "inputs": [
            {"name": "text", "datatype": "BYTES", "shape": [1], "hint": "str"},
            {"name": "times", "datatype": "INT64", "shape": [1], "hint": "int", "optional": True},
        ],
        "outputs": [{"name": "output", "datatype": "BYTES", "shape": [1], "hint": "str"}],
        "path": "/v2/models/shout/generate",
        "example": {"text": "hello"},
    }
    assert models["spell"]["path"] == "/v2/models/spell/generate_stream"


def test_models_that_come_and_go(served: Triton) -> None:
    def names() -> list[str]:
        return [entry["name"] for entry in json.loads(get(served, "/")[1])["models"]]

    x, y = (Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in "xy")
    served.bind("later", identity, [x], [y])
    eventually(lambda: "later" in names())
    served.unbind("later")
    eventually(lambda: "later" not in names())


@pytest.mark.parametrize("path", ["/other", "/docs/", "//", "/index.html"])
def test_no_other_path(served: Triton, path: str) -> None:
    assert get(served, path, **BROWSER)[0] in (400, 404)


def test_the_connection_goes_on(served: Triton) -> None:
    assert served.http_url is not None
    connection = http.client.HTTPConnection(served.http_url.removeprefix("http://"), timeout=PATIENCE_S)
    for path, status in (("/", 200), ("/v2/health/ready", 200), ("/docs", 200), ("/none", 404), ("/", 200)):
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        assert response.status == status
    connection.close()


def test_requests_that_do_not_wait_for_answers(served: Triton) -> None:
    paths = {"/": 200, "/none": 404, "/docs": 200, "/v2/health/ready": 200, "/other": 404, "/v2": 200}
    for begin in paths:
        sent = [begin, *paths, *reversed(paths), *paths]
        answers = ask_ahead(served, [f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode() for path in sent])
        assert [status for status, _ in answers] == [paths[path] for path in sent[:-1]]
        assert [text[:9] == '{"models"' for _, text in answers] == [path in ("/", "/docs") for path in sent[:-1]]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_callers_of_http_1_0(served: Triton, path: str, keeps: bool) -> None:
    field = "Connection: keep-alive\r\n" if keeps else ""
    status, text = ask(served, f"GET {path} HTTP/1.0\r\n{field}\r\n".encode())
    assert (status == 200) == text.startswith('{"models"')
