"""The lowest releases that our distributions say they take: are they enough?

For each case an environment gets the lowest release of each direct dependency that has a wheel for that Python
(`uv --resolution lowest-direct`), and the newest of everything that those bring along, which is what pip gives to
somebody who has older packages already. Then some of the tests run in it: a bound that is too low fails there.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# What runs the tests, in the newest releases that fit beside the lowest ones.
TEST_TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "trustme>=1.1,<2")
DISTRIBUTIONS = ("client", "decorators", "proxy-backend", "server")


@dataclass(frozen=True)
class Case:
    """An environment, and the tests that run in it."""

    extras: Mapping[str, str]  # by distribution; those that are missing here are installed without any
    tests: tuple[str, ...]  # files and folders of tests, and options of pytest
    tools: tuple[str, ...] = field(default=())  # what the tests take besides


CASES = {
    "plain": Case(
        {},
        (
            "packages/pytriton-client/tests/client/core",
            "--ignore=packages/pytriton-client/tests/client/core/test_telemetry.py",
            "packages/pytriton-client/tests/client/http",
            "packages/pytriton-decorators/tests",
            "packages/pytriton-server/tests/server/models",
            "tests/clients/test_sync.py",
            "tests/clients/test_futures.py",
            "tests/command_line/test_calls.py",
            "tests/command_line/test_command_line.py",
            "tests/inprocess/test_tensor.py",
            "tests/serving/test_inference.py",
        ),
        ("jaxtyping>=0.2.36,<1",),
    ),
    "telemetry": Case(
        {"client": "telemetry", "proxy-backend": "telemetry", "server": "telemetry"},
        (
            "packages/pytriton-client/tests/client/core/test_telemetry.py",
            "packages/pytriton-proxy-backend/tests/proxy/test_telemetry.py",
            "tests/server/test_telemetry.py",
        ),
    ),
    "files": Case(
        {"server": "openai,reload,yaml"},
        ("tests/command_line/test_serve_config.py", "tests/command_line/test_serve_reload.py"),
    ),
    "console": Case(
        {"server": "console"},
        ("packages/pytriton-server/tests/console", "tests/server/test_console.py"),
        ("openapi-spec-validator>=0.7,<1", "selenium>=4.25,<5"),
    ),
    "mcp": Case({"server": "mcp"}, ("tests/agent_tools",), ("httpx>=0.27,<1",)),
    "openai": Case(
        {"server": "openai,tokenizer"},
        (
            "tests/openai/test_endpoints.py",
            "tests/openai/test_responses.py",
            "tests/openai/test_serve_openai.py",
            "tests/openai/test_speech.py",
            "tests/openai/test_templates.py",
            "tests/openai/test_tokens.py",
        ),
        ("openai>=1.60,<3",),
    ),
}


class LowestError(Exception):
    """An environment cannot be made; the text has what uv said."""


@dataclass(frozen=True)
class Maker:
    """Makes the environments of one Python."""

    uv: Path  # the program
    root: Path  # the checkout
    interpreter: Path  # the Python
    folder: Path  # where the environments are made
    overrides: Path  # requirements that take the place of what packages of others say
    environment: Mapping[str, str]  # variables for uv

    def make(self, name: str) -> Path:
        """Make the environment of a case, and return its interpreter.

        Raises:
            LowestError: If something has no release that fits, or cannot be installed.
        """
        case = CASES[name]
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        python = home / "env" / "bin" / "python"
        ours = [self.root / "packages" / f"pytriton-{each}" for each in DISTRIBUTIONS]
        asked = [f"-e {path}{_extras(case, path)}" for path in ours]
        wheels = ("--only-binary", ":all:", "--override", str(self.overrides))
        home.joinpath("asked.in").write_text("\n".join(asked))
        found, chosen = home / "found.txt", home / "lowest.txt"
        self._uv("venv", "--quiet", "--clear", "--python", str(self.interpreter), str(home / "env"))
        lowest = ("--resolution", "lowest-direct", "--no-annotate", "--no-header", *wheels)
        self._uv("pip", "compile", "--quiet", "--python", str(python), *lowest, "-o", str(found), f"{home}/asked.in")
        lines = found.read_text().splitlines(keepends=True)
        chosen.write_text("".join(line for line in lines if not line.startswith("-e ")))
        more = home / "more.in"
        more.write_text("\n".join([*TEST_TOOLS, *case.tools]))
        install = ("pip", "install", "--quiet", "--python", str(python))
        self._uv(*install, *wheels, "-r", str(chosen), "-r", str(more), "-c", str(chosen))
        self._uv(*install, "--no-deps", *(part for path in ours for part in ("-e", str(path))))
        return python

    def _uv(self, *arguments: str) -> None:
        done = subprocess.run(
            [str(self.uv), *arguments],
            cwd=self.root,
            env=dict(self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise LowestError(f"uv {arguments[0]} {arguments[1]} ended with {done.returncode}:\n{done.stdout.strip()}")


def _extras(case: Case, path: Path) -> str:
    extras = case.extras.get(path.name.removeprefix("pytriton-"))
    return f"[{extras}]" if extras else ""
