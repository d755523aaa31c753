"""What `generate` says of a request that is wrong, to callers who have curl and no client."""

from __future__ import annotations

import http.client
import json
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from pytriton.decorators import Shape, batch, model, triton_context
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import ProcessWorker, Triton
from support.callables import X, Y
from support.faults.raw_http import ask_ahead, connect
from support.http import call
from support.processes import resident_bytes
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S

Three = Annotated[NDArray[np.float32], Shape(3)]


@model
def shout(text: str, times: int = 1) -> str:
    return text.upper() * times


@model(max_batch_size=8)
def twice(x: Three, flag: bool = False) -> Three:
    return x if flag else -x


@model
def say(text: str) -> Iterator[str]:
    yield text


@batch
def inputs_alone(x: Any) -> dict[str, Any]:
    return {"y": x}


def requests_themselves(requests: Any) -> list[Any]:
    return [{"y": request["x"] * request.parameters.get("by", 1)} for request in requests]


@batch
@triton_context
def with_context(x: Any, triton_context: Any) -> dict[str, Any]:
    return {"y": x * triton_context.requests[0].parameters.get("by", 1)}


@batch
def asks(x: Any) -> dict[str, Any]:
    from pytriton.decorators import get_requests

    return {"y": x * get_requests()[0].parameters.get("by", 1)}


@model
def repeat(text: str) -> str:
    from pytriton.decorators import get_requests

    by: int = get_requests()[0].parameters.get("by", 1)
    return text * by


class Both(NamedTuple):
    label: str
    grid: Annotated[NDArray[np.int64], Shape(-1, 2)]
    one: float


@model(max_batch_size=8)
def both(text: str) -> Both:
    return Both(text, np.full((2, 2), len(text)), len(text) / 2)


@model(max_batch_size=8)
def nothing(text: str) -> Annotated[NDArray[np.float32], Shape(-1)]:
    return np.zeros(0, np.float32)


@model
def count(to: int, fails: bool = False) -> Iterator[int]:
    yield from range(to)
    if fails:
        raise ValueError(f"{to} are enough")


HAS_ENDED = threading.Event()


@model
def endless(text: str) -> Iterator[str]:
    try:
        while True:
            yield text * 100_000
    finally:
        HAS_ENDED.set()


HAS_BEGUN, MAY_END = threading.Event(), threading.Event()


@model
def held(text: str) -> Iterator[str]:
    yield text
    HAS_BEGUN.set()
    assert MAY_END.wait(PATIENCE_S)


@model
def measured(image: bytes) -> int:
    return len(image)


@batch
def counted(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {"y": np.full((len(x), 1), x.shape[1], np.int64)}


ROWS = ModelConfig(max_batch_size=8)
READERS = ("requests_themselves", "with_context", "asks")


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    triton = Triton(config=local_config())
    for function in (shout, twice, say, repeat, both, nothing, count, endless, held):
        triton.bind(function)
    triton.bind("in_a_process", ProcessWorker(shout))
    triton.bind("measured", measured)
    triton.bind("counted", counted, [Tensor((-1,), np.uint8, "x")], [Tensor((1,), np.int64, "y")], config=ROWS)
    for name, infer in (
        ("inputs_alone", inputs_alone), ("requests_themselves", requests_themselves), ("with_context", with_context),
        ("asks", asks),
    ):  # fmt: skip
        triton.bind(name, infer, X, Y, config=ModelConfig(max_batch_size=8))
    with short_home(), running(triton):
        yield triton


SHOUTS = "The model takes 'text' (a string) and 'times' (a whole number, optional)"
OTHERS = '. What is meant for others goes into "parameters": {...}'
FILE = "expected a JSON object with the inputs, got the bytes of a file, or a form. The model takes "
WRONG = [
    ("shout", '{"text":5}', "the input 'text' takes a string, got the number 5"),
    ("shout", '{"text":null}', "the input 'text' takes a string, got null"),
    ("shout", '{"text":{"a":1}}', "the input 'text' takes a string, got an object"),
    ("shout", '{"text":["a",true]}', "the input 'text' takes strings, got true at index 1"),
    ("shout", '{"text":"a","times":"2"}', "the input 'times' takes a whole number, got the string \"2\""),
    ("shout", '{"text":"a","times":2.5}', "the input 'times' takes a whole number, got the number 2.5"),
    ("shout", '{"text":["a","b"]}', "the input 'text' has 2 values, and its shape is [1]: expected 1, in one"),
    ("shout", '{"txet":"a"}', f"'txet' is no input of the model 'shout': did you mean 'text'? {SHOUTS}"),
    ("shout", '{"parameters":{"text":5}}', "the input 'text' takes a string, got the number 5"),
    ("shout", "{}", f"the input 'text' is missing. {SHOUTS}"),
    ("shout", '{"words":"a"}', f"the input 'text' is missing; got 'words'. {SHOUTS}"),
    ("shout", "", f"expected a JSON object with the inputs, got no body. {SHOUTS}"),
    ("shout", '["a"]', f"expected a JSON object with the inputs, got a list. {SHOUTS}"),
    (
        "shout",
        '{"text":"a","tiems":3}',
        f"'tiems' is no input of the model 'shout': did you mean 'times'? {SHOUTS}{OTHERS}",
    ),
    ("shout", '{"text":"a","<b>\\"é":3}', f"'<b>\"é' is no input of the model 'shout'. {SHOUTS}{OTHERS}"),
    ("shout", json.dumps({"text": "a" * 500_000, "tiems": 3}), "'tiems' is no input of the model 'shout'"),
    ("twice", '{"x":[1,2,3,4]}', "the input 'x' has 4 values, and its shape is [-1, 3]: expected a multiple of 3"),
    ("twice", '{"x":[[1,2,3]]}', "the input 'x' is a list of lists, and generate takes one flat list of numbers"),
    ("twice", '{"x":7}', "the input 'x' has 1 value, and its shape is [-1, 3]"),
    ("twice", '{"x":"a"}', "the input 'x' takes a list of numbers, got the string \"a\""),
    ("twice", '{"x":[1,2,3],"flag":1}', "the input 'flag' takes true or false, got the number 1"),
    ("in_a_process", '{"text":"a","tiems":3}', "'tiems' is no input of the model 'in_a_process'"),
    ("say", '{"txt":"a"}', "'txt' is no input of the model 'say': did you mean 'text'?"),
    ("say", "\0\1JFIF", f"{FILE}'text' (a string). Its infer takes the bytes of a file: curl --data-binary @FILE -H"),
    ("twice", "\x89PNG\r\n\x1a", f"{FILE}'x' (a list of numbers)"),
    ("say", "--------x\r\nContent-Disposition: form-data", f"{FILE}'text' (a string). Its infer takes the bytes of a"),
]  # fmt: skip


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_file_from_a_shell(served: Triton, tmp_path: Path) -> None:
    """The line that the error says works as it is, for strings and for bytes as numbers."""
    (tmp_path / "cat.jpg").write_bytes(bytes(range(256)))

    def curl(*arguments: str) -> bytes:
        command = ["curl", "-sS", "--max-time", str(PATIENCE_S), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout

    for name in ("measured", "counted"):
        url = f"{served.http_url}/v2/models/{name}/generate"
        for sent in (
            ("-F", "image=@cat.jpg"),
            ("--data-binary", "@cat.jpg", "-H", "Content-Type: application/octet-stream"),
        ):
            told = json.loads(curl(*sent, url))["error"]
            assert told.startswith(FILE)
            line = told.partition(": curl ")[2].replace("@FILE", "@cat.jpg").replace("...", str(served.http_url))
            answer = curl(*shlex.split(line))
            # What is behind the JSON is the output, an int64.
            assert int.from_bytes(answer[-8:], "little") == 256


@pytest.mark.parametrize("path", ["generate", "generate_stream", "versions/1/generate"])
def test_what_is_wrong_is_told(served: Triton, path: str) -> None:
    """Over one connection, which goes on."""
    assert served.http_url is not None
    connection = http.client.HTTPConnection(served.http_url.removeprefix("http://"), timeout=PATIENCE_S)
    for name, body, said in WRONG:
        connection.request("POST", f"/v2/models/{name}/{path}", body.encode())
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert (response.status, list(answer)) == (400, ["error"])
        assert answer["error"].startswith(said.replace("generate takes", f"{path.rpartition('/')[2]} takes")), body[:99]
    connection.request("POST", f"/v2/models/say/{path}", '{"text":"a","id":"7","parameters":{"other":1}}')
    response = connection.getresponse()
    assert response.status == 200
    assert b'"output":"a"' in response.read()
    connection.close()


def test_an_error_behind_another_request_of_its_connection(served: Triton) -> None:
    assert served.http_url is not None
    connection = http.client.HTTPConnection(served.http_url.removeprefix("http://"), timeout=PATIENCE_S)
    for _ in range(3):
        connection.request("POST", "/v2/models/shout/generate", b'{"text":"a"}')
        assert json.loads(connection.getresponse().read())["output"] == "A"
        # In chunks, one of which is a byte.
        body = [b'{"te', b"x", b't":5}']
        connection.request("POST", "/v2/models/shout/generate", iter(body), encode_chunked=True,
                           headers={"Transfer-Encoding": "chunked"})  # fmt: skip
        assert json.loads(connection.getresponse().read())["error"] == WRONG[0][2]
    connection.close()


def test_errors_of_requests_that_do_not_wait_for_answers(served: Triton) -> None:
    bodies = {body: said for name, body, said in WRONG if name == "shout" and 0 < len(body) < 50}
    for wrong, said in bodies.items():
        requests = [
            f"POST /v2/models/shout/generate HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            for body in (wrong.encode(), b'{"txet":1}')
        ]
        ahead = b"GET /v2/health/ready HTTP/1.1\r\n\r\n"
        answers = ask_ahead(served, [ahead, requests[0], requests[1], ahead])
        assert [status for status, _ in answers] == [200, 400, 400]
        assert json.loads(answers[1][1])["error"].startswith(said)
        assert json.loads(answers[2][1])["error"].startswith("'txet' is no input of the model 'shout'")


def test_very_many_names(served: Triton) -> None:
    names = {f"n{number}": 1 for number in range(14_000)}
    url, path = served.http_url, "/v2/models/shout/generate"
    status, answer = call(url, "POST", path, {"text": "a", "parameters": {**names, "parameters": 1, "id": 2}})
    assert (status, answer["output"]) == (200, "A")
    status, answer = call(url, "POST", path, {"text": "a", "parameters": names, "tiems": 3})
    assert (status, answer["error"].partition(":")[0]) == (400, "'tiems' is no input of the model 'shout'")


@pytest.mark.parametrize("name", READERS)
def test_models_that_read_parameters_get_any_name(served: Triton, name: str) -> None:
    for body in ({"x": [1.0, 2.0], "by": 3}, {"x": [1.0, 2.0], "parameters": {"by": 3}}):
        status, answer = call(served.http_url, "POST", f"/v2/models/{name}/generate", body)
        assert (status, answer["y"]) == (200, [3.0, 6.0])


def test_models_of_hints_that_read_parameters_get_any_name(served: Triton) -> None:
    for body in ({"text": "a", "by": 3}, {"text": "a", "parameters": {"by": 3}}):
        status, answer = call(served.http_url, "POST", "/v2/models/repeat/generate", body)
        assert (status, answer["output"]) == (200, "aaa")


def test_callables_without_hints_get_any_name(served: Triton) -> None:
    """Whatever they call may read parameters."""
    for value in (3, "a", True, 2.5):
        status, answer = call(served.http_url, "POST", "/v2/models/inputs_alone/generate", {"x": 1.0, "by": value})
        assert (status, answer["y"]) == (200, 1.0)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["generate", "generate_stream", "infer"])
def test_another_method(served: Triton, method: str, path: str) -> None:
    assert served.http_url is not None
    connection = http.client.HTTPConnection(served.http_url.removeprefix("http://"), timeout=PATIENCE_S)
    for _ in range(2):
        connection.request(method, f"/v2/models/shout/{path}")
        response = connection.getresponse()
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert json.loads(response.read())["error"].startswith("inference takes POST, with the inputs as JSON")
    connection.close()


def post(served: Triton, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return call(served.http_url, "POST", f"/v2/models/{path}", body)


def test_outputs_of_several_samples_are_divided(served: Triton) -> None:
    status, told = post(served, "both/generate", {"text": ["a", 'b,"]['], "id": "7"})
    assert status == 200
    assert (told["label"], told["one"]) == (["a", 'b,"]['], [0.5, 2.5])
    assert told["grid"] == [[1] * 4, [5] * 4]
    assert post(served, "both/versions/1/generate", {"text": ["a", "bb"]})[1]["grid"] == [[1] * 4, [2] * 4]
    for one in ("a", ["a"]):
        assert post(served, "both/generate", {"text": one})[1]["grid"] == [1] * 4
    assert post(served, "nothing/generate", {"text": ["a", "b", "c"]})[1]["output"] == [[], [], []]
    assert post(served, "twice/generate", {"x": [1, 2, 3, 4, 5, 6]})[1]["output"] == [[-1, -2, -3], [-4, -5, -6]]


def test_outputs_of_several_samples_in_a_stream_are_flat(served: Triton) -> None:
    status, text = post(served, "both/generate_stream", {"text": ["a", "bb"]})
    assert (status, json.loads(text.removeprefix("data: "))["grid"]) == (200, [1] * 4 + [2] * 4)


@pytest.mark.parametrize(("body", "status", "told"), [
    ({"to": 1}, 200, ""),
    ({"to": 0}, 400, "the model 'count' gave no response, and generate takes one: ask /v2/models/count/generate_"),
    ({"to": 3}, 400, "the model 'count' gave more than one response, and generate takes one"),
    ({"to": 0, "fails": True}, 500, "0 are enough"),
    ({"to": 1, "fails": True}, 500, "1 are enough"),
    ({"to": 3, "fails": True}, 400, "the model 'count' gave more than one response, and generate takes one"),
])  # fmt: skip
def test_a_stream_that_is_asked_for_one_answer(served: Triton, body: dict[str, Any], status: int, told: str) -> None:
    got, answer = post(served, "count/generate", body)
    assert got == status, answer
    assert told in answer.get("error", "")
    assert answer.get("output") == (0 if status == 200 else None)


def test_a_stream_without_an_end_that_is_asked_for_one_answer_is_ended(served: Triton) -> None:
    pid = server_pid(served)
    before = resident_bytes(pid)
    for _ in range(3):
        HAS_ENDED.clear()
        got, answer = post(served, "endless/generate", {"text": "abcdefgh"})
        assert (got, HAS_ENDED.wait(PATIENCE_S)) == (400, True)
        assert (
            "more than one response, and generate takes one: ask /v2/models/endless/generate_stream" in answer["error"]
        )
    # A worker may have sent 64 MiB before it hears of the end; nothing of it is kept.
    assert resident_bytes(pid) - before < 256 << 20
    assert post(served, "endless/generate", {"txet": "a"})[0] == 400
    assert post(served, "say/generate", {"text": "a"}) == (
        200,
        {"model_name": "say", "model_version": "1", "output": "a"},
    )


@pytest.mark.parametrize("behind", ["GET /v2/health/live HTTP/9\r\n\r\n", "NO REQUEST\r\n\r\n"])
def test_what_is_refused_behind_a_held_answer_is_not_taken_for_it(served: Triton, behind: str) -> None:
    HAS_BEGUN.clear()
    MAY_END.clear()
    body = '{"text": "mine"}'
    with connect(served) as connection:
        connection.sendall(
            f"POST /v2/models/held/generate HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert HAS_BEGUN.wait(PATIENCE_S)
        connection.sendall(behind.encode())
        # Nothing says when the server has looked at it; the answer is the same in any order.
        threading.Timer(0.5, MAY_END.set).start()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    # The connection may end at once, which is no answer, but not with the answer to what came behind.
    mine, end, _ = answer.partition(b"0\r\n\r\n")
    assert not answer or (end and mine.startswith(b"HTTP/1.1 200 OK\r\n") and b'"output":"mine"' in mine), answer
