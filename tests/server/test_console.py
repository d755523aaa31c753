"""The console, looked at with a real Chromium: a server of ours, one of hostile names, and who may come in.

`python3 tools/dev.py pictures` has the pictures of docs/console.md taken anew.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import wave
import zlib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientError
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import ProcessWorker, Triton, TritonSecurityConfig
from support.chromium import PHONE, Browser, browsing, hosts, pictures_folder
from support.process_models import DIE
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

# Looked for, not imported: the console is another process, and has warnings of its own.
if importlib.util.find_spec("nicegui") is None:
    pytest.skip("nicegui is not installed: pytriton-server[console]", allow_module_level=True)

TOKEN = "a-token-that-is-nowhere"
PASSWORD = "correct horse"
NODE_FILE = 'await (await import("node:fs")).openAsBlob("FILE")'

go_on = threading.Event()


@batch
def scale(image: np.ndarray[Any, Any], factor: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"scaled": image * factor}


def describe(requests: list[Request]) -> list[dict[str, Any]]:
    (request,) = requests
    data = request["file"].item()
    if data == b"bad":
        raise ValueError("this file is <b>bad</b>")
    return [{"size": np.array([len(data)]), "head": np.array([data[:5]], object)}]


def words(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    """Yields the first word, and the others when the test has seen it."""
    for number, word in enumerate(requests[0]["text"].item().split()):
        if number:
            assert go_on.wait(PATIENCE_S)
        yield [{"word": np.array([[word]], object)}]


@pytest.fixture(scope="module")
def server() -> Iterator[Triton]:
    config = local_config(allow_metrics=True, metrics_address="127.0.0.1", metrics_port=0)
    with short_home():
        triton = Triton(config=config, security_config=TritonSecurityConfig(access_token=TOKEN))
        triton.bind(
            "scale",
            scale,
            [Tensor((-1,), np.float32, "image"), Tensor((1,), np.float32, "factor")],
            [Tensor((-1,), np.float32, "scaled")],
            config=ModelConfig(max_batch_size=16, batcher=DynamicBatcher(max_queue_delay_microseconds=1000)),
        )
        triton.bind(
            "describe",
            describe,
            [Tensor((1,), bytes, "file"), Tensor((1,), np.int64, "times", optional=True)],
            [Tensor((-1,), np.int64, "size"), Tensor((1,), bytes, "head")],
            config=ModelConfig(batching=False),
        )
        triton.bind(
            "words",
            words,
            [Tensor((1,), bytes, "text")],
            [Tensor((1,), bytes, "word")],
            config=ModelConfig(decoupled=True, max_batch_size=1),
        )
        with running(triton):
            yield triton


@contextlib.contextmanager
def console(url: str | None, *options: str, **environment: str) -> Iterator[str]:
    """Run the command, and yield its address."""
    assert url is not None
    command = [sys.executable, "-m", "pytriton", "console", url, "--port", "0", *options]
    variables = {**os.environ, **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("Console: http://"), process.stderr.read()
            yield line.split()[1]
        finally:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        for text in (out, err):
            assert "Traceback" not in text, text
            assert not any(secret in text for secret in (TOKEN, PASSWORD)), text


@pytest.fixture(scope="module")
def page(server: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    log.write_text("INFO pytriton.triton: the server is ready\nWARNING pytriton.worker: <b>a line of the log</b>\n")
    metrics = str(server.metrics_url)
    with console(server.http_url, "--metrics-url", metrics, f"--log-file={log}", PYTRITON_ACCESS_TOKEN=TOKEN) as url:
        yield url


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    window.requests()
    window.errors()
    yield window
    window.open("about:blank")
    assert window.errors() == []


def in_the_background(server: Triton, ending: threading.Event) -> threading.Thread:
    def call() -> None:
        with ModelClient(str(server.http_url), "scale") as client:
            while not ending.is_set():
                client.infer_sample(np.ones(3, np.float32), np.ones(1, np.float32))
                ending.wait(0.02)

    thread = threading.Thread(target=call)
    thread.start()
    return thread


# ---- what there is to see ------------------------------------------------------------------------------------------


@pytest.mark.slow(seconds=60)
def test_models_and_their_numbers(page: str, server: Triton, browser: Browser) -> None:
    ending = threading.Event()
    caller = in_the_background(server, ending)
    try:
        browser.open(page)
        browser.wait_text(".c-state", lambda text: text == "READY")
        names = browser.wait_text(
            ".c-models", lambda text: all(name in text for name in ("describe", "scale", "words"))
        )
        assert "image: FP32[-1], factor: FP32[1] -> scaled: FP32[-1]; max_batch_size=16" in names
        assert browser.text(".c-is-models-ready") == "3 of 3"
        assert browser.text(".c-is-workers-attached") == "3 of 3"
        # A number moves.
        first = browser.wait_text(".c-is-requests-s", lambda text: text not in ("-", "0"))
        browser.wait_text(".c-is-requests-s", lambda text: text not in ("-", first))
        browser.wait_text(".c-is-latency", lambda text: text != "-")
        eventually(lambda: len(browser.driver.find_elements("css selector", ".c-chart canvas")) == 4)
        assert "<b>a line of the log</b>" in browser.text(".c-log")
        if pictures_folder() is not None:
            for _ in range(25):  # so that there are lines to be seen
                seen = browser.text(".c-is-latency")
                browser.wait_text(".c-is-latency", lambda text, seen=seen: text != seen)  # type: ignore[misc]
        browser.picture("console/desk")
        browser.darken(is_dark=True)
        browser.find("body.body--dark")
        browser.picture("console/desk-dark")
        browser.resize(PHONE)
        eventually(lambda: browser.width() <= PHONE[0])
        assert "scale" in browser.text(".c-models")
        browser.picture("console/phone-dark")
    finally:
        ending.set()
        caller.join()
        browser.darken(is_dark=False)
        browser.resize((1280, 860))
    # All that it needs is its own: nothing is asked for elsewhere.
    assert hosts(browser.requests()) == {page.removeprefix("http://")}
    for text in (browser.driver.page_source, *browser.requests()):
        assert TOKEN not in text


def test_a_model_is_tried(page: str, browser: Browser) -> None:
    browser.open(f"{page}/model?name=scale")
    browser.write(".c-field:nth-child(1) textarea", "1, 2, 3")
    browser.write(".c-field:nth-child(2) textarea", "10")
    browser.click(".c-call")
    assert browser.wait_text(".c-answer", bool) == "scaled: [10., 20., 30.]"
    assert "ms" in browser.wait_text(".c-status", lambda text: text != "...")
    browser.wait_text(".c-curl", lambda text: '{"image": [1.0, 2.0, 3.0], "factor": 10.0}' in text)
    browser.picture("console/model")
    browser.write(".c-field:nth-child(2) textarea", "ten")
    browser.click(".c-call")
    assert browser.wait_text(".c-error", bool) == "Input 'factor': expected FP32 (numbers with commas), received 'ten'."


def test_texts_and_files_and_errors(page: str, browser: Browser, tmp_path: Path) -> None:
    browser.open(f"{page}/model?name=describe")
    # A text as it stands, though it looks like a file of the console's machine, or like JSON.
    for text in ("@/etc/hostname", "[1,"):
        browser.write(".c-field textarea", text)
        browser.wait_text(".c-curl", lambda shown, text=text: json.dumps(text) in shown)  # type: ignore[misc]
        browser.click(".c-call")
        browser.wait_text(".c-answer", lambda shown, text=text: f"size: {len(text)}\n" in shown)  # type: ignore[misc]
    # What may be left out is sent once somebody writes it.
    assert '"times"' not in browser.text(".c-curl")
    browser.write(".c-field:nth-child(2) textarea", "3")
    browser.wait_text(".c-curl", lambda shown: '"times": 3' in shown)
    browser.write(".c-field textarea", "bad")
    browser.click(".c-call")
    assert "this file is <b>bad</b>" in browser.wait_text(".c-error", bool)
    cat = tmp_path / "cat.jpg"
    cat.write_bytes(bytes(range(256)) * 40)
    browser.find("input[type=file]").send_keys(str(cat))
    browser.wait_text(".c-field .q-chip", lambda text: "cat.jpg (10,240 bytes)" in text)
    browser.click(".c-call")
    browser.wait_text(".c-answer", lambda text: "size: 10240" in text)


def test_images_are_shown_and_sounds_are_played(page: str, server: Triton, browser: Browser) -> None:
    def draw(requests: list[Request]) -> list[dict[str, Any]]:
        return [
            {
                "image": np.array([png(40, 30)], object),
                "sound": np.array([wav()], object),
                "story": np.array([b"once upon a time " * 300], object),
            }
            for _ in requests
        ]

    outputs = [Tensor((1,), bytes, name) for name in ("image", "sound", "story")]
    config = ModelConfig(batching=False)
    server.bind("draw", draw, [Tensor((1,), bytes, "photo"), Tensor((1,), np.int64, "seed")], outputs, config=config)
    try:
        browser.open(f"{page}/model?name=draw")
        assert "bytes BYTES[1]" in browser.wait_text(".c-type", bool)
        assert "No batching" in browser.text(".c-words")
        browser.click(".c-call")
        assert "Input 'photo' takes a file" in browser.wait_text(".c-error", bool)
        browser.write(".c-field textarea", "no photo")
        browser.click(".c-call")
        browser.wait_text(".c-answer", lambda text: "image: <PNG, " in text and "sound: <WAV, " in text)
        eventually(
            lambda: browser.driver.execute_script("return document.querySelector('.c-image')?.naturalWidth") == 40
        )
        eventually(lambda: browser.driver.execute_script("return document.querySelector('.c-sound')?.duration") == 0.5)
        saved = [each.text for each in browser.driver.find_elements("css selector", ".c-save")]
        assert [text.split("Save ")[1].split(" (")[0] for text in saved] == ["image.png", "sound.wav", "story.txt"]
        browser.picture("console/answer")
        assert browser.errors() == []
    finally:
        server.unbind("draw")


def png(width: int, height: int) -> bytes:
    """An image, written as PNG says."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(c for x in range(width) for c in (6 * x, 8 * y, 160)) for y in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def wav() -> bytes:
    """Half a second of a tone."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        file.writeframes((np.sin(np.arange(4000) / 3) * 8000).astype("<i2").tobytes())
    return made.getvalue()


def test_a_stream_is_shown_as_it_comes(page: str, browser: Browser) -> None:
    go_on.clear()
    browser.open(f"{page}/model?name=words")
    browser.write(".c-field textarea", "to <i>be</i> or")
    browser.click(".c-call")
    assert browser.wait_text(".c-answer", bool) == "word: to"
    assert browser.text(".c-status") == "1 answer, ..."
    go_on.set()
    browser.wait_text(".c-answer", lambda text: text == "word: to\nword: <i>be</i>\nword: or")
    browser.wait_text(".c-status", lambda text: text.startswith("3 answers, ") and text.endswith(" ms"))


@pytest.mark.parametrize("model", ["scale", "describe", "words"])
def test_what_is_there_to_copy_works(page: str, browser: Browser, model: str, tmp_path: Path) -> None:
    go_on.set()
    browser.open(f"{page}/model?name={model}")
    wanted = {"scale": "1", "describe": "hello", "words": "hello"}[model]
    if model == "describe":
        # Its input is called `file`: the form does not write "hello" into it.
        (tmp_path / "FILE").write_bytes(b"hello \xff" * 50)
        browser.find("input[type=file]").send_keys(str(tmp_path / "FILE"))
        browser.wait_text(".c-curl", lambda text: "cat FILE" in text)
    commands = {"curl": ["bash", "-c"], "Python": [sys.executable, "-c"]}
    node = shutil.which("node")
    if node:
        commands["JavaScript"] = [node, "--input-type=module", "-e"]
    for title, command in commands.items():
        browser.click(f".c-tab-{title}")
        text = browser.wait_text(f".c-{title}", bool)
        text = text.replace('document.querySelector("input[type=file]").files[0]', NODE_FILE)
        done = subprocess.run([*command, text], capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert wanted in done.stdout


def test_a_model_is_unloaded_and_loaded(page: str, server: Triton, browser: Browser) -> None:
    browser.open(f"{page}/model?name=describe")
    browser.wait_text(".c-model-state", lambda text: text == "READY")
    browser.click(".c-unload")
    browser.click(".c-confirm")
    browser.wait_text(".c-model-state", lambda text: text == "UNAVAILABLE")
    browser.click(".c-load")
    browser.click(".c-confirm")
    browser.wait_text(".c-model-state", lambda text: text == "READY")
    with ModelClient(str(server.http_url), "describe") as client:
        assert client.infer_sample(b"four")["size"] == 4


@pytest.mark.slow(seconds=30)
def test_a_worker_that_breaks_is_told(page: str, server: Triton, browser: Browser) -> None:
    server.bind(
        "fragile",
        ProcessWorker("support.process_models:make", max_crashes=1),
        [Tensor((1,), np.float32, "x")],
        [Tensor((1,), np.float32, "y")],
    )
    try:
        browser.open(page)
        browser.wait_text(".c-models", lambda text: "fragile" in text)
        browser.wait_text(".c-is-workers-attached", lambda text: text == "4 of 4")
        assert browser.text(".c-told") == ""
        with ModelClient(str(server.http_url), "fragile") as client, contextlib.suppress(PyTritonClientError):
            client.infer_sample(np.array([DIE], np.float32))
        told = "Worker 0 of fragile is not attached: its process has ended by itself 1 time."
        browser.wait_text(".c-told", lambda text: text == told)
        browser.picture("console/broken")
        browser.open(f"{page}/model?name=fragile")
        shown = browser.wait_text(".c-workers", lambda text: "not attached" in text)
        assert shown.split()[-1] == "1"
    finally:
        server.unbind("fragile")


@pytest.mark.slow(seconds=30)
def test_a_worker_that_is_started_again_is_told(page: str, server: Triton, browser: Browser) -> None:
    server.bind(
        "tough",
        ProcessWorker("support.process_models:make"),
        [Tensor((1,), np.float32, "x")],
        [Tensor((1,), np.float32, "y")],
    )
    try:
        browser.open(f"{page}/model?name=tough")
        browser.wait_text(".c-workers", lambda text: "attached" in text)
        with ModelClient(str(server.http_url), "tough") as client:
            with contextlib.suppress(PyTritonClientError):
                client.infer_sample(np.array([DIE], np.float32))
            told = "Worker 0 of tough ended by itself, and was started again (1 time so far)."
            browser.wait_text(".c-told", lambda text: text == told)
            assert "not attached" not in browser.text(".c-workers")
            assert client.infer_sample(np.array([3], np.float32))["y"] == 6
    finally:
        server.unbind("tough")


def halves(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    for number in range(3):
        yield [{"half": request["x"] / np.float16(2**number)} for request in requests]


@pytest.mark.slow(seconds=30)
def test_a_stream_that_json_has_not_comes_over_grpc(server: Triton, browser: Browser) -> None:
    tensors = [[Tensor((-1,), np.float16, name)] for name in ("x", "half")]
    server.bind("halves", halves, *tensors, config=ModelConfig(decoupled=True, batching=False))
    try:
        with console(server.http_url, f"--grpc-url={server.grpc_url}", PYTRITON_ACCESS_TOKEN=TOKEN) as url:
            browser.open(f"{url}/model?name=halves")
            browser.write(".c-field textarea", "1, 8")
            browser.click(".c-call")
            browser.wait_text(".c-answer", lambda text: text == "half: [1., 8.]\nhalf: [0.5, 4. ]\nhalf: [0.25, 2. ]")
            browser.wait_text(".c-status", lambda text: text.startswith("3 answers, "))
            browser.open("about:blank")
    finally:
        server.unbind("halves")


# ---- servers that mean harm ----------------------------------------------------------------------------------------

EVIL = "<img src=x onerror=window.harmed=1>`${window.harmed=2}`{{ window.harmed=3 }}"


class HostileServer(BaseHTTPRequestHandler):
    """A server whose names, states and errors are scripts."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path
        tensor = {"name": EVIL, "data_type": "TYPE_STRING", "dims": ["1"]}
        answers: Mapping[str, Any] = {
            "/v2": {"version": EVIL},
            "/v2/repository/index": [
                {"name": EVIL, "version": "1", "state": "READY"},
                {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": EVIL},
            ],
            "/v2/models/stats": {"model_stats": [{"name": EVIL, "version": "1"}]},
        }
        status, body = 200, json.dumps(answers.get(path, {})).encode()
        if path.endswith("/config"):
            body = json.dumps({"name": EVIL, "input": [tensor], "output": [tensor]}).encode()
        elif path == "/metrics":
            name = EVIL.replace("\\", "")
            body = f'nv_inference_request_success{{model="{name}",version="1"}} 4\n'.encode()
            body += f'pytriton_worker_attached{{model="{name}",version="{EVIL}",worker="0"}} 0\n'.encode()
        elif path.endswith(("/infer", "/generate")):
            status, body = 400, json.dumps({"error": EVIL}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HostileServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with console(url, f"--metrics-url={url}/metrics", PYTRITON_CONSOLE_PASSWORD=PASSWORD) as found:
            yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_names_are_shown_as_they_are(hostile: str, browser: Browser) -> None:
    browser.open(hostile)
    browser.write("#password", "wrong password")
    browser.click("button")
    browser.wait_text("[role=alert]", lambda text: text == "This is not the password.")
    browser.errors()  # Chromium counts the answer 401 as one
    browser.write("#password", PASSWORD)
    browser.click("button")
    browser.wait_text(".c-models", lambda text: EVIL in text)
    browser.wait_text(".c-told", lambda text: EVIL in text)
    browser.open(browser.find(".c-models a.c-link").get_attribute("href"))
    browser.wait_text(".c-name", lambda text: text == EVIL)
    browser.click(".c-call")
    browser.wait_text(".c-error", lambda text: EVIL in text)
    assert EVIL in browser.wait_text(".c-curl", bool)
    browser.wait_text(".c-told", lambda text: EVIL in text)
    assert browser.driver.execute_script("return window.harmed === undefined")
    assert browser.driver.find_elements("css selector", "img[src=x]") == []
    assert hosts(browser.requests()) == {hostile.removeprefix("http://")}


def test_what_is_refused(hostile: str) -> None:
    """Over the wire; packages/pytriton-server/tests/console/test_gatekeeper.py has all kinds."""

    def status(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(hostile.removeprefix("http://"), timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status

    assert status("/", Host="evil.example") == 403
    assert status("/openapi.json") == 401
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    socket = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    for origin in (None, "http://evil.example", hostile):
        assert status(socket, **upgrade, **({"Origin": origin} if origin else {})) == 403


# ---- the command ---------------------------------------------------------------------------------------------------


def test_openapi_is_served(page: str) -> None:
    openapi_spec_validator = pytest.importorskip("openapi_spec_validator")
    connection = http.client.HTTPConnection(page.removeprefix("http://"), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", "/openapi.json")
        response = connection.getresponse()
        document = json.loads(response.read())
    openapi_spec_validator.validate(document)
    assert "/v2/models/scale/generate" in document["paths"]


def refused(*options: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pytriton", "console", "localhost:1", "--port", "0", *options]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_others_reach_it_with_a_password_alone(tmp_path: Path) -> None:
    assert "PYTRITON_CONSOLE_PASSWORD" in refused("--address", "0.0.0.0")
    assert "8 characters or more" in refused("--address", "0.0.0.0", PYTRITON_CONSOLE_PASSWORD="short")
    assert "No such file" in refused("--password-file", str(tmp_path / "none"))
    (tmp_path / "password").write_text("short\n")
    assert "8 characters or more; got 5" in refused("--password-file", str(tmp_path / "password"))


def test_options_that_cannot_be() -> None:
    assert "metrics_url must be an http:// or https:// address; got 'ftp://x'" in refused("--metrics-url", "ftp://x")


def test_a_server_that_is_not_there(browser: Browser) -> None:
    with console("http://127.0.0.1:1") as url:
        browser.open(url)
        browser.wait_text(".c-state", lambda text: text == "NO ANSWER")
        browser.wait_text(".c-told", lambda text: "does not answer" in text)
        browser.open("about:blank")


APP = """
import logging
from pytriton.decorators import model

@model
def shout(text: str) -> str:
    logging.getLogger("app").warning("somebody shouts %s", text)
    return text.upper()
"""


@pytest.mark.slow(seconds=30)
def test_beside_a_server(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "app.py").write_text(APP)
    command = [sys.executable, "-m", "pytriton", "serve", "app.py", "--console", "--console-port=0"]
    command += ["--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--access-token={TOKEN}"]
    with short_home(), subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if line.startswith("Console: "))
            url = line.split()[1]
            browser.open(f"{url}/model?name=shout")
            browser.click(".c-call")
            browser.wait_text(".c-answer", lambda text: text == "output: HELLO")
            browser.open(url)
            browser.wait_text(".c-log", lambda text: "somebody shouts hello" in text)
            # The list of models, and loading, need the token, which it has from the server.
            browser.wait_text(".c-models", lambda text: "shout" in text)
            assert browser.text(".c-told") == ""
            browser.open("about:blank")
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S).request("GET", "/")
