"""The harness for a `model.py` says what a server says: the same models and requests in both, errors as well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.testing import ModelError, ModelHarness, Result, make_request
from support.python_models.commands import FAULTS, STREAMS
from support.python_models.comparison import check_alike
from support.python_models.pair import MODELS, Side, text
from support.serving import running, short_home

STATUS = {
    "UNKNOWN": "UNKNOWN",
    "INTERNAL": "INTERNAL",
    "NOT_FOUND": "NOT_FOUND",
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNSUPPORTED": "UNIMPLEMENTED",
    "ALREADY_EXISTS": "ALREADY_EXISTS",
    "CANCELLED": "CANCELLED",
}
NAMES = {"b": "BOOL", "O": "BYTES"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """A server that runs the models on workers."""
    side = Side("workers", tmp_path_factory.mktemp("repository"))
    with short_home(), running(side.triton), side.clients():
        yield side


def told(answer: Result | ModelError) -> Any:
    """Return an answer of a harness as `Side` gives that of a server."""
    if isinstance(answer, ModelError):
        return {"status": f"StatusCode.{STATUS[answer.code]}", "error": answer.message}
    return {name: described(array) for name, array in answer.items()}


def described(array: Any) -> dict[str, Any]:
    kind, bits = array.dtype.kind, array.dtype.itemsize * 8
    name = NAMES.get(kind) or {"i": "INT", "u": "UINT", "f": "FP"}[kind] + str(bits)
    data = [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
    return {"datatype": name, "shape": list(array.shape), "data": data}


def outputs(answer: Any) -> Any:
    """Return what a server said without its id and its parameters."""
    return answer if "error" in answer else answer["outputs"]


@contextlib.contextmanager
def loaded(server: Side, *models: str) -> Iterator[None]:
    """Have models loaded in the server."""
    for model in models:
        assert server.load(model) == ""
    try:
        yield
    finally:
        for model in reversed(models):
            server.unload(model)


class Both:
    """A model on a server and in a harness."""

    def __init__(self, server: Side, model: str, harness: ModelHarness) -> None:
        self.server = server
        self.model = model
        self.harness = harness

    def infer(self, inputs: Mapping[str, Any], wanted: Sequence[str] | None = None, **options: Any) -> Any:
        """Make a request of both, compare, and return what they said."""
        expected = outputs(self.server.infer(self.model, inputs, protocol="grpc", outputs=wanted, **options))
        parameters: dict[str, Any] = {name: value for name, value in options.items() if name != "sequence_id"}
        request = make_request(
            inputs, parameters, requested_output_names=wanted, correlation_id=options.get("sequence_id", 0)
        )
        found = told(self.harness.infer([request], return_exceptions=True)[0])
        check_alike(neutral(expected), found, {})
        return found


def neutral(answer: Any) -> Any:
    """Return what a server said with the place where the harness finds the model."""
    if isinstance(answer, dict) and "error" in answer:
        return {**answer, "error": answer["error"].replace("<repository>", str(MODELS))}
    return answer


def test_a_plain_model(server: Side) -> None:
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    with loaded(server, "add_sub"), ModelHarness(MODELS / "add_sub") as harness:
        both = Both(server, "add_sub", harness)
        both.infer({"INPUT0": values, "INPUT1": values * 3})
        both.infer({"INPUT0": values, "INPUT1": values}, ["OUTPUT1"])


def test_what_execute_returns_and_raises(server: Side) -> None:
    with loaded(server, "faults"), ModelHarness(MODELS / "faults") as harness:
        both = Both(server, "faults", harness)
        answers = {fault: both.infer({"COMMAND": text(fault)}) for fault in FAULTS}
    assert answers["[ok]"]["OUTPUT"]["data"] == [1, 2]
    assert "no such value" in answers["fail(ValueError('no such value'))"]["error"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_senders_send(server: Side) -> None:
    with loaded(server, "streams"), ModelHarness(MODELS / "streams") as harness:
        for command in STREAMS:
            request = {"COMMAND": text(command)}
            expected = [
                neutral(outputs(answer))
                for answer in server.stream("streams", request)
                # The empty response that says that there is no more has no outputs.
                if outputs(answer) or not answer["parameters"].get("triton_final_response")
            ]
            [found] = harness.infer([request], return_exceptions=True)
            assert [without_status(told(answer)) for answer in found] == list(map(without_status, expected)), command


def without_status(answer: Any) -> Any:
    """Leave out what a stream has not."""
    return {"error": answer["error"]} if "error" in answer else answer


def test_the_configuration_is_that_of_a_server(server: Side) -> None:
    for model in ("expressions", "add_sub", "sequence", "iterative"):
        with loaded(server, model), ModelHarness(MODELS / model) as harness:
            expected = server.config(model)
            found = harness.model_config
            shared = set(found) - {"sequence_batching"}
            assert {name: found[name] for name in shared} == {name: expected[name] for name in shared}
            assert set(expected) == set(found)


def test_a_model_that_sees_its_arguments(server: Side) -> None:
    questions = [
        "sorted(self.args)",
        "self.args['model_name'], self.args['model_version'], self.args['model_instance_kind']",
        "self.args['model_instance_name'], self.args['model_instance_device_id']",
        "self.config['parameters'], self.config['max_batch_size']",
        "pb_utils.get_output_config_by_name(self.config, 'RESULT')",
        "request.request_id(), request.timeout(), sorted(request.requested_output_names())",
        "request_to('nobody').exec()",
        "request_to('nobody', outputs=['']).exec()",
        "pb_utils.is_model_ready('nobody')",
        "pb_utils.get_input_tensor_by_name(request, 'NONE')",
        "pb_utils.Tensor('', np.zeros(1))",
    ]
    with loaded(server, "expressions"), ModelHarness(MODELS / "expressions") as harness:
        Both(server, "expressions", harness).infer({"EXPRESSION": text(*questions)})


def test_sequences(server: Side) -> None:
    with loaded(server, "sequence"), ModelHarness(MODELS / "sequence") as harness:
        both = Both(server, "sequence", harness)
        for step in range(3):
            answer = both.infer(
                {"INPUT": np.array([[step + 1]], np.int64)},
                sequence_id=7,
                sequence_start=step == 0,
                sequence_end=step == 2,
            )
    assert answer["OUTPUT"]["data"] == [0, 1, 1, 7, 6]


def test_requests_that_are_put_back(server: Side) -> None:
    request = {"INPUT": np.array([[3]], np.int32)}
    with loaded(server, "iterative"), ModelHarness(MODELS / "iterative") as harness:
        expected = [outputs(answer) for answer in server.stream("iterative", request) if outputs(answer)]
        assert [told(answer) for answer in harness.infer(request)] == expected


def test_calls_of_other_models(server: Side) -> None:
    with (
        loaded(server, "types", "asynchronous"),
        ModelHarness(MODELS / "types") as types,
        ModelHarness(MODELS / "asynchronous", calls={"types": types.infer}) as harness,
    ):
        both = Both(server, "asynchronous", harness)
        assert both.infer({"INPUT": np.array([[1, 2, 3, 4]], np.float32)})["OUTPUT"]["data"] == [11, 22, 33, 44]
        both.infer({"INPUT": np.array([[-1, 2, 3, 4]], np.float32)})


def test_models_that_cannot_be_loaded(server: Side, tmp_path: Path) -> None:
    sources = [
        "import nowhere",
        "class Other: pass",
        "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no')",
        "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n        return None",
    ]
    for number, source in enumerate(sources):
        folder = tmp_path / str(number) / "completed"
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(source)
        (folder / "config.pbtxt").write_text((MODELS / "completed" / "config.pbtxt").read_text())
        expected = server.load("completed", source)
        with pytest.raises(ModelError) as failed:
            ModelHarness(folder)
        found = server.neutral(failed.value.message).replace(str(folder), "<repository>/completed")
        assert found.strip() in expected
