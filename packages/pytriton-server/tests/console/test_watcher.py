"""What looks at a server, without one."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pytriton.console import watcher as watchers
from pytriton.console.watcher import LogFile, MetricsSource, Watcher
from pytriton.server.control.http import ControlError, HttpControl
from pytriton.server.tritonserver.ports import Endpoint

PATIENCE_S = 600.0

CONFIG = {
    "name": "a",
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1"]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": ["-1"]}],
}


class Server(http.server.BaseHTTPRequestHandler):
    """Answers as a tritonserver and its metrics do."""

    answers: ClassVar[dict[str, Any]]
    asked: ClassVar[list[str]]

    def do_GET(self) -> None:
        import json

        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.append(self.path)
        status, body = self.answers.get(self.path, (404, {"error": "nothing there"}))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def serving(**answers: Any) -> Iterator[tuple[Watcher, type[Server]]]:
    """Serve answers, and yield what looks at them."""
    handler = type("Handler", (Server,), {"answers": dict(DEFAULT), "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        port = server.server_address[1]
        endpoint = Endpoint(setting="url", address="127.0.0.1", port=port, picked=False)
        yield (
            Watcher(
                HttpControl(endpoint, {}), MetricsSource(f"http://127.0.0.1:{port}/metrics"), interval_s=PATIENCE_S
            ),
            handler,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def page(succeeded: int, **workers: tuple[int, int]) -> bytes:
    lines = ["# TYPE nv_inference_request_success counter"]
    lines += [f'nv_inference_request_success{{model="a",version="1"}} {succeeded}']
    lines += ["# TYPE pytriton_worker_attached gauge"]
    lines += [
        f'pytriton_worker_attached{{model="a",version="1",worker="{name[1:]}"}} {attached}'
        for name, (attached, _) in workers.items()
    ]
    lines += ["# TYPE pytriton_worker_ends_total counter"]
    lines += [
        f'pytriton_worker_ends_total{{model="a",version="1",worker="{name[1:]}"}} {ends}'
        for name, (_, ends) in workers.items()
    ]
    return "\n".join([*lines, ""]).encode()


DEFAULT: dict[str, Any] = {
    "/v2/health/live": (200, b""),
    "/v2/health/ready": (200, b""),
    "/v2": (200, {"version": "2.51.0"}),
    "/v2/repository/index": (200, [{"name": "a", "version": "1", "state": "READY"}]),
    "/v2/models/stats": (200, {"model_stats": [{"name": "a", "version": "1"}]}),
    "/v2/models/a/config": (200, CONFIG),
    "/metrics": (200, page(5, w0=(1, 0))),
}


def test_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "_SPEC_AGE_S", PATIENCE_S)
    with serving() as (watcher, handler):
        view = watcher.poll()
        assert (view.state, view.version, view.notes, view.problem) == ("READY", "2.51.0", (), "")
        (model,) = view.models
        assert (model.name, model.state) == ("a", "READY")
        assert model.spec is not None
        assert view.loadable == {"a"}
        assert [worker.attached for worker in view.workers] == [True]
        watcher.poll()
        # Signatures are asked for once, and again after something has happened.
        assert handler.asked.count("/v2/models/a/config") == 1
        watcher.forget("a")
        watcher.poll()
        assert handler.asked.count("/v2/models/a/config") == 2


def test_points_are_what_happened_between_two_looks() -> None:
    with serving() as (watcher, handler):
        watcher.poll()
        assert watcher.points() == []
        handler.answers["/metrics"] = (200, page(25, w0=(1, 0)))
        watcher.poll()
        ((_, everything),), ((_, of_model),) = watcher.points(), watcher.points("a")
        assert everything is not None
        assert everything == of_model
        assert everything.requests_s > 0
        assert watcher.busiest(3) == ["a"]
        # The server begins anew.
        handler.answers["/metrics"] = (200, page(0, w0=(1, 0)))
        watcher.poll()
        assert watcher.points()[-1][1] is None


def test_a_worker_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "_LATELY_S", PATIENCE_S)
    with serving() as (watcher, handler):
        assert not watcher.poll().workers[0].ended_lately
        handler.answers["/metrics"] = (200, page(5, w0=(1, 1)))
        assert watcher.poll().workers[0].ended_lately
        handler.answers["/metrics"] = (200, page(5, w0=(0, 2)))
        (worker,) = watcher.poll().workers
        assert (worker.attached, worker.ends) == (False, 2)


def test_a_server_that_keeps_its_list_to_itself() -> None:
    with serving() as (watcher, handler):
        denied = (403, {"error": "This API is restricted, expecting header 'triton-access-token'"})
        handler.answers |= {"/v2/repository/index": denied, "/v2/models/stats": denied}
        handler.answers |= {"/v2/models/a": (200, {"versions": ["1"]}), "/v2/models/a/versions/1/ready": (200, b"")}
        view = watcher.poll()
        assert [(model.name, model.state, model.spec is None) for model in view.models] == [("a", "READY", False)]
        assert "PYTRITON_ACCESS_TOKEN" in view.notes[0]


def test_without_metrics_there_are_statistics() -> None:
    with serving() as (watcher, handler):
        handler.answers["/metrics"] = (503, b"")
        view = watcher.poll()
        assert "charts show what Triton's statistics have" in view.notes[0]
        assert not view.has_metrics
        watcher.poll()
        assert len(watcher.points("a")) == 1


def test_a_server_that_is_gone_leaves_what_was_seen() -> None:
    with serving() as (watcher, _):
        watcher.poll()
    view = watcher.poll()
    assert (view.state, view.problem) == ("NO ANSWER", "The server does not answer.")
    assert [model.name for model in view.models] == ["a"]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v2/repository/index", (200, {"not": "a list"})),
        ("/v2/repository/index", (200, b"[" * 100_000)),
        ("/v2/repository/index", (200, b"<html>")),
        ("/v2/repository/index", (200, [{"name": "a", "version": "one"}])),
        ("/v2/models/stats", (200, {"model_stats": [None]})),
        ("/v2/models/a/config", (200, {"name": "a", "input": 5})),
        ("/v2/models/a/config", (200, {**CONFIG, "input": [{"name": "x", "data_type": "TYPE_X", "dims": [1]}]})),
        ("/metrics", (200, b"\xff\xfe")),
        ("/metrics", (200, b'pytriton_requests{model="a",worker="x"} 1\n')),
        ("/metrics", (200, b'nv_inference_count{model="a"} ' + b"9" * 400 + b"\n")),
    ],
)
def test_a_server_that_lies_is_told(path: str, answer: Any) -> None:
    with serving() as (watcher, handler):
        handler.answers[path] = answer
        view = watcher.poll()
        assert view.serial == 1
        assert view.problem or view.notes or view.models[0].problem or answer[1].startswith(b"nv_")


def test_an_endless_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "_METRICS_BYTES", 1 << 16)
    with serving() as (watcher, handler):
        handler.answers["/metrics"] = (200, bytes(1 << 20))
        assert "the answer is longer than 65,536 bytes" in watcher.poll().notes[0]


def test_a_look_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (watcher, _):
        watcher.poll()
        go_on = threading.Event()
        looking = threading.Event()

        def hang() -> bool:
            looking.set()
            go_on.wait()
            raise ControlError("too late")

        monkeypatch.setattr(watcher.control, "is_listening", hang)
        thread = threading.Thread(target=watcher.poll)
        thread.start()
        looking.wait()
        assert watcher.check().state == "READY"
        monkeypatch.setattr(watchers, "LOOK_S", 0.0)
        view = watcher.check()
        assert (view.state, view.problem) == ("NO ANSWER", "The server has been answering for more than 0 s.")
        go_on.set()
        thread.join()
        assert watcher.check().problem == "too late"


def test_very_many_models() -> None:
    with serving() as (watcher, handler):
        states = [{"name": f"m{number}", "version": "1", "state": "UNAVAILABLE"} for number in range(1200)]
        handler.answers["/v2/repository/index"] = (200, states)
        view = watcher.poll()
        assert len(view.models) == 1000
        assert "models are there, 1,000 of them are shown" in view.notes[0]


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(20_000)))
    lines = LogFile(path).last_lines()
    assert (len(lines), lines[-1]) == (300, "line 19999 \ufffd")
    assert LogFile(tmp_path / "none").last_lines() == [f"{tmp_path / 'none'}: No such file or directory"]
