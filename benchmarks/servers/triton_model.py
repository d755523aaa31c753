"""The models as a `model.py` for Triton's Python backend, written the usual way: an answer per request."""

# Triton's module is there only inside a tritonserver.
# mypy: ignore-errors
import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.delay_s = float(parameters["delay_s"]["string_value"])

    def execute(self, requests):
        if self.delay_s:
            time.sleep(self.delay_s)
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "a").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "b").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("total", a + b)]))
        return responses
