"""The start of a server of the C API: its folders and options, and what to say when it fails."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytriton.inprocess.capi.api import Api
from pytriton.inprocess.capi.c_types import ServerHandle, ServerOptionsHandle
from pytriton.inprocess.capi.enums import LogFormat, ModelControlMode
from pytriton.inprocess.capi.errors import InternalError, InvalidArgumentError
from pytriton.inprocess.capi.threads import starting
from pytriton.inprocess.server.log_records import log_pipe_for
from pytriton.proxy_backend import INPROCESS_BACKEND_NAME, inprocess_library_path
from pytriton.server.tritonserver.backends import make_backends
from pytriton.server.workspace import Workspace

_ALL_MODELS = b"*"
# The defaults of NVIDIA's package, which scripts for it repeat.
_DEFAULTS_OF_CONTAINERS = (b"/opt/tritonserver/backends", b"/opt/tritonserver/caches", b"/opt/tritonserver/repoagents")


class Folders:
    """The folders that Triton uses, in the workspace of a server."""

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

    def set(self, api: Api, options: ServerOptionsHandle) -> None:
        """Set the options that name the folders."""
        for repository in self.repositories:
            api.TRITONSERVER_ServerOptionsSetModelRepositoryPath(options, repository)
        api.TRITONSERVER_ServerOptionsSetBackendDirectory(options, self.backends)
        api.TRITONSERVER_ServerOptionsSetCacheDirectory(options, self.caches)
        api.TRITONSERVER_ServerOptionsSetRepoAgentDirectory(options, self.agents)


def _unless_missing_default(path: bytes | None) -> bytes | None:
    """Return a path; `None` for a default of NVIDIA's containers that does not exist here."""
    if path is not None and path.rstrip(b"/") in _DEFAULTS_OF_CONTAINERS and not os.path.isdir(path):
        return None
    return path


def new_server(api: Api, values: Mapping[str, Any], folders: Folders, *, exit_on_error: bool) -> ServerHandle:
    """Start a server of the C API.

    `exit_on_error` lets Triton delete a server that fails and say why, which must not happen while another server runs.
    """
    handle, options = ServerHandle(), ServerOptionsHandle()
    api.TRITONSERVER_ServerOptionsNew(ctypes.byref(options))
    try:
        folders.set(api, options)
        api.TRITONSERVER_ServerOptionsSetExitOnError(options, exit_on_error)
        _set_behaviour(api, options, values)
        _set_memory_and_devices(api, options, values)
        _set_log(api, options, values)
        _set_metrics(api, options, values)
        with starting():
            api.TRITONSERVER_ServerNew(ctypes.byref(handle), options)
    finally:
        api.TRITONSERVER_ServerOptionsDelete(options)
    return handle


def failure_of_models(name: str, values: Mapping[str, Any], index: Sequence[Mapping[str, Any]]) -> InternalError | None:
    """Make the error for the models that were to be loaded at the start and were not; `None` if there are none."""
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


def _set_behaviour(api: Api, handle: ServerOptionsHandle, values: Mapping[str, Any]) -> None:
    api.TRITONSERVER_ServerOptionsSetServerId(handle, values["server_id"])
    mode = values["model_control_mode"]
    startup_models = values["startup_models"] if mode == ModelControlMode.EXPLICIT else []
    if mode == ModelControlMode.NONE:
        # With NONE, Triton loads all models at the start and refuses changes. With EXPLICIT it does the same here, and
        # `Server` refuses the changes; but models can be bound, and `stop()` can unload them itself, while Triton's own
        # stop sleeps in steps of whole seconds.
        mode, startup_models = ModelControlMode.EXPLICIT, [b"*"]
    api.TRITONSERVER_ServerOptionsSetModelControlMode(handle, mode)
    for model in startup_models:
        api.TRITONSERVER_ServerOptionsSetStartupModel(handle, model)
    api.TRITONSERVER_ServerOptionsSetStrictModelConfig(handle, values["strict_model_config"])
    # tritonserver 2.44 lacks this option and the one for access among GPUs, so they are set only if the user asks.
    if values["model_config_name"] or api.has("TRITONSERVER_ServerOptionsSetModelConfigName"):
        api.TRITONSERVER_ServerOptionsSetModelConfigName(handle, values["model_config_name"])
    api.TRITONSERVER_ServerOptionsSetRateLimiterMode(handle, values["rate_limiter_mode"])
    for resource in values["rate_limiter_resources"]:
        api.TRITONSERVER_ServerOptionsAddRateLimiterResource(
            handle, resource["name"], resource["count"], resource["device"]
        )
    for name, config in values["cache_config"].items():
        api.TRITONSERVER_ServerOptionsSetCacheConfig(handle, name, config)
    api.TRITONSERVER_ServerOptionsSetStrictReadiness(handle, values["strict_readiness"])
    api.TRITONSERVER_ServerOptionsSetExitTimeout(handle, values["exit_timeout"])
    api.TRITONSERVER_ServerOptionsSetBufferManagerThreadCount(handle, values["buffer_manager_thread_count"])
    api.TRITONSERVER_ServerOptionsSetModelLoadThreadCount(handle, values["model_load_thread_count"])
    # Triton 2.51 does not initialise this field; without the call, a model that fails is loaded again for ever.
    api.TRITONSERVER_ServerOptionsSetModelLoadRetryCount(handle, values["model_load_retry_count"])
    api.TRITONSERVER_ServerOptionsSetModelNamespacing(handle, values["model_namespacing"])
    for backend, settings in values["backend_configuration"].items():
        for setting, value in settings.items():
            api.TRITONSERVER_ServerOptionsSetBackendConfig(handle, backend, setting, value)


def _set_memory_and_devices(api: Api, handle: ServerOptionsHandle, values: Mapping[str, Any]) -> None:
    api.TRITONSERVER_ServerOptionsSetPinnedMemoryPoolByteSize(handle, values["pinned_memory_pool_size"])
    for device, size in values["cuda_memory_pool_sizes"].items():
        api.TRITONSERVER_ServerOptionsSetCudaMemoryPoolByteSize(handle, device, size)
    for device, size in values["cuda_virtual_address_sizes"].items():
        api.TRITONSERVER_ServerOptionsSetCudaVirtualAddressSize(handle, device, size)
    api.TRITONSERVER_ServerOptionsSetMinSupportedComputeCapability(handle, values["min_supported_compute_capability"])
    if not values["enable_peer_access"] or api.has("TRITONSERVER_ServerOptionsSetEnablePeerAccess"):
        api.TRITONSERVER_ServerOptionsSetEnablePeerAccess(handle, values["enable_peer_access"])
    for limit in values["model_load_device_limits"]:
        api.TRITONSERVER_ServerOptionsSetModelLoadDeviceLimit(handle, limit["kind"], limit["device"], limit["fraction"])
    for policy, settings in values["host_policies"].items():
        for setting, value in settings.items():
            api.TRITONSERVER_ServerOptionsSetHostPolicy(handle, policy, setting, value)


def _set_log(api: Api, handle: ServerOptionsHandle, values: Mapping[str, Any]) -> None:
    verbose = values["log_verbose"]
    info = verbose > 0 or values["log_info"]
    warn = info or values["log_warn"]
    log_file, log_format = values["log_file"] or b"", values["log_format"]  # an empty name means standard error
    if values["log_callback"] is not None:
        log_file, log_format = log_pipe_for(values["log_callback"]), LogFormat.DEFAULT
    try:
        api.TRITONSERVER_ServerOptionsSetLogFile(handle, log_file)
    except InternalError as error:
        path = os.fsdecode(log_file)
        # The reason follows the place in Triton's source.
        reason = error.message.rpartition("file: ")[2].strip()
        raise InvalidArgumentError(
            f"Options.log_file: expected a file that can be written, received {path!r}: {reason}.",
            expected="a file that can be written",
            received=path,
            where="Options.log_file",
        ) from error
    api.TRITONSERVER_ServerOptionsSetLogFormat(handle, log_format)
    api.TRITONSERVER_ServerOptionsSetLogVerbose(handle, verbose)
    api.TRITONSERVER_ServerOptionsSetLogInfo(handle, info)
    api.TRITONSERVER_ServerOptionsSetLogWarn(handle, warn)
    api.TRITONSERVER_ServerOptionsSetLogError(handle, warn or values["log_error"])


def _set_metrics(api: Api, handle: ServerOptionsHandle, values: Mapping[str, Any]) -> None:
    api.TRITONSERVER_ServerOptionsSetMetrics(handle, values["metrics"])
    # Without a driver, NVIDIA's library prints an error at every start.
    api.TRITONSERVER_ServerOptionsSetGpuMetrics(handle, values["gpu_metrics"] and _has_nvidia_driver())
    api.TRITONSERVER_ServerOptionsSetCpuMetrics(handle, values["cpu_metrics"])
    api.TRITONSERVER_ServerOptionsSetMetricsInterval(handle, values["metrics_interval"])
    for group, settings in values["metrics_configuration"].items():
        for setting, value in settings.items():
            api.TRITONSERVER_ServerOptionsSetMetricsConfig(handle, group, setting, value)


def _has_nvidia_driver() -> bool:
    return any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/dxg"))
