"""What `describe` says of a server that does not run, and `check` of its settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import ProcessWorker, RemoteTriton, Triton, TritonConfig, TritonDescription
from support.serving import short_home

VECTOR = Tensor((-1,), "float32", name="x")


@pytest.fixture(autouse=True)
def home(clean_environment: None) -> Iterator[None]:
    with short_home():
        yield


def double(requests: Any) -> Any:
    raise NotImplementedError


def test_models_are_described(tmp_path: Path) -> None:
    triton = Triton(config=TritonConfig(http_port=0, grpc_port=0, metrics_port=0))
    triton.bind("double", [double, double], [VECTOR], [VECTOR], config=ModelConfig(max_batch_size=8))
    triton.bind("far", ProcessWorker("a:b", copies=3), [VECTOR], [VECTOR], 2, ModelConfig(batching=False))
    (tmp_path / "mine").mkdir()
    triton.bind_model(tmp_path / "mine")

    found = triton.describe()

    double_, far = found.models
    assert (double_.name, double_.version, double_.threads, double_.processes) == ("double", 1, 2, 0)
    assert (far.name, far.version, far.threads, far.processes) == ("far", 2, 0, 3)
    assert double_.config.max_batch_size == double_.triton_config["max_batch_size"] == 8
    assert double_.is_ready is None
    assert str(found).splitlines() == [
        "double(x: FP32[-1]) -> x: FP32[-1]; max_batch_size=8, 2 threads",
        "far(x: FP32[-1]) -> x: FP32[-1]; version 2, 3 processes",
        f"mine; of {tmp_path / 'mine'}",
    ]
    assert found == TritonDescription(
        found.models, is_running=False, start_s=0.0, folders={"mine": tmp_path / "mine"}, address="0.0.0.0"
    )


def test_ports_are_those_of_the_settings_before_the_start() -> None:
    triton = Triton(config=TritonConfig(http_port=0, grpc_port=4711, allow_metrics=False))
    assert triton.describe().ports == (4711,)


@pytest.mark.parametrize("named", ["::1", "[::1]", "ipv6:::1"])
def test_the_address_is_that_of_the_settings_or_of_the_environment(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Triton(config=TritonConfig(http_address=named)).describe().address == "::1"
    monkeypatch.setenv("PYTRITON_TRITON_CONFIG_GRPC_ADDRESS", named)
    assert Triton(config=TritonConfig(allow_http=False)).describe().address == "::1"


def test_settings_are_checked_without_a_start() -> None:
    Triton(config=TritonConfig(http_port=0, grpc_port=0, metrics_port=0)).check()
    for config in (TritonConfig(http_port=4711, grpc_port=4711), TritonConfig(grpc_use_ssl=True)):
        with pytest.raises(PyTritonValidationError):
            Triton(config=config).check()


def test_a_remote_server_is_described_by_its_address() -> None:
    assert RemoteTriton("grpc://localhost:4711").describe().urls == {"grpc": "grpc://localhost:4711"}
    assert RemoteTriton("localhost:4711").describe().urls == {"http": "http://localhost:4711"}
