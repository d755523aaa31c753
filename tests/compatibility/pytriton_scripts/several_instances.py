"""One callable object per device, several models, sample and batch."""

import os
import threading

import numpy as np

from pytriton.client import ModelClient
from pytriton.decorators import batch, sample
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton


class Classifier:
    def __init__(self, device):
        self.device = device
        self.model = lambda values: values.sum(axis=1, keepdims=True)

    @batch
    def infer(self, **inputs):
        (values,) = inputs.values()
        return [self.model(values), np.full((len(values), 1), self.device, np.int32)]

    def __call__(self, requests):
        return [{"OUTPUT_1": self.model(r.data["INPUT_1"]), "OUTPUT_2": np.array([[self.device]])} for r in requests]


@sample
def shape_of(image):
    return {"shape": np.array(image.shape, np.int64)}


url = "localhost:" + os.environ["PORT"]
with Triton() as triton:
    for name, functions in {
        "methods": [Classifier(device).infer for device in range(2)],
        "objects": [Classifier(device) for device in range(2)],
    }.items():
        triton.bind(
            model_name=name,
            infer_func=functions,
            inputs=[Tensor(dtype=np.float32, shape=(3,))],
            outputs=[Tensor(dtype=np.float32, shape=(1,)), Tensor(dtype=np.int32, shape=(1,))],
            config=ModelConfig(max_batch_size=16, batcher=DynamicBatcher(max_queue_delay_microseconds=100)),
        )
    triton.bind(
        model_name="shape_of",
        infer_func=shape_of,
        inputs=[Tensor(name="image", dtype=np.uint8, shape=(-1, -1, 3))],
        outputs=[Tensor(name="shape", dtype=np.int64, shape=(-1,))],
        config=ModelConfig(batching=False),
        strict=True,
    )
    answers = {}

    def ask(number):
        name = "methods" if number % 2 else "objects"
        with ModelClient(url, name, lazy_init=False) as client:
            answers[number] = client.infer_sample(np.full(3, number, np.float32))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print([float(answers[number]["OUTPUT_1"][0]) for number in range(8)])
    print({int(answers[number]["OUTPUT_2"][0]) for number in range(8)} <= {0, 1})
    with ModelClient(url, "shape_of") as client:
        print(client.infer_sample(np.zeros((4, 5, 3), np.uint8))["shape"])
        print(client.is_batching_supported)
