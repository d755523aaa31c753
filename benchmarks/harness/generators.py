"""The load generators: wrk for HTTP, h2load for gRPC.

Both are in C and run one thread, so that the cost of the client is small and the same for every server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.wires import GRPC_INFER, HttpRequest

_SCRIPT = Path(__file__).with_name("infer.lua")
_MARK = "BENCH "
_ERRORS = ("connect", "read", "write", "status", "timeout")
_PACKAGES = {"wrk": "wrk", "h2load": "nghttp2-client"}
_INSTALL_TIMEOUT_S = 300
_VERSION_TIMEOUT_S = 60
_GRPC_TIMEOUT_S = 300


class LoadGeneratorError(Exception):
    """A load generator is not there, did not run, or counted errors."""


@dataclass(frozen=True)
class Run:
    """What one timed run measured as the client saw it, and what the load generator itself cost."""

    requests: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s: float
    wall_s: float


def find_generator(name: str) -> str:
    """Return the path of `wrk` or `h2load`, installing the Debian package where this process may do so.

    Raises:
        LoadGeneratorError: it is not on `PATH` and cannot be installed; says how to get it.
    """
    package = _PACKAGES[name]
    found = shutil.which(name)
    failed = ""
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        try:
            subprocess.run(
                ["apt-get", "install", "-y", "-q", package],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_INSTALL_TIMEOUT_S,
                check=False,  # the look-up below tells whether it worked
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            failed = f"; that was tried here: {error}"
        found = shutil.which(name)
    if found is None:
        raise LoadGeneratorError(
            f"the load generator {name} is not on PATH; install it with `apt-get install {package}` (Debian, Ubuntu; "
            f"it may need `apt-get update` first){failed}"
        )
    return found


def version(path: str) -> str:
    """Return the version that a load generator tells, or an empty text.

    Raises:
        LoadGeneratorError: it does not run.
    """
    command = [path, "--version"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadGeneratorError(f"the load generator {path} does not run: {error}") from None
    words = output.split()  # "wrk debian/4.1.0-3+b2 [epoll] Copyright ...", "h2load nghttp2/1.52.0"
    return words[1] if len(words) > 1 else ""


def load_http(
    wrk: str, port: int, requests: Sequence[HttpRequest], *, connections: int, seconds: float, scratch: Path
) -> Run:
    """Send requests over and over in turn, on `connections` connections for so many whole seconds, at least one.

    All of them have one path.

    Raises:
        LoadGeneratorError: wrk failed, or a request did not get an answer with status 200.
    """
    whole_seconds = max(1, round(seconds))
    bodies = []
    for number, request in enumerate(requests):
        bodies.append(_write(scratch / f"body{number}.bin", request.body))
        headers = "\n".join(f"{name}: {value}" for name, value in request.headers.items())
        _write(bodies[-1].with_name(f"{bodies[-1].name}.headers"), headers.encode())
    variables = {"BENCH_BODY_FILES": "\n".join(map(str, bodies))}
    command = [wrk, "-t1", f"-c{connections}", f"-d{whole_seconds}s", "--timeout", "60s", "-s", str(_SCRIPT)]
    output, cpu_s, wall_s = _run([*command, f"http://127.0.0.1:{port}{requests[0].path}"], variables, whole_seconds)
    return parse_wrk(output, cpu_s, wall_s)


def parse_wrk(output: str, cpu_s: float = 0, wall_s: float = 0) -> Run:
    """Read the line that the Lua script printed.

    Raises:
        LoadGeneratorError: the line is not there, nothing was answered, or wrk counted errors.
    """
    line = next((line for line in reversed(output.splitlines()) if line.startswith(_MARK)), None)
    if line is None:
        raise LoadGeneratorError(f"expected a line that starts with {_MARK!r} from wrk, received: {output!r}")
    numbers: dict[str, int] = json.loads(line.removeprefix(_MARK))
    errors = {name: numbers[name] for name in _ERRORS if numbers[name]}
    if errors or not numbers["requests"]:
        raise LoadGeneratorError(
            f"expected only answers with status 200, received {errors} in {numbers['requests']} requests"
        )
    rate = numbers["requests"] / (numbers["duration_us"] / 1e6)
    return Run(numbers["requests"], rate, numbers["p50_us"] / 1e3, numbers["p99_us"] / 1e3, cpu_s, wall_s)


def load_grpc(
    h2load: str,
    port: int,
    message: bytes,
    answer_bytes: int,
    *,
    connections: int,
    requests: int,
    scratch: Path,
    path: str = GRPC_INFER,
) -> Run:
    """Send one message so many times, on `connections` connections that each wait for an answer before the next.

    h2load knows nothing of gRPC: it sends the frame that a gRPC client would. An answer of another size than
    `answer_bytes`, frames included, is an error, since an error of gRPC has no data. The number of requests is given
    rather than a time, at whose end calls in flight would be cancelled, which tritonserver 2.51 may not survive.

    Raises:
        LoadGeneratorError: h2load failed, or a request did not get the answer that it should.
    """
    log = scratch / "h2load.log"
    log.unlink(missing_ok=True)
    body = _write(scratch / "body.bin", b"\0" + len(message).to_bytes(4, "big") + message)
    command = [h2load, "-t1", f"-c{connections}", "-m1", f"-n{requests}", f"--log-file={log}", "-d", str(body)]
    command += ["-Hcontent-type: application/grpc", "-Hte: trailers", f"http://127.0.0.1:{port}{path}"]
    output, cpu_s, wall_s = _run(command, {}, _GRPC_TIMEOUT_S)
    return parse_h2load(output, log.read_text(), answer_bytes, cpu_s, wall_s)


def parse_h2load(output: str, log: str, answer_bytes: int, cpu_s: float = 0, wall_s: float = 0) -> Run:
    """Read what h2load printed, and its log of start, status and microseconds of each request.

    Raises:
        LoadGeneratorError: requests failed, nothing was answered, or the answers were not all of `answer_bytes`.
    """
    counts = re.search(r"(\d+) done, (\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", output)
    data = re.search(r"\((\d+)\) data$", output, re.M)
    rate = re.search(r"^finished in \S+, ([\d.]+) req/s", output, re.M)
    if counts is None or data is None or rate is None:
        raise LoadGeneratorError(f"expected the counts of requests from h2load, received: {output!r}")
    done, succeeded, *bad = map(int, counts.groups())
    if any(bad) or not done or done != succeeded:
        raise LoadGeneratorError(f"expected only answers with status 200 from h2load, received: {counts.group()}")
    if int(data.group(1)) != done * answer_bytes:
        raise LoadGeneratorError(f"expected {done} answers of {answer_bytes} bytes, received {data.group(1)} bytes")
    times_ms = [int(line.split()[2]) / 1e3 for line in log.splitlines()]
    p99_ms = statistics.quantiles(times_ms, n=100)[98] if len(times_ms) > 1 else times_ms[0]
    return Run(done, float(rate.group(1)), statistics.median(times_ms), p99_ms, cpu_s, wall_s)


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _run(command: Sequence[str], variables: Mapping[str, str], seconds: float) -> tuple[str, float, float]:
    """Return what a generator printed, its processor time and the time that it took, both in seconds."""
    began, before = time.monotonic(), os.times()
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=seconds + 300, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LoadGeneratorError(f"waited {error.timeout:g} s for a run of {seconds} s: {' '.join(command)}") from None
    if done.returncode != 0:
        raise LoadGeneratorError(f"{command[0]} ended with exit code {done.returncode}: {done.stderr or done.stdout}")
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return done.stdout, cpu_s, time.monotonic() - began
