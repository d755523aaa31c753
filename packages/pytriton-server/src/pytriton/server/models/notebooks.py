"""Whether this process is the kernel of a notebook, whose user reads errors in the cell that has called."""

import re
import sys
from typing import Any

# The names under which IPython keeps what a cell has shown.
_KEPT = re.compile(r"_{1,3}|_\d+")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    # IPython in a terminal has no kernel.
    return getattr(_shell(), "kernel", None) is not None


def forget_shown(value: object) -> None:
    """Take a value out of the outputs of a notebook, which keep all that a cell has shown in its last line."""
    shell: Any = _shell()
    variables = getattr(shell, "user_ns", {})
    # Hidden variables hold a second reference. Other kernels may have none of these lists.
    for names in (variables, getattr(shell, "user_ns_hidden", {})):
        for name in [name for name, kept in names.items() if kept is value and _KEPT.fullmatch(name)]:
            del names[name]
    outputs = variables.get("_oh", {})
    for number in [number for number, kept in outputs.items() if kept is value]:
        del outputs[number]
    for holder, attributes in (("displayhook", ("_", "__", "___")), ("last_execution_result", ("result",))):
        held = getattr(shell, holder, None)
        for name in attributes:
            if held is not None and getattr(held, name, None) is value:
                setattr(held, name, None)


def _shell() -> object:
    # A notebook has imported IPython, so it is not imported here.
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_shell is None else get_shell()
