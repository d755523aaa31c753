"""Streams both ways through Ray's proxy for gRPC: a program that `test_ray_serve.py` runs, which prints what it saw.

A decoupled model counts; both clients ask it, in one stream and in several beside each other, and some leave before the
end, at moments that differ: what they have left behind must come to an end as well.
"""

from __future__ import annotations

import os
import queue
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import tritonclient.grpc
from numpy.typing import NDArray
from ray import serve

from pytriton.client import DecoupledModelClient
from pytriton.client.exceptions import PyTritonClientError
from pytriton.decorators import Shape, model
from pytriton.ray import GRPC_SERVICER, application

TIMEOUT_S = 600.0
ENDLESS = 1 << 30
CALLERS = 4
ROUNDS = 12
Number = Annotated[NDArray[np.int32], Shape(1)]


def counting(folder: str) -> Any:
    """Return a model that counts up to a number, and has a file in a folder while it does."""

    @model(name="count")
    def count(limit: Number) -> Iterator[Number]:
        if limit[0] < 0:
            raise ValueError(f"expected a number from 0 on, got {limit[0]}")
        with tempfile.NamedTemporaryFile(dir=folder):
            for number in range(limit[0]):
                yield np.array([number], np.int32)
                time.sleep(0.001)

    return count


def tensor(limit: int) -> Any:
    given = tritonclient.grpc.InferInput("limit", [1], "INT32")
    return given.set_data_from_numpy(np.array([limit], np.int32))


class Stream:
    """A stream of tritonclient, with all that has come on it."""

    def __init__(self, address: str) -> None:
        self.client = tritonclient.grpc.InferenceServerClient(address)
        self.came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self.came.put((result, error)))

    def ask(self, limit: int, name: str) -> None:
        self.client.async_stream_infer("count", [tensor(limit)], request_id=name, enable_empty_final_response=True)

    def answers(self, requests: int) -> dict[str, list[int]]:
        """Wait for all answers to some requests; give the numbers by request."""
        found: dict[str, list[int]] = {}
        while requests:
            result, error = self.came.get(timeout=TIMEOUT_S)
            if error is not None:
                raise error
            response = result.get_response()
            numbers = found.setdefault(response.id, [])
            if response.parameters["triton_final_response"].bool_param:
                requests -= 1
            else:
                numbers.append(int(result.as_numpy("output")[0]))
        return found


def count_with_tritonclient(address: str, limit: int) -> list[int]:
    stream = Stream(address)
    stream.ask(limit, "only")
    numbers = stream.answers(1)["only"]
    stream.client.stop_stream()
    return numbers


def count_with_model_client(address: str, limit: int) -> list[int]:
    with DecoupledModelClient(f"grpc://{address}", "count", init_timeout_s=TIMEOUT_S) as client:
        return [int(answer["output"][0]) for answer in client.infer_sample(np.array([limit], np.int32))]


def leave_tritonclient(address: str, after: int) -> None:
    stream = Stream(address)
    stream.ask(ENDLESS, "left")
    for _ in range(after):
        stream.came.get(timeout=TIMEOUT_S)
    stream.client.stop_stream(cancel_requests=True)


def leave_model_client(address: str, after: int) -> None:
    with DecoupledModelClient(f"grpc://{address}", "count", init_timeout_s=TIMEOUT_S) as client:
        answers = client.infer_sample(np.array([ENDLESS], np.int32))
        for _ in range(after):
            next(answers)
        answers.close()


def error_of(address: str) -> str:
    try:
        count_with_model_client(address, -1)
    except PyTritonClientError as error:
        return str(error)
    return "none"


def wait_until(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {TIMEOUT_S:g} s for {what}")
        time.sleep(0.05)


def ask(address: str, left: Path) -> None:
    """Print what every kind of caller saw."""
    stream = Stream(address)
    stream.ask(3, "three")
    stream.ask(2, "two")
    print("one stream:", sorted(stream.answers(2).items()))
    stream.ask(1, "again")
    print("later:", stream.answers(1))
    stream.client.stop_stream()
    print("error:", error_of(address).partition("ValueError: ")[2].splitlines()[0])
    with ThreadPoolExecutor(2 * CALLERS) as pool:
        calls = [
            pool.submit(count, address, 20 + number)
            for count in (count_with_tritonclient, count_with_model_client)
            for number in range(CALLERS)
        ]
        expected = [list(range(20 + number)) for number in range(CALLERS)] * 2
        print("beside each other:", [call.result() for call in calls] == expected)
        for leave in (leave_tritonclient, leave_model_client):
            lefts = [pool.submit(leave, address, random.randrange(1, 20)) for _ in range(CALLERS * ROUNDS)]
            for call in lefts:
                call.result()
            wait_until("the end of streams whose callers have left", lambda: not any(left.iterdir()))
            print("left:", len(lefts), "have ended")


def main() -> None:
    """Deploy and ask."""
    with socket.socket() as http, socket.socket() as grpc:
        for holder in (http, grpc):
            holder.bind(("127.0.0.1", 0))
        http_port, grpc_port = (holder.getsockname()[1] for holder in (http, grpc))
    with tempfile.TemporaryDirectory() as left:
        try:
            ray.init("local", include_dashboard=False, num_cpus=2, object_store_memory=80 << 20, log_to_driver=False)
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": "127.0.0.1", "port": http_port},
                grpc_options={"port": grpc_port, "grpc_servicer_functions": [GRPC_SERVICER]},
            )
            serve.run(application(counting(left), ray_actor_options={"num_cpus": 0.1}))
            ask(f"127.0.0.1:{grpc_port}", Path(left))
            serve.shutdown()  # type: ignore[no-untyped-call,unused-ignore]
        finally:
            ray.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        os.environ["RAY_TMPDIR"] = folder
        main()
