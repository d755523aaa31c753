"""The benchmarks measure ours, and tell right from wrong."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.paths import ROOT
from support.waiting import PATIENCE_S

# What wrk 4.1.0 printed for two seconds on a model.py in Triton's Python backend.
WRK_OUTPUT = """\
Running 2s test @ http://127.0.0.1:34279/v2/models/add/infer
  1 threads and 8 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.01ms  353.79us   5.17ms   77.73%
    Req/Sec     8.01k     1.43k   10.61k    66.67%
  16737 requests in 2.10s, 4.34MB read
Requests/sec:   7968.85
Transfer/sec:      2.07MB
BENCH {"requests": 16737, "duration_us": 2100302, "p50_us": 948, "p90_us": 1410, "p99_us": 2121, "max_us": 5168, \
"connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0}
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the benchmark, which is a program and not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import inprocess, loadgen, run, workload

    return SimpleNamespace(inprocess=inprocess, loadgen=loadgen, run=run, workload=workload)


def test_the_numbers_of_a_real_run_are_read(bench: SimpleNamespace) -> None:
    sample = bench.loadgen.parse(WRK_OUTPUT)
    assert sample.requests_per_s == pytest.approx(7968.85, abs=0.01)
    assert (sample.p50_ms, sample.p99_ms, sample.max_ms) == (0.948, 2.121, 5.168)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (WRK_OUTPUT.replace('"status": 0', '"status": 3'), "'status': 3"),
        (WRK_OUTPUT.replace('"requests": 16737', '"requests": 0'), "in 0 requests"),
        ("unable to connect to 127.0.0.1:1 Connection refused", "unable to connect"),
    ],
)
def test_a_run_with_errors_is_no_result(bench: SimpleNamespace, output: str, message: str) -> None:
    with pytest.raises(bench.loadgen.LoadGeneratorError, match=message):
        bench.loadgen.parse(output)


class _EchoesTheFirstRow(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        answer = self.rfile.read(int(self.headers["Content-Length"]))[:16]
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def wrong_server() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _EchoesTheFirstRow)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join(PATIENCE_S)
    server.server_close()


@pytest.mark.parametrize("wire", ["RawWire", "KServeWire"])
def test_a_wrong_answer_is_found(bench: SimpleNamespace, wrong_server: int, wire: str) -> None:
    with pytest.raises(bench.workload.WrongAnswerError, match="expected"):
        bench.workload.check_answers(wrong_server, getattr(bench.workload, wire)(), "add", threads=4, requests=2)


def test_an_unknown_peer_is_refused(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.run.main(["--only", "ours,theirs"])
    assert "received theirs" in capsys.readouterr().err


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder with a short name: a unix socket's path has at most 107 bytes, and `tmp_path` takes most."""
    with tempfile.TemporaryDirectory(prefix="pt-") as name:
        yield Path(name)


@pytest.mark.skipif(shutil.which("wrk") is None, reason="the load generator wrk is not installed")
def test_ours_is_measured(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "raw.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--only", "ours", "--rounds", "1", "--seconds", "1"]
    finished = subprocess.run(
        [*command, "--connections", "2", "--json", str(file)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    raw = json.loads(file.read_text())
    assert {(timing["case"]["model"]["name"], timing["case"]["connections"]) for timing in raw["timings"]} == {
        ("add", 2),
        ("delay", 32),
    }
    assert all(timing["sample"]["requests"] > 0 for timing in raw["timings"])
    assert {start["start_up"]["processes"] for start in raw["starts"]} == {2}
    assert "float32[1,4] x 2 -> sum, 2 connections" in finished.stdout
    assert list(folder.iterdir()) == []


def test_a_server_in_process_is_measured(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "raw.json"
    short = "--rounds 2 --calls 20 --large-calls 2 --memory-calls 200 --threads 4 --thread-calls 100"
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "inprocess.py"), *short.split(), "--json", str(file)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    raw = json.loads(file.read_text())
    assert {len(rounds) for rounds in raw["latencies_us"].values()} == {2}
    assert min(min(rounds) for rounds in raw["latencies_us"].values()) > 0
    assert raw["large_is_shared"]
    assert (raw["calls_of_1_mib"], len(raw["rss_mib"])) == (200, 11)
    assert (raw["calls_of_threads"], raw["mixed_up"], raw["failures"]) == (400, 0, [])
    assert "HTTP over in process" in finished.stdout
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({}, None),
        ({"large_is_shared": False}, "a copy of the large input"),
        ({"rss_mib": [100.0, 110.0, 120.0]}, "memory grew by 20 MiB"),
        ({"mixed_up": 1}, "1 answers were mixed up"),
    ],
)
def test_a_server_in_process_that_does_wrong_is_found(
    bench: SimpleNamespace, changes: dict[str, Any], failure: str | None
) -> None:
    right = {"large_is_shared": True, "rss_mib": [100.0, 130.0, 101.0]}
    failures = bench.inprocess.Report(**{**right, **changes}).failures
    assert len(failures) == (failure is not None)
    assert failure is None or failure in failures[0]
