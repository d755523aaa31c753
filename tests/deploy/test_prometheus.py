"""Prometheus and Grafana: what deploy/ names is what a server under load exports, and alerts tell what happens."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from support.http import call
from support.paths import ROOT
from support.processes import free_ports, require, while_running
from support.serving import ServedFile, short_home
from support.waiting import eventually

DEPLOY = ROOT / "deploy"
APP = """
import time
from collections.abc import Iterator

from pytriton.decorators import model
from pytriton.model_config import DynamicBatcher, QueuePolicy

@model(max_batch_size=4)
def half(x: float) -> float:
    if x < 0:
        raise ValueError("too small")
    return x / 2

@model
def twice(x: float) -> Iterator[float]:
    yield x
    yield x

@model(batcher=DynamicBatcher(default_queue_policy=QueuePolicy(max_queue_size=1)))
def narrow(x: float) -> float:
    time.sleep(0.05)
    return x
"""
RUNBOOK = ROOT / "docs" / "runbook.md"
# Their samples have further names.
HISTOGRAMS = {"pytriton_callable_seconds", "pytriton_first_response_seconds"}
# What Prometheus itself knows of what it scrapes.
# The second one is there with models whose warm-up is compared.
OWN = {"up", "pytriton_worker_golden_failures_total"}
_NAME = re.compile(r"\b(?:nv|pytriton|process)_[a-z_]+\b|\bup\b")


def expressions() -> list[str]:
    """The expressions of all panels, as Grafana sends them."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    return [
        target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFile]:
    app = tmp_path_factory.mktemp("app") / "app.py"
    app.write_text(APP)
    with short_home() as home:
        server = ServedFile(app, home, "--workers=1", "--memory-budget=4GiB")
        with server.running():
            ask(server)
            yield server


def ask(server: ServedFile) -> None:
    assert call(server.url, "POST", "/v2/models/half/generate", {"x": 3.0})[0] == 200
    assert call(server.url, "POST", "/v2/models/half/generate", {"x": -1.0})[0] != 200
    assert call(server.url, "POST", "/v2/models/twice/generate_stream", {"x": 1.0})[0] == 200


def flood(server: ServedFile) -> int:
    """Ask for more than a queue takes; return how many are refused."""

    def ask_narrow(_: int) -> int:
        return int(call(server.url, "POST", "/v2/models/narrow/generate", {"x": 1.0})[0])

    with ThreadPoolExecutor(8) as callers:
        return sum(status == 503 for status in callers.map(ask_narrow, range(8)))


def test_every_metric_that_is_named_is_exported(server: ServedFile) -> None:
    page = call(f"127.0.0.1:{server.ports[2]}", "GET", "/metrics")[1]
    exported = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if line and not line.startswith("#")}
    named = {name for text in [*expressions(), alerts()] for name in _NAME.findall(without_labels(text))}
    assert len(named) > 15
    # Those of the runbook's table, each alone between backquotes, or with labels.
    named |= set(re.findall(r"`((?:nv|pytriton|process)_[a-z_]+)(?:\{[^`]*)?`", RUNBOOK.read_text())) - HISTOGRAMS
    assert named - OWN <= exported


def test_prometheus_scrapes_it_and_knows_every_expression(server: ServedFile, tmp_path: Path) -> None:
    prometheus = require("prometheus")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    scrape = (DEPLOY / "prometheus" / "scrape.yaml").read_text()
    for place, here in (
        ('"server:8002"', f'"127.0.0.1:{server.ports[2]}"'), ("_interval: 15s", "_interval: 1s"),
        ("scrape_timeout: 5s", "scrape_timeout: 1s"),
    ):  # fmt: skip
        assert place in scrape
        scrape = scrape.replace(place, here)
    (tmp_path / "prometheus.yaml").write_text(scrape)
    # Without their patience; what they say is tried with it below.
    (tmp_path / "alerts.yaml").write_text(re.sub(r"^ +for: .*\n", "", alerts(), flags=re.MULTILINE))
    command = [prometheus, f"--config.file={tmp_path / 'prometheus.yaml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
               f"--web.listen-address={address}", "--log.level=error"]  # fmt: skip
    with while_running(command):
        eventually(lambda: has_begun(address))

        def is_known(expression: str) -> bool:
            ask(server)
            return bool(query(address, expression))

        for expression in expressions():
            eventually(lambda expression=expression: is_known(expression))  # type: ignore[misc]
        assert len(all_rules(address)) == alerts().count("- alert: ")
        eventually(lambda: all(rule["health"] == "ok" for rule in all_rules(address)))
        # Half of the requests fail, and nothing else is wrong.
        eventually(lambda: firing(address) == {"PytritonErrors"})
        # What a full queue refuses was once to be seen nowhere.
        eventually(lambda: flood(server) and firing(address) == {"PytritonErrors", "PytritonRefusals"})


def test_what_the_alerts_tell(tmp_path: Path) -> None:
    promtool = require("promtool", "prometheus")
    done = subprocess.run(
        [promtool, "test", "rules", DEPLOY / "prometheus" / "alerts_test.yaml"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> str:
    return (DEPLOY / "prometheus" / "alerts.yaml").read_text()


def without_labels(text: str) -> str:
    """Leave out what is no expression, and the labels in it."""
    lines = [line for line in text.splitlines() if not re.match(r" +(summary|description|- alert|- name):", line)]
    return re.sub(r"\{[^}]*\}|\b(?:by|without) \([^)]*\)|job=\S+", "", "\n".join(lines))


def has_begun(address: str) -> bool:
    try:
        return call(address, "GET", "/-/ready")[0] == 200
    except OSError:
        return False


def read(address: str, path: str) -> Any:
    status, answer = call(address, "GET", path)
    assert status == 200, answer
    return answer["data"]


def query(address: str, expression: str) -> Any:
    return read(address, f"/api/v1/query?query={quote(expression)}")["result"]


def all_rules(address: str) -> list[Any]:
    return [rule for group in read(address, "/api/v1/rules")["groups"] for rule in group["rules"]]


def firing(address: str) -> set[str]:
    alerts = read(address, "/api/v1/alerts")["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
