"""Models for tests of Triton in process that need no function of the test's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["IDENTITY_CONFIG", "IDENTITY_SOURCE", "chain_config", "write_chain", "write_identity"]

IDENTITY_SOURCE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())]
            )
            for request in requests
        ]
"""

_TENSORS: dict[str, Any] = {
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
}

IDENTITY_CONFIG: dict[str, Any] = {"backend": "python", **_TENSORS}
"""Of a model that answers `y` = `x`, float32, any length."""


def chain_config(model: str) -> dict[str, Any]:
    """Return the configuration of an ensemble of one model with the same tensors, which loads in no time."""
    step = {"model_name": model, "model_version": -1, "input_map": {"x": "x"}, "output_map": {"y": "y"}}
    return {"platform": "ensemble", **_TENSORS, "ensemble_scheduling": {"step": [step]}}


def write_identity(repository: Path, name: str) -> None:
    """Write the identity model to a repository."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(IDENTITY_SOURCE)
    (folder.parent / "config.pbtxt").write_text(f'backend: "python"\n{_TENSORS_TEXT}')


def write_chain(repository: Path, name: str, model: str) -> None:
    """Write an ensemble of one model to a repository."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    step = 'model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }'
    (folder.parent / "config.pbtxt").write_text(
        f'platform: "ensemble"\n{_TENSORS_TEXT}'
        f"ensemble_scheduling {{ step {{ model_name: {json.dumps(model)} {step} }} }}\n"
    )


_TENSORS_TEXT = """max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
