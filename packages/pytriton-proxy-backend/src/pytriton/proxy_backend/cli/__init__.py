"""The `pytriton-proxy-backend` command, also `python -m pytriton.proxy_backend`."""

from ..system.first_process import leave_first_process

__all__ = ["main"]


def main() -> None:
    """Run the command that `sys.argv` names, and ends the interpreter with its exit code."""
    leave_first_process()
    # Imported late, because programs that serve models do not need it.
    from .app import run

    run()
