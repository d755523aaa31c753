"""Many requests at once with futures, over HTTP and over gRPC."""

import os
from concurrent.futures import wait

import numpy as np

from pytriton.client import FuturesModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientQueueFullError
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


@batch
def square(value):
    return {"square": value**2}


config = TritonConfig(http_port=int(os.environ["PORT"]), grpc_port=int(os.environ["GRPC_PORT"]))
with Triton(config=config) as triton:
    triton.bind(
        model_name="square",
        infer_func=square,
        inputs=[Tensor(name="value", dtype=np.int64, shape=(1,))],
        outputs=[Tensor(name="square", dtype=np.int64, shape=(1,))],
        config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=2000)),
    )
    for url in (f"http://localhost:{config.http_port}", f"grpc://localhost:{config.grpc_port}"):
        with FuturesModelClient(url, "square", max_workers=16, max_queue_size=256) as client:
            futures = [client.infer_sample(np.array([number])) for number in range(100)]
            wait(futures, timeout=60)
            print(sum(int(future.result()["square"][0]) for future in futures))
            print(client.model_config().result().model_name)
    given = ModelClient(f"grpc://localhost:{config.grpc_port}", "square")
    with given, ModelClient.from_existing_client(given) as copy:
        print(copy.infer_batch(np.array([[5], [6]]))["square"].ravel())
    with FuturesModelClient(
        "localhost:1", "square", max_workers=1, max_queue_size=1, non_blocking=True, init_timeout_s=1
    ) as client:
        try:
            for _ in range(10):
                client.infer_sample(np.array([1]))
        except PyTritonClientQueueFullError as error:
            print("full:", str(error)[:13])
