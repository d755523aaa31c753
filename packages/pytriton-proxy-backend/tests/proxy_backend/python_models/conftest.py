"""A model from its source text, served to a scripted proxy backend."""

import asyncio
import json
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytriton.proxy_backend.model import python_model_spec
from pytriton.proxy_backend.python_models.execution import ModelService
from pytriton.proxy_backend.python_models.host import PythonModel
from pytriton.proxy_backend.python_models.model_worker import ModelWorker
from pytriton.proxy_backend.python_models.module import install
from pytriton.proxy_backend.runtime.statistics import Counters
from pytriton.proxy_backend.wire import dtypes
from support.waiting import PATIENCE_S, eventually

MakeModel = Callable[..., PythonModel]
BATCHING, DECOUPLED = 1, 2
CAPABILITIES = 1 | 2 | 8  # DECOUPLED, CANCEL, RESCHEDULE


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a host changes in its process, it changes for good."""
    before = dict(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(dtypes, "_NUMPY_OF_CODE", dict(dtypes._NUMPY_OF_CODE))
    yield
    for name in set(sys.modules) - set(before):
        if name in ("triton_python_backend_utils", "c_python_backend_utils") or name.split(".")[0].isdigit():
            del sys.modules[name]


@pytest.fixture
def _bits() -> Iterator[None]:
    dtypes.carry_bf16_bits("test")
    yield
    dtypes.release_bf16_bits("test")


@pytest.fixture
def utils(_modules: None, _bits: None) -> ModuleType:
    """The module that models import."""
    return install("/repository/model/1")


@pytest.fixture
def make_model(_modules: None, _bits: None, tmp_path: Path) -> MakeModel:
    """Loads a model from its source text."""

    def make(source: str, version: int = 1, **files: str) -> PythonModel:
        folder = tmp_path / "model" / str(version)
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        file = folder / "model.py"
        file.write_text(textwrap.dedent(source))
        return PythonModel(str(file), version, str(folder.parent))

    return make


@pytest.fixture
def serve(make_model: MakeModel, proxy: Any) -> Iterator[Callable[..., Any]]:
    """Serves a model from its source text, and gives the proxy backend's end of its connection."""
    made = []

    def start(
        source: str, *, config: dict[str, Any] | None = None, capabilities: int = CAPABILITIES, **files: str
    ) -> Any:
        config = {"name": "model", "max_batch_size": 8, **(config or {})}
        model = make_model(source, **files)
        model.initialize({"model_config": json.dumps(config), "model_instance_name": "model_0_0"})
        spec = python_model_spec("model", 1, config)
        service = ModelService(model.execute, model.file, "model_0_0", spec, Counters(), ["y", "z"])
        worker = ModelWorker(service, str(proxy.endpoint), "host")
        thread = threading.Thread(target=worker.run, args=(lambda: None,))
        made.append((worker, thread, service))
        proxy.listen()
        thread.start()
        peer = proxy.accept()
        peer.hello = peer.welcome(
            model_flags=BATCHING * spec.batching | DECOUPLED * spec.decoupled, capabilities=capabilities
        )
        peer.worker = worker
        peer.service = service
        return peer

    yield start
    proxy.close()
    for worker, thread, service in made:
        assert worker.stop(PATIENCE_S)
        service.loop.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert worker.error is None
    eventually(lambda: not any(thread.name == "pytriton-coroutines" for thread in threading.enumerate()))
    for _, _, service in made:
        if service.loop._loop is not None:
            service.loop._loop.close()
            asyncio.set_event_loop(None)
