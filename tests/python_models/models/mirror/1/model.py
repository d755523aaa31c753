"""Answers with its inputs: several of every type, each of which may be left out."""

import triton_python_backend_utils as pb_utils

TYPES = [
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "STRING",
]


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(0)
        for kind in TYPES:
            for number in range(5):
                tensor = {"name": f"{kind}_{number}", "data_type": f"TYPE_{kind}", "dims": [-1, -1]}
                config.add_input({**tensor, "optional": True})
                config.add_output({**tensor, "name": f"{tensor['name']}_out"})
        return config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(f"{tensor.name()}_out", tensor.as_numpy()) for tensor in request.inputs()]
            )
            for request in requests
        ]
