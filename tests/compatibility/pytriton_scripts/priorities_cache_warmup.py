"""Model configuration: queue policies, priorities, response cache, warm-up."""

import os

import numpy as np

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.triton import Triton, TritonConfig

calls = []


@batch
def infer(value):
    calls.append(value.shape)
    return {"result": value + 1}


config = ModelConfig(
    batching=True,
    max_batch_size=8,
    batcher=DynamicBatcher(
        max_queue_delay_microseconds=500,
        preferred_batch_size=[4, 8],
        priority_levels=3,
        default_priority_level=2,
        default_queue_policy=QueuePolicy(
            timeout_action=TimeoutAction.REJECT,
            default_timeout_microseconds=5_000_000,
            allow_timeout_override=True,
            max_queue_size=64,
        ),
        priority_queue_policy={1: QueuePolicy(max_queue_size=16)},
    ),
    response_cache=True,
    model_warmup=[
        ModelWarmup(
            name="warm",
            batch_size=4,
            inputs={"value": WarmupInput(shape=(2,), dtype=np.float32, random_data=True)},
            count=2,
        )
    ],
)
settings = TritonConfig(cache_config=["local,size=1048576"])
with Triton(config=settings) as triton:
    triton.bind(
        model_name="infer",
        infer_func=infer,
        inputs=[Tensor(name="value", dtype=np.float32, shape=(2,))],
        outputs=[Tensor(name="result", dtype=np.float32, shape=(2,))],
        config=config,
    )
    print("warm-up:", calls)
    calls.clear()
    with ModelClient("localhost:" + os.environ["PORT"], "infer") as client:
        answers = [client.infer_sample(np.zeros(2, np.float32))["result"].tolist() for _ in range(10)]
        print(answers[0], len({tuple(answer) for answer in answers}))
        print("calls:", len(calls))
        print(client.infer_sample(np.ones(2, np.float32), parameters={"priority": 1})["result"])
