"""What a server in process means for its process: fork, exit, interrupts, a second import."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from pytriton.inprocess.capi import threads
from support.servers import server_version
from support.waiting import PATIENCE_S, eventually

# From Python 3.12 on, a fork of a process with threads is warned of, and that is what some of this is about.
FLAGS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")

PREAMBLE = """
import gc, os, sys, threading, time
from pytriton import inprocess
from pytriton.inprocess import Server
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers put their files, so that what is left there is seen."""
    folder = tmp_path / "home"
    monkeypatch.setenv("PYTRITON_HOME", str(folder))
    return folder


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *FLAGS, "-c", PREAMBLE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, *, returncode: int = 0) -> tuple[list[str], str]:
    """Run code in a new process and give the lines that it printed and its standard error."""
    process = start(code)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"not over after {PATIENCE_S} s; printed {out}\n{err}")
    assert process.returncode == returncode, f"{out}\n{err}"
    return out.splitlines(), err


def test_import_loads_no_library() -> None:
    lines, _ = run(
        """
        print("libtritonserver" in open("/proc/self/maps").read())
        print(sorted(name for name in sys.modules if name in ("torch", "grpc", "ctypes.util")))
        import importlib.metadata
        print(inprocess.__version__ == importlib.metadata.version("pytriton-server"))
        """
    )

    assert lines == ["False", "[]", "True"]


def test_exit_without_stop_stops_the_server(home: Path) -> None:
    _, err = run(
        """
        server = Server().start()
        other = Server(server_id="other").start()
        sys.exit(3)
        """,
        returncode=3,
    )

    assert not err.strip()
    assert not os.listdir(home)


def test_exit_by_an_error_keeps_it(home: Path) -> None:
    _, err = run(
        """
        server = Server().start()
        raise RuntimeError("of the test")
        """,
        returncode=1,
    )

    assert err.rstrip().endswith("RuntimeError: of the test")
    assert not os.listdir(home)


def test_killed_process_leaves_nothing_behind_after_the_next_start(home: Path) -> None:
    run("Server().start(); os.kill(os.getpid(), 9)", returncode=-signal.SIGKILL)
    assert os.listdir(home)

    run("with Server(): pass")

    assert not os.listdir(home)


def test_forked_child_cannot_use_the_server_and_does_not_harm_it() -> None:
    lines, _ = run(
        """
        server = Server(server_id="parent").start()
        model = server.model("identity")
        held = server.models()
        pid = os.fork()
        if pid == 0:
            for use in (server.ready, server.stop, server.models, model.ready, model.metadata, server.metrics):
                try:
                    use()
                except inprocess.InvalidArgumentError as error:
                    assert "forked" in str(error), error
                else:
                    print("no error", use)
            for use in (server.start, Server().start):
                try:
                    use()
                except inprocess.UnsupportedError as error:
                    assert "forked" in str(error), error
                else:
                    print("no error", use)
            del server, model, held, use
            gc.collect()
            print("child", flush=True)
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(server.ready(), server.metadata()["name"])
        server.stop()
        """
    )

    assert lines == ["child", "7", "True parent"]


def test_forked_children_end_as_they_want() -> None:
    """With and without a server running: Triton's library would wait at exit for a thread that no child has."""
    lines, _ = run(
        """
        server = Server().start()
        for code in range(10):
            if code == 5:
                server.stop()
            pid = os.fork()
            if pid == 0:
                print(f"child {code}")
                sys.exit(code)
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert ended == code, (ended, code)
        """
    )

    assert lines == [f"child {code}" for code in range(10)]


def test_process_forked_before_the_first_start_is_as_good_as_any() -> None:
    lines, _ = run(
        """
        pid = os.fork()
        with Server() as server:
            print(server.ready(), flush=True)
        if pid == 0:
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )

    assert lines == ["True", "True", "0"]


def test_subprocesses_are_not_concerned() -> None:
    lines, _ = run(
        """
        import multiprocessing, subprocess
        with Server() as server:
            print(subprocess.run(["echo", "hello"], capture_output=True, text=True).stdout.strip())
            context = multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:
                print(pool.apply(max, (1, 2)))
                pool.close()
                pool.join()
            print(server.ready())
        """
    )

    assert lines == ["hello", "2", "True"]


def test_second_import_serves_beside_the_first() -> None:
    lines, _ = run(
        """
        import pytriton
        server = Server(server_id="first").start()
        for name in [name for name in sys.modules if name.startswith("pytriton.inprocess")]:
            del sys.modules[name]
        del pytriton.inprocess
        from pytriton import inprocess as again
        assert again.Server is not Server
        second = again.Server(server_id="second").start()
        print(second.metadata()["name"], second.ready())
        third = Server(server_id="third").start()
        third.stop()
        print(server.metadata()["name"], server.ready(), second.ready())
        """
    )

    assert lines == ["second True", "first True True"]


def test_second_import_binds_and_counts_beside_the_first() -> None:
    """There is one native library for callables, which calls the functions of one import only."""
    lines, _ = run(
        """
        import numpy as np

        def use(inprocess, factor):
            from pytriton.model_config import Tensor
            server = inprocess.Server().start()
            tensors = [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")]
            model = server.bind("scaled", lambda requests: [{"y": factor * requests[0]["x"]}], *tensors)
            metric = inprocess.Metric(inprocess.MetricFamily(inprocess.MetricKind.COUNTER, "used_total", ""))
            return server, model, metric

        first = use(inprocess, 2)
        for name in [name for name in sys.modules if name.startswith("pytriton")]:
            del sys.modules[name]
        from pytriton import inprocess as again
        second = use(again, 3)
        for _, model, metric in (first, second):
            print(np.asarray(next(model.infer(inputs={"x": np.ones((1, 1), np.float32)})).outputs["y"]).item())
            metric.increment(1)
        del metric
        second = second[:2]
        gc.collect()
        print(first[2].value)
        """
    )

    assert lines == ["2.0", "3.0", "2.0"]


def test_ssl_of_python_is_not_that_of_triton() -> None:
    lines, _ = run(
        """
        with Server():
            import ssl, _ssl
            print(ssl.OPENSSL_VERSION)
        """
    )
    alone = subprocess.run(
        [sys.executable, "-c", "import ssl; print(ssl.OPENSSL_VERSION)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )

    assert lines == [alone.stdout.strip()]


SLOW_START = """
import pathlib
source = '''
import pathlib, time
class TritonPythonModel:
    def initialize(self, args):
        pathlib.Path(FILE).touch()
        deadline = time.monotonic() + 300
        while not pathlib.Path(FILE + ".go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    def execute(self, requests):
        return []
'''.replace("FILE", repr(sys.argv[1]))
folder = pathlib.Path(sys.argv[2]) / "slow" / "1"
folder.mkdir(parents=True)
(folder / "model.py").write_text(source)
(folder.parent / "config.pbtxt").write_text('backend: "python"')
"""


UNLOADING = """
from pytriton.inprocess.capi import process
from pytriton.inprocess.capi.threads import unloading
from pytriton.inprocess.server import session

named, over = threading.Event(), threading.Event()

def unload():
    with unloading():
        named.set()
        over.wait()

server = Server().start()
thread = threading.Thread(target=unload)
thread.start()
named.wait()
"""


@pytest.mark.parametrize("states", ["S", "RRDS", "RRRR"])
def test_models_are_unloaded_once_threads_of_instances_have_slept(monkeypatch: pytest.MonkeyPatch, states: str) -> None:
    """They put back what an unload looks for after they have told that they are done."""
    over = threading.Event()
    with threads.starting():
        # Since Python 3.14 its threads have the names of their objects; those of Triton have that of their parent.
        thread = threading.Thread(target=over.wait, name="test:triton")
        thread.start()
    read, seen = threads._read, list[str]()

    def read_state(path: str) -> str:
        if path != f"/proc/self/task/{thread.native_id}/stat":
            return read(path)
        seen.append(states[len(seen)])
        return f"{thread.native_id} (a) name) {seen[-1]} 1"

    monkeypatch.setattr(threads, "_read", read_state)
    monkeypatch.setattr(threads, "_SETTLED_AFTER_S", 0 if states == "RRRR" else 600)
    try:
        with threads.unloading():
            # One that computes for long is not waited for.
            assert "".join(seen) == ("R" if states == "RRRR" else states)
    finally:
        over.set()
        thread.join()


def test_deletion_waits_for_threads_that_still_unload() -> None:
    """Triton ends models in threads that nobody can join; one of ours with their name plays such a thread."""
    lines, err = run(
        UNLOADING
        + textwrap.dedent(
            """
            count, asked = session.unloading_threads, 0

            def unloading_threads():
                global asked
                asked += 1
                if asked == 5:
                    print("still there:", count(), "deleted:", process.is_alone(server._session) is False)
                    over.set()
                    thread.join()
                return count()

            session.unloading_threads = unloading_threads
            server.stop()
            print("asked:", asked, "left:", len(process._state.stopped), count())
            Server().start().stop()
            """
        )
    )

    assert lines == ["still there: 1 deleted: False", "asked: 5 left: 0 0"]
    assert not err


def test_server_that_is_still_unloading_after_all_is_not_deleted() -> None:
    lines, err = run(
        UNLOADING
        + textwrap.dedent(
            """
            session._UNLOADING_THREADS_S = 0
            server.stop()
            over.set()
            thread.join()
            with Server() as other:
                print(other.live())
            """
        )
    )

    assert lines == ["True"]
    assert "stays in memory" in err
    assert "threads in which Triton ends models" in err


def test_interrupt_ends_a_slow_start_at_once(home: Path, tmp_path: Path) -> None:
    marker = tmp_path / "initializing"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PREAMBLE
            + SLOW_START
            + textwrap.dedent(
                """
                server = Server(model_repository=sys.argv[2])
                try:
                    server.start()
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                try:
                    server.ready()
                except inprocess.InvalidArgumentError as error:
                    print("not started", flush=True)
                """
            ),
            str(marker),
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: marker.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    # While Triton is still at it.
    assert [process.stdout.readline(), process.stdout.readline()] == ["interrupted\n", "not started\n"]
    # The process waits for Triton at its exit.
    marker.with_name(marker.name + ".go").touch()
    out, err = process.communicate(timeout=PATIENCE_S)

    assert not out
    assert process.returncode == 0
    if server_version() >= (2, 70):
        # The end of the stub of a newer Python backend, seen with Python 3.11: without harm.
        err = re.sub(r"Fatal Python error: PyThreadState_Get: .*\nPython runtime state: finalizing .*\n", "", err)
    assert not err.strip()
    assert not os.listdir(home)


def test_interrupt_in_a_with_statement_stops_the_server(home: Path) -> None:
    process = start(
        """
        try:
            with Server() as server:
                print("started", flush=True)
                while True:
                    time.sleep(0.1)
        except KeyboardInterrupt:
            print("stopped")
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)

    assert (out, process.returncode) == ("stopped\n", 0), err
    assert not os.listdir(home)
