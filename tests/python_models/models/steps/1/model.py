"""Answers a request when it has come as often as it says, and puts it back into the queue until then."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.times = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        wanted = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()[0, 0])
        times = self.times[request.correlation_id()] = self.times.get(request.correlation_id(), 0) + 1
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[times, wanted]], np.int32))])
        if wanted < 0:
            # Both at once, which is wrong.
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return response
        if times < wanted:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        return response
