"""The files of a server in its workspace: models, backends, links to folders of the user. Lost ones come back."""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pytriton.exceptions import PyTritonError, PyTritonInvalidOperationError
from pytriton.proxy_backend import BACKEND_NAME, ProxyBackendError, library_path
from pytriton.proxy_backend.errors import HostingError
from pytriton.proxy_backend.hosting.supervisor import HostSupervisor
from pytriton.proxy_backend.process.budget import MemoryBudget
from pytriton.proxy_backend.settings import read_duration
from pytriton.server.control.http import CALL_TIMEOUT_S, Control, ControlError
from pytriton.server.errors import TritonModelLoadError, WorkspaceError
from pytriton.server.lifecycle.deployment import Deployment
from pytriton.server.models.repository import ModelRepository
from pytriton.server.models.service import WorkerService
from pytriton.server.settings.config import WORKERS, TritonConfig
from pytriton.server.tritonserver.backends import make_backends, make_python_backend
from pytriton.server.tritonserver.binary import TritonServerBinary
from pytriton.server.tritonserver.command_line import ServerFolders
from pytriton.server.workspace import Workspace

# Pause between two attempts to restore a workspace.
_RESTORE_PAUSE_S = 10.0

logger = logging.getLogger(__name__)


class ServerFiles:
    """The files in the workspace of a server."""

    def __init__(
        self,
        workspace: Workspace,
        deployment: Deployment,
        linked: Iterable[Path],
        *,
        control: Callable[[], Control],
        log_tail: Callable[[], Sequence[str]],
        budget: MemoryBudget | None = None,
    ) -> None:
        self._workspace = workspace
        self._budget = budget
        self._repository = ModelRepository(workspace.model_store_path)
        self._deployment = deployment
        self.linked = {folder.name: folder for folder in linked}
        """The folders of models that are served as they are, by name."""
        self.supervisor: HostSupervisor | None = None
        """Runs the hosts of models for Triton's Python backend, if workers serve them."""
        self.folders: ServerFolders | None = None
        """The folders on the server's command line; None before `create`."""
        self.binary: TritonServerBinary | None = None
        """The server that they belong to; None before `create`."""
        self._control = control
        self._log_tail = log_tail
        # By name of the model: its configuration without hints, what was written, and the versions it was written for.
        self._written: dict[str, tuple[str, str, weakref.WeakSet[WorkerService]]] = {}
        # Held by a thread that changes the files of models, or makes the server load them.
        self._lock = threading.RLock()
        self._damaged_looks = 0
        self._restore_at = 0.0
        # Some were removed, and not all of them are back, or the server has not loaded its models from there.
        self._is_incomplete = False

    @property
    def are_lost(self) -> bool:
        """Whether somebody has removed some of them, and they have not come back."""
        return self._is_incomplete or self._workspace.is_damaged

    def create(self, binary: TritonServerBinary, config: TritonConfig) -> tuple[ServerFolders, dict[str, str]]:
        """Make the workspace, without the models that are bound."""
        workspace = self._workspace
        workspace.create()
        variables: dict[str, str] = {}
        # A user who serves models by their folders has not asked for Triton's own Python backend.
        if (config.python_models or (WORKERS if self.linked else "")).lower() == WORKERS:
            advice = "Set PYTRITON_HOME to a folder with a shorter path."
            idle = config.python_models_idle
            idle_timeout_s = None if idle is None else read_duration(idle)
            self.supervisor = HostSupervisor(
                workspace.hosts_path, advice, idle_timeout_s=idle_timeout_s, budget=self._budget
            )
            try:
                self.supervisor.start()
            except HostingError as error:
                raise WorkspaceError(str(error), path=error.path) from error
            variables = make_python_backend(workspace.backends_path, self.supervisor.socket_path)
        make_backends(workspace.backends_path, binary, {BACKEND_NAME: library_path()})
        if self.linked or self.supervisor is not None:
            workspace.folders_path.mkdir()
        for folder in self.linked.values():
            self._link(folder)
        folders = ServerFolders(
            executable=binary.executable,
            models=self._repository.path,
            linked=workspace.folders_path if workspace.folders_path.exists() else None,
            backends=workspace.backends_path,
            caches=binary.caches_dir if binary.caches_dir.is_dir() else None,
        )
        self.belong_to(binary, folders)
        return folders, variables

    def belong_to(self, binary: TritonServerBinary, folders: ServerFolders) -> None:
        """Remember the server and the folders, whose files may change while they are used."""
        self.binary, self.folders = binary, folders

    def write_models(self) -> None:
        """Write the files of all models that are bound."""
        for name in {model.name for model in self._deployment.models}:
            models = [model for model in self._deployment.models if model.name == name]
            text, files = self._of(models)
            self._repository.write(name, text, files)
            self._remember(name, text, models)

    @contextlib.contextmanager
    def changed(self, name: str, models: Sequence[WorkerService]) -> Iterator[None]:
        """Put these versions of a name into the repository, and no others; if the block fails, restore the old ones."""
        with self._lock:
            text, files = self._of(models)
            with self._repository.changed(name, text, files):
                yield
            self._remember(name, text, models)

    def resize_cache(self, cache_bytes: int) -> None:
        """Make the server keep this many bytes of answers from its next load on."""
        if cache_bytes != self._deployment.cache_bytes:
            self._deployment.cache_bytes = cache_bytes
            self.write_models()

    def look(self) -> None:
        """Restore the workspace if somebody has removed it, and make the server load its models from there.

        Attached workers keep working until then; without its socket, a lost worker could not return.
        """
        if not self.are_lost:
            self._damaged_looks = 0
            return
        self._damaged_looks += 1
        # Whoever removes the workspace may still be at work.
        if self._damaged_looks == 1 or time.monotonic() < self._restore_at or not self._lock.acquire(False):
            return
        try:
            self.restore()
            control = self._control()
            for name in dict.fromkeys(model.name for model in self._deployment.models):
                control.load(name, CALL_TIMEOUT_S)
            for name in sorted({each.model_name for each in self.supervisor.serving()} if self.supervisor else ()):
                # Triton loads a model again only if its files are newer.
                control.unload(name, CALL_TIMEOUT_S)
                control.load(name, CALL_TIMEOUT_S)
        except (OSError, PyTritonError, ProxyBackendError) as error:
            self._restore_at, self._is_incomplete = time.monotonic() + _RESTORE_PAUSE_S, True
            logger.error(
                "The workspace %s was removed while its server serves, and cannot be written anew: %s. Workers that "
                "are lost cannot come back, and models cannot be bound.",
                self._workspace.path, str(error).rstrip("."),
            )  # fmt: skip
        else:
            logger.warning(
                "The workspace %s was removed while its server serves: it was written anew, and the models were loaded "
                "from there. Keep what cleans up away from it, or set PYTRITON_HOME to another folder.",
                self._workspace.path,
            )
        finally:
            self._lock.release()

    def restore(self) -> None:
        """Write all that was in the workspace."""
        folders, binary = self.folders, self.binary
        if folders is None or binary is None:
            return
        self._is_incomplete = True
        self._workspace.restore()
        folders.backends.mkdir(exist_ok=True)
        if self.supervisor is not None:
            self.supervisor.restore()
            make_python_backend(folders.backends, self.supervisor.socket_path)
        make_backends(folders.backends, binary, {BACKEND_NAME: library_path()})
        if folders.linked is not None:
            folders.linked.mkdir(exist_ok=True)
        for folder in self.linked.values():
            self._link(folder)
        self.write_models()
        for model in self._deployment.models:
            model.describe(self._deployment.endpoints)
        self._is_incomplete = False

    def load_folder(self, folder: Path, timeout_s: float) -> None:
        """Have the running server load a model from a folder of the user's, and wait until it has."""
        if self.folders is None or self.folders.linked is None:
            raise PyTritonInvalidOperationError(
                "The server was started without a place for models by their folders: call bind_model before the start, "
                f"or set TritonConfig(python_models={WORKERS!r})."
            )
        link = self._link(folder)
        try:
            self._control().load(folder.name, timeout_s)
        except ControlError as error:
            link.unlink()
            raise self.folder_error(folder.name, None, error.reason or str(error)) from error
        self.linked[folder.name] = folder

    def unload_folder(self, name: str, timeout_s: float) -> None:
        """Make the running server unload a model that `load_folder` loaded."""
        self._control().unload(name, timeout_s)
        del self.linked[name]
        (self._workspace.folders_path / name).unlink()

    def folder_error(self, name: str, version: int | None, reason: str) -> TritonModelLoadError:
        """Make the error for a model of a folder that the server did not load."""
        return TritonModelLoadError(
            f"tritonserver did not load model {name!r} of {self.linked.get(name, name)}: {reason}",
            model_name=name,
            model_version=version,
            reason=reason,
            log_lines=self._log_tail(),
        )

    def check_loaded(self, config: TritonConfig) -> None:
        """Check that the running server has loaded all models that it should have."""
        states = {(state.name, state.version): state for state in self._control().index()}
        for model in self._deployment.models:
            state = states.get((model.name, model.version))
            if state is None or state.state != "READY":
                raise self._deployment.load_error(
                    model, state.reason if state is not None else "it is not in the server's list of models"
                )
        # The user's own folders come first.
        for state in sorted(states.values(), key=lambda state: state.name not in self.linked):
            if state.state != "UNAVAILABLE":
                continue
            if state.name in self.linked:
                raise self.folder_error(state.name, state.version, state.reason)
            if config.exit_on_error is not False:
                raise TritonModelLoadError(
                    f"tritonserver cannot load model {state.name!r} of {config.model_repository}: "
                    f"{state.reason.rstrip().removesuffix('.')}. "
                    "Mend the model, or set TritonConfig.exit_on_error=False to serve without it.",
                    model_name=state.name,
                    model_version=state.version,
                    reason=state.reason,
                )

    def remove(self) -> None:
        """Remove all of them, when the server is gone."""
        self._workspace.clean()

    def _of(self, models: Sequence[WorkerService]) -> tuple[str, dict[int, list[tuple[str, str]]]]:
        """Return the configuration of one name, and the files of its versions."""
        for definition in (model.definition for model in models):
            definition.warn_without_cache(
                self._deployment.cache_bytes, 'TritonConfig(cache_config=["local,size=<bytes>"])'
            )
        return self._text_of(models) if models else "", {m.version: self._deployment.side_files(m) for m in models}

    def _remember(self, name: str, text: str, models: Sequence[WorkerService]) -> None:
        self._written.pop(name, None)
        if models:
            self._written[name] = (models[0].definition.comparable_text, text, weakref.WeakSet(models))

    def _text_of(self, models: Sequence[WorkerService]) -> str:
        """Return the configuration of one name, in the words of before while a version stays that is served by it."""
        definition = models[0].definition
        if (written := self._written.get(models[0].name)) is not None:
            comparable, text, before = written
            # Triton would load the version that stays again, for words by which nothing is served.
            if definition.comparable_text == comparable and any(model in before for model in models):
                return text
        return definition.config_text

    def _link(self, folder: Path) -> Path:
        link = self._workspace.folders_path / folder.name
        link.symlink_to(folder, target_is_directory=True)
        return link
