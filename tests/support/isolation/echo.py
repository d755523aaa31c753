"""A model that turns texts back to front, leaves numbers as they are, and says how many requests it had at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

TEXTS = ("text", "words")
SHAPES: dict[str, tuple[int, ...]] = {"text": (-1,), "words": (-1, 2), "number": (-1,), "half": (-1,)}
"""The inputs, each of which may be left out, without the batch axis."""
DTYPES = {
    "text": np.dtype(object),
    "words": np.dtype(object),
    "number": np.dtype(np.int32),
    "half": np.dtype(np.float16),
}


SERVED = {"served": np.dtype(np.int32), "ids": np.dtype(object)}
"""Further outputs, of one element: how many requests, or rows, were served together, and which."""
RAISE, REFUSE = b"raise!", b"refuse!"


def echo(inputs: Mapping[str, Any], served: int, ids: bytes = b"") -> dict[str, Any]:
    """Answer one request, or all rows of several. Of an input that did not come the output is empty."""
    [rows] = {len(array) for array in inputs.values()}
    outputs: dict[str, Any] = {"served": np.full((rows, 1), served, np.int32), "ids": np.full((rows, 1), None, object)}
    outputs["ids"][...] = ids
    for name, dtype in DTYPES.items():
        empty = tuple(max(size, 0) for size in SHAPES[name])
        array = inputs.get(name, np.empty((rows, *empty), dtype))
        if name in TEXTS:
            turned = np.empty(array.size, object)
            turned[:] = [element[::-1] for element in array.ravel()]
            array = turned.reshape(array.shape)
        outputs[f"{name}_out"] = array
    return outputs


def echo_all(requests: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Answer requests by their ids; as their texts say, one with an error, or none."""
    ids = ",".join(requests).encode()
    texts = {id: inputs["text"].ravel().tolist() if "text" in inputs else [] for id, inputs in requests.items()}
    if any(RAISE in each for each in texts.values()):
        raise ValueError(f"raised with {ids.decode()};")
    return [
        ValueError(f"refused {id};") if REFUSE in texts[id] else echo(inputs, len(requests), ids)
        for id, inputs in requests.items()
    ]
