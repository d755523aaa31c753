"""The model of `bench variable` as a `model.py` of Triton's Python backend, which pads what its batcher gathers."""

# Triton's module is there only inside a tritonserver.
# mypy: ignore-errors
import triton_python_backend_utils as pb_utils

from .ragged import Encoder


class TritonPythonModel:
    def initialize(self, args):
        self.encoder = Encoder()

    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "tokens").as_numpy() for request in requests]
        pooled = self.encoder.of(texts)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("pooled", row[None])]) for row in pooled]
