"""What a configuration says about the hosts of a Python model."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..process.child import Launch
from ..process.messages import PythonModelJob, PythonModelServing
from ..settings import ProxySettings, parameter_fields
from .environments import Environments, ModelRefused
from .forkservers import OWN_LAUNCH

__all__ = ["CACHE_PARAMETER", "STUB", "PythonModel", "is_decoupled", "settings_text"]

STUB = "triton_python_backend_stub"
"""Name of the program in which Triton's Python backend runs an instance."""

CACHE_PARAMETER = "PYTRITON_RESPONSE_CACHE_BYTES"
"""Parameter of a configuration: what answers that are given again may take in the server's memory, in bytes."""

_PREFIX = "PYTRITON_"
_MOST_BYTES = (1 << 63) - 1
_DEFAULT_FILE = "model.py"
_PYTHON = "python"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PythonModel:
    """A model that Triton has announced.

    Attributes:
        name: Its name.
        version: Its version.
        folder: Its folder, that of `config.pbtxt`.
        file: Its `model.py`.
        config: Its configuration, as JSON.
        completes: Whether the configuration is to be completed.
        launch: How its hosts are started.
    """

    name: str
    version: int
    folder: Path
    file: Path
    config: str
    completes: bool
    launch: Launch

    @classmethod
    def announced(cls, fields: tuple[str, ...], environments: Environments) -> PythonModel:
        """Read the fields of `FrameKind.MODEL`.

        Args:
            fields: The fields.
            environments: Where interpreters come from that the model names.

        Raises:
            ModelRefused: It cannot be loaded.
        """
        name, version, folder, config, _, completes, backend, backend_folder = fields
        described = json.loads(config)
        parameters = {name: each.get("string_value", "") for name, each in described.get("parameters", {}).items()}
        _check_cpu_only(parameters)
        file = Path(folder, version, described.get("default_model_filename") or _DEFAULT_FILE)
        if backend != _PYTHON and not file.exists():
            # A backend that is itself a `model.py` serves all its models with that.
            file = Path(backend_folder, _DEFAULT_FILE)
        return cls(
            name=name,
            version=int(version),
            folder=Path(folder),
            file=file,
            config=config,
            completes=completes == "1",
            launch=_launch(parameters, folder, environments),
        )

    @property
    def has_many_instances(self) -> bool:
        """Whether its configuration asks for more than one instance."""
        groups = json.loads(self.config).get("instance_group") or []
        counts = (max(1, int(each.get("count") or 1)) * max(1, len(each.get("gpus") or ())) for each in groups)
        return sum(counts) > 1

    def completion_job(self, log_level: int) -> PythonModelJob:
        """Return the job of a host that is to complete the configuration."""
        return self._job(log_level, auto_complete=True)

    def serving_job(self, serving: PythonModelServing, log_level: int) -> PythonModelJob:
        """Return the job of a host that is to serve an instance."""
        return self._job(log_level, serve=serving)

    def serving(self, config: str, instance: str, kind: str, device: str, endpoint: str) -> PythonModelServing:
        """Describe one instance.

        Args:
            config: The model's configuration, completed.
            instance: The instance's name.
            kind: CPU, GPU or MODEL.
            device: The number of its device.
            endpoint: Where the proxy backend listens for it.
        """
        args = {
            "model_config": config,
            "model_instance_kind": kind,
            "model_instance_name": instance,
            "model_instance_device_id": device,
            "model_repository": str(self.folder),
            "model_version": str(self.version),
            "model_name": self.name,
        }
        return PythonModelServing(args=args, endpoint=endpoint, name=f"host of {instance}")

    def _job(self, log_level: int, **mode: Any) -> PythonModelJob:
        return PythonModelJob(
            model_name=self.name,
            model_version=self.version,
            model_file=str(self.file),
            model_dir=str(self.folder),
            model_config=self.config,
            log_level=log_level,
            **mode,
        )


def is_decoupled(fields: Mapping[str, Any]) -> bool:
    """Return whether a configuration lets a request have any number of responses."""
    return bool((fields.get("model_transaction_policy") or {}).get("decoupled"))


def settings_text(config: str, endpoint: Path) -> str:
    """Return what the library inside tritonserver must know and cannot read from its own file, in the form of that.

    Args:
        config: The model's configuration, completed.
        endpoint: What the endpoints of its instances begin with.

    Raises:
        ModelRefused: A parameter of ours has a value that is not acceptable, or is none that this version knows.
    """
    fields = json.loads(config)
    decoupled = is_decoupled(fields)
    own = _own_settings(fields)
    settings = ProxySettings(
        endpoint=endpoint,
        batching=int(fields.get("max_batch_size") or 0) > 0,
        decoupled=decoupled,
        max_waiting=_max_queue_size(fields),
        cache_bytes=_cache_bytes(fields, decoupled=decoupled),
        **own,
    )
    # Of the others, what the library has read from its own file counts.
    return settings.to_text(only=("endpoint", "batching", "decoupled", "max_waiting", "cache_bytes", *own))


def _own_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that parameters of a configuration say, by their names."""
    known = {field.parameter: field for field in parameter_fields()}
    found = {}
    for name, parameter in (fields.get("parameters") or {}).items():
        if not name.startswith(_PREFIX) or name == CACHE_PARAMETER:
            continue
        if name not in known:
            raise ModelRefused(
                f"parameter {name}: this version knows {', '.join(sorted([*known, CACHE_PARAMETER]))} of those that "
                f"begin with {_PREFIX}"
            )
        try:
            found[known[name].name] = known[name].from_parameter(parameter.get("string_value", ""))
        except ValueError as error:
            raise ModelRefused(f"parameter {name}: {error}") from error
    return found


def _max_queue_size(fields: Mapping[str, Any]) -> int:
    """Return how many requests a queue of Triton's may hold for a model; 0 is any number."""
    batching = fields.get("dynamic_batching") or {}
    policies = [batching.get("default_queue_policy"), *(batching.get("priority_queue_policy") or {}).values()]
    sizes = [int((policy or {}).get("max_queue_size") or 0) for policy in policies]
    return max(sizes) if all(sizes) else 0


def _cache_bytes(fields: Mapping[str, Any], *, decoupled: bool) -> int:
    parameter = (fields.get("parameters") or {}).get(CACHE_PARAMETER) or {}
    text = parameter.get("string_value") or "0"
    if not text.isdecimal() or int(text) > _MOST_BYTES:
        raise ModelRefused(f"parameter {CACHE_PARAMETER}: expected a number of bytes, got {text!r}")
    if decoupled and int(text):
        raise ModelRefused(f"parameter {CACHE_PARAMETER}: the answers of a decoupled model cannot be kept")
    return int(text)


def _launch(parameters: Mapping[str, str], folder: str, environments: Environments) -> Launch:
    if Path(folder, STUB).exists():
        logger.warning(
            "%s holds a %s for another Python, which is not used: name that Python with EXECUTION_ENV_PATH",
            folder,
            STUB,
        )
    path = parameters.get("EXECUTION_ENV_PATH", "")
    launch = environments.launch(path.replace(_MODEL_DIRECTORY, folder)) if path else OWN_LAUNCH
    return dataclasses.replace(launch, environment={**(launch.environment or {}), **(OWN_LAUNCH.environment or {})})


def _check_cpu_only(parameters: Mapping[str, str]) -> None:
    value = parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS", "yes")
    if value not in ("yes", "no"):
        # As Triton's Python backend says it.
        raise ModelRefused(f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: {value}'")
