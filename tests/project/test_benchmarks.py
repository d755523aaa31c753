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

import numpy as np
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
    from benchmarks import inprocess, run
    from benchmarks.harness import generators, publish, results, wires
    from benchmarks.servers import models

    return SimpleNamespace(
        inprocess=inprocess,
        run=run,
        generators=generators,
        publish=publish,
        results=results,
        wires=wires,
        models=models,
    )


def test_the_numbers_of_a_real_run_are_read(bench: SimpleNamespace) -> None:
    found = bench.generators.parse_wrk(WRK_OUTPUT)
    assert found.requests_per_s == pytest.approx(7968.85, abs=0.01)
    assert (found.requests, found.p50_ms, found.p99_ms) == (16737, 0.948, 2.121)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (WRK_OUTPUT.replace('"status": 0', '"status": 3'), "'status': 3"),
        (WRK_OUTPUT.replace('"requests": 16737', '"requests": 0'), "in 0 requests"),
        ("unable to connect to 127.0.0.1:1 Connection refused", "unable to connect"),
    ],
)
def test_a_run_with_errors_is_no_result(bench: SimpleNamespace, output: str, message: str) -> None:
    with pytest.raises(bench.generators.LoadGeneratorError, match=message):
        bench.generators.parse_wrk(output)


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


def test_requests_have_the_rows_and_ids_that_they_are_given(bench: SimpleNamespace) -> None:
    wire = bench.wires.KServeWire()
    add = bench.models.Model("add", 4)
    texts = bench.models.Model("texts", 3, ("a",), datatype="BYTES", item_bytes=5)

    def parts(request: Any) -> tuple[Any, bytes]:
        split = int(request.headers["Inference-Header-Content-Length"])
        return json.loads(request.body[:split]), request.body[split:]

    head, data = parts(wire.encode(add, bench.wires.example(add, 7)))
    assert ([each["shape"] for each in head["inputs"]], len(data), "id" in head) == ([[1, 4]] * 2, 32, False)
    rows = [np.stack([value] * 3) for value in bench.wires.example(add)]
    head, data = parts(wire.encode_many(add, rows, "an id"))
    assert ([each["shape"] for each in head["inputs"]], len(data), head["id"]) == ([[3, 4]] * 2, 96, "an id")
    head, data = parts(wire.encode(texts, bench.wires.example(texts)))
    assert ([each["shape"] for each in head["inputs"]], len(data)) == ([[1, 3]], 3 * 9)
    assert data.startswith(b"\x05\0\0\x0000000\x05\0\0\x0000001")


@pytest.mark.parametrize("wire", ["RawWire", "KServeWire"])
def test_a_wrong_answer_is_found(bench: SimpleNamespace, wrong_server: int, wire: str) -> None:
    def caller(timeout_s: float) -> Any:
        return bench.wires.HttpCaller(wrong_server, getattr(bench.wires, wire)(), timeout_s)

    with pytest.raises(bench.wires.WrongAnswerError, match="expected"):
        bench.wires.check_answers(caller, bench.models.Model("add", 4), threads=4, requests=2)


def test_an_unknown_peer_is_refused(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.run.main(["--peers", "ours,theirs"])
    assert "received theirs" in capsys.readouterr().err


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder with a short name: a unix socket's path has at most 107 bytes, and `tmp_path` takes most."""
    with tempfile.TemporaryDirectory(prefix="pt-") as name:
        yield Path(name)


# What h2load 1.52 printed, without the lines of its progress, and the first lines of its log.
H2LOAD_OUTPUT = """\
finished in 1.00s, 3.00 req/s, 3.45MB/s
requests: 3 total, 3 started, 3 done, 3 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 3 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 1.45KB (1485) total, 300B (300) headers (space savings 90.00%), 237B (237) data
"""
H2LOAD_LOG = "1700000000000000\t200\t400\n1700000000000400\t200\t500\n1700000000000900\t200\t900\n"


def test_the_numbers_of_a_run_over_grpc_are_read(bench: SimpleNamespace) -> None:
    found = bench.generators.parse_h2load(H2LOAD_OUTPUT, H2LOAD_LOG, 79)
    assert (found.requests, found.requests_per_s, found.p50_ms) == (3, 3.0, 0.5)
    assert found.p99_ms >= 0.9


@pytest.mark.parametrize(
    ("output", "answer_bytes", "message"),
    [
        (H2LOAD_OUTPUT, 80, "expected 3 answers of 80 bytes"),
        (H2LOAD_OUTPUT.replace("0 errored", "1 errored"), 79, "1 errored"),
        ("the server is not there", 79, "the server is not there"),
    ],
)
def test_a_run_over_grpc_with_errors_is_no_result(
    bench: SimpleNamespace, output: str, answer_bytes: int, message: str
) -> None:
    with pytest.raises(bench.generators.LoadGeneratorError, match=message):
        bench.generators.parse_h2load(output, H2LOAD_LOG, answer_bytes)


def test_ratios_are_of_the_same_round_and_without_noise(bench: SimpleNamespace) -> None:
    results = bench.results.Results(options={})
    for number, ours, theirs, noise in [(1, 300.0, 100.0, 0.0), (2, 100.0, 50.0, 0.1), (3, 1.0, 100.0, 2.0)]:
        for peer, rate in (("ours", ours), ("theirs", theirs)):
            results.cells.append(bench.results.Cell("tiny", "http/1", peer, number, {"requests/s": rate}, noise))
    assert results.ratio(
        *(("tiny", "http/1", peer) for peer in ("ours", "theirs")), "requests/s"
    ) == bench.results.Ratio(2.5, 2.0, 3.0)
    assert results.median("tiny", "http/1", "ours", "requests/s") == 200.0
    assert results.median("tiny", "http/1", "nobody", "requests/s") is None
    again = bench.results.Results.from_json(json.loads(json.dumps(results.to_json())))
    assert again.cells == results.cells


def test_a_run_is_written_into_the_page_and_the_rest_stays(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "performance.md"
    blocks = [f"<!-- bench:{name} -->\nold {name}\n<!-- /bench:{name} -->\n" for name in ("aims", "tiny", "large")]
    page.write_text("A page.\n" + "".join(blocks))
    for name, value in (("ROOT", tmp_path), ("PAGE", page), ("_draw", lambda results: ["tiny-http"])):
        monkeypatch.setattr(bench.publish, name, value)
    results = bench.results.Results(options={"rounds": 2, "seconds": 1}, titles={"ours": "us", "limit": "the limit"})
    for number, ours in ((1, 70.0), (2, 90.0)):
        for peer, rate in (("ours", ours), ("limit", 100.0)):
            results.cells.append(bench.results.Cell("tiny", "http/1", peer, number, {"requests/s": rate}))
    said = bench.publish.publish([results])
    assert said[0] == "performance.md: tiny, aims"
    assert "left as it is" in said[1]
    text = page.read_text()
    assert "old large" in text
    assert "old tiny" not in text
    assert "![requests/s over HTTP, by connections](performance/tiny-http.png)" in text
    assert "| share of the limit, HTTP, 1 " in text
    assert "80% (70% to 90%) |          aim |" in text
    assert "not measured |" in text


def test_a_machine_without_load_generators_is_told(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert bench.run.main(["tiny", "--peers", "ours"]) == 1
    assert "missing: tiny: it needs wrk or h2load" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["apt-get", "wrk"])
@pytest.mark.parametrize(
    ("program", "text"), [("not a program", "Exec format error"), ("#!/bin/sh\nexec /bin/sleep 600\n", "timed out")]
)
def test_a_load_generator_that_does_not_run_or_come_is_told(
    name: str, program: str, text: str, bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with a machine that has no network, or with a broken installation; whatever needs none is still measured."""
    (tmp_path / name).write_text(program)
    (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for limit in ("_INSTALL_TIMEOUT_S", "_VERSION_TIMEOUT_S"):
        monkeypatch.setattr(bench.generators, limit, 0.1)
    monkeypatch.setattr(bench.run, "available_mib", lambda: 5000.0)
    tiny, client = bench.run.WORKLOADS["tiny"], bench.run.WORKLOADS["client"]
    results = bench.results.Results(options={})
    found = bench.run._generators([tiny, client], results)
    assert found == {}
    assert text in results.missing["wrk"]
    assert not bench.run._is_able(tiny, found, results)
    assert bench.run._is_able(client, found, results)


def test_a_machine_without_the_memory_is_told(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.run, "available_mib", lambda: 5000.0)
    large, client = bench.run.WORKLOADS["large"], bench.run.WORKLOADS["client"]
    results = bench.results.Results(options={})
    assert not bench.run._is_able(large, {"wrk": "wrk", "h2load": "h2load"}, results)
    assert results.missing["large"].endswith(" MiB of memory, 5000 are available")
    assert bench.run._is_able(client, {}, results)


def test_what_a_missing_load_generator_would_do_is_left_out(bench: SimpleNamespace) -> None:
    tiny, large = bench.run.WORKLOADS["tiny"], bench.run.WORKLOADS["large"]
    run = bench.run.Bench([], 1, ["*/8", "http/2x4MiB"], {"wrk": "/usr/bin/wrk"}, bench.results.Results(options={}))
    assert run.cases(tiny) == ["http/8"]
    assert run.cases(large) == ["http/2x4MiB"]
    run.generators = {"h2load": "/usr/bin/h2load"}
    assert run.cases(tiny) == ["grpc/8"]


@pytest.mark.skipif(shutil.which("wrk") is None, reason="the load generator wrk is not installed")
def test_ours_and_the_limit_are_measured(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "raw.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "run.py"),
        "tiny",
        "--peers",
        "ours,limit",
        "--cases",
        "http/1",
    ]
    finished = subprocess.run(
        [*command, "--rounds", "1", "--seconds", "1", "--json", str(file)],
        env={**os.environ, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    cells = {cell["peer"]: cell["numbers"] for cell in json.loads(file.read_text())["cells"]}
    assert set(cells) == {"ours", "limit"}
    assert all(numbers["requests/s"] > 0 and numbers["rows/batch"] >= 1 for numbers in cells.values())
    assert "worker us/batch" in cells["ours"]
    assert "worker us/batch" not in cells["limit"]
    assert "**tiny: http/1**" in finished.stdout
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
