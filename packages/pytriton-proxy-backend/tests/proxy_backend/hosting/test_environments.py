"""Interpreters of environments that models name: found, unpacked, activated, refused."""

import io
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from pytriton.proxy_backend.hosting.environments import EnvironmentRefused, Environments


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    with (folder / "bin" / "activate").open("a") as script:
        script.write("\nexport OF_THE_MODEL='a b\nc'\n")
    return folder


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0, mode: int = 0o644
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size, made.mode = kind, target, size, mode
    return made


def test_a_folder_is_activated(environment: Path, tmp_path: Path) -> None:
    launch = Environments(tmp_path / "made").launch(str(environment))
    assert launch.python == str(environment / "bin" / "python3")
    variables = launch.variables()
    assert variables["VIRTUAL_ENV"] == str(environment)
    assert variables["OF_THE_MODEL"] == "a b\nc"
    assert variables["PATH"].startswith(str(environment / "bin"))
    # Of this package it sees what a host is made of, and nothing beside it.
    code = "import sys, pytriton.proxy.types, pytriton.proxy_backend.errors; print(sys.prefix)"
    told = subprocess.run(
        [launch.python, "-c", f"{code}; import typing_extensions"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.stderr.endswith("ModuleNotFoundError: No module named 'numpy'\n"), told.stderr


def test_an_archive_is_unpacked_once(environment: Path, tmp_path: Path) -> None:
    packed = tmp_path / "env.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(environment, ".")
    environments = Environments(tmp_path / "made")
    launch = environments.launch(str(packed))
    python = Path(str(launch.python))
    assert python.parents[2] == tmp_path / "made"
    assert os.path.realpath(python) == os.path.realpath(environment / "bin" / "python3")
    (tmp_path / "link").symlink_to(packed)
    assert environments.launch(str(tmp_path / "link")) is launch
    # Another archive in its place is another environment.
    os.utime(packed, (1, 1))
    assert environments.launch(str(packed)).python != launch.python


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([member("/etc/x")], "'/etc/x' would lie outside"),
        ([member("bin/../../x")], "would lie outside"),
        ([member("out", tarfile.SYMTYPE, "/tmp"), member("out/x")], "'out/x' would lie outside"),
        ([member("out", tarfile.SYMTYPE, ".."), member("out/x")], "'out/x' would lie outside"),
        ([member("x", tarfile.LNKTYPE, "../../secret")], "'../../secret' would lie outside"),
        ([member("x", tarfile.CHRTYPE)], "is neither a file, nor a folder, nor a link"),
        ([member("x", tarfile.FIFOTYPE)], "is neither a file, nor a folder, nor a link"),
        ([member("readme")], "holds no interpreter that can be run"),
    ],
)
def test_archives_that_reach_out_are_refused(members: list[tarfile.TarInfo], said: str, tmp_path: Path) -> None:
    before = set(tmp_path.parent.iterdir())
    environments = Environments(tmp_path / "made")
    for _ in range(2):
        with pytest.raises(EnvironmentRefused, match=said):
            environments.launch(str(archive(tmp_path / "bad.tar.gz", *members)))
    assert set(tmp_path.parent.iterdir()) == before


def test_modes_and_owners_are_ours(tmp_path: Path) -> None:
    script = member("bin/python3", size=3, mode=0o6777)
    script.uid, script.uname = 12345, "nobody"
    python = Path(str(Environments(tmp_path / "made").launch(str(archive(tmp_path / "env.tar", script))).python))
    assert python.stat().st_mode & 0o7777 == 0o755
    assert python.stat().st_uid == os.getuid()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "Failed to get the canonical path for "),
        (lambda path: path.write_bytes(b"no archive"), "file could not be opened"),
        (lambda path: path.write_bytes(b""), "empty file"),
        (lambda path: path.mkdir(), "holds no interpreter that can be run"),
    ],
)
def test_what_is_no_environment(make: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    make(tmp_path / "env")
    with pytest.raises(EnvironmentRefused, match=said):
        Environments(tmp_path / "made").launch(str(tmp_path / "env"))


def test_an_activation_that_fails_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    (tmp_path / "bin" / "activate").write_text("echo no licence >&2\nfalse\n")
    with pytest.raises(EnvironmentRefused, match="ended with exit code 1: no licence"):
        Environments(tmp_path / "made").launch(str(tmp_path))
