"""The steps of the Dockerfile, where there is no container engine: in folders of the test, and a mount name space.

Not tried here: the base images, and the user of the image, whom this machine's interpreter may not be readable for.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.http import call
from support.paths import ROOT
from support.processes import free_ports, require
from support.waiting import eventually

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
# A process of its own that is the first one, on a file system that it can write to in one place only.
READ_ONLY = """
mount --make-rprivate / && mount -t tmpfs -o mode=0700 tmpfs {home} && mount -o remount,bind,ro / || exit 99
touch {root}/written 2> /dev/null && exit 98
exec {entrypoint}
"""


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments in one line."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.partition(" ")[0], " ".join(line.partition(" ")[2].split())) for line in lines]


def ignored(folder: str, names: Sequence[str]) -> set[str]:
    """What .dockerignore keeps out of the folder packages/."""
    left_out = {"__pycache__", "_lib", "_tritonserver"} | {name for name in names if name.endswith(".so")}
    return left_out | ({"tests"} if Path(folder).parent.name == "packages" else set())


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        yield Path(folder)


@pytest.mark.ci
@pytest.mark.timeout(3600)
def test_the_image_is_built_and_serves_on_a_read_only_file_system(tmp_path: Path, home: Path) -> None:
    require("unshare", "util-linux")
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may make no mount name space")
    steps = instructions()
    build, prefix = tmp_path / "build", tmp_path / "opt"
    shutil.copytree(ROOT / "packages", build / "packages", ignore=ignored)
    [install] = [text for name, text in steps if name == "RUN" and "pip install" in text]
    command = install.replace("/opt/pytriton", str(prefix)).replace("python -m venv", f"{sys.executable} -m venv")
    done = subprocess.run(["sh", "-ec", command], cwd=build, capture_output=True, text=True, check=False, env=outside())
    assert done.returncode == 0, done.stdout + done.stderr

    variables = dict(part.split("=", 1) for name, text in steps if name == "ENV" for part in shlex.split(text))
    assert variables["PYTRITON_HOME"] == "/run/pytriton"
    [entrypoint] = [text for name, text in steps if name == "ENTRYPOINT"]
    http, grpc, metrics = free_ports(3)
    words = [
        *json.loads(entrypoint),
        f"--http-port={http}",
        f"--grpc-port={grpc}",
        f"--metrics-port={metrics}",
        "--address=127.0.0.1",
    ]
    script = READ_ONLY.format(home=home, root=tmp_path, entrypoint=shlex.join(words))
    variables |= {"PATH": f"{prefix / 'bin'}:{os.environ['PATH']}", "PYTRITON_HOME": str(home)}
    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", script],
        cwd=ROOT / "deploy",
        env={**outside(), **variables},
        stdout=file,
        stderr=file,
    ) as namespace:  # fmt: skip
        eventually(lambda: "Serving." in log.read_text() or namespace.poll() is not None)
        assert namespace.poll() is None, log.read_text()
        status, answer = call(
            f"http://127.0.0.1:{http}", "POST", "/v2/models/softmax/infer",
            {"inputs": [{"name": "logits", "shape": [1, 2], "datatype": "FP32", "data": [0, 0]}]},
        )  # fmt: skip
        assert (status, answer["outputs"][0]["data"]) == (200, [0.5, 0.5])
        [first] = Path(f"/proc/{namespace.pid}/task/{namespace.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
    assert namespace.returncode == 0, log.read_text()


def outside() -> dict[str, str]:
    """The environment without what steers this run."""
    steering = ("PYTRITON_", "PYTHON", "HATCH_", "VIRTUAL_ENV", "PYTEST_")
    return {name: value for name, value in os.environ.items() if not name.startswith(steering)}
