"""The token of a server that others of its user find: who gets it, and who does not."""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytriton.client.management import TritonUrl
from pytriton.server.control.local_token import find_token, leave_token

URLS = ("http://127.0.0.1:8123", "grpc://127.0.0.1:8124")
LEFT = json.dumps({"urls": URLS, "token": "secret"})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTRITON_HOME", str(tmp_path))
    return tmp_path


def found(url: str) -> str | None:
    told = find_token(TritonUrl.from_url(url))
    if told is None:
        return None
    assert (told[0].hostname, told[0].trust_env) == ("127.0.0.1", False)
    return told[1]


def other_name(path: Path) -> str:
    """Return another name of the same place."""
    return f"{path.name.partition('-')[0]}-{'0' * 16}"


def kill_at(call: str) -> None:
    """Have a server killed at a call, before its file has its name."""
    code = (
        "import fcntl, os, signal\nfrom pytriton.server.control.local_token import leave_token\n"
        f"{call} = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"with leave_token('secret', {URLS!r}):\n    pass"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (path,) = (Path(os.environ["PYTRITON_HOME"]) / "tokens").iterdir()
    assert path.name.startswith(".")


@pytest.mark.parametrize("url", ["127.0.0.1:8123", "localhost:8123", "grpc://127.0.0.1:8124", "grpc://localhost:8124"])
def test_it_is_found_by_the_address(url: str, home: Path) -> None:
    with leave_token("secret", URLS) as path:
        assert path is not None
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert found(url) == "secret"
    assert found(url) is None
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8125", "127.0.0.2:8123", "[::1]:8123", "https://127.0.0.1:8123", "grpc://127.0.0.1:8123",
        "other:8123", "127.0.0.1:8123/gateway", "localhost",
    ],
)  # fmt: skip
def test_nobody_else_is_sent_it(url: str) -> None:
    with leave_token("secret", URLS):
        assert found(url) is None


def test_each_server_has_its_own() -> None:
    with leave_token("one", URLS), leave_token("two", ["http://127.0.0.1:9000"]):
        assert (found("localhost:8123"), found("localhost:9000")) == ("one", "two")


def test_that_of_a_server_that_was_killed_is_forgotten(home: Path) -> None:
    code = (
        "import os, signal\nfrom pytriton.server.control.local_token import leave_token\n"
        f"with leave_token('secret', {URLS!r}):\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(list((home / "tokens").iterdir())) == 1
    assert found("localhost:8123") is None
    assert list((home / "tokens").iterdir()) == []


def test_what_others_could_have_written_is_not_read(home: Path) -> None:
    with leave_token("secret", URLS) as path:
        assert path is not None
        path.chmod(0o644)
        assert found("localhost:8123") is None
        path.chmod(0o600)
        link = path.with_name(other_name(path))
        link.symlink_to(path)
        assert found("localhost:8123") == "secret"
        link.unlink()
        path.write_text("{")
        assert found("localhost:8123") is None
    (home / "tokens").mkdir(mode=0o755)
    with leave_token("secret", URLS) as path:
        assert path is None


def test_the_name_tells_the_boot_and_the_network() -> None:
    """A home may be of several hosts and containers, in each of which another server listens at 127.0.0.1."""
    network = os.stat("/proc/self/ns/net")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    place = hashlib.sha256(f"{boot} {network.st_dev} {network.st_ino}".encode()).hexdigest()[:16]
    with leave_token("secret", URLS) as path:
        assert path is not None
        assert re.fullmatch(f"{place}-[0-9a-f]{{16}}", path.name)


@pytest.mark.parametrize("point", ["", "."])
@pytest.mark.parametrize("is_locked", [True, False])
def test_what_servers_elsewhere_have_left_is_let_alone(
    point: str, is_locked: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = home / "tokens"
    tokens.mkdir(mode=0o700)
    elsewhere = tokens / f"{point}{'f' * 16}-{'0' * 16}"
    elsewhere.write_text(LEFT)
    elsewhere.chmod(0o600)
    opened = []
    really_open = os.open

    def seen_open(path: str, *args: int, **options: int) -> int:
        opened.append(str(path))
        return really_open(path, *args, **options)

    with elsewhere.open() as file:
        if is_locked:
            fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(os, "open", seen_open)
        assert found("localhost:8123") is None
        with leave_token("other", ["http://127.0.0.1:9000"]):
            assert found("localhost:8123") is None
            assert found("localhost:9000") == "other"
    assert elsewhere.read_text() == LEFT
    assert opened
    assert not any(path.endswith(elsewhere.name) for path in opened)


@pytest.mark.parametrize("text", [LEFT, "{}", "[1]", '{"urls": "no", "token": ""}', "a token of somebody else's"])
def test_no_file_is_removed_that_no_server_has_left(text: str, home: Path) -> None:
    """`PYTRITON_HOME` may be a folder that has a folder of this name already."""
    with leave_token("secret", URLS) as path:
        assert path is not None
        names = ["github", ".github", "0" * 16, f".{'0' * 16}", f"{path.name}.txt", f"{path.name[:-1]}g"]
        if text != LEFT:
            names.append(other_name(path))
        others = [path.with_name(name) for name in names]
        for other in others:
            other.write_text(text)
            other.chmod(0o600)
        assert found("localhost:8123") == "secret"
    with leave_token("secret", URLS):
        assert {other.read_text() for other in others} == {text}


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_folder_that_others_could_have_made_is_not_read(kind: str, home: Path) -> None:
    with leave_token("secret", URLS) as path:
        assert path is not None
        tokens = path.parent
        if kind == "open":
            tokens.chmod(0o750)
        else:
            tokens.rename(home / "moved")
            if kind == "link":
                tokens.symlink_to("moved")
            else:
                tokens.write_text("")
        assert found("localhost:8123") is None
        with leave_token("other", URLS) as other:
            assert other is None
        if kind == "open":
            tokens.chmod(0o700)
        else:
            tokens.unlink()
            (home / "moved").rename(tokens)
        assert found("localhost:8123") == "secret"
    assert list(home.iterdir()) == []


def test_another_file_of_its_name_is_not_removed_at_the_end() -> None:
    with leave_token("secret", URLS) as path:
        assert path is not None
        path.unlink()
        path.write_text("mine")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("call", ["fcntl.flock", "os.write", "os.rename"])
def test_what_a_server_leaves_that_is_killed_at_its_start_is_removed(call: str, home: Path) -> None:
    kill_at(call)
    assert found("localhost:8123") is None
    assert list((home / "tokens").iterdir()) == []
    kill_at(call)
    with leave_token("secret", URLS) as path:
        assert path is not None
        assert list((home / "tokens").iterdir()) == [path]


@pytest.mark.parametrize("name", ["write", "rename"])
def test_nothing_is_left_where_the_start_is_interrupted(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = getattr(os, name)

    def interrupted(*args: object, **options: object) -> None:
        really(*args, **options)
        raise KeyboardInterrupt

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, name, interrupted)
        with pytest.raises(KeyboardInterrupt), leave_token("secret", URLS):
            pass
    assert list((home / "tokens").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("port", [None, 8102])
def test_the_port_of_metrics_is_left_beside_the_token(port: int | None) -> None:
    with leave_token("secret", URLS, port):
        left = find_token(TritonUrl.from_url("localhost:8123"))
    assert left is not None
    assert left.metrics_port == port
