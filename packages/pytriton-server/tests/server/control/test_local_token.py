"""The token of a server that others of its user find: who gets it, and who does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from pytriton.client.management import TritonUrl
from pytriton.server.control.local_token import find_token, leave_token

URLS = ("http://127.0.0.1:8123", "grpc://127.0.0.1:8124")


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
        link = path.with_name("link")
        link.symlink_to(path)
        assert found("localhost:8123") == "secret"
        link.unlink()
        path.write_text("{")
        assert found("localhost:8123") is None
    (home / "tokens").mkdir(mode=0o755)
    with leave_token("secret", URLS) as path:
        assert path is None
