"""What a model sends to another and gets back, whatever its type and size."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.python_models.pair import Pair, Side, text

CALLS = 60
KINDS = [
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "STRING",
]


def test_calls_with_several_inputs_of_every_type(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        answers = {}
        for kind in KINDS:
            inputs = {"KIND": text(kind), "SEEDS": np.arange(CALLS * (10 if kind == "STRING" else 1))}
            answers[kind] = side.infer("calling", inputs)
        return answers

    with pair.loaded("mirror", "calling"):
        answers = pair.compare(ask)
    for kind in KINDS:
        assert set(answers[kind]["outputs"]["FOUND"]["data"]) == {"right"}, kind
