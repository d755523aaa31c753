"""What needs no Dynamo: the options, and its dictionaries as messages of KServe v2."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2
from typer.testing import CliRunner

from pytriton.cli.app import app
from pytriton.dynamo import command
from pytriton.dynamo._messages import UnfitRequestError, as_card_config, as_message, as_response

APP = """
from pytriton.decorators import model

@model
def shout(text: str) -> str:
    return text.upper()
"""
SAMPLES: dict[str, tuple[str, str, list[Any]]] = {
    "Bool": ("BOOL", "?", [True, False]), "Uint8": ("UINT8", "u1", [0, 255]), "Int8": ("INT8", "i1", [-128, 127]),
    "Uint16": ("UINT16", "<u2", [0, 65535]), "Int16": ("INT16", "<i2", [-(2**15), 1]),
    "Uint32": ("UINT32", "<u4", [0, 2**32 - 1]), "Int32": ("INT32", "<i4", [-(2**31), 1]),
    "Uint64": ("UINT64", "<u8", [0, 2**64 - 1]), "Int64": ("INT64", "<i8", [-(2**63), 1]),
    "Float16": ("FP16", "<u2", [0x3E00, 0x7E01]), "BFloat16": ("BF16", "<u2", [0x3FC0, 0x7FFF]),
    "Float32": ("FP32", "<f4", [0.5, -1.25]), "Float64": ("FP64", "<f8", [1e300, -0.1]),
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APP)
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("arguments", [("serve", "FILE", "--dynamo", "--check"), ("dynamo",)])
def test_without_the_extra_its_name_is_said(
    file: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)

    code, output = invoke(*(file if argument == "FILE" else argument for argument in arguments))

    assert code == 2
    assert 'pip install "pytriton-server[dynamo]"' in output


def test_options_that_mean_nothing_or_are_wrong(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: importlib.util.find_spec("json"))

    assert "--dynamo-namespace is for --dynamo" in invoke("serve", file, "--dynamo-namespace", "x")[1]
    assert "etcd, file, kubernetes, mem; got 'zoo'" in invoke("serve", file, "--dynamo", "--dynamo-discovery", "zoo")[1]
    assert "a server's gRPC" in invoke("dynamo", "http://localhost:8000")[1]
    code, output = invoke("serve", file, "--dynamo", "--dynamo-discovery", "file", "--check")
    assert (code, "Dynamo: shout in the namespace dynamo, found by file" in output) == (0, True)


def request(data_type: str, values: list[Any], shape: list[int], **more: Any) -> dict[str, Any]:
    metadata = {"name": "x", "data_type": data_type, "shape": shape}
    return {"tensors": [{"metadata": metadata, "data": {"data_type": data_type, "values": values}}], **more}


@pytest.mark.parametrize("data_type", SAMPLES)
def test_numbers_go_there_and_back(data_type: str) -> None:
    datatype, dtype, values = SAMPLES[data_type]

    message = as_message(request(data_type, values, [2]), "m", "1")
    answer = service_pb2.ModelInferResponse(raw_output_contents=message.raw_input_contents)
    answer.outputs.add(name="y", datatype=datatype, shape=[2])

    assert message.inputs[0].datatype == datatype
    assert message.raw_input_contents[0] == np.array(values, dtype).tobytes()
    (output,) = as_response(answer, "m")["tensors"]
    assert output["metadata"] == {"name": "y", "shape": [2], "data_type": data_type}
    assert output["data"] == {"data_type": data_type, "values": values}


def test_strings_go_there_and_back() -> None:
    values = [[104, 105], b"\xff\0", "\u00e9", []]

    message = as_message(request("Bytes", values, [4]), "m", "1")
    answer = service_pb2.ModelInferResponse(raw_output_contents=message.raw_input_contents)
    answer.outputs.add(name="y", datatype="BYTES", shape=[4])

    (output,) = as_response(answer, "m")["tensors"]
    assert list(map(bytes, output["data"]["values"])) == [b"hi", b"\xff\0", "\u00e9".encode(), b""]


def test_what_stands_beside_the_tensors() -> None:
    given = request(
        "Float32", [1.0], [1], id="one", outputs=[{"name": "y", "parameters": {"classification": {"int64": 2}}}],
        parameters={"by": {"double": 0.5}, "name": {"string": "n"}, "priority": {"uint64": 3}, "deep": {"bool": True}},
    )  # fmt: skip
    given["tensors"][0]["metadata"]["parameters"] = {"of": {"int64": 7}}

    message = as_message(given, "m", "3")

    assert (message.model_name, message.model_version, message.id) == ("m", "3", "one")
    assert message.outputs[0].parameters["classification"].int64_param == 2
    assert message.inputs[0].parameters["of"].int64_param == 7
    parameters = message.parameters
    assert (parameters["by"].double_param, parameters["name"].string_param) == (0.5, "n")
    assert (parameters["priority"].uint64_param, parameters["deep"].bool_param) == (3, True)
    answer = service_pb2.ModelInferResponse(id="one", parameters=parameters)
    assert as_response(answer, "m:3") == {
        "id": "one", "model": "m:3", "tensors": [], "parameters": given["parameters"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"token_ids": [1]}, "a request with tensors for model 'm', got token_ids"),
        (request("Complex64", [1], [1]), "input 'x' of model 'm'"),
        (request("Uint8", [256], [1]), "input 'x' of model 'm'"),
        (request("Float32", ["one"], [1]), "input 'x' of model 'm'"),
        (request("Bytes", [[256]], [1]), "input 'x' of model 'm'"),
    ],
)
def test_what_is_no_request_is_told(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UnfitRequestError, match=text):
        as_message(given, "m", "1")


def test_a_card_is_the_same_for_all_servers_with_the_model() -> None:
    cards = set()
    for place in ("/one", "/two"):
        config = model_config_pb2.ModelConfig(name="m", backend="pytriton", max_batch_size=4)
        config.input.add(name="x", data_type="TYPE_FP32", dims=[2])
        config.model_transaction_policy.decoupled = True
        config.parameters["place"].string_value = place
        cards.add(as_card_config(config, "m:2"))

    (card,) = map(model_config_pb2.ModelConfig.FromString, cards)
    assert (card.name, card.max_batch_size, card.model_transaction_policy.decoupled) == ("m:2", 4, True)
    assert [(it.name, list(it.dims)) for it in card.input] == [("x", [2])]
    assert not card.parameters
