"""A notebook's way: start in the background, ask, stop, bind something else, start again."""

import os

import numpy as np

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

PORT = int(os.environ["PORT"])


@batch
def add_sub(a_batch, b_batch):
    return {"add": a_batch + b_batch, "sub": a_batch - b_batch}


@batch
def multiply(a_batch, b_batch):
    return [a_batch * b_batch]


tensors = [
    Tensor(name="a_batch", dtype=np.float32, shape=(-1,)),
    Tensor(name="b_batch", dtype=np.float32, shape=(-1,)),
]
triton = Triton(config=TritonConfig(http_port=PORT))
triton.bind(
    model_name="Arithmetic",
    infer_func=add_sub,
    inputs=tensors,
    outputs=[Tensor(name="add", dtype=np.float32, shape=(-1,)), Tensor(name="sub", dtype=np.float32, shape=(-1,))],
    config=ModelConfig(max_batch_size=128),
)
triton.run()

a = np.array([[1, 2], [3, 4]], dtype=np.float32)
with ModelClient(f"localhost:{PORT}", "Arithmetic") as client:
    print(sorted(client.infer_batch(a, a).items()))
    print(client.model_config.max_batch_size, client.is_batching_supported)
print(triton.is_alive())
triton.stop()
print(triton.is_alive())

# The cells again, with another function.
triton.bind("Arithmetic", multiply, tensors, [Tensor(name="product", dtype=np.float32, shape=(-1,))])
triton.run()
with ModelClient(f"localhost:{PORT}", "Arithmetic") as client:
    print(client.infer_sample(a[0], a[1])["product"])
triton.stop()

triton = Triton(config=TritonConfig(http_port=PORT))
triton.bind("Arithmetic", multiply, tensors, [Tensor(name="product", dtype=np.float32, shape=(-1,))])
triton.run()
with ModelClient(f"http://localhost:{PORT}", "Arithmetic") as client:
    print(client.infer_sample(a_batch=a[0], b_batch=a[1]))
triton.stop()
