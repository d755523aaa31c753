"""What a bug report has to say about a machine and an installation, without what is secret."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pytriton.cli.checks.vulnerabilities import describe_vulnerabilities
from pytriton.proxy_backend import library_path
from pytriton.proxy_backend.system.control_groups import read_own_group
from pytriton.proxy_backend.system.processors import usable_processors
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.server.tritonserver.command_line import has_gpu
from pytriton.server.tritonserver.ports import find_listener
from pytriton.server.workspace import default_home

_SECRET = re.compile(r"token|secret|key|password|passwd|credential|_restricted_(api|protocol)(_|$)", re.IGNORECASE)
# The user:password@ in an address.
_USER_INFO = re.compile(r"://[^/@\s]+@")
_HIDDEN = "(hidden)"
_DISTRIBUTIONS = (
    "pytriton-server",
    "pytriton-client",
    "pytriton-decorators",
    "pytriton-proxy-backend",
    "nvidia-pytriton",
    "numpy",
    "tritonclient",
    "grpcio",
    "protobuf",
    "gevent",
    "geventhttpclient",
    "aiohttp",
    "pyzmq",
    "wrapt",
    "prometheus-client",
    "opentelemetry-sdk",
    "typer",
)
_PORTS = {8000: "HTTP", 8001: "gRPC", 8002: "metrics", 8080: "Vertex AI, SageMaker"}
_TOOL_DEADLINE_S = 20.0


def describe_environment(*, verbose: bool) -> str:
    """Describe versions, machine, tritonserver, GPUs, ports and variables, in one section each."""
    sections: dict[str, Callable[[], Iterator[str]]] = {
        "Python": _python,
        "Distributions": _distributions,
        "Machine": _machine,
        "tritonserver": _tritonserver,
        "Vulnerabilities of this tritonserver": lambda: describe_vulnerabilities(find_tritonserver(), verbose=verbose),
        "GPU": _gpu,
        "Ports": _ports,
        "Environment": lambda: describe_variables(dict(os.environ)),
    }
    lines: list[str] = []
    for title, section in sections.items():
        lines.append(f"{title}:")
        try:
            lines += [f"  {line}" for line in section()]
        except Exception as error:
            # If one part fails, the report has the others.
            lines.append(f"  (cannot be told: {type(error).__name__}: {error})")
    return "\n".join(lines)


def describe_variables(environment: dict[str, str]) -> Iterator[str]:
    """Yield a line for each variable, without the value if name or value looks like a secret."""
    for name in sorted(environment):
        value = environment[name]
        is_secret = _SECRET.search(name) or _SECRET.search(value)
        shown = _HIDDEN if is_secret else _USER_INFO.sub(f"://{_HIDDEN}@", value)
        yield f"{name}={shown}"


def _python() -> Iterator[str]:
    yield f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    yield f"prefix {sys.prefix}" + (f", made from {sys.base_prefix}" if sys.prefix != sys.base_prefix else "")


def _distributions() -> Iterator[str]:
    for name in _DISTRIBUTIONS:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _machine() -> Iterator[str]:
    yield f"{platform.system()} {platform.release()} on {platform.machine()}"
    release = Path("/etc/os-release")
    if release.is_file():
        named = dict(line.split("=", 1) for line in release.read_text().splitlines() if "=" in line)
        yield named.get("PRETTY_NAME", "").strip('"') or "unknown distribution"
    yield " ".join(platform.libc_ver()) or "unknown libc"
    yield f"{os.cpu_count()} processors, {usable_processors():g} of them for this process"
    yield from _memory()
    for folder in ("/dev/shm", str(default_home()), os.environ.get("TMPDIR", "/tmp")):
        present = Path(folder)
        while not present.exists():
            present = present.parent
        usage = shutil.disk_usage(present)
        yield f"{folder}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"


def _memory() -> Iterator[str]:
    found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(found[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    yield f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB memory available"
    limit = (read_own_group("memory", "memory.max", "memory.limit_in_bytes") or "").strip()
    # Without a limit, the value is "max", or larger than any memory.
    if limit.isdecimal() and int(limit) < total:
        yield f"limited to {int(limit) / 2**30:.1f} GiB by the control group"


def _tritonserver() -> Iterator[str]:
    binary = find_tritonserver()
    yield f"{binary.executable} ({binary.origin})"
    backends = sorted(entry.name for entry in binary.backends_dir.iterdir()) if binary.backends_dir.is_dir() else []
    yield f"backends of its own: {', '.join(backends) or 'none'}"
    yield f"proxy backend: {library_path()}"


def _gpu() -> Iterator[str]:
    yield f"a GPU is {'visible' if has_gpu() else 'not visible'} to this process"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield "nvidia-smi is not on PATH"
        return
    query = [tool, "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=_TOOL_DEADLINE_S, check=False)
    yield from (done.stdout or done.stderr).strip().splitlines()


def _ports() -> Iterator[str]:
    for port, service in _PORTS.items():
        listener = find_listener(port)
        yield f"{port} ({service}): " + (f"taken by {listener}" if listener else "nobody seen listening")
