import http.client
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pytriton.server.control.http import HttpControl
from pytriton.server.errors import TritonServerStartError, TritonServerTimeoutError
from pytriton.server.lifecycle.startup import wait_until_up
from pytriton.server.models.workers import StartCancelled
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.command_line import EXIT_TIMEOUT_S
from pytriton.server.tritonserver.handover import Handover
from pytriton.server.tritonserver.ports import ReservedPorts, port_setting_of_bind_failure, reserve_ports
from pytriton.server.tritonserver.process import LOG_TAIL_LINES, ExitReport, ServerProcess
from support.waiting import PATIENCE_S, eventually

StartServer = Callable[..., tuple[ServerProcess, ReservedPorts]]


def control_of(ports: ReservedPorts, headers: dict[str, str] | None = None) -> HttpControl:
    assert ports.http is not None
    return HttpControl(ports.http, headers or {})


def wait_up(process: ServerProcess, ports: ReservedPorts, timeout_s: float = 60.0) -> HttpControl:
    control = control_of(ports)
    wait_until_up(process, control, ports, timeout_s=timeout_s, cancelled=lambda: False)
    return control


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    # With nobody to reap it, as in a container without an init, a dead process stays as a zombie.
    return state == "Z"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def make(code: str, **options: object) -> ServerProcess:
    return ServerProcess(python(code), os.environ, **options)  # type: ignore[arg-type]


def test_start_answer_stop(start_server: StartServer) -> None:
    process, ports = start_server()
    control = wait_up(process, ports)
    assert control.is_ready()
    assert process.exit_code is None
    assert process.stop(PATIENCE_S) == 0
    assert not process.is_running
    assert not control.is_listening()
    assert any("Started HTTPService" in line for line in process.log_tail)
    # Once more does nothing.
    assert process.stop(PATIENCE_S) == 0


def test_an_idle_connection_does_not_hold_up_the_end(start_server: StartServer) -> None:
    process, ports = start_server()
    wait_up(process, ports)
    assert ports.http is not None
    connection = http.client.HTTPConnection(ports.http.host, ports.http.port, timeout=300)
    connection.request("GET", "/v2/health/live")
    connection.getresponse().read()
    assert process.stop(PATIENCE_S) == 0
    # tritonserver counts down from what --exit-timeout-secs says, which without our setting is 30 s.
    waits = re.findall(r"Timeout (\d+): Found", "\n".join(process.log_tail))
    assert max(map(int, waits)) == EXIT_TIMEOUT_S
    connection.close()


def test_a_hung_server_is_killed(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    process, ports = start_server()
    wait_up(process, ports)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert process.stop(0.3) == -signal.SIGKILL
    assert f"pid {process.pid}" in caplog.text
    assert "SIGKILL" in caplog.text


def test_hurry_ends_the_patience(start_server: StartServer) -> None:
    process, ports = start_server()
    wait_up(process, ports)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert process.stop(3600.0, hurried=lambda: True) == -signal.SIGKILL


def test_a_killed_server_is_reported() -> None:
    reports: list[ExitReport] = []
    reported = threading.Event()

    def note(report: ExitReport) -> None:
        reports.append(report)
        reported.set()

    process = make("import time; print('last words', flush=True); time.sleep(100)", on_exit=note)
    process.start()
    assert process.pid is not None
    while not process.log_tail:
        assert not process.wait(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert reported.wait(300)
    assert reports[0].exit_code == -signal.SIGKILL
    assert reports[0].log_lines == ("last words",)
    assert not reports[0].expected


def test_an_ordered_end_is_reported_as_expected() -> None:
    reports: list[ExitReport] = []
    process = make("import time; time.sleep(100)", on_exit=reports.append)
    process.start()
    process.stop(PATIENCE_S)
    assert [report.expected for report in reports] == [True]


def test_the_log_is_bounded_and_levelled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="pytriton.tritonserver"):
        process = make(
            "for i in range(1000): print(i)\n"
            "print('E1121 00:00:00.1 1 a.cc:1] bad\\ncontinued')\n"
            "print('W1121 00:00:00.1 1 a.cc:1] noise')\n"
            "print('x' * 100000)\n"
            "print('no newline', end='')",
            quiet=("noise",),
        )
        process.start()
        assert process.wait(300)
        process.stop(1.0)
    assert len(process.log_tail) == LOG_TAIL_LINES
    assert process.log_tail[-1] == "no newline"
    assert max(map(len, process.log_tail)) < 20000
    levels = {record.getMessage(): record.levelno for record in caplog.records}
    assert levels["continued"] == logging.ERROR
    assert levels["noise (a.cc:1)"] == logging.DEBUG


def test_a_flood_of_lines_is_cut_short(caplog: pytest.LogCaptureFixture) -> None:
    """libevent says what it cannot do each time that it tries, which it does at once again."""
    code = """
import sys
for _ in range(30000):
    print("[warn] Error from accept() call: Too many open files")
print("I1126 10:00:00.000000 1 main.cc:1] over")
for number in range(30000):
    print("I1126 10:00:00.000000 1 main.cc:1]", number)
"""
    with caplog.at_level(logging.INFO, "pytriton.tritonserver"):
        process = make(code)
        process.start()
        assert process.wait(PATIENCE_S)
        process.stop(0.0)
    levels = {record.levelno for record in caplog.records if "accept() call" in record.getMessage()}
    assert levels == {logging.WARNING}
    assert caplog.text.count("accept() call") == 11
    assert "(the line before came 29989 times more)" in caplog.text
    assert len(caplog.records) < 25_000


@pytest.mark.parametrize(("complete", "tells_start", "level"), [
    (False, False, "DEBUG"), (True, False, "INFO"), (False, True, "INFO"),
])  # fmt: skip
def test_what_is_said_of_each_model_at_the_start(
    caplog: pytest.LogCaptureFixture, complete: bool, tells_start: bool, level: str
) -> None:
    place = "I1121 00:00:00.123456 7"
    lines = [
        f'{place} model_lifecycle.cc:472] "loading: net:1"',
        f"{place} model_lifecycle.cc:839] \"successfully loaded 'net'\"",
        f"{place} connection.cc:226] model 'net' version 1: worker 'net' (pid 7) attached, protocol 1.0",
        "loading: weights of a model.py",
    ]
    handover = Handover(complete=complete)
    with caplog.at_level(logging.DEBUG, logger="pytriton.tritonserver"):
        process = make(f"print({chr(10).join(lines)!r})", handover=handover, tells_start=tells_start)
        process.start()
        assert process.wait(PATIENCE_S)
        process.stop(1.0)
    assert [record.levelname for record in caplog.records] == [level] * 3 + ["INFO"]


def test_records_have_the_text_of_the_server_without_its_prefix(caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        'I1121 00:00:00.123456 7 model_lifecycle.cc:472] "loading: net:1"',
        'W1121 00:00:00.123456 7 http_server.cc:1] "a name\\nI1121 of a caller"',
        "E1121 00:00:00.123456 7 server.cc:5] not quoted",
        "Signal (2) received.",
    ]
    with caplog.at_level(logging.DEBUG, logger="pytriton.tritonserver"):
        process = make(f"print({chr(10).join(lines)!r})")
        process.start()
        assert process.wait(300)
        process.stop(1.0)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "loading: net:1 (model_lifecycle.cc:472)"),
        ("WARNING", '"a name\\nI1121 of a caller" (http_server.cc:1)'),
        ("ERROR", "not quoted (server.cc:5)"),
        ("ERROR", "Signal (2) received."),
    ]
    # As it was written.
    assert process.log_tail == lines


def test_a_pipe_that_a_grandchild_holds_does_not_hide_the_end() -> None:
    process = make(
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); sys.exit(3)"
    )
    process.start()
    try:
        assert process.wait(300)
        assert process.exit_code == 3
    finally:
        os.kill(int(process.log_tail[0]), signal.SIGKILL)


def test_a_program_that_is_not_there() -> None:
    process = ServerProcess(["/nowhere/tritonserver"], {})
    with pytest.raises(
        TritonServerStartError, match=r"/nowhere/tritonserver does not exist\. Set PYTRITON_TRITONSERVER_DIR"
    ):
        process.start()


def test_a_program_that_does_not_start(tmp_path: Path, local_config: TritonConfig) -> None:
    program = tmp_path / "tritonserver"
    program.write_bytes(b"\x7fELF, but not really")
    program.chmod(0o755)
    ports = reserve_ports(local_config)
    ports.release()
    process = ServerProcess([str(program)], os.environ)
    process.start()
    with pytest.raises(
        TritonServerStartError, match=r"ended with exit code 126 while it was starting(.|\n)*cannot be run"
    ):
        wait_up(process, ports)


def test_a_program_that_ends_tells_its_last_lines(local_config: TritonConfig) -> None:
    ports = reserve_ports(local_config)
    ports.release()
    process = make("print('the reason'); raise SystemExit(7)")
    process.start()
    with pytest.raises(TritonServerStartError, match="the reason") as caught:
        wait_up(process, ports)
    assert caught.value.exit_code == 7
    assert caught.value.log_lines == ("the reason",)


def test_a_server_that_never_answers(local_config: TritonConfig) -> None:
    ports = reserve_ports(local_config)
    ports.release()
    process = make("import time; time.sleep(100)")
    process.start()
    try:
        with pytest.raises(TritonServerTimeoutError, match=r"did not answer within 0\.05 s") as caught:
            wait_up(process, ports, timeout_s=0.05)
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(StartCancelled):
            wait_until_up(process, control_of(ports), ports, timeout_s=300, cancelled=lambda: True)
    finally:
        process.stop(20.0)


def test_a_port_lost_to_another_server_is_read_from_the_log(
    start_server: StartServer, local_config: TritonConfig
) -> None:
    first, ports = start_server()
    wait_up(first, ports)
    # The second is told to use the ports of the first, as if it had lost the race for them.
    second, _ = start_server(ports=ports)
    assert second.wait(300)
    assert second.exit_code == 1
    assert port_setting_of_bind_failure(second.log_tail, ports) in list(ports)


def test_the_token_opens_protected_endpoints(start_server: StartServer, local_config: TritonConfig) -> None:
    security = TritonSecurityConfig(restricted_endpoints=["health", "model-repository"])
    process, ports = start_server(security=security)
    wait_up(process, ports)
    assert security.access_token is not None
    assert not control_of(ports).is_ready()
    opened = control_of(ports, {"triton-access-token": security.access_token})
    assert opened.is_ready()
    assert opened.index() == []


def test_no_server_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.server.tritonserver.command_line import ServerFolders, build_command
from pytriton.server.control.http import HttpControl
from pytriton.server.tritonserver.ports import reserve_ports
from pytriton.server.tritonserver.process import ServerProcess
from pytriton.server.lifecycle.startup import wait_until_up
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.settings.config import TritonConfig
binary = find_tritonserver()
config = TritonConfig(http_address="127.0.0.1", grpc_address="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0)
ports = reserve_ports(config)
models = Path(sys.argv[1])
folders = ServerFolders(executable=binary.executable, models=models, backends=binary.backends_dir, caches=None)
process = ServerProcess(build_command(config, TritonSecurityConfig(), folders, ports), binary.environment())
process.start()
wait_until_up(process, HttpControl(ports.http, {}), ports, timeout_s=300, cancelled=lambda: False)
print(process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        assert not is_gone(server)
        parent.kill()
    eventually(lambda: is_gone(server))


SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


@pytest.mark.parametrize("deed", ["signal.pthread_sigmask(signal.SIG_BLOCK, numbers)", "ignore(numbers)"])
def test_what_the_program_does_with_its_signals_is_not_inherited(deed: str) -> None:
    """As one that waits for its signals with `sigwait`: the server would be deaf, and outlive a killed program."""
    script = f"""
import os, signal, sys
from pytriton.server.tritonserver.process import ServerProcess

def ignore(numbers):
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)

numbers = {sorted(map(int, SIGNALS))}
{deed}
code = "import time; print('up', flush=True); time.sleep(600)"
process = ServerProcess([sys.executable, "-c", code], os.environ)
process.start()
while not process.log_tail:
    process.wait(0.01)
print(process.pid, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        server = int(program.stdout.readline())
        status = Path(f"/proc/{server}/status").read_text()
        told = [int(re.findall(rf"^{field}:\s*(\w+)", status, re.M)[0], 16) for field in ("SigBlk", "SigIgn")]
        assert not any(mask >> (number - 1) & 1 for mask in told for number in SIGNALS)
        program.kill()
    eventually(lambda: is_gone(server))


def test_secrets_reach_the_process_and_are_wiped_when_it_has_logged() -> None:
    # As the server logs, which it does only after it has read its arguments.
    code = (
        "import os, sys, time; print(sys.argv[1:], 'PYTRITON_EXEC_SECRETS' in os.environ, flush=True); "
        "print('I1121 00:00:00 ready', flush=True); time.sleep(600)"
    )
    arguments = ["--a=key=secret", "--b=secret", "--c=key=other{secret-0}", "--d=secretly"]
    process = ServerProcess([*python(code), *arguments], os.environ, secrets=["secret", "other{secret-0}", "secret"])
    process.start()
    try:
        eventually(lambda: any("ready" in line for line in process.log_tail))
        assert process.log_tail[0] == f"{arguments} False"
        command = Path(f"/proc/{process.pid}/cmdline")
        wiped = ["--a=key=******", "--b=******", "--c=key=***************", "--d=secretly"]
        eventually(lambda: command.read_text().rstrip("\0").split("\0")[-4:] == wiped)
    finally:
        process.stop(10.0)
