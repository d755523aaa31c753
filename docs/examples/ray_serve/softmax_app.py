"""A model as an application of Ray Serve: `serve run softmax_app:app`, or `pytriton serve softmax_app.py --ray auto`.

Both serve it on an existing Ray cluster; `two_nodes.py` tries it out on a cluster of two nodes on this machine.
"""

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators import Shape, model
from pytriton.model_config import DynamicBatcher
from pytriton.ray import application

Rows = Annotated[NDArray[np.float32], Shape("batch", -1)]


# A replica waits up to 5 ms for more requests before it calls the function.
@model(batched=True, max_batch_size=32, batcher=DynamicBatcher(max_queue_delay_microseconds=5000))
def softmax(logits: Rows) -> Rows:
    """Turn rows of logits into probabilities."""
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: NDArray[np.float32] = exp / exp.sum(axis=1, keepdims=True)
    return probabilities


app = application(softmax, num_replicas=2, ray_actor_options={"num_cpus": 1})
