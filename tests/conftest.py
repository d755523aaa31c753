"""What every test over several distributions can rely on."""

import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Settings of the person at the terminal that would change what tests see. Where tritonserver is stays theirs to say.
STEERING_VARIABLES = ("PYTRITON_TRITON_CONFIG_", "PYTRITON_HOME")
# Helpers that multiprocessing starts once and keeps as long as the process lives.
LASTING_CHILDREN = ("resource_tracker", "forkserver")
REAP_TIMEOUT_S = 60.0


def pytest_configure() -> None:
    """Have what tests start heed signals, and stop where it would not be ours."""
    # `nohup`, and a shell that starts something in the background, have it ignore these, and all that it starts.
    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    _check_distributions()


def _check_distributions() -> None:
    """Stop where an installed `pytriton` hides ours: each test would fail, and none would say why.

    No module of ours can report this. A regular package wins over every part of a namespace package, wherever on the
    path it is, so that with an editable install none of our code is even looked at.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.origin is not None:
        raise pytest.UsageError(
            f"{spec.origin} makes `pytriton` a regular package and hides the distributions of this checkout. It most "
            "likely comes from nvidia-pytriton: uninstall that, or run the tests with `python3 tools/dev.py test`."
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the longest tests begin first: the processes would wait for one that began last."""

    def seconds(item: pytest.Item) -> float:
        slow = item.get_closest_marker("slow")
        return 0.0 if slow is None else slow.kwargs.get("seconds", 10.0)

    items.sort(key=seconds, reverse=True)


@pytest.fixture(autouse=True)
def _no_steering_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(STEERING_VARIABLES)]:
        monkeypatch.delenv(name)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A `PYTRITON_HOME` short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        monkeypatch.setenv("PYTRITON_HOME", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Fail the test that leaves a child process behind, and end that process so that the next tests are not blamed."""
    before = set(live_children())
    yield
    deadline = time.monotonic() + REAP_TIMEOUT_S
    while (left := live_children().keys() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        commands = live_children()
        described = [f"{pid}: {commands[pid]}" for pid in sorted(left) if pid in commands]
        for pid in left:
            terminate(pid)
        pytest.fail(f"child processes still alive {REAP_TIMEOUT_S} s after the test: {described}")


def live_children() -> dict[int, str]:
    """Return the command lines of this process's children by process id, without those that only wait to be reaped."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name of the executable, in parentheses, may itself hold spaces and parentheses.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid() and state != "Z" and not any(name in command for name in LASTING_CHILDREN):
            children[int(folder.name)] = command
    return children


def terminate(pid: int) -> None:
    """End one process, if it is still there."""
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return
    os.waitpid(pid, 0)
