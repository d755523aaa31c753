"""What the HTTP clients themselves cost: `python benchmarks/clients_http.py [NAME=FOLDER ...]`.

A server in a process of its own answers every request at once with the same bytes, so that the clients are what is
measured: processor time of the caller's process per call, and calls per second. Each case runs in a fresh process.
Several versions of the client (`NAME=FOLDER`, each a folder with `pytriton/client` below it) take turns, so that a
machine that is busy for a while is busy for all of them; without an argument the installed client is measured.

The table shows medians over the rounds, and the middle half of them; from the second version on, the median of the
ratios to the first one in the same round, too.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"tiny": 4, "mib1": 1 << 18, "mib64": 1 << 24, "stream": 4}
EVENTS = 100
TASKS = 32


@dataclass(frozen=True)
class Case:
    """One way to call."""

    model: str  # what answers: so many FP32 as ``SIZES`` says
    calls: int  # how many are measured
    # Makes so many calls of the model at the address, after as many as warm up; returns what they took.
    run: Callable[[str, str, int], tuple[float, float]]


def measure(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Return the processor time and the time of so many calls, in seconds."""
    for _ in range(max(3, calls // 10)):
        call()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    return time.process_time() - cpu, time.perf_counter() - wall


def sync_infer(url: str, model: str, calls: int) -> tuple[float, float]:
    """Call `ModelClient` in one thread."""
    from pytriton.client import ModelClient

    x = np.zeros(4, np.float32)
    with ModelClient(url, model) as client:
        assert client.infer_sample(x)["y"].size == SIZES[model]
        return measure(lambda: client.infer_sample(x), calls)


def sync_stream(url: str, model: str, calls: int) -> tuple[float, float]:
    """Read streams by `DecoupledModelClient` in one thread."""
    from pytriton.client import DecoupledModelClient

    x = np.zeros(4, np.float32)
    with DecoupledModelClient(url, model) as client:
        assert len(list(client.infer_sample(x))) == EVENTS
        return measure(lambda: sum(1 for _ in client.infer_sample(x)), calls)


def asyncio_infer(url: str, model: str, calls: int, tasks: int = 1) -> tuple[float, float]:
    """Call `AsyncioModelClient` in so many tasks."""
    from pytriton.client import AsyncioModelClient

    x = np.zeros(4, np.float32)

    async def run() -> tuple[float, float]:
        async with AsyncioModelClient(url, model) as client:
            assert (await client.infer_sample(x))["y"].size == SIZES[model]
            return await measure_tasks(lambda: client.infer_sample(x), calls, tasks)

    return asyncio.run(run())


def asyncio_stream(url: str, model: str, calls: int) -> tuple[float, float]:
    """Read streams by `AsyncioDecoupledModelClient` in one task."""
    from pytriton.client import AsyncioDecoupledModelClient

    x = np.zeros(4, np.float32)

    async def run() -> tuple[float, float]:
        async with AsyncioDecoupledModelClient(url, model) as client:

            async def call() -> None:
                assert len([part async for part in client.infer_sample(x)]) == EVENTS

            return await measure_tasks(call, calls, 1)

    return asyncio.run(run())


async def measure_tasks(call: Callable[[], Awaitable[Any]], calls: int, tasks: int) -> tuple[float, float]:
    """Measure as ``measure`` does, with the calls shared out among tasks."""

    async def repeat(count: int) -> None:
        for _ in range(count):
            await call()

    async def share(count: int) -> None:
        await asyncio.gather(*(repeat(count) for _ in range(tasks)))

    await share(max(3, calls // 10 // tasks))
    cpu, wall = time.process_time(), time.perf_counter()
    await share(calls // tasks)
    return time.process_time() - cpu, time.perf_counter() - wall


CASES = {
    "sync, tiny": Case("tiny", 4000, sync_infer),
    "sync, 1 MiB": Case("mib1", 300, sync_infer),
    "sync, 64 MiB": Case("mib64", 8, sync_infer),
    f"sync, stream of {EVENTS}": Case("stream", 60, sync_stream),
    "asyncio, tiny": Case("tiny", 4000, asyncio_infer),
    f"asyncio, tiny, {TASKS} tasks": Case("tiny", 4000, functools.partial(asyncio_infer, tasks=TASKS)),
    "asyncio, 1 MiB": Case("mib1", 300, asyncio_infer),
    "asyncio, 64 MiB": Case("mib64", 8, asyncio_infer),
    f"asyncio, stream of {EVENTS}": Case("stream", 60, asyncio_stream),
}


def answers() -> dict[str, bytes]:
    """Return the bytes that answer each path."""
    found = {}
    for model, size in SIZES.items():
        x, y = ({"name": name, "data_type": "TYPE_FP32", "dims": [-1]} for name in "xy")
        config: dict[str, Any] = {"name": model, "input": [x], "output": [y]}
        if model == "stream":
            config["model_transaction_policy"] = {"decoupled": True}
            content = {"model_name": model, "model_version": "1", "y": [1.0] * size}
            event = b"data: " + json.dumps(content).encode() + b"\n\n"
            chunk = b"%x\r\n%b\r\n" % (len(event), event)
            found[f"/v2/models/{model}/generate_stream"] = (
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n" + EVENTS * chunk + b"0\r\n\r\n"
            )
        head = json.dumps(
            {
                "model_name": model,
                "model_version": "1",
                "outputs": [
                    {"name": "y", "datatype": "FP32", "shape": [size], "parameters": {"binary_data_size": 4 * size}}
                ],
            }
        ).encode()
        found[f"/v2/models/{model}/ready"] = found["/v2/health/ready"] = respond(b"")
        found[f"/v2/models/{model}/config"] = respond(json.dumps(config).encode())
        found[f"/v2/models/{model}/infer"] = respond(
            head + bytes(4 * size), b"Inference-Header-Content-Length: %d\r\n" % len(head)
        )
    return found


def respond(body: bytes, headers: bytes = b"") -> bytes:
    """Return a response in the form of tritonserver's."""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n%bContent-Length: %d\r\n\r\n"
        % (headers, len(body))
        + body
    )


def serve() -> None:
    """Answer until standard input ends."""
    paths = answers()
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        print(listening.getsockname()[1], flush=True)

        def accept() -> None:
            while True:
                connection, _ = listening.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            data = b""
            with connection:
                while received := connection.recv(1 << 16):
                    data += received
                    while (end := data.find(b"\r\n\r\n")) >= 0:
                        head = data[:end].decode()
                        length = int(head.lower().partition("content-length:")[2].split("\r\n")[0] or 0)
                        if len(data) < end + 4 + length:
                            break
                        data = data[end + 4 + length :]
                        connection.sendall(paths[head.split()[1]])

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.read()


def run_case(folder: str | None, case: str, port: int) -> tuple[float, float]:
    """Run one case in a process of its own; return microseconds of processor time per call and calls per second."""
    environment = dict(os.environ)
    if folder is not None:
        environment["PYTHONPATH"] = str(Path(folder).resolve())
    done = subprocess.run(
        [sys.executable, __file__, "--case", case, "--port", str(port)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=600,
    )
    cpu, wall = json.loads(done.stdout)
    return cpu, wall


def report(results: dict[str, dict[str, list[tuple[float, float]]]], versions: Sequence[str]) -> None:
    """Print a table in Markdown."""
    print("| case | version | CPU us/call | calls/s | CPU, to the first |\n|---|---|---|---|---|")
    for case, of_versions in results.items():
        for version in versions:
            cpu = [one[0] for one in of_versions[version]]
            rate = [one[1] for one in of_versions[version]]
            first = [one[0] for one in of_versions[versions[0]]]
            ratio = statistics.median(mine / its for mine, its in zip(cpu, first, strict=True))
            print(f"| {case} | {version} | {spread(cpu)} | {spread(rate)} | {ratio:.3f} |")


def spread(values: list[float]) -> str:
    """Return the median and the middle half."""
    if len(values) < 2:
        return f"{values[0]:.0f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.0f} ({low:.0f}-{high:.0f})"


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="NAME=FOLDER", help="a client, by the folder above pytriton/")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.case:
        chosen = CASES[options.case]
        cpu, wall = chosen.run(f"http://127.0.0.1:{options.port}", chosen.model, chosen.calls)
        print(json.dumps([cpu / chosen.calls * 1e6, chosen.calls / wall]))
        return
    folders: dict[str, str | None] = dict(version.split("=", 1) for version in options.versions) or {"installed": None}
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        cases = [case for case in CASES if options.only in case]
        results: dict[str, dict[str, list[tuple[float, float]]]] = {
            case: {version: [] for version in folders} for case in cases
        }
        for number in range(options.rounds):
            for case in cases:
                # Whoever is first in one round is last in the next.
                for version in list(folders)[:: 1 if number % 2 else -1]:
                    results[case][version].append(run_case(folders[version], case, port))
            if options.json:
                options.json.write_text(json.dumps(results))
    finally:
        server.communicate()
    report(results, list(folders))


if __name__ == "__main__":
    main()
