"""The models as a `model.py` for Triton's Python backend, written the usual way: an answer per request."""

# Triton's module is there only inside a tritonserver.
# mypy: ignore-errors
import json
import time

import triton_python_backend_utils as pb_utils

from .models import load, spin


class TritonPythonModel:
    def initialize(self, args):
        (self.model,) = load(json.loads(args["model_config"])["parameters"]["bench"]["string_value"])

    def execute(self, requests):
        model = self.model
        rows = [
            [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in model.inputs]
            for request in requests
        ]
        if model.responses:
            return self.stream(requests, rows)
        if model.batch_us or model.row_us:
            time.sleep((model.batch_us + model.row_us * sum(len(row[0]) for row in rows)) / 1e6)
        if model.spin:
            spin(model.spin)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", sum(row[1:], row[0]))]) for row in rows]

    def stream(self, requests, rows):
        senders = [request.get_response_sender() for request in requests]
        for _ in range(self.model.responses):
            for sender, row in zip(senders, rows, strict=True):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", row[0])]))
        for sender in senders:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
