"""The guard in tritonserver: requests that ended it are answered with an error, and honest ones are let through."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import tritonclient.grpc

from pytriton.client import ModelClient
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy_backend import guard_library_path
from pytriton.server.tritonserver.guard import find_guard
from pytriton.triton import GuardConfig, Triton, TritonConfig, TritonSecurityConfig
from support.callables import identity
from support.faults.raw_http import ask, ask_ahead, connect, read_answer
from support.servers import server_version
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

INFER = "/v2/models/same/infer"
GENERATE = "/v2/models/same/generate"
FORM = "Content-Type: application/x-www-form-urlencoded"


def text(requests: Any) -> Any:
    return [{"y": np.full((request["x"].shape[0], 1), b"text", dtype=object)} for request in requests]


def bind(triton: Triton) -> Triton:
    x = Tensor(name="x", dtype=np.float32, shape=(-1,))
    triton.bind("same", identity, [x], [Tensor(name="y", dtype=np.float32, shape=(-1,))], config=ModelConfig())
    triton.bind("text", text, [x], [Tensor(name="y", dtype=bytes, shape=(1,))], config=ModelConfig())
    return triton


@pytest.fixture(scope="module")
def guarded() -> Iterator[Triton]:
    with short_home(), running(bind(Triton(config=local_config()))) as triton:
        yield triton


@contextmanager
def started(guard: GuardConfig | None = None, config: TritonConfig | None = None) -> Iterator[Triton]:
    """Run a server beside the one of this module, which is what the look for leaks would find."""
    with short_home(), bind(Triton(config=config or local_config(), guard=guard)) as triton:
        yield triton


def infer(shape: list[int], data: list[float], **more: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": data}], **more}).encode()


def post(path: str, body: bytes, *headers: str, length: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join([*lines, *([f"Content-Length: {len(body)}"] if length else []), "\r\n"]).encode() + body


def is_well(triton: Triton) -> bool:
    status, body = ask(triton, post(INFER, infer([1, 2], [1, 2])))
    return status == 200 and json.loads(body)["outputs"][0]["data"] == [1.0, 2.0]


GOOD = infer([1, 2], [1, 2])
CHUNKED = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
DEEP = b"[" * 30_000_000
POISONS: dict[str, tuple[bytes, int, str]] = {
    "a shape of terabytes": (post(INFER, infer([1, 1 << 40], [1])), 400, "input 'x' has the shape [1, 1099511627776]"),
    "a shape that overflows": (post(INFER, infer([4, 1 << 62], [1])), 400, "more than can be counted"),
    "an empty shape that overflows": (post(INFER, infer([1, 0, 1 << 62, 1 << 62], [])), 400, "can be counted"),
    "too many rows": (post(INFER, infer([(1 << 32) + 1], [1])), 400, "a first dimension may be 2147483647"),
    "a shape of more than was sent": (post(INFER, infer([1, 1 << 28], [1])), 400, "no request in flight has so many"),
    "deep JSON to generate": (post(GENERATE, b'{"x":' + DEEP[:50_000]), 400, "deeper than 512 levels"),
    "deep JSON to infer": (post(INFER, b'{"inputs":' + DEEP[:1_000_000]), 400, "deeper than 512 levels"),
    "very deep JSON": (post(INFER, DEEP), 400, "deeper than 512 levels"),
    "deep objects": (post(INFER, b'{"a":' * 200_000), 400, "deeper than 512 levels"),
    "deep JSON with a wrong length of it": (
        post(GENERATE, b'{"x":' + DEEP[:50_000], "Inference-Header-Content-Length: 0"), 400, "deeper than",
    ),
    "deep JSON that is no gzip": (post(GENERATE, DEEP[:50_000], "Content-Encoding: gzip"), 400, "deeper than"),
    "deep JSON in gzip": (post(INFER, gzip.compress(DEEP), "Content-Encoding: gzip"), 400, "decompression"),
    "deep JSON in deflate": (post(INFER, zlib.compress(DEEP), "Content-Encoding: deflate"), 400, "decompression"),
    "tiny chunks": (CHUNKED + b"1\r\n \r\n" * 60_000 + b"0\r\n\r\n", 400, "The document is empty"),
    "too many tiny chunks": (CHUNKED + b"1\r\n \r\n" * 600_000 + b"0\r\n\r\n", 413, "more than 65536 pieces"),
    "a large form": (post(INFER, b"x" * 50_000_000, FORM), 400, "failed to parse the request JSON"),
    "two lengths": (
        post(INFER, GOOD, "Content-Length: 2147483648"), 400, "more than one header 'Content-Length'",
    ),
    "a length and chunks": (post(INFER, GOOD, "Transfer-Encoding: chunked"), 400, "both a Content-Length and"),
    "more than is counted in 32 bits": (
        post(INFER, b"", "Content-Length: 2147483648", length=False), 413, "max_request_bytes",
    ),
    "a JSON part behind the end": (post(INFER, GOOD, "Inference-Header-Content-Length: 9999"), 400, "JSON part"),
    "a weight that is none": (post(INFER, GOOD, "Accept-Encoding: gzip;q=1e999"), 400, "Accept-Encoding"),
    "a classification of texts": (
        post("/v2/models/text/infer", infer([1, 1], [1], outputs=[{"name": "y", "parameters": {"classification": 1}}])),
        400,
        "unsupported type 'BYTES'",
    ),
    "an output twice": (post(INFER, infer([1, 1], [1], outputs=[{"name": "y"}] * 2)), 400, "more than once"),
    "100,000 parameters": (
        post(INFER, infer([1, 1], [1], parameters={f"p{i}": 1 for i in range(100_000)})), 400, "16384 members",
    ),
    "10,000 headers": (b"GET /v2 HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n", 431, "500 header fields"),
    "a long path": (b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n", 414, "4.0 KiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", POISONS)
def test_poison_is_answered_and_the_server_lives(guarded: Triton, name: str) -> None:
    request, status, words = POISONS[name]
    answer = ask(guarded, request)
    assert answer[0] == status, answer
    assert words in json.loads(answer[1])["error"]
    assert is_well(guarded)


@pytest.mark.parametrize("headers", [(), (FORM,), ("content-type:Application/X-WWW-Form-Urlencoded;charset=utf-8",)])
def test_what_curl_sends_by_default_is_served(guarded: Triton, headers: tuple[str, ...]) -> None:
    # 5 MB of JSON: libevhtp takes such a form apart on its stack, if it sees one.
    values = 1_200_000
    body = infer([1, values], [1.5] * values)
    status, answer = ask(guarded, post(INFER, body, *headers))
    assert status == 200
    assert json.loads(answer)["outputs"][0]["data"] == [1.5] * values


def test_honest_requests_are_let_through(guarded: Triton) -> None:
    deflated = post(INFER, zlib.compress(GOOD), "Content-Encoding: deflate", "Accept-Encoding: x;q=0.25, *;q=0")
    assert ask(guarded, deflated)[0] == 200
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in GOOD)
    assert ask(guarded, CHUNKED + chunks + b"0\r\n\r\n")[0] == 200
    # Many chunks are good where they are no tiny ones; newer servers take no more than so many themselves.
    count = 100_000 if server_version() < (2, 70) else 60_000
    many = CHUNKED + b"400\r\n%b\r\n" % (b" " * 1024) * count + b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    assert ask(guarded, many)[0] == 200
    nested = post(GENERATE, b'{"x":[1],"parameters":{"a":"' + b"[" * 100_000 + b'"}}')
    assert "nests deeper" not in ask(guarded, nested)[1]
    assert guarded.http_url is not None
    assert guarded.grpc_url is not None
    large = np.arange(8_000_000, dtype=np.float32)
    for url in (guarded.http_url, guarded.grpc_url):
        with ModelClient(url, "same", inference_timeout_s=PATIENCE_S) as client:
            for _ in range(3):
                np.testing.assert_array_equal(client.infer_sample(large)["y"], large)


def test_pipelined_requests_are_answered_in_their_order(guarded: Triton) -> None:
    requests = [post(INFER, infer([1, 1], [number])) for number in range(20)]
    with connect(guarded) as connection:
        connection.sendall(b"".join(requests))
        data = b""
        while data.count(b'"data":[') < len(requests) or not data.endswith(b"]}]}"):
            part = connection.recv(65536)
            assert part, data
            data += part
    assert [float(found) for found in re.findall(rb'"data":\[([\d.]+)\]', data)] == list(range(20))


def test_large_and_small_requests_of_many_connections_at_once() -> None:
    # The server's threads handle a request some time after they have read it, with others read in between.
    length = 200_000
    header = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [1, length], "parameters": {"binary_data_size": 4 * length}}
            ]
        }
    ).encode()
    head = post(INFER, b"", f"Inference-Header-Content-Length: {len(header)}", length=False).removesuffix(b"\r\n")
    large = head + f"Content-Length: {len(header) + 4 * length}\r\n\r\n".encode() + header + bytes(4 * length)
    packed = post(
        INFER,
        gzip.compress(header + bytes(4 * length)),
        *(f"Inference-Header-Content-Length: {len(header)}", "Content-Encoding: gzip"),
    )
    with started(config=local_config(http_thread_count=2)) as triton:

        def run(request: bytes) -> list[int]:
            with connect(triton) as connection:
                answers = []
                for _ in range(20):
                    connection.sendall(request)
                    answers.append(read_answer(connection)[0])
                return answers

        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(run, [large, post(INFER, GOOD), packed] * 4))
        assert answers == [[200] * 20] * 12


@pytest.mark.parametrize("headers", ["", "Content-Type: multipart\r\n"])
@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/models/same", "http://h", "/nothing", INFER])
def test_head_is_answered_as_get_without_a_body(guarded: Triton, path: str, headers: str) -> None:
    statuses = {"/nothing": 404, INFER: 405}
    with connect(guarded) as connection:
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nHost: h\r\n{headers}\r\n".encode() + post(INFER, GOOD))
        head, end, data = b"", b"\r\n\r\n", b""
        while data.count(end) < 2:
            data += (part := connection.recv(65536))
            assert part, data
        head, _, data = data.partition(end)
    assert int(head.split()[1]) == statuses.get(path, 200)
    assert data.startswith(b"HTTP/1.1 200 OK\r\n")


def test_no_content_type_takes_the_length_off_an_answer(guarded: Triton) -> None:
    # By itself the server names no bytes in front of a body, which is then taken for the begin of the next answer.
    for name in ("multipart", "Multipart"):
        asked = post(INFER, GOOD, f"Content-Type: {name}")
        one, two = ask_ahead(guarded, [asked, asked, asked])
        assert one == two
        assert (one[0], json.loads(one[1])["outputs"][0]["data"]) == (200, [1.0, 2.0])


def test_a_hostile_request_behind_a_good_one_does_not_touch_its_answer(guarded: Triton) -> None:
    with connect(guarded) as connection:
        connection.sendall(post(INFER, GOOD) + post(INFER, DEEP[:1000]))
        data = b"".join(iter(partial(connection.recv, 65536), b""))
    good, _, hostile = data.partition(b"HTTP/1.1 400 Bad Request\r\n")
    assert good.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(good.partition(b"\r\n\r\n")[2])["outputs"][0]["data"] == [1.0, 2.0]
    assert b"nests deeper" in hostile
    assert is_well(guarded)


def test_grpc_shapes_are_held_too(guarded: Triton) -> None:
    from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException

    assert guarded.grpc_url is not None
    with InferenceServerClient(guarded.grpc_url.removeprefix("grpc://")) as client:
        for shape, words in (
            ([1, 1 << 40], "more than"),
            ([1, -5], "no dimension of a request may be negative"),
            ([1 << 31], "a first dimension may be"),
        ):
            tensor = InferInput("x", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
            tensor.set_shape(shape)
            with pytest.raises(InferenceServerException, match=words):
                client.infer("same", [tensor], client_timeout=PATIENCE_S)
        tensor = InferInput("x", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
        with pytest.raises(InferenceServerException, match="unsupported type 'BYTES'"):
            client.infer("text", [tensor], outputs=[InferRequestedOutput("y", 1)], client_timeout=PATIENCE_S)
    assert is_well(guarded)


def test_the_guard_and_the_token_are_not_to_be_seen(guarded: Triton) -> None:
    folder = Path(f"/proc/{server_pid(guarded)}")
    token = guarded.get_access_token()
    assert token is not None
    assert token.encode() not in (folder / "cmdline").read_bytes()
    assert b"triton-access-token={secret-" in (folder / "cmdline").read_bytes()
    assert token.encode() not in (folder / "environ").read_bytes()
    descriptors = [os.readlink(entry) for entry in (folder / "fd").iterdir()]
    assert not [name for name in descriptors if "pytriton-secrets" in name]
    status, _ = ask(guarded, post("/v2/repository/index", b"{}", f"triton-access-token: {token}"))
    assert status == 200
    mark = re.search(rb"triton-access-token=(\{secret-[^}]+\})", (folder / "cmdline").read_bytes())
    assert mark is not None
    status, _ = ask(guarded, post("/v2/repository/index", b"{}", f"triton-access-token: {mark[1].decode()}"))
    assert status == 403
    for target in ("http://h/v2/repository/index", "x://h:1/v2/repository/index?a", "/v2/repository/index?"):
        assert ask(guarded, post(target, b"{}"))[0] == 403
        assert ask(guarded, post(target, b"{}", f"triton-access-token: {token}"))[0] == 200


@pytest.mark.slow
def test_no_process_list_ever_shows_the_token() -> None:
    watcher = (
        "import glob, sys\n"
        "token = sys.stdin.readline().strip().encode()\n"
        "print('watching', flush=True)\n"
        "while True:\n"
        "    for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "        try:\n"
        "            found = token in open(path, 'rb').read()\n"
        "        except OSError:\n"
        "            continue\n"
        "        if found:\n"
        "            print('seen in', path, flush=True)\n"
        "            sys.exit(1)\n"
    )
    token = secrets.token_urlsafe(32)
    process = subprocess.Popen(
        [sys.executable, "-c", watcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{token}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "watching\n"
        config = TritonSecurityConfig(access_token=token)
        with short_home(), bind(Triton(config=local_config(), security_config=config)) as triton:
            assert is_well(triton)
        assert process.poll() is None, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def test_limits_are_settings() -> None:
    guard = GuardConfig(max_request_bytes=5000, max_json_depth=7, max_input_bytes=4000)
    with started(guard) as triton:
        assert "more than 5000" in ask(triton, post(INFER, b" " * 5001))[1]
        assert "deeper than 7 levels" in ask(triton, post(INFER, b"[" * 8))[1]
        assert "more than 3.9 KiB" in ask(triton, post(INFER, infer([1, 1001], [1])))[1]
        assert is_well(triton)


def test_memory_in_flight_is_held_and_given_back() -> None:
    guard = GuardConfig(max_in_flight_bytes=64 << 20)
    with started(guard) as triton:
        assert triton.http_url is not None
        assert triton.grpc_url is not None
        sample = np.zeros(4 << 20, np.float32)
        for url in (triton.http_url, triton.grpc_url):
            with ModelClient(url, "same", inference_timeout_s=PATIENCE_S) as client:
                for _ in range(10):  # more than the limit, one after another
                    client.infer_sample(sample)
        # Each holds 16 MiB of a body that never ends.
        head = (
            f"POST {INFER} HTTP/1.1\r\nContent-Length: 33554432\r\nInference-Header-Content-Length: 10\r\n\r\n".encode()
        )
        held = [connect(triton) for _ in range(6)]
        try:
            for connection in held:
                connection.sendall(head + bytes(16 << 20))
            refused = [status for status in map(read_if_any, held) if status is not None]
            eventually(lambda: refused or [1 for c in held if read_if_any(c) == 503])
        finally:
            for connection in held:
                connection.close()
        eventually(lambda: ask(triton, post(INFER, infer([1, 100_000], [1.0] * 100_000)))[0] == 200)


def read_if_any(connection: socket.socket) -> int | None:
    connection.setblocking(False)
    try:
        data = connection.recv(4096)
    except BlockingIOError:
        return None
    finally:
        connection.settimeout(PATIENCE_S)
    return int(data.split()[1])


def test_what_failed_compressed_requests_leave_behind_is_bounded() -> None:
    # Triton 2.51 never frees what came out of a compressed request that then fails.
    guard = GuardConfig(max_in_flight_bytes=40 << 20)
    bad = post(INFER, gzip.compress(b" " * 8_000_000), "Content-Encoding: gzip")
    with started(guard) as triton:
        answers = []
        with connect(triton) as connection:
            for asked in [bad, post(INFER, GOOD)] * 2:
                connection.sendall(asked)
                answers.append(read_answer(connection)[0])
        assert answers == [400, 200, 400, 200]
        assert ask(triton, bad)[0] == 503
        assert is_well(triton)


def test_children_of_the_server_do_not_get_the_guard(tmp_path: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": f"{guard_library_path()}", "PYTRITON_GUARD": "max_json_depth=3"}
    # A program that is no tritonserver is left alone, and hands the guard on.
    code = "import os; print(os.environ['LD_PRELOAD'], os.environ['PYTRITON_GUARD'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(guard_library_path()), "max_json_depth=3"]
    assert done.stderr == ""


def test_a_library_below_a_folder_with_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "a folder: with blanks" / guard_library_path().name
    library.parent.mkdir()
    shutil.copy(guard_library_path(), library)
    monkeypatch.setattr("pytriton.server.tritonserver.guard.guard_library_path", lambda: library)
    with started() as triton:
        assert ask(triton, post(INFER, DEEP[:1000]))[0] == 400
        assert is_well(triton)


def test_a_server_that_does_not_take_the_guard_runs_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The loader passes over what it cannot load, with a line that says so.
    library = tmp_path / "libpytriton_guard.so"
    library.write_bytes(b"no library")
    monkeypatch.setattr("pytriton.server.tritonserver.guard.guard_library_path", lambda: library)
    with caplog.at_level(logging.WARNING), started() as triton:
        assert is_well(triton)
        token = triton.get_access_token()
        status, _ = ask(triton, post("/v2/repository/index", b"{}", f"triton-access-token: {token}"))
        assert status == 200
        assert token is not None
        assert token.encode() not in Path(f"/proc/{server_pid(triton)}/cmdline").read_bytes()
    assert "runs without the guard" in caplog.text


def test_a_preloaded_library_that_writes_does_not_hide_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler on this machine")
    source, library = tmp_path / "chatty.c", tmp_path / "chatty.so"
    source.write_text(
        "#include <unistd.h>\n"
        '__attribute__((constructor)) static void chat(void) { if (write(2, "here I am\\n", 10) < 0) _exit(1); }\n'
    )
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=PATIENCE_S)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with caplog.at_level(logging.WARNING), started() as triton:
        monkeypatch.delenv("LD_PRELOAD")
        assert is_well(triton)
        assert "libpytriton_guard.so" in Path(f"/proc/{server_pid(triton)}/maps").read_text()
    assert "runs without the guard" not in caplog.text


FORGED = "x\nE0101 00:00:00.000000 1 caller] forged\r\nE0101 00:00:00.000000 1 caller] forged\x1b[2J\u2028"


def forging_bodies() -> Iterator[dict[str, Any]]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    yield {"inputs": [{**tensor, "name": FORGED}]}
    yield {"inputs": [{**tensor, "name": FORGED, "shape": [1, -1]}]}
    yield {"inputs": [{**tensor, "datatype": FORGED}]}
    yield {"inputs": [tensor], "outputs": [{"name": FORGED}] * 2}
    yield {"inputs": [tensor], "id": FORGED, "parameters": {FORGED: FORGED}}
    yield {"inputs": [{**tensor, "parameters": {"shared_memory_region": FORGED, "shared_memory_byte_size": 4}}]}


def test_callers_write_no_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(local_config(), log_verbose=1)
    with caplog.at_level(logging.DEBUG, "pytriton.tritonserver"), started(config=config) as triton:
        for body in forging_bodies():
            # Refusals are told once a second.
            assert ask(triton, post(INFER, json.dumps(body).encode()))[0] in (200, 400, 500)
        for path in (f"/v2/models/{quote(FORGED)}", f"/v2/systemsharedmemory/region/{quote(FORGED)}/register"):
            assert ask(triton, post(path, b"{}"))[0] >= 400
        with tritonclient.grpc.InferenceServerClient((triton.grpc_url or "").removeprefix("grpc://")) as client:
            for name, model in ((FORGED, "same"), ("x", FORGED)):
                values = tritonclient.grpc.InferInput(name, [1, 1], "FP32")
                values.set_data_from_numpy(np.ones((1, 1), np.float32))
                with pytest.raises(tritonclient.grpc.InferenceServerException):
                    client.infer(model, [values], request_id=FORGED)
    texts = [record.getMessage() for record in caplog.records if record.name == "pytriton.tritonserver"]
    assert any("forged" in text for text in texts)
    assert [text for text in texts if text.startswith("forged") or "\x1b" in text] == []


FORKS = """
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char done[4096];

static void fork_and_close(int number) {
  const pid_t child = number == SIGUSR1   ? fork()
                      : number == SIGUSR2 ? vfork()
                                          : (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
  if (child == 0) {
    for (int fd = 3; fd < 1024; ++fd) close(fd);
    _exit(0);
  }
  if (child > 0 && waitpid(child, NULL, 0) == child) close(creat(done, 0600));
}

__attribute__((constructor)) static void prepare(void) {
  const char* path = getenv("FORKS_DONE");
  if (path == NULL) return;
  strncpy(done, path, sizeof(done) - 1);
  struct sigaction action;
  memset(&action, 0, sizeof(action));
  action.sa_handler = fork_and_close;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, NULL);
  sigaction(SIGUSR2, &action, NULL);
  sigaction(SIGURG, &action, NULL);
}
"""


def test_a_child_that_closes_its_descriptors_takes_nothing_from_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler on this machine")
    source, library, done = (tmp_path / name for name in ("forks.c", "forks.so", "done"))
    source.write_text(FORKS)
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=PATIENCE_S)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("FORKS_DONE", str(done))
    with started() as triton:
        monkeypatch.delenv("LD_PRELOAD")
        with connect(triton) as kept, ModelClient(triton.grpc_url or "", "same") as client:
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG):
                kept.sendall(post(INFER, GOOD))
                assert read_answer(kept)[0] == 200
                os.kill(server_pid(triton), number)
                eventually(done.exists)
                done.unlink()
                kept.sendall(post(INFER, GOOD))
                assert read_answer(kept)[0] == 200
                assert is_well(triton)
                client.infer_sample(np.ones(2, np.float32))
                with ModelClient(triton.grpc_url or "", "same") as another:
                    another.infer_sample(np.ones(2, np.float32))


def failing(requests: Any) -> Iterator[Any]:
    yield identity(requests)
    raise ValueError("not this one")


def test_a_stream_that_is_to_end_with_its_first_error_does_not_end_the_server() -> None:
    """Triton frees all requests of such a stream at the first error, and then answers the others."""
    with started() as triton:
        x, y = (Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in "xy")
        triton.bind("failing", failing, [x], [y], config=ModelConfig(decoupled=True))
        assert triton.grpc_url is not None
        values = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
        values.set_data_from_numpy(np.ones((1, 2), np.float32))
        for _ in range(20):
            with tritonclient.grpc.InferenceServerClient(triton.grpc_url.removeprefix("grpc://")) as client:
                answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
                client.start_stream(
                    lambda result, error, put=answers.put: put((result, error)), headers={"triton_grpc_error": "true"}
                )
                for _ in range(3):
                    client.async_stream_infer("failing", [values])
                received = [answers.get(timeout=PATIENCE_S) for _ in range(6)]
                assert sum(result is not None for result, _ in received) == 3
                assert ["not this one" in str(error) for _, error in received if error is not None] == [True] * 3
        assert is_well(triton)


def test_the_guard_can_be_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with started(GuardConfig(enabled=False)) as triton:
            # Triton's own status, which the guard corrects.
            assert ask(triton, post(INFER, b"{"))[0] == 500
            assert guard_library_path().name not in Path(f"/proc/{server_pid(triton)}/maps").read_text()
        monkeypatch.setenv("PYTRITON_GUARD", "off")
        with started() as triton:
            assert guard_library_path().name not in Path(f"/proc/{server_pid(triton)}/maps").read_text()
    assert "without the guard" not in caplog.text


def test_programs_that_ignore_it_are_known(tmp_path: Path) -> None:
    program = tmp_path / "tritonserver"
    shutil.copy("/bin/true", program)
    assert find_guard(None, program).library is not None
    program.chmod(0o4755)
    assert "setuid" in str(find_guard(None, program).obstacle)
    program.chmod(0o755)
    content = bytearray(program.read_bytes())
    # Without the entry that names its loader (PT_INTERP, 3) a program is a static one.
    table, count = int.from_bytes(content[32:40], "little"), int.from_bytes(content[56:58], "little")
    for place in range(table, table + 56 * count, 56):
        if content[place : place + 4] == b"\x03\0\0\0":
            content[place : place + 4] = b"\0\0\0\0"
    program.write_bytes(content)
    assert "statically" in str(find_guard(None, program).obstacle)
    assert "cannot be looked at" in str(find_guard(None, tmp_path / "none").obstacle)


@pytest.mark.parametrize(
    "values",
    [{"max_json_depth": 0}, {"max_request_bytes": "1"}, {"max_in_flight_bytes": -1}, {"enabled": 1},
     {"thread_stack_bytes": -1}, {"max_input_bytes": 2.5}, {"max_json_depth": True}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PyTritonValidationError, match=f"GuardConfig.{next(iter(values))} must be"):
        GuardConfig(**values)
