"""What the tests of pytriton-server share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.server.tritonserver.command_line import ServerFolders, build_command
from pytriton.server.tritonserver.ports import ReservedPorts, reserve_ports
from pytriton.server.tritonserver.process import ServerProcess


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings of whoever runs the tests must not change them, nor tests write into the user's cache."""
    for name in os.environ:
        if name.upper().startswith("PYTRITON_TRITON_CONFIG_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTRITON_HOME", str(tmp_path / "home"))


@pytest.fixture
def local_config() -> TritonConfig:
    """Settings of a server that no other can meet, and that ends at once: without metrics, nothing to sleep on."""
    return TritonConfig(
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        http_port=0,
        grpc_port=0,
        allow_metrics=False,
    )


@pytest.fixture
def server_folders(tmp_path: Path) -> ServerFolders:
    """The server's own backends, and an empty model repository."""
    binary = find_tritonserver()
    models = tmp_path / "models"
    models.mkdir()
    return ServerFolders(
        executable=binary.executable, models=models, backends=binary.backends_dir, caches=binary.caches_dir
    )


@pytest.fixture
def start_server(
    local_config: TritonConfig, server_folders: ServerFolders
) -> Iterator[Callable[..., tuple[ServerProcess, ReservedPorts]]]:
    """Starts real servers, and fails the test that leaves one behind."""
    started: list[tuple[ServerProcess, ReservedPorts]] = []

    def start(
        config: TritonConfig = local_config,
        security: TritonSecurityConfig | None = None,
        ports: ReservedPorts | None = None,
    ) -> tuple[ServerProcess, ReservedPorts]:
        ports = ports or reserve_ports(config)
        command = build_command(config, security or TritonSecurityConfig(), server_folders, ports)
        process = ServerProcess(command, find_tritonserver().environment())
        started.append((process, ports))
        process.start()
        return process, ports

    yield start
    for process, ports in started:
        ports.release()
        process.stop(10.0)
        assert not process.is_running
