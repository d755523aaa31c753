"""NVIDIA's load generator against a server with its usual protection: the lines of `docs/perf_analyzer.md`."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from pytriton.decorators import model
from pytriton.triton import Triton, TritonSecurityConfig
from support.paths import ROOT
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.skipif(
        shutil.which("perf_analyzer") is None, reason="the load generator perf_analyzer is not installed"
    ),
    pytest.mark.slow,
]

LINES = re.findall(r"^perf_analyzer .+$", (ROOT / "docs/perf_analyzer.md").read_text(), re.MULTILINE)


@model
def shout(text: str) -> str:
    return text.upper()


@pytest.fixture(params=["protected", "statistics open"])
def served(request: pytest.FixtureRequest) -> Iterator[Triton]:
    opened = ["shared-memory", "model-repository", "trace", "logging"]
    security = TritonSecurityConfig(
        access_token="secret", restricted_endpoints=None if request.param == "protected" else opened
    )
    triton = Triton(config=local_config(), security_config=security)
    triton.bind(shout)
    with short_home(), running(triton):
        yield triton


def measure(triton: Triton, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the page with the ports of a server, for as many requests as take no time."""
    for port, url in (("8000", triton.http_url), ("8001", triton.grpc_url)):
        line = line.replace(f"localhost:{port}", str(url).rpartition("/")[2])
    # One measurement, however it varies; a count of requests takes one concurrency.
    line = re.sub(r"--concurrency-range \S+", "--concurrency-range 4", line)
    command = [*shlex.split(line), "--request-count", "200"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_the_lines_of_the_page(served: Triton) -> None:
    assert len(LINES) == 2
    for line in LINES:
        done = measure(served, line)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Throughput:" in done.stdout
        assert re.search(r"Execution count: [1-9]", done.stdout)


def test_without_the_token(request: pytest.FixtureRequest, served: Triton) -> None:
    for line in LINES:
        done = measure(served, re.sub(r"-H \S+", "", line))
        if "statistics" in request.node.name:
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            assert done.returncode != 0
            assert "is restricted, expecting header" in done.stdout + done.stderr
