"""Calls of a client at a server that runs: `python client_calls.py KIND HTTP_PORT GRPC_PORT SECONDS`.

Prints a line of JSON: calls per second, and the processor time of this process for each.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

A, B = np.arange(4, dtype=np.float32), np.full(4, 0.5, np.float32)
BATCH_A, BATCH_B = A[np.newaxis], B[np.newaxis]
IN_FLIGHT = 16
"""Of the client with futures, which makes no sense with one at a time."""
WARM_UP_CALLS = 100
TIMEOUT_S = 120
Call = Callable[[], Any]


def check(y: Any) -> None:
    """Compare an answer with what it has to be."""
    if not np.array_equal(np.asarray(y).reshape(-1), A + B):
        sys.exit(f"expected {A + B}, received {y}")


def repeat(call: Call, seconds: float) -> dict[str, float]:
    """Call one after the other."""
    for _ in range(WARM_UP_CALLS):
        call()
    calls, cpu, began = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() < began + seconds:
        call()
        calls += 1
    return numbers(calls, time.perf_counter() - began, time.process_time() - cpu)


def numbers(calls: int, wall_s: float, cpu_s: float) -> dict[str, float]:
    """Return what is printed."""
    return {"CPU us/call": cpu_s / calls * 1e6, "calls/s": calls / wall_s}


async def repeat_async(call: Callable[[], Awaitable[Any]], seconds: float) -> dict[str, float]:
    """Call one after the other in an event loop."""
    for _ in range(WARM_UP_CALLS):
        await call()
    calls, cpu, began = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() < began + seconds:
        await call()
        calls += 1
    return numbers(calls, time.perf_counter() - began, time.process_time() - cpu)


# --- ours ----------------------------------------------------------------------------------------------------------


def model_client(url: str, seconds: float) -> dict[str, float]:
    from pytriton.client import ModelClient

    with ModelClient(url, "add", inference_timeout_s=TIMEOUT_S) as client:
        check(client.infer_sample(A, B)["y"])
        return repeat(lambda: client.infer_sample(A, B), seconds)


def asyncio_client(url: str, seconds: float) -> dict[str, float]:
    from pytriton.client import AsyncioModelClient

    async def run() -> dict[str, float]:
        async with AsyncioModelClient(url, "add", inference_timeout_s=TIMEOUT_S) as client:
            check((await client.infer_sample(A, B))["y"])
            return await repeat_async(lambda: client.infer_sample(A, B), seconds)

    return asyncio.run(run())


def futures_client(url: str, seconds: float) -> dict[str, float]:
    from pytriton.client import FuturesModelClient

    with FuturesModelClient(url, "add", inference_timeout_s=TIMEOUT_S) as client:
        check(client.infer_sample(A, B).result()["y"])

        def call() -> None:
            for future in [client.infer_sample(A, B) for _ in range(IN_FLIGHT)]:
                future.result()

        found = repeat(call, seconds)
    return {"CPU us/call": found["CPU us/call"] / IN_FLIGHT, "calls/s": found["calls/s"] * IN_FLIGHT}


def decoupled_client(url: str, seconds: float) -> dict[str, float]:
    from pytriton.client import DecoupledModelClient

    with DecoupledModelClient(url, "add_once", inference_timeout_s=TIMEOUT_S) as client:
        check([each["y"] for each in client.infer_sample(A, B)])
        return repeat(lambda: list(client.infer_sample(A, B)), seconds)


# --- others --------------------------------------------------------------------------------------------------------


def tritonclient(protocol: str, url: str, seconds: float) -> dict[str, float]:
    import importlib

    module = importlib.import_module(f"tritonclient.{protocol}")
    with ExitStack() as stack:
        client = module.InferenceServerClient(url.partition("//")[2])
        stack.callback(client.close)

        def call() -> Any:
            inputs = []
            for name, value in (("a", BATCH_A), ("b", BATCH_B)):
                tensor = module.InferInput(name, [1, 4], "FP32")
                tensor.set_data_from_numpy(value)
                inputs.append(tensor)
            return client.infer("add", inputs).as_numpy("y")

        check(call())
        return repeat(call, seconds)


def raw_request() -> tuple[dict[str, str], bytes]:
    tensor = {"shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    inputs = [{"name": name, **tensor} for name in ("a", "b")]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return {"Inference-Header-Content-Length": str(len(head))}, head + A.tobytes() + B.tobytes()


def raw_urllib3(url: str, seconds: float) -> dict[str, float]:
    import urllib3

    headers, body = raw_request()
    with urllib3.PoolManager() as pool:

        def call() -> Any:
            response = pool.request("POST", f"{url}/v2/models/add/infer", body=body, headers=headers)
            return np.frombuffer(response.data[-16:], np.float32)

        check(call())
        return repeat(call, seconds)


def raw_aiohttp(url: str, seconds: float) -> dict[str, float]:
    import aiohttp

    headers, body = raw_request()

    async def run() -> dict[str, float]:
        async with aiohttp.ClientSession() as session:

            async def call() -> Any:
                async with session.post(f"{url}/v2/models/add/infer", data=body, headers=headers) as response:
                    return np.frombuffer((await response.read())[-16:], np.float32)

            check(await call())
            return await repeat_async(call, seconds)

    return asyncio.run(run())


KINDS: dict[str, tuple[str, Callable[[str, float], dict[str, float]]]] = {
    "http/ModelClient": ("http", model_client),
    "http/AsyncioModelClient": ("http", asyncio_client),
    "http/FuturesModelClient": ("http", futures_client),
    "http/DecoupledModelClient": ("http", decoupled_client),
    "http/tritonclient": ("http", functools.partial(tritonclient, "http")),
    "http/urllib3": ("http", raw_urllib3),
    "http/aiohttp": ("http", raw_aiohttp),
    "grpc/ModelClient": ("grpc", model_client),
    "grpc/AsyncioModelClient": ("grpc", asyncio_client),
    "grpc/FuturesModelClient": ("grpc", futures_client),
    "grpc/DecoupledModelClient": ("grpc", decoupled_client),
    "grpc/tritonclient": ("grpc", functools.partial(tritonclient, "grpc")),
}

if __name__ == "__main__":
    protocol, run = KINDS[sys.argv[1]]
    print(json.dumps(run(f"{protocol}://127.0.0.1:{sys.argv[2 if protocol == 'http' else 3]}", float(sys.argv[4]))))
