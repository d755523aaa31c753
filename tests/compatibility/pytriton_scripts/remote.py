"""One server, models bound from outside with RemoteTriton."""

import os
import threading

import numpy as np

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import RemoteTriton, Triton, TritonConfig

PORT = int(os.environ["PORT"])


@batch
def triple(value):
    return {"tripled": value * 3}


value, tripled = (Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in ("value", "tripled"))
with Triton(config=TritonConfig(http_port=PORT)) as triton:
    token = triton.get_access_token()
    with RemoteTriton(url=f"localhost:{PORT}", access_token=token) as remote:
        remote.bind(model_name="triple", infer_func=triple, inputs=[value], outputs=[tripled])
        thread = threading.Thread(target=remote.serve, kwargs={"monitoring_period_s": 0.1})
        thread.start()
        with ModelClient(f"localhost:{PORT}", "triple") as client:
            print(client.infer_sample(np.array([1, 2], np.float32))["tripled"])
        print(remote.is_alive(), remote.is_connected())
        remote.stop()
        thread.join(timeout=600)
        print(thread.is_alive(), remote.is_connected())
    print(triton.is_alive())
