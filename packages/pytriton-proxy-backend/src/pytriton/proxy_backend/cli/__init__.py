"""The `pytriton-proxy-backend` command, also `python -m pytriton.proxy_backend`."""

from ..system.first_process import leave_first_process

__all__ = ["main"]


def main() -> None:
    """Run the command that `sys.argv` names, and ends the interpreter with its exit code."""
    leave_first_process()
    # Not at the top: whoever serves models has no use for it.
    from .app import run

    run()
