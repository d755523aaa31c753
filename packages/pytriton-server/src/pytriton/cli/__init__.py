"""The `pytriton` command, also `python -m pytriton`."""

from pytriton.exceptions._namespace import require_namespace_package as _require_namespace_package

_require_namespace_package()

import contextlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main() -> None:
    """Run the command that `sys.argv` names, and end the interpreter with its exit code."""
    if os.getpid() == 1:
        # Imported late, because it imports numpy, which most commands do not need.
        from pytriton.proxy_backend.system.first_process import leave_first_process

        leave_first_process()
    with contextlib.ExitStack() as ended:
        if _is_for_hosts(sys.argv[1:]):
            from pytriton.proxy_backend.forkserver_main import early_forkserver

            # This comes before imports that no host needs.
            ended.enter_context(early_forkserver())
        # Imported late, because a command that serves models does not need it.
        from pytriton.cli.app import run

        run()


def _is_for_hosts(arguments: Sequence[str]) -> bool:
    """Return whether a command line probably serves a repository with Python models, and so needs a forkserver.

    It need not be right: other models are served as well.
    """
    if arguments[:1] != ["serve-repository"] or any(each.endswith("stub") for each in arguments):
        return False
    import glob

    return any(glob.glob(f"{glob.escape(each)}/*/*/model.py") for each in arguments[1:])
