"""Waits until its request is cancelled, and leaves a file that tells so."""

import time
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(args["model_repository"])

    def execute(self, requests):
        (request,) = requests
        told = [request.is_cancelled()]
        (self.folder / "started").touch()
        end = time.monotonic() + 300
        while not request.is_cancelled() and time.monotonic() < end:
            time.sleep(0.001)
        told += [request.is_cancelled(), request.get_response_sender().is_cancelled()]
        (self.folder / "told.part").write_text(repr(told))
        (self.folder / "told.part").rename(self.folder / "told")
        value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)])]
