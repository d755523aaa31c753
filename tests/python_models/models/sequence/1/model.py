"""Adds up what comes in each sequence, and tells the controls that came with it."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        def control(name):
            return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0])

        controls = [control(name) for name in ("START", "END", "READY", "CORRID")]
        start, end, ready, sequence = controls
        if not ready:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.zeros((1, 5), np.int64))])
        if start:
            self.sums[sequence] = 0
        self.sums[sequence] += control("INPUT")
        told = pb_utils.Tensor("OUTPUT", np.array([[*controls, self.sums[sequence]]], np.int64))
        if end:
            del self.sums[sequence]
        return pb_utils.InferenceResponse([told])
