"""Asks another model twice for each of its requests, all at once, in coroutines."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*(answer(request) for request in requests))


async def answer(request):
    value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
    await asyncio.sleep(0)
    if value[0, 0] < 0:
        raise ValueError("negative")
    # The other model has no such input.
    name = "none" if value[0, 0] == 0 else "fp32"
    total = 0
    for response in await asyncio.gather(*(ask(name, value * factor) for factor in (1, 10))):
        if response.has_error():
            return pb_utils.InferenceResponse(error=response.error())
        total = total + pb_utils.get_output_tensor_by_name(response, "fp32_out").as_numpy()
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total)])


def ask(name, value):
    return pb_utils.InferenceRequest(
        model_name="types", inputs=[pb_utils.Tensor(name, value)], requested_output_names=["fp32_out"]
    ).async_exec()
