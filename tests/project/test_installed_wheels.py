"""What a user gets: the built distributions in environments that know nothing of this checkout."""

import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from pytriton.proxy_backend.python_proxy.bundle import BUNDLE_NAME, read_bundle
from support.paths import ROOT, load_program
from support.waiting import eventually

pytestmark = [pytest.mark.slow(seconds=100), pytest.mark.timeout(3600)]


SERVE = """\
import sys

import numpy as np
from numpy.typing import NDArray

from pytriton.client import ModelClient
from pytriton.decorators import batch, model
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.triton import Triton, TritonConfig


@batch
def double(x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    return {"y": x * 2}


@model(max_batch_size=8)
def shout(text: str, times: int = 1) -> str:
    return text.upper() * times


def main() -> None:
    loud: str = shout("a", times=2)
    config = TritonConfig(http_address="127.0.0.1", http_port=0, grpc_address="127.0.0.1", grpc_port=0, metrics_port=0)
    with Triton(config=config) as triton:
        triton.bind(
            model_name="double",
            infer_func=double,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(-1,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(max_batch_size=8),
        )
        triton.bind(shout)
        triton.bind("again", shout)
        for url in (triton.http_url, triton.grpc_url):
            assert url is not None
            with ModelClient(url, "double") as client:
                result = client.infer_batch(np.array([[1, 2, 3]], dtype=np.float32))
            print(url.partition(":")[0], result["y"].tolist())
    print("python", sys.version_info[:2])
    print("server", find_tritonserver().executable)


if __name__ == "__main__":
    main()
"""

MISUSE = """\
from pytriton.client import ModelClient
from pytriton.decorators import model
from pytriton.model_config import ModelConfig
from pytriton.triton import Triton

ModelClient(8000, "double")
ModelConfig(max_batch_size="8")
Triton().bind(model_name=1, infer_func=print, inputs=[], outputs=[])
model(max_batch_size="8")


@model
def shout(text: str) -> str:
    return text.upper()


shout(1)
"""


def user_environment() -> dict[str, str]:
    """Return the variables without those that steer ours, Python's or hatch's own behaviour."""
    steering = ("PYTRITON_", "PYTHON", "HATCH_", "VIRTUAL_ENV", "PYTEST_", "COVERAGE")
    return {name: value for name, value in os.environ.items() if not name.startswith(steering)}


def run(
    command: Sequence[object], *, cwd: Path, timeout_s: float = 1200, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**user_environment(), **(extra or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Make a folder once for all worker processes of a run; it holds what the given function puts into it."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        folder = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                fresh = shared / f"{name}.unfinished"
                fresh.mkdir()
                fill(fresh)
                fresh.rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def dev() -> types.ModuleType:
    """The module of tools/dev.py, which is a program and not installed."""
    return load_program(ROOT / "tools" / "dev.py")


@pytest.fixture(scope="module")
def docs() -> types.ModuleType:
    """The module that runs the pages of the documentation."""
    return load_program(ROOT / "tests" / "project" / "test_docs.py")


@pytest.fixture(scope="session")
def built(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A folder with the sdists of all distributions and the wheels built of them, with the one command."""

    def build(folder: Path) -> None:
        done = run([sys.executable, "tools/dev.py", "build", folder], cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr

    return once("built", build)


@pytest.fixture(scope="session")
def other_python(dev: types.ModuleType) -> Path:
    """An interpreter of another version than this one, if the machine has one."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    versions = [version for version in reversed(dev.MATRIX_PYTHONS) if version != running]
    found = (dev.find_python(version) for version in versions)
    return next((Path(path) for path in found if path is not None), Path(sys.executable))


@pytest.fixture(scope="session")
def user_python(once: Callable[[str, Callable[[Path], None]], Path], built: Path, other_python: Path) -> Path:
    """The interpreter of a virtual environment with the built wheels and what they depend on, and nothing else."""

    def install(folder: Path) -> None:
        made = run([other_python, "-m", "venv", "--without-pip", folder / "venv"], cwd=folder)
        assert made.returncode == 0, made.stderr
        wheels = sorted(built.glob("*.whl"))
        pip = [sys.executable, "-m", "pip", "--python", folder / "venv" / "bin" / "python"]
        done = run([*pip, "install", "--quiet", "--no-compile", *wheels], cwd=folder)
        assert done.returncode == 0, done.stderr

    return once("user", install) / "venv" / "bin" / "python"


def test_one_command_builds_a_wheel_and_an_sdist_of_each(built: Path) -> None:
    names = sorted(path.name for path in built.iterdir())
    dists = ["client", "decorators", "proxy_backend", "server"]
    assert [name.split("-")[0] for name in names if name.endswith(".whl")] == [f"pytriton_{dist}" for dist in dists]
    assert [name.split("-")[0] for name in names if name.endswith(".tar.gz")] == [f"pytriton_{dist}" for dist in dists]


def test_wheels_hold_their_binaries_and_name_a_platform(built: Path) -> None:
    server = zipfile.ZipFile(next(built.glob("pytriton_server-*.whl")))
    executable = server.getinfo("pytriton/server/_tritonserver/bin/tritonserver")
    assert (executable.external_attr >> 16) & 0o777 == 0o755
    names = server.namelist()
    assert any(name.startswith("pytriton/server/_tritonserver/licenses/") for name in names)
    assert any(name.endswith(".dist-info/licenses/NOTICE") for name in names)
    assert any(name.endswith(".dist-info/licenses/licenses/LGPL-2.1.txt") for name in names)
    [bill] = [name for name in names if ".dist-info/sboms/" in name]
    described = json.loads(server.read(bill))
    assert (described["bomFormat"], described["metadata"]["component"]["name"]) == ("CycloneDX", "pytriton-server")
    [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
    assert "License-Expression: Apache-2.0 AND BSD-2-Clause AND " in server.read(metadata).decode()
    assert not any("libpython" in name for name in names)
    proxy = zipfile.ZipFile(next(built.glob("pytriton_proxy_backend-*.whl")))
    assert "pytriton/proxy_backend/_lib/libtriton_pytriton.so" in proxy.namelist()
    assert "pytriton/proxy_backend/_lib/libtriton_pytriton_inprocess.so" in proxy.namelist()
    assert "pytriton/proxy_backend/_accelerator.abi3.so" in proxy.namelist()
    assert proxy.read(f"pytriton/proxy_backend/python_proxy/{BUNDLE_NAME}") == read_bundle()
    for wheel in (server, proxy):
        assert Path(str(wheel.filename)).stem.split("-")[2:4] == ["py3", "none"]
        assert not Path(str(wheel.filename)).stem.endswith("-any")


def test_no_wheel_holds_a_file_of_the_namespace_itself_but_the_command(built: Path) -> None:
    for wheel in built.glob("*.whl"):
        names = zipfile.ZipFile(wheel).namelist()
        files = [name for name in names if name.startswith("pytriton/") and name.count("/") == 1]
        assert files == (["pytriton/__main__.py"] if wheel.name.startswith("pytriton_server-") else [])


def test_the_command_runs_from_wheels(user_python: Path, tmp_path: Path) -> None:
    # With its interpreter, because the folder was renamed after pip wrote the path of it into the script.
    for command in ([user_python, "-m", "pytriton"], [user_python, user_python.parent / "pytriton"]):
        done = run([*command, "--version"], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "pytriton 0.1.0\n"), done.stderr
        done = run([*command, "example-add-sub", "--no-zip"], cwd=tmp_path, timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run([user_python, "-c", "import pytriton; print(pytriton.__file__)"], cwd=tmp_path)
    assert done.stdout == "None\n"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("arch", "elf_machine"), [("x86_64", 62), ("aarch64", 183)])
def test_release_wheels_are_for_old_and_for_other_machines(tmp_path: Path, arch: str, elf_machine: int) -> None:
    extra = {"PYTRITON_BUILD_ARCH": arch, "PYTRITON_BUILD_WITH_ZIG": "1"}
    done = run([sys.executable, "tools/dev.py", "build", tmp_path], cwd=ROOT, timeout_s=3000, extra=extra)
    assert done.returncode == 0, done.stdout + done.stderr
    binaries = {
        f"pytriton_proxy_backend-*-py3-none-manylinux_2_17_{arch}.whl": "proxy_backend/_lib/libtriton_pytriton.so",
        f"pytriton_server-*-py3-none-manylinux_2_35_{arch}.whl": "server/_tritonserver/bin/tritonserver",
    }
    for pattern, binary in binaries.items():
        header = zipfile.ZipFile(next(tmp_path.glob(pattern))).read(f"pytriton/{binary}")[:20]
        assert struct.unpack_from("<H", header, 18) == (elf_machine,)
    if shutil.which("readelf") is None:
        return
    with zipfile.ZipFile(next(tmp_path.glob("pytriton_proxy_backend-*.whl"))) as wheel:
        libraries = [Path(wheel.extract(name, tmp_path / "wheel")) for name in wheel.namelist() if ".so" in name]
    assert len(libraries) == 4
    for library in libraries:
        needed = run(["readelf", "--version-info", "--dynamic", library], cwd=tmp_path).stdout
        versions = {tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([0-9.]+)", needed)}
        # What the tag promises, and a C++ runtime of its own.
        assert versions, needed
        assert max(versions) <= (2, 17), library
        assert "libstdc++" not in needed


def test_wheels_in_an_empty_environment_serve_a_model(user_python: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    done = run([user_python, "serve.py"], cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "http [[2.0, 4.0, 6.0]]" in done.stdout
    assert "grpc [[2.0, 4.0, 6.0]]" in done.stdout
    server = next(line for line in done.stdout.splitlines() if line.startswith("server "))
    assert Path(server.removeprefix("server ")).is_relative_to(user_python.parent.parent)


@pytest.fixture
def user_page(user_python: Path, tmp_path: Path) -> dict[str, object]:
    """How a page of the documentation is run by somebody who has installed the wheels and nothing else."""
    programs = tmp_path / "programs"
    programs.mkdir()
    # With its interpreter, because the folder was renamed after pip wrote the path of it into the script.
    for name, words in (("pytriton", "-m pytriton"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{user_python}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    return {"python": user_python, "programs": programs, "environment": user_environment()}


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_pages_need_no_more_than_the_install_that_they_name(
    docs: types.ModuleType, user_page: dict[str, object], tmp_path: Path, page: str
) -> None:
    with docs.page(tmp_path, **user_page) as running:
        running.run_all(docs.BLOCKS[page])
    assert running.unrun == []


def test_a_project_is_served_and_reloaded_after_the_plain_install(
    docs: types.ModuleType, user_page: dict[str, object], tmp_path: Path
) -> None:
    with docs.page(tmp_path, **user_page) as running:
        done = run([user_page["python"], "-m", "pytriton", "init", "my-project"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "pytriton serve app.py" in done.stdout
        file = tmp_path / "my-project" / "app.py"
        running.start_server(file, ["pytriton", "serve", "app.py", "--reload", *docs.FREE_PORTS])
        port = running.server.ports["8000"]

        def answer() -> str:
            command = [user_page["python"], "-m", "pytriton", "infer", f"localhost:{port}", "shout", "text=Hello"]
            return run(command, cwd=tmp_path).stdout

        assert answer() == "output: HELLO\n"
        file.write_text(file.read_text().replace(".upper()", ".lower()"))
        eventually(lambda: answer() == "output: hello\n")
    # What takes more says what.
    done = run([user_page["python"], "-m", "pytriton", "console", "localhost:1"], cwd=tmp_path)
    assert done.returncode != 0
    assert "pytriton-server[console]" in done.stdout + done.stderr


def test_type_checkers_see_the_types_of_the_wheels(user_python: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    (tmp_path / "misuse.py").write_text(MISUSE)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", user_python]
    done = run([*mypy, "serve.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run([*mypy, "misuse.py"], cwd=tmp_path)
    assert [line.split(": ")[0] for line in done.stdout.splitlines() if "error:" in line] == [
        f"misuse.py:{line}" for line in (6, 7, 8, 9, 17)
    ], done.stdout


# --- nvidia-pytriton -----------------------------------------------------------------------------------------------

# What matters of NVIDIA's distribution: a regular package that imports its parts, some of which are named like ours.
NVIDIA_FILES = {
    "pytriton/__init__.py": "from . import client, model_config, triton\n",
    "pytriton/client/__init__.py": "",
    "pytriton/decorators.py": "",
    "pytriton/exceptions.py": "",
    "pytriton/model_config/__init__.py": "",
    "pytriton/triton.py": "from . import decorators, exceptions\n",
    "nvidia_pytriton-0.7.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: 0.7.0\n",
}


@pytest.fixture
def nvidia_wheel(tmp_path: Path) -> Path:
    path = tmp_path / "nvidia_pytriton-0.7.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in NVIDIA_FILES.items():
            wheel.writestr(name, text)
    return path


def unpack(wheels: Sequence[Path], folder: Path) -> None:
    """Put wheels into a folder as pip does, the later ones over the earlier ones; the bundled server is not needed."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if "/_tritonserver/" not in name])


@pytest.mark.parametrize("order", ["ours last", "nvidia last"])
def test_an_installed_nvidia_pytriton_is_named_in_the_error(
    built: Path, nvidia_wheel: Path, tmp_path: Path, order: str
) -> None:
    ours = sorted(built.glob("*.whl"))
    site = tmp_path / "site"
    unpack([nvidia_wheel, *ours] if order == "ours last" else [*ours, nvidia_wheel], site)
    children = sorted(path.name for path in (site / "pytriton").iterdir() if path.is_dir())
    assert {"client", "decorators", "exceptions", "model_config", "proxy_backend", "triton"} <= set(children)
    for child in children:
        code = f"import sys; sys.path.insert(0, {str(site)!r}); import pytriton.{child}"
        done = run([sys.executable, "-S", "-c", code], cwd=tmp_path)
        last_line = done.stderr.strip().splitlines()[-1]
        assert last_line.startswith("ImportError: Expected `pytriton` to be a namespace package"), (child, done.stderr)
        assert "pip uninstall nvidia-pytriton" in last_line
        assert str(site / "pytriton" / "__init__.py") in last_line
