"""Callers over gRPC who give up: `python -m support.faults.grpc_callers KIND ADDRESS SEED`, until it is killed.

Each kind is a client that people use. Calls get deadlines of all sizes, are cancelled, and streams are left anywhere.
Only a wrong answer, or an error that is none of giving up, ends a caller, with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client.exceptions import PyTritonClientTimeoutError

X = np.ones((1, 16), np.float32)
N = np.array([3], np.int32)
PATIENCE_S = 600.0


def check(condition: object, *seen: object) -> None:
    """End this caller where an answer is wrong."""
    if not condition:
        print("a wrong answer:", *seen, flush=True)
        sys.exit(1)


def limit(rng: random.Random) -> float:
    """Return a time in which a call may take, often about as long as it takes."""
    return rng.choice([PATIENCE_S, rng.random() * 0.005, rng.random() * 0.05])


def sync(address: str, rng: random.Random) -> None:
    with ModelClient(f"grpc://{address}", "double") as client:
        while True:
            with contextlib.suppress(PyTritonClientTimeoutError):
                result = client.with_options(timeout_s=limit(rng)).infer_batch(X)
                check((result["y"] == 2).all(), result)


def futures(address: str, rng: random.Random) -> None:
    with FuturesModelClient(f"grpc://{address}", "double") as client:
        while True:
            made = [client.infer_batch(X) for _ in range(8)]
            for future in made:
                if rng.random() < 0.3:
                    future.cancel()
                else:
                    check((future.result(PATIENCE_S)["y"] == 2).all())


def streams(address: str, rng: random.Random) -> None:
    with DecoupledModelClient(f"grpc://{address}", "count") as client:
        while True:
            stop = rng.randint(0, 25)
            for number, result in enumerate(client.infer_sample(N)):
                check(result["i"][0] == number, result)
                if number == stop:
                    break


async def asyncio_calls(address: str, rng: random.Random) -> None:
    async with AsyncioModelClient(f"grpc://{address}", "double") as client:

        async def one() -> None:
            with contextlib.suppress(asyncio.TimeoutError, PyTritonClientTimeoutError):
                result = await asyncio.wait_for(client.infer_batch(X), limit(rng))
                check((result["y"] == 2).all(), result)

        while True:
            await asyncio.gather(*[one() for _ in range(8)])


async def asyncio_streams(address: str, rng: random.Random) -> None:
    async with AsyncioDecoupledModelClient(f"grpc://{address}", "count") as client:

        async def one() -> None:
            number = 0
            async for result in client.infer_sample(N):
                check(result["i"][0] == number, result)
                number += 1

        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(one(), limit(rng))


def triton_input() -> Any:
    tensor = tritonclient.grpc.InferInput("x", list(X.shape), "FP32")
    tensor.set_data_from_numpy(X)
    return tensor


def tritonclient_sync(address: str, rng: random.Random) -> None:
    client = tritonclient.grpc.InferenceServerClient(address)
    while True:
        try:
            result = client.infer("double", [triton_input()], client_timeout=limit(rng))
            check((result.as_numpy("y") == 2).all())
        except InferenceServerException as error:
            check("DEADLINE_EXCEEDED" in str(error), error)
        handle = client.async_infer("double", [triton_input()], lambda result, error: None)
        handle.cancel()


async def tritonclient_aio(address: str, rng: random.Random) -> None:
    client = tritonclient.grpc.aio.InferenceServerClient(address)
    while True:
        with contextlib.suppress(asyncio.TimeoutError):
            result = await asyncio.wait_for(client.infer("double", [triton_input()]), limit(rng))
            check((result.as_numpy("y") == 2).all())


def plain(address: str, rng: random.Random) -> None:
    """Mix requests to several models in one stream, good ones and bad ones, and cancel anywhere."""
    good = tritonclient.grpc.service_pb2.ModelInferRequest(model_name="double")
    good.inputs.add(name="x", datatype="FP32", shape=X.shape)
    good.raw_input_contents.append(X.tobytes())
    counting = tritonclient.grpc.service_pb2.ModelInferRequest(model_name="count")
    counting.inputs.add(name="n", datatype="INT32", shape=[1])
    counting.raw_input_contents.append(N.tobytes())
    unknown = tritonclient.grpc.service_pb2.ModelInferRequest(model_name="nothing")
    odd = tritonclient.grpc.service_pb2.ModelInferRequest()
    odd.CopyFrom(counting)
    odd.model_version = "9"
    while True:
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for _ in range(rng.randint(1, 30)):
                made = rng.choices([good, counting, unknown, odd], k=rng.randint(1, 4))
                stream = stub.ModelStreamInfer(iter(made), timeout=limit(rng))
                try:
                    for _ in stream:
                        if rng.random() < 0.05:
                            stream.cancel()
                except grpc.RpcError as error:
                    code = error.code()
                    check(code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED), error)


async def waiting(address: str, rng: random.Random) -> None:
    """Give up calls that nobody ever answers: by a limit of ours, a deadline, a stream that is left."""
    async with AsyncioModelClient(f"grpc://{address}", "wait") as client, grpc.aio.insecure_channel(address) as channel:
        stub = tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = tritonclient.grpc.service_pb2.ModelInferRequest(model_name="wait")
        request.inputs.add(name="n", datatype="INT32", shape=[1])
        request.raw_input_contents.append(N.tobytes())

        async def one() -> None:
            limit_s = rng.random() * 0.05
            way = rng.randrange(3)
            try:
                if way == 0:
                    await asyncio.wait_for(client.infer_sample(N), limit_s)
                elif way == 1:
                    await stub.ModelInfer(request, timeout=limit_s)
                else:
                    stream = stub.ModelStreamInfer(iter([request]))
                    asyncio.get_running_loop().call_later(limit_s, stream.cancel)
                    async for _ in stream:
                        pass
            except (asyncio.TimeoutError, asyncio.CancelledError):
                return
            except grpc.RpcError as error:
                check(error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error)
                return
            check(False, "nobody answers this")

        while True:
            await asyncio.gather(*[one() for _ in range(8)])


KINDS: dict[str, Callable[[str, random.Random], Any]] = {
    "sync": sync,
    "futures": futures,
    "streams": streams,
    "asyncio": asyncio_calls,
    "asyncio streams": asyncio_streams,
    "tritonclient": tritonclient_sync,
    "tritonclient aio": tritonclient_aio,
    "plain": plain,
    "waiting": waiting,
}

if __name__ == "__main__":
    kind, address, seed = sys.argv[1:]
    begun = KINDS[kind](address, random.Random(int(seed)))
    if begun is not None:
        asyncio.run(begun)
