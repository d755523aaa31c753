"""Pythons that this machine does not have, from a newer suite of Debian: `python3 tools/newer_pythons.py COMMAND ...`.

The suite lies in a folder of its own, a root, which debootstrap makes once (a gigabyte). A command that runs in it sees
the root's programs and libraries, and everything else of this machine where it is: the checkout, the home folder, the
temporary files. That takes root and namespaces of its own, as containers have them; where they cannot be had,
`reason_against` says why, and nothing is made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SUITE = "forky"
VERSIONS = ("3.14", "3.15")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# The suite's packages change while their index is read for a second time, hence all of them at once.
PACKAGES = (
    *(f"python{version}{part}" for version in VERSIONS for part in ("", "-venv", "-dev")),
    *("ca-certificates", "g++", "git", "procps"),
)
PROGRAMS = ("apt-get", "debootstrap", "unshare", "chroot", "mount")
ENVIRONMENTS = "usr/local/lib/pythons"
# What a root has of its own. All else at the top of this machine's file system is shown in it.
OF_THE_ROOT = frozenset({"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys"})
OF_THE_ROOT |= {"usr", "var"}
# How names are found, who is trusted, and where packages come from, is this machine's matter.
SETTINGS = (
    *("resolv.conf", "hosts", "passwd", "group", "ssl/certs/ca-certificates.crt"),
    *("pip.conf", "xdg/pip/pip.conf", "xdg/pip/constraints.txt"),
)
# The shell stays process 1 of its own namespaces: it reaps what others leave behind, and nothing outlives it.
ENTER = """
set -eu
root=$1; folder=$2; shown=$3; shift 3
mount --make-rprivate /
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
for name in $shown; do mkdir -p "$root/$name"; mount --rbind "/$name" "$root/$name"; done
exec chroot "$root" /bin/sh -c 'cd "$1"; shift; "$@"; exit $?' enter "$folder" "$@"
"""


class RootError(Exception):
    """The root cannot be made, for the reason in its text."""


def reason_against() -> str | None:
    """Return why no root can be used on this machine, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a root of a newer Debian suite takes Linux and the rights of root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"a root of a newer Debian suite takes {', '.join(missing)}, which this machine lacks"
    if not KEYRING.exists():
        return f"a root of a newer Debian suite is checked with {KEYRING}, which this machine lacks"
    top = Path(__file__).resolve().parts[1]
    if top in OF_THE_ROOT:
        return f"a root of a newer Debian suite has a /{top} of its own, in which this checkout is not"
    asked = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "--make-rprivate", "/"], capture_output=True, check=False
    )
    return None if asked.returncode == 0 else "this machine allows no mounts in a namespace of their own"


def mirror() -> str:
    """Return where this machine takes Debian's packages from; there it finds the newer suite, too.

    Raises:
        RootError: If apt knows no archive of Debian.
    """
    command = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    found = [line.removeprefix("Debian ") for line in listed if line.startswith("Debian ")]
    if not found:
        raise RootError("apt-get knows no archive of Debian on this machine")
    return found[0]


def make(root: Path) -> None:
    """Make the root, unless it is there.

    Args:
        root: Folder for it. It comes to be at once, when all is in it.

    Raises:
        RootError: If debootstrap or a virtual environment in the root fails; the text has the end of what they said.
    """
    if not root.is_dir():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
            fresh = Path(scratch) / "root"
            command = ["debootstrap", "--variant=minbase", f"--keyring={KEYRING}", f"--include={','.join(PACKAGES)}"]
            # An older debootstrap does not know the suite by its name; it is made as every newer one is.
            _run([*command, SUITE, str(fresh), mirror(), "/usr/share/debootstrap/scripts/sid"])
            for version in VERSIONS:
                _run(inside(fresh, f"python{version}", "-m", "venv", f"/{ENVIRONMENTS}/{version}", folder=Path("/")))
            try:
                fresh.rename(root)
            except OSError:
                # Somebody else's run finished first; theirs is as good as ours.
                if not root.is_dir():
                    raise


def interpreter(version: str) -> Path:
    """Return where the interpreter of a version lies, as programs in the root see it; it has pip."""
    return Path("/", ENVIRONMENTS, version, "bin", f"python{version}")


def inside(root: Path, *command: str, folder: Path) -> list[str]:
    """Return the command that runs another one in the root.

    Args:
        root: The root.
        *command: What is to run there.
        folder: Its current folder, the same here and there.
    """
    for name in SETTINGS:
        mine, its = Path("/etc", name), root / "etc" / name
        if mine.exists():
            its.parent.mkdir(parents=True, exist_ok=True)
            its.unlink(missing_ok=True)
            shutil.copyfile(mine, its)
    shown = sorted(path.name for path in Path("/").iterdir() if path.is_dir() and path.name not in OF_THE_ROOT)
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", ENTER, "enter"]
    return [*enter, str(root), str(folder), " ".join(shown), *command]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-5:])
        raise RootError(f"{command[0]} ended with exit code {done.returncode}:\n{last}")


def main(arguments: list[str]) -> int:
    """Run a command in the root of this checkout, which is made if need be."""
    reason = reason_against()
    if reason is None:
        root = Path(__file__).resolve().parent.parent / ".tools" / SUITE
        try:
            make(root)
        except RootError as error:
            reason = str(error)
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    return subprocess.run(inside(root, *arguments, folder=Path.cwd()), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
