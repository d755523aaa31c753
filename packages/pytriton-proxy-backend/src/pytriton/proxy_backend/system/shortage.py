"""What to say where no file descriptor is left: `Too many open files` says neither what is short nor what to do."""

from __future__ import annotations

import errno
import os
import resource

__all__ = ["advise", "explain", "is_exhausted"]

# The text of ENFILE, of which a whole machine has too many, begins with that of EMFILE.
_TEXT = os.strerror(errno.EMFILE)
_WHOLE_MACHINE = os.strerror(errno.ENFILE)


def is_exhausted(error: OSError) -> bool:
    """Return whether an error of the system says that no descriptor is left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def explain(error: OSError, advice: str = "") -> str:
    """Return the text of an error of the system, and what to do.

    Args:
        error: The error.
        advice: What to do, unless it is about descriptors.
    """
    text = error.strerror or str(error)
    return " ".join(filter(None, [f"{text}.", advise(text) or advice]))


def advise(text: str) -> str:
    """Return what to do about an error of this process, or of one that it has started.

    Empty where descriptors are left.
    """
    if _TEXT not in text:
        return ""
    if _WHOLE_MACHINE in text:
        return "The whole machine has run out of file descriptors: close some, or raise the limit (sysctl fs.file-max)."
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = "as root, or where the process is started" if soft == hard else f"up to {_shown(hard)} without more rights"
    return f"File descriptors have run out: a process may have {_shown(soft)}. Raise the limit (ulimit -n), {more}."


def _shown(limit: int) -> str:
    return "any number of them" if limit == resource.RLIM_INFINITY else str(limit)
