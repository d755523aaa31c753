"""`execute` with batches that a scripted proxy backend sends: what models see, and what becomes of what they return."""

import gc
import struct
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from pytriton.proxy_backend.errors import ArenaFullError
from pytriton.proxy_backend.python_models.execution import Execution
from pytriton.proxy_backend.wire.record import Record
from pytriton.proxy_backend.wire.response import ResponseData, ResponseWriter
from support.waiting import eventually

pytestmark = pytest.mark.usefixtures("both_ways")
Serve = Callable[..., Any]
FINAL, ERROR, EMPTY, RESCHEDULE, CONTINUES = 1, 2, 4, 8, 16
INPUT_RELEASED, BATCH_DONE = 1, 2
INTERNAL, UNSUPPORTED = 1, 5

DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("y", x.as_numpy() * 2)]))
        return responses
"""


def record(
    golden: ModuleType, number: int, *rows: list[float], outputs: tuple[str, ...] = ("y",), **fields: Any
) -> bytes:
    """A batch of one request per list, whose input x has shape (1, len)."""
    requests = [golden.Request(outputs=list(outputs), **fields) for _ in rows]
    payload = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
    tensor = golden.Tensor("x", golden.FP32, [len(rows), len(rows[0])], payload)
    return bytes(golden.batch_record(number, requests, [tensor]))


def strings(golden: ModuleType, number: int, *elements: bytes) -> bytes:
    """A batch of one request, whose input x has shape (1, elements)."""
    payload = b"".join(struct.pack("<I", len(element)) + element for element in elements)
    tensor = golden.Tensor("x", 13, [1, len(elements)], payload)
    return bytes(golden.batch_record(number, [golden.Request(outputs=["y"])], [tensor]))


def ask(peer: Any, raw: bytes, number: int) -> list[Any]:
    """Sends a batch and reads the responses to it."""
    peer.batch(number, raw)
    packet = peer.answer()
    assert packet.batch == number
    assert packet.flags & BATCH_DONE
    return list(peer.responses(packet))


TWO = {0: [[1.0]], 1: [[2.0]]}


def answers_of(peer: Any, count: int) -> dict[int, Any]:
    """Reads so many responses, in however many packets they come."""
    found: dict[int, Any] = {}
    while len(found) < count:
        found.update({response.request: response for response in peer.responses(peer.answer())})
    return found


def error_of(peer: Any, golden: ModuleType, number: int = 7) -> str:
    """The error that every request of a batch of two gets."""
    found = ask(peer, record(golden, number, [1.0], [2.0]), number)
    assert [(response.flags, response.code) for response in found] == [(FINAL | ERROR, INTERNAL)] * 2
    assert found[0].error == found[1].error
    return str(found[0].error)


def model(body: str, head: str = "") -> str:
    """A model whose `execute` has a body."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"""
import asyncio, threading
import numpy as np
import triton_python_backend_utils as pb_utils
from triton_python_backend_utils import InferenceResponse, Tensor, TritonError, get_input_tensor_by_name
{head}

class TritonPythonModel:
    def execute(self, requests):
{lines}
"""


# ---- what is plain ---------------------------------------------------------------------------------------------------


def test_batches_are_answered_request_by_request(serve: Serve, golden: ModuleType) -> None:
    peer = serve(DOUBLE)
    for number in range(1, 5):
        found = ask(peer, record(golden, number, [1.0, 2.0], [3.0, 4.0], [5.0, number]), number)
        assert [response.request for response in found] == [0, 1, 2]
        assert [response.outputs["y"].tolist() for response in found] == [[[2, 4]], [[6, 8]], [[10, 2 * number]]]
    assert peer.worker.statistics.requests == 12


def test_inputs_go_back_with_the_answer(serve: Serve, golden: ModuleType) -> None:
    peer = serve(model("return [InferenceResponse([Tensor('y', r.inputs()[0].as_numpy())]) for r in requests]"))
    for number in range(1, 4):
        peer.batch(number, record(golden, number, [1.0], [2.0]))
        packet = peer.answer()
        assert packet.flags == INPUT_RELEASED | BATCH_DONE
        assert [response.outputs["y"].tolist() for response in peer.responses(packet)] == [[[1.0]], [[2.0]]]
    assert peer.released == []


def test_inputs_that_are_kept_go_back_later(serve: Serve, golden: ModuleType) -> None:
    body = "kept[:] = [r.inputs()[0].as_numpy() for r in requests]\nreturn [InferenceResponse() for r in requests]"
    peer = serve(model(body, "kept = []"))
    peer.batch(1, record(golden, 1, [1.0]))
    assert peer.answer().flags == BATCH_DONE
    peer.batch(2, record(golden, 2, [2.0]))
    peer.answer()
    assert peer.released == [(1, 0)]


def test_a_model_without_a_batch_axis(serve: Serve, golden: ModuleType) -> None:
    peer = serve(DOUBLE, config={"max_batch_size": 0})
    for number in range(1, 4):
        tensor = golden.Tensor("x", golden.FP32, [2], struct.pack("<2f", 1.0, number))
        raw = golden.batch_record(number, [golden.Request(outputs=["y"])], [tensor])
        [response] = ask(peer, bytes(raw), number)
        assert response.outputs["y"].tolist() == [2, 2 * number]


def test_strings(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""x = get_input_tensor_by_name(requests[0], 'x').as_numpy()
assert x.dtype == np.object_ and all(type(element) is bytes for element in x.flat)
y = np.array([[element + b'!' for element in x.flat] + ['ä', 1.5, None]], dtype=object)
return [InferenceResponse([Tensor('y', y)])]""")
    )
    for number in range(1, 4):
        [response] = ask(peer, strings(golden, number, b"a", b"", b"\xff\0"), number)
        assert response.outputs["y"].tolist() == [[b"a!", b"!", b"\xff\0!", "ä".encode(), b"1.5", b"None"]]


def test_bf16_goes_through_dlpack(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""x = get_input_tensor_by_name(requests[0], 'x')
assert x.triton_dtype() == 14
try:
    x.as_numpy()
except pb_utils.TritonModelException as error:
    assert 'BF16' in str(error)
return [InferenceResponse([Tensor.from_dlpack('y', x.to_dlpack())])]""")
    )
    tensor = golden.Tensor("x", 14, [1, 2], b"\1\2\3\4")
    for number in range(1, 4):
        raw = golden.batch_record(number, [golden.Request(outputs=["y"])], [tensor])
        peer.batch(number, bytes(raw))
        packet = peer.answer()
        content = peer.outputs[packet.segment][packet.offset : packet.offset + packet.length]
        assert b"\1\2\3\4" in content


# ---- what requests say -----------------------------------------------------------------------------------------------


def test_requests_say_what_came_with_them(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""global seen
r = requests[0]
seen = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters(), sorted(r.requested_output_names()),
        r.trace().get_context(), r.is_cancelled(), [t.name() for t in r.inputs()], r.inputs()[0].shape()]
return [InferenceResponse(parameters={'seen': repr(seen)})]""")
    )
    fields = {"id": "one", "flags": 3, "correlation_id": 42, "timeout_us": 9, "parameters": {"a": 1, "b": "é"}}
    [response] = ask(peer, record(golden, 1, [1.0, 2.0], outputs=("y", "z"), **fields), 1)
    expected = ["one", 42, 3, 9, '{"a":1,"b":"é"}', ["y", "z"], None, False, ["x"], [1, 2]]
    assert response.parameters == {"seen": repr(expected)}
    assert response.outputs == {}


def test_outputs_that_are_not_wanted_or_not_there_are_left_out(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""x = requests[0].inputs()[0].as_numpy()
return [InferenceResponse([Tensor('y', x), Tensor('other', x)])]""")
    )
    for number in range(1, 4):
        [response] = ask(peer, record(golden, number, [1.0], outputs=("y", "z")), number)
        assert list(response.outputs) == ["y"]


def test_outputs_that_are_not_declared_are_told_of_once(
    serve: Serve, golden: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    peer = serve(model("return [InferenceResponse([Tensor('Y', np.zeros(1)), Tensor('Z', np.zeros(1))])]"))
    for number in range(1, 4):
        [response] = ask(peer, record(golden, number, [1.0]), number)
        assert response.outputs == {}
    [text] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "outputs that its configuration has not (Y, Z), which are dropped: expected y, z. This is said once." in text


def test_numbers_in_another_byte_order_are_sent_right(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""found = []
for dtype in ('>f4', '>f8', '>i2', '>u8', '>f2'):
    tensor = Tensor('y', np.arange(3).astype(dtype))
    assert tensor.as_numpy().dtype.isnative and tensor.as_numpy().tolist() == [0, 1, 2]
return [InferenceResponse([Tensor('y', np.array([[1, 2]], '>f4'))])]""")
    )
    for number in range(1, 4):
        [response] = ask(peer, record(golden, number, [1.0]), number)
        assert response.outputs["y"].tolist() == [[1.0, 2.0]]


def test_a_text_that_cannot_be_encoded_is_the_matter_of_its_request_alone(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""responses = []
for text in ('right', 'cut \\ud83d'):
    try:
        tensor = Tensor('y', np.array([[text]], np.object_))
    except UnicodeEncodeError as error:
        responses.append(InferenceResponse(error=TritonError(f'no text: {error.reason}', TritonError.INVALID_ARG)))
    else:
        responses.append(InferenceResponse([tensor]))
return responses""")
    )
    for number in range(1, 4):
        right, cut = ask(peer, record(golden, number, [1.0], [2.0]), number)
        assert right.outputs["y"].tolist() == [[b"right"]]
        assert cut.error == "no text: surrogates not allowed"


def test_the_error_of_such_a_text_names_the_line_of_the_model(serve: Serve, golden: ModuleType) -> None:
    peer = serve(model("x = 5\nreturn [InferenceResponse([Tensor('y', np.array(['\\udc80'], np.object_))])] * 2"))
    error = error_of(peer, golden)
    assert "UnicodeEncodeError: 'utf-8' codec can't encode character '\\udc80' in position 0" in error
    assert error.count("model.py(") == 1
    assert error.endswith(": execute\n")
    assert "worker" not in error


def test_a_capsule_holds_its_tensor(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model(
            """y = Tensor('y', np.float32([[1]]))
for make in (Tensor.to_dlpack, np.from_dlpack):
    before = sys.getrefcount(y)
    held = make(y)
    assert sys.getrefcount(y) == before + 1
    del held
    assert sys.getrefcount(y) == before
return [InferenceResponse([y])]""",
            "import sys",
        )
    )
    [response] = ask(peer, record(golden, 1, [1.0]), 1)
    assert response.outputs["y"].tolist() == [[1.0]]


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 5", "Expected a list in the execute return, found type '<class 'int'>'."),
        (
            "return [InferenceResponse()]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:1\n",
        ),
        (
            "return [InferenceResponse(), 'x']",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'.",
        ),
        (
            "requests[1].get_response_sender().send(InferenceResponse())\nreturn [InferenceResponse()] * 2",
            "Unable to send response. Non-decoupled model cannot send more than one response.",
        ),
    ],
    ids=["no list", "number", "type", "twice"],
)
def test_what_execute_may_not_return(serve: Serve, golden: ModuleType, body: str, message: str) -> None:
    peer = serve(model(body))
    whole = f"Failed to process the request(s) for model 'model_0_0', message: {message}"
    if "sender" not in body:
        assert error_of(peer, golden) == whole
        assert error_of(peer, golden, 8) == whole
        return
    peer.batch(7, record(golden, 7, [1.0], [2.0]))
    # One request has its response by the sender.
    [sent] = peer.responses(peer.answer())
    assert (sent.request, sent.flags) == (1, FINAL)
    [failed] = peer.responses(peer.answer())
    assert (failed.request, failed.error) == (0, whole)


def test_failures_are_told_of_with_their_requests(
    serve: Serve, golden: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    peer = serve(model("raise ValueError(float(requests[0].inputs()[0].as_numpy()[0, 0]))"))
    for number in range(1, 16):
        ask(peer, record(golden, number, [number], [2.0], id=f"id-{number}"), number)
    told = [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"]
    assert len(told) == 10
    begin = "model model_0_0: execute failed, requests id-1, id-1: ValueError: 1.0"
    assert told[0].startswith(begin + "\n")
    assert peer.worker.statistics.failed_requests["callable"] == 30


def test_errors_that_a_model_returns_are_counted(serve: Serve, golden: ModuleType) -> None:
    body = "return [InferenceResponse(error=TritonError('no')), InferenceResponse([Tensor('y', np.zeros(1, 'f'))])]"
    peer = serve(model(body))
    ask(peer, record(golden, 1, [1.0], [2.0]), 1)
    assert peer.worker.statistics.failed_requests["returned"] == 1


def test_a_stream_counts_its_first_response_and_one_error(serve: Serve, golden: ModuleType) -> None:
    body = (
        "for request in requests:\n"
        "    sender = request.get_response_sender()\n"
        "    if request.inputs()[0].as_numpy()[0, 0] == 1:\n"
        "        sender.send(InferenceResponse([Tensor('y', np.zeros(1, 'f'))]))\n"
        "    sender.send(InferenceResponse(error=TritonError('no')))\n"
        "    sender.send(InferenceResponse(error=TritonError('no')))\n"
        "    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"
    )
    peer = serve(model(body), config={"model_transaction_policy": {"decoupled": True}}, capabilities=3 | 32)
    peer.batch(1, record(golden, 1, [1.0], [2.0]))
    found = peer.worker.statistics
    eventually(lambda: peer.worker.statistics.failed_requests["returned"] == 2)
    assert peer.worker.statistics.first_response_seconds.count == 1
    assert found.requests <= 2


def test_an_error_has_its_place(serve: Serve, golden: ModuleType) -> None:
    peer = serve(model("helper(requests)", "def helper(requests):\n    raise ValueError('no such thing')"))
    text = error_of(peer, golden)
    begin = "Failed to process the request(s) for model 'model_0_0', message: ValueError: no such thing\n\nAt:\n"
    assert text.startswith(begin)
    lines = text.removeprefix(begin).splitlines()
    assert [line.partition("): ")[2] for line in lines] == ["helper", "execute"]
    assert all("/model/1/model.py(" in line for line in lines)


def test_what_ends_a_program_ends_a_batch(serve: Serve, golden: ModuleType) -> None:
    peer = serve(model("raise SystemExit(3)"))
    assert "message: SystemExit: 3\n\nAt:\n" in error_of(peer, golden)
    assert "message: SystemExit: 3\n\nAt:\n" in error_of(peer, golden, 8)


def test_what_the_utilities_refuse_is_an_error_of_the_model(serve: Serve, golden: ModuleType) -> None:
    peer = serve(model("Tensor('', np.zeros(1))"))
    text = error_of(peer, golden)
    assert "message: TritonModelException: Tensor name cannot be an empty string.\n\nAt:\n" in text
    assert [line.partition("): ")[2] for line in text.splitlines()[3:]] == ["execute"]


def test_a_model_without_execute(serve: Serve, golden: ModuleType) -> None:
    peer = serve("class TritonPythonModel:\n    pass")
    text = error_of(peer, golden)
    assert text.startswith("Failed to process the request(s) for model 'model_0_0', message: Python model /")
    assert text.endswith("/model/1/model.py does not implement `execute` method.")


def test_each_request_may_have_an_error_of_its_own(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""x = requests[0].inputs()[0].as_numpy()
return [InferenceResponse([Tensor('y', x)]), InferenceResponse(error=TritonError('mine')),
        InferenceResponse([Tensor('y', x)], TritonError('not now', TritonError.UNAVAILABLE))]""")
    )
    for number in range(1, 4):
        found = ask(peer, record(golden, number, [1.0], [2.0], [3.0]), number)
        assert [(response.flags & ERROR, response.code, response.error) for response in found] == [
            (0, 1, ""), (ERROR, 1, "mine"), (ERROR, 4, "not now"),
        ]  # fmt: skip
        assert found[0].outputs["y"].tolist() == [[1.0]]


# ---- other ways to answer --------------------------------------------------------------------------------------------


def test_execute_may_be_a_coroutine(serve: Serve, golden: ModuleType) -> None:
    source = model(
        "await asyncio.sleep(0)\nreturn [InferenceResponse([Tensor('y', r.inputs()[0].as_numpy())]) for r in requests]"
    )
    peer = serve(source.replace("def execute", "async def execute"))
    for number in range(1, 4):
        found = ask(peer, record(golden, number, [1.0], [2.0]), number)
        assert [response.outputs["y"].tolist() for response in found] == [[[1.0]], [[2.0]]]


def test_a_response_sender_answers_after_execute(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""def answer(request, go):
    go.wait()
    request.get_response_sender().send(InferenceResponse([Tensor('y', request.inputs()[0].as_numpy())]), 1)
global go
go = threading.Event()
for request in requests:
    threading.Thread(target=answer, args=(request, go)).start()
go.set()
return None""")
    )
    for number in range(1, 4):
        peer.batch(number, record(golden, number, [1.0], [2.0]))
        found: dict[int, Any] = {}
        while len(found) < 2:
            packet = peer.answer()
            found.update({response.request: response.outputs["y"].tolist() for response in peer.responses(packet)})
        assert packet.flags & BATCH_DONE
        assert found == {0: [[1.0]], 1: [[2.0]]}


def test_a_request_that_is_let_go_without_a_response_is_answered(serve: Serve, golden: ModuleType) -> None:
    peer = serve(model("return [None, InferenceResponse()]"))
    for number in range(1, 4):
        peer.batch(number, record(golden, number, [1.0], [2.0]))
        found: list[Any] = []
        while len(found) < 2:
            found += peer.responses(peer.answer())
        [lost] = [response for response in found if response.flags & ERROR]
        assert lost.request == 0
        assert "request 0 of a batch of 2 got no last response: expected one in the list" in lost.error


def test_a_decoupled_model_answers_as_often_as_it_likes(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""for request in requests:
    sender = request.get_response_sender()
    for value in (1, 2):
        sender.send(InferenceResponse([Tensor('y', np.array([[value]], np.int32)), Tensor('z', np.zeros(1))]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    try:
        sender.send(InferenceResponse())
    except pb_utils.TritonModelException as error:
        assert str(error) == 'Unable to send response. Response sender has been closed.'"""),
        config={"model_transaction_policy": {"decoupled": True}},
    )
    peer.batch(1, record(golden, 1, [1.0], [2.0]))
    found = []
    while True:
        packet = peer.answer()
        found += [(r.request, r.flags, {n: a.tolist() for n, a in r.outputs.items()}) for r in peer.responses(packet)]
        if packet.flags & BATCH_DONE:
            break
    assert found == [
        entry
        for request in (0, 1)
        for entry in ((request, 0, {"y": [[1]]}), (request, 0, {"y": [[2]]}), (request, FINAL | EMPTY, {}))
    ]


@pytest.mark.parametrize("capabilities", [3, 3 | 32])
def test_more_may_come_after_an_error(serve: Serve, golden: ModuleType, capabilities: int) -> None:
    source = model("""sender = requests[0].get_response_sender()
sender.send(InferenceResponse(error=TritonError('first')))
sender.send(InferenceResponse(parameters={'a': 1}))
sender.send(InferenceResponse(error=TritonError('last')), 1)""")
    peer = serve(source, config={"model_transaction_policy": {"decoupled": True}}, capabilities=capabilities)
    peer.batch(1, record(golden, 1, [1.0]))
    found: list[Any] = []
    while True:
        packet = peer.answer()
        found += [(response.flags, response.error, response.parameters) for response in peer.responses(packet)]
        if packet.flags & BATCH_DONE:
            break
    if capabilities == 3:
        assert found == [(FINAL | ERROR, "first", {})]
    else:
        assert found == [(ERROR | CONTINUES, "first", {}), (0, "", {"a": 1}), (FINAL | ERROR, "last", {})]


def test_a_decoupled_model_returns_nothing(serve: Serve, golden: ModuleType) -> None:
    peer = serve(model("return [InferenceResponse()] * 2"), config={"model_transaction_policy": {"decoupled": True}})
    assert error_of(peer, golden) == (
        "Failed to process the request(s) for model 'model_0_0', message: Python model 'model_0_0' is using the "
        "decoupled mode and the execute function must return None."
    )


def test_batches_of_a_decoupled_model_overlap(serve: Serve, golden: ModuleType) -> None:
    source = model(
        """kept.append(requests[0])
if len(kept) == 2:
    for request in kept:
        request.get_response_sender().send(InferenceResponse([Tensor('y', request.inputs()[0].as_numpy())]), 1)
    kept.clear()""",
        "kept = []",
    )
    peer = serve(source, config={"model_transaction_policy": {"decoupled": True}})
    assert struct.unpack_from("<I", peer.hello.body, 20)[0] > 1  # max_in_flight
    peer.batch(1, record(golden, 1, [1.0]))
    peer.batch(2, record(golden, 2, [2.0]))
    found = {}
    for _ in range(2):
        packet = peer.answer()
        [response] = peer.responses(packet)
        found[packet.batch] = response.outputs["y"].tolist()
    assert found == {1: [[1.0]], 2: [[2.0]]}


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_next_batch_may_come_when_execute_returns(serve: Serve, golden: ModuleType, decoupled: bool) -> None:
    executed, executing = 16, 8  # a message, and a flag
    source = model("""sender = requests[0].get_response_sender()
if requests[0].request_id() == 'late':
    def wait():
        while not requests[0].is_cancelled():
            pass
        sender.send(InferenceResponse(), 1)
    threading.Thread(target=wait).start()
else:
    sender.send(InferenceResponse(), 1)
    while requests[0].request_id() == 'early' and not requests[0].is_cancelled():
        pass""")
    peer = serve(source, config={"model_transaction_policy": {"decoupled": decoupled}}, capabilities=31)
    assert struct.unpack_from("<Q", peer.hello.body, 24)[0] & 16  # capabilities

    def ring(number: int, what: str) -> Callable[[], None]:
        raw = record(golden, number, [1.0], id=what)
        at = peer.batch(number, raw) + struct.unpack_from("<I", raw, 40)[0] + 72

        def cancel() -> None:
            peer.arena[1][at] = 1

        return cancel

    # The last response comes after `execute` has returned.
    cancel = ring(1, "late")
    packet = peer.answer()
    assert (packet.kind, packet.batch) == (executed, 1)
    cancel()
    packet = peer.answer()
    assert (packet.batch, packet.flags & (BATCH_DONE | executing)) == (1, BATCH_DONE)
    # From now on the accelerator has nothing more to do with it, so this one comes while `execute` goes on.
    cancel = ring(2, "early")
    packet = peer.answer()
    assert (packet.batch, packet.flags & (BATCH_DONE | executing)) == (2, BATCH_DONE | executing)
    cancel()
    packet = peer.answer()
    assert (packet.kind, packet.batch) == (executed, 2)


def test_responses_that_execute_sends_go_at_once(serve: Serve, golden: ModuleType) -> None:
    executed, executing = 16, 8  # a message, and a flag
    source = model("""requests[0].get_response_sender().send(InferenceResponse(), 1)
while not requests[0].is_cancelled():
    pass""")
    peer = serve(source, capabilities=31)
    for number in range(1, 4):
        raw = record(golden, number, [1.0])
        at = peer.batch(number, raw) + struct.unpack_from("<I", raw, 40)[0] + 72
        packet = peer.answer()
        assert (packet.batch, packet.flags & (BATCH_DONE | executing)) == (number, BATCH_DONE | executing)
        peer.arena[1][at] = 1
        packet = peer.answer()
        assert (packet.kind, packet.batch) == (executed, number)


def test_a_model_may_take_requests_out_of_its_list(serve: Serve, golden: ModuleType) -> None:
    peer = serve(
        model("""def answer(request):
    request.get_response_sender().send(InferenceResponse([Tensor('y', request.inputs()[0].as_numpy())]), 1)
taken = [requests.pop(0), *requests]
requests[:] = [None]
for request in taken:
    threading.Thread(target=answer, args=(request,)).start()
return None""")
    )
    for number in range(1, 4):
        peer.batch(number, record(golden, number, [1.0], [2.0]))
        found = answers_of(peer, 2)
        assert {request: response.outputs["y"].tolist() for request, response in found.items()} == TWO


def test_a_response_that_cannot_be_sent_is_the_matter_of_its_request_alone(
    serve: Serve, golden: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out = ResponseWriter.lay_out

    def refuse(self: ResponseWriter, responses: Sequence[ResponseData]) -> Record:
        if any(each.outputs and float(each.outputs["y"].flat[0]) == 7 for each in responses):
            raise ArenaFullError("no room", needed=1, budget=0, in_use=0)
        return lay_out(self, responses)

    monkeypatch.setattr(ResponseWriter, "lay_out", refuse)
    peer = serve(
        model("""answers = [InferenceResponse([Tensor('y', each.inputs()[0].as_numpy())]) for each in requests]
if requests[0].request_id() == 'sent':
    try:
        requests[0].get_response_sender().send(answers[0], 1)
    except pb_utils.TritonModelException:
        pass  # the accelerator sends it later, and nobody raises
    answers[0] = None
return answers""")
    )
    # The accelerator has the second one.
    for number in range(1, 3):
        assert len(ask(peer, record(golden, number, [1.0], [2.0]), number)) == 2
    peer.batch(3, record(golden, 3, [7.0], [2.0], id="sent"))
    found = answers_of(peer, 2)
    assert "no room" in found[0].error
    assert found[1].outputs["y"].tolist() == [[2.0]]
    assert len(ask(peer, record(golden, 4, [1.0], [2.0]), 4)) == 2


def test_a_model_sees_that_a_caller_is_gone(serve: Serve, golden: ModuleType) -> None:
    source = model("""def watch(request):
    sender = request.get_response_sender()
    sender.send(InferenceResponse())
    while not (request.is_cancelled() and sender.is_cancelled()):
        pass
    sender.send(InferenceResponse(error=TritonError('gone', TritonError.CANCELLED)), 1)
threading.Thread(target=watch, args=(requests[0],)).start()""")
    peer = serve(source, config={"model_transaction_policy": {"decoupled": True}})
    raw = record(golden, 1, [1.0])
    at = peer.batch(1, raw)
    peer.answer()
    entries = struct.unpack_from("<I", raw, 40)[0]
    peer.arena[1][at + entries + 72] = 1
    [response] = peer.responses(peer.answer())
    assert (response.code, response.error) == (7, "gone")


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_request_goes_back_to_the_scheduler(serve: Serve, golden: ModuleType, decoupled: bool) -> None:
    last = "return None" if decoupled else "return [InferenceResponse(), None]"
    source = model(f"requests[1].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)\n{last}")
    source = source.replace("return None", "requests[0].get_response_sender().send(InferenceResponse(), 1)")
    peer = serve(source, config={"model_transaction_policy": {"decoupled": decoupled}})
    assert struct.unpack_from("<Q", peer.hello.body, 24)[0] & 8  # capabilities
    for number in range(1, 4):
        peer.batch(number, record(golden, number, [1.0], [2.0]))
        found: list[Any] = []
        while len(found) < 2:
            packet = peer.answer()
            found += peer.responses(packet)
        assert packet.flags & BATCH_DONE
        assert [(response.request, response.flags) for response in found] == [(0, FINAL), (1, FINAL | RESCHEDULE)]


def test_what_may_not_be_rescheduled(serve: Serve, golden: ModuleType) -> None:
    source = model("""for request in requests:
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
return [None, InferenceResponse()]""")
    assert error_of(serve(source), golden) == (
        "Failed to process the request(s) for model 'model_0_0', message: Expected a None object in the execute "
        "function return list for reschduled request, found type '<class "
        "'c_python_backend_utils.InferenceResponse'>'."
    )


def test_a_server_that_reschedules_nothing(serve: Serve, golden: ModuleType) -> None:
    source = model("""requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
return [None]""")
    [response] = ask(serve(source, capabilities=3), record(golden, 1, [1.0]), 1)
    assert (response.code, response.error) == (
        UNSUPPORTED, "model 'model_0_0': this server cannot reschedule requests",
    )  # fmt: skip


def test_nothing_is_kept_of_batches(serve: Serve, golden: ModuleType) -> None:
    peer = serve(DOUBLE)
    for number in range(1, 30):
        ask(peer, record(golden, number, [1.0], [2.0]), number)
    from pytriton.proxy_backend.python_models.requests import InferenceRequest

    def left() -> int:
        gc.collect()
        return sum(isinstance(thing, InferenceRequest) for thing in gc.get_objects())

    assert eventually(lambda: left() == 0)


# ---- who serves what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_plain_batches_are_the_accelerators(
    serve: Serve, golden: ModuleType, both_ways: str, monkeypatch: pytest.MonkeyPatch, max_batch_size: int
) -> None:
    in_python = []
    run = Execution.run

    def counted(self: Execution, run_async: object) -> None:
        in_python.append(self)
        run(self, run_async)

    monkeypatch.setattr(Execution, "run", counted)
    peer = serve(DOUBLE, config={"max_batch_size": max_batch_size})
    tensor = golden.Tensor("x", golden.FP32, [1, 2], struct.pack("<2f", 1.0, 2.0))
    for number in range(1, 11):
        raw = golden.batch_record(number, [golden.Request(outputs=["y"])], [tensor])
        [response] = ask(peer, bytes(raw), number)
        assert response.outputs["y"].tolist() == [[2.0, 4.0]]
    # The first one finds no arena yet.
    assert len(in_python) == (1 if both_ways == "accelerated" else 10)
