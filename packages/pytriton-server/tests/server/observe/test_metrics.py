"""The text of the metrics page: its parts, and what is missing when one of them is."""

import collections
import contextlib
import dataclasses
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pytriton.proxy_backend.runtime.statistics import Counters
from pytriton.server.control import metrics as control_metrics
from pytriton.server.observe.metrics import ModelTexts, render_metrics
from pytriton.server.observe.metrics_page import MetricsPage
from pytriton.server.observe.metrics_totals import CallableTotals, SleepFacts
from pytriton.server.settings.config import TritonConfig
from pytriton.server.settings.security import TritonSecurityConfig
from pytriton.server.tritonserver.command_line import ServerFolders, build_command
from pytriton.server.tritonserver.outcomes import OUTCOMES, PROTOCOLS
from pytriton.server.tritonserver.ports import Endpoint, ReservedPorts, reserve_ports

TRITON_TEXT = b'# HELP nv_x Something\n# TYPE nv_x counter\nnv_x{model="m"} 3\n'


def endpoint(port: int) -> Endpoint:
    return Endpoint(setting="metrics_port", address="127.0.0.1", port=port, picked=True)


@contextmanager
def triton(text: bytes = TRITON_TEXT) -> Iterator[Endpoint]:
    """Something that serves metrics as tritonserver does."""
    listener = socket.create_server(("127.0.0.1", 0))
    page = MetricsPage(listener, lambda: text)
    page.start()
    try:
        yield endpoint(listener.getsockname()[1])
    finally:
        page.close()


def parsed(text: bytes) -> dict[str, Metric]:
    families = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "a family twice"
    return {family.name: family for family in families}


def sources(families: dict[str, Metric]) -> dict[str, float]:
    return {sample.labels["source"]: sample.value for sample in families["pytriton_metrics_up"].samples}


@pytest.mark.parametrize("text", [TRITON_TEXT, TRITON_TEXT.rstrip(b"\n")])
def test_all_parts(text: bytes) -> None:
    with triton(text) as here:
        families = parsed(render_metrics(here, lambda: ()))
    assert families["nv_x"].samples[0].value == 3
    assert "python_info" in families
    assert sources(families) == {"tritonserver": 1, "callables": 1, "user": 1}


def test_what_triton_leaves_of_a_model_that_is_gone() -> None:
    lines = ["# TYPE nv_inference_request_success counter"]
    lines += [f'nv_inference_request_success{{model="m",version="{version}"}} 2' for version in (1, 3)]
    lines += ["# TYPE nv_inference_request_failure counter"]
    failure = 'nv_inference_request_failure{{model="{}",reason="BACKEND",version="{}"}} {}'
    lines += [failure.format(*each) for each in (("m", 1, 0), ("m", 2, 0), ("gone", 1, 0), ("gone", 2, 4))]
    outcomes = {("gone", "http", "ok"): 4, ("", "grpc", "invalid"): 1}
    with triton("\n".join([*lines, ""]).encode()) as here:
        families = parsed(render_metrics(here, lambda: (), outcomes=outcomes))
    left = [
        (sample.labels["model"], sample.labels["version"])
        for sample in families["nv_inference_request_failure"].samples
    ]
    assert left == [("m", "1"), ("gone", "2")]
    responses = families["pytriton_responses"].samples
    assert [sample.value for sample in responses if sample.labels["model"] == "gone"] == [4]
    assert sum(sample.labels["model"] == "m" for sample in responses) == len(OUTCOMES) * len(PROTOCOLS)
    assert sum(sample.value for sample in responses if not sample.labels["model"]) == 1


def test_without_tritonserver_the_rest_comes(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = endpoint(closed.getsockname()[1])
    families = parsed(render_metrics(nowhere, lambda: ()))
    assert "nv_x" not in families
    assert "python_info" in families
    assert sources(families) == {"tritonserver": 0, "callables": 1, "user": 1}
    assert "The metrics of source 'tritonserver' cannot be had" in caplog.text


@pytest.mark.parametrize("begins", [False, True])
def test_a_tritonserver_that_does_not_answer_is_not_waited_for(begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_metrics, "TRITON_TIMEOUT_S", 0.2)
    done = threading.Event()

    def dawdle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            if begins:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while begins and not done.wait(0.05):
                connection.sendall(b"# x\n")
            done.wait(300)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=dawdle, args=(listener,))
        server.start()
        try:
            families = parsed(render_metrics(endpoint(listener.getsockname()[1]), lambda: ()))
        finally:
            done.set()
            server.join()
    assert sources(families) == {"tritonserver": 0, "callables": 1, "user": 1}


def test_an_error_status_of_tritonserver_is_no_text() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def render() -> bytes:
        raise ValueError("not now")

    page = MetricsPage(listener, render)
    page.start()
    try:
        families = parsed(render_metrics(endpoint(listener.getsockname()[1]), lambda: ()))
    finally:
        page.close()
    assert sources(families)["tritonserver"] == 0


class Custom(Collector):
    def __init__(self, value: float | None) -> None:
        self.value = value

    def collect(self) -> Iterator[Metric]:
        if self.value is None:
            raise ValueError("no value")
        yield GaugeMetricFamily("pytriton_test_value", "A value", value=self.value)

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("pytriton_test_value", "A value")


@pytest.mark.parametrize("value", [7.0, None])
def test_a_collector_of_the_user(value: float | None, caplog: pytest.LogCaptureFixture) -> None:
    collector = Custom(value)
    REGISTRY.register(collector)
    try:
        with triton() as here:
            families = parsed(render_metrics(here, lambda: ()))
    finally:
        REGISTRY.unregister(collector)
    assert families["nv_x"].samples[0].value == 3
    if value is None:
        assert sources(families) == {"tritonserver": 1, "callables": 1, "user": 0}
        assert "ValueError: no value" in caplog.text
    else:
        assert families["pytriton_test_value"].samples[0].value == value
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_start_does_not_import_prometheus() -> None:
    code = "import sys, pytriton.triton; sys.exit('prometheus_client' in sys.modules or 'opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- where the page and tritonserver's part of it are served ---------------------------------------------------------


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    config = TritonConfig(http_port=0, grpc_port=0, metrics_port=0, http_address="localhost", grpc_address="localhost")
    ports = reserve_ports(config)
    yield ports
    ports.release()


def test_the_page_listens_from_the_beginning(ports: ReservedPorts) -> None:
    assert ports.metrics is not None
    page = ("127.0.0.1", ports.metrics.port)
    listener = ports.take_metrics_listener()
    assert listener is not None
    with listener:
        ports.release()
        socket.create_connection(page, timeout=300).close()
    assert ports.take_metrics_listener() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(page, timeout=300)


def test_what_nobody_takes_is_released(ports: ReservedPorts) -> None:
    assert ports.metrics is not None
    ports.release()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports.metrics.port), timeout=300)


def test_tritonserver_gets_a_port_of_this_machine_only(ports: ReservedPorts, tmp_path: Path) -> None:
    assert ports.metrics is not None
    assert ports.triton_metrics is not None
    of_triton = [endpoint.port for endpoint in ports]
    assert ports.triton_metrics.port in of_triton
    assert ports.metrics.port not in of_triton
    folders = ServerFolders(executable=tmp_path, models=tmp_path, backends=tmp_path, caches=None)
    everywhere = TritonConfig(metrics_address="0.0.0.0")
    command = build_command(everywhere, TritonSecurityConfig(), folders, ports)
    assert f"--metrics-port={ports.triton_metrics.port}" in command
    assert "--metrics-address=127.0.0.1" in command


@dataclasses.dataclass
class Model:
    """A model with one callable, whose counts are given."""

    name: str
    version: int = 1
    decoupled: bool = False
    counters: Counters = dataclasses.field(default_factory=Counters)
    attached: bool = True
    has_cost: bool = False

    def read_totals(self) -> list[CallableTotals]:
        statistics = self.counters.snapshot()
        return [CallableTotals(place=0, attached=self.attached, statistics=statistics, pid=None, ends=0)]

    def read_sleep(self) -> SleepFacts | None:
        return None


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[str, str]]]:
    """What happens between one page and the next: to which of three models, and what."""
    happens = st.tuples(
        st.sampled_from("abc"), st.sampled_from(["served", "failed", "attached", "bound", "unbound", "answered"])
    )
    return draw(st.lists(st.lists(happens, max_size=4), min_size=1, max_size=5))


def ours(page: bytes) -> list[bytes]:
    """Without what Python says of itself, which differs each time."""
    return [line for line in page.splitlines() if b"pytriton_" in line]


@given(histories())
@settings(deadline=None, max_examples=40)
def test_a_page_that_keeps_texts_says_what_one_without_says(history: list[list[tuple[str, str]]]) -> None:
    nowhere = endpoint(1)
    models: dict[str, Model] = {}
    outcomes: collections.Counter[tuple[str, str, str]] = collections.Counter()
    kept = ModelTexts()
    for steps in [[], *history]:
        for name, what in steps:
            model = models.setdefault(name, Model(name, decoupled=name == "c"))
            if what == "served":
                model.counters.add_call((3, 2, 64), 10, 20, 1000)
            elif what == "failed":
                model.counters.add_failed("callable")
            elif what == "attached":
                model.attached = not model.attached
            elif what == "bound":
                models[name] = Model(name)
            elif what == "unbound":
                del models[name]
            else:
                outcomes[name, "http", "ok"] += 1
        arguments: dict[str, Any] = {"models": models.values, "outcomes": dict(outcomes)}
        page = render_metrics(nowhere, **arguments, texts=kept)
        assert ours(page) == ours(render_metrics(nowhere, **arguments))
        families = parsed(page)
        for name, model in models.items():
            requests = [each for each in families["pytriton_requests"].samples if each.labels["model"] == name]
            assert [each.value for each in requests] == [model.counters.snapshot().requests]


def test_a_model_that_was_never_called_takes_few_lines() -> None:
    page = render_metrics(endpoint(1), lambda: [Model("idle")], outcomes={})
    assert sum(b'model="idle"' in line for line in page.splitlines()) <= 45
