"""Where files are put that nobody has named a place for."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


class HomeError(ValueError):
    """No folder for files is configured; the text says which variable to set."""


def default_home() -> Path:
    """Return the folder for such files: `PYTRITON_HOME`, else `XDG_CACHE_HOME/pytriton`, else `~/.cache/pytriton`."""
    home = os.environ.get("PYTRITON_HOME")
    if not home:
        cache = os.environ.get("XDG_CACHE_HOME")
        home = os.path.join(cache, "pytriton") if cache else "~/.cache/pytriton"
    try:
        path = Path(os.path.expandvars(home)).expanduser().absolute()
    except RuntimeError as error:
        # In a container, the user may have a number only, without a name or home.
        raise HomeError(
            f"There is no folder for the files of pytriton: HOME is not set, and user {os.geteuid()} has no entry in "
            "/etc/passwd. Set PYTRITON_HOME to a folder that this user may write to."
        ) from error
    check_utf8(path, "PYTRITON_HOME")
    return path


def check_utf8(path: Path, name: str) -> None:
    """Refuse a path that is not UTF-8, because tritonserver's settings are text; `name` is the setting."""
    encoded = os.fsencode(path)
    with contextlib.suppress(UnicodeEncodeError):
        if str(path).encode("utf-8") == encoded:
            return
    raise HomeError(
        f"The path {encoded!r} is no UTF-8, or not for this process, whose locale is {sys.getfilesystemencoding()}; so "
        f"tritonserver could not be told of it. Set {name} to another one, or LC_ALL=C.UTF-8."
    )
