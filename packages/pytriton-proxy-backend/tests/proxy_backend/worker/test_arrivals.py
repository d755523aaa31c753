"""Callbacks when files appear, with real folders."""

import os
import queue
import shutil
import threading
from pathlib import Path

import pytest

from pytriton.proxy_backend.worker.arrivals import Arrivals
from pytriton.proxy_backend.worker.attempts import Attempts
from support.waiting import PATIENCE_S, eventually


def watchers() -> int:
    return sum(thread.name == "pytriton-arrivals" for thread in threading.enumerate())


def test_a_file_that_appears_is_told_to_those_who_wait_for_it(tmp_path: Path) -> None:
    arrivals, told = Arrivals(), queue.Queue[str]()
    names = {name: lambda name=name: told.put(name) for name in ("a", "b")}
    for name, callback in names.items():
        assert arrivals.add(tmp_path / name, callback)
    (tmp_path / "c").touch()
    (tmp_path / "b").touch()
    assert told.get(timeout=PATIENCE_S) == "b"
    # A file that is put in place by its name, and one that takes the place of another.
    for _ in range(2):
        (tmp_path / "made").touch()
        (tmp_path / "made").rename(tmp_path / "a")
        assert told.get(timeout=PATIENCE_S) == "a"
    for name, callback in names.items():
        arrivals.remove(tmp_path / name, callback)
    eventually(lambda: not watchers())
    (tmp_path / "a").unlink()
    (tmp_path / "a").touch()
    assert told.empty()


def test_one_folder_under_two_paths(tmp_path: Path) -> None:
    arrivals, told = Arrivals(), queue.Queue[str]()
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.symlink_to(folder)
    callbacks = {path: lambda path=path: told.put(str(path)) for path in (folder / "a", other / "a")}
    for path, callback in callbacks.items():
        assert arrivals.add(path, callback)
    (folder / "a").touch()
    assert {told.get(timeout=PATIENCE_S) for _ in callbacks} == set(map(str, callbacks))
    for path, callback in callbacks.items():
        arrivals.remove(path, callback)
    eventually(lambda: not watchers())


def test_a_worker_watches_a_folder_that_was_removed_and_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    attempts = Attempts(folder / "a")
    # Until the folder is there, it is tried again and again.
    assert 0 < attempts.pause_after(FileNotFoundError()) < attempts.pause_after(FileNotFoundError())
    for _ in range(2):
        folder.mkdir()
        assert attempts.pause_after(FileNotFoundError()) == 0
        assert attempts.pause_after(FileNotFoundError()) > 1
        shutil.rmtree(folder)
        attempts.wait(PATIENCE_S)
        eventually(lambda: attempts.pause_after(FileNotFoundError()) < 1)
    folder.mkdir()
    assert attempts.pause_after(FileNotFoundError()) == 0
    (folder / "a").touch()
    attempts.wait(PATIENCE_S)
    attempts.reset()
    eventually(lambda: not watchers())


def test_all_who_wait_for_one_file_are_told(tmp_path: Path) -> None:
    arrivals, told = Arrivals(), queue.Queue[int]()
    callbacks = [lambda number=number: told.put(number) for number in range(20)]
    for callback in callbacks:
        arrivals.add(tmp_path / "a", callback)
    (tmp_path / "a").touch()
    assert {told.get(timeout=PATIENCE_S) for _ in callbacks} == set(range(20))
    for callback in callbacks:
        arrivals.remove(tmp_path / "a", callback)
    eventually(lambda: not watchers())


def test_a_folder_that_goes_is_told_and_can_be_watched_again(tmp_path: Path) -> None:
    arrivals, told = Arrivals(), queue.Queue[str]()
    folder = tmp_path / "folder"

    def callback() -> None:
        told.put("look")

    assert not arrivals.add(folder / "a", callback)
    eventually(lambda: not watchers())
    folder.mkdir()
    assert arrivals.add(folder / "a", callback)
    shutil.rmtree(folder)
    assert told.get(timeout=PATIENCE_S) == "look"
    arrivals.remove(folder / "a", callback)
    eventually(lambda: not watchers())
    assert arrivals.add(tmp_path / "b", callback)
    folder.mkdir()
    assert arrivals.add(folder / "a", callback)
    (folder / "a").touch()
    assert told.get(timeout=PATIENCE_S) == "look"
    arrivals.remove(folder / "a", callback)
    arrivals.remove(tmp_path / "b", callback)
    eventually(lambda: not watchers())


def test_many_come_and_go_at_once(tmp_path: Path) -> None:
    arrivals = Arrivals()
    failures: list[str] = []

    def come_and_go(number: int) -> None:
        for turn in range(30):
            came = threading.Event()
            path = tmp_path / f"{number}-{turn}"
            if not arrivals.add(path, came.set):
                failures.append(f"{path} is not watched")
            path.touch()
            if not came.wait(PATIENCE_S):
                failures.append(f"{path} was not told")
            arrivals.remove(path, came.set)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    eventually(lambda: not watchers())


def test_where_the_system_watches_nothing_nobody_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def inotify_init1(_flags: int) -> int:
            return -1

    monkeypatch.setattr("pytriton.proxy_backend.worker.arrivals._libc", Refusing)
    assert not Arrivals().add(tmp_path / "a", lambda: None)
    assert not watchers()


def test_without_threads_nobody_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not Arrivals().add(tmp_path / "a", lambda: None)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_begins_anew(tmp_path: Path) -> None:
    arrivals, came = Arrivals(), threading.Event()
    assert arrivals.add(tmp_path / "a", came.set)
    child = os.fork()
    if child == 0:
        told = threading.Event()
        is_told = arrivals.add(tmp_path / "b", told.set)
        (tmp_path / "b").touch()
        os._exit(0 if is_told and told.wait(PATIENCE_S) and not came.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (tmp_path / "a").touch()
    assert came.wait(PATIENCE_S)
    arrivals.remove(tmp_path / "a", came.set)
    eventually(lambda: not watchers())
