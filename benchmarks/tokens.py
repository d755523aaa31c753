"""Tokens a second of a language model behind the OpenAI endpoints: `python3 tools/dev.py bench tokens`.

The same asynchronous generator, which costs nothing or waits between its tokens as a model does, is served in turns by
`pytriton serve --openai`, by plain FastAPI with server-sent events under uvicorn, as a careful author writes it by
hand, and by `generate_stream` of tritonserver's own port. `--plain` compares models without the endpoints: a coroutine,
a generator in a thread and a coroutine in a process of its own, over `generate_stream` and over gRPC. Callers are one
process of asyncio, which shares the machine. It prints tokens a second, the time to the first part of an answer, the
gaps between the parts, and the processor time of all processes of the server for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pytriton.client import AsyncioDecoupledModelClient

OURS = """
import asyncio
import time
from collections.abc import AsyncIterator, Iterator

from pytriton.decorators import model


@model
async def count(text: str, max_tokens: int = 200, delay: float = 0.0) -> AsyncIterator[str]:
    for number in range(max_tokens):
        if delay:
            await asyncio.sleep(delay)
        yield f"{number} "


@model
async def processed(text: str, max_tokens: int = 200, delay: float = 0.0) -> AsyncIterator[str]:
    async for part in count(text, max_tokens, delay):
        yield part


@model
def threaded(text: str, max_tokens: int = 200, delay: float = 0.0) -> Iterator[str]:
    for number in range(max_tokens):
        if delay:
            time.sleep(delay)
        yield f"{number} "
"""
CONFIG = "[models.processed]\nworkers = 1\n"
BY_HAND = """
import asyncio
import json
import sys
import time
import uuid

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


async def count(text, max_tokens=200, delay=0.0):
    for number in range(max_tokens):
        if delay:
            await asyncio.sleep(delay)
        yield f"{number} "


app = FastAPI()


@app.post("/v1/chat/completions")
async def chat(request: Request):
    body = await request.json()
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body["model"],
    }

    async def events():
        async for text in count(body["messages"][-1]["content"], body["max_tokens"], body.get("delay", 0.0)):
            choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\\n\\n"
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        yield f"data: {json.dumps({**head, 'choices': [choice]})}\\n\\ndata: [DONE]\\n\\n"

    return StreamingResponse(events(), media_type="text/event-stream")


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=False, log_level="warning")
"""
OPTIONS = ("--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--openai=0")
PLAIN = {"async": "count", "thread": "threaded", "process": "processed"}
PATIENCE_S = 300.0
FEWEST_STREAMS = 64  # of a round without a delay


@dataclass(frozen=True)
class Way:
    """A way to a model."""

    name: str  # its name in the table
    address: tuple[str, int]  # host and port
    path: str  # of the request
    root: int  # the first process of the server

    @property
    def is_grpc(self) -> bool:
        """Whether it is asked over gRPC; `path` is the name of the model then."""
        return not self.path.startswith("/")

    def body(self, tokens: int, delay: float) -> bytes:
        """Return the body of a request for so many tokens."""
        if self.path.startswith("/v2"):
            return json.dumps({"text": "x", "max_tokens": tokens, "delay": delay}).encode()
        chat = {"model": "count", "messages": [{"role": "user", "content": "x"}], "max_tokens": tokens, "stream": True}
        return json.dumps({**chat, "delay": delay}).encode()


@dataclass
class Stream:
    """What a caller saw of its stream: when each of its parts came."""

    began: float
    times: list[float] = field(default_factory=list)


class Caller(asyncio.Protocol):
    """Asks for a stream, and notes when its events come."""

    def __init__(self, request: bytes, events: int, done: asyncio.Future[Stream]) -> None:
        self._request = request
        self._events = events
        self._done = done
        self._last = b""
        self._head = b""
        self._stream = Stream(0.0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._stream.began = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if len(self._head) < 12:
            self._head += data[:12]
        # A mark may be cut in two.
        found = (self._last + data).count(b"data: ") - self._last.count(b"data: ")
        self._last = data[-5:]
        self._stream.times += [now] * found
        if len(self._stream.times) >= self._events:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(
            RuntimeError(f"expected {self._events} events, got {len(self._stream.times)}: {self._head!r} {error}")
        )

    def _end(self, error: Exception | None) -> None:
        if self._done.done():
            return
        if error is None and b" 200" not in self._head:
            error = RuntimeError(repr(self._head))
        if error is None:
            self._done.set_result(self._stream)
        else:
            self._done.set_exception(error)
        self._transport.close()


class Counter(asyncio.Protocol):
    """Asks for a stream, counts its events, and says when some numbers of them have come."""

    def __init__(self, request: bytes, marks: dict[int, asyncio.Future[None]]) -> None:
        self._request = request
        self._marks = marks
        self._last = b""
        self._count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._count += (self._last + data).count(b"data: ") - self._last.count(b"data: ")
        self._last = data[-5:]
        for mark, future in self._marks.items():
            if self._count >= mark and not future.done():
                future.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for future in self._marks.values():
            if not future.done():
                future.set_exception(RuntimeError(f"{self._count} events came, then {error}: {self._last!r}"))


def resident_mib(root: int) -> dict[str, float]:
    """Return the memory of each process of a server, in MiB."""
    found = {}
    for pid in descendants(root):
        with contextlib.suppress(FileNotFoundError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            short = "endpoints" if " openai " in command else "tritonserver" if "triton" in command[:60] else "worker"
            found[f"{short} {pid}"] = pages * os.sysconf("SC_PAGESIZE") / 2**20
    return found


async def long_stream(way: Way, marks: list[int]) -> list[dict[str, float]]:
    """Read one stream of as many responses as the last mark says; return the memory of the server at each mark."""
    loop = asyncio.get_running_loop()
    passed: dict[int, asyncio.Future[None]] = {mark: loop.create_future() for mark in marks}
    found = [resident_mib(way.root)]
    reading: asyncio.Future[object]
    if way.is_grpc:
        host, port = way.address
        client = AsyncioDecoupledModelClient(f"grpc://{host}:{port}", way.path, inference_timeout_s=PATIENCE_S)

        async def read() -> None:
            async with client:
                types = {spec.name: spec.dtype for spec in (await client.model_config).inputs}
                given = {"text": b"x", "max_tokens": marks[-1], "delay": 0.0}
                inputs = {name: np.array([value], types[name]) for name, value in given.items()}
                count = 0
                async for _ in client.infer_sample(**inputs):
                    count += 1
                    if count in passed:
                        passed[count].set_result(None)

        reading = asyncio.ensure_future(read())
    else:
        body = way.body(marks[-1], 0.0)
        head = f"POST {way.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        transport, _ = await loop.create_connection(lambda: Counter(request, passed), *way.address)
        reading = loop.create_future()
        reading.add_done_callback(lambda _: transport.close())
    for mark in marks:
        await asyncio.wait_for(passed[mark], PATIENCE_S)
        found.append(resident_mib(way.root))
    if not way.is_grpc:
        reading.set_result(None)
    await reading
    return found


async def call_grpc(way: Way, streams: int, tokens: int, delay: float) -> list[Stream]:
    """Ask for so many streams at once over gRPC, and read them to their ends."""
    inputs = {"text": np.array([b"x"], object), "max_tokens": np.array([tokens]), "delay": np.array([delay])}
    host, port = way.address
    async with AsyncioDecoupledModelClient(f"grpc://{host}:{port}", way.path, inference_timeout_s=PATIENCE_S) as client:
        types = {spec.name: spec.dtype for spec in (await client.model_config).inputs}
        inputs = {name: value.astype(types[name]).reshape(1) for name, value in inputs.items()}

        async def ask() -> Stream:
            stream = Stream(time.perf_counter())
            async for _ in client.infer_sample(**inputs):
                stream.times.append(time.perf_counter())
            if len(stream.times) != tokens:
                raise RuntimeError(f"expected {tokens} responses, got {len(stream.times)}")
            return stream

        return await asyncio.gather(*(ask() for _ in range(streams)))


async def call(way: Way, streams: int, tokens: int, delay: float) -> list[Stream]:
    """Ask for so many streams at once, and read them to their ends."""
    if way.is_grpc:
        return await call_grpc(way, streams, tokens, delay)
    loop = asyncio.get_running_loop()
    body = way.body(tokens, delay)
    head = (
        f"POST {way.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    # Ours begins with an event of the role, like OpenAI's; the end is an event and [DONE].
    events = tokens + {"OpenAI": 3, "before": 3, "FastAPI": 2}.get(way.name, 0)
    calls = []
    for _ in range(streams):
        done: asyncio.Future[Stream] = loop.create_future()
        await loop.create_connection(functools.partial(Caller, head.encode() + body, events, done), *way.address)
        calls.append(done)
    return await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)


async def call_again(way: Way, streams: int, tokens: int, delay: float, times: int) -> list[Stream]:
    """Ask so many times for streams, each time when those before have ended."""
    return [stream for _ in range(times) for stream in await call(way, streams, tokens, delay)]


def descendants(root: int) -> list[int]:
    """Return a process and all that came of it."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += map(int, (task / "children").read_text().split())
    return found


def processor_s(root: int) -> dict[str, float]:
    """Return the processor time of each thread of a server, in seconds, by process and name."""
    used: dict[str, float] = {}
    for pid in descendants(root):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = (task / "comm").read_text().strip()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                short = (
                    "endpoints" if " openai " in command else "tritonserver" if "triton" in command[:60] else "worker"
                )
                used[f"{short} {name} {task.name}"] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return used


@contextlib.contextmanager
def started(
    command: list[str], folder: str, patterns: list[str], **environment: str
) -> Iterator[tuple[int, list[str]]]:
    """Run a server until it has told its addresses; yield its process and these."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            written = ""
            while not all(re.search(pattern, written) for pattern in patterns):
                line = process.stdout.readline() if process.stdout else ""
                if not line:
                    raise RuntimeError(written)
                written += line
            found = [re.search(pattern, written) for pattern in patterns]
            yield process.pid, [each[1] for each in found if each]
        finally:
            process.send_signal(signal.SIGTERM)


def address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    return host, int(port)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


async def call_beside(way: Way, others: int, tokens: int, delay: float) -> list[Stream]:
    """Ask for one stream with a delay, beside others that have none and begin anew until it has ended."""
    stopping = False

    async def keep_busy() -> None:
        while not stopping:
            await call(way, 1, tokens, 0.0)

    busy = [asyncio.ensure_future(keep_busy()) for _ in range(others)]
    found = await call(way, 1, tokens, delay)
    stopping = True
    await asyncio.gather(*busy)
    return found


def measure(
    way: Way, streams: int, tokens: int, delay: float, *, by_thread: bool, beside: bool = False
) -> dict[str, float]:
    """Return the figures of one round."""
    if beside:
        [paced] = asyncio.run(call_beside(way, streams, tokens, delay))
        gaps = [b - a for a, b in itertools.pairwise(paced.times)]
        return {
            "first ms": (paced.times[0] - paced.began) * 1e3,
            "gap median ms": statistics.median(gaps) * 1e3,
            "gap p99 ms": percentile(gaps, 0.99) * 1e3,
        }
    before = processor_s(way.root)
    began = time.perf_counter()
    # A few streams are over in milliseconds, so they are asked for again and again.
    answers = asyncio.run(call_again(way, streams, tokens, delay, 1 if delay else max(1, FEWEST_STREAMS // streams)))
    took = time.perf_counter() - began
    after = processor_s(way.root)
    spent = {name: value - before.get(name, 0.0) for name, value in after.items()}
    total = len(answers) * tokens
    if by_thread:
        for name, value in sorted(spent.items(), key=lambda item: -item[1])[:14]:
            if value / total > 1e-6:
                print(f"      {value / total * 1e6:7.1f} us  {name}")
    gaps = [b - a for answer in answers for a, b in zip(answer.times, answer.times[1:], strict=False)]
    return {
        "tokens/s": total / took,
        "first ms": statistics.median((answer.times[0] - answer.began) * 1e3 for answer in answers),
        "gap p99 ms": percentile(gaps, 0.99) * 1e3,
        "processor us": sum(spent.values()) / total * 1e6,
    }


def main() -> int:
    """Start the servers and measure them in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--delay", type=float, default=0.0, help="between tokens, in seconds")
    parser.add_argument(
        "--beside",
        action="store_true",
        help="measure one stream with --delay, beside as many without one as --streams says",
    )
    parser.add_argument("--plain", action="store_true", help="measure models without the OpenAI endpoints")
    parser.add_argument("--by-thread", action="store_true", help="tell the processor time of each thread, too")
    parser.add_argument("--ways", help="those of the table, with a comma between them")
    parser.add_argument(
        "--memory", action="store_true", help="tell the memory of each process at 100,000 and 1,000,000 responses"
    )
    parser.add_argument("--before", help="folder with packages of an earlier version, which takes its turn, too")
    given = parser.parse_args()
    plain = [f"{kind}/{protocol}" for protocol in ("SSE", "gRPC") for kind in PLAIN]
    given.ways = given.ways or ",".join(plain if given.plain else ["OpenAI", "FastAPI", "generate_stream"])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder, "app.py").write_text(OURS)
        Path(folder, "by_hand.py").write_text(BY_HAND)
        Path(folder, "config.toml").write_text(CONFIG)
        serve = [sys.executable, "-m", "pytriton", "serve", "app.py", "--config", "config.toml", *OPTIONS]
        patterns = [r"HTTP +http://([^/\s]+)", r"gRPC +grpc://([^/\s]+)", r"OpenAI +http://([^/\s]+)"]
        root, (http, grpc, openai) = stack.enter_context(started(serve, folder, patterns))
        ways = {
            "OpenAI": Way("OpenAI", address(openai), "/v1/chat/completions", root),
            "generate_stream": Way("generate_stream", address(http), "/v2/models/count/generate_stream", root),
        }
        for kind, name in PLAIN.items():
            path = f"/v2/models/{name}/generate_stream"
            ways[f"{kind}/SSE"] = Way(f"{kind}/SSE", address(http), path, root)
            ways[f"{kind}/gRPC"] = Way(f"{kind}/gRPC", address(grpc), name, root)
        if given.before:
            root, (_, _, openai) = stack.enter_context(started(serve, folder, patterns, PYTHONPATH=given.before))
            ways["before"] = Way("before", address(openai), "/v1/chat/completions", root)
        if "FastAPI" in given.ways:
            port = "0"
            import socket

            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            process = subprocess.Popen([sys.executable, "by_hand.py", port], cwd=folder)
            stack.callback(process.terminate)
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port))):
                    break
                time.sleep(0.1)
            ways["FastAPI"] = Way("FastAPI", ("127.0.0.1", int(port)), "/v1/chat/completions", process.pid)
        print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; delay {given.delay} s")
        chosen = [ways[name] for name in [*given.ways.split(","), *(["before"] if given.before else [])]]
        for way in chosen:
            measure(way, 4, 20, 0.0, by_thread=False)
            if given.memory:
                for text, told in zip(
                    ("before", "100,000", "1,000,000"),
                    asyncio.run(long_stream(way, [100_000, 1_000_000])),
                    strict=True,
                ):
                    print(f"{way.name:16} {text:>10}  " + "  ".join(f"{k} {v:.0f} MiB" for k, v in told.items()))
        if given.memory:
            return 0
        for streams in map(int, given.streams.split(",")):
            found: dict[str, list[dict[str, float]]] = {way.name: [] for way in chosen}
            for at in range(given.rounds):
                for way in chosen:
                    tokens = given.tokens
                    if given.by_thread and at == 0:
                        print(f"  {way.name}, {streams} streams")
                    by_thread = given.by_thread and at == 0
                    told = measure(way, streams, tokens, given.delay, by_thread=by_thread, beside=given.beside)
                    found[way.name].append(told)
            for name, rounds in found.items():
                cells = []
                for figure in rounds[0]:
                    values = [each[figure] for each in rounds]
                    cells.append(f"{figure} {statistics.median(values):9.1f} [{min(values):.0f}-{max(values):.0f}]")
                print(f"{streams:4} streams  {name:16} {'  '.join(cells)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
