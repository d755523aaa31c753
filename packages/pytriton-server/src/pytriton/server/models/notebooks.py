"""Whether this process is the kernel of a notebook, whose user reads errors in the cell that has called."""

import sys

__all__ = ["in_notebook"]


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    # IPython is there then, and is not imported otherwise.
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    # In a terminal it has no kernel.
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None
