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
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
SECRETS_VARIABLE = "PYTRITON_EXEC_SECRETS"
PRELOAD_VARIABLE = "PYTRITON_EXEC_PRELOAD"
GUARD_SECRETS_VARIABLE = "PYTRITON_GUARD_SECRETS"
"""Environment variable for the guard: the descriptor of memory with what may not stand on a command line."""
_MOST_FILES = 1 << 20
_NOEXEC_SEAL = 0x8


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
    _restore_signals()
    _raise_limit()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        print(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 126
    if os.getppid() != int(parent):
        # The parent died before the signal was requested, so nobody would send it.
        return 0
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def _restore_signals() -> None:
    """Unblock all signals, because the parent's blocked and ignored signals are inherited.

    SIGPIPE and SIGXFSZ stay ignored, as in Python: a caller who leaves, or a full log, must not end the server.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _raise_limit() -> None:
    """Raise the limit of open files to the maximum, because each connection is one.

    The usual limit of 1024 protects programs that call `select`, which this program does not.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if most == resource.RLIM_INFINITY else min(most, _MOST_FILES)
    if before != resource.RLIM_INFINITY and before < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _entry(library: str) -> str:
    """Return a path for LD_PRELOAD, which the loader splits at blanks and colons."""
    if not set(" :") & set(library):
        return library
    descriptor = os.open(library, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    return f"/proc/self/fd/{descriptor}"


def _descriptor_of(text: str) -> int:
    """Return a descriptor of memory with a text, which the program inherits."""
    try:
        descriptor = os.memfd_create("pytriton-secrets", 0)
    except PermissionError:  # the system forbids memfds without a no-exec seal (vm.memfd_noexec)
        descriptor = os.memfd_create("pytriton-secrets", _NOEXEC_SEAL)
    os.write(descriptor, text.encode())
    return descriptor


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
