"""`pytriton serve --openai` and `pytriton openai`, with real servers."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytest.importorskip("openai")

import httpx
from typer.testing import CliRunner

import openai
from openai import OpenAI
from pytriton.cli.app import app
from pytriton.openai.command import API_KEY_VARIABLE
from support.http import call
from support.processes import while_running
from support.serving import ServeCommand, serve_command, short_home
from support.waiting import PATIENCE_S, eventually

APP = """
from collections.abc import Iterator
from pathlib import Path

from pytriton.decorators import model


@model(parameters={"chat_template": "{{ messages[-1].content }}"})
def words(text: str) -> Iterator[str]:
    try:
        for number in range(10**9):
            for word in text.split():
                yield f"{word} "
    finally:
        Path("closed").touch()


@model
def shout(text: str) -> str:
    return text.upper()


@model
def add(a: float, b: float) -> float:
    return a + b
"""


OWN_SERVER = """
from pytriton.triton import Triton, TritonConfig
triton = Triton(config=TritonConfig(http_address="127.0.0.2", http_port=0, grpc_port=0, metrics_port=0))
triton.bind(shout)
"""


def endpoint(server: ServeCommand, key: str = "none") -> OpenAI:
    found = eventually(lambda: re.search(r"OpenAI +(http://\S+)", server.written))
    return OpenAI(base_url=found[1], api_key=key, max_retries=0, timeout=PATIENCE_S)


def fails(folder: Path, *arguments: str) -> str:
    with short_home():
        done = subprocess.run(
            [sys.executable, "-m", "pytriton", "serve", "app.py", *arguments],
            cwd=folder, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
    assert done.returncode in (1, 2)
    return done.stderr


def ask(client: OpenAI, text: str = "hello") -> str:
    return client.completions.create(model="shout", prompt=text).choices[0].text


def test_the_models_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with serve_command(tmp_path, "app.py", "--openai", "0") as server, endpoint(server) as client:
        assert [it.id for it in client.models.list()] == ["shout", "words"]
        assert ask(client) == "HELLO"
        messages: Any = [{"role": "user", "content": "on and"}]
        with client.chat.completions.create(model="words", messages=messages, stream=True) as stream:
            texts = [next(stream).choices[0].delta.content for _ in range(4)]
            assert texts == ["", "on ", "and ", "on "]
            assert not (tmp_path / "closed").exists()
        eventually((tmp_path / "closed").exists)
    # The process of the endpoints has ended with the server.
    later = OpenAI(base_url=client.base_url, api_key="none", max_retries=0)
    with later, pytest.raises(openai.APIConnectionError):
        ask(later)


def test_a_file_that_is_saved_anew(tmp_path: Path) -> None:
    pytest.importorskip("watchfiles")
    (tmp_path / "app.py").write_text(APP)
    with serve_command(tmp_path, "app.py", "--openai", "0", "--reload") as server, endpoint(server) as client:
        messages: Any = [{"role": "user", "content": "x"}]
        assert ask(client) == "HELLO"
        (tmp_path / "app.py").write_text(
            """from pytriton.decorators import model


@model(parameters={"chat_template": "new: {{ messages[0].content }}"})
def shout(prompt: str) -> str:
    return prompt + "?"
"""
        )

        def is_new() -> bool:
            try:
                answer = client.chat.completions.create(model="shout", messages=messages)
            except openai.APIStatusError:
                # Between the two, requests may have the names of before.
                return False
            return answer.choices[0].message.content == "new: x?"

        eventually(is_new)
        eventually(lambda: [it.id for it in client.models.list()] == ["shout"])


def test_a_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with serve_command(tmp_path, "app.py", "--openai", "0") as server, endpoint(server) as client:
        assert ask(client) == "HELLO"
        (child,) = endpoint_processes(server)
        os.kill(child, signal.SIGKILL)
        eventually(lambda: "ended with exit code -9: it is started again" in server.written)
        assert ask(client) == "HELLO"


def test_a_process_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with serve_command(tmp_path, "app.py", "--openai", "0") as server, endpoint(server) as client:
        assert ask(client) == "HELLO"
        assert call(server.url, "GET", "/v2/health/ready")[0] == 200
        killed: set[int] = set()

        def is_given_up() -> bool:
            for child in set(endpoint_processes(server)) - killed:
                killed.add(child)
                os.kill(child, signal.SIGKILL)
            return "it is given up" in server.written

        eventually(is_given_up)
        assert len(killed) >= 5
        assert "has ended 5 times within 60 s" in server.written
        eventually(lambda: call(server.url, "GET", "/v2/health/ready")[0] == 400)
        # The models are served as before, and whoever asks the endpoints does not wait.
        assert call(server.url, "GET", "/v2/health/live")[0] == 200
        assert call(server.url, "GET", "/v2/models/shout/ready")[0] == 200
        with pytest.raises(openai.APIConnectionError):
            ask(client)
        # Another server in its place belongs to what was given up as well.
        os.kill(server.process.pid, signal.SIGHUP)
        eventually(lambda: "was replaced by process" in server.written)
        eventually(lambda: call(server.url, "GET", "/v2/health/ready")[0] == 400)


def endpoint_processes(server: ServeCommand) -> list[int]:
    return [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if b"\0openai\0" in read(folder / "cmdline")
        and f"PPid:\t{server.process.pid}\n".encode() in read(folder / "status")
    ]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_ctrl_c_ends_both(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    ports = ("--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--openai=0")
    with (
        short_home(),
        subprocess.Popen(
            [sys.executable, "-m", "pytriton", "serve", "app.py", *ports],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        written = ""
        while "OpenAI  " not in written:
            line = process.stdout.readline()
            assert line, written
            written += line
        # As a terminal does, to all of its foreground.
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(PATIENCE_S) == 0, rest
        assert "started again" not in rest
        assert "Traceback" not in rest


def test_a_key_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "key").write_text("secret\n")
    options = ("--openai", "0", "--openai-key-file", "key")
    with serve_command(tmp_path, "app.py", *options) as server, endpoint(server, "secret") as client:
        assert ask(client) == "HELLO"
        with pytest.raises(openai.AuthenticationError), endpoint(server, "other") as other:
            ask(other)
        assert "(with an API key)" in server.written
        assert "secret" not in server.written


def test_pages_of_other_origins(tmp_path: Path) -> None:
    """The setting of the server is that of the endpoints as well: browsers ask them without the key."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "key").write_text("secret\n")
    page = "https://app.example"
    options = ("--openai", "0", "--openai-key-file", "key", "--cors", page, "--cors", "http://localhost:3000")
    beforehand = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serve_command(tmp_path, "app.py", *options) as server, endpoint(server, "secret") as client:

        def asked(origin: str, method: str, **headers: str) -> httpx.Response:
            return httpx.request(method, f"{client.base_url}models", headers={"Origin": origin, **headers})

        for origin in (page, "http://localhost:3000"):
            answer = asked(origin, "OPTIONS", **beforehand)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
            assert "authorization" in answer.headers["access-control-allow-headers"].lower()
            answer = asked(origin, "GET", Authorization="Bearer secret")
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
            # An error can be read, too.
            answer = asked(origin, "GET")
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, origin)
        assert asked("https://other.example", "OPTIONS", **beforehand).status_code == 400
        answer = asked("https://other.example", "GET", Authorization="Bearer secret")
        assert "access-control-allow-origin" not in answer.headers
    told = fails(tmp_path, "--cors", f"{page}/")
    assert "cors_origins must hold origins" in told
    assert "without a path or a slash" in told


def test_the_endpoints_in_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "pytriton.toml").write_text('openai = 0\nopenai_key_file = "key"\n')
    options = ("--config", "pytriton.toml")
    with serve_command(tmp_path, "app.py", *options) as server, endpoint(server, "secret") as client:
        assert ask(client) == "HELLO"
        assert "(with an API key)" in server.written
    for text, told in (
        ("openai = 70000", "openai: expected an integer from 0 to 65535; got 70000"),
        ("openai = true", "openai: expected an integer; got True"),
        ('openai_key_file = "key"', "--openai-key-file is for --openai"),
        ('openai_alias = ["a=shout"]', "--openai-alias is for --openai"),
        ("openai = 0\nopenai_alias = [1]", "expected an alias as NAME=MODEL"),
        ('openai = 0\nopenai_alias = ["a=nobody"]', "the alias 'a' is to be of a model 'nobody'"),
        ('openai = 0\nopenai_key_file = "none"', "none"),
    ):
        (tmp_path / "pytriton.toml").write_text(text)
        assert told in fails(tmp_path, *options)


@pytest.mark.parametrize("said_by", ["file", "program", "environment", "option"])
def test_the_endpoints_are_where_the_server_is(said_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server for this machine alone has no endpoint that others reach."""
    (tmp_path / "app.py").write_text(APP + OWN_SERVER if said_by == "program" else APP)
    target, ports = "app.py", ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    if said_by == "file":
        (tmp_path / "pytriton.toml").write_text('[server]\nhttp_address = "127.0.0.2"\n')
        ports += ["--config", "pytriton.toml"]
    elif said_by == "program":
        target, ports = "app.py:triton", []
    elif said_by == "environment":
        for name in ("HTTP", "GRPC", "METRICS"):
            monkeypatch.setenv(f"PYTRITON_TRITON_CONFIG_{name}_ADDRESS", "127.0.0.2")
    else:
        ports += ["--address=[::1]"]
    address = "[::1]" if said_by == "option" else "127.0.0.2"
    with serve_command(tmp_path, target, "--openai=0", "--mcp=0", ports=ports) as server, endpoint(server) as client:
        assert server.url.startswith(f"http://{address}:")
        assert str(client.base_url).startswith(f"http://{address}:")
        assert eventually(lambda: re.search(r"MCP +http://(\S+):", server.written))[1] == address
        assert ask(client) == "HELLO"


def test_further_names_and_fields_that_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "pytriton.toml").write_text('openai_alias = ["gpt-4o=shout", "other=shout"]\n')
    options = ("--config", "pytriton.toml", "--openai", "0", "--openai-strict")
    with serve_command(tmp_path, "app.py", *options) as server, endpoint(server) as client:
        assert [it.id for it in client.models.list()] == ["gpt-4o", "other", "shout", "words"]
        for name in ("gpt-4o", "other"):
            assert client.completions.create(model=name, prompt="hello").choices[0].text == "HELLO"
        with pytest.raises(openai.BadRequestError, match="colour"):
            client.completions.create(model="shout", prompt="x", extra_body={"colour": "red"})
    assert "expected an alias as NAME=MODEL" in fails(tmp_path, "--openai", "0", "--openai-alias", "shout")
    command = [sys.executable, "-m", "pytriton", "serve", "app.py", *options, "--check"]
    written = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=PATIENCE_S)
    assert "OpenAI: shout (also gpt-4o, other) at /v1/chat/completions, /v1/completions, /v1/responses\n" in written


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = fails(tmp_path, "--address=127.0.0.1", f"--openai={port}", "--http-port=0", "--grpc-port=0")
    assert f"cannot listen at 127.0.0.1, port {port}: Address already in use" in told


def test_what_is_wrong_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    assert f"{API_KEY_VARIABLE} is empty" in fails(tmp_path, "--openai", "0")
    monkeypatch.delenv(API_KEY_VARIABLE)
    (tmp_path / "empty").touch()
    assert "the file is empty" in fails(tmp_path, "--openai", "0", "--openai-key-file", "empty")
    assert "--openai-key-file is for --openai" in fails(tmp_path, "--openai-key-file", "empty")
    (tmp_path / "app.py").write_text(APP.replace("[-1].content", "[-1"))
    assert "model 'words': its chat template cannot be parsed" in fails(tmp_path, "--openai", "0", "--check")


def test_check_says_where_each_model_is_asked(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    command = [sys.executable, "-m", "pytriton", "serve", "app.py", "--openai", "0", "--check"]
    written = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=PATIENCE_S)
    assert "OpenAI: words at /v1/chat/completions, /v1/completions, /v1/responses\n" in written
    assert "OpenAI: add is not served: expected one input that is not optional" in written


def test_without_the_extra_and_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app.py").write_text(APP)
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    if importlib.util.find_spec("ray") is not None:
        done = runner.invoke(app, ["serve", str(tmp_path / "app.py"), "--ray", "auto", "--openai", "0"])
        assert done.exit_code == 2
        assert "--openai: not together with --ray" in done.output
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else found(name))
    for command in (["serve", str(tmp_path / "app.py"), "--openai", "0"], ["openai"]):
        done = runner.invoke(app, command)
        assert done.exit_code == 2
        assert 'needs jinja2: pip install "pytriton-server[openai]"' in done.output


def test_the_command_for_a_server_that_runs(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with serve_command(tmp_path, "app.py") as server:
        command = [sys.executable, "-m", "pytriton", "openai", server.url, "--port", "0", "--model", "shout"]
        command += ["--alias", "gpt-4o=shout", "--strict"]
        environment = {**os.environ, API_KEY_VARIABLE: "secret", "PYTHONUNBUFFERED": "1"}
        with while_running(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            url = line.split()[1]
            with OpenAI(base_url=url, api_key="secret", timeout=PATIENCE_S, max_retries=0) as client:
                assert [it.id for it in client.models.list()] == ["gpt-4o", "shout"]
                assert ask(client) == "HELLO"
                with pytest.raises(openai.BadRequestError, match="colour"):
                    client.completions.create(model="gpt-4o", prompt="x", extra_body={"colour": "red"})
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) in (0, 130)
