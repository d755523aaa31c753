"""The guard's front end for gRPC: callers that cancel, die and mix end their own calls, and it answers as Triton's."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from pytriton.client import ModelClient
from pytriton.client.exceptions import (
    PyTritonClientClosedError,
    PyTritonClientInferenceServerError,
    PyTritonClientValueError,
)
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import GuardConfig, Triton
from support.serving import local_config, running, server_pid, short_home
from support.waiting import eventually

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
CALLS = 400
WAIT_S = 600

begun: Counter[str] = Counter()
cancelled: Counter[str] = Counter()


@batch
def double(x: Any) -> Any:
    return {"y": 2 * x}


def count(requests: Any) -> Iterator[Any]:
    for i in range(20):
        yield [{"i": np.array([i], np.int32)} for _ in requests]


def patient(requests: Any) -> Any:
    """Run until the caller has left."""
    for request in requests:
        begun[request.request_id] += 1
        eventually(request.is_cancelled)
        cancelled[request.request_id] += 1
    return [{"y": request["x"]} for request in requests]


def texts(requests: Any) -> Any:
    return [{"y": np.array([[b"<" + text + b">" for text in row] for row in request["x"]])} for request in requests]


def failing(requests: Any) -> Any:
    raise ValueError("this model fails")


def bind(triton: Triton) -> Triton:
    x, y = Tensor((-1,), np.float32, "x"), Tensor((-1,), np.float32, "y")
    triton.bind("double", double, [x], [y], config=ModelConfig(max_batch_size=64))
    triton.bind("patient", patient, [x], [y], config=ModelConfig(batching=False))
    triton.bind("texts", texts, [Tensor((-1,), bytes, "x")], [Tensor((-1,), bytes, "y")], config=ModelConfig())
    triton.bind("failing", failing, [x], [y], config=ModelConfig(batcher=DynamicBatcher()))
    streaming = ModelConfig(batching=False, decoupled=True)
    triton.bind("count", count, [Tensor((1,), np.int32, "n")], [Tensor((1,), np.int32, "i")], config=streaming)
    return triton


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    with short_home(), running(bind(Triton(config=local_config()))) as triton:
        yield triton


def message(
    model: str,
    name: str = "x",
    datatype: str = "FP32",
    shape: Sequence[int] = (1, 2),
    raw: bytes | None = None,
    **more: Any,
) -> Any:
    made = service_pb2.ModelInferRequest(model_name=model, **more)
    made.inputs.add(name=name, datatype=datatype, shape=shape)
    made.raw_input_contents.append(struct.pack("<2f", 1, 2) if raw is None else raw)
    return made


def good(**more: Any) -> Any:
    return message("double", **more)


def counting(**more: Any) -> Any:
    return message("count", "n", "INT32", [1], struct.pack("<i", 3), **more)


class Caller:
    """Calls of plain grpcio, over a connection of its own."""

    def __init__(self, triton: Triton, **options: Any) -> None:
        settings = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(str(triton.grpc_url).partition("//")[2], settings, **options)
        serialize = service_pb2.ModelInferRequest.SerializeToString
        self.infer = self._channel.unary_unary(INFER, serialize, service_pb2.ModelInferResponse.FromString)
        self.stream = self._channel.stream_stream(STREAM, serialize, service_pb2.ModelStreamInferResponse.FromString)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def doubled(answer: Any) -> list[float]:
    return [float(value) for value in np.frombuffer(answer.raw_output_contents[0], np.float32)]


def one_caller(triton: Triton, seed: int) -> Counter[str]:
    """Make unary calls and streams of which about a third are given up after a time like that of a call."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    with Caller(triton) as caller:
        for number in range(CALLS // 4):
            limit = rng.choice([None, rng.random() * 0.004, rng.random() * 0.03])
            try:
                if rng.random() < 0.6:
                    call = caller.infer.future(good(id=str(number)), timeout=WAIT_S if limit is None else limit)
                    if limit is not None and rng.random() < 0.5:
                        threading.Event().wait(limit)
                        call.cancel()
                    assert doubled(call.result()) == [2.0, 4.0]
                else:
                    stream = caller.stream(iter([counting(id=str(number))] * rng.randint(1, 3)), timeout=WAIT_S)
                    for answer in stream:
                        assert answer.infer_response.id == str(number)
                        if limit is not None and rng.random() < 0.2:
                            stream.cancel()
                seen["answered"] += 1
            except grpc.FutureCancelledError:
                seen["CANCELLED"] += 1
            except grpc.RpcError as error:
                seen[error.code().name] += 1
    return seen


def is_well(triton: Triton) -> bool:
    with Caller(triton) as caller:
        unary = doubled(caller.infer(good(), timeout=WAIT_S)) == [2.0, 4.0]
        return unary and len(list(caller.stream(iter([counting()]), timeout=WAIT_S))) == 20


def test_callers_that_give_up(served: Triton) -> None:
    process = server_pid(served)
    with ThreadPoolExecutor(4) as pool:
        seen = sum(pool.map(lambda seed: one_caller(served, seed), range(4)), Counter[str]())
    assert set(seen) <= {"answered", "CANCELLED", "DEADLINE_EXCEEDED"}, seen
    assert seen["answered"] > 0
    assert seen["CANCELLED"] + seen["DEADLINE_EXCEEDED"] > 0
    assert is_well(served)
    assert server_pid(served) == process


ODD = {
    "both": [good(), counting()],
    "unknown model": [counting(), message("nothing")],
    "unknown version": [counting(), counting(model_version="7")],
    "no version": [counting(), counting(model_version="x")],
    "wrong type": [counting(), message("count", "n", "INT64", [1], bytes(8)), counting(model_version="9")],
}


@pytest.mark.parametrize("kind", ODD)
def test_streams_to_several_models(served: Triton, kind: str) -> None:
    process = server_pid(served)
    with Caller(served) as caller:
        for _, order in itertools.product(range(15), (1, -1)):
            answers = list(caller.stream(iter(ODD[kind][::order]), timeout=WAIT_S))
            assert sum(not answer.error_message for answer in answers) == (21 if kind == "both" else 20)
    assert is_well(served)
    assert server_pid(served) == process


def test_responses_of_a_stream_keep_the_order_of_requests(served: Triton) -> None:
    with Caller(served) as caller:
        answers = list(caller.stream((good(id=str(number)) for number in range(200)), timeout=WAIT_S))
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(200)]


@pytest.mark.parametrize("way", ["cancel", "deadline", "connection", "stream"])
def test_a_callable_is_told_of_each_caller_that_leaves(served: Triton, way: str) -> None:
    with Caller(served) as caller:
        request = message("patient", shape=[2], id=way)
        if way == "deadline":
            with pytest.raises(grpc.RpcError) as caught:
                caller.infer(request, timeout=0.2)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            call = caller.stream(iter([request])) if way == "stream" else caller.infer.future(request)
            threading.Event().wait(0.2)
            if way != "connection":
                call.cancel()
    eventually(lambda: cancelled[way] == 1)
    assert is_well(served)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_callable_is_told_of_callers_whose_request_goes_on_to_triton(served: Triton, is_stream: bool) -> None:
    made = message("patient", shape=[2], id=f"handed on {is_stream}")
    made.outputs.add(name="y").parameters["classification"].int64_param = 1
    with Caller(served) as caller:
        call = caller.stream(iter([made])) if is_stream else caller.infer.future(made)
        threading.Event().wait(0.2)
        call.cancel()
        eventually(lambda: cancelled[made.id] == 1)
    assert is_well(served)


def test_the_longest_header_of_a_client_fails_its_own_call_alone(served: Triton) -> None:
    """Beyond it nghttp2 gives the connection up; clients of ours send nothing as long."""
    given: Any = {"x": np.ones(2, np.float32)}
    with ModelClient(str(served.grpc_url), "patient") as client, ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.with_options(request_id="beside").infer_sample, **given)
        eventually(lambda: begun["beside"] == 1)
        longest = {"a": "x" * ((64 << 10) - 1)}
        for _ in range(3):
            with pytest.raises(PyTritonClientInferenceServerError, match=r"header fields .* have 66\d{3} bytes"):
                client.infer_sample(headers=longest, **given)
            with pytest.raises(PyTritonClientValueError, match="64 KiB at most"):
                client.infer_sample(headers={"a": longest["a"] + "x"}, **given)
        assert not other.done()
        client.close()
        assert isinstance(other.exception(WAIT_S), PyTritonClientClosedError)
    eventually(lambda: cancelled["beside"] == 1)


CLIENT = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", lambda x: x, lambda x: x)
future = call.future(bytes.fromhex(sys.argv[2]))
print("sent", flush=True)
future.result()
"""


def test_a_killed_client(served: Triton) -> None:
    address = str(served.grpc_url).partition("//")[2]
    request = message("patient", shape=[2], id="killed").SerializeToString().hex()
    process = subprocess.Popen([sys.executable, "-c", CLIENT, address, request], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"sent\n"
    threading.Event().wait(0.2)
    process.kill()
    process.wait()
    process.stdout.close()
    eventually(lambda: cancelled["killed"] == 1)
    assert is_well(served)


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_large_and_compressed_messages(served: Triton, compression: Any) -> None:
    values = np.arange(2_000_000, dtype=np.float32)
    with Caller(served) as caller:
        request = good(shape=[1, len(values)], raw=values.tobytes())
        answer = caller.infer(request, timeout=WAIT_S, compression=compression)
        assert answer.raw_output_contents[0] == (2 * values).tobytes()


def outcome(caller: Caller, request: Any, is_stream: bool) -> Any:
    """Return what a caller sees of one request, without what differs from call to call."""
    try:
        if is_stream:
            return [
                (each.error_message, each.infer_response) for each in caller.stream(iter([request]), timeout=WAIT_S)
            ]
        return caller.infer(request, timeout=WAIT_S)
    except grpc.RpcError as error:
        return error.code(), error.details()


def requests() -> Iterator[Any]:
    """Make requests, good and bad in one way each."""
    yield good()
    yield good(id="an id")
    yield good(model_version="1")
    for version in ("2", "-1", "x", "99999999999999999999", " 1"):
        yield good(model_version=version)
    for shape in ([2], [1, 3], [0, 2], [-1, 2], [1, 2, 1], []):
        yield good(shape=shape)
    yield good(raw=b"")
    yield good(raw=bytes(7))
    yield good(name="nothing")
    yield good(datatype="FP64")
    yield good(datatype="nothing")
    yield message("nothing")
    yield message("")
    yield message("failing")
    yield counting()
    yield counting(id="7")
    for text in ([b"a"], [b"", b"xyz" * 1000], []):
        raw = b"".join(struct.pack("<I", len(each)) + each for each in text)
        yield message("texts", datatype="BYTES", shape=[1, len(text)], raw=raw)
    values: list[tuple[str, dict[str, Any]]] = [
        ("mine", {"string_param": "text"}), ("mine", {"int64_param": -3}), ("mine", {"bool_param": True}),
        ("mine", {"double_param": 0.5}), ("mine", {"uint64_param": 3}), ("mine", {}), ("priority", {"int64_param": -1}),
        ("priority", {"uint64_param": 0}), ("timeout", {"int64_param": 10_000_000}), ("timeout", {"string_param": "x"}),
        ("sequence_id", {"bool_param": True}), ("sequence_start", {"int64_param": 1}),
        ("triton_mine", {"int64_param": 1}),
        ("triton_enable_empty_final_response", {"bool_param": True}),
        ("triton_enable_empty_final_response", {"int64_param": 1}),
    ]  # fmt: skip
    for name, value in values:
        for made in (good(), counting()):
            made.parameters[name].CopyFrom(service_pb2.InferParameter(**value))
            yield made
    for outputs in (["y"], ["y", "y"], ["nothing"]):
        made = good()
        for name in outputs:
            made.outputs.add(name=name)
        yield made
    made = good()
    made.outputs.add(name="y").parameters["classification"].int64_param = 1
    yield made
    made = good()
    made.raw_input_contents.append(b"more")
    yield made
    made = good()
    made.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    made.raw_input_contents.append(bytes(8))
    yield made
    made = good()
    del made.raw_input_contents[:]
    yield made
    for contents in (
        service_pb2.InferTensorContents(fp32_contents=[1, 2]),
        service_pb2.InferTensorContents(fp64_contents=[1, 2]),
        service_pb2.InferTensorContents(fp32_contents=[1]),
    ):
        made = good()
        del made.raw_input_contents[:]
        made.inputs[0].contents.CopyFrom(contents)
        yield made
    made = good()
    made.inputs[0].parameters["shared_memory_region"].string_param = "nothing"
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8
    yield made


def test_it_answers_as_the_front_end_of_triton(served: Triton) -> None:
    with short_home(), bind(Triton(config=local_config(), guard=GuardConfig(grpc_front_end=False))) as other:
        for number, request in enumerate(requests()):
            for is_stream in (False, True):
                # A connection of its own for each: a stream to Triton's own may end it.
                with Caller(served) as ours, Caller(other) as theirs:
                    assert outcome(ours, request, is_stream) == outcome(theirs, request, is_stream), (number, request)


def test_a_message_that_is_none(served: Triton) -> None:
    with grpc.insecure_channel(str(served.grpc_url).partition("//")[2]) as channel:
        for path, raw in itertools.product((INFER, STREAM), (b"\x0a", b"\xff" * 11, b"\x0a\x02\xff\xfe", b"\x2b")):
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.stream_stream(path, lambda x: x, lambda x: x)(iter([raw]), timeout=WAIT_S))
            assert caught.value.code() == grpc.StatusCode.INTERNAL
        many = b"\x2a\x00" * 20_000
        with pytest.raises(grpc.RpcError, match="16384"):
            channel.unary_unary(INFER, lambda x: x, lambda x: x)(many, timeout=WAIT_S)
    assert is_well(served)


def test_a_crash_ends_the_server_at_once_and_says_where() -> None:
    with short_home():
        triton = bind(Triton(config=local_config()))
        triton.run()
        with contextlib.suppress(Exception):
            os.kill(server_pid(triton), signal.SIGSEGV)
            eventually(lambda: not triton.is_alive())
        with pytest.raises(Exception, match=r"crashed: signal 11 \(SIGSEGV\)"):
            triton.serve()
        triton.stop()
