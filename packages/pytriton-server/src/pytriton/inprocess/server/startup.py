"""The start of a server of the C API, and what to say when it fails."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytriton.inprocess.capi.api import Api
from pytriton.inprocess.capi.c_types import ServerHandle
from pytriton.inprocess.capi.enums import ModelControlMode
from pytriton.inprocess.capi.errors import InternalError, InvalidArgumentError
from pytriton.inprocess.server.options import c_options
from pytriton.proxy_backend import INPROCESS_BACKEND_NAME, inprocess_library_path
from pytriton.server.tritonserver.backends import make_backends
from pytriton.server.workspace import Workspace

__all__ = ["Folders", "failure_of_models", "new_server"]

_ALL_MODELS = b"*"
# What these options are by default in NVIDIA's package, and what scripts for it therefore say.
_DEFAULTS_OF_CONTAINERS = (b"/opt/tritonserver/backends", b"/opt/tritonserver/caches", b"/opt/tritonserver/repoagents")


class Folders:
    """The folders that Triton is told of, in the workspace of a server.

    Args:
        api: The functions, which know where the server's own files are.
        workspace: The workspace, which is there.
        values: What `option_values` gave.
    """

    def __init__(self, api: Api, workspace: Workspace, values: Mapping[str, Any]) -> None:
        binary = api.library.binary
        extra = _unless_missing_default(values["backend_directory"])
        more = Path(os.fsdecode(extra)) if extra else None
        if more is not None and not more.is_dir():
            raise InvalidArgumentError(
                f"Options.backend_directory: expected a folder with backends, found none at {str(more)!r}.",
                expected="a folder",
                received=str(more),
                where="Options.backend_directory",
            )
        make_backends(workspace.backends_path, binary, {INPROCESS_BACKEND_NAME: inprocess_library_path()}, more)
        agents = workspace.path / "repoagents"
        agents.mkdir()
        self.repositories = [*values["model_repository"], os.fsencode(workspace.model_store_path)]
        self.backends = os.fsencode(workspace.backends_path)
        self.caches: bytes = _unless_missing_default(values["cache_directory"]) or os.fsencode(binary.caches_dir)
        self.agents: bytes = _unless_missing_default(values["repo_agent_directory"]) or os.fsencode(agents)


def _unless_missing_default(path: bytes | None) -> bytes | None:
    """Give a path, or `None` for one that scripts only name because a container has it, where there is none."""
    if path is not None and path.rstrip(b"/") in _DEFAULTS_OF_CONTAINERS and not os.path.isdir(path):
        return None
    return path


def new_server(api: Api, values: Mapping[str, Any], folders: Folders, *, exit_on_error: bool) -> ServerHandle:
    """Start a server of the C API.

    Args:
        api: The functions.
        values: What `option_values` gave.
        folders: The folders.
        exit_on_error: Whether Triton is to delete a server that fails, and say why. It must not while another one
            runs: see `pytriton.inprocess.capi.process.delete_when_alone`.
    """
    handle = ServerHandle()
    with c_options(
        api,
        {**values, "exit_on_error": exit_on_error},
        repositories=folders.repositories,
        backend_directory=folders.backends,
        cache_directory=folders.caches,
        repo_agent_directory=folders.agents,
    ) as options:
        api.TRITONSERVER_ServerNew(ctypes.byref(handle), options)
    return handle


def failure_of_models(name: str, values: Mapping[str, Any], index: Sequence[Mapping[str, Any]]) -> InternalError | None:
    """Make the error for the models that were to be loaded at the start and were not; `None` if there are none.

    Args:
        name: Name of the server.
        values: What `option_values` gave.
        index: What the server says about its models.
    """
    wanted = values["startup_models"]
    everything = values["model_control_mode"] != ModelControlMode.EXPLICIT or _ALL_MODELS in wanted
    names = {model["name"] for model in index} if everything else {model.decode() for model in wanted}
    reasons = []
    for model in sorted(names):
        versions = [entry for entry in index if entry["name"] == model]
        reasons += [f"{model!r}: {_reason(entry)}" for entry in versions if entry.get("state") != "READY"] or (
            [] if versions else [f"{model!r}: not found in any model repository"]
        )
    if not reasons:
        return None
    listed = "\n".join(f"  {reason}" for reason in reasons)
    return InternalError(
        f"Server {name!r}: failed to load all models of its start:\n{listed}\nCorrect or remove them, or start it with "
        "exit_on_error=False. Triton's log (log_error=True) may tell more.",
        expected="models that load",
        received=tuple(reasons),
        where=f"server {name!r}",
    )


def _reason(entry: Mapping[str, Any]) -> str:
    if entry.get("state") is None:
        return "its configuration cannot be used"
    return str(entry.get("reason") or entry["state"])
