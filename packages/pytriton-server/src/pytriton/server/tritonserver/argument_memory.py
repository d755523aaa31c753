"""Wipe secrets out of the command line of a running process, as `ps` and `/proc/<pid>/cmdline` show it.

Linux shows the memory that the arguments lie in, whatever is written there. A parent may write into its child's memory,
unless the system forbids it (Yama's strictest modes, some sandboxes).
"""

import os
from collections.abc import Sequence

_WIPED = b"*"
# Positions in /proc/<pid>/stat after the name in parentheses, which may contain spaces.
_ARGUMENTS_START = 45
_ARGUMENTS_END = 46


def wipe_arguments(pid: int, secrets: Sequence[str]) -> bool:
    """Overwrite secrets in the command line of a child that has read its arguments; return whether none is left."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    except (OSError, IndexError, ValueError):
        return False
    try:
        before = os.pread(memory, end - start, start)
        after = before
        for secret in secrets:
            # The secret must end an argument; equal bytes within another argument stay.
            text = secret.encode()
            after = after.replace(b"=" + text + b"\0", b"=" + _WIPED * len(text) + b"\0")
        if after != before:
            os.pwrite(memory, after, start)
        return len(before) == end - start and os.pread(memory, end - start, start) == after
    except OSError:
        return False
    finally:
        os.close(memory)
