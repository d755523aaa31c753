"""The model that the files of this folder deploy; put yours in its place."""

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators import Shape, model

Rows = Annotated[NDArray[np.float32], Shape("batch", -1)]


@model(batched=True, max_batch_size=64)
def softmax(logits: Rows) -> Rows:
    """Turn logits into probabilities, for every row of a batch."""
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)
