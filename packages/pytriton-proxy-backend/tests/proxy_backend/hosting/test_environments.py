"""Interpreters of environments that models name: found, unpacked, activated, refused."""

import io
import os
import stat
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from pytriton.proxy_backend.hosting.environments import Environments, ModelRefused


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
    assert told.stderr.splitlines()[-1].startswith("ModuleNotFoundError: No module named 'numpy'"), told.stderr


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


def link(name: str, target: str) -> tarfile.TarInfo:
    return member(name, tarfile.SYMTYPE, target)


def hard_link(name: str, target: str) -> tarfile.TarInfo:
    return member(name, tarfile.LNKTYPE, target)


def folder(name: str, mode: int = 0o755) -> tarfile.TarInfo:
    return member(name, tarfile.DIRTYPE, mode=mode)


# Attempts to reach a file and a folder that lie beside the one that is unpacked into.
HOSTILE: dict[str, tuple[list[tarfile.TarInfo], str]] = {
    "absolute path": ([member("/etc/x")], "'/etc/x' would lie outside"),
    "path that goes up": ([member("bin/../../x")], "would lie outside"),
    "absolute link": ([link("out", "/tmp")], "'out' is a link out of the folder"),
    "link that goes up": ([link("out", "..")], "'out' is a link out of the folder"),
    "link, then a file of its name": ([link("x", "../../outside/file"), member("x", size=9)], "is a link out"),
    "link, then a folder of its name": ([link("x", "../../outside"), folder("x", 0o777)], "is a link out"),
    "file behind a link": ([link("x", "../../outside"), member("x/new", size=9)], "is a link out"),
    # Each of these links leads to where it may until the next one is there.
    "links that change each other": (
        [folder("a/b/c"), link("m", "a/b/c/l/../.."), link("a/b/c/l", "../../.."), member("m/outside/new", size=9)],
        "'m/outside/new' would lie outside",
    ),
    "link to a link": (
        [folder("a/b"), link("a/b/up", "../.."), link("x", "a/b/up/../../outside/file"), member("x", size=9)],
        "is a link out",
    ),
    "hard link that goes up": ([hard_link("x", "../../outside/file")], "'../../outside/file' would lie outside"),
    "hard link to a link": ([link("y", "bin"), hard_link("x", "y")], "which is no file before it"),
    "absolute hard link": ([hard_link("x", "/etc/passwd")], "'/etc/passwd' would lie outside"),
    "hard link, then a file of its name": (
        [hard_link("x", "../../outside/file"), member("x", size=9)],
        "'../../outside/file' would lie outside",
    ),
    "interpreter, then a file of its name": (
        [link("bin/python3", "../../../outside/file"), member("bin/python3", size=9, mode=0o755)],
        "cannot be used|holds no interpreter",
    ),
    "interpreter, then a folder of its name": (
        [link("bin/python3", "../../../outside"), folder("bin/python3", 0o777)],
        "cannot be used|holds no interpreter",
    ),
    "interpreter, then a file behind it": (
        [link("bin/python3", "../../../outside"), member("bin/python3/new", size=9)],
        "cannot be used|holds no interpreter",
    ),
    "interpreter, then a hard link to it": (
        [link("bin/python3", "../../../outside/file"), hard_link("x", "bin/python3"), member("x", size=9)],
        "is a hard link to 'bin/python3', which is no file before it",
    ),
    "interpreter in a folder that is a link": (
        [link("bin", "../../outside"), link("bin/python3", "x")],
        "is a link out",
    ),
    "device": ([member("x", tarfile.CHRTYPE)], "is neither a file, nor a folder, nor a link"),
    "block device": ([member("x", tarfile.BLKTYPE)], "is neither a file, nor a folder, nor a link"),
    "pipe": ([member("x", tarfile.FIFOTYPE)], "is neither a file, nor a folder, nor a link"),
    "nothing": ([member("readme")], "holds no interpreter that can be run"),
}


@pytest.mark.parametrize("has_filter", [True, False], ids=["filter", "old Python"])
@pytest.mark.parametrize("name", HOSTILE)
def test_archives_that_reach_out(name: str, has_filter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "file").write_bytes(b"theirs")
    (outside / "file").chmod(0o600)
    members, said = HOSTILE[name]
    environments = Environments(tmp_path / "made")
    for _ in range(2):
        with pytest.raises(ModelRefused, match=said):
            environments.launch(str(archive(tmp_path / "bad.tar.gz", *members)))
    assert (outside / "file").read_bytes() == b"theirs"
    assert [entry.name for entry in outside.iterdir()] == ["file"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (outside, outside / "file")] == [0o700, 0o600]
    assert {entry.name for entry in tmp_path.iterdir()} == {"outside", "bad.tar.gz", "made"}


@pytest.mark.parametrize("has_filter", [True, False], ids=["filter", "old Python"])
def test_what_an_archive_may_have(has_filter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    packed = archive(
        tmp_path / "env.tar",
        *(
            link("bin/python3", sys.executable),
            link("bin/python", "python3"),
            folder("lib", 0o500),
            link("lib64", "lib"),
        ),
        *(
            member("lib/a", size=4, mode=0o6755),
            hard_link("lib/b", "lib/a"),
            folder("lib", 0o2777),
            member("./c", size=1),
        ),
        *(link("d", "lib/../c"), member("lib/a", size=5)),
    )
    launch = Environments(tmp_path / "made").launch(str(packed))
    root = Path(str(launch.python)).parents[1]
    assert os.readlink(root / "bin/python3") == sys.executable
    assert os.readlink(root / "bin/python") == "python3"
    assert (root / "lib64" / "a").read_bytes() == b"x" * 5
    assert (root / "lib" / "b").read_bytes() == b"x" * 4
    assert (root / "d").read_bytes() == b"x"
    modes = {name: stat.S_IMODE((root / name).stat().st_mode) for name in ("lib", "lib/a", "lib/b")}
    assert modes == {"lib": 0o755, "lib/a": 0o644, "lib/b": 0o644}


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
    with pytest.raises(ModelRefused, match=said):
        Environments(tmp_path / "made").launch(str(tmp_path / "env"))


def test_an_activation_that_fails_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    (tmp_path / "bin" / "activate").write_text("echo no licence >&2\nfalse\n")
    with pytest.raises(ModelRefused, match="ended with exit code 1: no licence"):
        Environments(tmp_path / "made").launch(str(tmp_path))
