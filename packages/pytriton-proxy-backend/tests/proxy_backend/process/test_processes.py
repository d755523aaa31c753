"""What a worker process is told and says, and how both sides find what they name."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytriton.proxy_backend import ProtocolError, TargetError
from pytriton.proxy_backend.process.messages import (
    FORMAT,
    JobRefusedError,
    LineReader,
    PythonModelJob,
    PythonModelServing,
    WorkerJob,
    encode_message,
    find_not_json,
)
from pytriton.proxy_backend.runtime.statistics import COUNTERS_BYTES
from pytriton.proxy_backend.worker.loading import load_target, target_of


class Outer:
    class Inner:
        pass

    def method(self) -> None:
        pass


def test_targets_lead_to_objects_and_back() -> None:
    assert load_target("json:dumps") is json.dumps
    assert load_target("pathlib:Path.home") == Path.home
    assert target_of(json.dumps) == "json:dumps"
    assert load_target(target_of(json.JSONDecoder)) is json.JSONDecoder


def test_a_file_is_a_module(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("name = __name__\ndef make(): return 3\n")
    assert load_target(f"{file}:make")() == 3
    assert load_target(f"{file}:name") != "__main__"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("json", "expected module:name"),
        (":dumps", "expected module:name"),
        ("json:", "expected module:name"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("json.nothing:f", "there is no module 'json.nothing'"),
        ("json:nothing", "has no 'nothing'"),
        ("/nowhere/model.py:f", "there is no file"),
        ("..json:dumps", "is not the name of a module"),
    ],
)
def test_targets_that_name_nothing(target: str, said: str) -> None:
    with pytest.raises(TargetError, match=said) as caught:
        load_target(target)
    assert caught.value.target == target


def test_what_a_module_raises_comes_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load_target(f"{file}:f")


def test_a_package_of_ours_that_the_interpreter_lacks_is_told_with_what_to_do(tmp_path: Path) -> None:
    """As the server, which a script imports whose factory runs in another environment."""
    file = tmp_path / "server.py"
    file.write_text("from pytriton.not_there import Triton\ndef make(): pass\n")
    with pytest.raises(TargetError, match=r"imports pytriton\.not_there, which this interpreter .* has not") as caught:
        load_target(f"{file}:make")
    assert "__main__" in str(caught.value)


@pytest.mark.parametrize("function", [lambda: None, Outer().method, partial(json.dumps), json.JSONDecoder().decode])
def test_functions_that_another_process_cannot_find(function: Any) -> None:
    with pytest.raises(TargetError):
        target_of(function)


def test_a_job_is_what_it_was() -> None:
    job = WorkerJob(target="m:f", model="{}", endpoint="/e", name="n", args=[1, "a"], kwargs={"b": [None]})
    assert WorkerJob.from_text(job.to_text()).kwargs == {"b": [None]}
    text = json.dumps({**json.loads(job.to_text()), "format": 99})
    with pytest.raises(JobRefusedError, match="expected a job of format 4, received 99"):
        WorkerJob.from_text(text)


def test_an_older_worker_is_asked_only_for_what_it_has_to_know() -> None:
    job = WorkerJob(target="m:f", model="{}", endpoint="/e", name="n", log_level=10)
    asked = json.loads(job.to_text())
    # What has its default is what a version without the field does.
    assert asked == {"format": 4, "target": "m:f", "model": "{}", "endpoint": "/e", "name": "n", "log_level": 10}
    assert WorkerJob.from_text(job.to_text()) == job


def test_another_layout_of_the_counters_takes_another_format() -> None:
    # A worker with the older layout would count for itself alone, and all its metrics would stay 0 without a word.
    assert (FORMAT, COUNTERS_BYTES // 8) == (4, 666)


@given(st.sets(st.text("abcdef", min_size=1), max_size=3))
def test_what_a_newer_parent_asks_for_besides_is_refused_by_name(more: set[str]) -> None:
    job = WorkerJob(target="m:f", model="{}", endpoint="/e", name="n")
    text = json.dumps({**json.loads(job.to_text()), **dict.fromkeys(more, 1)})
    if not more:
        assert WorkerJob.from_text(text) == job
        return
    with pytest.raises(JobRefusedError) as caught:
        WorkerJob.from_text(text)
    assert f"asks for {', '.join(sorted(more))}, which" in str(caught.value)


@pytest.mark.parametrize("serve", [None, PythonModelServing(args={"model_version": "1"}, endpoint="/e", name="n")])
def test_a_job_of_a_python_model_is_what_it_was(serve: PythonModelServing | None) -> None:
    job = PythonModelJob(
        model_name="m",
        model_version=1,
        model_file="/r/m/1/model.py",
        model_dir="/r/m",
        model_config="{}",
        auto_complete=serve is None,
        serve=serve,
    )
    fields = json.loads(job.to_text())["python_model"]
    assert PythonModelJob.from_fields(fields) == job
    with pytest.raises(JobRefusedError, match="the job asks for more, which"):
        PythonModelJob.from_fields({**fields, "more": 1})
    with pytest.raises(ProtocolError, match="the job of a Python model cannot be read"):
        PythonModelJob.from_fields({"model_name": "m"})
    assert job.endpoint == ("" if serve is None else "/e")


def test_lines_come_in_pieces() -> None:
    reader = LineReader()
    data = encode_message("ready") + encode_message("attached", value=True)
    got = [message for index in range(len(data)) for message in reader.feed(data[index : index + 1])]
    assert got == [{"kind": "ready"}, {"kind": "attached", "value": True}]
    for bad in (b"text\n", b"[1]\n", b'{"value": 1}\n', b"x" * (1 << 20) + b"y"):
        with pytest.raises(ProtocolError):
            LineReader().feed(bad)


def test_what_is_no_json_is_found() -> None:
    assert find_not_json([1, 1.5, "a", None, True, {"b": (1, 2)}], "x") is None
    assert find_not_json({"a": [0, {1}]}, "x") == "x['a'][1] is {1}, which is a builtins.set"
    assert find_not_json({2: 1}, "x") == "x has the key 2, which is a int"
    assert find_not_json(float("inf"), "x") == "x is inf"


ANOTHER_USER = """
import os, sys
from pathlib import Path
from pytriton.proxy_backend import ModelSpec, ProxyBackendError, Worker
from pytriton.proxy_backend.worker.attach import Attachment, find_endpoint

folder = Path(sys.argv[1])
folder.chmod(0)
if os.geteuid() == 0:
    os.setuid(65534)
spec = ModelSpec(name="m", version=1, inputs=(), outputs=(), batching=False, max_batch_size=0)
worker = Worker(print, spec, folder / "m.1.sock")
worker.start()
for use in (lambda: worker.wait_attached(30), lambda: find_endpoint(Attachment(target="m:f", endpoint=str(folder)))):
    try:
        use()
    except ProxyBackendError as error:
        print(error)
"""


def test_another_user_is_told_so(tmp_path: Path) -> None:
    folder = tmp_path / "endpoints"
    folder.mkdir()
    try:
        done = subprocess.run(
            [sys.executable, "-c", ANOTHER_USER, str(folder)], capture_output=True, text=True, timeout=120, check=False
        )
    finally:
        folder.chmod(0o700)
    told = done.stdout.splitlines()
    assert len(told) == 2, done.stderr
    assert "may not use the endpoint" in told[0]
    assert "cannot be listed" in told[1] or "cannot be read" in told[1]
    assert all("run the worker as that user" in text.lower() for text in told)
