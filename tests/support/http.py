"""Plain HTTP calls, for what no client of ours does, and a gateway or proxy before a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from support.waiting import PATIENCE_S


def call(
    url: str | None, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Return status and answer of one call; the answer is decoded where it is JSON."""
    if url is None:
        raise AssertionError("the service is not there")
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), dict(headers or {}))
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    return response.status, json.loads(text) if text.startswith(("{", "[")) else text


def tensor(name: str, *values: float) -> dict[str, Any]:
    """Return a float32 tensor of shape (1, number of values), in JSON."""
    return {"name": name, "shape": [1, len(values)], "datatype": "FP32", "data": list(values)}


def infer(url: str | None, model: str, *values: float, **headers: str) -> Any:
    """Return the first output of a model with the input `x`, or the text of the error."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, answer = call(url, "POST", f"/v2/models/{model}/infer", {"inputs": [tensor("x", *values)]}, named)
    return answer["outputs"][0]["data"] if status == 200 else answer["error"]


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Forwards(BaseHTTPRequestHandler):
    """Hands on what is asked below a path, or of a host, and nothing else."""

    upstream = ""  # host:port of where it goes
    prefix = ""  # what is before its path here
    asked: ClassVar[list[str]] = []  # what was asked

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, answer = 404, {}, b"no such team"
        if self.path.startswith(f"{self.prefix}/v2"):
            with contextlib.closing(http.client.HTTPConnection(self.upstream, timeout=PATIENCE_S)) as connection:
                connection.request(self.command, self.path.removeprefix(self.prefix), body, dict(self.headers))
                response = connection.getresponse()
                status, headers, answer = response.status, dict(response.headers), response.read()
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET  # noqa: N815

    def do_CONNECT(self) -> None:
        self.asked.append(self.path)
        self.close_connection = True
        host, _, port = self.upstream.partition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as upstream, contextlib.suppress(OSError):
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: upstream, upstream: self.connection}
            while True:
                for readable in select.select(list(ends), [], [])[0]:
                    data = readable.recv(1 << 16)
                    if not data:
                        return
                    ends[readable].sendall(data)

    def log_message(self, *_: object) -> None:
        pass
