import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytriton.server.errors import WorkspaceError
from pytriton.server.workspace import Workspace, default_home


def test_home_of_automatic_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRITON_HOME", "$SOMEWHERE/here")
    monkeypatch.setenv("SOMEWHERE", "/over")
    assert default_home() == Path("/over/here")
    monkeypatch.delenv("PYTRITON_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_home() == Path("/cache/pytriton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_home() == Path("~/.cache/pytriton").expanduser()


def test_life_of_an_automatic_workspace() -> None:
    workspace = Workspace()
    assert not default_home().exists()
    workspace.create()
    workspace.create()
    assert workspace.path.parent == default_home()
    assert workspace.path.stat().st_mode & 0o777 == 0o700
    assert workspace.is_empty()
    (workspace.model_store_path / "file").write_text("")
    assert not workspace.is_empty()
    old = workspace.path
    workspace.clean()
    workspace.clean()
    assert list(default_home().iterdir()) == []
    workspace.create()
    assert workspace.path != old
    workspace.clean()


def test_life_of_a_given_workspace(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "deep" / "mine")
    workspace.create()
    assert workspace.endpoints_path.is_dir()
    workspace.clean()
    assert not workspace.exists()
    workspace.create()
    workspace.clean()


def test_a_given_workspace_must_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists already"):
        Workspace(tmp_path)
    late = Workspace(tmp_path / "late")
    late.path.mkdir()
    (late.path / "file").write_text("")
    with pytest.raises(FileExistsError):
        late.create()
    late.clean()
    assert (late.path / "file").exists()


def test_an_unusable_place_is_told() -> None:
    # A file where a folder is needed: an obstacle for every user, root included.
    default_home().write_text("")
    with pytest.raises(WorkspaceError, match=r"cannot be made: .* Set PYTRITON_HOME") as caught:
        Workspace().create()
    assert caught.value.path is not None


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_place_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(WorkspaceError, match="Permission denied"):
            Workspace(tmp_path / "mine").create()
    finally:
        tmp_path.chmod(0o700)


def test_only_what_dead_owners_left_is_swept(tmp_path: Path) -> None:
    script = (
        "import os; from pytriton.server.workspace import Workspace; w = Workspace(); w.create(); "
        "print(w.path, flush=True); os.kill(os.getpid(), 9)"
    )
    dead = Path(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stdout.strip()
    )
    assert dead.is_dir()
    foreign = default_home() / "workspace_abcd"
    unlocked = default_home() / "server-unlocked"
    foreign.mkdir()
    unlocked.mkdir()
    living, newest = Workspace(), Workspace()
    living.create()
    newest.create()
    assert not dead.exists()
    assert living.exists()
    assert foreign.exists()
    assert unlocked.exists()
    living.clean()
    newest.clean()


def test_an_error_names_the_folder_that_could_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYTRITON_HOME", str(tmp_path / "file" / "home"))
    workspace = Workspace()
    tried = workspace.path
    with pytest.raises(WorkspaceError) as caught:
        workspace.create()
    assert caught.value.path == str(tried)
    assert str(tried) in str(caught.value)
    assert f"{tmp_path / 'file' / 'home'}: Not a directory." in str(caught.value)
