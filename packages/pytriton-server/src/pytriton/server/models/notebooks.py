"""Whether this process is the kernel of a notebook, whose user reads errors in the cell that has called."""

import sys

__all__ = ["in_notebook"]


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    # A notebook has imported IPython, so it is not imported here.
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    # IPython in a terminal has no kernel.
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None
