"""What expressions come to in a model, told as texts."""

import concurrent.futures
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.config = json.loads(args["model_config"])

    def execute(self, requests):
        responses = []
        for request in requests:
            expressions = pb_utils.get_input_tensor_by_name(request, "EXPRESSION").as_numpy()
            scope = {**globals(), "self": self, "request": request, "requests": requests}
            results = [outcome(expression.decode(), scope) for expression in expressions]
            tensor = pb_utils.Tensor("RESULT", np.array(results, np.object_))
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses


def outcome(expression, scope):
    try:
        return told(eval(expression, scope))
    except TypeError:
        # The stub's list all signatures of what was called.
        return "TypeError"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def told(value):
    if isinstance(value, pb_utils.Tensor):
        place = "" if value.is_cpu() else " elsewhere"
        return f"Tensor {value.name()}{place} {data(value)}"
    if isinstance(value, pb_utils.InferenceResponse):
        if value.has_error():
            return f"Error {int(value.error().code())} {value.error().message()}"
        return f"Response {[told(tensor) for tensor in value.output_tensors()]}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)} {value.tolist()}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {[told(each) for each in value]}"
    if isinstance(value, (str, bytes, int, float, dict, set, type)) or value is None:
        return repr(value)
    return type(value).__name__


def data(tensor):
    try:
        return told(tensor.as_numpy())
    except pb_utils.TritonModelException as error:
        return f"TritonModelException: {error}"


def chain(*steps):
    """Give what the last of some steps comes to."""
    return steps[-1]


def caught(function):
    """Give the error of a function."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def until(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + 300
    while not condition():
        if time.monotonic() > end:
            return "never"
        time.sleep(0.01)
    return "at last"


def in_thread(function):
    """Give what a function returns in another thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def request_to(model, *inputs, outputs=("OUTPUT0",), **options):
    """Make a request to another model."""
    return pb_utils.InferenceRequest(
        model_name=model, inputs=list(inputs), requested_output_names=list(outputs), **options
    )
