from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient, ModelResult

ROW = np.array([1.0, 2.0], dtype=np.float32)


def test_is_a_dictionary() -> None:
    result = ModelResult({"a": ROW}, parameters={"p": 1}, request_id="7", model_name="m", model_version="2")
    assert isinstance(result, dict)
    assert result == {"a": ROW}
    assert repr(result) == repr({"a": ROW})
    assert list(result.items()) == [("a", ROW)]
    assert ModelResult() == {}
    assert ModelResult().parameters == {}


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_copies_and_pickles_keep_everything(duplicate: Any) -> None:
    result = ModelResult({"a": ROW}, parameters={"p": 1}, request_id="7", model_name="m", model_version="2")
    again = duplicate(result)
    assert type(again) is ModelResult
    assert again["a"].tolist() == [1.0, 2.0]
    about = (again.parameters, again.request_id, again.model_name, again.model_version)
    assert about == ({"p": 1}, "7", "m", "2")


def test_what_a_server_says(server: Any) -> None:
    server.response_parameters = {"tokens": 3, "text": "ü", "last": True, "score": 0.5}
    with ModelClient(server.url, "add") as client:
        result = client.infer_sample(ROW)
        assert client.infer_batch(ROW[np.newaxis]).parameters == server.response_parameters
    assert result.parameters == server.response_parameters
    assert {name: type(value) for name, value in result.parameters.items()} == {
        "tokens": int,
        "text": str,
        "last": bool,
        "score": float,
    }
    assert result.request_id.endswith("-0")
    assert (result.model_name, result.model_version) == ("add", "1")
