"""What a configuration says about the hosts of a Python model."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model import ModelSpec, is_decoupled, python_model_spec
from ..process.child import Launch
from ..process.host_process import START_PARAMETER, START_TIMEOUT_S
from ..process.messages import PythonModelJob, PythonModelServing
from ..settings import ProxySettings, parameter_fields
from .environments import Environments, ModelRefused
from .forkservers import OWN_LAUNCH

STUB = "triton_python_backend_stub"
"""Name of the program in which Triton's Python backend runs an instance."""

CACHE_PARAMETER = "PYTRITON_RESPONSE_CACHE_BYTES"
"""Parameter of a configuration: what answers that are given again may take in the server's memory, in bytes."""

IDLE_PARAMETER = "PYTRITON_IDLE_TIMEOUT_S"
"""Parameter of a configuration: without a request for so long the process of an instance ends, in seconds; 0: never."""

_PREFIX = "PYTRITON_"
# Parameters that are read here, each in its own way.
_NOT_OF_THE_LIBRARY = (CACHE_PARAMETER, IDLE_PARAMETER, START_PARAMETER)
_MOST_BYTES = (1 << 63) - 1
_DEFAULT_FILE = "model.py"
_PYTHON = "python"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PythonModel:
    """A model that Triton has announced."""

    name: str
    version: int
    folder: Path  # its folder, that of `config.pbtxt`
    file: Path  # its `model.py`
    config: str  # its configuration, as JSON
    completes: bool  # whether the configuration is to be completed
    launch: Launch  # how its hosts are started
    start_timeout_s: float  # how long its hosts may take to start, in seconds

    @classmethod
    def announced(cls, fields: tuple[str, ...], environments: Environments) -> PythonModel:
        """Read the fields of `FrameKind.MODEL`; raises `ModelRefused` if the model cannot be loaded."""
        name, version, folder, config, _, completes, backend, backend_folder = fields
        described = json.loads(config)
        parameters = {name: each.get("string_value", "") for name, each in described.get("parameters", {}).items()}
        _check_cpu_only(name, parameters)
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
            start_timeout_s=_start_timeout_s(parameters),
        )

    @property
    def has_many_instances(self) -> bool:
        """Whether its configuration asks for more than one instance."""
        groups = json.loads(self.config).get("instance_group") or []
        counts = (max(1, int(each.get("count") or 1)) * max(1, len(each.get("gpus") or ())) for each in groups)
        return sum(counts) > 1

    def spec(self, config: str) -> ModelSpec:
        """Return what the proxy backend is told of the model, whose configuration is completed."""
        return python_model_spec(self.name, self.version, json.loads(config))

    def completion_job(self, log_level: int) -> PythonModelJob:
        """Return the job of a host that is to complete the configuration."""
        return self._job(log_level, auto_complete=True)

    def serving_job(self, serving: PythonModelServing, log_level: int) -> PythonModelJob:
        """Return the job of a host that is to serve an instance."""
        return self._job(log_level, serve=serving)

    def serving(self, config: str, instance: str, kind: str, device: str, endpoint: str) -> PythonModelServing:
        """Describe one instance, whose kind is CPU, GPU or MODEL."""
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


@dataclass(frozen=True)
class IdleRule:
    """When the process of an instance ends because nobody calls it, and how long requests then wait for it."""

    idle_timeout_s: float | None  # after so long without a request, in seconds; `None` is never
    attach_timeout_s: float  # how long a request waits for the process, in seconds, as far as the model itself says it
    # Why the instance stays awake although the others of its supervisor sleep; `None` if that is as it should be.
    why_not: str | None = None
    can_sleep: bool = False  # whether the process may end when another one needs its memory

    @classmethod
    def of(cls, config: str, default_s: float | None) -> IdleRule:
        """Read the rule of a model, or take `default_s` where it says nothing; `None` is never."""
        fields = json.loads(config)
        text = ((fields.get("parameters") or {}).get(IDLE_PARAMETER) or {}).get("string_value")
        attach_s = float(_own_settings(fields).get("attach_timeout_s", ProxySettings.attach_timeout_s))
        try:
            idle_s = default_s if text is None else float(text)
        except ValueError:
            idle_s = math.nan
        if idle_s is not None and not 0 <= idle_s < math.inf:
            raise ModelRefused(f"parameter {IDLE_PARAMETER}: expected a number of seconds, 0 for never, got {text!r}")
        has_sequences = "sequence_batching" in fields
        if not idle_s:
            return cls(None, attach_s, can_sleep=idle_s is None and not has_sequences)
        if has_sequences:
            # Between two requests of a sequence nothing is in flight.
            why_not = "its process may hold the state of sequences (sequence_batching)"
            if text is not None:
                raise ModelRefused(f"parameter {IDLE_PARAMETER}: the model cannot sleep, because {why_not}")
            return cls(None, attach_s, why_not)
        return cls(idle_s, attach_s, can_sleep=True)


def settings_text(config: str, endpoint: Path) -> str:
    """Return what the library inside tritonserver must know and cannot read from its own file, in the form of that.

    It refuses a parameter of ours that this version does not know, or that has no acceptable value.
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
    _check_cost(fields, own)
    # For the other settings, what the library has read from its own file counts.
    return settings.to_text(only=("endpoint", "batching", "decoupled", "max_waiting", "cache_bytes", *own))


def _own_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that parameters of a configuration say, by their names."""
    known = {field.parameter: field for field in parameter_fields()}
    found = {}
    for name, parameter in (fields.get("parameters") or {}).items():
        if not name.startswith(_PREFIX) or name in _NOT_OF_THE_LIBRARY:
            continue
        if name not in known:
            all_known = ", ".join(sorted([*known, *_NOT_OF_THE_LIBRARY]))
            raise ModelRefused(f"parameter {name}: this version knows {all_known} of those that begin with {_PREFIX}")
        try:
            found[known[name].name] = known[name].from_parameter(parameter.get("string_value", ""))
        except ValueError as error:
            raise ModelRefused(f"parameter {name}: {error}") from error
    return found


def _check_cost(fields: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a limit of what a batch may cost where nothing could be counted."""
    given = next((name for name in own if name.startswith("cost_")), None)
    if given is None:
        return
    parameter = f"parameter {_PREFIX}{given.upper()}"
    if not own.get("cost_limit"):
        raise ModelRefused(f"{parameter}: it needs {_PREFIX}COST_LIMIT, what a batch may cost")
    if int(fields.get("max_batch_size") or 0) < 1 or is_decoupled(fields) or "sequence_batching" in fields:
        raise ModelRefused(
            f"{parameter}: expected a model that batches (max_batch_size of at least 1), is not decoupled and has no "
            "sequences"
        )
    if not any(each.get("allow_ragged_batch") and "-1" in map(str, each["dims"]) for each in fields.get("input") or ()):
        raise ModelRefused(
            f"{parameter}: expected allow_ragged_batch: true for the inputs by whose free dimensions (-1) requests "
            "differ; none has it, so requests of different shapes would never share a batch"
        )


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


def _start_timeout_s(parameters: Mapping[str, str]) -> float:
    text = parameters.get(START_PARAMETER)
    try:
        limit_s = START_TIMEOUT_S if text is None else float(text)
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        raise ModelRefused(f"parameter {START_PARAMETER}: expected a number of seconds above 0, got {text!r}")
    return limit_s


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


def _check_cpu_only(name: str, parameters: Mapping[str, str]) -> None:
    value = parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS", "yes")
    if value == "no":
        logger.warning(
            "model '%s': FORCE_CPU_ONLY_INPUT_TENSORS is \"no\", which is not honoured here: inputs that lie in the "
            "memory of a GPU are copied to the host, where `as_numpy` reads them and `is_cpu` is true",
            name,
        )
    if value not in ("yes", "no"):
        # This is the text of Triton's Python backend.
        raise ModelRefused(f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: {value}'")
