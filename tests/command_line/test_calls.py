"""The commands `pytriton models` and `pytriton infer`, against a server of ours."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pytriton.cli.app import app
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request, Response
from pytriton.triton import Triton, TritonSecurityConfig
from support import http as plain_http
from support.processes import CTRL_C, at_terminal
from support.servers import needs_arrays_in_streams
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

TOKEN = "a-token"

go_on = threading.Event()


@batch
def scale(image: np.ndarray[Any, Any], factor: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"scaled": image * factor}


def describe(requests: list[Request]) -> list[Response]:
    (request,) = requests
    data = request["file"].item()
    if data == b"bad":
        raise ValueError("this file\nis bad")
    times = int(request["times"].item()) if "times" in request else 1
    return [
        Response(
            {"size": np.array([len(data)] * times), "head": np.array([data[:5]], object)}, parameters={"kind": "file"}
        )
    ]


def words(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    """Yields the first word, and the others when the test has seen it."""
    for number, word in enumerate(requests[0]["text"].item().split()):
        if number:
            assert go_on.wait(PATIENCE_S)
        if word == b"fail":
            raise ValueError("no such word")
        yield [{"word": np.array([[word]], object)}]


def matrix(requests: list[Request]) -> list[dict[str, Any]]:
    return [{"sum": request["m"].sum(axis=(-1, -2), keepdims=True)[0]} for request in requests]


@pytest.fixture(scope="module")
def server() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config(), security_config=TritonSecurityConfig(access_token=TOKEN))
        triton.bind(
            "scale",
            scale,
            [Tensor((-1,), np.float32, "image"), Tensor((1,), np.float32, "factor")],
            [Tensor((-1,), np.float32, "scaled")],
            config=ModelConfig(max_batch_size=4),
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


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: Triton) -> str:
    found = server.http_url if request.param == "http" else server.grpc_url
    assert found is not None
    return found


def call(*arguments: str, given: str | None = None, code: int = 0, token: str | None = None) -> str:
    """Run the command in this process; return what it prints."""
    done = CliRunner().invoke(app, arguments, input=given, env={"PYTRITON_ACCESS_TOKEN": token, "COLUMNS": "200"})
    assert done.exit_code == code, done.output
    if code == 1:
        assert done.output.startswith("Error: ")
        assert done.output.count("\n") == 1, done.output
    return done.output


# ---- models --------------------------------------------------------------------------------------------------------


def test_models_are_listed(url: str, server: Triton) -> None:
    call("infer", url, "scale", "image=1", "factor=1")
    lines = call("models", url, "--access-token", TOKEN).splitlines()
    assert lines[0].split() == ["MODEL", "STATE", "VERSIONS", "OK", "FAILED", "AVERAGE", "SIGNATURE"]
    assert [line.split()[:3] for line in lines[1:]] == [[name, "READY", "1"] for name in ("describe", "scale", "words")]
    signatures = [line[lines[0].index("SIGNATURE") :] for line in lines[1:]]
    assert signatures == [
        "file: BYTES[1], times?: INT64[1] -> size: INT64[-1], head: BYTES[1]; no batching",
        "image: FP32[-1], factor: FP32[1] -> scaled: FP32[-1]; max_batch_size=4",
        "text: BYTES[1] -> word: BYTES[1]; max_batch_size=1, decoupled",
    ]
    found = {model["name"]: model for model in json.loads(call("models", url, "--json", token=TOKEN))}
    scale = found["scale"]
    assert scale["versions"] == [{"version": 1, "state": "READY", "reason": ""}]
    assert scale["signature"]["inputs"][0] == {"name": "image", "datatype": "FP32", "shape": [-1], "optional": False}
    assert scale["statistics"]["succeeded"] > 0
    assert scale["statistics"]["average_ms"] > 0


def test_named_models_need_no_token(url: str) -> None:
    lines = call("models", url, "words", "scale").splitlines()
    assert [line.split()[:6] for line in lines[1:]] == [
        [name, "READY", "1", "-", "-", "-"] for name in ("words", "scale")
    ]


def test_the_list_says_where_the_token_goes(url: str) -> None:
    for token in (None, "wrong"):
        said = call("models", url, code=1, token=token)
        assert said.startswith("Error: The server asks for its access token: --access-token, or the variable PYTRITON_")
        assert "name a model" in said
    assert "nope" in call("models", url, "nope", code=1)


def test_a_model_that_could_not_be_loaded(tmp_path: Path) -> None:
    """The server lets everybody see its models, and one of its own is broken."""
    (tmp_path / "broken" / "1").mkdir(parents=True)
    text = 'backend: "nothing"\nmax_batch_size: 0\ninput { name: "x" data_type: TYPE_FP32 dims: 1 }\n'
    text += 'output { name: "y" data_type: TYPE_FP32 dims: 1 }\n'
    (tmp_path / "broken" / "config.pbtxt").write_text(text)
    config = local_config(model_repository=tmp_path, exit_on_error=False, strict_readiness=False)
    open_to_all = TritonSecurityConfig(restricted_endpoints=[])
    # The other server of this module runs on: only the workspace tells whether something is left behind.
    with short_home(), Triton(config=config, security_config=open_to_all) as triton:
        triton.bind("describe", describe, [Tensor((1,), bytes, "file")], [Tensor((1,), bytes, "head")])
        triton.run()
        for url in (triton.http_url, triton.grpc_url):
            assert url is not None
            broken, good = call("models", url).splitlines()[1:]
            assert broken.split()[:6] == ["broken", "UNAVAILABLE", "1", "-", "-", "-"]
            assert "unable to find backend library for backend 'nothing'" in broken
            assert good.split()[:6] == ["describe", "READY", "1", "0", "0", "-"]
            said = call("infer", url, "broken", "x=1", code=1)
            assert said.startswith("Error: The model 'broken' is not ready. Its versions: 1 UNAVAILABLE ")


def test_openapi_is_what_the_models_take_and_give(server: Triton) -> None:
    needs_arrays_in_streams()
    openapi_spec_validator = pytest.importorskip("openapi_spec_validator")
    jsonschema = pytest.importorskip("jsonschema")
    assert server.http_url is not None
    document = json.loads(call("models", server.http_url, "--openapi", token=TOKEN))
    openapi_spec_validator.validate(document)
    assert document["servers"] == [{"url": server.http_url}]

    def post(path: str, body: Any) -> str:
        operation = document["paths"][path]["post"]
        jsonschema.validate(body, operation["requestBody"]["content"]["application/json"]["schema"])
        status, answer = plain_http.call(server.http_url, "POST", path, body)
        assert status == 200, answer
        (described,) = operation["responses"]["200"]["content"].items()
        for each in (
            [answer]
            if described[0] == "application/json"
            else [json.loads(line.removeprefix("data: ")) for line in answer.split("\n\n") if line]
        ):
            jsonschema.validate(each, described[1]["schema"])
        return json.dumps(answer)

    assert '"scaled": [2.0, 4.0]' in post("/v2/models/scale/generate", {"image": [1.0, 2.0], "factor": 2})
    assert '"scaled": 2.0' in post("/v2/models/scale/generate", {"image": [1], "factor": 2})
    tensors = [
        {"name": "image", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]},
        {"name": "factor", "datatype": "FP32", "shape": [2, 1], "data": [3, 4]},
    ]
    assert "[3.0, 8.0]" in post("/v2/models/scale/infer", {"inputs": tensors})
    assert '"size": [3, 3]' in post("/v2/models/describe/generate", {"file": "abc", "times": 2})
    go_on.set()
    assert "or" in post("/v2/models/words/generate_stream", {"text": "this or that"})


def test_openapi_is_of_http(url: str, server: Triton) -> None:
    assert "exclude each other" in call("models", url, "--json", "--openapi", code=2)
    if url == server.grpc_url:
        assert "give the server's http:// address" in call("models", url, "--openapi", code=1)


# ---- infer ---------------------------------------------------------------------------------------------------------


def test_numbers_and_samples(url: str, tmp_path: Path) -> None:
    assert call("infer", url, "scale", "image=1,2,3", "factor=10") == "scaled: [10., 20., 30.]\n"
    assert call("infer", url, "scale", "image=[1,2]", "--json", '{"factor": 10}') == "scaled: [10., 20.]\n"
    assert call("infer", url, "scale", "-", given='{"image": [1, 2], "factor": [3]}') == "scaled: [3., 6.]\n"
    np.save(tmp_path / "image.npy", np.array([0.5, 1.5]))
    assert call("infer", url, "scale", f"image=@{tmp_path}/image.npy", "factor=2") == "scaled: [1., 3.]\n"
    answer = json.loads(call("infer", url, "scale", "image=1", "factor=2", "--output", "json"))
    assert answer == {"model_name": "scale", "model_version": "1", "outputs": {"scaled": [2.0]}, "parameters": {}}


def test_batches(url: str) -> None:
    answer = call("infer", url, "scale", "image=[[1,2],[3,4]]", "factor=1,10", "--batch")
    assert answer == "scaled: [[ 1.,  2.],\n         [30., 40.]]\n"
    said = call("infer", url, "describe", "file=hello", "--batch", code=1)
    assert said == "Error: Model describe takes one sample at a time: leave --batch out.\n"


def test_text_files_and_optional_inputs(url: str, tmp_path: Path) -> None:
    assert call("infer", url, "describe", "file=hello you") == 'size: 9\nhead: hello\nparameters: {"kind": "file"}\n'
    (tmp_path / "cat.jpg").write_bytes(b"\xff\xd8\xff\xe0\0\0")
    answer = json.loads(call("infer", url, "describe", f"file=@{tmp_path}/cat.jpg", "times=2", "--output=json"))
    assert answer["outputs"] == {"size": [6, 6], "head": [{"base64": "/9j/4AA="}]}
    assert answer["parameters"] == {"kind": "file"}


def test_streams_are_printed_as_they_come(url: str) -> None:
    go_on.clear()
    command = [sys.executable, "-m", "pytriton", "infer", url, "words", "text=to be fail"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "word: to\n"
        finally:
            go_on.set()
        assert process.stdout.read() == "word: be\n"
        said = process.stderr.read()
    assert process.returncode == 1
    assert said.startswith("Error: ")
    assert "no such word" in said
    assert said.count("\n") == 1
    assert [
        json.loads(line)["outputs"] for line in call("infer", url, "words", "text=a b", "--output=json").splitlines()
    ]


def test_what_is_wrong_is_told_in_one_line(url: str) -> None:
    signature = "Its inputs: image: FP32[-1], factor: FP32[1].\n"
    for arguments, said in {
        ("image=1",): f"Model scale needs 'factor'. {signature}",
        ("image=1", "factor=1", "angle=3"): f"Model scale has no input 'angle'. {signature}",
        ("image=1,x", "factor=1"): "Input 'image': expected FP32 (numbers with commas), received 'x'.\n",
        (
            "image=1",
            "factor=1,2",
        ): "Model scale, input 'factor': expected the shape (1), as its Tensor declares it; received the shape (2).\n",
        ("image", "factor=1"): "Expected NAME=VALUE or - for an input, received 'image'.\n",
        ("image=1", "--json", '{"image": 1}'): "The input 'image' is given twice.\n",
        ("--json", "[1]"): "Expected a JSON object of inputs by name as --json, received '[1]'.\n",
    }.items():
        assert call("infer", url, "scale", *arguments, code=1) == f"Error: {said}"
    assert "is bad" in call("infer", url, "describe", "file=bad", code=1)


def test_a_model_that_is_not_there(url: str) -> None:
    said = call("infer", url, "scales", "image=1", code=1, token=TOKEN)
    assert said == "Error: The server has no model 'scales'. Its models: describe, scale, words.\n"
    said = call("infer", url, "scales", "image=1", code=1)
    assert said.startswith("Error: The server has no model 'scales' that is ready. With --access-token ")
    said = call("infer", url, "scale", "image=1", "--model-version", "7", code=1, token=TOKEN)
    assert said == "Error: The model 'scale' is not ready in version 7. Its versions: 1 READY.\n"


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_is_not_there(scheme: str) -> None:
    with socket.socket() as bound:  # which does not listen, and keeps others from it
        bound.bind(("127.0.0.1", 0))
        address = f"{scheme}://127.0.0.1:{bound.getsockname()[1]}"
        for arguments in (("models", address), ("infer", address, "scale", "image=1")):
            assert address.rpartition("/")[2] in call(*arguments, code=1)
    assert "Invalid url" in call("models", "ftp://localhost", code=1)


class OtherServer(http.server.BaseHTTPRequestHandler):
    """Answers as web servers do that are no Triton."""

    body: bytes

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET  # noqa: N815 - the name that the server looks for

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("body", [b"<!DOCTYPE HTML><html>not found</html>", b'{"detail": "Not Found"}'])
@pytest.mark.parametrize("arguments", [("models",), ("infer", "net", "x=1"), ("bench", "net")])
def test_a_web_server_that_is_no_triton(body: bytes, arguments: tuple[str, ...]) -> None:
    handler = type("Handler", (OtherServer,), {"body": body})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"127.0.0.1:{server.server_port}"
            name, *rest = arguments
            done = CliRunner().invoke(app, [name, url, *rest])
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"Error: {url} is a web server, and no Triton: expected an error in Triton's form, received "
    )


def test_bf16_and_certificates(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    files = {"grpc_server_cert": tmp_path / "server.pem", "grpc_server_key": tmp_path / "key.pem"}

    def double(requests: list[Request]) -> list[dict[str, Any]]:
        return [{"y": request["x"] * 2} for request in requests]

    with short_home():
        triton = Triton(config=local_config(grpc_use_ssl=True, **files))
        triton.bind("double", double, [Tensor((-1,), bfloat16, "x")], [Tensor((-1,), bfloat16, "y")])
        # Not `running`, which waits for the end of the other server of this process as well.
        with triton:
            url = str(triton.grpc_url)
            trusting = (url, "double", "--ca-file", str(tmp_path / "ca.pem"))
            done = CliRunner().invoke(app, ["infer", *trusting, "x=1,2.5"])
            assert (done.exit_code, done.stdout) == (0, "y: [2, 5]\n"), done.stderr
            done = CliRunner().invoke(app, ["bench", *trusting, "--concurrency=2", "--duration=0.1", "--json"])
            assert json.loads(done.stdout)["levels"][0]["errors"] == {}
            done = CliRunner().invoke(app, ["infer", url, "double", "x=1"])
            assert done.exit_code == 1
            assert len(done.stderr.splitlines()) == 1
            done = CliRunner().invoke(app, ["infer", url, "double", "x=1", "--ca-file", str(tmp_path / "none.pem")])
            assert done.exit_code == 1
            assert "none.pem" in done.stderr


def test_an_interrupt_ends_a_call(url: str, tmp_path: Path) -> None:
    go_on.clear()
    command = [sys.executable, "-m", "pytriton", "infer", url, "words", "text=one two"]
    try:
        with at_terminal(command, tmp_path) as terminal:
            # The second word waits.
            terminal.wait_for("word: one")
            terminal.press(CTRL_C)
            assert terminal.wait_ended() == 130
            assert "Traceback" not in terminal.shown, terminal.shown
    finally:
        go_on.set()
