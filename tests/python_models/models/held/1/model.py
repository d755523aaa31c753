"""A model that says when it begins and when it ends, and lets nobody go before a file is there."""

import os
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]

    def execute(self, requests):
        self.note("begin")
        while not os.path.exists(os.path.join(self.folder, "go")):
            time.sleep(0.01)
        self.note("end")
        values = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)]) for value in values]

    def note(self, event):
        with open(os.path.join(self.folder, "log"), "a") as file:
            file.write(f"{event}\n")
