"""Worker processes whose interpreter has another version of pytriton-proxy-backend than the server."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytriton.proxy_backend.process.messages import FORMAT
from pytriton.proxy_backend.wire import layout
from pytriton.triton import ProcessWorker, Triton, TritonModelLoadError
from support.callables import X, Y
from support.faults.interpreters import change, make_other_version
from support.http import infer
from support.processes import is_running
from support.python_models import processes
from support.serving import local_config, running, short_home
from support.waiting import eventually

LAYOUT = "wire/layout.py"
MESSAGES = "process/messages.py"
OTHER_MAJOR = {LAYOUT: (f"MAJOR = {layout.MAJOR}\n", f"MAJOR = {layout.MAJOR + 1}\n")}
OTHER_MINOR = {LAYOUT: (f"MINOR = {layout.MINOR}\n", f"MINOR = {layout.MINOR + 7}\n")}
OTHER_FORMAT = {MESSAGES: (f"FORMAT = {FORMAT}\n", f"FORMAT = {FORMAT + 1}\n")}
# The last before batches had a cost, whose counters lie elsewhere.
OLDER_COUNTERS = {MESSAGES: (f"FORMAT = {FORMAT}\n", "FORMAT = 3\n")}
KWARGS = "    kwargs: Mapping[str, Any] = field(default_factory=dict)  # its keyword arguments\n"
LACKS_A_FIELD = {MESSAGES: (KWARGS, "")}
WITHOUT_ITS_USE = {"worker_main.py": ("job.args, job.kwargs", "job.args, {}")}

STARTS = """
import os
from pytriton.decorators import batch

def make(starts, factor=2):
    with open(starts, "a") as file:
        print(os.getpid(), file=file)
    return batch(lambda x: {"y": x * factor})
"""


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config())
        with running(triton):
            yield triton


class Started:
    """A model in a process, and how often that was started."""

    def __init__(self, folder: Path, python: Path) -> None:
        folder.joinpath("counted.py").write_text(STARTS)
        self.file = folder / "starts"
        self.folder = folder
        self.python = python

    def worker(self, **kwargs: int) -> ProcessWorker:
        return ProcessWorker(
            "counted:make", [str(self.file)], kwargs, python=self.python, working_dir=self.folder, max_crashes=5
        )

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self.file.read_text().split()] if self.file.exists() else []


@pytest.mark.parametrize(
    ("changes", "starts", "reason"),
    [
        (OTHER_MAJOR, 1, f"this worker speaks protocol {layout.MAJOR + 1}.{layout.MINOR}, the proxy backend "),
        (OTHER_FORMAT, 0, f"expected messages of format {FORMAT} from it, received {FORMAT + 1}"),
        (OLDER_COUNTERS, 0, f"expected messages of format {FORMAT} from it, received 3"),
        (LACKS_A_FIELD | WITHOUT_ITS_USE, 0, "the job asks for kwargs, which the worker's version of "),
    ],
    ids=["protocol", "format", "counters", "field"],
)
def test_what_can_never_serve_is_refused_once(
    triton: Triton, tmp_path: Path, changes: dict[str, tuple[str, str]], starts: int, reason: str
) -> None:
    started = Started(tmp_path, make_other_version(tmp_path, changes))
    with pytest.raises(TritonModelLoadError, match="was refused") as caught:
        triton.bind("other", started.worker(factor=3), X, Y)
    assert reason in str(caught.value)
    # Whoever has to put it right is told what is where.
    assert f"{started.python} has pytriton-proxy-backend 0.2.0, its parent 0.1.0" in str(caught.value)
    assert len(started.pids) == starts
    assert not processes("worker_main", os.getpid())
    assert triton.is_alive()


@pytest.mark.parametrize(
    "changes", [OTHER_MINOR, LACKS_A_FIELD | WITHOUT_ITS_USE], ids=["a later minor", "a field that is not used"]
)
def test_versions_that_may_differ(triton: Triton, tmp_path: Path, changes: dict[str, tuple[str, str]]) -> None:
    started = Started(tmp_path, make_other_version(tmp_path, changes))
    triton.bind("other", started.worker(), X, Y)
    try:
        assert infer(triton.http_url, "other", 4.0) == [8.0]
    finally:
        triton.unbind("other")


def test_another_version_that_comes_while_it_serves(triton: Triton, tmp_path: Path) -> None:
    started = Started(tmp_path, make_other_version(tmp_path, {}))
    triton.bind("upgraded", started.worker(), X, Y)
    try:
        [pid] = started.pids
        assert infer(triton.http_url, "upgraded", 4.0) == [8.0]
        change(tmp_path / "other", OTHER_MAJOR)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_running(pid))
        # The callers hear of it at once, and not after as many starts as it would have for a crash.
        eventually(lambda: "was refused: this worker speaks protocol" in str(infer(triton.http_url, "upgraded", 4.0)))
        assert len(started.pids) == 2
        assert not triton.is_alive()
    finally:
        triton.unbind("upgraded")
