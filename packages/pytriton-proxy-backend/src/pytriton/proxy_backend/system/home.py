"""Where files are put that nobody has named a place for."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["default_home"]


def default_home() -> Path:
    """Return the folder for them.

    It is `PYTRITON_HOME`, else `XDG_CACHE_HOME/pytriton`, else `~/.cache/pytriton`.
    """
    home = os.environ.get("PYTRITON_HOME")
    if not home:
        cache = os.environ.get("XDG_CACHE_HOME")
        home = os.path.join(cache, "pytriton") if cache else "~/.cache/pytriton"
    return Path(os.path.expandvars(home)).expanduser().absolute()
