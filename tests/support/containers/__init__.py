"""Real containers: an image built by buildah from a Dockerfile, run by runc in networks of their own.

Base images cannot be pulled here: Debian's own packages make one, under the name that stands in the Dockerfile.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT, load_program
from support.processes import require, while_running
from support.waiting import PATIENCE_S, eventually

_PACKAGES = "ca-certificates,python-is-python3,python3,python3-venv"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# What holds a network while nobody else is in it.
_IDLE = "ip link set lo up; echo up; exec sleep infinity"


def run(*command: object, timeout_s: float | None = PATIENCE_S) -> str:
    """Run a program to its end, and return what it wrote; the test fails with that where it fails."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def require_containers() -> None:
    """Skip the test where this machine runs no containers."""
    for program, package in (("buildah", None), ("runc", None), ("debootstrap", None), ("ip", "iproute2")):
        require(program, package)
    asked = subprocess.run(
        ["unshare", "--mount", "--pid", "--net", "--fork", "mount", "--make-rprivate", "/"],
        capture_output=True,
        check=False,
    )
    if asked.returncode:
        pytest.skip("containers cannot be made here: this user may make no namespaces")


class Images:
    """Images in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        places = ("--root", folder / "store", "--runroot", folder / "run")
        self._buildah: tuple[object, ...] = ("buildah", *places, "--storage-driver", "overlay")

    def make_base(self, name: str) -> None:
        """Make a base image with Python from the packages of this machine's Debian."""
        newer_pythons = load_program(ROOT / "tools" / "newer_pythons.py")
        release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
        base = self._folder / "base"
        suite, mirror = release["VERSION_CODENAME"].strip('"'), newer_pythons.mirror()
        run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", suite, base, mirror)
        container = run(*self._buildah, "from", "scratch").strip()
        run(*self._buildah, "add", "--quiet", container, base, "/")
        run(*self._buildah, "commit", "--rm", "--quiet", container, name)
        shutil.rmtree(base)

    def build(self, dockerfile: Path, name: str) -> dict[str, Any]:
        """Build an image of the checkout, and return its settings, as Docker has them."""
        # Stages that two of the files have in common are built once.
        options: list[object] = ["--layers", "--format", "docker", "--pull-never", "--isolation", "chroot"]
        options += ["--network", "host"]
        for volume in self._package_index():
            options += ["--volume", volume]
        # It compiles the native libraries, which takes a busy machine any time; the test has a limit of its own.
        run(*self._buildah, "build", *options, "--file", dockerfile, "--tag", name, ROOT, timeout_s=None)
        inspected = json.loads(run(*self._buildah, "inspect", "--type", "image", name))
        settings: dict[str, Any] = inspected["Docker"]["config"]
        return settings

    @contextlib.contextmanager
    def mounted(self, name: str) -> Iterator[Path]:
        """Show the files of an image in a folder, as long as the block."""
        container = run(*self._buildah, "from", "--pull-never", name).strip()
        try:
            yield Path(run(*self._buildah, "mount", container).strip())
        finally:
            run(*self._buildah, "rm", container)

    def remove(self) -> None:
        """Remove all images, and the mounts of the storage."""
        run(*self._buildah, "rmi", "--all", "--force")
        subprocess.run(["umount", str(self._folder / "store" / "overlay")], capture_output=True, check=False)

    def _package_index(self) -> Iterator[str]:
        """Give the volumes by which pip finds packages while an image is built, as it does on this machine.

        Constraints are left out: an environment in an image may want other releases than the tests.
        """
        listed = run(sys.executable, "-m", "pip", "config", "list").splitlines()
        found = {name: value.strip("'") for name, _, value in (line.partition("=") for line in listed)}
        settings = self._folder / "pip.conf"
        wanted = [name for name in found if not name.startswith("install.") and not name.endswith("constraint")]
        lines = {name.partition(".")[2]: found[name] for name in wanted}
        settings.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in lines.items()))
        yield f"{settings}:/etc/pip.conf:ro"
        tops = {_CERTIFICATES}
        for name, value in found.items():
            places = [Path(part.removeprefix("file://")) for part in value.split()]
            # The pages of an index in a folder name files beside it.
            tops |= {place.parent if name.endswith("index-url") else place for place in places if place.is_absolute()}
        yield from (f"{top}:{top}:ro" for top in sorted(tops) if top.exists())


class Network:
    """A network of its own: a host, which the tests' programs run in, and containers that it alone reaches."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._count = 0
        self._host = self._hold()

    def join(self) -> tuple[Path, str]:
        """Make the place of another container: its network namespace, and its address."""
        self._count += 1
        here, there = (f"10.99.{self._count}.{number}" for number in (1, 2))
        holder, link = self._hold(), f"link{self._count}"
        self.run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", holder)
        self.run("ip", "address", "add", f"{here}/24", "dev", link)
        self.run("ip", "link", "set", link, "up")
        inside = ("nsenter", f"--net=/proc/{holder}/ns/net")
        run(*inside, "ip", "address", "add", f"{there}/24", "dev", "eth0")
        run(*inside, "ip", "link", "set", "eth0", "up")
        return Path(f"/proc/{holder}/ns/net"), there

    def run(self, *command: object) -> str:
        """Run a program on the host of the network to its end."""
        return run(*self.command(*command))

    def command(self, *command: object) -> list[str]:
        """Return the command that runs a program on the host of the network."""
        return ["nsenter", f"--net=/proc/{self._host}/ns/net", *map(str, command)]

    def _hold(self) -> int:
        held = self._stack.enter_context(
            while_running(["unshare", "--net", "sh", "-c", _IDLE], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        assert held.stdout is not None
        assert held.stdout.readline() == b"up\n", "containers cannot be made here: no network of its own"
        return held.pid


class Container:
    """A container of an image, as its settings say, on a file system that is read-only."""

    def __init__(self, folder: Path, files: Path, settings: Mapping[str, Any], network: Path, address: str) -> None:
        self.address = address
        self.log = folder / "log"
        self._folder = folder
        self._state = folder / "state"
        self._name = folder.name
        folder.mkdir()
        run("runc", "spec", "--bundle", folder)
        path = folder / "config.json"
        self._spec = json.loads(path.read_text())
        user, _, group = settings["User"].partition(":")
        process = self._spec["process"]
        process |= {
            "terminal": False,
            "args": [*(settings["Entrypoint"] or ()), *(settings["Cmd"] or ())],
            "env": settings["Env"],
            "cwd": settings["WorkingDir"],
            "user": {"uid": int(user), "gid": int(group)},
            "capabilities": {name: [] for name in process["capabilities"]},
        }
        self._spec["root"] = {"path": str(files), "readonly": True}
        for namespace in self._spec["linux"]["namespaces"]:
            if namespace["type"] == "network":
                namespace["path"] = str(network)
        self.add_mount("/run/pytriton", "tmpfs", "tmpfs", "mode=0700", f"uid={user}", f"gid={group}")

    def add_mount(self, destination: str, kind: str, source: object, *options: str) -> None:
        """Mount something in it."""
        mount = {"destination": destination, "type": kind, "source": str(source), "options": list(options)}
        self._spec["mounts"].append(mount)

    def add_file(self, path: str, source: Path) -> None:
        """Put a file in the place of one of the image."""
        source.chmod(0o644)
        self.add_mount(path, "bind", source, "bind", "ro")

    def limit_memory(self, size: int) -> None:
        """Let it have so many bytes."""
        self._spec["linux"]["resources"]["memory"] = {"limit": size, "swap": size}

    def start_with(self, *command: str) -> None:
        """Run another command than that of the image."""
        self._spec["process"]["args"] = list(command)

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run it as long as the block, which begins once it serves."""
        (self._folder / "config.json").write_text(json.dumps(self._spec))
        runc = ["runc", "--root", str(self._state), "run", "--bundle", str(self._folder), self._name]
        with self.log.open("wb") as log, subprocess.Popen(runc, stdout=log, stderr=log) as started:
            try:
                eventually(lambda: "Serving." in self.read_log() or started.poll() is not None)
                assert started.poll() is None, self.read_log()
                yield started
            finally:
                if started.poll() is None:
                    self.send("KILL")
                started.wait(PATIENCE_S)

    def read_log(self) -> str:
        """Return what it has written."""
        return self.log.read_text(errors="replace")

    def send(self, signal: str) -> None:
        """Send a signal to its first process."""
        run("runc", "--root", self._state, "kill", self._name, signal)

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run another program in it."""
        words: Sequence[str] = ["runc", "--root", str(self._state), "exec", self._name, *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
