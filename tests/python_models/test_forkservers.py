"""Hosts of Python models that are forked from a process which has imported what they need."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.proxy_backend.forkserver_main import early_forkserver
from support.http import call
from support.processes import is_running
from support.python_models import (
    CONFIG,
    MODEL,
    ask,
    forkservers,
    hosts,
    infer,
    processes,
    served,
    stop_while_asked,
    write,
)
from support.waiting import PATIENCE_S, eventually

Command = subprocess.Popen[str]
SEVERAL = CONFIG + "instance_group { count: 4 kind: KIND_CPU }\n"
# Each request waits for the others, so that all instances answer; what they have drawn tells them apart.
DRAWS = """
import os
import random
import signal
import sys
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        assert threading.current_thread() is threading.main_thread()
        assert os.getsid(0) == os.getpid() == os.getpgid(0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert sys.argv == [""]
        # More than one thread of the library for linear algebra, whose threads no fork has.
        many = np.ones((512, 512))
        assert (many @ many == 512).all()
        drawn = np.random.random(), random.random(), os.getpid()
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(drawn, np.float32))]) for _ in requests
        ]
"""


def test_several_hosts_are_forked(tmp_path: Path) -> None:
    write(tmp_path, "double", DRAWS, SEVERAL)
    with served(tmp_path) as triton:
        (forkserver,) = forkservers()
        assert forkservers()[forkserver].endswith("forkserver_main (forkserver of hosts)")
        names = sorted(command.rpartition(" (")[2] for command in hosts().values())
        assert names == [f"host {number} of model 'double')" for number in range(4)]
        drawn: dict[float, tuple[float, float]] = {}
        while len(drawn) < 4:
            by_numpy, by_random, host = infer(triton, "double", 1)
            drawn.setdefault(host, (by_numpy, by_random))
        assert len({each for pair in drawn.values() for each in pair}) == 8
        assert set(drawn) == {float(np.float32(each)) for each in hosts()}
        assert ask(triton, "unload", "double")[0] == 200
        eventually(lambda: not hosts() and not forkservers())


def test_a_host_that_is_alone_is_not(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write(tmp_path, name, MODEL)
    write(tmp_path, "third", MODEL)
    with served(tmp_path, load_model=["first", "second"]) as triton:
        assert len(hosts()) == 2
        assert not forkservers()
        assert ask(triton, "load", "third")[0] == 200
        assert len(forkservers()) == 1
        assert len(processes("worker_main", os.getpid())) == 2
        for name in ("first", "second", "third"):
            assert infer(triton, name, 1) == [2]
            assert ask(triton, "unload", name)[0] == 200
        eventually(lambda: not hosts() and not forkservers())


def test_forked_hosts_take_less_memory(tmp_path: Path) -> None:
    write(tmp_path, "alone", MODEL)
    write(tmp_path, "several", MODEL, SEVERAL)
    with served(tmp_path, load_model=["alone"]) as triton:
        assert infer(triton, "alone", 1) == [2]
        (alone,) = hosts()
        assert ask(triton, "load", "several")[0] == 200
        for _ in range(20):
            assert infer(triton, "several", 1) == [2]
        forked = hosts().keys() - {alone}
        assert len(forked) == 4
        assert max(own_kib(each) for each in forked) < own_kib(alone) / 2


def own_kib(pid: int) -> int:
    """Return the memory that a process has for itself alone."""
    found = re.search(r"Private_Dirty:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    ("faulty", "said"),
    [("os._exit(3)", "ended with exit code 3"), ("os.kill(os.getpid(), 11)", r"signal 11 \(SIGSEGV")],
)
def test_how_a_forked_host_ends_is_told(
    tmp_path: Path, faulty: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "double", MODEL.replace("os._exit(3)", faulty), SEVERAL)
    with served(tmp_path) as triton:
        before = hosts().keys()
        with pytest.raises(Exception, match=r"host of double_0_\d' \(pid \d+\) was lost while it worked on this"):
            infer(triton, "double", 13)
        eventually(lambda: len(hosts()) == 4 and hosts().keys() != before)
        for _ in range(8):
            assert infer(triton, "double", 1) == [2]
        assert re.search(rf"host \d of model 'double' \(pid \d+\) .*{said}.*; it is started again", caplog.text)
        assert len(forkservers()) == 1


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    exits = MODEL + "\n    def initialize(self, args):\n        print('at the end', flush=True)\n        os._exit(7)\n"
    write(tmp_path, "exits", exits, SEVERAL)
    write(tmp_path, "raises", exits.replace("os._exit(7)", "raise ValueError('no weights')"), SEVERAL)
    with served(tmp_path, load_model=[]) as triton:
        for name, said in (("exits", "ended with exit code 7.*at the end"), ("raises", "no weights")):
            status, answer = ask(triton, "load", name)
            assert status == 400
            assert re.search(said, answer["error"], re.DOTALL), answer
        eventually(lambda: not hosts() and not forkservers())


def test_the_end_of_a_forkserver(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "double", MODEL, SEVERAL)
    with served(tmp_path) as triton:
        (forkserver,) = forkservers()
        before = hosts().keys()
        for number in (signal.SIGTERM, signal.SIGINT):
            # As a service that is stopped sends it to all of its processes.
            os.kill(forkserver, number)
        assert infer(triton, "double", 1) == [2]
        assert hosts().keys() == before
        os.kill(forkserver, signal.SIGKILL)
        # Nobody outlives it, and others take their places, with another forkserver.
        eventually(lambda: not hosts().keys() & before and len(hosts()) == 4)
        for _ in range(8):
            assert infer(triton, "double", 1) == [2]
        (after,) = forkservers()
        assert after != forkserver
        assert f"forkserver of the hosts of Python models (pid {forkserver}) was killed by signal 9" in caplog.text


def test_a_stopped_host_does_not_keep_the_others(tmp_path: Path) -> None:
    write(tmp_path, "double", MODEL, SEVERAL)
    with served(tmp_path) as triton:
        first, *_ = sorted(hosts())
        os.kill(first, signal.SIGSTOP)
        try:
            victim = sorted(hosts())[1]
            os.kill(victim, signal.SIGKILL)
            eventually(lambda: victim not in hosts() and len(hosts()) == 4)
        finally:
            os.kill(first, signal.SIGCONT)
        assert infer(triton, "double", 1) == [2]


def test_a_supervisor_that_is_killed_takes_all_along(tmp_path: Path) -> None:
    write(tmp_path, "double", MODEL, SEVERAL)
    with command(tmp_path) as (process, url):
        assert infer_at(url, "double", 1) == [2]
        (forkserver,) = forkservers(process.pid)
        left = [forkserver, *hosts(process.pid)]
        assert len(left) == 5
        process.kill()
        process.wait(PATIENCE_S)
        # Nobody may reap them: who is the parent of an orphan depends on the machine.
        eventually(lambda: not any(is_running(each) for each in left))


@contextlib.contextmanager
def command(
    repository: Path, *options: str, program: Sequence[str] = ("-m", "pytriton"), pass_fds: Sequence[int] = ()
) -> Iterator[tuple[Command, str]]:
    """Have the command serve a repository; gives its process, which ends with the block, and the server's URL.

    Args:
        repository: The repository.
        options: Further options of the command.
        program: What the interpreter is told to run.
        pass_fds: Descriptors that it inherits.
    """
    ports = ["--address=127.0.0.1", "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--access-token=secret"]
    arguments = [sys.executable, *program, "serve-repository", str(repository), *ports, *options]
    with tempfile.TemporaryDirectory(prefix="pt") as home:
        # What a killed server leaves there is for the next one to remove.
        env = {**os.environ, "PYTRITON_HOME": home}
        # Hosts have it in any case.
        env.pop("PYTHONUNBUFFERED", None)
        with subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            cwd=repository,
            pass_fds=pass_fds,
        ) as process:
            assert process.stdout is not None
            written = ""
            while "Serving." not in written:
                line = process.stdout.readline()
                assert line, written
                written += line
            found = re.search(r"HTTP +(http://\S+)", written)
            assert found is not None, written
            reading = threading.Thread(target=process.stdout.read)
            reading.start()
            try:
                yield process, found[1]
            finally:
                process.terminate()
                process.wait(PATIENCE_S)
                reading.join()


def infer_at(url: str, model: str, *values: float) -> list[float]:
    """Return what a model of a server makes of some values."""
    with ModelClient(url, model, inference_timeout_s=PATIENCE_S) as client:
        answer: list[float] = client.infer_sample(x=np.array(values, np.float32))["y"].tolist()
        return answer


def ask_at(url: str, action: str, model: str) -> int:
    """Load or unload a model by a call; return the status."""
    return call(url, "POST", f"/v2/repository/models/{model}/{action}", {}, {"triton-access-token": "secret"})[0]


# What a model may see of the process that it is in.
SURROUNDINGS = """

import ctypes
import logging
import resource
import signal
import sys
import threading


def handler(number):
    return getattr(signal.getsignal(number), "__name__", str(signal.getsignal(number)))


SEEN = {
    "arguments": sys.argv,
    "path": sys.path,
    "working directory": os.getcwd(),
    "bytecode": sys.dont_write_bytecode,
    "variables": dict(os.environ),
    "C's variables": {name: ctypes.CDLL(None).getenv(name.encode()) != 0 for name in os.environ},
    "input": sys.stdin.read(),
    "streams": [
        (each.encoding, each.errors, each.line_buffering, each.write_through, type(each.buffer).__name__, each.fileno())
        for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    ],
    "signals": {number: handler(number) for number in signal.valid_signals()},
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "threads": [each.name for each in threading.enumerate()],
    "leads": os.getpid() == os.getpgid(0) == os.getsid(0),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"},
    "handlers": [str(each) for each in logging.getLogger().handlers],
    "level": logging.getLogger().level,
    "hook": sys.excepthook is sys.__excepthook__,
    "program": __import__("__main__").__file__.rpartition("/")[2] in ("worker_main.py", "forkserver_main.py"),
    "packages": sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names),
    "ours": [name for name in sys.modules if name.startswith(("pytriton.triton", "pytriton.cli."))],
    "descriptors": sorted(
        os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}") and os.get_inheritable(int(name))
    ),
}
with open(os.path.join(os.path.dirname(os.path.dirname(__file__)), "seen.json"), "w") as file:
    json.dump(SEEN, file)
"""


def test_the_only_host_of_a_command_is_forked_from_it(tmp_path: Path) -> None:
    """It takes less memory, and sees nothing else than one that was started anew."""
    seen: list[dict[str, Any]] = []
    own: list[int] = []
    write(tmp_path, "double", MODEL + SURROUNDINGS)
    reading, writing = os.pipe()
    script = str(Path(sys.executable).with_name("pytriton"))
    # An option of the interpreter is not passed on, so hosts are started anew then.
    for program, number in ((("-s", "-m", "pytriton"), 0), (("-m", "pytriton"), 1), ((script,), 1)):
        with command(tmp_path, program=program, pass_fds=[writing]) as (process, url):
            assert infer_at(url, "double", 1) == [2]
            assert len(forkservers(process.pid)) == number
            assert all(os.getsid(forkserver) == forkserver for forkserver in forkservers(process.pid))
            ((host, line),) = hosts(process.pid).items()
            assert line.endswith("host 0 of model 'double'" + ")" * number)
            own.append(own_kib(host))
        seen.append(json.loads((tmp_path / "double" / "seen.json").read_text()))
        del seen[-1]["variables"]["PYTRITON_HOME"]
    for each in (reading, writing):
        os.close(each)
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert max(own[1:]) < own[0] / 2


def test_an_early_forkserver_outlives_its_hosts(tmp_path: Path) -> None:
    write(tmp_path, "double", MODEL)
    write(tmp_path, "triple", MODEL.replace("float32(2)", "float32(3)"), SEVERAL)
    with command(tmp_path, "--load-model=double") as (process, url):
        (forkserver,) = forkservers(process.pid)
        assert len(processes("worker_main", forkserver)) == 1
        assert ask_at(url, "unload", "double") == 200
        eventually(lambda: not hosts(process.pid))
        for name in ("double", "triple"):
            assert ask_at(url, "load", name) == 200
        assert len(processes("worker_main", forkserver)) == 5
        assert list(forkservers(process.pid)) == [forkserver]
        # Then all is as in a program.
        os.kill(forkserver, signal.SIGKILL)
        eventually(lambda: len(hosts(process.pid)) == 5 and forkserver not in forkservers(process.pid))
        assert infer_at(url, "double", 1) == [2]
        assert infer_at(url, "triple", 1) == [3]
    assert process.returncode == 0


def test_a_program_with_threads_forks_none() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with early_forkserver():
            assert not forkservers()
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("who", ["workers", "stub"])
def test_a_command_that_needs_no_hosts_forks_none(tmp_path: Path, who: str) -> None:
    if who == "workers":
        # Not found without reading each configuration; it is served all the same.
        folder = write(tmp_path, "double", MODEL, CONFIG + 'default_model_filename: "other.py"\n')
        (folder / "model.py").rename(folder / "other.py")
    else:
        write(tmp_path, "double", MODEL)
    with command(tmp_path, f"--python-models={who}", "--load-model=double") as (process, url):
        assert infer_at(url, "double", 1) == [2]
        assert not forkservers(process.pid)
        assert len(hosts(process.pid)) == (who == "workers")


def test_a_stop_lets_all_finalize(tmp_path: Path) -> None:
    life = (
        "\n    def finalize(self):\n        open(os.path.join(pb_utils.get_model_dir(), 'finalized'), 'a').write('x')\n"
    )
    waits = f"open('{tmp_path}/begun', 'w').close()\n                time.sleep(2)"
    write(tmp_path, "slow", MODEL.replace("os._exit(3)", waits) + life, SEVERAL)
    with served(tmp_path, model_control_mode="explicit", load_model=["slow"]) as triton:
        assert stop_while_asked(triton, "slow", tmp_path / "begun") == [[26]]
    assert (tmp_path / "slow" / "1" / "finalized").read_text() == "xxxx"


def test_an_environment_that_no_forkserver_can_be_had_for(tmp_path: Path) -> None:
    """What is wrong with it is told as for a host that is alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    parameters = f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{tmp_path}/env" }} }}\n'
    write(tmp_path / "models", "double", MODEL, SEVERAL + parameters)
    with served(tmp_path / "models", load_model=[]) as triton:
        status, answer = ask(triton, "load", "double")
        assert status == 400
        assert "ModuleNotFoundError: No module named 'numpy'" in answer["error"]
        assert call(triton.http_url, "GET", "/v2/health/live")[0] == 200
        eventually(lambda: not hosts() and not forkservers())
