"""Models that name the environment of their Python."""

from __future__ import annotations

import os
import tarfile
import venv
from pathlib import Path

import numpy as np
import pytest

from pytriton.client import ModelClient
from support.python_models import HEAD, served, write
from support.waiting import PATIENCE_S

MODEL = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        told = json.dumps([os.environ["OF_THE_MODEL"], os.environ["VIRTUAL_ENV"], np.__file__])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([told], object))]) for _ in requests]
"""
)
TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: -1 }\noutput { name: "y" data_type: TYPE_STRING dims: -1 }\n'


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing but numpy."""
    folder = tmp_path_factory.mktemp("python") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    installed = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    with (folder / "bin" / "activate").open("a") as script:
        script.write("\nexport OF_THE_MODEL=yes\n")
    return folder


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_a_model_runs_in_its_environment(packed: bool, environment: Path, tmp_path: Path) -> None:
    name = "env.tar.gz" if packed else "env"
    parameters = (
        'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/' + name + '" } }\n'
    )
    two = "instance_group { count: 2 kind: KIND_CPU }\n"
    folder = write(tmp_path / "models", "apart", MODEL, f'backend: "python"\n{TENSORS}{parameters}{two}').parent
    if packed:
        with tarfile.open(folder / name, "w") as tar:
            tar.add(environment, ".", filter=lambda member: None if "site-packages/numpy" in member.name else member)
            # Links that lead out of the environment are refused, but for those of its interpreter.
            for link in environment.glob("lib/python3*/site-packages/numpy*"):
                tar.add(link.resolve(), link.relative_to(environment))
    else:
        (folder / name).symlink_to(environment, target_is_directory=True)
    before = set(folder.rglob("*"))
    with served(tmp_path / "models") as triton:
        with ModelClient(str(triton.http_url), "apart", inference_timeout_s=PATIENCE_S) as client:
            answer = client.infer_sample(x=np.zeros(1, np.float32))["y"][0].decode()
        assert '"yes"' in answer
        assert os.path.dirname(np.__file__) not in answer
        if not packed:
            assert f"{environment}/lib/" in answer
    assert set(folder.rglob("*")) == before


def test_an_environment_that_is_not_there_is_a_load_error(tmp_path: Path) -> None:
    parameters = 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/no/such/env" } }\n'
    write(tmp_path, "apart", MODEL, f'backend: "python"\n{TENSORS}{parameters}')
    with served(tmp_path, exit_on_error=False) as triton:
        states = {state.name: state for state in triton._server.server.control.index()}  # type: ignore[union-attr]
        assert states["apart"].reason == "Internal: Failed to get the canonical path for /no/such/env."


def test_an_environment_without_numpy_says_so(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    parameters = f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{tmp_path}/env" }} }}\n'
    write(tmp_path / "models", "apart", MODEL, f'backend: "python"\n{TENSORS}{parameters}')
    with served(tmp_path / "models", exit_on_error=False) as triton:
        states = {state.name: state for state in triton._server.server.control.index()}  # type: ignore[union-attr]
        assert "expected numpy in its environment, received No module named 'numpy'" in str(states["apart"].reason)
