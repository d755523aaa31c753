"""What a Python model gets of another after it has given a request up: all that the other sends, as with Triton's."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.python_models import HEAD, TENSORS, infer, served, write

ASKED = (
    HEAD
    + """class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            listens = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0] == 1
            end = time.monotonic() + 300
            self.send(sender, 1)
            while not request.is_cancelled() and time.monotonic() < end:
                time.sleep(0.001)
            if listens:
                error = pb_utils.TritonError("nobody wants it", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                self.send(sender, 2)
                self.send(sender, 3)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, sender, value):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.float32([value]))]))
"""
)
# What it got: the values, minus the code of an error, and 0 for a response without outputs.
GIVES_UP = """
def told(response):
    if response.has_error():
        return -int(response.error().code())
    return float(response.output_tensors()[0].as_numpy()[0]) if response.output_tensors() else 0


def answer(found):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.float32(found))])


def request_for(request):
    return pb_utils.InferenceRequest(
        model_name="asked", inputs=request.inputs(), requested_output_names=["y"]
    )
"""
EXECUTE = """
    def execute(self, requests):
        (request,) = requests
        responses = request_for(request).exec(decoupled=True)
        found = []
        for response in responses:
            found.append(told(response))
            responses.cancel()
        return [answer(found)]
"""
EXECUTE_ASYNC = EXECUTE.replace("def execute", "async def execute").replace(
    "request_for(request).exec", "await request_for(request).async_exec"
)


@pytest.mark.parametrize("execute", [EXECUTE, EXECUTE_ASYNC], ids=["exec", "async_exec"])
def test_a_request_of_a_model_that_it_gives_up(tmp_path: Path, execute: str) -> None:
    decoupled = f'backend: "python"\n{TENSORS}\nmodel_transaction_policy {{ decoupled: true }}\n'
    write(tmp_path, "asked", ASKED, decoupled)
    write(tmp_path, "asks", f"{HEAD}{GIVES_UP}\n\nclass TritonPythonModel:{execute}")
    with served(tmp_path) as triton:
        # The number of the code is that of the enumeration of errors.
        cancelled = -7
        assert infer(triton, "asks", 1) == [1, cancelled]
        assert infer(triton, "asks", 2) == [1, 2, 3, 0]
