"""Functions of this process as models of a server: what `Server.bind` does."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pytriton.decorators import TritonContext
from pytriton.inprocess.callables.backend import MODEL_FILE, load_backend
from pytriton.inprocess.callables.bind_errors import AlreadyBoundError, NotBoundError
from pytriton.inprocess.callables.bound import BoundCallables
from pytriton.inprocess.capi.enums import ModelControlMode
from pytriton.inprocess.capi.errors import InvalidArgumentError, TimedOutError
from pytriton.inprocess.server.model import Model
from pytriton.model_config import DeviceKind, ModelConfig, Tensor
from pytriton.model_config.generator import ModelConfigGenerator
from pytriton.proxy_backend import INPROCESS_BACKEND_NAME
from pytriton.server.lifecycle.background import begin
from pytriton.server.models.bound_model import BoundModel, InferFunc, calling_model
from pytriton.server.models.process_workers import ProcessWorker
from pytriton.server.observe.tracing import ModelTracing

if TYPE_CHECKING:
    from pytriton.inprocess.server.server import Server

__all__ = ["Bindings"]

logger = logging.getLogger(__name__)

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.02


class Bindings:
    """The bound models of one `Server`. They outlast its stop: the next start serves them again.

    Args:
        server: The server.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = threading.RLock()
        self._models: dict[tuple[str, int], BoundCallables] = {}
        self._context = TritonContext()
        # Names that the running server has got from here, whatever became of them.
        self._loaded: set[str] = set()

    def bind(
        self,
        model_name: str,
        infer_func: InferFunc | Sequence[InferFunc],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        model_version: int = 1,
        config: ModelConfig | None = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
        copy_inputs: bool = False,
    ) -> Model:
        """See `Server.bind`."""
        bound = BoundModel(
            name=model_name,
            infer_func=infer_func,
            inputs=inputs,
            outputs=outputs,
            version=model_version,
            config=ModelConfig() if config is None else config,
            strict=strict,
            triton_context=self._context,
            tracing=None,
        )
        for infer in bound.callables:
            if isinstance(infer, ProcessWorker):
                raise InvalidArgumentError(
                    f"Model {bound.name!r}: expected callables of this process, received {infer!r}. A server in "
                    "process calls them directly; use pytriton.triton.Triton for callables in processes of their own.",
                    expected="a callable, or a sequence of callables",
                    received=infer,
                    where=f"model {bound.name!r}",
                )
        model = BoundCallables(bound, ModelTracing(trace_config), bool(copy_inputs))
        self._refuse_polling(bound.name)
        with self._lock:
            self._refuse_conflict(model)
            running = self._server._session is not None
            if running:
                self._refuse_listed(bound.name)
            self._models[bound.key] = model
            bound.publish()
            if running:
                try:
                    self._load(bound.name)
                except BaseException as error:
                    self._forget(model)
                    self._restore(bound.name)
                    if model.warmup_error is not None:
                        raise error from model.warmup_error
                    raise
        return Model(self._server, bound.name, bound.version)

    def unbind(self, model_name: str, model_version: int | None = None, *, timeout_s: float = 30.0) -> None:
        """See `Server.unbind`."""
        caller = calling_model(self._context)
        if caller is not None and caller.name == model_name and model_version in (None, caller.version):
            begin("unbind", lambda: self.unbind(model_name, model_version, timeout_s=timeout_s), daemon=False)
            return
        with self._lock:
            gone = [
                model
                for model in self._models.values()
                if model.bound.name == model_name and model_version in (None, model.bound.version)
            ]
            if not gone:
                version = "" if model_version is None else f" version {model_version}"
                names = ", ".join(sorted({repr(model.bound.name) for model in self._models.values()})) or "none"
                raise NotBoundError(
                    f"No callable is bound as model {model_name!r}{version}; bound are: {names}.",
                    expected="a bound model",
                    received=model_name,
                    where=f"model {model_name!r}",
                )
            for model in gone:
                self._forget(model)
            if self._server._session is None:
                return
            if any(model.bound.name == model_name for model in self._models.values()):
                self._load(model_name)
            else:
                self._server._unload(model_name)
            self._await_unloaded(gone, timeout_s)

    # ---- for the server ---------------------------------------------------------------------------------------------

    def on_started(self) -> None:
        """Load what was bound before the start.

        Raises:
            AlreadyBoundError: If a repository has a model of the name of a bound one.
            TritonError: If a model does not load, as when its warm-up fails.
        """
        with self._lock:
            self._loaded = set()
            names = list(dict.fromkeys(model.bound.name for model in self._models.values()))
            for name in names:
                self._refuse_polling(name)
                self._refuse_listed(name)
            for name in names:
                self._load(name)

    def are_calling(self) -> bool:
        """Tell whether a bound callable runs in this thread or task."""
        return calling_model(self._context) is not None

    def busy(self) -> list[str]:
        """Say which bound callables are at a batch, and where in their code. From any thread."""
        return [text for model in list(self._models.values()) for text in model.busy()]

    # -----------------------------------------------------------------------------------------------------------------

    def _load(self, name: str) -> None:
        """Make Triton load all bound versions of a name, and forget those that are not bound any more."""
        backend = load_backend()
        models = [model for model in self._models.values() if model.bound.name == name]
        parameters: dict[str, str | int | bool | bytes] = {"config": _config(models[-1])}
        for model in models:
            if model.number is None:
                model.number = backend.add_model(model)
            parameters[f"file:{model.bound.version}/{MODEL_FILE}"] = str(model.number).encode()
        self._loaded.add(name)
        self._server._running().describe_busy = self.busy
        self._server._load(name, parameters)

    def _restore(self, name: str) -> None:
        """After a failure: the versions that were there before are served as before, or nothing is left of the name."""
        try:
            if any(model.bound.name == name for model in self._models.values()):
                self._load(name)
            else:
                self._server._unload(name)
        except Exception as error:
            logger.warning("model %s: what was left of it after a failed bind could not be cleared: %s", name, error)

    def _forget(self, model: BoundCallables) -> None:
        self._models.pop(model.bound.key, None)
        model.bound.unpublish()
        if model.number is not None:
            load_backend().remove_model(model.number)
            model.number = None

    def _await_unloaded(self, models: Sequence[BoundCallables], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while busy := [model for model in models if model.is_loaded]:
            if time.monotonic() >= deadline:
                left = ", ".join(f"{model.bound.name!r} version {model.bound.version}" for model in busy)
                raise TimedOutError(
                    f"Expected the requests of the unbound model {left} to be answered within {timeout_s:g} s, which "
                    "they are not. It takes no new ones, and goes when they are.",
                    expected=f"unloaded within {timeout_s:g} s",
                    received="still loaded",
                    where=f"model {busy[0].bound.name!r}",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _refuse_polling(self, name: str) -> None:
        session = self._server._session
        mode = self._server.options.model_control_mode if session is None else session.control_mode
        if mode is ModelControlMode.POLL:
            raise InvalidArgumentError(
                f"Model {name!r}: expected a server in model control mode NONE or EXPLICIT, got POLL: a server that "
                "polls its repositories serves nothing but what it finds there.",
                expected="NONE or EXPLICIT",
                received=mode,
                where=f"model {name!r}",
            )

    def _refuse_conflict(self, model: BoundCallables) -> None:
        bound = model.bound
        other = self._models.get(bound.key)
        if other is not None:
            raise AlreadyBoundError(
                f"Cannot add model with the same name twice. There is a bound model {other.bound.name!r} of version "
                f"{bound.version} already: choose another name or version (names that differ only in case count as "
                "the same), or call unbind() first.",
                expected="a name and version that is free",
                received=bound.name,
                where=f"model {bound.name!r}",
            )
        for other in self._models.values():
            if other.bound.name != bound.name:
                continue
            differences = bound.differences(other.bound)
            if len(other.bound.callables) != len(bound.callables):
                differences.append("the number of callables")
            if differences:
                raise AlreadyBoundError(
                    f"Model {bound.name!r}: version {bound.version} differs from version {other.bound.version} in "
                    f"{', '.join(differences)}, but Triton keeps one description for all versions of a name. Bind it "
                    "under another name.",
                    expected="the same description as the other versions have",
                    received=", ".join(differences),
                    where=f"model {bound.name!r}",
                )

    def _refuse_listed(self, name: str) -> None:
        """Refuse to take the place of a model that is not from here."""
        if name in self._loaded:
            return
        if self._server._running().is_listed(name):
            raise AlreadyBoundError(
                f"Model {name!r}: expected a name that no model has, but the server has one of the name from a "
                "repository or from load(). Choose another name, or unload that model and remove it.",
                expected="a name that is free",
                received=name,
                where=f"model {name!r}",
            )


def _config(model: BoundCallables) -> str:
    # The warm-up is done by the runners, as in a worker.
    config = dataclasses.replace(
        model.bound.triton_config,
        model_warmup=None,
        instance_group={DeviceKind.KIND_CPU: len(model.bound.callables)},
    )
    fields: Mapping[str, object] = {**ModelConfigGenerator(config).get_config(), "backend": INPROCESS_BACKEND_NAME}
    return json.dumps(fields)
