"""A `model.py` whose batches cost no more than they may, while requests of different shapes share them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError
from pytriton.triton import Triton
from support.python_models import HEAD, ask, served, write
from support.waiting import PATIENCE_S

LIMIT = 40
MODEL = f"""{HEAD}
class TritonPythonModel:
    def execute(self, requests):
        read = pb_utils.get_input_tensor_by_name
        arrays = [read(request, "x").as_numpy() for request in requests]
        rows = sum(len(array) for array in arrays)
        longest = max(array.shape[1] for array in arrays)
        was = [rows, longest, sum(array.size for array in arrays)]
        responses = []
        for array in arrays:
            outputs = {{"y": 2 * array, "was": np.tile(np.int32(was), (len(array), 1))}}
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in outputs.items()]))
        return responses
"""
COMPLETED = MODEL.replace(
    "    def execute",
    """    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(16)
        return config

    def execute""",
)


def config(*parameters: str, head: str = "max_batch_size: 16\n", ragged: str = " allow_ragged_batch: true") -> str:
    said = dict(each.split("=") for each in parameters)
    return (
        f'backend: "python"\n{head}'
        f'input {{ name: "x" data_type: TYPE_FP32 dims: -1{ragged} }}\n'
        'output [ { name: "y" data_type: TYPE_FP32 dims: -1 }, { name: "was" data_type: TYPE_INT32 dims: 3 } ]\n'
        "dynamic_batching { max_queue_delay_microseconds: 20000 }\n"
        + "".join(f'parameters {{ key: "PYTRITON_{k}" value {{ string_value: "{v}" }} }}\n' for k, v in said.items())
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[Triton]:
    write(repository, "padded", MODEL, config(f"COST_LIMIT={LIMIT}", "COST_OVERHEAD=1"))
    write(repository, "packed", MODEL, config(f"COST_LIMIT={LIMIT}", "COST_PACKED=true"))
    write(repository, "alone", MODEL, config(f"COST_LIMIT={LIMIT}", "COST_ALONE=true"))
    write(repository, "ragged", MODEL, config())
    write(repository, "completed", COMPLETED, config(f"COST_LIMIT={LIMIT}", head="max_batch_size: 16\n"))
    with served(repository) as triton:
        yield triton


@pytest.mark.parametrize("name", ["padded", "packed", "alone", "completed", "ragged"])
def test_requests_of_any_length_share_batches(triton: Triton, name: str) -> None:
    def ask(number: int) -> list[tuple[int, int, int, int]]:
        chance = random.Random(number)
        found = []
        with ModelClient(str(triton.http_url), name, inference_timeout_s=PATIENCE_S) as client:
            for _ in range(15):
                length = chance.randrange(1, LIMIT + 1)
                x = np.array([[chance.random() for _ in range(length)]], np.float32)
                answer = client.infer_batch(x)
                assert (answer["y"] == 2 * x).all()
                found.append((*answer["was"][0].tolist(), length))
        return found

    with ThreadPoolExecutor(8) as pool:
        batches = [batch for found in pool.map(ask, range(8)) for batch in found]
    assert any(tokens != rows * length for rows, _, tokens, length in batches)  # different ones in one batch
    if name != "ragged":
        assert all((tokens if name == "packed" else rows * longest) <= LIMIT for rows, longest, tokens, _ in batches)


def test_a_request_that_costs_more_by_itself(triton: Triton) -> None:
    x = np.ones((1, LIMIT + 1), np.float32)
    with (
        ModelClient(str(triton.http_url), "padded") as client,
        pytest.raises(PyTritonClientInferenceServerError, match=f"may cost {LIMIT}, .* input 'x' with 1 row of 41"),
    ):
        client.infer_batch(x)
    with ModelClient(str(triton.http_url), "alone") as client:
        assert client.infer_batch(x)["was"].tolist() == [[1, LIMIT + 1, LIMIT + 1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (config("COST_OVERHEAD=3"), "parameter PYTRITON_COST_OVERHEAD: it needs PYTRITON_COST_LIMIT"),
        (config("COST_LIMIT=soon"), "parameter PYTRITON_COST_LIMIT: must be a whole number, got 'soon'"),
        (config("COST_LIMIT=9", ragged=""), "expected allow_ragged_batch: true for the inputs"),
        (
            config("COST_LIMIT=9") + "model_transaction_policy { decoupled: true }\n",
            "expected a model that batches .*, is not decoupled",
        ),
    ],
)
def test_what_cannot_be_counted_is_a_load_error(triton: Triton, repository: Path, text: str, expected: str) -> None:
    write(repository, "wrong", MODEL, text)
    status, answer = ask(triton, "load", "wrong")
    assert status == 400
    assert re.search(expected, str(answer))
