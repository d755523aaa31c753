"""Models for Triton's Python backend, served by workers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pytriton.client import ModelClient
from pytriton.triton import Triton
from support.http import call
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

HEAD = "import json\nimport os\nimport time\n\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n"
EXECUTE = """
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if x[0] == 13:
                os._exit(3)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", FACTOR * x)]))
        return responses
"""
MODEL = HEAD + "FACTOR = np.float32(2)\n\n\nclass TritonPythonModel:" + EXECUTE
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
CONFIG = f'backend: "python"\n{TENSORS}'


def write(repository: Path, name: str, model: str, config: str = CONFIG, version: int = 1) -> Path:
    """Write a model; return the folder of its version."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(model)
    (folder.parent / "config.pbtxt").write_text(config)
    return folder


@contextlib.contextmanager
def served(repository: Path, **settings: Any) -> Iterator[Triton]:
    """Serve a repository with workers."""
    options = {name: settings.pop(name, None) for name in ("restart", "memory_budget")}
    settings = {"python_models": "workers", "model_repository": repository, **settings}
    with short_home(), running(Triton(config=local_config(**settings), **options)) as triton:
        yield triton


def infer(triton: Triton, model: str, *values: float, version: int | None = None) -> list[float]:
    """Return what a model makes of some values."""
    with ModelClient(str(triton.http_url), model, str(version or "") or None, inference_timeout_s=PATIENCE_S) as client:
        answer: list[float] = client.infer_sample(x=np.array(values, np.float32))["y"].tolist()
        return answer


def stop_while_asked(triton: Triton, model: str, begun: Path) -> list[list[float]]:
    """Stop a server while a model is at a request with 13, when it has written a file; return what the caller got."""
    answers: list[list[float]] = []
    caller = threading.Thread(target=lambda: answers.append(infer(triton, model, 13)))
    caller.start()
    eventually(begun.exists)
    triton.stop()
    caller.join()
    return answers


def ask(triton: Triton, action: str, model: str) -> tuple[int, Any]:
    """Load or unload a model by a call; return status and answer."""
    headers = {"triton-access-token": str(triton.get_access_token())}
    return call(triton.http_url, "POST", f"/v2/repository/models/{model}/{action}", {}, headers)


def hosts(parent: int | None = None) -> dict[int, str]:
    """Return the processes that run a `model.py`, with their command lines: of this program, or another process."""
    found = processes("pytriton.proxy_backend.worker_main", parent or os.getpid())
    for forkserver in forkservers(parent):
        found |= processes("pytriton.proxy_backend.worker_main", forkserver)
    return found


def forkservers(parent: int | None = None) -> dict[int, str]:
    """Return the processes that such processes are forked from, with their command lines."""
    return processes("pytriton.proxy_backend.forkserver_main", parent or os.getpid())


def parent_processes(program: int | None = None) -> set[int]:
    """Return the processes that the workers of a program are forked from, and those that these are forked from."""
    found = set(processes("proxy_backend.parent_main", program or os.getpid()))
    return found.union(*(processes("proxy_backend.parent_main", pid) for pid in found))


def worker_processes(program: int | None = None) -> set[int]:
    """Return the worker processes of a program, those that are forked from a parent included."""
    above = {program or os.getpid(), *parent_processes(program)}
    return {worker for pid in above for worker in processes("proxy_backend.worker_main", pid)}


def is_asleep(triton: Triton, name: str = "m") -> bool:
    """Whether a model sleeps, and all worker processes are gone."""
    (model,) = [model for model in triton.describe().models if model.name == name]
    return model.is_asleep and not worker_processes()


def processes(module: str, parent: int) -> dict[int, str]:
    """Return the children of a process that run a module, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            above = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
            if int(above) == parent and module in command:
                found[int(folder.name)] = command
    return found
