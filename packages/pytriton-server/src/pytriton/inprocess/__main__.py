"""`python -m pytriton.inprocess`: run a program that imports `tritonserver`, which it finds here."""

import os
import runpy
import sys

from pytriton.inprocess import AlreadyExistsError, as_tritonserver

_USAGE = "usage: python -m pytriton.inprocess (-m MODULE | FILE) [ARGUMENT...]"


def main() -> None:
    """Run the module or file of the command line as Python would."""
    is_module = sys.argv[1:2] == ["-m"]
    program = sys.argv[1 + is_module :]
    if not program or program[0].startswith("-"):
        sys.exit(_USAGE)
    try:
        as_tritonserver()
    except AlreadyExistsError as error:
        sys.exit(f"Error: {error}")
    sys.argv[:] = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
