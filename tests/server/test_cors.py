"""Pages of other origins: whom a server lets read its answers, and what a real browser makes of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import batch
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.errors import TritonServerStartError
from pytriton.triton import GuardConfig, Triton, TritonConfig
from support.chromium import browsing
from support.http import serving
from support.serving import local_config, running
from support.waiting import PATIENCE_S

APP, OTHER = "https://app.example", "https://other.example"
INFER = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [3]}]}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,inference-header-content-length,traceparent",
}


def double(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {"y": 2 * x}


@contextlib.contextmanager
def served(*origins: str, guard: GuardConfig | None = None, **settings: Any) -> Iterator[Triton]:
    """Run a server with a model, and one that streams."""

    def count(requests: Any) -> Iterator[Any]:
        for number in range(3):
            yield [{"y": request["x"] + np.float32(number)} for request in requests]

    triton = Triton(config=local_config(cors_origins=list(origins) or None, **settings), guard=guard)
    tensors: Any = [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")]
    triton.bind("double", batch(double), *tensors, config=ModelConfig(max_batch_size=4))
    triton.bind("count", count, *tensors, config=ModelConfig(max_batch_size=4, decoupled=True))
    with running(triton):
        yield triton


def ask(
    triton: Triton, method: str, path: str, headers: Mapping[str, str] | None = None, body: Any = None
) -> tuple[int, Message, str]:
    """Return status, headers and body of one answer."""
    connection = http.client.HTTPConnection(str(triton.http_url).removeprefix("http://"), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, None if body is None else json.dumps(body), dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()


DEEP: Any = json.loads("[" * 900 + "]" * 900)
PATHS = {
    "infer": ("POST", "/v2/models/double/infer", INFER, 200),
    "generate": ("POST", "/v2/models/double/generate", {"x": 3}, 200),
    "stream": ("POST", "/v2/models/count/generate_stream", {"x": 3}, 200),
    "metadata": ("GET", "/v2/models/double", None, 200),
    "health": ("GET", "/v2/health/ready", None, 200),
    "page": ("GET", "/", None, 200),
    "an error of Triton": ("POST", "/v2/models/none/infer", INFER, 404),
    "an error that the guard mends": ("POST", "/v2/models/double/generate", {"z": 3}, 400),
    "a refusal of the guard": ("POST", "/v2/models/double/infer", DEEP, 400),
    "protected": ("GET", "/v2/models/stats", None, 403),
    "another method": ("GET", "/v2/models/double/infer", None, 405),
    "nothing": ("GET", "/nothing", None, 404),
}


def test_each_answer_says_who_may_read_it() -> None:
    with served(APP, "http://localhost:3000") as triton:
        for name, (method, path, body, expected) in PATHS.items():
            for origin in (APP, "http://localhost:3000", OTHER, None):
                status, headers, _ = ask(triton, method, path, {} if origin is None else {"Origin": origin}, body)
                allowed = origin if origin in (APP, "http://localhost:3000") else None
                assert status == (403 if origin == OTHER and method == "POST" else expected), name
                assert headers.get_all("Access-Control-Allow-Origin") == (allowed and [allowed]), name
                assert ("Inference-Header-Content-Length" in (headers["Access-Control-Expose-Headers"] or "")) == bool(
                    allowed
                )
                assert "Origin" in headers.get_all("Vary", []), name
                assert headers["Access-Control-Allow-Credentials"] is None


@pytest.mark.parametrize("refuse", [True, False])
def test_a_browser_asks_whether_it_may_ask(refuse: bool) -> None:
    with served(APP, guard=GuardConfig(refuse=refuse)) as triton:
        for path in ("/v2/models/double/infer", "/v2/models/count/generate_stream", "/v2/health/ready", "/v2/nothing"):
            status, headers, body = ask(triton, "OPTIONS", path, {"Origin": APP, **PREFLIGHT})
            assert (status, body, headers["Access-Control-Allow-Origin"]) == (204, "", APP)
            assert headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
            assert {"POST", "GET"} <= set(headers["Access-Control-Allow-Methods"].split(", "))
            assert int(headers["Access-Control-Max-Age"]) > 0
            assert headers["Vary"] == "Origin"
            status, headers, body = ask(triton, "OPTIONS", path, {"Origin": OTHER, **PREFLIGHT})
            assert (status, headers["Access-Control-Allow-Origin"]) == (403, None)
            assert "cors_origins" in json.loads(body)["error"]
        # One that names no headers that could be, and one that is none.
        status, headers, _ = ask(
            triton, "OPTIONS", path, {"Origin": APP, **PREFLIGHT, "Access-Control-Request-Headers": "a<b>"}
        )
        assert (status, headers["Access-Control-Allow-Headers"]) == (204, None)
        assert ask(triton, "OPTIONS", "/v2/health/ready", {"Origin": APP})[0] == 200
        # None of it counts as a request for the model, and the server goes on.
        assert ask(triton, "POST", "/v2/models/double/infer", {"Origin": APP}, INFER)[0] == 200


def test_any_origin() -> None:
    with served("*") as triton:
        status, headers, _ = ask(triton, "POST", "/v2/models/double/infer", {"Origin": OTHER}, INFER)
        assert (status, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (200, "*", None)
        assert ask(triton, "OPTIONS", "/v2/models/double/infer", {"Origin": OTHER, **PREFLIGHT})[0] == 204
        assert ask(triton, "GET", "/v2")[1]["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize("origins", [(), (APP,), ("*",)])
def test_a_page_of_another_site_sends_nothing(origins: tuple[str, ...]) -> None:
    """Browsers send a form, or a text, without asking beforehand; they say themselves from which site it comes."""
    with served(*origins) as triton:

        def status(**headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            path = "/v2/models/double/infer"
            found, _, body = ask(triton, "POST", path, {"Content-Type": "text/plain", **named}, INFER)
            assert found == 200 or "cors_origins" in json.loads(body)["error"]
            return found

        for site in ("cross-site", "same-site"):
            for origin in (APP, OTHER, "null"):
                allowed = origins == ("*",) or origin in origins
                assert status(Origin=origin, Sec_Fetch_Site=site) == (200 if allowed else 403)
            assert status(Sec_Fetch_Site=site) == 403
            # What changes nothing may be asked for; nobody but a page that is named can read the answer.
            assert ask(triton, "GET", "/v2/models/double", {"Origin": OTHER, "Sec-Fetch-Site": site})[0] == 200
        # Its own site's pages come by way of a proxy that says another host, perhaps.
        for site in ("same-origin", "none"):
            assert status(Origin=OTHER, Sec_Fetch_Site=site) == 200
        # Of browsers that do not say it, the origin counts where somebody has named some.
        for origin in (OTHER, "null"):
            assert status(Origin=origin) == (403 if origins == (APP,) else 200)
        assert status(Origin=str(triton.http_url)) == 200
        assert status(Origin="http://app.example:8000", Host="App.example:8000") == 200
        assert status() == 200


def test_whoever_refuses_nothing_takes_pages_of_other_sites() -> None:
    with served(APP, guard=GuardConfig(refuse=False)) as triton:
        headers = {"Origin": OTHER, "Sec-Fetch-Site": "cross-site"}
        assert ask(triton, "POST", "/v2/models/double/infer", headers, INFER)[0] == 200


def test_metrics_are_for_no_page() -> None:
    with (
        served(APP, allow_metrics=True, metrics_port=0) as triton,
        urllib.request.urlopen(
            urllib.request.Request(str(triton.metrics_url), headers={"Origin": APP}), timeout=PATIENCE_S
        ) as answer,
    ):
        assert answer.headers["Access-Control-Allow-Origin"] is None


def test_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as triton:
        status, headers, _ = ask(triton, "POST", "/v2/models/double/infer", {"Origin": APP}, INFER)
        assert status == 200
        assert not [name for name in headers if name.lower().startswith(("access-control", "vary"))]
        assert ask(triton, "OPTIONS", "/v2/models/double/infer", {"Origin": APP, **PREFLIGHT})[0] not in (200, 204)
    monkeypatch.setenv("PYTRITON_TRITON_CONFIG_CORS_ORIGINS", APP)
    assert Triton().describe().cors_origins == (APP,)


def test_it_needs_the_guard() -> None:
    with (
        pytest.raises(TritonServerStartError, match="cors_origins needs the guard"),
        served(APP, guard=GuardConfig(enabled=False)),
    ):
        pass


@pytest.mark.parametrize(
    ("origins", "problem"),
    [
        (["https://app.example/"], "without a path or a slash"),
        (["https://app.example/page"], "without a path or a slash"),
        (["app.example"], "no scheme"),
        (["https://user@app.example"], "no user"),
        (["https://App.example"], "lower case"),
        (["https://app.example:443"], "leave out the port 443"),
        (["https://app.example:99999"], "no scheme, host and port"),
        (["https://ä.example"], "xn--"),
        (["https://a b"], "no scheme, host and port"),
        (["null"], "no scheme"),
        (["*", "https://app.example"], "stands alone"),
    ],
)
def test_what_is_no_origin(origins: list[str], problem: str) -> None:
    with pytest.raises(PyTritonValidationError, match=problem) as caught:
        TritonConfig(cors_origins=origins)
    assert "TritonConfig.cors_origins" in str(caught.value)
    assert repr(origins[0]) in str(caught.value)


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://[::1]:8443", "chrome-extension://abcdef", "*"])
def test_what_is_an_origin(origin: str) -> None:
    assert TritonConfig(cors_origins=[origin]).cors_origins == [origin]


# ---- a browser -------------------------------------------------------------------------------------------------------

PAGE = b"<!doctype html><title>A page of another origin</title>"
# Asks as a script of a page does, with a header for which a browser asks beforehand.
SCRIPT = """
const [server, done] = arguments;
const headers = {"Content-Type": "application/json", "Authorization": "Bearer no", "triton-request-id": "7"};
const post = (path, body) => fetch(server + path, {method: "POST", headers, body: JSON.stringify(body)});
const ask = async () => {
  const found = {};
  found.infer = (await (await post("/v2/models/double/infer", {inputs: [
    {name: "x", shape: [1, 1], datatype: "FP32", data: [3]}]})).json()).outputs[0].data;
  const binary = await post("/v2/models/double/infer", {inputs: [
    {name: "x", shape: [1, 1], datatype: "FP32", data: [3]}],
    outputs: [{name: "y", parameters: {binary_data: true}}]});
  const length = Number(binary.headers.get("Inference-Header-Content-Length"));
  found.binary = new DataView(await binary.arrayBuffer(), 0).getFloat32(length, true);
  found.generate = (await (await post("/v2/models/double/generate", {x: 3})).json()).y;
  const reader = (await post("/v2/models/count/generate_stream", {x: 3})).body.getReader();
  let text = "";
  const decoder = new TextDecoder();
  for (let part = await reader.read(); !part.done; part = await reader.read()) text += decoder.decode(part.value);
  found.stream = text.split("\\n").filter(line => line.startsWith("data: ")).map(line => JSON.parse(line.slice(6)).y);
  const wrong = await post("/v2/models/double/generate", {z: 3});
  found.wrong = [wrong.status, (await wrong.json()).error];
  return found;
};
ask().then(done, error => done(String(error)));
"""
# Sends what takes no question beforehand, and has no answer that the page could read.
BLIND = """
const [server, done] = arguments;
fetch(server + "/v2/models/note/generate", {method: "POST", mode: "no-cors", body: '{"x": 1}'}).then(done, done);
"""


class Page(BaseHTTPRequestHandler):
    """A page of another origin than the server's."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_a_page_in_a_browser() -> None:
    with serving(Page) as place, browsing() as browser, served(f"http://{place}") as triton:
        browser.driver.get(f"http://{place}/")
        found = browser.driver.execute_async_script(SCRIPT, triton.http_url)
        wrong = found.pop("wrong")
        assert found == {"infer": [6], "binary": 6, "generate": 6, "stream": [3, 4, 5]}
        assert wrong[0] == 400
        assert "'z'" in wrong[1]


def test_a_page_in_a_browser_that_may_not() -> None:
    with serving(Page) as place, browsing() as browser, served(APP) as triton:
        browser.driver.get(f"http://{place}/")
        assert "Failed to fetch" in browser.driver.execute_async_script(SCRIPT, triton.http_url)


def test_a_page_in_a_browser_sends_what_it_cannot_read() -> None:
    asked = []

    def note(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        asked.append(float(x[0, 0]))
        return {"y": x}

    triton = Triton(config=local_config())
    tensors: Any = [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")]
    triton.bind("note", batch(note), *tensors, config=ModelConfig(max_batch_size=4))
    with serving(Page) as place, browsing() as browser, running(triton):
        browser.driver.get(f"http://{place}/")
        browser.driver.execute_async_script(BLIND, triton.http_url)
        assert ask(triton, "POST", "/v2/models/note/generate", {}, {"x": 2})[0] == 200
    assert asked == [2]
