"""Runs a program that cannot outlive its parent: `python exec_shim.py <parent pid> <signal> <program> [arguments]`.

Environment variables that the program does not get:

* `PYTRITON_EXEC_SECRETS`: lines, a mark and the secret that stands for it in turns. Arguments that end with a mark end
  with its secret instead. Unlike arguments, the environment is for the owner's eyes only.
* `PYTRITON_EXEC_PRELOAD`: a library that the program, and not this shim, loads before its own. It is the guard, which
  takes the secrets out of a descriptor and puts them into the arguments where nobody sees them.

A script of its own and no `preexec_fn`, because running Python code between fork and exec of a process with threads can
deadlock. It becomes the program, so there is no process more. The kernel sends the signal when the *thread* that
started the shim ends: it must be one that lives as long as the program.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
SECRETS_VARIABLE = "PYTRITON_EXEC_SECRETS"
PRELOAD_VARIABLE = "PYTRITON_EXEC_PRELOAD"
GUARD_SECRETS_VARIABLE = "PYTRITON_GUARD_SECRETS"


def main(arguments: list[str]) -> int:
    """Ask for the signal and become the program; return only if that fails, with the exit code."""
    parent, signal_number, *command = arguments
    secrets = os.environ.pop(SECRETS_VARIABLE, "")
    preload = os.environ.pop(PRELOAD_VARIABLE, "")
    if preload:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [_entry(preload), os.environ.get("LD_PRELOAD")]))
        if secrets:
            os.environ[GUARD_SECRETS_VARIABLE] = str(_descriptor_of(secrets))
    else:
        lines = secrets.split("\n")
        for mark, secret in zip(lines[::2], lines[1::2], strict=False):
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


def _entry(library: str) -> str:
    """Return what LD_PRELOAD takes for a path: the loader splits it at blanks and colons."""
    if not set(" :") & set(library):
        return library
    descriptor = os.open(library, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    return f"/proc/self/fd/{descriptor}"


def _descriptor_of(text: str) -> int:
    """Return a descriptor of memory with a text, which the program inherits."""
    descriptor = os.memfd_create("pytriton-secrets", 0)
    os.write(descriptor, text.encode())
    return descriptor


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
