"""The models as LitServe APIs that take and give raw bytes: one worker, one API server, its fast queue."""

# LitServe is not in the environment of the type checker.
# mypy: ignore-errors
import sys
from typing import Annotated

import litserve as ls
import numpy as np
from fastapi import Body, Response
from models import load

BATCH_TIMEOUT_S = 0.005


class Api(ls.LitAPI):
    def __init__(self, model):
        takes_time = model.batch_us or model.row_us
        batching = {"max_batch_size": model.max_batch_size, "batch_timeout": BATCH_TIMEOUT_S} if takes_time else {}
        super().__init__(api_path=f"/{model.name}", **batching)
        self.model = model

    def setup(self, device):
        pass

    def decode_request(self, request: Annotated[bytes, Body()]):
        return np.frombuffer(request, np.float32).reshape(len(self.model.inputs), 1, self.model.width)

    def batch(self, inputs):
        return np.concatenate(inputs, axis=1)

    def predict(self, x):
        return self.model.compute(x)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    apis = [Api(model) for model in load(sys.argv[1])]
    server = ls.LitServer(apis, accelerator="cpu", devices=1, workers_per_device=1, timeout=120, fast_queue=True)
    server.run("127.0.0.1", int(sys.argv[2]), num_api_servers=1, generate_client_file=False, log_level="warning")
