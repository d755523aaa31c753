"""Counts down, one step for each time that the request is put back into the queue."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START


class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            sequence = request.correlation_id()
            flags = request.flags()
            if flags & START:
                self.left[sequence] = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()[0, 0])
            left = self.left[sequence]
            self.left[sequence] -= 1
            if left < 0:
                raise ValueError("nothing to count")
            told = pb_utils.Tensor("OUTPUT", np.array([[left, flags]], np.int32))
            request.get_response_sender().send(pb_utils.InferenceResponse([told]), flags=0 if left else FINAL)
            if left:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return None
