"""Calls `mirror` with several random inputs of a type, once for each seed, and tells what is not as it was sent."""

import numpy as np
import triton_python_backend_utils as pb_utils

NAMES = {"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64"}
SHAPES = [(1, 1), (1, 3), (2, 2), (0, 1), (7, 1)]
# Around the sizes of strings that need no memory of their own, with the four bytes of their length and without.
LENGTHS = [*range(34), 100, 5000]


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            kind = pb_utils.get_input_tensor_by_name(request, "KIND").as_numpy()[0].decode()
            seeds = pb_utils.get_input_tensor_by_name(request, "SEEDS").as_numpy()
            found = np.array([ask(kind, np.random.default_rng(seed)) for seed in seeds], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("FOUND", found)]))
        return responses


def ask(kind, random):
    sent = {f"{kind}_{number}": values(kind, random) for number in range(random.integers(1, 6))}
    response = pb_utils.InferenceRequest(
        model_name="mirror",
        inputs=[pb_utils.Tensor(name, array) for name, array in sent.items()],
        requested_output_names=[f"{name}_out" for name in sent],
    ).exec()
    if response.has_error():
        return f"error: {response.error().message()}"
    for name, array in sent.items():
        got = pb_utils.get_output_tensor_by_name(response, f"{name}_out").as_numpy()
        if got.shape != array.shape or got.tolist() != array.tolist():
            return f"{name} of {len(sent)}: sent {array.tolist()}, got {got.tolist()}"
    return "right"


def values(kind, random):
    shape = SHAPES[random.integers(len(SHAPES))]
    if kind == "STRING":
        array = np.empty(shape, np.object_)
        for place in np.ndindex(shape):
            array[place] = random.bytes(LENGTHS[random.integers(len(LENGTHS))])
        return array
    dtype = np.dtype(NAMES.get(kind, kind.lower()))
    if kind == "BOOL":
        return random.integers(0, 2, shape).astype(dtype)
    # Bytes of integers would be NaN in some, which equals nothing.
    return random.integers(0, 100, shape).astype(dtype)
