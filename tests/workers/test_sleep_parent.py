"""Models that sleep, and whose workers are forked from a parent when they wake."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import ModelConfig
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.triton import ProcessWorker, Triton, TritonModelLoadError
from support import process_models
from support.callables import X, Y
from support.faults import parent_models
from support.faults.interpreters import make_other_version
from support.faults.parent_models import COLOUR, DIE, ENDS, FOLDER, LINE, MAKER, NUMPY_RANDOM, OWN, PYTHON_RANDOM
from support.http import call, infer
from support.load import ask_while_killed
from support.processes import is_running
from support.python_models import is_asleep, parent_processes, processes, worker_processes
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

IDLE_S = 0.2


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config())
        with running(triton):
            yield triton


@pytest.fixture
def bind(triton: Triton, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., None]]:
    """Binds a model that sleeps, which is taken away after the test."""
    caplog.set_level(logging.INFO)
    bound: list[str] = []

    def bind(
        factory: Any = parent_models.make, name: str = "m", *, config: ModelConfig | None = None, **options: Any
    ) -> None:
        options = {"idle_timeout_s": IDLE_S, "max_crashes": 1000, "sleep": "parent", **options}
        worker = ProcessWorker(factory, **options)
        # However long a busy machine takes to start a process.
        triton.bind(name, worker, X, Y, config=config or ModelConfig(attach_timeout_s=PATIENCE_S))
        bound.append(name)

    yield bind
    for name in bound:
        triton.unbind(name)
    eventually(lambda: not parent_processes() and not worker_processes())


def ask(triton: Triton, *values: float) -> tuple[float, ...]:
    """Ask the model for numbers of one process; what is said instead fails the test."""
    answer = infer(triton.http_url, "m", *values)
    assert isinstance(answer, list), answer
    return tuple(answer)


def is_forked(triton: Triton) -> bool:
    """Whether another process has called the factory than the one that answers."""
    maker, own = ask(triton, MAKER, OWN)
    return maker != own


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "sleep=" in each.getMessage()]


def test_workers_are_forked_with_their_weights(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    bind(copies=2)
    (maker,) = ask(triton, MAKER)
    seen = set()
    for _ in range(3):
        eventually(lambda: is_asleep(triton))
        assert len(parent_processes()) == 2
        assert call(triton.http_url, "GET", "/v2/models/m/ready")[0] == 200
        answer, its_maker, own = ask(triton, 3.0, MAKER, OWN)
        assert (answer, its_maker) == (6.0, maker)
        seen.add(own)
    # Whoever has called the factory serves nobody.
    assert len(seen) == 3
    assert maker not in seen
    # What the factory writes is in the log, once.
    made = [each for each in caplog.records if each.getMessage() == f"made in {int(maker)}"]
    assert [each.name for each in made] == ["pytriton.worker.m.0"]
    assert not warnings_of(caplog)
    assert "is started again" not in caplog.text


def test_a_crash_is_forked_again(triton: Triton, bind: Callable[..., None]) -> None:
    bind()
    maker, own = ask(triton, MAKER, OWN)
    assert "was lost" in infer(triton.http_url, "m", DIE)
    eventually(lambda: infer(triton.http_url, "m", 3.0) == [6.0])
    again = ask(triton, MAKER, OWN)
    assert again[0] == maker
    assert again[1] != own


def test_a_crash_of_a_model_that_never_sleeps_is_forked_again(triton: Triton, bind: Callable[..., None]) -> None:
    bind(idle_timeout_s=None, copies=2)
    maker, own = ask(triton, MAKER, OWN)
    assert maker != own
    os.kill(int(own), signal.SIGKILL)
    eventually(lambda: len(worker_processes()) == 2 and int(own) not in worker_processes())
    assert ask(triton, MAKER) == (maker,)


def test_threads_that_a_library_ends_before_a_fork(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    bind(args=("multiply",))
    assert is_forked(triton)
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("start_thread", "it has started 1 thread, which a fork lacks (of-the-factory)"),
        ("start_process", "it has started another process"),
        ("connect", "it holds a connection (socket:["),
        ("make_loop", "such as that of a client or of an event loop"),
        ("open_to_write", "/written to write to it"),
        ("map_memory", "it maps memory that processes share and write"),
        ("fail_once", "Its factory failed: RuntimeError: the weights are not there yet"),
        ("die_once", "Its factory ended the process (signal 9)"),
    ],
)
def test_a_factory_that_cannot_be_forked(
    triton: Triton,
    bind: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    does: str,
    reason: str,
) -> None:
    """The parent has its imports alone then, and each worker calls the factory."""
    bind(args=(does, str(tmp_path)))
    for _ in range(2):
        assert not is_forked(triton)
        eventually(lambda: is_asleep(triton))
        assert len(parent_processes()) == 1
        # What the factory had started in the parent is gone.
        assert not [pid for parent in parent_processes() for pid in processes("grandchild-of-a-parent", parent)]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Model 'm': sleep=\"parent\" keeps a parent with the imports of its factory alone. ")
    assert reason in warning
    assert ask(triton, 3.0) == (6.0,)


THREADED = """
import threading
from support.faults.parent_models import make

threading.Thread(target=threading.Event().wait, daemon=True, name="of-the-import").start()
"""


def test_imports_that_cannot_be_forked(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """There is no parent then."""
    (tmp_path / "threaded.py").write_text(THREADED)
    bind(f"{tmp_path}/threaded.py:make")
    for _ in range(2):
        assert not is_forked(triton)
        eventually(lambda: is_asleep(triton))
        assert not parent_processes()
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Model 'm': sleep=\"parent\" has no parent. What its factory imports: it has started 1 ")
    assert "(of-the-import)" in warning


def test_a_factory_that_always_fails_fails_the_bind(triton: Triton, bind: Callable[..., None]) -> None:
    with pytest.raises(TritonModelLoadError, match="RuntimeError: there are no weights"):
        bind(process_models.fail)
    eventually(lambda: not parent_processes() and not worker_processes())
    with pytest.raises(TritonModelLoadError, match="there is no module 'not_there'"):
        bind("not_there:make")
    eventually(lambda: not parent_processes() and not worker_processes())


def test_forks_do_not_share_what_a_process_has_for_itself(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text("1\n2\n3\n")
    bind(args=("", str(tmp_path)))
    drawn = []
    for _ in range(3):
        # Each reads the file from its begin, as a new process would.
        *lines, python, numpy, folder = ask(triton, LINE, LINE, PYTHON_RANDOM, NUMPY_RANDOM, FOLDER)
        assert lines == [1.0, 2.0]
        drawn += [python, numpy]
        # The end of a fork does not remove what the next one needs.
        assert folder == 1.0
        eventually(lambda: is_asleep(triton))
    assert len(set(drawn)) == 6
    assert not warnings_of(caplog)
    assert "the end of" not in caplog.text
    triton.rebind("m", ProcessWorker(parent_models.make, idle_timeout_s=IDLE_S, sleep="parent"))
    # With the parent goes what its factory has made.
    assert os.listdir(tmp_path) == ["lines"]
    assert "the end of" in caplog.text


def test_a_fork_gives_the_known_answer_to_its_warm_up(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """The parent is not warmed up: each fork does it, with the same numbers."""
    warmup = [ModelWarmup("random", 1, {"x": WarmupInput(np.float32, (3,), random_data=True)}, count=2)]
    bind(golden=True, config=ModelConfig(attach_timeout_s=PATIENCE_S, model_warmup=warmup))
    for _ in range(2):
        eventually(lambda: is_asleep(triton))
        assert is_forked(triton)
    assert "known answer" not in caplog.text


@pytest.mark.parametrize("does", ["", "use_pool", "replace_streams"])
def test_the_end_of_a_fork(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture, does: str
) -> None:
    """It ends the pools of its code, and does what its code asks for, whatever the factory has done."""
    bind(args=(does,))
    for _ in range(2):
        assert is_forked(triton)
        assert ask(triton, ENDS) == (2.0,)
        caplog.clear()
        eventually(lambda: is_asleep(triton))
        for text in ("a function of a fork", "a finalizer of a fork"):
            # A factory that writes elsewhere has its forks do so.
            eventually(lambda text=text: (text in caplog.text) == (does != "replace_streams"))  # type: ignore[misc]
        told = caplog.text
        assert "it is killed" not in told
        assert "the end of" not in told
        assert "Traceback" not in told
    assert not warnings_of(caplog)


def test_a_factory_that_writes_to_a_file_of_its_own(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The file stays what it is, and what is not yet written is not written again by each fork."""
    bind(args=("log_to_file", str(tmp_path)))
    for _ in range(3):
        assert is_forked(triton)
        assert ask(triton, ENDS) == (2.0,)
        eventually(lambda: is_asleep(triton))
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines.count("by the factory") == 1
    assert lines.count("a function of a fork") == 3
    assert not warnings_of(caplog)


def test_a_class_under_a_decorator(triton: Triton, caplog: pytest.LogCaptureFixture) -> None:
    worker = ProcessWorker(process_models.Greeter, idle_timeout_s=IDLE_S, sleep="parent")
    triton.bind(worker)
    inputs = [{"name": "name", "datatype": "BYTES", "shape": [1, 1], "data": ["you"]}]
    try:
        for _ in range(2):
            eventually(lambda: is_asleep(triton, "greeter"))
            status, answer = call(triton.http_url, "POST", "/v2/models/greeter/infer", {"inputs": inputs})
            assert status == 200
            assert answer["outputs"][0]["data"][0].startswith("Hello, you, from ")
    finally:
        triton.unbind("greeter")
    assert not warnings_of(caplog)
    eventually(lambda: not parent_processes() and not worker_processes())


def test_copies_with_other_variables_have_parents_of_their_own(triton: Triton, bind: Callable[..., None]) -> None:
    bind(copies=2, env={"COLOUR": ["red", "blue"]})
    assert len(parent_processes()) == 4
    seen: set[float] = set()

    def ask_again() -> bool:
        seen.update(ask(triton, COLOUR))
        return len(seen) == 2

    eventually(ask_again)
    assert seen == set(parent_models.COLOURS.values())


def test_a_parent_that_is_killed_asleep_is_started_again(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    bind()
    for _ in range(2):
        eventually(lambda: is_asleep(triton) and len(parent_processes()) == 2)
        # The one with the weights, then the one before it.
        (first,) = processes("parent_main", os.getpid())
        victim = next(iter(processes("parent_main", first)))
        os.kill(victim, signal.SIGKILL)
        # Whether the next one is there or not.
        assert ask(triton, 3.0) == (6.0,)
        maker, own = ask(triton, MAKER, OWN)
        assert maker not in (victim, own)
    assert "parent process 0 of model 'm' (pid " in caplog.text
    assert "it is started again in 0.1 s (end 1 of at most 1000 within 60 s)" in caplog.text


def test_a_parent_that_is_killed_while_its_forks_serve(triton: Triton, bind: Callable[..., None]) -> None:
    bind(copies=2)
    for first in (True, False):
        (with_imports,) = before = set(processes("parent_main", os.getpid()))
        os.kill(with_imports if first else next(iter(processes("parent_main", with_imports))), signal.SIGKILL)
        eventually(lambda before=before: not any(map(is_running, before)))  # type: ignore[misc]
        # Its forks end with it, of which callers are told, and others take their places.
        eventually(lambda: infer(triton.http_url, "m", 3.0) == [6.0])
        # Asked again and again, as it falls asleep meanwhile on a slow machine.
        eventually(
            lambda: (
                infer(triton.http_url, "m", 3.0) == [6.0] and len(worker_processes()) == 2 == len(parent_processes())
            )
        )


def drop(triton: Triton) -> None:
    """End the parents of the model, as a budget does that another model needs."""
    account = triton._models["m", 1].workers._account
    assert account is not None
    account.drop()
    eventually(lambda: not parent_processes())


def test_a_parent_that_hangs_at_its_end_is_killed(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    bind(args=("hang_at_the_end",))
    for _ in range(2):
        assert is_forked(triton)
        eventually(lambda: is_asleep(triton) and len(parent_processes()) == 2)
        drop(triton)
        assert "did not end within 2 s after it was put to sleep" in caplog.text
        caplog.clear()
    assert is_forked(triton)
    assert not warnings_of(caplog)


def test_a_parent_that_is_dropped_while_it_starts(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It does not wait for its factory, and the next one is forked from again."""
    bind(args=("wait_at_a_gate", str(tmp_path)))
    assert is_forked(triton)
    eventually(lambda: is_asleep(triton) and len(parent_processes()) == 2)
    before = parent_processes()
    (tmp_path / "closed").touch()
    os.kill(next(iter(processes("parent_main", os.getpid()))), signal.SIGKILL)
    eventually(lambda: len(parent_processes()) == 2 and not set(before) & set(parent_processes()))
    drop(triton)
    (tmp_path / "closed").unlink()
    assert is_forked(triton)
    assert not warnings_of(caplog)


def test_a_parent_that_always_dies_is_given_up(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    bind(max_crashes=2, crash_window_s=600.0)
    for _ in range(2):
        eventually(lambda: is_asleep(triton) and (len(parent_processes()) == 2 or warnings_of(caplog)))
        for pid in processes("parent_main", os.getpid()):
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: not is_running(pid))  # type: ignore[misc]
    (warning,) = eventually(lambda: warnings_of(caplog))
    assert "Parent process 0 of model 'm' is given up after 2 ends within 600 s" in warning
    # The model serves and sleeps all the same.
    for _ in range(2):
        assert not is_forked(triton)
        eventually(lambda: is_asleep(triton))
    assert not parent_processes()


def test_parents_and_workers_that_are_killed_at_any_time(triton: Triton, bind: Callable[..., None]) -> None:
    """Every request is answered rightly, or its caller is told which worker was lost."""
    bind(copies=2, crash_window_s=0.1)
    ask_while_killed(str(triton.http_url), lambda: (*parent_processes(), *worker_processes()), 0.3, IDLE_S)
    # Whatever has happened, it serves, is forked, and sleeps again.
    eventually(lambda: infer(triton.http_url, "m", 3.0) == [6.0])
    eventually(lambda: is_asleep(triton))
    assert is_forked(triton)


def test_an_interpreter_whose_version_cannot_do_it(
    triton: Triton, bind: Callable[..., None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    python = make_other_version(tmp_path, {})
    shutil.copy(parent_models.__file__, tmp_path / "models_here.py")
    options = {"python": python, "working_dir": tmp_path}
    bind("models_here:make", **options)
    assert is_forked(triton)
    triton.unbind("m")
    (tmp_path / "other" / "pytriton" / "proxy_backend" / "parent_main.py").unlink()
    triton.bind("m", ProcessWorker("models_here:make", idle_timeout_s=IDLE_S, sleep="parent", **options), X, Y)  # type: ignore[arg-type]
    assert not is_forked(triton)
    (warning,) = warnings_of(caplog)
    assert f"({python} has pytriton-proxy-backend 0.2.0, this process 0.1.0)" in warning
    eventually(lambda: is_asleep(triton))
    assert ask(triton, 3.0) == (6.0,)


def test_what_a_model_with_a_parent_needs() -> None:
    with pytest.raises(PyTritonBadParameterError, match=r"sleep must be 'process' or 'parent'; got 'yes'"):
        ProcessWorker(process_models.make, idle_timeout_s=5, sleep="yes")
    with pytest.raises(PyTritonBadParameterError, match=r"ProcessWorker\.sleep must be"):
        ProcessWorker(process_models.make, idle_timeout_s=5, sleep=True)  # type: ignore[arg-type]
    triton = Triton(config=local_config())
    sleepy = ProcessWorker(process_models.make, idle_timeout_s=5, sleep="parent")
    with pytest.raises(PyTritonBadParameterError, match="A callable in a thread of this process cannot sleep"):
        triton.bind("m", [sleepy, lambda requests: requests], X, Y)
