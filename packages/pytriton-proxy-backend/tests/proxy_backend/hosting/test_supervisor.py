"""The supervisor of hosts without a tritonserver: what it answers to those who ask, and to those who must not."""

import contextlib
import json
import os
import re
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytriton.proxy_backend.errors import HostingError
from pytriton.proxy_backend.hosting.control import Frame, FrameKind, receive_frame, send_frame
from pytriton.proxy_backend.hosting.supervisor import HostSupervisor
from support.waiting import wait_for_threads

MODEL = """
import os
import time


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {completing}
        return config

    def execute(self, requests):
        return []
"""


@pytest.fixture
def supervisor() -> Iterator[HostSupervisor]:
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        made = HostSupervisor(Path(folder) / "hosts")
        made.start()
        yield made
        made.close(0.0)
        wait_for_threads()


@contextlib.contextmanager
def connected(supervisor: HostSupervisor) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect(str(supervisor.socket_path))
        yield channel


def announcement(folder: Path, **config: object) -> list[str]:
    described = {"name": "m", "max_batch_size": 4, **config}
    return ["m", "1", str(folder / "m"), json.dumps(described), "{}", "1", "python", "/backends/python"]


def write(folder: Path, completing: str = "pass") -> None:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.py").write_text(MODEL.format(completing=completing))


def hosts() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and b"worker_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def eventually_no_hosts() -> None:
    while hosts():
        time.sleep(0.01)


def test_a_model_is_announced_and_let_go(supervisor: HostSupervisor, tmp_path: Path) -> None:
    write(tmp_path, "config.set_max_batch_size(8)")
    with connected(supervisor) as channel:
        send_frame(channel, FrameKind.MODEL, announcement(tmp_path))
        kind, fields = receive_frame(channel) or Frame(0, ())
        assert kind == FrameKind.OK, fields
        config, settings = fields
        assert json.loads(config)["max_batch_size"] == 8
        assert re.search(f"^endpoint = {supervisor.socket_path.parent}/[0-9a-f]{{6}}-1$", settings, re.MULTILINE)
        assert "batching = true\n" in settings
        # It waits for its instance.
        assert len(hosts()) == 1
    eventually_no_hosts()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"default_model_filename": "other.py"}, "other.py"),
        (
            {"parameters": {"FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "maybe"}}},
            "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: maybe'",
        ),
        ({"parameters": {"EXECUTION_ENV_PATH": {"string_value": "/no/env"}}}, "Failed to get the canonical path"),
    ],
)
def test_what_cannot_be_loaded(
    config: dict[str, object], said: str, supervisor: HostSupervisor, tmp_path: Path
) -> None:
    write(tmp_path)
    with connected(supervisor) as channel:
        send_frame(channel, FrameKind.MODEL, announcement(tmp_path, **config))
        kind, (text,) = receive_frame(channel) or Frame(0, ("",))
        assert kind == FrameKind.ERROR
        assert said in text
        assert receive_frame(channel) is None
    assert not hosts()


def test_inputs_that_are_to_stay_on_a_gpu(
    supervisor: HostSupervisor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    config = {"parameters": {"FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "no"}}}
    with connected(supervisor) as channel:
        send_frame(channel, FrameKind.MODEL, announcement(tmp_path, **config))
        kind, fields = receive_frame(channel) or Frame(0, ("",))
        assert kind == FrameKind.OK, fields
    eventually_no_hosts()
    [said] = [record.getMessage() for record in caplog.records if "FORCE_CPU_ONLY" in record.getMessage()]
    assert said.startswith("model 'm': FORCE_CPU_ONLY_INPUT_TENSORS is \"no\", which is not honoured here: ")


def test_an_instance_of_no_model(supervisor: HostSupervisor) -> None:
    with connected(supervisor) as channel:
        send_frame(channel, FrameKind.INSTANCE, ["/no/model", "m_0", "CPU", "0", "/no/model.1"])
        assert receive_frame(channel) == Frame(
            FrameKind.ERROR, ("instance 'm_0' is of a model that is not loaded: /no/model",)
        )


@pytest.mark.parametrize("kind", [FrameKind.MODEL, FrameKind.INSTANCE, FrameKind.OK, 77])
def test_a_library_of_another_version_is_told(kind: int, supervisor: HostSupervisor) -> None:
    with connected(supervisor) as channel:
        channel.sendall(struct.pack("<IHH", 4, kind, 0))
        answered, (text,) = receive_frame(channel) or Frame(0, ("",))
        assert answered == FrameKind.ERROR
        assert f"got kind {int(kind)} with 0" in text
        assert "convert --replace" in text
        assert receive_frame(channel) is None
    # It goes on.
    test_an_instance_of_no_model(supervisor)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b""])
def test_others_are_cut_off(data: bytes, supervisor: HostSupervisor, tmp_path: Path) -> None:
    with connected(supervisor) as channel:
        channel.sendall(data)
        channel.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert channel.recv(1) == b""
    # It goes on.
    test_an_instance_of_no_model(supervisor)


@pytest.mark.parametrize("how", ["the server dies", "the server stops", "the end"])
def test_a_load_that_nobody_waits_for_is_ended(how: str, supervisor: HostSupervisor, tmp_path: Path) -> None:
    write(tmp_path, f"open({str(tmp_path / 'begun')!r}, 'w').close(); time.sleep(3600)")
    with connected(supervisor) as channel:
        send_frame(channel, FrameKind.MODEL, announcement(tmp_path))
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        if how == "the server dies":
            channel.close()
        elif how == "the server stops":
            supervisor.stop_loading()
            assert receive_frame(channel) == Frame(FrameKind.ERROR, ("processes of Python models are being stopped",))
        else:
            supervisor.close(0.0)
        eventually_no_hosts()


def test_one_folder_has_one_supervisor(supervisor: HostSupervisor) -> None:
    second = HostSupervisor(supervisor.socket_path.parent)
    with pytest.raises(HostingError, match="Another process listens at"):
        second.start()
    second.close(0.0)
    # The first one goes on.
    test_an_instance_of_no_model(supervisor)


def test_what_a_killed_supervisor_has_left_is_removed() -> None:
    with tempfile.TemporaryDirectory(prefix="pt") as name:
        folder = Path(name)
        (folder / "environments-0123ab" / "1").mkdir(parents=True)
        (folder / "mine").touch()
        sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        for number, each in enumerate(sockets):
            each.bind(str(folder / f"0123ab-1.{number}"))
            each.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(folder / "hosts.sock"))
        # The server that listened there was killed, too; the other one lives.
        sockets[0].close()
        with sockets[1]:
            supervisor = HostSupervisor(folder)
            supervisor.start()
            assert sorted(os.listdir(folder)) == ["0123ab-1.1", "hosts.sock", "mine"]
            assert stat.S_IMODE((folder / "hosts.sock").stat().st_mode) == 0o600
            test_an_instance_of_no_model(supervisor)
            supervisor.close(0.0)
            assert sorted(os.listdir(folder)) == ["0123ab-1.1", "mine"]
            # Nobody has come to it for that.
            sockets[1].setblocking(False)
            with pytest.raises(BlockingIOError):
                sockets[1].accept()
        wait_for_threads()


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    (tmp_path / "hosts.sock").write_text("mine")
    with pytest.raises(HostingError, match="is no socket: remove it"):
        HostSupervisor(tmp_path).start()
    assert (tmp_path / "hosts.sock").read_text() == "mine"


def test_a_path_that_is_too_long_says_so(tmp_path: Path) -> None:
    with pytest.raises(HostingError, match="Take a shorter path"):
        HostSupervisor(tmp_path / ("x" * 100), "Take a shorter path.").start()
