"""Decoupled models: a generator, one under `batch`, an asynchronous one; both decoupled clients."""

import asyncio
import logging
import os

import numpy as np

from pytriton.client import AsyncioDecoupledModelClient, DecoupledModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

logging.basicConfig(level=logging.WARNING)
GRPC = int(os.environ["GRPC_PORT"])


def count(requests):
    (request,) = requests
    for number in range(int(request.data["limit"][0, 0])):
        yield [{"number": np.array([[number]], np.int32)}]


@batch
def count_batch(limit):
    for number in range(int(limit.max())):
        yield {"number": np.full((len(limit), 1), number, np.int32)}


async def count_slowly(requests):
    (request,) = requests
    for number in range(int(request["limit"][0, 0])):
        await asyncio.sleep(0.001)
        yield [{"number": np.array([[number * 10]], np.int32)}]


async def ask_all(url):
    async with AsyncioDecoupledModelClient(url, "count_slowly") as client:
        return [int(part["number"][0]) async for part in client.infer_sample(limit=np.array([4], np.int32))]


with Triton(config=TritonConfig(grpc_port=GRPC)) as triton:
    for function in (count, count_batch, count_slowly):
        triton.bind(
            model_name=function.__name__,
            infer_func=function,
            inputs=[Tensor(name="limit", dtype=np.int32, shape=(1,))],
            outputs=[Tensor(name="number", dtype=np.int32, shape=(1,))],
            config=ModelConfig(decoupled=True, max_batch_size=4),
        )
    url = f"grpc://localhost:{GRPC}"
    for name in ("count", "count_batch"):
        with DecoupledModelClient(url, name) as client:
            print([int(part["number"][0]) for part in client.infer_sample(np.array([3], np.int32))])
            print([part["number"].tolist() for part in client.infer_batch(np.array([[2]], np.int32))])
    print(asyncio.run(ask_all(url)))
