"""The `pytriton` command, also `python -m pytriton`."""

__all__ = ["main"]


def main() -> None:
    """Run the command that `sys.argv` names, and end the interpreter with its exit code."""
    # Not at the top: whoever serves models has no use for it.
    from pytriton.server.cli.app import run

    run()
