"""Text in, text out."""

import os

import numpy as np

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

PORT = int(os.environ["PORT"])


@batch
def greet(name: np.ndarray):
    decoded = np.char.decode(name.astype("bytes"), "utf-8")
    upper = np.char.add("Hello, ", np.char.upper(decoded))
    return {"greeting": np.char.encode(upper, "utf-8"), "length": np.char.str_len(decoded).astype(np.int32)}


with Triton(config=TritonConfig(http_port=PORT, log_verbose=0)) as triton:
    triton.bind(
        model_name="greet",
        infer_func=greet,
        inputs=[Tensor(name="name", dtype=bytes, shape=(1,))],
        outputs=[Tensor(name="greeting", dtype=bytes, shape=(1,)), Tensor(name="length", dtype=np.int32, shape=(1,))],
        config=ModelConfig(max_batch_size=8),
    )
    names = np.char.encode(np.array([["Ada"], ["Łukasz"], ["京"]]), "utf-8")
    with ModelClient(f"localhost:{PORT}", "greet") as client:
        result = client.infer_batch(names)
        print([text.decode("utf-8") for text in result["greeting"].ravel()], result["length"].ravel().tolist())
        print(client.infer_sample(np.array([b"Bob"], dtype=object))["greeting"])
