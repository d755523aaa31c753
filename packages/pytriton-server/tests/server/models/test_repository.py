"""The files of models: what stays, what is new, and the way back."""

import os
from pathlib import Path

import pytest

from pytriton.server.errors import WorkspaceError
from pytriton.server.models.repository import ModelRepository

FILES = [("side.conf", "one")]


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    (tmp_path / "models").mkdir()
    return ModelRepository(tmp_path / "models")


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def times(folder: Path) -> dict[str, int]:
    """When everything in a folder was changed, as Triton looks at it: a folder is as new as the newest in it."""
    return {path.name: max(os.stat(each).st_mtime_ns for each in [path, *path.rglob("*")]) for path in folder.iterdir()}


def test_versions_come_and_go(repository: ModelRepository) -> None:
    repository.write("m", "config", {1: FILES})
    repository.write("m", "config", {1: FILES, 2: [("side.conf", "two")]})
    assert contents(repository.path) == {
        "m/1/side.conf": "one",
        "m/2/side.conf": "two",
        "m/config.pbtxt": "config",
    }
    repository.write("m", "config", {2: [("side.conf", "two")]})
    assert contents(repository.path) == {"m/2/side.conf": "two", "m/config.pbtxt": "config"}
    repository.write("m", "", {})
    assert os.listdir(repository.path) == []
    repository.write("m", "", {})
    assert os.listdir(repository.path.parent) == ["models"]


def test_only_what_changes_gets_newer(repository: ModelRepository) -> None:
    repository.write("m", "config", {1: FILES})
    before = times(repository.path / "m")
    repository.write("m", "config", {1: FILES, 2: FILES})
    after = times(repository.path / "m")
    assert {name: after[name] for name in before} == before
    assert after["2"] > max(before.values())
    repository.write("m", "other", {1: FILES, 2: [("side.conf", "two")]})
    last = times(repository.path / "m")
    assert last["1"] == before["1"]
    assert min(last["2"], last["config.pbtxt"]) > max(after.values())


def attempt(repository: ModelRepository, name: str, config: str, versions: dict[int, list[tuple[str, str]]]) -> None:
    """A change that the server refuses when it has seen the files."""
    with repository.changed(name, config, versions):
        seen = contents(repository.path / name)
        assert seen == {
            **{f"{version}/{file}": text for version, files in versions.items() for file, text in files},
            **({"config.pbtxt": config} if versions else {}),
        }
        raise KeyboardInterrupt


def test_what_is_taken_back_is_as_it_was(repository: ModelRepository) -> None:
    repository.write("m", "config", {1: FILES, 2: FILES})
    model = repository.path / "m"
    before = contents(model), times(model)
    for versions in ({1: [("side.conf", "new")], 3: FILES}, {}):
        with pytest.raises(KeyboardInterrupt):
            attempt(repository, "m", "other", versions)
        assert (contents(model), times(model)) == before
    with pytest.raises(KeyboardInterrupt):
        attempt(repository, "n", "config", {1: FILES})
    assert os.listdir(repository.path) == ["m"]
    assert os.listdir(repository.path.parent) == ["models"]


def test_what_cannot_be_written_leaves_the_rest(repository: ModelRepository) -> None:
    repository.write("m", "config", {1: FILES})
    model = repository.path / "m"
    before = contents(model), times(model)
    with pytest.raises(WorkspaceError, match="The files of model 'm' cannot be written") as caught:
        repository.write("m", "other", {1: [("side.conf", "new"), ("no/such/folder", "")]})
    assert caught.value.path == str(model)
    assert (contents(model), times(model)) == before
