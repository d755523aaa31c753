import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.errors import PortInUseError
from pytriton.server.settings.config import TritonConfig
from pytriton.server.tritonserver.ports import find_listener, port_setting_of_bind_failure, reserve_ports

LOCAL: dict[str, Any] = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1"}


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_zero_picks_different_free_ports() -> None:
    ports = reserve_ports(TritonConfig(http_port=0, grpc_port=0, metrics_port=0, **LOCAL))
    try:
        assert ports.http is not None
        assert ports.http.picked
        numbers = {endpoint.port for endpoint in ports}
        assert len(numbers) == 3
        assert 0 not in numbers
    finally:
        ports.release()


def test_only_allowed_services_get_a_port() -> None:
    config = TritonConfig(
        allow_http=False, grpc_port=0, allow_metrics=False, allow_vertex_ai=True, vertex_ai_port=0, **LOCAL
    )
    ports = reserve_ports(config)
    ports.release()
    assert [endpoint.setting for endpoint in ports] == ["grpc_port", "vertex_ai_port"]
    assert ports.http is None
    assert ports.metrics is None


def test_a_held_port_is_not_picked_by_others_but_can_be_bound_by_a_server() -> None:
    ports = reserve_ports(TritonConfig(http_port=0, allow_grpc=False, allow_metrics=False, **LOCAL))
    try:
        assert ports.http is not None
        with socket.socket() as ordinary, pytest.raises(OSError, match="in use"):
            ordinary.bind(("127.0.0.1", ports.http.port))
        # create_server sets SO_REUSEADDR, as tritonserver does.
        socket.create_server(("127.0.0.1", ports.http.port)).close()
    finally:
        ports.release()


def test_a_taken_port_is_told_with_setting_and_holder(listener: int) -> None:
    with pytest.raises(PortInUseError) as caught:
        reserve_ports(TritonConfig(grpc_port=listener, http_port=0, metrics_port=0, **LOCAL))
    error = caught.value
    assert (error.setting, error.port, error.address) == ("grpc_port", listener, "127.0.0.1")
    assert f"grpc_port={listener}" in str(error)
    assert f"process {os.getpid()} " in str(error)
    assert "0 for any free one" in str(error)


def test_nothing_is_held_after_an_error(listener: int) -> None:
    free = reserve_ports(TritonConfig(http_port=0, allow_grpc=False, allow_metrics=False, **LOCAL))
    free.release()
    assert free.http is not None
    with pytest.raises(PortInUseError):
        reserve_ports(TritonConfig(http_port=free.http.port, grpc_port=listener, metrics_port=0, **LOCAL))
    with socket.socket() as ordinary:
        ordinary.bind(("127.0.0.1", free.http.port))


def test_two_services_on_one_port_are_refused() -> None:
    free = reserve_ports(TritonConfig(http_port=0, allow_grpc=False, allow_metrics=False, **LOCAL))
    free.release()
    assert free.http is not None
    with pytest.raises(PyTritonValidationError, match=r"http_port and TritonConfig\.metrics_port are both"):
        reserve_ports(TritonConfig(http_port=free.http.port, metrics_port=free.http.port, grpc_port=0, **LOCAL))


def test_one_port_at_two_addresses_is_fine() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = TritonConfig(
        http_address="127.0.0.1", http_port=port, grpc_address="127.0.0.2", grpc_port=port, allow_metrics=False
    )
    ports = reserve_ports(config)
    ports.release()
    assert [(endpoint.address, endpoint.port) for endpoint in ports] == [("127.0.0.1", port), ("127.0.0.2", port)]
    config.grpc_address = "0.0.0.0"
    with pytest.raises(PyTritonValidationError, match="are both"):
        reserve_ports(config)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PyTritonValidationError, match=r"'192\.0\.2\.1' of TritonConfig\.http_address cannot be bound"):
        reserve_ports(TritonConfig(http_address="192.0.2.1", http_port=0, allow_grpc=False, allow_metrics=False))


def test_a_lost_race_is_read_from_the_log() -> None:
    ports = reserve_ports(TritonConfig(http_port=0, grpc_port=0, allow_metrics=False, **LOCAL))
    ports.release()
    assert ports.http is not None
    address = f"127.0.0.1:{ports.http.port}"
    line = f"E1121 main.cc:257] \"failed to start HTTP service: Unavailable - Socket '{address}' already in use \""
    assert port_setting_of_bind_failure(["I something", line, "more"], ports) == ports.http
    assert port_setting_of_bind_failure(["I something"], ports) is None


def test_addresses_for_callers_on_this_machine() -> None:
    ports = reserve_ports(TritonConfig(http_port=0, grpc_port=0, allow_metrics=False))
    ports.release()
    assert ports.http is not None
    assert ports.http.authority == f"127.0.0.1:{ports.http.port}"


def test_nobody_listens_on_a_free_port(listener: int) -> None:
    ports = reserve_ports(TritonConfig(http_port=0, allow_grpc=False, allow_metrics=False, **LOCAL))
    ports.release()
    assert ports.http is not None
    assert find_listener(ports.http.port) is None
    assert find_listener(listener) is not None
