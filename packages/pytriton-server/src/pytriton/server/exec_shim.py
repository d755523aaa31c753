"""Runs a program that cannot outlive its parent: `python exec_shim.py <parent pid> <signal> <program> [arguments]`.

The environment variable `PYTRITON_EXEC_SECRETS`, which the program does not get, holds one line for each of the marks
`{secret-0}`, `{secret-1}`, ... that end an argument: unlike arguments, the environment is for the owner's eyes only.

A script of its own and no `preexec_fn`, because running Python code between fork and exec of a process with threads can
deadlock. It becomes the program, so there is no process more. The kernel sends the signal when the *thread* that
started the shim ends: it must be one that lives as long as the program.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
SECRETS_VARIABLE = "PYTRITON_EXEC_SECRETS"
SECRET_MARK = "{{secret-{}}}"


def main(arguments: list[str]) -> int:
    """Asks for the signal and becomes the program; returns only if that fails, with the exit code."""
    parent, signal_number, *command = arguments
    for number, secret in enumerate(os.environ.pop(SECRETS_VARIABLE, "").split("\n")):
        mark = SECRET_MARK.format(number)
        command = [part.removesuffix(mark) + secret if part.endswith(mark) else part for part in command]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        print(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 126
    if os.getppid() != int(parent):
        # The parent died before the signal was asked for: nobody will send it.
        return 0
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
