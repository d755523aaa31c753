"""The process of one instance of a Python model: loads its `model.py`, lets it serve, and lets it go."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ..model import python_model_spec
from ..process.messages import PythonModelJob, PythonModelServing
from ..runtime.records import RecordHandler
from ..runtime.statistics import Counters
from ..runtime.texts import error_text, shortened
from ..system.escapes import escaped_lines
from ..system.parents import give_back_memory
from ..system.threads import call_safely
from ..wire.dtypes import carry_bf16_bits
from ..wire.errors import ProxyBackendError
from ..worker.worker import Worker
from .config import ModelConfig
from .errors import PythonModelError, TritonModelException, calls_model, told
from .execution import CoroutineLoop, ModelService
from .model_worker import ModelWorker
from .module import install
from .server import SERVER, Phase

logger = logging.getLogger(__name__)

_CLASS = "TritonPythonModel"


class Parent(Protocol):
    """The process that has started this one, see `process.messages`."""

    counters: Counters  # where it reads what the worker does

    def send(self, kind: str, **fields: object) -> object:
        """Send it a message."""

    def take_signals(self) -> None:
        """Make SIGTERM end the worker once it has answered its batches."""

    def wait_for_serve(self) -> Mapping[str, Any]:
        """Wait until the parent says which instance to serve."""

    def look_after(self, worker: Worker) -> bool:
        """Report a worker's state until it has ended; return whether it ended as ordered."""


class PythonModel:
    """A `model.py` and its `TritonPythonModel`."""

    def __init__(self, file: str, version: int, folder: str) -> None:
        self.file = file
        self._model: Any = None
        if not os.path.isfile(file):
            raise PythonModelError(f"Python model file not found in '{file}'")
        install(os.path.join(folder, str(version)))
        self._class = _loading(self._find_class, version)

    def _find_class(self, version: int) -> Any:
        module = _import_model(Path(self.file), str(version))
        return getattr(module, _CLASS)

    def complete(self, name: str, config_text: str) -> str | None:
        """Let the model complete its configuration; return it, or `None` if the model has no method for that."""
        complete = getattr(self._class, "auto_complete_config", None)
        if complete is None:
            return None
        config = _loading(complete, ModelConfig(config_text))
        if not isinstance(config, ModelConfig):
            raise PythonModelError(
                f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig object."
            )
        return json.dumps(config.as_dict())

    def initialize(self, args: Mapping[str, str]) -> None:
        """Make the model, and call its `initialize`."""
        self._model = _loading(self._class)
        if hasattr(self._model, "initialize"):
            _loading(self._model.initialize, dict(args))

    @property
    def execute(self) -> Callable[..., Any] | None:
        """The `execute` method; `None` if the model has none."""
        found: Callable[..., Any] | None = getattr(self._model, "execute", None)
        return found

    @property
    def tells_readiness(self) -> bool:
        """Whether the model has a method that says whether it is ready."""
        return hasattr(self._model, "is_ready")

    @calls_model
    def is_ready(self, loop: CoroutineLoop) -> tuple[bool, str]:
        """Ask the model whether it is ready; return the answer, and an error text, which is empty if nothing failed."""
        try:
            answer = self._model.is_ready()
            if isinstance(answer, Coroutine):
                answer = loop.run(answer)
        except BaseException as error:
            # SystemExit and KeyboardInterrupt of the model count as "not ready"; they do not end the host.
            return False, told(error)
        return (answer, "") if isinstance(answer, bool) else (False, "is_ready() must return a boolean value")

    @calls_model
    def finalize(self) -> None:
        """Call the `finalize` of the model; log what it raises."""
        if not hasattr(self._model, "finalize"):
            return
        try:
            self._model.finalize()
        except BaseException as error:
            # SystemExit and KeyboardInterrupt make no difference, because the host ends now.
            logger.error("finalize failed: %s", escaped_lines(told(error)))


@calls_model
def _loading(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run code of the model; anything that it raises, `SystemExit` included, becomes a PythonModelError."""
    try:
        return function(*arguments)
    except PythonModelError:
        raise
    except BaseException as error:
        raise PythonModelError(told(error)) from error


def _import_model(file: Path, version: str) -> ModuleType:
    """Import a model as a module of a package named after its version.

    Relative imports find the files beside it; absolute ones also find those in the model's folder.
    """
    folder = file.parent
    sys.path += [str(folder), str(folder.parent)]
    initial = folder / "__init__.py"
    if initial.is_file():
        spec = importlib.util.spec_from_file_location(version, initial, submodule_search_locations=[str(folder)])
        assert spec is not None
        assert spec.loader is not None
        package = sys.modules[version] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    else:
        # The import system might find another folder of this name on the path.
        package = sys.modules[version] = ModuleType(version)
        package.__path__ = [str(folder)]
    # The built-in function, because importlib would add a frame to every traceback.
    module: ModuleType = __import__(f"{version}.{file.stem}", fromlist=[file.stem])
    return module


def answer_readiness(model: PythonModel, loop: CoroutineLoop) -> None:
    """Answer the server whenever it asks whether a model is ready, until the connection for calls ends."""
    number, is_ready, failure = 0, False, ""
    with contextlib.suppress(ProxyBackendError, TritonModelException):
        while True:
            number = SERVER.calls().next_readiness_question(number, is_ready, failure)
            try:
                if SERVER.phase is Phase.SERVING:
                    is_ready, failure = model.is_ready(loop)
                    failure = shortened(failure)
            except Exception as error:
                # The server waits for an answer, and asks again.
                is_ready, failure = False, f"the model cannot be asked: {type(error).__name__}: {error}"
            if SERVER.phase is not Phase.SERVING:
                # It has no say any more: where it sleeps the server knows that it is ready, and else that it is not.
                is_ready, failure = True, ""


def _log_ours(level: int, send: Callable[..., object]) -> None:
    """Log the records of this package; the root of all loggers is the model's, which may set it up as it likes."""
    ours = logging.getLogger("pytriton")
    ours.addHandler(RecordHandler(send))
    ours.setLevel(level)
    ours.propagate = False
    # Handles the log records of a model that configures no logging; Python would print warnings to standard error.
    last = logging.lastResort = RecordHandler(send)
    last.setLevel(max(level, logging.WARNING))


def run_host(fields: Mapping[str, Any], parent: Parent) -> int:
    """Be the host of a model until its end, in the main thread; return the exit code."""
    job = PythonModelJob.from_fields(fields)
    _log_ours(job.log_level, parent.send)
    # A model that reads the command line must not see that of this process; in Triton's stub it is empty, too.
    sys.argv = [""]
    carry_bf16_bits(job.model_file)
    model = PythonModel(job.model_file, job.model_version, job.model_dir)
    if job.auto_complete:
        config = model.complete(job.model_name, job.model_config)
        parent.send("configured", config=config or "", changed=config is not None)
    serve = job.serve or PythonModelServing(**parent.wait_for_serve())
    name = serve.args["model_instance_name"]
    SERVER.set_endpoint(Path(serve.endpoint), name, serve.name)
    model.initialize(serve.args)
    SERVER.phase = Phase.SERVING
    config = json.loads(serve.args["model_config"])
    service = ModelService(
        model.execute,
        job.model_file,
        name,
        python_model_spec(job.model_name, job.model_version, config),
        parent.counters,
        [output["name"] for output in config.get("output", ())],
    )
    if model.tells_readiness:
        threading.Thread(
            target=answer_readiness, args=(model, service.loop), name="pytriton-readiness", daemon=True
        ).start()
    worker = ModelWorker(service, serve.endpoint, serve.name)
    worker.log_attachment_at(logging.DEBUG)
    ended_well: list[bool] = []

    def look() -> None:
        try:
            ended_well.append(parent.look_after(worker))
        except BaseException as error:
            # The worker cannot be told to stop any more, so this process ends, and the parent starts another one.
            call_safely(
                parent.send, "failed", stage="worker", error=type(error).__name__, text=error_text(error), traceback=""
            )
            worker.stop(0.0)

    looking = threading.Thread(target=look, name="pytriton-parent-told")
    parent.take_signals()
    give_back_memory()
    worker.run(looking.start)
    SERVER.phase = Phase.FINALIZING
    # Requests in flight have as long as they need, `finalize` has not.
    parent.send("finalizing")
    service.loop.stop()
    model.finalize()
    SERVER.close()
    looking.join()
    if ended_well == [True]:
        parent.send("done")
        return 0
    return 1
