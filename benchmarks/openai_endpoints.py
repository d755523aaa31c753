"""What the OpenAI endpoints add to a request: `python benchmarks/openai_endpoints.py`.

A model is asked directly and through `pytriton serve --openai`, in turns, so that both see the same load: plain
answers, and the parts of streams. Then 32 callers at once ask for streams.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

APP = """
from collections.abc import Iterator

from pytriton.decorators import model


@model
def echo(text: str) -> str:
    return text


@model
def count(text: str, max_tokens: int = 200) -> Iterator[str]:
    for number in range(max_tokens):
        yield f"{number} "
"""
ROUNDS, REQUESTS, PARTS, CALLERS = 15, 40, 200, 32
OPTIONS = ("--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--openai=0")


class Caller:
    """A connection that is kept."""

    def __init__(self, host: str) -> None:
        self._connection = http.client.HTTPConnection(host, timeout=600)

    def post(self, path: str, body: object) -> bytes:
        """Send a request and return all of the answer."""
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {content[:500]!r}")
        return content


def seconds(work: Callable[[], object]) -> float:
    """Return how long some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(what: str, times: int, per: int, direct: Callable[[], object], through: Callable[[], object]) -> None:
    """Print how long both take, in rounds that take turns."""
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        pair = [statistics.median(seconds(work) for _ in range(times)) / per * 1e6 for work in (direct, through)]
        found.append((pair[0], pair[1]))
    plain, ours = (statistics.median(column) for column in zip(*found, strict=True))
    ratios = sorted(b / a for a, b in found)
    print(
        f"{what}: directly {plain:.0f} us, through the endpoints {ours:.0f} us, ratio {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def measure(triton: str, openai: str) -> None:
    """Compare the two ways to the models."""
    direct, through = Caller(triton), Caller(openai)
    said = {"text": "hello"}
    completion = {"model": "echo", "prompt": "hello"}
    stream = {"model": "count", "prompt": "x", "max_tokens": PARTS, "stream": True}
    streamed = {"text": "x", "max_tokens": PARTS}
    compare(
        "a request",
        REQUESTS,
        1,
        lambda: direct.post("/v2/models/echo/generate", said),
        lambda: through.post("/v1/completions", completion),
    )
    compare(
        "a part of a stream",
        3,
        PARTS,
        lambda: direct.post("/v2/models/count/generate_stream", streamed),
        lambda: through.post("/v1/completions", stream),
    )
    texts: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: texts.append(Caller(openai).post("/v1/completions", stream)))
        for _ in range(CALLERS)
    ]
    took = seconds(lambda: [*map(threading.Thread.start, threads), *map(threading.Thread.join, threads)])
    whole = sum(text.endswith(b"[DONE]\n\n") for text in texts)
    print(f"{CALLERS} callers at once: {whole} whole streams, {CALLERS * PARTS / took:.0f} parts a second")


def main() -> int:
    """Start the server and measure."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text(APP)
        command = [sys.executable, "-m", "pytriton", "serve", "app.py", *OPTIONS]
        with subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                written = ""
                while not (found := [re.search(rf"{it} +http://([^/\s]+)", written) for it in ("HTTP", "OpenAI")])[
                    0
                ] or (found[1] is None):
                    line = process.stdout.readline() if process.stdout else ""
                    if not line:
                        raise RuntimeError(written)
                    written += line
                print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
                measure(*(each[1] for each in found if each))
            finally:
                process.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
