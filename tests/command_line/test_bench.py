"""The command `pytriton bench`, against a server of ours."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pytriton.cli.bench import Level, as_table, draw_chart, make_inputs, measure, table_row
from pytriton.decorators import model
from pytriton.triton import Triton
from support.processes import CTRL_C, at_terminal
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S


@model(max_batch_size=8)
def shout(text: str, times: int | None = None) -> str:
    return text.upper() * (times or 1)


@model
def half(text: str) -> str:
    if text == "fail":
        raise ValueError("told to fail")
    return text


@model
def letters(text: str) -> Iterator[str]:
    yield from text


@pytest.fixture(scope="module")
def server() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config())
        for each in (shout, half, letters):
            triton.bind(each)
        with running(triton):
            yield triton


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytriton", "bench", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(("name", "more"), [("shout", ("--batch-size=4",)), ("shout", ("text=you",)), ("letters", ())])
def test_every_level_is_measured(server: Triton, protocol: str, name: str, more: tuple[str, ...]) -> None:
    url = server.http_url if protocol == "http" else server.grpc_url
    done = run(str(url), name, *more, "--concurrency=1,3", "--duration=0.2", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["model"] == name
    assert [level["callers"] for level in told["levels"]] == [1, 3]
    for level in told["levels"]:
        assert level["errors"] == {}
        assert level["requests"] > 0
        assert level["requests_per_s"] == pytest.approx(level["requests"] / level["seconds"], rel=0.01)
        times = level["latency_ms"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"]


def test_errors_are_counted_by_kind(server: Triton) -> None:
    done = run(str(server.http_url), "half", "text=fail", "--concurrency=2", "--duration=0.2")
    assert done.returncode == 1
    assert "Errors:" in done.stdout
    assert "InferenceServer 500: model 'half': the inference callable raised ValueError: told to fail" in done.stdout


def test_an_interrupt_shows_what_was_measured(server: Triton, tmp_path: Path) -> None:
    with at_terminal(command(str(server.http_url), "shout", "--concurrency=1,2", "--duration=0.2"), tmp_path) as whole:
        assert whole.wait_ended() == 0
        assert "o p50   x p99" in whole.shown
    arguments = (str(server.http_url), "shout", "--concurrency=1,2,3", "--duration=600")
    with at_terminal(command(*arguments), tmp_path) as terminal:
        terminal.wait_for("REQUESTS/S")
        terminal.press(CTRL_C)
        assert terminal.wait_ended() == 130
        assert "interrupted" in terminal.shown
        assert "Traceback" not in terminal.shown


def test_an_interrupt_while_callers_are_started_is_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start, interrupts = threading.Thread.start, iter([None, KeyboardInterrupt()])

    def interrupted(thread: threading.Thread) -> None:
        if interrupt := next(interrupts):
            raise interrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    level = Level(3)
    with pytest.raises(KeyboardInterrupt):
        measure(lambda: contextlib.nullcontext(lambda: None), 3, 600, level)
    assert level.rate == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("nope",), "has no model 'nope'"),
        (("half", "--batch-size=2"), "Model half takes one sample at a time: leave --batch-size out."),
        (("half", "txt=x"), "has no input 'txt'"),
        (("half", "--concurrency=0"), "--concurrency must be numbers of at least 1 with commas, got '0'"),
    ],
)
def test_what_cannot_be_measured(server: Triton, arguments: tuple[str, ...], problem: str) -> None:
    done = run(str(server.http_url), *arguments)
    assert done.returncode in (1, 2)
    assert problem in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""


def test_inputs_follow_from_the_signature(server: Triton) -> None:
    from pytriton.client import ModelClient

    with ModelClient(str(server.http_url), "shout") as client:
        inputs = make_inputs(client.model_config, 3)
    assert list(inputs) == ["text"]
    assert inputs["text"].shape == (3, 1)
    assert inputs["text"].dtype == np.object_


def test_a_chart_has_its_points_where_they_belong() -> None:
    slow = Level(callers=1, seconds=1.0, latencies_ms=[10.0] * 100)
    fast = Level(callers=8, seconds=1.0, latencies_ms=[20.0] * 400)
    lines = list(draw_chart([slow, fast]))
    top = lines[0]
    # The fast one is the last to the right, and at the top; its median covers the other mark.
    assert top.startswith("20.00 |")
    assert top.endswith("o")
    middle = lines[6]
    assert middle.index("o") - middle.index("|") - 1 == 15
    assert lines[-2].endswith("400 requests/s")


def test_a_level_without_an_answer() -> None:
    level = Level(callers=1, seconds=1.0)
    level.errors["Timeout: it took too long"] += 3
    assert table_row(level).split() == ["1", "0.0", "-", "-", "-", "3"]
    assert list(as_table([level])) == ["\nErrors:", "       3  Timeout: it took too long"]
