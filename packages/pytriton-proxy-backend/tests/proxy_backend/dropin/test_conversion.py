"""`convert`: what it writes, what it leaves alone, and what it refuses."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytriton.proxy_backend import library_path
from pytriton.proxy_backend.cli.app import run as run_command
from pytriton.proxy_backend.dropin import repository
from support.waiting import PATIENCE_S, eventually

CONFIG = 'backend: "python"\ninput { name: "x" data_type: TYPE_FP32 dims: -1 }\n'
ENDPOINT = Path("/no/such/folder")


class Outcome:
    """What a command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process."""

    def call(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            run_command([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def convert(command: Command) -> Command:
    """Runs `convert`."""
    return lambda *arguments: command("convert", *arguments, "--endpoint", ENDPOINT)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model, in a repository of its own."""
    folder = tmp_path / "models" / "double"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("class TritonPythonModel: ...\n")
    (folder / "config.pbtxt").write_text(CONFIG)
    return folder


def state(folder: Path) -> dict[str, object]:
    """Return everything below a folder: contents, modes and times of files, and where links lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes() if path.is_file() else None, path.stat().st_mode, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def test_a_copy_is_written_and_nothing_else(convert: Command, model: Path) -> None:
    (model / "1" / "weights").mkdir()
    (model / "1" / "weights" / "w.bin").write_bytes(b"w" * (3 << 20))
    (model / "1" / "run").write_text("#!/bin/sh\n")
    (model / "1" / "run").chmod(0o755)
    (model / "empty").mkdir()
    before = state(model)
    done = convert(model)
    target = model.parent / "double_workers"
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"converted: {target}",
        f"its processes come from: pytriton-proxy-backend hosts --endpoint {ENDPOINT}",
    ]
    after = state(target)
    own = ("libtriton_python.so", "pytriton-hosts.conf", "pytriton-manifest.json")
    library, hosts, _ = [after.pop(name) for name in own]
    assert isinstance(library, tuple)
    assert library[0] == library_path().read_bytes()
    assert isinstance(hosts, tuple)
    assert b"endpoint = /no/such/folder/hosts.sock\nattach_timeout_ms = 10000\n" in hosts[0]
    assert after["1/weights/w.bin"] == before["1/weights/w.bin"]
    assert after["1/run"] == before["1/run"]
    assert after.keys() == before.keys()
    assert (target / "config.pbtxt").read_text() == CONFIG
    assert state(model) == before
    assert sorted(os.listdir(model.parent)) == ["double", "double_workers"]


@pytest.mark.parametrize(
    ("config", "renamed"),
    [
        (f'name: "double"\n{CONFIG}', f'name: "new"\n{CONFIG}'),
        (f"{CONFIG}name :  'dou' # here\n 'ble'", f'{CONFIG}name :  "new"'),
        (f'# name: "a"\n{CONFIG}', f'# name: "a"\n{CONFIG}'),
        (
            f'{CONFIG}name: "double" version_policy {{ all {{ }} }}',
            f'{CONFIG}name: "new" version_policy {{ all {{ }} }}',
        ),
        (
            f'{CONFIG}parameters {{ key: "}}" value: {{ string_value: "name: \\"x\\"" }} }}\nname:"double"',
            f'{CONFIG}parameters {{ key: "}}" value: {{ string_value: "name: \\"x\\"" }} }}\nname:"new"',
        ),
    ],
)
def test_the_copy_has_the_name_of_its_folder(convert: Command, model: Path, config: str, renamed: str) -> None:
    (model / "config.pbtxt").write_text(config)
    (model / "configs").mkdir()
    (model / "configs" / "other.pbtxt").write_text(config)
    target = model.parent.parent / "elsewhere" / "new"
    target.parent.mkdir()
    assert convert(model, "--to", target).code == 0
    assert (target / "config.pbtxt").read_text() == renamed
    assert (target / "configs" / "other.pbtxt").read_text() == renamed
    assert (model / "config.pbtxt").read_text() == config


def test_links_mean_the_same_in_the_copy(convert: Command, model: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "w.bin").write_bytes(b"weights")
    (tmp_path / "shared" / "also").symlink_to("w.bin")
    (model / "1" / "inside").symlink_to("../1/model.py")
    (model / "1" / "absolute").symlink_to(tmp_path / "shared" / "w.bin")
    (model / "1" / "outside").symlink_to("../../../shared/w.bin")
    (model / "shared").symlink_to("../../shared")
    (model / "config.pbtxt").rename(tmp_path / "config.pbtxt")
    (model / "config.pbtxt").symlink_to(tmp_path / "config.pbtxt")
    before = state(model), state(tmp_path / "shared")
    assert convert(model).code == 0
    copy = model.parent / "double_workers"
    assert os.readlink(copy / "1" / "inside") == "../1/model.py"
    assert os.readlink(copy / "1" / "absolute") == str(tmp_path / "shared" / "w.bin")
    assert not (copy / "1" / "outside").is_symlink()
    assert (copy / "1" / "outside").read_bytes() == b"weights"
    assert not (copy / "shared").is_symlink()
    assert os.readlink(copy / "shared" / "also") == "w.bin"
    assert not (copy / "config.pbtxt").is_symlink()
    assert (state(model), state(tmp_path / "shared")) == before
    assert convert(model).out.startswith("unchanged:")
    (copy / "1" / "inside").unlink()
    (copy / "1" / "inside").symlink_to("../config.pbtxt")
    assert "1/inside was edited" in convert(model).err


def test_it_is_listed_checked_replaced_and_removed(command: Command, convert: Command, model: Path) -> None:
    (model / "3").mkdir()
    (model / "3" / "model.py").write_text("")
    repository = ("--model-repository", model.parent)
    assert convert(model).code == 0
    (inode,) = [each.stat().st_ino for each in model.parent.glob("double_workers")]
    assert convert(model).out.startswith("unchanged:")
    assert (model.parent / "double_workers").stat().st_ino == inode
    listed = json.loads(command("list", *repository, "--json").out)
    assert [(each["name"], each["version"], each["flavour"]) for each in listed] == [
        ("double_workers", 1, "hosts"),
        ("double_workers", 3, "hosts"),
    ]
    assert {each["endpoint"] for each in listed} == {f"{ENDPOINT}/hosts.sock"}
    checked = command("check", *repository)
    assert checked.code == 0
    assert f"run pytriton-proxy-backend hosts --endpoint {ENDPOINT}" in checked.out
    assert "its library is that of this installation" in checked.out
    # The original changes.
    (model / "1" / "model.py").write_text("# new\n")
    refused = convert(model)
    assert refused.code == 1
    assert "--replace" in refused.err
    assert convert(model, "--replace").out.startswith("replaced:")
    assert (model.parent / "double_workers" / "1" / "model.py").read_text() == "# new\n"
    refused = command("remove", *repository, "--name", "double_workers", "--version", 3)
    assert refused.code == 1
    assert "convert --replace" in refused.err
    # The copy is edited.
    (model.parent / "double_workers" / "1" / "model.py").write_text("# mine\n")
    for refused in (convert(model, "--replace"), command("remove", *repository, "--name", "double_workers")):
        assert refused.code == 1
        assert "1/model.py was edited" in refused.err
    (model.parent / "double_workers" / "1" / "model.py").write_text("# new\n")
    assert command("remove", *repository, "--name", "double_workers").code == 0
    assert os.listdir(model.parent) == ["double"]


def _no_config(model: Path) -> None:
    (model / "config.pbtxt").unlink()


def _other_backend(model: Path) -> None:
    (model / "config.pbtxt").write_text('backend: "onnxruntime"')


def _no_backend(model: Path) -> None:
    (model / "config.pbtxt").write_text('input { backend: "python" }')


def _no_model(model: Path) -> None:
    (model / "1" / "model.py").unlink()


def _other_file(model: Path) -> None:
    (model / "config.pbtxt").write_text(f'{CONFIG}default_model_filename: "other.py"')


def _no_text(model: Path) -> None:
    (model / "config.pbtxt").write_bytes(b"\xff")


def _own_library(model: Path) -> None:
    (model / "1" / "libtriton_python.so").touch()


def _other_runtime(model: Path) -> None:
    (model / "config.pbtxt").write_text(f'{CONFIG}runtime: "libtriton_mine.so"')


def _ours(model: Path) -> None:
    (model / "pytriton-manifest.json").touch()


def _socket(model: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = os.getcwd()
        os.chdir(model)
        try:
            made.bind("socket")
        finally:
            os.chdir(before)


def _circle(model: Path) -> None:
    (model / "1" / "above").symlink_to("../..")


def _dangling(model: Path) -> None:
    (model / "1" / "gone").symlink_to("../../gone")


def _file(model: Path) -> None:
    for path in model.rglob("*"):
        if path.is_file():
            path.unlink()
    (model / "1").rmdir()
    model.rmdir()
    model.write_text("")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_no_config, "config.pbtxt, there is none"),
        (_other_backend, 'expected `backend: "python"` in'),
        (_no_backend, "got no backend"),
        (_no_model, "1/model.py: there is none"),
        (_other_file, "a version with other.py in it"),
        (_no_text, "is no text in UTF-8"),
        (_own_library, "1/libtriton_python.so), which would be taken instead of ours"),
        (_other_runtime, '(runtime: "libtriton_mine.so"), which would be taken'),
        (_ours, "was made by pytriton-proxy-backend"),
        (_socket, "is neither a file, nor a folder, nor a link"),
        (_circle, "leads to a folder that it is in"),
        (_dangling, "1/gone: No such file or directory"),
        (_file, "it is no folder"),
    ],
)
def test_what_cannot_be_converted(convert: Command, model: Path, harm: Callable[[Path], None], said: str) -> None:
    harm(model)
    before = state(model.parent)
    done = convert(model)
    assert (done.code, done.out) == (1, "")
    assert said in done.err
    assert state(model.parent) == before


def test_places_that_cannot_be_taken(convert: Command, command: Command, model: Path, tmp_path: Path) -> None:
    (model.parent / "double_workers").mkdir()
    before = state(tmp_path)
    for arguments, said in (
        ((model,), "was not made by pytriton-proxy-backend"),
        ((model, "--replace"), "was not made by pytriton-proxy-backend"),
        ((model, "--to", model), "would lie in the folder of the model"),
        ((model, "--to", model / "1" / "new"), "would lie in the folder of the model"),
        ((model, "--to", tmp_path / "nowhere" / "new"), "expected a model repository at"),
        ((model, "--to", tmp_path / "not a name"), "expected a model name of letters"),
        ((model.parent / "nothing",), "there is none"),
    ):
        done = convert(*arguments)
        assert done.code == 1
        assert said in done.err
    done = command("convert", model, "--to", tmp_path / "new", "--endpoint", "/" + "x" * 100)
    assert done.code == 1
    assert "expected a folder whose path has 89 bytes at most" in done.err
    assert command("convert", model, "--attach-timeout", "-1").code == 2
    assert state(tmp_path) == before


def test_what_cannot_be_read_is_named(convert: Command, model: Path) -> None:
    # The same for every user, where permissions do not hold for root: a path that is too long.
    deep = model / "1" / ("x" * 200)
    deep.mkdir()
    (deep / ("y" * 250)).symlink_to("../" * 300 + "gone")
    done = convert(model)
    assert (done.code, done.out) == (1, "")
    assert "cannot be converted, and nothing was changed" in done.err
    assert "y" * 250 in done.err
    assert os.listdir(model.parent) == ["double"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["", "1", "1/model.py", "config.pbtxt"])
def test_files_of_others_are_named(convert: Command, model: Path, name: str) -> None:
    mode = (model / name).stat().st_mode
    (model / name).chmod(0)
    try:
        done = convert(model)
    finally:
        (model / name).chmod(mode)
    assert (done.code, done.out) == (1, "")
    assert "Permission denied" in done.err
    assert os.listdir(model.parent) == ["double"]


def signalled(model: Path, number: signal.Signals) -> int:
    """Convert a model in a process that gets a signal while it copies; return its exit code."""
    with (model / "1" / "weights.bin").open("wb") as file:
        # A hole, which takes its time nevertheless.
        file.truncate(1 << 30)
    command = [sys.executable, "-m", "pytriton.proxy_backend", "convert", str(model), "--endpoint", str(ENDPOINT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        eventually(lambda: process.poll() is not None or any(model.parent.glob(".pytriton-*")))
        process.send_signal(number)
        return process.wait(PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_half_of_a_copy(model: Path, number: signal.Signals) -> None:
    code = signalled(model, number)
    names = set(os.listdir(model.parent))
    if code != 0 and "double_workers" not in names:
        assert names == {"double"}
    else:
        # It was faster than the signal.
        assert names == {"double", "double_workers"}
        assert (model.parent / "double_workers/1/weights.bin").stat().st_size == 1 << 30


@pytest.mark.parametrize("step", ["mkdir", "rmtree"])
def test_an_interrupt_of_making_or_removing_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    where: Any = Path if step == "mkdir" else shutil
    original = getattr(where, step)
    interrupts = iter([KeyboardInterrupt()])

    def interrupted(path: Path, **options: Any) -> None:
        if step == "mkdir":
            original(path, **options)
        for interrupt in interrupts:
            raise interrupt
        original(path, **options)

    monkeypatch.setattr(where, step, interrupted)
    with pytest.raises(KeyboardInterrupt), repository.staging_in(tmp_path) as folder:
        (folder / "file").touch()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_one_has_left_is_cleared_up(convert: Command, model: Path) -> None:
    eventually(lambda: signalled(model, signal.SIGKILL) != 0 and any(model.parent.glob(".pytriton-*")))
    (model / "1" / "weights.bin").unlink()
    (model.parent / ".pytriton-notes").mkdir()
    (model.parent / ".pytriton-0123abcd").symlink_to(model)
    done = convert(model, "--replace")
    assert done.code == 0, done.err
    left = {"double", "double_workers", ".pytriton-notes", ".pytriton-0123abcd"}
    assert set(os.listdir(model.parent)) == left
    assert (model / "config.pbtxt").read_text() == CONFIG


def test_what_was_being_replaced_comes_back(convert: Command, model: Path) -> None:
    """A replacement takes two steps where the file system cannot exchange folders."""
    copy, staging = model.parent / "double_workers", model.parent / ".pytriton-0123abcd"
    assert convert(model).code == 0
    before = state(copy)
    staging.mkdir()
    copy.rename(staging / "replaced")
    assert convert(model, "--to", model.parent / "other").code == 0
    assert state(copy) == before
    # One that is there again is not touched.
    staging.mkdir()
    shutil.copytree(copy, staging / "replaced")
    (staging / "replaced" / "1" / "model.py").write_text("")
    assert convert(model, "--to", model.parent / "third").code == 0
    assert state(copy) == before
    assert set(os.listdir(model.parent)) == {"double", "double_workers", "other", "third"}


def test_a_full_disk_leaves_nothing(convert: Command, model: Path) -> None:
    (model / "1" / "weights.bin").write_bytes(b"w" * (2 << 20))
    before = state(model.parent)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        done = convert(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.code == 1
    assert "cannot be converted, and nothing was changed" in done.err
    assert state(model.parent) == before
