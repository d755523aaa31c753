"""An asyncio client, as in a web application."""

import asyncio
import os

import numpy as np

from pytriton.client import AsyncioModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton


@batch
async def halve(value):
    await asyncio.sleep(0)
    if (value < 0).any():
        raise ValueError("only positive numbers")
    return {"half": value / 2}


async def main(url):
    async with AsyncioModelClient(url, "halve") as client:
        results = await asyncio.gather(*[client.infer_sample(np.array([n], np.float32)) for n in range(20)])
        print(sum(float(result["half"][0]) for result in results))
        config = await client.model_config
        print(config.model_name, config.max_batch_size)
        try:
            await client.infer_batch(np.array([[-1]], np.float32))
        except PyTritonClientInferenceServerError as error:
            print("only positive numbers" in str(error))
    client = AsyncioModelClient(url.replace("localhost", "http://127.0.0.1"), "halve", lazy_init=False)
    async with client:
        await client.wait_for_model(timeout_s=10)
        print(await client.infer_sample(value=np.array([3], np.float32)))


with Triton() as triton:
    triton.bind(
        "halve",
        halve,
        [Tensor(name="value", dtype=np.float32, shape=(1,))],
        [Tensor(name="half", dtype=np.float32, shape=(1,))],
        config=ModelConfig(max_batch_size=8),
    )
    asyncio.run(main("localhost:" + os.environ["PORT"]))
