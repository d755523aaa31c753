"""Texts a second where lengths differ: `python3 tools/dev.py bench variable`.

A model waits as for an accelerator that takes 2 ms for a call and 4 us for each token of it, padding included, and is
asked for texts of 5 to 512 tokens, lognormal, by so many callers that each wait for their answer. It is served in turns
by requests of one shape a batch, as without a `Cost`; by callers that pad to 512; and with a `Cost`, padded and packed.
Each answer is held against its text. With `--compute`, numpy computes in place of waiting, on a processor that the
callers and the server share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pytriton.decorators import batch
from pytriton.model_config import Cost, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

LONGEST, WIDTH, LAYERS, DEADLINE_S = 512, 64, 3, 600.0
CALL_S, TOKEN_S = 2e-3, 4e-6
COMPUTES = "--compute" in sys.argv
Array = np.ndarray[Any, Any]
_chance = np.random.default_rng(34)
TABLE = _chance.normal(size=(1000, WIDTH)).astype(np.float32)
WEIGHTS = _chance.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5


def lengths_of(count: int, seed: int) -> Array:
    """Return lengths of texts in tokens."""
    drawn = np.random.default_rng(seed).lognormal(4.0, 1.0, count)
    return np.clip(drawn, 5, LONGEST).astype(int)


def texts_of(count: int, seed: int) -> list[Array]:
    """Return texts as tokens, of which none is 0."""
    chance = np.random.default_rng(seed)
    return [chance.integers(1, len(TABLE), (1, length)) for length in lengths_of(count, seed)]


def encode(tokens: Array) -> Array:
    """Return a vector for each token."""
    hidden = TABLE[tokens]
    if not COMPUTES:
        return hidden
    for weight in WEIGHTS:
        hidden = np.tanh(hidden @ weight)
    return hidden


def take_time(tokens: Array) -> None:
    """Wait as long as an accelerator would compute."""
    if not COMPUTES:
        time.sleep(CALL_S + TOKEN_S * tokens.size)


class Counted:
    """Counts the tokens that a model was sent, and those that it computed."""

    def __init__(self) -> None:
        self.sent = self.computed = self.calls = 0

    def add(self, sent: int, computed: int) -> None:
        """Count a call."""
        self.sent, self.computed, self.calls = self.sent + sent, self.computed + computed, self.calls + 1

    def take(self) -> tuple[float, int]:
        """Return the share of padding, and the calls, since the last time."""
        found = 1 - self.sent / max(self.computed, 1), self.calls
        self.__init__()  # type: ignore[misc]
        return found


counted = Counted()


@batch
def masked(tokens: Array) -> dict[str, Array]:
    """Pool padded texts, whose padding is 0."""
    mask = tokens != 0
    counted.add(int(mask.sum()), tokens.size)
    take_time(tokens)
    pooled = (encode(tokens) * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
    return {"pooled": pooled.astype(np.float32)}


@batch
def packed(tokens: Array, offsets: Array) -> dict[str, Array]:
    """Pool texts that lie behind each other."""
    counted.add(tokens.size, tokens.size)
    take_time(tokens)
    pooled = np.add.reduceat(encode(tokens), offsets[:-1]) / np.diff(offsets)[:, None]
    return {"pooled": pooled.astype(np.float32)}


def pad_to_longest(text: Array) -> Array:
    """Pad a text as callers do where a model takes one length."""
    return np.pad(text, ((0, 0), (0, LONGEST - text.shape[1])))


def same(text: Array) -> Array:
    """Send a text as it is."""
    return text


WAYS: dict[str, tuple[Any, Cost | None, Callable[[Array], Array]]] = {
    "one shape a batch": (masked, None, same),
    "padded to 512": (masked, None, pad_to_longest),
    "Cost, padded": (masked, Cost("tokens", limit=8192), same),
    "Cost, packed": (packed, Cost("tokens", limit=8192, layout="packed", offsets="offsets"), same),
}


# ---- callers --------------------------------------------------------------------------------------------------------


def request_bytes(model: str, text: Array) -> bytes:
    """Return a request of HTTP."""
    tensor = {
        "name": "tokens",
        "shape": text.shape,
        "datatype": "INT64",
        "parameters": {"binary_data_size": text.nbytes},
    }
    wanted = {"name": "pooled", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(head) + text.nbytes}\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\n\r\n"
    )
    return lines.encode() + head + text.tobytes()


async def call_all(
    port: int, requests: list[bytes], expected: list[Array], callers: int, seconds: float
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
            if " 200 " not in head or not np.allclose(
                np.frombuffer(body[-4 * WIDTH :], "<f4"), expected[place], atol=1e-4
            ):
                raise RuntimeError(f"{head}{body[:500]!r}")
        writer.close()

    await asyncio.gather(*(call() for _ in range(callers)))
    return times


def be_callers(port: int, model: str, callers: int, seconds: float) -> None:
    """Print texts a second, and the median and the 99th percentile of the times, in milliseconds."""
    texts = texts_of(1000, 1)
    prepare = WAYS[list(WAYS)[int(model.removeprefix("way"))]][2]
    expected = [encode(text)[0].mean(0) for text in texts]
    requests = [request_bytes(model, prepare(text)) for text in texts]
    asyncio.run(call_all(port, requests[:callers], expected[:callers], callers, 0.5))
    began = time.perf_counter()
    times = asyncio.run(call_all(port, requests, expected, callers, seconds))
    spent = time.perf_counter() - began
    print(len(times) / spent, *(1000 * np.percentile(times, [50, 99])))


# ---- rounds ---------------------------------------------------------------------------------------------------------


def rounds(port: int, callers: int, count: int, seconds: float) -> Iterator[tuple[str, list[float]]]:
    """Yield what each way did in each round, and the share of padding."""
    for _ in range(count):
        for number, name in enumerate(WAYS):
            counted.take()
            command = [sys.executable, __file__, "--be-callers", str(port), f"way{number}", str(callers), str(seconds)]
            command += ["--compute"] * COMPUTES
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S).stdout
            padding, calls = counted.take()
            yield name, [*map(float, output.split()), 100 * padding, calls]


def main() -> None:
    """Run the rounds, and print the medians with the smallest and the largest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--compute", action="store_true")
    parser.add_argument("--be-callers", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_callers:
        port, model, callers, seconds = arguments.be_callers
        be_callers(int(port), model, int(callers), float(seconds))
        return
    triton = Triton(config=TritonConfig(http_address="127.0.0.1", http_port=0, allow_grpc=False, allow_metrics=False))
    for number, (infer, cost, _) in enumerate(WAYS.values()):
        tensors = [Tensor((-1,), np.int64, "tokens")], [Tensor((WIDTH,), np.float32, "pooled")]
        triton.bind(f"way{number}", infer, *tensors, config=ModelConfig(max_batch_size=128, cost=cost))
    with triton:
        port = int(str(triton.http_url).rpartition(":")[2])
        for callers in arguments.callers:
            found: dict[str, list[list[float]]] = {name: [] for name in WAYS}
            for name, numbers in rounds(port, callers, arguments.rounds, arguments.seconds):
                found[name].append(numbers)
            print(f"\n{callers} callers | texts/s | p50 ms | p99 ms | padding %")
            for name, each in found.items():
                columns = list(zip(*each, strict=True))
                shown = [
                    f"{statistics.median(column):.0f} ({min(column):.0f}-{max(column):.0f})" for column in columns[:4]
                ]
                print(f"{name} | {' | '.join(shown)}", flush=True)


if __name__ == "__main__":
    # One thread computes: the callers and the server are there as well.
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    main()
