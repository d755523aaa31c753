"""The load generator: wrk, one thread, so that the cost of the client is small and the same for every server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = Path(__file__).with_name("infer.lua")
_MARK = "BENCH "
_ERRORS = ("connect", "read", "write", "status", "timeout")
_INSTALL_TIMEOUT_S = 300


class LoadGeneratorError(Exception):
    """wrk is not there, did not run, or counted errors."""


@dataclass(frozen=True)
class Sample:
    """What one timed run measured; latencies in milliseconds as the client saw them."""

    requests_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    requests: int


@dataclass(frozen=True)
class Run:
    """A timed run: what it measured, and what the load generator itself cost, in seconds."""

    sample: Sample
    cpu_s: float
    wall_s: float


def find_wrk() -> str:
    """Return the path of wrk, installing the Debian package where this process may do so.

    Raises:
        LoadGeneratorError: it is not on `PATH` and cannot be installed; says how to get it.
    """
    found = shutil.which("wrk")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "-y", "-q", "wrk"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=False,  # the look-up below tells whether it worked
        )
        found = shutil.which("wrk")
    if found is None:
        raise LoadGeneratorError(
            "the load generator wrk is not on PATH; install it with `apt-get install wrk` (Debian, Ubuntu; it may need "
            "`apt-get update` first) or build it from https://github.com/wg/wrk"
        )
    return found


def wrk_version(wrk: str) -> str:
    """Return the version that wrk tells, or an empty text."""
    output = subprocess.run([wrk, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    words = output.split()  # "wrk debian/4.1.0-3+b2 [epoll] Copyright ...": the exit status is 1 even so
    return words[1] if len(words) > 1 else ""


def measure(
    wrk: str, url: str, headers: dict[str, str], body: bytes, *, connections: int, seconds: float, scratch: Path
) -> Run:
    """Send one request over and over, on `connections` connections for `seconds` seconds (at least one, whole ones).

    Raises:
        LoadGeneratorError: wrk failed, or a request did not get an answer with status 200.
    """
    body_file = scratch / "body.bin"
    body_file.write_bytes(body)
    whole_seconds = max(1, round(seconds))
    environment = {
        **os.environ,
        "BENCH_BODY_FILE": str(body_file),
        "BENCH_HEADERS": "\n".join(f"{name}: {value}" for name, value in headers.items()),
    }
    command = [wrk, "-t1", f"-c{connections}", f"-d{whole_seconds}s", "--timeout", "10s", "-s", str(_SCRIPT), url]
    began, children = time.monotonic(), os.times()
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=whole_seconds + 30, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LoadGeneratorError(
            f"waited {error.timeout:g} s for a run of {whole_seconds} s: {' '.join(command)}"
        ) from None
    if finished.returncode != 0:
        raise LoadGeneratorError(
            f"wrk ended with exit code {finished.returncode}: {finished.stderr or finished.stdout}"
        )
    wall_s, after = time.monotonic() - began, os.times()
    cpu_s = after.children_user + after.children_system - children.children_user - children.children_system
    return Run(parse(finished.stdout), cpu_s, wall_s)


def parse(output: str) -> Sample:
    """Read the line that the Lua script printed.

    Raises:
        LoadGeneratorError: the line is not there, nothing was answered, or wrk counted errors.
    """
    line = next((line for line in reversed(output.splitlines()) if line.startswith(_MARK)), None)
    if line is None:
        raise LoadGeneratorError(
            f"expected a line that starts with {_MARK!r} in the output of wrk, received: {output!r}"
        )
    numbers: dict[str, int] = json.loads(line.removeprefix(_MARK))
    errors = {name: numbers[name] for name in _ERRORS if numbers[name]}
    if errors or not numbers["requests"]:
        raise LoadGeneratorError(
            f"expected only answers with status 200, received {errors} in {numbers['requests']} requests"
        )
    return Sample(
        requests_per_s=numbers["requests"] / (numbers["duration_us"] / 1e6),
        p50_ms=numbers["p50_us"] / 1e3,
        p90_ms=numbers["p90_us"] / 1e3,
        p99_ms=numbers["p99_us"] / 1e3,
        max_ms=numbers["max_us"] / 1e3,
        requests=numbers["requests"],
    )
