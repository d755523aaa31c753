"""Returns from `execute` whatever an expression comes to."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        command = pb_utils.get_input_tensor_by_name(requests[0], "COMMAND").as_numpy()[0].decode()
        ok = response(np.float32([1, 2]))
        return eval(command, globals(), {"self": self, "requests": requests, "ok": ok})


def response(array, name="OUTPUT"):
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, array)])


def error(message, *code):
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, *code))


def fail(error):
    raise error


def fail_below(depth):
    if depth:
        fail_below(depth - 1)
    raise RuntimeError("deep below")


class OwnError(Exception):
    pass


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError("cannot be told")
