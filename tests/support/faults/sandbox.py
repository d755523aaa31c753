"""Ways to take from a program what the system lets others do."""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
import subprocess

import pytest

from support.processes import require
from support.waiting import PATIENCE_S

MEMFD_CREATE, FLOCK, SCHED_SETAFFINITY, SCHED_GETAFFINITY = 319, 73, 203, 204
"""Numbers of system calls on x86_64."""

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_NO_NEW_PRIVS = 38
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

STRANGER = 12345
"""A user that the system does not know."""
# Who may read the interpreter, wherever that is, and nothing else that root may.
_AS_STRANGER = [
    "setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups",
    "--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override",
]  # fmt: skip
_WITHOUT_PROC = ["unshare", "--mount", "sh", "-ec", 'mount --make-rprivate /; umount -l /proc; exec "$@"', "sh"]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def deny(*calls: int) -> None:
    """Have the system refuse calls of this process, and of all that it starts, with EPERM, as a sandbox does."""
    steps = [(_LOAD, 0, 0, 0)]
    for number in calls:
        steps += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "no filter of system calls can be had")


def as_stranger() -> list[str]:
    """Return what a command begins with that is run as a user without a name."""
    return _usable(tuple(_AS_STRANGER), "setpriv")


def without_proc() -> list[str]:
    """Return what a command begins with for which nothing is mounted at /proc."""
    return _usable(tuple(_WITHOUT_PROC), "unshare")


@functools.cache
def _usable(command: tuple[str, ...], program: str) -> list[str]:
    require(program, "util-linux")
    done = subprocess.run([*command, "true"], capture_output=True, timeout=PATIENCE_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"this user or machine does not allow `{program}`: {done.stderr.decode()}")
    return list(command)
