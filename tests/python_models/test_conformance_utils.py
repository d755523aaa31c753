"""What `triton_python_backend_utils` offers, as models see it: alike under Triton's Python backend and under ours."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.python_models.pair import Pair, Side, text

TENSOR = "pb_utils.Tensor('x', np.float32([[1, 2]]))"
NUMBERS = ("bool", "int8", "int64", "uint16", "uint64", "float16", "float32", "float64")

UTILS = [
    # Tensors.
    TENSOR,
    *(f"pb_utils.Tensor('x', np.array([0, 1], '{name}')).as_numpy()" for name in NUMBERS),
    "pb_utils.Tensor('x', np.array([b'a', 'b', 3, None], np.object_)).as_numpy()",
    "pb_utils.Tensor('x', np.array([b'a', b'bc'])).as_numpy().tolist()",
    "pb_utils.Tensor('x', np.zeros((0, 3), np.int32))",
    "pb_utils.Tensor('x', np.arange(6).reshape(2, 3).T).as_numpy()",
    "pb_utils.Tensor('', np.zeros(1))",
    "pb_utils.Tensor('x', [1, 2])",
    "pb_utils.Tensor(5, np.zeros(1))",
    "pb_utils.Tensor('x')",
    "pb_utils.Tensor('x', np.array([1j]))",
    *(f"pb_utils.Tensor('x', np.array([1, 2], '{name}')).as_numpy()" for name in (">f4", ">i8", ">u2", ">f2")),
    "pb_utils.Tensor('x', np.array(['ok', 'a\\ud83d'], np.object_))",
    "pb_utils.Tensor('x', np.array(['\\udc80'], np.object_))",
    "pb_utils.Tensor('x', np.array([chr(0x10ffff)], np.object_)).as_numpy()",
    "pb_utils.Tensor('\\ud83d', np.zeros(1))",
    f"{TENSOR}.is_cpu()",
    f"list({TENSOR}.shape())",
    f"pb_utils.Tensor.from_dlpack('y', {TENSOR}.to_dlpack())",
    f"pb_utils.Tensor.from_dlpack('y', {TENSOR})",
    "pb_utils.Tensor.from_dlpack('y', np.float64([1, 2]))",
    "pb_utils.Tensor.from_dlpack('y', np.arange(6).reshape(2, 3).T)",
    "pb_utils.Tensor.from_dlpack('', np.zeros(1))",
    "pb_utils.Tensor.from_dlpack('y', 5)",
    "pb_utils.Tensor('x', np.array(['a'], np.object_)).to_dlpack()",
    f"[t := {TENSOR}, count(t), held := [t.to_dlpack()], count(t), held.clear(), count(t)][1:]",
    f"np.from_dlpack({TENSOR})",
    f"{TENSOR}.__dlpack_device__()",
    # Responses and errors.
    f"pb_utils.InferenceResponse([{TENSOR}])",
    f"pb_utils.InferenceResponse(output_tensors=[{TENSOR}]).output_tensors()",
    "pb_utils.InferenceResponse()",
    "pb_utils.InferenceResponse([], error=pb_utils.TritonError('e'))",
    "pb_utils.InferenceResponse(error=pb_utils.TritonError('e', pb_utils.TritonError.NOT_FOUND))",
    "pb_utils.InferenceResponse([]).has_error()",
    "pb_utils.InferenceResponse([]).error()",
    "pb_utils.InferenceResponse([None])",
    "pb_utils.InferenceResponse([], parameters={'a': '\\ud83d'})",
    "pb_utils.InferenceResponse([], parameters={'\\ud83d': 1})",
    "pb_utils.InferenceResponse(error='text')",
    "pb_utils.TritonError(5)",
    "pb_utils.TritonError('e').message()",
    "int(pb_utils.TritonError('e').code())",
    f"pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([{TENSOR}]), 'x')",
    f"pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([{TENSOR}]), 'y')",
    # Requests of one's own.
    "request_to('m').request_id()",
    f"request_to('m', {TENSOR}, request_id='i').request_id()",
    f"request_to('m', {TENSOR}).inputs()",
    "sorted(request_to('m', outputs=['b', 'a']).requested_output_names())",
    "request_to('m', correlation_id=5).correlation_id()",
    "request_to('m', correlation_id='five').correlation_id()",
    "request_to('m', correlation_id=1.5)",
    "request_to('m', correlation_id=2**64 - 1).correlation_id()",
    "request_to('m', correlation_id=True).correlation_id()",
    "request_to('m', correlation_id=2**64)",
    "request_to('m', correlation_id=-1)",
    "request_to('m', correlation_id='\\ud83d')",
    "[request_to('m', timeout=2**64 - 1).timeout(), request_to('m', flags=2**32 - 1).flags()]",
    "request_to('m', timeout=-1)",
    "request_to('m', timeout=2**64)",
    "request_to('m', timeout=1.5)",
    "request_to('m', flags=-1)",
    "request_to('m', flags=2**32)",
    "request_to('m', model_version=2**63)",
    "request_to('m').set_flags(2**32)",
    "request_to('m', request_id='\\ud83d')",
    "request_to('\\ud83d')",
    "request_to('m', outputs=['\\ud83d'])",
    "request_to('m', flags=3).flags()",
    "request_to('m', timeout=7).timeout()",
    "chain(r := request_to('m'), r.set_flags(2), r.flags())",
    "request_to('m', parameters={'a': 1, 'b': 'c', 'd': True}).parameters()",
    "request_to('m').parameters()",
    "request_to('m', parameters={1: 1})",
    "request_to('m', parameters={'a': 1.5})",
    "request_to('m', parameters=[])",
    "request_to('m', None)",
    "request_to('m', outputs=[''])",
    "request_to('m').trace().get_context()",
    "request_to('m', preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)).request_id()",
    "pb_utils.PreferredMemory('CPU')",
    "pb_utils.InferenceRequest()",
    "pb_utils.InferenceRequest(model_name='m', inputs=[])",
    # The request of this call.
    "request.request_id()",
    "request.correlation_id()",
    "request.flags()",
    "request.set_flags(-1)",
    "request.set_release_flags(2**32)",
    "request.timeout()",
    "request.parameters()",
    "request.requested_output_names()",
    "request.trace().get_context()",
    "request.is_cancelled()",
    "[tensor.name() for tensor in request.inputs()]",
    "pb_utils.get_input_tensor_by_name(request, 'EXPRESSION').as_numpy().dtype.str",
    "type(pb_utils.get_input_tensor_by_name(request, 'EXPRESSION').as_numpy()[0]).__name__",
    "pb_utils.get_input_tensor_by_name(request, 'NONE')",
    "len(requests)",
    "request.get_response_sender().is_cancelled()",
    # Constants and tables.
    "pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL, pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "sorted(pb_utils.TRITON_STRING_TO_NUMPY)",
    "[pb_utils.triton_string_to_numpy(name) for name in sorted(pb_utils.TRITON_STRING_TO_NUMPY)]",
    "pb_utils.triton_string_to_numpy('TYPE_BF16')",
    "[pb_utils.triton_to_numpy_type(number) for number in range(16)]",
    "[pb_utils.numpy_to_triton_type(kind) for kind in (np.bool_, np.int8, np.float16, np.object_, np.bytes_, np.str_)]",
    # Strings.
    "bytes(pb_utils.serialize_byte_tensor(np.array([b'a', 'bc', 5], np.object_)))",
    "pb_utils.serialize_byte_tensor(np.array([], np.object_))",
    "pb_utils.serialize_byte_tensor(np.zeros(2))",
    "pb_utils.deserialize_bytes_tensor(pb_utils.serialize_byte_tensor(np.array([b'a', b'bc'], np.object_)))",
    # The configuration and what `initialize` got.
    "self.config",
    "{key: value for key, value in self.args.items() if key != 'model_config'}",
    "pb_utils.get_input_config_by_name(self.config, 'EXPRESSION')",
    "pb_utils.get_output_config_by_name(self.config, 'RESULT')",
    "pb_utils.get_output_config_by_name(self.config, 'NONE')",
    "pb_utils.using_decoupled_model_transaction_policy(self.config)",
    "pb_utils.get_model_dir()",
    "pb_utils.Logger.log_info('a record')",
    "pb_utils.Logger.log('a record', pb_utils.Logger.WARNING)",
    "pb_utils.Logger.log(5)",
]  # fmt: skip


# Of numbers of numpy 1: Triton's stub never answers them.
UNANSWERED = [
    "pb_utils.Tensor.from_dlpack('y', np.float64([1, 2]))",
    "pb_utils.Tensor.from_dlpack('y', np.arange(6).reshape(2, 3).T)",
]


NAMED_OTHERWISE = [
    "request_to('m', parameters=[])",
    "request_to('m', correlation_id=2**64)",
    "request_to('m', correlation_id=-1)",
    "request_to('m', correlation_id='\\ud83d')",
]


def test_utilities(pair: Pair) -> None:
    assert set(UNANSWERED) < set(UTILS)
    left_out = UNANSWERED if np.lib.NumpyVersion(np.__version__) < "2.0.0" else []

    def ask(side: Side) -> dict[str, Any]:
        return {expression: told(side, expression) for expression in UTILS if expression not in left_out}

    with pair.loaded("expressions"):
        answers = pair.compare(ask, dict.fromkeys(NAMED_OTHERWISE, "names of C++"))
    assert answers[TENSOR] == "Tensor x float32 [1, 2] [[1.0, 2.0]]"


FLOATS = "pb_utils.Tensor('fp32', np.float32([[1, 2]]))"
COMMAND = "pb_utils.Tensor('COMMAND', np.array([{!r}], np.object_))"
SEVERAL = COMMAND.format("nothing(send(response(1)), send(response(2, 3)), send(flags=FINAL))")

REQUESTS = [
    f"request_to('types', {FLOATS}, outputs=['fp32_out']).exec()",
    f"request_to('types', {FLOATS}, outputs=['fp32_out']).exec().output_tensors()",
    f"request_to('types', {FLOATS}, outputs=['fp32_out'], model_version=1, request_id='r', timeout=1000).exec()",
    f"in_thread(request_to('types', {FLOATS}, outputs=['fp32_out']).exec)",
    f"request_to('types', {FLOATS}, outputs=['none']).exec()",
    f"request_to('types', {FLOATS}, outputs=['fp32_out'], model_version=7).exec()",
    f"request_to('nowhere', {FLOATS}).exec()",
    "request_to('types', pb_utils.Tensor('none', np.zeros(1))).exec()",
    "request_to('types', pb_utils.Tensor('fp32', np.float64([[1]])), outputs=['fp32_out']).exec()",
    "request_to('types', pb_utils.Tensor('string', np.array([[b'a']], np.object_)), outputs=['string_out']).exec()",
    f"list(request_to('streams', {SEVERAL}, outputs=['OUTPUT']).exec(decoupled=True))",
    f"list(request_to('types', {FLOATS}, outputs=['fp32_out']).exec(decoupled=True))",
    f"request_to('streams', {SEVERAL}, outputs=['OUTPUT']).exec()",
]


def test_requests_to_other_models(pair: Pair) -> None:
    with pair.loaded("types", "streams", "expressions"):
        answers = pair.compare(lambda side: {expression: told(side, expression) for expression in REQUESTS})
    assert answers[REQUESTS[0]] == "Response ['Tensor fp32_out float32 [1, 2] [[1.0, 2.0]]']"


def family(kind: str, name: str = "own", **options: str) -> str:
    arguments = "".join(f", {key}={value}" for key, value in options.items())
    return (
        f"pb_utils.MetricFamily(name='{name}', description='of a test', kind=pb_utils.MetricFamily.{kind}{arguments})"
    )


LABELS = "{'model': 'expressions', 'which': 'one'}"

# What the server refuses is left out here and below: reporting it ends tritonserver 2.51.
METRICS = [
    f"setattr(self, 'counters', {family('COUNTER', 'own_total')})",
    f"setattr(self, 'counter', self.counters.Metric(labels={LABELS}))",
    "self.counter.value()",
    "chain(self.counter.increment(2.5), self.counter.value())",
    "chain(self.counter.increment(2), self.counter.value())",
    f"setattr(self, 'gauges', {family('GAUGE', 'own_level')})",
    f"setattr(self, 'gauge', self.gauges.Metric(labels={LABELS}))",
    "chain(self.gauge.set(7), self.gauge.increment(-2.5), self.gauge.value())",
    f"self.counters.Metric(labels={LABELS}).value()",
    "self.counters.Metric(labels={'model': 'expressions', 'which': 'other'}).value()",
    "self.counters.Metric().value()",
    "self.counters.Metric(labels=[])",
    family("COUNTER", "own_total"),
    "pb_utils.MetricFamily(name='x')",
    "pb_utils.MetricFamily(name='x', description='y', kind='COUNTER')",
    "in_thread(lambda: self.counter.value())",
]


def test_metrics(pair: Pair) -> None:
    def ask(side: Side) -> dict[str, Any]:
        answers: dict[str, Any] = {expression: told(side, expression) for expression in METRICS}
        answers["page"] = {name: value for name, value in side.metrics("expressions").items() if "own" in name}
        return answers

    with pair.loaded("expressions"):
        answers = pair.compare(ask)
    assert 4.5 in answers["page"].values()


CONTROL = [
    "pb_utils.is_model_ready('types')",
    "pb_utils.is_model_ready('types', '1')",
    "pb_utils.is_model_ready('types', '9')",
    "pb_utils.is_model_ready('nowhere')",
    "pb_utils.is_model_ready(5)",
    "chain(pb_utils.unload_model('types'), until(lambda: not pb_utils.is_model_ready('types')))",
    "chain(pb_utils.load_model('types'), pb_utils.is_model_ready('types'))",
    "pb_utils.load_model()",
    "pb_utils.load_model('types', {'config': '{}'})",
    "pb_utils.load_model('types', files={'config': 5})",
    "pb_utils.load_model('types')",
    "pb_utils.unload_model('nowhere')",
    f"request_to('types', {FLOATS}, outputs=['fp32_out']).exec()",
]


SHIPPED = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        x = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", FACTOR * each)]) for each in x]
"""
SHIPPED_CONFIG = """{
    "backend": "python",
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}]
}"""
MODEL_OF = {factor: SHIPPED.replace("FACTOR", str(factor)).encode() for factor in (2, 3)}
ASK_SHIPPED = "request_to('shipped', pb_utils.Tensor('x', np.float32([1, 2])), outputs=['y']).exec()"
WITH_FILES = [
    f"pb_utils.load_model('shipped', {SHIPPED_CONFIG!r}, {{'file:1/model.py': {MODEL_OF[2]!r}}})",
    ASK_SHIPPED,
    # Of the same configuration Triton loads nothing anew.
    f"chain(pb_utils.load_model('shipped', {SHIPPED_CONFIG!r}, {{'file:1/model.py': {MODEL_OF[3]!r}}}), {ASK_SHIPPED})",
    f"pb_utils.load_model('shipped', {SHIPPED_CONFIG!r}, {{'file:1/model.py': 'text'}})",
    f"pb_utils.load_model('shipped', {SHIPPED_CONFIG!r}, [5])",
    "chain(pb_utils.unload_model('shipped'), until(lambda: not pb_utils.is_model_ready('shipped')))",
]
# With Triton's Python backend, each of these may end the server.
WITH_WRONG_FILES = [
    f"pb_utils.load_model('shipped', files={{'file:1/model.py': {MODEL_OF[2]!r}}})",
    f"pb_utils.load_model('shipped', {SHIPPED_CONFIG!r})",
    f"pb_utils.load_model('shipped', {SHIPPED_CONFIG!r}, {{}})",
    f"pb_utils.load_model('shipped', {SHIPPED_CONFIG!r}, {{'1/model.py': b'x = 1'}})",
    f"pb_utils.load_model('shipped', {SHIPPED_CONFIG!r}, {{'file:../../outside.py': b'x = 1'}})",
    "pb_utils.load_model('shipped', 'no json', {'file:1/model.py': b'x = 1'})",
]
WITH_NO_PATH = f"caught(lambda: pb_utils.load_model('shipped', {SHIPPED_CONFIG!r}, {{5: b'x'}}))"


def test_models_that_come_with_a_request(pair: Pair) -> None:
    """Configuration and files of a model that is in no repository."""
    with pair.loaded("expressions"):
        answers = pair.compare(lambda side: {expression: told(side, expression) for expression in WITH_FILES})
        loaded, *refused, no_path, asked = (
            told(pair.workers, expression)
            for expression in [WITH_FILES[0], *WITH_WRONG_FILES, WITH_NO_PATH, ASK_SHIPPED]
        )
        told(pair.workers, WITH_FILES[-1])
    assert answers[ASK_SHIPPED] == answers[WITH_FILES[2]] == "Response ['Tensor y float32 [2] [2.0, 4.0]']"
    assert loaded == "None"
    assert all("Failed to load model" in text and "failed to poll from model repository" in text for text in refused)
    assert no_path == repr("TypeError: load_model, files: expected a str, got a int")
    assert asked == answers[ASK_SHIPPED]


def test_models_that_load_models(pair: Pair) -> None:
    with pair.loaded("types", "expressions"):
        answers = pair.compare(lambda side: {expression: told(side, expression) for expression in CONTROL})
    assert answers[CONTROL[0]] == answers[CONTROL[6]] == "True"


def told(side: Side, expression: str) -> Any:
    """What an expression comes to in a model."""
    answer = side.infer("expressions", {"EXPRESSION": text(expression)}, protocol="grpc", request_id="an id")
    return side.neutral(answer["outputs"]["RESULT"]["data"][0]) if "outputs" in answer else answer
