"""What a parent has to say about its child processes: how they ended, and what they wrote."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Sequence

from .control_groups import MemoryKills
from .escapes import escaped

_READ_BYTES = 65536
_LINE_BYTES = 16384
# Another process that inherited the pipe may keep it open after the child's end.
_LAST_OUTPUT_DEADLINE_S = 0.5
_QUOTED_LINES = 20


class OutputLines:
    """Splits the output of a child process into lines; `on_line` gets each line that is not empty, escaped and cut."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def read(self, fd: int) -> bool:
        """Read what has come, up to a limit; return whether more may come."""
        try:
            chunk = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self._take(chunk)
        return bool(chunk)

    def finish(self, fd: int) -> None:
        """Read the rest of an ended child's output, even if another process holds the pipe."""
        deadline = time.monotonic() + _LAST_OUTPUT_DEADLINE_S
        while time.monotonic() < deadline:
            try:
                chunk = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                break
            self._take(chunk)
        self._take(b"\n")

    def _take(self, chunk: bytes) -> None:
        *lines, rest = (self._rest + chunk).split(b"\n")
        if len(rest) > _LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._rest = rest
        for line in lines:
            text = escaped(line[:_LINE_BYTES].decode("utf-8", errors="replace").rstrip())
            if text:
                self._on_line(text)


def describe_exit(exit_code: int | None, memory_kills: MemoryKills | None = None) -> str:
    """Say in words how a process ended, such as `was killed by signal 9 (SIGKILL)`.

    None is an unknown exit code; `memory_kills` tells whether the system killed it for lack of memory.
    """
    if exit_code is None:
        return "ended with an unknown exit code"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    if exit_code == -signal.SIGKILL and memory_kills is not None:
        name += f", {memory_kills.explain()}"
    return f"was killed by signal {-exit_code} ({name})"


def quote_lines(lines: Sequence[str], what: str = "lines") -> str:
    """Render the last lines that a process wrote for the end of an error's text."""
    if not lines:
        return " It wrote nothing to its output."
    last = lines[-_QUOTED_LINES:]
    shown = what if len(last) > 1 else what.removesuffix("s")
    return f" Its last {len(last)} {shown}:\n" + "\n".join(f"  {line}" for line in last)


def resident_bytes(pid: int) -> int | None:
    """Return a process's resident memory, including shared memory; `None` if unknown."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return None


def proportional_bytes(pid: int) -> int | None:
    """Return a process's memory, of what it shares with others its share (PSS); `None` if unknown."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                name, _, size = line.partition(":")
                if name == "Pss":
                    return int(size.split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None
    return None


def with_descendants(pid: int) -> list[int]:
    """Return a process and all that it has started, as far as those that started them still run."""
    found = [pid]
    # Grows while it is walked through.
    for each in found:
        threads: list[str] = []
        with contextlib.suppress(OSError):
            threads = os.listdir(f"/proc/{each}/task")
        for thread in threads:
            # A process that has ended meanwhile does not affect those after it.
            with contextlib.suppress(OSError), open(f"/proc/{each}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends; None before Linux 5.3, and in some sandboxes."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
