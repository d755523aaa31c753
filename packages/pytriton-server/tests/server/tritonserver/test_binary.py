import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytriton.server.tritonserver import binary
from pytriton.server.tritonserver.binary import ENVIRONMENT_VARIABLE, TritonServerNotFoundError, find_tritonserver


def make_server(folder: Path, *, mode: int = 0o755) -> Path:
    executable = folder / "bin" / "tritonserver"
    executable.parent.mkdir(parents=True)
    executable.write_text("#!/bin/sh\necho started $0\n")
    executable.chmod(mode)
    return folder


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Every place of the search, in its order, as a folder that holds no server yet."""
    folders = {name: tmp_path / name for name in ("explicit", "environment", "bundled", "system", "path")}
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(folders["environment"]))
    monkeypatch.setenv("PATH", str(folders["path"] / "bin"))
    monkeypatch.setattr(binary, "BUNDLED_FOLDER", folders["bundled"])
    monkeypatch.setattr(binary, "SYSTEM_FOLDER", folders["system"])
    return folders


@pytest.mark.parametrize("first", range(5))
def test_takes_the_first_place_that_holds_a_server(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    names = list(places)
    for name in names[first:]:
        make_server(places[name])
    if first > 1:
        monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    found = find_tritonserver(places["explicit"] if first == 0 else None)
    assert found.executable == places[names[first]] / "bin" / "tritonserver"
    assert found.backends_dir == places[names[first]] / "backends"
    assert found.caches_dir == places[names[first]] / "caches"


def test_lists_every_place_when_there_is_none(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    places["bundled"].mkdir()
    with pytest.raises(TritonServerNotFoundError) as caught:
        find_tritonserver()
    text = str(caught.value)
    assert f"{places['bundled']}): it holds no bin/tritonserver" in text
    assert f"{places['system']}): there is no such folder" in text
    assert "PATH: none" in text
    assert f"{ENVIRONMENT_VARIABLE}: not set" in text
    assert len(caught.value.searched) == 5


def test_does_not_pass_over_an_explicit_place(places: dict[str, Path]) -> None:
    make_server(places["bundled"])
    with pytest.raises(TritonServerNotFoundError, match="the explicit setting names, but there is no such folder"):
        find_tritonserver(places["explicit"])
    with pytest.raises(TritonServerNotFoundError, match=f"{ENVIRONMENT_VARIABLE} names, but there is no such folder"):
        find_tritonserver()


def test_rejects_a_file_that_cannot_be_executed(places: dict[str, Path]) -> None:
    make_server(places["explicit"], mode=0o644)
    with pytest.raises(TritonServerNotFoundError, match="not executable"):
        find_tritonserver(places["explicit"])


def test_follows_a_link_on_path_to_the_server(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    real = make_server(places["path"].parent / "real")
    (places["path"] / "bin").mkdir(parents=True)
    (places["path"] / "bin" / "tritonserver").symlink_to(real / "bin" / "tritonserver")
    assert find_tritonserver().executable == real / "bin" / "tritonserver"


def test_makes_relative_and_home_paths_absolute(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_server(places["explicit"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_tritonserver("explicit").executable == places["explicit"] / "bin" / "tritonserver"
    assert find_tritonserver("~/explicit").executable == places["explicit"] / "bin" / "tritonserver"


def test_names_the_library_folder_only_if_there_is_one(places: dict[str, Path]) -> None:
    make_server(places["explicit"])
    assert find_tritonserver(places["explicit"]).library_dirs == ()
    (places["explicit"] / "lib").mkdir()
    assert find_tritonserver(places["explicit"]).library_dirs == (places["explicit"] / "lib",)


def test_environment_puts_this_interpreter_first_and_leaves_its_base_alone(places: dict[str, Path]) -> None:
    make_server(places["explicit"])
    base = {"PATH": "/usr/bin:/bin", "KEPT": "1"}
    environment = find_tritonserver(places["explicit"]).environment(base)
    assert base == {"PATH": "/usr/bin:/bin", "KEPT": "1"}
    assert environment["KEPT"] == "1"
    asked = subprocess.run(
        ["/bin/sh", "-c", "python3 -c 'import sys; print(sys.prefix)'"], env=environment, capture_output=True, text=True
    )
    assert asked.stdout.strip() == sys.prefix


def test_the_bundled_server_loads_all_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    if not binary.BUNDLED_FOLDER.is_dir():
        pytest.skip("this installation was built with PYTRITON_BUNDLE_TRITONSERVER=0")
    found = find_tritonserver()
    assert found.origin == "the server that came with pytriton-server"
    without_libraries = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    started = subprocess.run(
        [str(found.executable), "--help"], env=found.environment(without_libraries), capture_output=True, text=True
    )
    assert "--backend-directory" in started.stdout + started.stderr
    assert (found.backends_dir / "python" / "libtriton_python.so").is_file()
    assert (found.caches_dir / "local" / "libtritoncache_local.so").is_file()
