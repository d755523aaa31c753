"""A system that lacks something, or denies it: errors name it and say what to do, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.server.errors import TritonServerExitedError
from pytriton.triton import Triton
from support.callables import X, Y, double
from support.faults.sandbox import (
    FLOCK,
    MEMFD_CREATE,
    SCHED_GETAFFINITY,
    SCHED_SETAFFINITY,
    STRANGER,
    as_stranger,
    deny,
    without_proc,
)
from support.paths import TESTS
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S

SERVE = """
import resource, sys
import numpy as np
from pytriton import inprocess
from pytriton.client import ModelClient
from pytriton.exceptions import PyTritonError
from pytriton.triton import Triton
from support.callables import X, Y, double
from support.serving import local_config

def serve(workspace=None, threads=0):
    with Triton(config=local_config(), workspace=workspace) as triton:
        if threads:
            resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
        triton.bind("double", double, X, Y)
        for url in (triton.http_url, triton.grpc_url):
            with ModelClient(url, "double") as client:
                for size in map(int, sys.argv[2:] or ["1"]):
                    print(client.infer_sample(np.ones(size, np.float32))["y"].sum())

def serve_in_process():
    with inprocess.Server() as server:
        server.bind("double", double, X, Y)

try:
    if sys.argv[1] == "in process":
        serve_in_process()
    elif sys.argv[1] == "without threads":
        serve(threads=1)
    else:
        serve(sys.argv[1] or None)
except Exception as error:
    print(type(error).__name__, error)
"""
Variables = Mapping[str, str | bytes | None]
NO_THREADS = "No more threads or processes can be started. Raise the limit that is reached: "


def serve(
    *arguments: object,
    sandbox: Callable[[], object] = lambda: None,
    before: Sequence[str] = (),
    variables: Variables | None = None,
) -> str:
    """Start a server in a process of its own, ask it over both protocols, and return what was printed.

    Args:
        arguments: The path of the workspace, empty for none, `in process`, or `without threads` of this process once
            the server has started; then the sizes of inputs.
        sandbox: Called in the process first.
        before: What the command begins with.
        variables: For its environment; `None` takes one away.
    """
    given: dict[bytes, bytes] = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
    for name, value in (variables or {}).items():
        given.pop(os.fsencode(name), None)
        if value is not None:
            given[os.fsencode(name)] = os.fsencode(value)
    command = [*before, sys.executable, "-c", SERVE, *map(str, arguments or [""])]
    done = subprocess.run(
        command, capture_output=True, timeout=PATIENCE_S, check=False, cwd=TESTS, env=given, preexec_fn=sandbox
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def limit(number: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(number, (most, most))


@pytest.mark.usefixtures("home")
def test_memory_without_a_name_is_denied() -> None:
    said = serve(sandbox=lambda: deny(MEMFD_CREATE))
    assert said.startswith(
        "TritonServerStartError tritonserver cannot be started: memfd_create: Operation not permitted."
    )
    assert "allow the system call in the seccomp profile" in said


@pytest.mark.usefixtures("home")
def test_the_processors_are_not_told() -> None:
    assert serve(sandbox=lambda: deny(SCHED_SETAFFINITY, SCHED_GETAFFINITY)) == "2.0\n2.0"


def test_nothing_can_be_locked(home: Path) -> None:
    said = serve(sandbox=lambda: deny(FLOCK))
    assert said.startswith("WorkspaceError The workspace ")
    assert "cannot be locked: flock: Operation not permitted." in said
    assert "Set PYTRITON_HOME to a folder on a local file system, or pass Triton(workspace=...)" in said
    assert os.listdir(home) == []
    # Which nobody sweeps.
    assert serve(home / "w", sandbox=lambda: deny(FLOCK)) == "2.0\n2.0"


def test_a_user_has_no_home() -> None:
    nothing: Variables = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "PYTRITON_HOME"))
    said = serve(before=as_stranger(), variables=nothing)
    assert said.startswith("WorkspaceError There is no folder for the files of pytriton: HOME is not set, and user ")
    assert said.endswith(
        f"{STRANGER} has no entry in /etc/passwd. Set PYTRITON_HOME to a folder that this user may write to."
    )
    with short_home() as folder:
        os.chown(folder, STRANGER, STRANGER)
        assert serve(before=as_stranger(), variables={"HOME": None}) == "2.0\n2.0"


NO_UTF8 = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "variables", [{"PYTRITON_HOME": b"/tmp/\xff"}, {"PYTRITON_HOME": "/tmp/é", **NO_UTF8}], ids=["bytes", "locale"]
)
def test_the_home_is_no_text(variables: Variables) -> None:
    said = serve(variables=variables)
    assert said.startswith("WorkspaceError The path b'/tmp/\\x")
    assert said.endswith("Set PYTRITON_HOME to another one, or LC_ALL=C.UTF-8.")


@pytest.mark.usefixtures("home")
def test_files_may_not_be_large() -> None:
    advice = (
        "A file of this process, shared memory included, may have {} bytes. Raise the limit (ulimit -f), or lift it."
    )
    said = serve(sandbox=limit(resource.RLIMIT_FSIZE, 65536))
    assert said.startswith("TritonModelLoadError Model 'double' (version 1) is loaded, but nothing serves it")
    assert "its arena could not be made: " in said
    assert said.endswith(advice.format(65536))
    said = serve("", 1, 1_000_000, sandbox=limit(resource.RLIMIT_FSIZE, 1 << 21))
    assert said.startswith("2.0\nPyTritonClientInferenceServerError")
    assert "memory for the inputs of the batch could not be had: " in said
    assert "(see ulimit -f, which holds for shared memory, too)" in said


@pytest.mark.usefixtures("home")
def test_a_process_may_have_few_addresses() -> None:
    said = serve(sandbox=limit(resource.RLIMIT_AS, 700_000_000))
    assert said.startswith(
        "TritonServerStartError tritonserver was killed by signal 6 (SIGABRT) while it was starting."
    )
    assert NO_THREADS in said
    assert said.endswith("a process may have 700000000 bytes of addresses (ulimit -v).")


def test_a_user_may_have_few_threads(home: Path) -> None:
    before = [*as_stranger(), "prlimit", "--nproc=5"]
    os.chown(home, STRANGER, STRANGER)
    said = serve(before=before)
    assert said.startswith(
        "TritonServerStartError tritonserver was killed by signal 6 (SIGABRT) while it was starting."
    )
    assert said.endswith(f"{NO_THREADS}a user may have 5 of them (ulimit -u).")
    said = serve("without threads", before=as_stranger())
    assert said.startswith("TritonServerError This process cannot serve: can't start new thread. ")
    assert f"{NO_THREADS}a user may have 1 of them (ulimit -u)" in said


@pytest.mark.usefixtures("home")
def test_nothing_is_at_proc() -> None:
    said = serve(before=without_proc())
    assert said.startswith("TritonServerStartError tritonserver ended with exit code 127 while it was starting.")
    assert said.endswith(
        "/proc is not there, by which programs find their libraries: mount it (mount -t proc proc /proc)."
    )
    assert serve("in process", before=without_proc()).endswith("Mount /proc (mount -t proc proc /proc).")


def test_a_client_needs_nothing_at_proc() -> None:
    ask = (
        "import sys; from pytriton.client import ModelClient; "
        "print(ModelClient(sys.argv[1], 'm').infer_sample([1.0])['y'])"
    )
    with short_home(), running(Triton(config=local_config())) as triton:
        triton.bind("m", double, X, Y)
        for url in (triton.http_url, triton.grpc_url):
            command = [*without_proc(), sys.executable, "-W", "ignore", "-c", ask, str(url)]
            assert subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True).stdout == b"[2.]\n"


@contextlib.contextmanager
def group_of(pid: int, most: int) -> Iterator[None]:
    """Put a process into a control group of its own, which may have little memory."""
    old = Path("/sys/fs/cgroup/memory")
    name = f"pytriton-test-{os.getpid()}"
    folder, file = (
        (old / name, "memory.limit_in_bytes") if old.is_dir() else (Path("/sys/fs/cgroup", name), "memory.max")
    )
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this user may make no control group: {error}")
    try:
        (folder / file).write_text(str(most))
        (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def test_the_system_kills_the_server_for_its_memory() -> None:
    large = 200 << 20
    with short_home(), running(Triton(config=local_config())) as triton:
        triton.bind("m", double, X, Y)
        pid = server_pid(triton)
        with group_of(pid, large):
            with contextlib.suppress(Exception), ModelClient(str(triton.http_url), "m") as client:
                client.infer_sample(np.ones(large // 4, np.float32))
            with pytest.raises(TritonServerExitedError, match=r"\(SIGKILL, (most likely )?from the system"):
                triton.serve()


def test_somebody_kills_the_server() -> None:
    with short_home(), running(Triton(config=local_config())) as triton:
        os.kill(server_pid(triton), signal.SIGKILL)
        with pytest.raises(
            TritonServerExitedError, match=r"killed by signal 9 \(SIGKILL, (from another program|most likely)"
        ):
            triton.serve()


def test_check_tries_each(tmp_path: Path) -> None:
    def take_all() -> None:
        deny(MEMFD_CREATE, FLOCK)
        limit(resource.RLIMIT_NOFILE, 100)()
        limit(resource.RLIMIT_AS, 1_000_000_000)()

    def check(before: Sequence[str], sandbox: Callable[[], object], *variables: str) -> str:
        done = subprocess.run(
            [*before, "env", *variables, sys.executable, "-m", "pytriton", "check"],
            stdout=subprocess.PIPE, timeout=PATIENCE_S, check=False, cwd=tmp_path, preexec_fn=sandbox, text=True,
        )  # fmt: skip
        assert done.returncode == 1
        return done.stdout.partition("What the system lets a server do:\n")[2].partition("\n\n")[0]

    said = check([], take_all)
    assert said.count("FAILED") == said.count("SystemDeniedError: ") + 1 == 5
    for text in (
        "WorkspaceError: The workspace",
        "memfd_create: Operation not permitted. All tensors pass in memory of that kind",
        "can't start new thread after",
        "A process may have 100 files open: raise the hard limit (ulimit -Hn",
        "Cannot allocate memory. No memory is left. Raise the limit that is reached: a process may have 1000000000 ",
    ):
        assert text in said
    said = check(as_stranger(), limit(resource.RLIMIT_FSIZE, 1 << 20), "-u", "HOME", "-u", "XDG_CACHE_HOME")
    assert said.count("FAILED") == 2
    assert "WorkspaceError: There is no folder for the files of pytriton: HOME is not set" in said
    assert "File too large. A file of this process, shared memory included, may have 1048576 bytes." in said
    said = check(without_proc(), lambda: None)
    assert "SystemDeniedError: /proc is not there: mount it" in said
