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

# Files must be unchanged for this long before they are read, because programs write them in several steps.
_QUIET_MS = 100
_LOOK_MS = 50
_LOOK_FOR_STOP_MS = 500
_LOOK_PAUSE_S = 0.5
_LEAST_REST = 10
_PASSED_OVER = frozenset({"__pycache__", "node_modules", "site-packages"})
_STOP_S = 30.0

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0


class Reloader:
    """Watches the Python files of the folder with the target, and of the folders below it.

    It must be made before the files are imported, so that it knows their state at that time.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._failure = f"{target} has changed and cannot be served; what was served before goes on"
        self._folder = folder_of(target)
        self._stamps = self._read_stamps()
        self._stop = threading.Event()
        # Python compares compiled files by seconds and sizes, which a quick change may leave the same.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        # Its messages would come before the result of the reload.
        logging.getLogger("watchfiles").setLevel(logging.WARNING)

    @contextlib.contextmanager
    def watching(self, reload: Callable[[], str]) -> Iterator[None]:
        """Call `reload` whenever files have changed, during the block. What it returns or raises is logged."""
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
        # With the package, the system reports changes at once; without it, all files are read again.
        has_package = importlib.util.find_spec("watchfiles") is not None
        watch = self._watch_folder if has_package else self._look_at_folder
        while not self._stop.is_set():
            # The system may have no room for another watch, or somebody is replacing the folder: both may pass.
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
            # The files are also compared once at the start, because they may have changed since their import.
            if changes or (not has_looked and self._read_stamps() != self._stamps):
                self._reload(reload)
            has_looked = True

    def _look_at_folder(self, reload: Callable[[], str]) -> None:
        while True:
            began = time.monotonic()
            stamps = self._read_stamps()
            took_s = time.monotonic() - began
            if stamps != self._stamps:
                # Wait until nobody writes any more.
                while not self._stop.wait(_QUIET_MS / 1000) and (now := self._read_stamps()) != stamps:
                    stamps = now
                self._stamps = stamps
                if not self._stop.is_set():
                    self._reload(reload)
            # The pause grows with the folder, so that watching does not keep a processor busy.
            if self._stop.wait(max(_LOOK_PAUSE_S, _LEAST_REST * took_s)):
                return

    def _reload(self, reload: Callable[[], str]) -> None:
        began = time.monotonic()
        try:
            told = reload()
        except (UserCodeError, ConfigFileError, PyTritonError, ProxyBackendError) as error:
            logger.error("%s. %s", self._failure, error)
            return
        except Exception:
            # The thread goes on, to see the next change.
            logger.exception("%s.", self._failure)
            return
        seconds = time.monotonic() - began
        logger.info("%s was read again after a change, in %.1f s%s", self._target, seconds, told and f": {told}")

    def _read_stamps(self) -> dict[Path, tuple[int, int]]:
        stamps = {}
        for folder, folders, files in os.walk(self._folder):
            # Folders of installed packages, and those without code, are skipped.
            folders[:] = [name for name in folders if name not in _PASSED_OVER and not name.startswith(".")]
            for path in (Path(folder, name) for name in files if name.endswith(".py")):
                # The file may be gone already.
                with contextlib.suppress(OSError):
                    found = path.stat()
                    stamps[path] = (found.st_mtime_ns, found.st_size)
        return stamps
