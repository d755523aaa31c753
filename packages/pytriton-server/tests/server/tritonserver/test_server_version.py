from pathlib import Path

import pytest

from pytriton.server.tritonserver import version
from pytriton.server.tritonserver.binary import BUNDLED_FOLDER, TritonServerBinary, find_tritonserver
from pytriton.server.tritonserver.version import ServerVersionUnknownError, parse_server_version, read_server_version

needs_bundle = pytest.mark.skipif(not BUNDLED_FOLDER.is_dir(), reason="this build carries no tritonserver")


def fake_server(folder: Path, script: str) -> TritonServerBinary:
    executable = folder / "bin" / "tritonserver"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    return find_tritonserver(folder)


@needs_bundle
def test_the_bundled_server_tells_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert read_server_version(find_tritonserver(BUNDLED_FOLDER)) == "2.51.0"
    assert list(tmp_path.iterdir()) == []


def test_the_server_is_ended_as_soon_as_it_has_told(tmp_path: Path) -> None:
    # A server that would go on for good, and whose process must not stay behind.
    note = tmp_path / "pid"
    script = f"echo $$ > {note}\necho '| server_version | 9.9.9 |'\nexec sleep 1000000"
    assert read_server_version(fake_server(tmp_path / "server", script)) == "9.9.9"
    assert not Path(f"/proc/{note.read_text().strip()}").exists()


def test_a_server_that_does_not_tell_is_quoted(tmp_path: Path) -> None:
    server = fake_server(tmp_path / "server", "echo starting\necho 'no such option' >&2\nexit 3")
    with pytest.raises(ServerVersionUnknownError, match=r"(?s)ended with 3 .*  starting\n  no such option"):
        read_server_version(server)


def test_a_server_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "DEADLINE_S", 0.1)
    with pytest.raises(ServerVersionUnknownError, match=r"ended with -9 .*\n  \(nothing\)"):
        read_server_version(fake_server(tmp_path / "server", "exec sleep 1000000"))


def test_a_server_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    server = fake_server(tmp_path / "server", "")
    server.executable.write_bytes(b"\x7fELF is not here")
    with pytest.raises(ServerVersionUnknownError, match=r"cannot be run: Exec format error"):
        read_server_version(server)
    server.executable.unlink()
    with pytest.raises(ServerVersionUnknownError, match=r"cannot be run: No such file"):
        read_server_version(server)


def test_versions_compare_as_numbers() -> None:
    assert parse_server_version("2.51.0") == (2, 51, 0)
    assert parse_server_version("2.70.0dev") == (2, 70, 0)
    assert parse_server_version("2.60") == (2, 60, 0)
    assert parse_server_version("unknown") is None
    first, second = parse_server_version("2.9.0"), parse_server_version("2.51.0")
    assert first is not None
    assert second is not None
    assert first < second
