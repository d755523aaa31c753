"""`pytriton serve --config` and `--check`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytriton.cli.config_file import read_config
from support.paths import ROOT
from support.serving import serve_command, short_home
from support.waiting import PATIENCE_S

APP = """
from pytriton.decorators import model


@model(max_batch_size=4)
def softmax(text: str) -> str:
    with open("calls", "a") as calls:
        calls.write(f"{text!r} ")
    return text.upper()
"""
CONFIG = """
address = "127.0.0.1"
workers = 1
log_level = "INFO"

[server]
http_port = 0
grpc_port = 0
metrics_port = 0

[models.softmax]
max_batch_size = 16

[[models.softmax.model_warmup]]
name = "empty"
batch_size = 2
count = 1
inputs.text = { dtype = "bytes", shape = [1], zero_data = true }
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with short_home():
        return subprocess.run(
            [sys.executable, "-m", "pytriton", "serve", "app.py", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


SECOND = """

@model(name="softmax")
def other(text: str) -> str:
    return text
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "serve.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(("more", "served"), [((), "1 process"), (("--workers=0",), "1 thread")])
def test_a_file_says_how_and_the_command_line_counts_more(folder: Path, more: tuple[str, ...], served: str) -> None:
    with serve_command(folder, "app.py", "--config=serve.toml", *more, ports=()) as server:
        assert (folder / "calls").read_text() == "'' '' "
    assert re.search(rf"softmax\(.*ready, max_batch_size=16, {served}$", server.written, re.MULTILINE)
    assert re.search(r"HTTP +http://127\.0\.0\.1:(?!8000$)\d+$", server.written, re.MULTILINE)


def test_a_check_starts_nothing(folder: Path) -> None:
    done = run(folder, "--check", "--config=serve.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "softmax(text: str as BYTES[1]) -> output: str as BYTES[1]; max_batch_size=16, 1 process",
        "app.py can be served.",
    ]


def test_a_check_says_when_models_sleep(folder: Path) -> None:
    done = run(folder, "--check", "--config=serve.toml", "--idle=1.5m")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].endswith("max_batch_size=16, 1 process, sleeps after 90 s")
    done = run(folder, "--check", "--workers=1", "--idle=-5m")
    assert done.returncode == 2
    assert "expected a time above 0, such as 90s, 5m or 1h; got '-5m'" in done.stderr
    (folder / "serve.toml").write_text(f"idle = '1h'\n{CONFIG}")
    assert "sleeps after 3600 s" in run(folder, "--check", "--config=serve.toml").stdout
    (folder / "serve.toml").write_text(f"sleep = 'parent'\nidle = '1h'\n{CONFIG}")
    assert "sleeps after 3600 s, wakes from a parent" in run(folder, "--check", "--config=serve.toml").stdout
    done = run(folder, "--check", "--config=serve.toml", "--sleep=process")
    assert done.stdout.splitlines()[0].endswith("sleeps after 3600 s")
    done = run(folder, "--check", "--workers=1", "--idle=5m", "--sleep=deep")
    assert done.returncode == 2
    assert "--sleep: expected process or parent; got 'deep'" in done.stderr
    assert "1 process, wakes from a parent" in run(folder, "--check", "--workers=1", "--sleep=parent").stdout
    done = run(folder, "--check", "--sleep=parent")
    assert done.returncode == 1
    assert "softmax cannot have sleep, because a thread of the server's process serves it" in done.stderr


def test_a_check_says_how_many_processes_there_are(folder: Path) -> None:
    done = run(folder, "--check", "--workers=4", "--min-workers=2", "--sleep=parent")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].endswith("2 to 4 processes, wakes from a parent")
    (folder / "serve.toml").write_text("workers = 3\nmin_workers = 3\n[models.softmax]\nmin_workers = 1\n")
    assert "1 to 3 processes" in run(folder, "--check", "--config=serve.toml").stdout
    done = run(folder, "--check", "--workers=1", "--min-workers=2")
    assert done.returncode == 1
    assert "softmax has --workers 1, fewer than the 2 of --min-workers, which run at least" in done.stderr


def test_a_check_of_a_memory_budget(folder: Path) -> None:
    done = run(folder, "--check", "--workers=1", "--memory-budget=1GiB", "--min-awake=1")
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "serve.toml").write_text(
        "memory_budget = '1.5GB'\nidle = '5m'\n[models.softmax]\nworkers = 1\npinned = true\n"
    )
    done = run(folder, "--check", "--config=serve.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].endswith("1 process, pinned")
    # What is typed counts more.
    done = run(folder, "--check", "--config=serve.toml", "--memory-budget=much")
    assert done.returncode == 1
    assert "memory_budget must be a number of bytes, or text such as 2GiB" in done.stderr
    done = run(folder, "--check", "--memory-budget=1GiB")
    assert done.returncode == 1
    assert "memory_budget is for models in processes of their own, and none of those" in done.stderr


@pytest.mark.parametrize(
    ("app", "config", "problem"),
    [
        (APP + "\nraise OSError('no weights')\n", "", "OSError: no weights"),
        ("number = 1\n", "", "defines no model"),
        (APP, "[server]\ngrpc_use_ssl = true\n", "grpc_use_ssl needs TritonConfig.grpc_server_cert"),
        (APP, "[models.softmin]\nworkers = 1\n", "models.softmin: expected one of the models softmax; got 'softmin'"),
        (APP + SECOND, "", "softmax and other are both named 'softmax'"),
        (APP, "[server]\nhttp_port = 8001\n", "http_port and TritonConfig.grpc_port are both 8001"),
        (APP, "address = 'not an address'\n", "The address 'not an address' of TritonConfig.http_address is none"),
        (APP, "workers = -1\n", "serve.toml: workers: expected an integer of at least 0; got -1"),
        (APP, "workers = 1\nidle = 'soon'\n", "idle: expected a time above 0, such as 90s, 5m or 1h; got 'soon'"),
        (APP, "[models.softmax]\nworkers = 1\nidle = 300\n", "models.softmax.idle: expected a time above 0"),
        (APP, "workers = 1\nidle = '5m'\nsleep = 'deep'\n", "sleep: expected process or parent; got 'deep'"),
        (APP, "[models.softmax]\nworkers = 1\nsleep = 1\n", "models.softmax.sleep: expected process or parent; got 1"),
        (APP, "[models.softmax]\nsleep = 'parent'\n", "softmax cannot have sleep, because a thread of the server's"),
        (
            APP,
            "[models.softmax]\nstarts_asleep = 'x'\n",
            "models.softmax.starts_asleep: expected true or false; got 'x'",
        ),
        (
            APP,
            "[models.softmax]\nworkers = 1\npinned = true\nstarts_asleep = true\n",
            "models.softmax.pinned: expected false for a model with starts_asleep: what is pinned never sleeps",
        ),
        (APP, "workers = 0\nidle = '5m'\n", "softmax cannot sleep when it is idle, because a thread of the server's"),
        (
            APP,
            "min_workers = 1\n",
            "softmax cannot have min_workers, because a thread of the server's process",
        ),
        (APP, "min_workers = 0\n", "serve.toml: min_workers: expected an integer from 1 to 1024; got 0"),
        (APP, "[models.softmax]\nmin_workers = 0\n", "models.softmax.min_workers: expected an integer of at least 1"),
        (APP, "min_awake = -1\n", "serve.toml: min_awake: expected an integer of at least 0; got -1"),
        (APP, "memory_budget = 7\n", "serve.toml: memory_budget: expected text; got 7"),
        (APP, "workers = 1\nmemory_budget = '8MiB'\n", "of at least 16 MiB, which a worker process takes by itself"),
        (APP, "[models.softmax]\ngolden = 2\n", "models.softmax.golden: expected true, false, or a number of at least"),
        (APP, "[models.softmax]\ngolden = true\n", "softmax cannot have golden, because a thread of the server's"),
        (APP, "[models.softmax]\nworkers = 1\ngolden = true\n", "ProcessWorker.golden compares the answers to its"),
        (APP, "[models.softmax]\npinned = 1\n", "models.softmax.pinned: expected true or false; got 1"),
        (
            APP,
            "[models.softmax]\npinned = true\n",
            "softmax cannot have pinned, because a thread of the server's process",
        ),
        (
            APP,
            "[models.softmax]\nworkers = 1\npinned = true\nidle = '5m'\n",
            "models.softmax.pinned: expected false for a model with idle: what is pinned never sleeps",
        ),
        (APP, "openai = 8002\n", "the port 8002 is to be that of the OpenAI endpoints and one of the server as well"),
        (APP, "unprotected = true\naccess_token = 'x'\n", "--unprotected and --access-token exclude each other"),
    ],
)
def test_a_check_says_what_is_wrong(folder: Path, app: str, config: str, problem: str) -> None:
    (folder / "app.py").write_text(app)
    (folder / "serve.toml").write_text(config)
    done = run(folder, "--check", "--config=serve.toml")
    assert done.returncode in (1, 2)
    assert problem in done.stderr
    assert "can be served" not in done.stdout


def test_the_file_of_the_page_is_one(tmp_path: Path) -> None:
    found = re.search(r"```toml.*?\n(.*?)```", (ROOT / "docs" / "hints.md").read_text(), re.DOTALL)
    assert found
    path = tmp_path / "serve.toml"
    path.write_text(found[1])
    file = read_config(path, {"workers": int, "log_format": str})
    assert file.workers("softmax", 2) == 4
    assert file.server["http_port"] == 9000
