"""A decoupled model that does with the sender of a request what an expression says."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.threads = []

    def execute(self, requests):
        result = None
        for request in requests:
            command = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
            sender = request.get_response_sender()
            scope = {"self": self, "requests": requests, "request": request, "sender": sender, "send": sender.send}
            result = eval(command, {**globals(), **scope})
        return result

    def later(self, *steps):
        """Do steps in another thread, after `execute` has returned."""
        returned = threading.Event()
        thread = threading.Thread(target=lambda: (returned.wait(), [step() for step in steps]))
        self.threads.append(thread)
        thread.start()
        threading.Timer(0, returned.set).start()

    def finalize(self):
        for thread in self.threads:
            thread.join()


def response(*values, name="OUTPUT", **options):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array(values, np.float32))], **options)


def error(message, *code):
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, *code))


def caught(function):
    """Give the error of a function as a response."""
    try:
        function()
    except Exception as problem:
        return error(f"{type(problem).__name__}: {problem}")
    return error("no error")


def nothing(*steps):
    """Return nothing after some steps."""


def fail(problem):
    raise problem
