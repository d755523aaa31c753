"""Programs that run beside a server, each in a process of its own."""

import collections
import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from pytriton.proxy_backend.process.worker_process import RestartLimits
from pytriton.proxy_backend.system.threads import call_safely, keep_on
from pytriton.server.tritonserver.process import shim_command
from pytriton.triton._triton import Triton

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_END_S = 10.0
_GRPC_VARIABLE = "no_grpc_proxy"


@contextlib.contextmanager
def run_beside(
    triton: Triton,
    command: Sequence[str],
    *,
    name: str,
    descriptors: Collection[int] = (),
    restart: bool = True,
    on_given_up: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Run a program for a running server, in a process of its own, until the block ends.

    The program gets the access token of the server as `PYTRITON_ACCESS_TOKEN`, and reaches the server without a proxy.
    It ends with this process, however that ends. Ctrl+C goes to this process alone, which ends the program.

    ```python
    triton.serve(beside=lambda: run_beside(triton, ["my-dashboard", triton.metrics_url], name="the dashboard"))
    ```

    Args:
        triton: The server.
        command: The program and its arguments.
        name: What the log calls it.
        descriptors: Open files that the program inherits, such as a socket that it is to listen at.
        restart: Whether it is started again when it ends by itself. After five ends within a minute it is given up, and
            the server says that it is not ready, see `Triton.lose_part`.
        on_given_up: Called then.
    """
    token = triton.get_access_token()
    environment = {
        **os.environ,
        **_no_proxy(triton.grpc_url or triton.http_url or ""),
        **({"PYTRITON_ACCESS_TOKEN": token} if token else {}),
    }

    def give_up() -> None:
        if on_given_up is not None:
            call_safely(on_given_up)
        triton.lose_part()

    program = _Program(name, [*shim_command(signal.SIGTERM), *command], environment, descriptors, restart, give_up)
    keeper = threading.Thread(target=program.keep, name="pytriton-beside")
    keeper.start()
    try:
        yield
    finally:
        program.end(keeper)


class _Program:
    """A program that a thread starts, waits for and starts again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Collection[int],
        again: bool,
        on_given_up: Callable[[], None],
    ) -> None:
        self._name = name
        self._command = command
        self._environment = environment
        self._descriptors = descriptors
        self._again = again
        self._on_given_up = on_given_up
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._limits = RestartLimits()
        self._ends: collections.deque[float] = collections.deque(maxlen=self._limits.max_crashes)

    def keep(self) -> None:
        """Run the program, and restart it if asked to, until `end` is called or it is given up."""
        while not self._is_over.is_set():
            # A failure means that the system cannot start a process now.
            if keep_on(self._run_once, f"The process of {self._name} cannot be looked after") and not self._again:
                return
            if self._is_lost:
                keep_on(self._give_up, f"What is lost with {self._name} cannot be told")
                return
            self._is_over.wait(_PAUSE_S)

    def end(self, keeper: threading.Thread) -> None:
        """End the program, and wait for the thread that runs `keep`."""
        self._is_over.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.terminate()
        keeper.join(_END_S)
        if keeper.is_alive() and process is not None:
            process.kill()
            keeper.join()

    @property
    def _is_lost(self) -> bool:
        ends = self._ends
        return len(ends) == self._limits.max_crashes and ends[-1] - ends[0] < self._limits.crash_window_s

    def _give_up(self) -> None:
        logger.error(
            "The process of %s has ended %d times within %g s: it is given up, and what it has written before says "
            "why. The server goes on, and says that it is not ready.",
            self._name, len(self._ends), self._limits.crash_window_s,
        )  # fmt: skip
        self._on_given_up()

    def _run_once(self) -> None:
        with self._lock:
            if self._is_over.is_set():
                return
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=self._descriptors,
                start_new_session=True,
            )
        code = self._process.wait()
        if not self._is_over.is_set():
            self._ends.append(time.monotonic())
            then = ": it is started again." if self._again and not self._is_lost else "."
            logger.error("The process of %s ended with exit code %s%s", self._name, code, then)


def _no_proxy(url: str) -> dict[str, str]:
    """Return the variables by which no proxy comes between a process and the server at an address."""
    host = urlsplit(url).hostname or ""
    found = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    # gRPC ignores no_proxy if its own variable is set.
    grpc = os.environ.get(_GRPC_VARIABLE) or found
    return {
        name: ",".join(filter(None, [value, host])) for name, value in (("no_proxy", found), (_GRPC_VARIABLE, grpc))
    }
