"""Models of ours in the model repository of a tritonserver that somebody else starts."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend import (
    DescriptionError,
    ModelSpec,
    TensorSpec,
    Worker,
    description_path,
    endpoint_path,
    guard_library_path,
    read_description,
)
from pytriton.proxy_backend.cli.app import run as run_command
from pytriton.proxy_backend.cli.tensors import load_signature, parse_tensor
from pytriton.proxy_backend.dropin import repository as dropin
from pytriton.proxy_backend.dropin.check import find_server
from pytriton.proxy_backend.dropin.manifest import read_manifest, render_manifest
from pytriton.proxy_backend.errors import DropInError
from pytriton.server.tritonserver.binary import find_tritonserver
from support.bare_server import running_worker
from support.callables import double
from support.faults.plain_server import PlainServer, plain_server, reading_container
from support.waiting import PATIENCE_S

TENSORS = ("--input", "x:float32:-1", "--output", "y:float32:-1")


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        yield Path(folder)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


class Outcome:
    """What a command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs the command line in this process."""

    def call(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            run_command([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


def add(repository: Path, sockets: Path, *more: object, name: str = "double") -> Sequence[object]:
    tensors = () if "--input" in more or "--from" in more else TENSORS
    return ("add", "--model-repository", repository, "--name", name, "--endpoint", sockets, *tensors, *more)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def set_modes(folder: Path, mode: int) -> None:
    """Gives a folder and those in it another mode."""
    folder.chmod(0o755)
    for path in [path for path in folder.rglob("*") if path.is_dir()]:
        path.chmod(mode)
    folder.chmod(mode)


# ---- what is written -----------------------------------------------------------------------------------------------


def test_a_folder_is_added_and_nothing_else(command: Any, repository: Path, sockets: Path) -> None:
    done = command(*add(repository, sockets))
    assert done.code == 0, done.err
    assert str(sockets / "double.1.sock") in done.out
    assert os.listdir(repository) == ["double"]
    assert set(tree(repository)) == {
        "double/config.pbtxt",
        "double/libtriton_pytriton.so",
        "double/pytriton-manifest.json",
        "double/1/pytriton.conf",
        "double/1/pytriton.json",
    }
    # The worker finds there what it must know.
    spec = read_description(description_path(endpoint_path(sockets, "double", 1)))
    assert spec == read_description(repository / "double" / "1" / "pytriton.json")
    assert (spec.name, spec.version, spec.max_batch_size, spec.inputs[0].shape) == ("double", 1, 4, (-1,))
    assert description_path(endpoint_path(sockets, "double", 1)).stat().st_mode & 0o777 == 0o600


def test_the_folder_of_the_endpoint_may_come_later(command: Any, repository: Path, sockets: Path) -> None:
    assert command(*add(repository, sockets / "later")).code == 0
    assert not (sockets / "later").exists()
    checked = command("check", "--model-repository", repository, "--name", "double")
    assert checked.code == 1
    assert "mount the volume" in checked.out


def test_the_same_again_changes_nothing(command: Any, repository: Path, sockets: Path) -> None:
    command(*add(repository, sockets))
    inode = (repository / "double").stat().st_ino
    again = command(*add(repository, sockets))
    assert (again.code, again.out.split(":")[0]) == (0, "unchanged")
    assert (repository / "double").stat().st_ino == inode


def test_another_content_needs_to_be_asked_for(command: Any, repository: Path, sockets: Path) -> None:
    command(*add(repository, sockets))
    before = tree(repository)
    refused = command(*add(repository, sockets, "--max-batch-size", 16))
    assert refused.code == 1
    assert "--replace" in refused.err
    assert tree(repository) == before
    assert command(*add(repository, sockets, "--max-batch-size", 16, "--replace")).code == 0
    assert b"max_batch_size: 16" in tree(repository)["double/config.pbtxt"]
    assert os.listdir(repository) == ["double"]
    assert read_description(repository / "double" / "1" / "pytriton.json").max_batch_size == 16


def _edit(folder: Path) -> None:
    with (folder / "config.pbtxt").open("a") as file:
        file.write("# mine\n")


def _add_file(folder: Path) -> None:
    (folder / "1" / "weights.bin").write_bytes(b"w")


def _remove_file(folder: Path) -> None:
    (folder / "1" / "pytriton.conf").unlink()


def _edit_manifest(folder: Path) -> None:
    manifest = folder / "pytriton-manifest.json"
    manifest.write_text(manifest.read_text().replace('"flavour": "native"', '"flavour": "python"'))


def _link(folder: Path) -> None:
    (folder / "config.pbtxt").rename(folder.parent / "aside")
    (folder / "config.pbtxt").symlink_to(folder.parent / "aside")


def _break_manifest(folder: Path) -> None:
    (folder / "pytriton-manifest.json").write_text("{")


@pytest.mark.parametrize("edit", [_edit, _add_file, _remove_file, _edit_manifest, _link, _break_manifest])
def test_a_folder_with_local_edits_is_never_touched(
    command: Any, repository: Path, sockets: Path, edit: Callable[[Path], None]
) -> None:
    command(*add(repository, sockets))
    edit(repository / "double")
    before = tree(repository)
    for attempt in (
        add(repository, sockets),
        add(repository, sockets, "--replace", "--max-batch-size", 8),
        ("remove", "--model-repository", repository, "--name", "double"),
    ):
        refused = command(*attempt)
        assert refused.code == 1
        assert "was changed since it was written" in refused.err
        assert tree(repository) == before
    assert "edited:" in command("list", "--model-repository", repository).out
    assert command("check", "--model-repository", repository).code == 1


@pytest.mark.parametrize("kind", ["model", "empty folder", "file", "dangling link"])
def test_what_is_not_ours_is_never_touched(command: Any, repository: Path, sockets: Path, kind: str) -> None:
    place = repository / "double"
    if kind == "model":
        place.mkdir()
        (place / "config.pbtxt").write_text("backend: 'python'")
    elif kind == "empty folder":
        place.mkdir()
    elif kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to(repository / "nowhere")
    before = (sorted(os.listdir(repository)), tree(repository), place.lstat().st_ino)
    for attempt in (
        add(repository, sockets),
        add(repository, sockets, "--replace"),
        ("remove", "--model-repository", repository, "--name", "double"),
    ):
        refused = command(*attempt)
        assert refused.code == 1
        assert "was not made by pytriton-proxy-backend" in refused.err
        assert (sorted(os.listdir(repository)), tree(repository), place.lstat().st_ino) == before
    assert json.loads(command("list", "--model-repository", repository, "--json").out) == []


@pytest.mark.parametrize("flavour", ["native", "python"])
def test_a_version_comes_beside_those_that_are_there(
    command: Any, repository: Path, sockets: Path, flavour: str
) -> None:
    kind = ("--flavour", flavour)
    assert command(*add(repository, sockets, *kind)).code == 0
    first = {name: data for name, data in tree(repository).items() if not name.endswith("pytriton-manifest.json")}
    second = add(repository, sockets, *kind, "--version", 12, "--attach-timeout", 3)
    done = command(*second)
    assert (done.code, done.out.split(":")[0]) == (0, "added"), done.err
    assert {name: tree(repository)[name] for name in first} == first
    assert read_description(repository / "double" / "12" / "pytriton.json").version == 12
    assert command(*second).out.startswith("unchanged")
    assert command(*add(repository, sockets, *kind)).out.startswith("unchanged")
    suffix = "sock" if flavour == "native" else "zmq"
    listed = json.loads(command("list", "--model-repository", repository, "--json").out)
    assert [entry["version"] for entry in listed] == [1, 12]
    assert [entry["endpoint"].rpartition("/")[2] for entry in listed] == [f"double.{n}.{suffix}" for n in (1, 12)]
    assert sorted(os.listdir(sockets)) == [f"double.{number}.{suffix}.json" for number in (1, 12)]
    checked = command("check", "--model-repository", repository)
    assert checked.code == 0, checked.out
    assert "version 12: the folder of the endpoint" in checked.out
    # One of them is replaced, and the other one stays.
    refused = command(*add(repository, sockets, *kind, "--version", 12))
    assert refused.code == 1
    assert "--replace" in refused.err
    assert command(*add(repository, sockets, *kind, "--version", 12, "--replace")).out.startswith("replaced")
    assert {name: tree(repository)[name] for name in first} == first
    # One of them is removed, then the other one.
    remove = ("remove", "--model-repository", repository, "--name", "double", "--version")
    assert "there are: 1, 12" in command(*remove, 2).err
    assert command(*remove, 12).code == 0
    left = {name: data for name, data in tree(repository).items() if not name.endswith("pytriton-manifest.json")}
    assert left == first
    assert os.listdir(sockets) == [f"double.1.{suffix}.json"]
    assert command("check", "--model-repository", repository).code == 0
    assert command(*remove, 1).code == 0
    assert os.listdir(repository) == []
    assert os.listdir(sockets) == []


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (("--max-batch-size", 16), "other tensors, or another configuration"),
        (("--input", "x:float64:-1", "--output", "y:float32:-1"), "other tensors, or another configuration"),
        (("--flavour", "python"), "is served by the native proxy"),
    ],
)
def test_versions_that_do_not_go_together_are_refused(
    command: Any, repository: Path, sockets: Path, difference: Sequence[object], words: str
) -> None:
    command(*add(repository, sockets))
    before = tree(repository)
    for more in ((), ("--replace",)):
        refused = command(*add(repository, sockets, "--version", 2, *difference, *more))
        assert refused.code == 1
        assert words in refused.err
        assert "remove version 1 first" in refused.err
    assert tree(repository) == before


def test_two_models_at_one_endpoint_are_told(command: Any, repository: Path, sockets: Path) -> None:
    at = ("--flavour", "python", "--endpoint", f"ipc://{sockets}/one.zmq")
    assert command(*add(repository, sockets, *at)).err == ""
    done = command(*add(repository, sockets, *at, name="triple"))
    assert done.code == 0
    assert "warning: model 'double' version 1 and model 'triple' version 1 listen at" in done.err
    checked = command("check", "--model-repository", repository)
    assert checked.out.count("warning: model 'double' version 1 and model 'triple' version 1 listen at") == 2
    assert command(*add(repository, sockets, "--flavour", "python", "--replace", name="triple")).err == ""
    assert "listen at" not in command("check", "--model-repository", repository).out


def test_what_python_caches_is_no_edit(command: Any, repository: Path, sockets: Path) -> None:
    command(*add(repository, sockets))
    cache = repository / "double" / "1" / "__pycache__"
    cache.mkdir()
    (cache / "model.cpython-311.pyc").write_bytes(b"")
    assert command("remove", "--model-repository", repository, "--name", "double").code == 0
    assert os.listdir(repository) == []


def test_remove_takes_away_what_add_has_put_there(command: Any, repository: Path, sockets: Path) -> None:
    command(*add(repository, sockets))
    command(*add(repository, sockets, name="other"))
    assert command("remove", "--model-repository", repository, "--name", "double").code == 0
    assert os.listdir(repository) == ["other"]
    assert os.listdir(sockets) == ["other.1.sock.json"]
    again = command("remove", "--model-repository", repository, "--name", "double")
    assert again.code == 1
    assert "there is no model 'double'" in again.err
    assert command("remove", "--model-repository", repository, "--name", "../models/other").code == 1
    assert os.listdir(repository) == ["other"]


def test_without_renameat2_it_works_as_well(
    command: Any, repository: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(source: Path, target: Path, flags: int) -> None:
        raise OSError(errno.EINVAL, "not on this file system")

    monkeypatch.setattr(dropin, "_renameat2", unsupported)
    assert command(*add(repository, sockets)).code == 0
    assert command(*add(repository, sockets, "--decoupled", "--replace")).code == 0
    assert b"decoupled: true" in tree(repository)["double/config.pbtxt"]
    assert os.listdir(repository) == ["double"]


@pytest.mark.parametrize("kind", ["pipe", "nested"])
def test_a_neighbour_whose_manifest_is_none_changes_nothing(
    command: Any, repository: Path, sockets: Path, kind: str
) -> None:
    """A pipe is not waited for, and JSON that nests deeply is no traceback."""
    manifest = repository / "neighbour" / "pytriton-manifest.json"
    manifest.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(manifest)
    else:
        manifest.write_text("[" * 200_000)
    assert command(*add(repository, sockets)).code == 0
    with pytest.raises(DropInError, match="cannot be read"):
        read_manifest(manifest)
    refused = command("remove", "--model-repository", repository, "--name", "neighbour")
    assert refused.code == 1
    assert "Traceback" not in refused.err
    listed = command("list", "--model-repository", repository)
    assert (listed.code, "double" in listed.out) == (0, True)


def test_many_at_once_leave_one_whole_model(repository: Path, sockets: Path) -> None:
    codes: list[object] = []

    def one(size: int) -> None:
        try:
            run_command([str(part) for part in add(repository, sockets, "--replace", "--max-batch-size", size)])
        except SystemExit as ended:
            codes.append(ended.code)

    threads = [threading.Thread(target=one, args=(size,)) for size in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 8
    [model] = dropin.find_models(repository)
    assert model.edits == ()
    assert os.listdir(repository) == ["double"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--input", "x:float32"), "NAME:DTYPE:DIMS"),
        (("--input", "x:float99:-1"), "float99"),
        (("--input", "x:complex64:1"), "complex64"),
        (("--input", "x:float32:0"), "above 0"),
        (("--input", "x:float32:1,y"), "1,y"),
        (("--input", ":float32:1"), "NAME:DTYPE:DIMS"),
        (("--input", "x:float32:1", "--max-batch-size", "-1"), "-1"),
        (("--input", "x:float32:1", "--attach-timeout", "nan"), "nan"),
        (("--input", "x:float32:1", "--execution-timeout", "0"), "from 0.001"),
        (("--input", "x:float32:1", "--version", str(1 << 63)), str(1 << 63)),
        (("--input", "x:float32:1", "--max-batch-size", "9" * 30), "from 0 to 2147483647"),
        (("--input", "x:float32:1", "--flavour", "python", "--link-timeout", "0.1"), "from 0.3"),
        (("--input", f"x:float32:{1 << 63}"), "2^63"),
        (("--input", "x:float32:1", "--flavour", "rust"), "rust"),
    ],
)
def test_arguments_that_are_not_understood_say_why(
    command: Any, repository: Path, sockets: Path, arguments: Sequence[str], words: str
) -> None:
    done = command(*add(repository, sockets, *arguments))
    assert done.code == 2
    assert words in done.err
    assert os.listdir(repository) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--input", "x:float32:1"), "outputs"),
        (("--input", "x:float32:1", "--output", "y:float32:1", "--input", "x:int8:1"), "'x' is given twice"),
        (("--input", "x:float32:1", "--output", "y:float32:1:optional"), "optional"),
        (("--input", "x:float32:1", "--output", "y:float32:1", "--preferred-batch-size", "9"), "from 1 to 4"),
        (
            ("--input", "x:int8:1", "--output", "y:int8:1", "--max-batch-size", "0", "--max-queue-delay-us", "9"),
            "a queue delay",
        ),
        (("--from", "no_such_module:x"), "no_such_module"),
        (("--from", "os:sep"), "inputs"),
        (("--from", "os"), "module:signature"),
        (("--input", "x:float32:1", "--output", "y:float32:1", "--link-timeout", "2"), "--flavour python"),
    ],
)
def test_models_that_triton_would_not_load_are_not_written(
    command: Any, repository: Path, sockets: Path, arguments: Sequence[str], words: str
) -> None:
    done = command(*add(repository, sockets, *arguments))
    assert done.code == 1
    assert words in done.err
    assert os.listdir(repository) == []


@pytest.mark.parametrize("option", ["--decoupled", "--flavour=python"])
def test_answers_are_kept_by_the_native_flavour_alone(
    command: Any, repository: Path, sockets: Path, option: str
) -> None:
    refused = command(*add(repository, sockets, "--response-cache", 4096, option))
    assert refused.code == 1
    assert "leave --response-cache out" in refused.err
    assert command(*add(repository, sockets, "--response-cache", 4096)).code == 0
    settings = repository / "double" / "1" / "pytriton.conf"
    assert "cache_bytes = 4096" in settings.read_text().splitlines()


def test_bf16_is_for_the_native_flavour(command: Any, repository: Path, sockets: Path) -> None:
    pytest.importorskip("ml_dtypes")
    tensors = ("--input", "x:bf16:1", "--output", "y:float32:1")
    refused = command(*add(repository, sockets, *tensors, "--flavour", "python"))
    assert refused.code == 1
    assert "x: Triton's Python backend gives no BF16" in refused.err
    assert command(*add(repository, sockets, *tensors)).code == 0


_IMPORT_ALL = """
import importlib, sys, zipfile
sys.modules["pytriton"] = None  # as where none is installed
file = "pytriton_python_proxy.zip"
sys.path.insert(0, file)
names = [name.removesuffix(".py").replace("/", ".") for name in zipfile.ZipFile(file).namelist()]
for name in names:
    importlib.import_module(name.removesuffix(".__init__"))
print(len(names))
"""


def test_the_python_flavour_needs_nothing_of_ours_in_the_server(command: Any, repository: Path, sockets: Path) -> None:
    assert command(*add(repository, sockets, "--flavour", "python")).code == 0
    version = repository / "double" / "1"
    assert sorted(path.name for path in version.iterdir()) == [
        "model.py", "pytriton-proxy.json", "pytriton.json", "pytriton_python_proxy.zip",
    ]  # fmt: skip
    program = [sys.executable, "-B", "-c", _IMPORT_ALL]
    done = subprocess.run(program, cwd=version, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "127.0.0.1.example.com", "*"])
def test_addresses_that_others_reach_need_keys(command: Any, repository: Path, host: str) -> None:
    arguments = add(repository, Path("x"), "--flavour", "python", "--endpoint", f"tcp://{host}:5555")
    done = command(*arguments)
    assert done.code == 1
    assert "--curve-secret-key" in done.err
    assert "--insecure" in done.err
    assert os.listdir(repository) == []
    assert command(*arguments, "--insecure").code == 0
    # The server that loads it is told the same.
    assert json.loads((repository / "double" / "1" / "pytriton-proxy.json").read_text())["insecure"] is True
    keys = repository.parent / "keys"
    assert command("keys", "--out", keys, "--name", "proxy").code == 0
    with_keys = ("--curve-secret-key", keys / "proxy.key_secret", "--curve-workers", keys, "--replace")
    assert command(*arguments, *with_keys).code == 0
    assert json.loads((repository / "double" / "1" / "pytriton-proxy.json").read_text())["insecure"] is False


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a\nb", "a b", "größe", "a%20b", "a?b", "a#b"])
def test_names_that_are_no_folders_or_that_a_url_cannot_carry_are_refused(
    command: Any, repository: Path, sockets: Path, name: str
) -> None:
    done = command(*add(repository, sockets, name=name))
    assert done.code == 1
    assert os.listdir(repository) == []


def test_a_repository_that_is_not_there_is_said(command: Any, repository: Path, sockets: Path) -> None:
    for arguments in (add(repository / "no", sockets), ("list", "--model-repository", repository / "no")):
        done = command(*arguments)
        assert done.code == 1
        assert "expected a model repository" in done.err


def test_an_endpoint_with_a_path_too_long_is_refused(command: Any, repository: Path, tmp_path: Path) -> None:
    done = command(*add(repository, tmp_path / ("s" * 120)))
    assert done.code == 1
    assert "107" in done.err
    assert os.listdir(repository) == []


def test_tensors_come_in_numpys_and_in_tritons_words() -> None:
    assert parse_tensor("x:float32:-1,4") == TensorSpec(name="x", dtype=np.dtype("float32"), shape=(-1, 4))
    assert parse_tensor("x:FP16:2").dtype == np.float16
    assert parse_tensor("x:TYPE_INT64:2").dtype == np.int64
    for strings in ("str", "bytes", "BYTES", "TYPE_STRING", "object"):
        assert parse_tensor(f"x:{strings}:1").dtype == np.dtype(object)
    assert parse_tensor("x:bool:1:optional").optional


def test_a_signature_comes_from_a_module(
    command: Any, repository: Path, sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "signatures_of_mine.py").write_text(
        textwrap.dedent("""
        import numpy as np
        from pytriton.model_config import ModelConfig, Tensor

        class Mine:
            inputs = [
                Tensor(name="text", dtype=bytes, shape=(1,), optional=True), Tensor(dtype=np.int32, shape=(-1, 2))
            ]
            outputs = ["score:float32:1"]
            config = ModelConfig(max_batch_size=32, decoupled=True)

        def plain():
            return {"inputs": ["x:float32:1"], "outputs": ["y:float32:1"], "batching": False}

        broken = {"inputs": [3], "outputs": []}
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = command(*add(repository, sockets, "--from", "signatures_of_mine:Mine"))
    assert done.code == 0, done.err
    spec = read_description(repository / "double" / "1" / "pytriton.json")
    assert spec == ModelSpec(
        name="double",
        version=1,
        inputs=(
            TensorSpec(name="text", dtype=np.dtype(object), shape=(1,), optional=True),
            TensorSpec(name="INPUT_2", dtype=np.dtype("int32"), shape=(-1, 2)),
        ),
        outputs=(TensorSpec(name="score", dtype=np.dtype("float32"), shape=(1,)),),
        batching=True,
        max_batch_size=32,
        decoupled=True,
    )
    assert load_signature("signatures_of_mine:plain")["batching"] is False
    with pytest.raises(DropInError, match=r"inputs\[0\] is no tensor"):
        load_signature("signatures_of_mine:broken")
    # What the command line says goes before it.
    command(*add(repository, sockets, "--from", "signatures_of_mine:plain", "--max-batch-size", 2, name="plain"))
    assert read_description(repository / "plain" / "1" / "pytriton.json").max_batch_size == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "expected format 1"),
        ('{"format": 2}', "got 2"),
        ('{"format": 1}', "'name'"),
        ('{"format": 1, "name": "a", "version": true}', "'version'"),
        ('{"format": 1, "name": "a", "version": 1, "inputs": [{"name": "x", "dtype": "F", "shape": []}]}', "dtype"),
        ('{"format": 1, "name": "a", "version": 1, "inputs": [{"name": "x", "dtype": "FP32", "shape": [-2]}]}', "-2"),
    ],
)
def test_descriptions_that_are_none_say_why(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "double.1.sock.json"
    path.write_text(text)
    with pytest.raises(DescriptionError, match=words.replace("[", r"\[")) as caught:
        read_description(path)
    assert str(path) in str(caught.value)
    with pytest.raises(DescriptionError, match="there is no description"):
        read_description(tmp_path / "none.json")


# ---- check ---------------------------------------------------------------------------------------------------------


def test_check_loads_the_library_as_the_server_would(command: Any, repository: Path, sockets: Path) -> None:
    command(*add(repository, sockets))
    server = find_tritonserver().executable.parent.parent
    done = command("check", "--model-repository", repository, "--tritonserver", server)
    assert done.code == 0, done.out
    assert "the library loads into the server" in done.out
    assert "no server has loaded the model now" in done.out
    # One that is no library of this machine.
    library = repository / "double" / "libtriton_pytriton.so"
    library.write_bytes(library.read_bytes()[:1000])
    done = command("check", "--model-repository", repository, "--tritonserver", server)
    assert done.code == 1
    assert "problem: the library does not load" in done.out
    done = command("check", "--model-repository", repository, "--tritonserver", repository)
    assert "is no tritonserver" in done.out


def test_check_finds_the_server_that_pytriton_server_brings(
    command: Any, repository: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.delenv("PYTRITON_TRITONSERVER_DIR", raising=False)
    assert find_server() == find_tritonserver().executable.parent.parent
    command(*add(repository, sockets))
    assert "the library loads into the server" in command("check", "--model-repository", repository).out
    monkeypatch.setenv("PYTRITON_TRITONSERVER_DIR", str(repository))
    assert f"{repository} is no tritonserver" in command("check", "--model-repository", repository).out


@pytest.mark.parametrize("relative", [False, True])
def test_check_takes_a_server_as_pip_lays_it_out(
    command: Any, repository: Path, sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    """The libraries of a wheel lie beside its package, in a folder of a name that is not known."""
    real = find_tritonserver().executable.parent.parent
    (server := tmp_path / "site-packages" / "some_package" / "tritonserver").mkdir(parents=True)
    for name in ("bin", "backends"):
        (server / name).symlink_to(real / name)
    (tmp_path / "site-packages" / "some_package.libs").symlink_to(real / "lib")
    command(*add(repository, sockets))
    monkeypatch.chdir(server.parent)
    folder = server.name if relative else server
    done = command("check", "--model-repository", repository, "--tritonserver", folder)
    assert done.code == 0, done.out
    assert "the library loads into the server" in done.out


def test_check_sees_what_is_in_the_way_of_the_socket(command: Any, repository: Path, sockets: Path) -> None:
    command(*add(repository, sockets))
    endpoint = endpoint_path(sockets, "double", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_behind:
        left_behind.bind(str(endpoint))
    assert "left behind and will replace" in command("check", "--model-repository", repository).out
    endpoint.unlink()
    endpoint.write_text("")
    done = command("check", "--model-repository", repository, "--json")
    assert done.code == 1
    assert any("not a socket" in finding["text"] for finding in json.loads(done.out)["double"])
    shutil.rmtree(sockets / "gone", ignore_errors=True)
    sockets.chmod(0o777)
    assert "chmod 700" in command("check", "--model-repository", repository).out
    sockets.chmod(0o700)


def test_check_says_where_the_protocol_is_another(command: Any, repository: Path, sockets: Path) -> None:
    command(*add(repository, sockets))
    path = repository / "double" / "pytriton-manifest.json"
    manifest = read_manifest(path)
    path.write_text(render_manifest(dataclasses.replace(manifest, protocol=(9, 3), made_by="9.9.9")))
    done = command("check", "--model-repository", repository)
    assert done.code == 1
    assert "protocol 9.3" in done.out
    # It is ours and unedited, so it can be brought up to date.
    assert command(*add(repository, sockets, "--replace")).code == 0
    assert "protocol 1.0" in command("check", "--model-repository", repository).out


# ---- served --------------------------------------------------------------------------------------------------------


def attached(infer: Any, description: Path, endpoint: Path) -> contextlib.AbstractContextManager[Worker]:
    return running_worker(infer, read_description(description), endpoint)


def triple(requests: Any) -> Any:
    return [{"y": request["x"] * 3} for request in requests]


def test_any_tritonserver_that_loads_the_repository_serves_it(
    command: Any, repository: Path, sockets: Path, tmp_path: Path
) -> None:
    """The bare binary, another working directory and home, a repository that it only reads, and a model of others."""
    command(*add(repository, sockets))
    command(*add(repository, sockets, "--input", "t:str:1", "--output", "t:str:1", "--version", 3, name="echo"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    set_modes(repository, 0o555)
    before = tree(repository)
    options = ("--model-control-mode=explicit", "--load-model=*")
    try:
        with plain_server(elsewhere, repository, *options) as server:
            _serve_both(command, server, repository, sockets)
    finally:
        set_modes(repository, 0o755)
    assert tree(repository) == before
    assert {path.suffix for path in sockets.iterdir()} <= {".json"}


@pytest.mark.parametrize("flavour", ["native", "python"])
def test_a_server_in_another_container_serves_what_it_only_reads(
    command: Any, repository: Path, sockets: Path, tmp_path: Path, flavour: str
) -> None:
    """They share the folder of the socket, and neither processes nor what else is mounted, such as /dev/shm."""
    container = reading_container(repository)
    backend = find_tritonserver().backends_dir / "python" / "libtriton_python.so"
    if flavour == "python" and not backend.is_file():
        pytest.skip(f"this tritonserver has no Python backend ({backend})")
    endpoints = sockets / "later"
    command(*add(repository, endpoints, "--flavour", flavour))
    # The volume comes after the model: then the server says beside the socket what the model is.
    endpoints.mkdir(mode=0o700)
    endpoint = endpoints / ("double.1.sock" if flavour == "native" else "double.1.zmq")
    with plain_server(tmp_path, repository, prefix=container) as server:
        worker = Worker(
            lambda requests: [{"y": request["x"] * 2} for request in requests],
            read_description(description_path(endpoint)),
            endpoint if flavour == "native" else f"ipc://{endpoint}",
        )
        worker.start()
        try:
            worker.wait_attached(PATIENCE_S)
            for size in (2, 100_000):
                status, answer = server.infer("double", x=("FP32", [1, size], [1] * size))
                assert (status, answer) == (200, {"y": [2] * size})
        finally:
            assert worker.stop(PATIENCE_S)
    if flavour == "python":
        assert "attached, through shared memory" in server.log.read_text()


def test_a_version_comes_and_goes_while_another_one_is_served(
    command: Any, repository: Path, sockets: Path, tmp_path: Path
) -> None:
    command(*add(repository, sockets))
    row = ("FP32", [1, 2], [1, 2])
    with plain_server(tmp_path, repository, "--model-control-mode=explicit", "--load-model=*") as server:
        first, second = (endpoint_path(sockets, "double", version) for version in (1, 2))
        with attached(double, description_path(first), first) as worker:
            assert server.infer("double", x=row) == (200, {"y": [2, 4]})
            assert command(*add(repository, sockets, "--version", 2)).code == 0
            assert server.load("double")[0] == 200
            with attached(triple, description_path(second), second):
                assert server.infer("double/versions/1", x=row) == (200, {"y": [2, 4]})
                assert server.infer("double/versions/2", x=row) == (200, {"y": [3, 6]})
            gone = command("remove", "--model-repository", repository, "--name", "double", "--version", 2)
            assert gone.code == 0
            assert server.load("double")[0] == 200
            assert server.infer("double", x=row) == (200, {"y": [2, 4]})
            assert server.infer("double/versions/2", x=row)[0] != 200
            assert worker.error is None


def test_models_that_are_loaded_and_unloaded_at_once_leave_the_server_alive(
    command: Any, repository: Path, sockets: Path, tmp_path: Path
) -> None:
    """tritonserver crashes now and then where the guard does not have it wait, the more the busier the machine is."""
    names = [f"model{number}" for number in range(4)]
    for name in names:
        command(*add(repository, sockets, name=name))

    def load_and_unload(server: PlainServer, name: str) -> None:
        for _ in range(25):
            assert server.load(name)[0] == 200
            assert server.unload(name)[0] == 200
            # The next one listens where this one may still be about to go.
            server.wait_unloaded(name)

    environment = {"LD_PRELOAD": str(guard_library_path())}
    with plain_server(tmp_path, repository, "--model-control-mode=explicit", environment=environment) as server:
        with ThreadPoolExecutor(len(names)) as pool:
            for done in [pool.submit(load_and_unload, server, name) for name in names]:
                done.result()
        assert server.process.poll() is None


@pytest.mark.parametrize("flavour", ["native", "python"])
def test_a_server_warns_of_two_models_at_one_endpoint(
    command: Any, repository: Path, sockets: Path, tmp_path: Path, flavour: str
) -> None:
    if flavour == "python" and not (find_tritonserver().backends_dir / "python" / "libtriton_python.so").is_file():
        pytest.skip("this tritonserver has no Python backend")
    command(*add(repository, sockets, "--flavour", flavour))
    # As somebody does who wants the same once more.
    shutil.copytree(repository / "double", repository / "copied")
    config = repository / "copied" / "config.pbtxt"
    config.write_text(config.read_text().replace('"double"', '"copied"'))
    with plain_server(tmp_path, repository, "--model-control-mode=explicit", "--load-model=*") as server:
        said = server.log.read_text()
    assert "model 'copied' version 1: its folder was written for model 'double' version 1" in said
    assert "add each model with pytriton-proxy-backend add" in said
    # Nothing is said of the one that is as it was written.
    assert "model 'double' version 1: its" not in said


def _serve_both(command: Any, server: PlainServer, repository: Path, sockets: Path) -> None:
    endpoint = endpoint_path(sockets, "double", 1)
    row = ("FP32", [1, 3], [1, 2, 3])
    with attached(double, description_path(endpoint), endpoint):
        assert server.infer("double", x=row) == (200, {"y": [2, 4, 6]})
        # Two workers of one model, one after the other: the server stays as it is.
        with attached(double, repository / "double" / "1" / "pytriton.json", endpoint):
            assert server.infer("double", x=row) == (200, {"y": [2, 4, 6]})
        assert server.infer("double", x=row) == (200, {"y": [2, 4, 6]})

    def echo(requests: Any) -> Any:
        return [{"t": request["t"]} for request in requests]

    with attached(echo, repository / "echo" / "3" / "pytriton.json", endpoint_path(sockets, "echo", 3)):
        assert server.infer("echo", t=("BYTES", [1, 1], ["naïve"])) == (200, {"t": ["naïve"]})
    done = command("check", "--model-repository", repository, "--name", "double", "--server-url", server.url)
    assert done.code == 0, done.out
    assert "a server listens at" in done.out
    assert "has loaded model 'double'" in done.out
    # Replacing what is loaded does not disturb it; the new one is served once it is loaded.
    set_modes(repository, 0o755)
    assert command(*add(repository, sockets, "--max-batch-size", 1, "--replace")).code == 0
    assert server.load("double")[0] == 200
    with attached(double, description_path(endpoint), endpoint) as worker:
        assert worker.model.max_batch_size == 1
        assert server.infer("double", x=row) == (200, {"y": [2, 4, 6]})
        status, text = server.infer("double", x=("FP32", [2, 1], [1, 2]))
        assert status == 400
        assert "batch-size" in text
    assert server.unload("double")[0] == 200
    server.wait_unloaded("double")
    done = command("check", "--model-repository", repository, "--name", "double", "--server-url", server.url)
    assert "has not loaded model 'double'" in done.out
    assert command(*add(repository, sockets, "--replace")).code == 0
