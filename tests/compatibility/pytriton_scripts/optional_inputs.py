"""Inputs that may be left out, and values that must be equal in a batch."""

import os

import numpy as np

from pytriton.client import ModelClient
from pytriton.decorators import batch, fill_optionals, first_value, group_by_keys, group_by_values, triton_context
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton

url = "localhost:" + os.environ["PORT"]


@group_by_keys
@batch
def either(**inputs):
    names = "+".join(sorted(inputs))
    size = len(next(iter(inputs.values())))
    return {"used": np.array([[names.encode()]] * size, dtype=object)}


@fill_optionals(factor=np.array([2.0], np.float32))
@batch
def scale(value, factor):
    return {"scaled": value * factor}


@batch
@group_by_values("steps")
@first_value("steps")
def repeat(value, steps):
    return {"repeated": np.tile(value, (1, int(steps)))}


@triton_context
@batch
def configured(value, triton_context):
    limits = {config.max_batch_size for config in triton_context.model_configs.values()}
    return {"limit": np.full((len(value), 1), max(limits), np.int32)}


def tensor(name, dtype=np.float32, shape=(1,), optional=False):
    return Tensor(name=name, dtype=dtype, shape=shape, optional=optional)


delay = ModelConfig(max_batch_size=16, batcher=DynamicBatcher(max_queue_delay_microseconds=1000))
with Triton() as triton:
    triton.bind(
        "either",
        either,
        [tensor("a", optional=True), tensor("b", optional=True)],
        [tensor("used", bytes)],
        config=delay,
    )
    triton.bind("scale", scale, [tensor("value"), tensor("factor", optional=True)], [tensor("scaled")], config=delay)
    triton.bind(
        "repeat", repeat, [tensor("value"), tensor("steps", np.int32)], [tensor("repeated", shape=(-1,))], config=delay
    )
    triton.bind("configured", configured, [tensor("value")], [tensor("limit", np.int32)], config=delay)
    one = np.array([1.5], np.float32)
    with ModelClient(url, "either") as client:
        print(client.infer_sample(a=one)["used"], client.infer_sample(a=one, b=one)["used"])
    with ModelClient(url, "scale") as client:
        print(client.infer_sample(value=one)["scaled"], client.infer_sample(value=one, factor=one)["scaled"])
    with ModelClient(url, "repeat") as client:
        print(client.infer_sample(one, np.array([3], np.int32))["repeated"])
    with ModelClient(url, "configured") as client:
        print(client.infer_sample(one)["limit"])
