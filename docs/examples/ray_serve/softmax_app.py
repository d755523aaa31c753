"""A Ray Serve deployment in which every replica has a Triton of its own, in its own process.

`serve run softmax_app:app` in this folder serves it on an existing Ray cluster; `two_nodes.py` tries it out on a
cluster of two nodes on this machine. Ray starts the replicas, spreads requests over them and replaces those that die;
Triton joins the requests that reach one replica at the same time into one call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray import serve
from starlette.requests import Request

from pytriton import inprocess
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

START_TIMEOUT_S = 120.0
# As many requests as one replica is given before Ray asks another one, or lets callers wait.
MAX_ONGOING_REQUESTS = 64


@batch
def softmax(logits: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    """Turn rows of logits `(rows, classes)` into probabilities of the same shape."""
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    return {"probabilities": exp / exp.sum(axis=1, keepdims=True)}


@serve.deployment(num_replicas=2, max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 1})
class Softmax:
    """One replica: a server, and a model that is bound to it."""

    def __init__(self) -> None:
        self._server = inprocess.Server()
        self._server.start(wait_until_ready=True, timeout=START_TIMEOUT_S)
        self._model = self._server.bind(
            "softmax",
            softmax,
            inputs=[Tensor(name="logits", dtype=np.float32, shape=(-1,))],
            outputs=[Tensor(name="probabilities", dtype=np.float32, shape=(-1,))],
            # A replica waits up to 5 ms for more requests before it calls the function.
            config=ModelConfig(max_batch_size=32, batcher=DynamicBatcher(max_queue_delay_microseconds=5000)),
        )

    async def __call__(self, request: Request) -> list[float]:
        """Answer an HTTP request with a JSON list of numbers in its body."""
        return await self.predict(await request.json())

    async def predict(self, logits: list[float]) -> list[float]:
        """Answer one caller; Triton joins those who ask at the same time."""
        row = np.array([logits], dtype=np.float32)
        response = await anext(self._model.async_infer(inputs={"logits": row}))
        found: list[float] = np.from_dlpack(response.outputs["probabilities"])[0].tolist()
        return found

    async def statistics(self) -> dict[str, Any]:
        """Tell where this replica runs and what its Triton has done: requests, and calls of the function."""
        (found,) = self._model.statistics()["model_stats"]
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "requests": found["inference_count"],
            "calls": found["execution_count"],
        }

    def check_health(self) -> None:
        """Ray asks this every ten seconds, and replaces a replica that raises."""
        if not self._server.ready():
            raise RuntimeError("Triton is not ready")

    def __del__(self) -> None:
        """Ray calls this when a replica ends, after its last request."""
        self._server.stop()


app = Softmax.bind()  # type: ignore[attr-defined]
