"""SIGHUP of `serve`: another server takes the place of the running one."""

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from pytriton.cli.config_file import ConfigFileError
from pytriton.exceptions import PyTritonError
from pytriton.proxy_backend import ProxyBackendError

logger = logging.getLogger(__name__)

_JOIN_S = 30.0


@contextlib.contextmanager
def replacing(replace: Callable[[], None]) -> Iterator[None]:
    """Call a function in a thread for every SIGHUP during the block; signals that come meanwhile count as one.

    If the terminal was closed, SIGHUP ends the program as SIGTERM does. Outside of the main thread, or if another
    handler is set, nothing is done.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        yield
        return
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    had_terminal = _has_terminal()

    def on_hangup(_number: int, _frame: FrameType | None) -> None:
        if had_terminal and not _has_terminal():
            signal.raise_signal(signal.SIGTERM)
        else:
            asked.put(True)

    thread = threading.Thread(target=_replace_when_asked, args=(asked, replace), name="pytriton-replace", daemon=True)
    thread.start()
    signal.signal(signal.SIGHUP, on_hangup)
    try:
        yield
    finally:
        # The default action would end a program that is about to end anyway.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        asked.put(False)
        thread.join(_JOIN_S)


def _replace_when_asked(asked: "queue.SimpleQueue[bool]", replace: Callable[[], None]) -> None:
    while asked.get():
        while not asked.empty():
            if not asked.get():
                return
        began = time.monotonic()
        logger.info("SIGHUP: another server takes the place of the running one.")
        try:
            replace()
        except (ConfigFileError, PyTritonError, ProxyBackendError) as error:
            logger.error("The running server goes on, no other one took its place. %s", error)
        except Exception:
            # The thread goes on, to see the next signal.
            logger.exception("The running server goes on, no other one took its place.")
        else:
            logger.info("Another server has taken the place of the one before, in %.1f s.", time.monotonic() - began)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
