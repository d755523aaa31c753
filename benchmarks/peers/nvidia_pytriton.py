"""NVIDIA PyTriton in a virtual environment of its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.environments import (
    Interpreter,
    PeerMissingError,
    base_interpreter,
    environment,
    inspect_interpreter,
    installed_versions,
)
from benchmarks.harness.processes import Launch
from benchmarks.peers.base import Peer, Ports
from benchmarks.peers.ours import pytriton_launch
from benchmarks.servers.models import Model

REQUIREMENT = "nvidia-pytriton==0.7.0"
_VERSIONS = ((3, 10), (3, 11), (3, 12))
"""It needs numpy below 2, which has no wheels for later ones."""


class NvidiaPyTritonEnvironment:
    """The environment with PyTriton and with its tritonserver, which the Python backend is measured with, too."""

    def __init__(self, interpreter: str | None) -> None:
        """Take the interpreter to use, or `None` to look for one."""
        self._wanted = interpreter
        self.interpreter: Interpreter
        self.python: Path

    def prepare(self) -> dict[str, str]:
        """Find an interpreter, install, return the versions; raises `PeerMissingError` when it cannot be had."""
        self.interpreter = _find_interpreter(self._wanted)
        self.python = environment("nvidia-pytriton", self.interpreter.executable, [REQUIREMENT, "numpy<2"])
        return installed_versions(self.python, ["nvidia-pytriton", "numpy"])

    def stub_environment(self) -> dict[str, str]:
        """Return the variables under which the stub of the Python backend finds libpython, which it embeds."""
        return {"LD_LIBRARY_PATH": str(self.interpreter.libpython_folder)}


class NvidiaPyTriton(Peer):
    """PyTriton 0.7.0 with its defaults."""

    name = "nvidia-pytriton"
    title = "NVIDIA PyTriton"

    def __init__(self, shared: NvidiaPyTritonEnvironment) -> None:
        """Take the environment that it runs in."""
        self._shared = shared

    def prepare(self) -> dict[str, str]:
        """Install it."""
        return self._shared.prepare()

    def launch(self, models: Sequence[Model], ports: Ports, scratch: Path, copies: int = 1) -> Launch:
        """Return how to start it."""
        launch = pytriton_launch(str(self._shared.python), models, ports, scratch, copies)
        return replace(launch, environment={**launch.environment, **self._shared.stub_environment()})


def _find_interpreter(wanted: str | None) -> Interpreter:
    names = [f"python{major}.{minor}" for major, minor in reversed(_VERSIONS)]
    candidates = [wanted] if wanted else [base_interpreter(), *filter(None, map(shutil.which, names))]
    refused = []
    for candidate in candidates:
        found = inspect_interpreter(candidate)
        if found is None:
            refused.append(f"{candidate} does not run")
        elif found.version not in _VERSIONS:
            refused.append(f"{candidate} is Python {found.version[0]}.{found.version[1]}")
        elif found.libpython_folder is None:
            refused.append(f"{candidate} has no shared libpython")
        else:
            return found
    raise PeerMissingError(
        f"it needs Python 3.10, 3.11 or 3.12 with a shared libpython ({'; '.join(refused)}); "
        "name one with --peer-python PATH"
    )
