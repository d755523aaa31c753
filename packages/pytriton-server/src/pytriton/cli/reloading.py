"""`serve --reload`: a thread that notices when the user's files change."""

import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pytriton.cli.config_file import ConfigFileError
from pytriton.cli.targets import UserCodeError, folder_of
from pytriton.exceptions import PyTritonError
from pytriton.proxy_backend import ProxyBackendError
from pytriton.proxy_backend.system.threads import keep_on

__all__ = ["ReloadError", "Reloader"]

# How long files have to be left alone before they are read: programs write them in several steps.
_QUIET_MS = 100
_LOOK_MS = 50
_LOOK_FOR_STOP_MS = 500
_LOOK_PAUSE_S = 0.5
_LEAST_REST = 10
_PASSED_OVER = frozenset({"__pycache__", "node_modules", "site-packages"})
_STOP_S = 30.0

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0


class ReloadError(Exception):
    """What is served cannot be read again; the text says why."""


class Reloader:
    """Watches the Python files of the folder that has what is served, and of those below it.

    It has to be made before the files are imported, so that it knows what they were like then.

    Args:
        target: What is served, see `load_served`.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._failure = f"{target} has changed and cannot be served; what was served before goes on"
        self._folder = folder_of(target)
        self._stamps = self._read_stamps()
        self._stop = threading.Event()
        # Compiled files go by seconds and sizes, which a quick change leaves as they are.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        # It would tell of every change, before what became of it is told.
        logging.getLogger("watchfiles").setLevel(logging.WARNING)

    @contextlib.contextmanager
    def watching(self, reload: Callable[[], str]) -> Iterator[None]:
        """Call a function whenever files have changed, during the block.

        Args:
            reload: Reads them anew; returns what has changed. What it raises is logged.
        """
        thread = threading.Thread(target=self._watch, args=(reload,), name="pytriton-reload", daemon=True)
        thread.start()
        where = "this folder" if self._folder == Path.cwd() else self._folder
        logger.info("Files below %s are read again when they change.", where)
        try:
            yield
        finally:
            self._stop.set()
            thread.join(_STOP_S)

    def _watch(self, reload: Callable[[], str]) -> None:
        # The system tells of changes at once, by way of that package; to look at all files again takes a moment.
        has_package = importlib.util.find_spec("watchfiles") is not None
        watch = self._watch_folder if has_package else self._look_at_folder
        while not self._stop.is_set():
            # As where the system has no room for another watch, or the folder is being replaced: that may pass.
            if not keep_on(partial(watch, reload), f"Changes below {self._folder} cannot be seen"):
                self._stop.wait(_PAUSE_S)

    def _watch_folder(self, reload: Callable[[], str]) -> None:
        from watchfiles import PythonFilter, watch

        has_looked = False
        for changes in watch(
            self._folder,
            watch_filter=PythonFilter(),
            debounce=_QUIET_MS,
            step=_LOOK_MS,
            stop_event=self._stop,
            rust_timeout=_LOOK_FOR_STOP_MS,
            yield_on_timeout=True,
            raise_interrupt=False,
        ):
            # Once without a change as well: files may have changed between their import and the beginning of the watch.
            if changes or (not has_looked and self._read_stamps() != self._stamps):
                self._reload(reload)
            has_looked = True

    def _look_at_folder(self, reload: Callable[[], str]) -> None:
        while True:
            began = time.monotonic()
            stamps = self._read_stamps()
            took_s = time.monotonic() - began
            if stamps != self._stamps:
                # Until nobody writes any more.
                while not self._stop.wait(_QUIET_MS / 1000) and (now := self._read_stamps()) != stamps:
                    stamps = now
                self._stamps = stamps
                if not self._stop.is_set():
                    self._reload(reload)
            # A large folder is not to keep a processor busy.
            if self._stop.wait(max(_LOOK_PAUSE_S, _LEAST_REST * took_s)):
                return

    def _reload(self, reload: Callable[[], str]) -> None:
        began = time.monotonic()
        try:
            told = reload()
        except (UserCodeError, ConfigFileError, ReloadError, PyTritonError, ProxyBackendError) as error:
            logger.error("%s. %s", self._failure, error)
            return
        except Exception:
            # The thread has to see the next change.
            logger.exception("%s.", self._failure)
            return
        seconds = time.monotonic() - began
        logger.info("%s was read again after a change, in %.1f s%s", self._target, seconds, told and f": {told}")

    def _read_stamps(self) -> dict[Path, tuple[int, int]]:
        stamps = {}
        for folder, folders, files in os.walk(self._folder):
            # What is installed there, or is no code, is not looked at.
            folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.startswith(".")]
            for path in (Path(folder, name) for name in files if name.endswith(".py")):
                # It may be gone already.
                with contextlib.suppress(OSError):
                    found = path.stat()
                    stamps[path] = (found.st_mtime_ns, found.st_size)
        return stamps
