"""The file of `serve --config`: options of the command, fields of `TritonConfig`, and options of models."""

import dataclasses
import difflib
import enum
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pytriton.exceptions import PyTritonError
from pytriton.model_config import Cost, DynamicBatcher, ModelConfig, QueuePolicy, TimeoutAction
from pytriton.model_config.warmup import ModelWarmup, WarmupInput
from pytriton.proxy_backend.settings import DURATION, read_duration
from pytriton.server.models.process_workers import SLEEPS
from pytriton.server.settings.config import TritonConfig

# These fields are objects.
_TABLES: Mapping[str, type[Any]] = {"batcher": DynamicBatcher, "default_queue_policy": QueuePolicy}
# The function determines these fields.
_OF_CODE = ("batching", "decoupled")
# The fields of a `Cost` that the file may set; the function determines the others.
_OF_COST = ("limit", "overhead", "oversize")
_MOST_SHOWN = 80
# What the file says of a model besides the fields of its configuration.
_OF_SERVE = ("workers", "min_workers", "idle", "sleep", "starts_asleep", "pinned", "golden")


class ConfigFileError(Exception):
    """The file cannot be used; the text names the file, the key, the expected and the received value."""


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """What a file says."""

    path: Path
    # Options of the command, by the names of its parameters.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    server: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields of `TritonConfig`
    # By the name of the model: `workers`, `min_workers`, `idle`, `sleep`, `starts_asleep`, `pinned`, `golden`, and
    # fields of `ModelConfig`.
    models: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def workers(self, model: str, default: int) -> int:
        """Return how many processes serve a model."""
        workers: int = self.models.get(model, {}).get("workers", default)
        return workers

    def min_workers(self, model: str, default: int | None) -> int | None:
        """Return how many processes of a model run at least; None is all."""
        fewest: int | None = self.models.get(model, {}).get("min_workers", default)
        return fewest

    def idle_timeout_s(self, model: str, default: str | None) -> float | None:
        """Return after how many seconds without a request a model sleeps; None is never."""
        if self.is_pinned(model):
            return None
        told: str | None = self.models.get(model, {}).get("idle", default)
        return None if told is None else read_duration(told)

    def sleep(self, model: str, default: str | None) -> str | None:
        """Return what stays of a model that sleeps; None is nothing."""
        told: str | None = self.models.get(model, {}).get("sleep", default)
        return told

    def is_pinned(self, model: str) -> bool:
        """Return whether the processes of a model never sleep."""
        pinned: bool = self.models.get(model, {}).get("pinned", False)
        return pinned

    def starts_asleep(self, model: str) -> bool:
        """Return whether no process of a model is started before its first request."""
        asleep: bool = self.models.get(model, {}).get("starts_asleep", False)
        return asleep

    def golden(self, model: str) -> bool | float:
        """Return whether the processes of a model have to answer their warm-up as the first did, and how nearly."""
        golden: bool | float = self.models.get(model, {}).get("golden", False)
        return golden

    def configure(self, model: str, config: ModelConfig) -> ModelConfig:
        """Return the configuration of a model, changed by the file."""
        fields = {name: value for name, value in self.models.get(model, {}).items() if name not in _OF_SERVE}
        key = f"models.{model}"
        if "max_batch_size" in fields and not config.batching:
            _refuse(self.path, f"{key}.max_batch_size", "none for a model that takes one sample at a time: give it "
                    "@model(max_batch_size=...) first", fields["max_batch_size"])  # fmt: skip
        if "cost" in fields:
            if config.cost is None:
                _refuse(self.path, f"{key}.cost", "none for a model without a cost: give it @model(cost=Cost(...)) "
                        "first, which says what is padded and cut", fields["cost"])  # fmt: skip
            fields["cost"] = dataclasses.replace(config.cost, **fields["cost"])
        try:
            changed = dataclasses.replace(config, **fields)
            changed.validate()
        except PyTritonError as error:
            raise ConfigFileError(f"{self.path}: {str(error).replace('ModelConfig', key)}") from None
        return changed

    def changed_beside_server(self, other: "ConfigFile") -> list[str]:
        """Return the changed keys of another reading of the file, except those of the server."""
        # The address belongs to the server.
        options = sorted((self.options.keys() | other.options.keys()) - {"address"})
        models = sorted(self.models.keys() | other.models.keys())
        return [
            *(name for name in options if self.options.get(name) != other.options.get(name)),
            *(f"models.{name}" for name in models if self.models.get(name) != other.models.get(name)),
        ]

    def check_models(self, names: Collection[str]) -> None:
        """Check that there is every model that the file speaks of."""
        for name in self.models:
            if name not in names:
                _refuse(self.path, f"models.{name}", f"one of the models {', '.join(names)}", name)


def read_config(path: Path, options: Mapping[str, type | range]) -> ConfigFile:
    """Read a file."""
    content = _read(path)
    tables = ("server", "models")
    fields = [field.name for field in dataclasses.fields(TritonConfig)]
    for name in content:
        if name in fields and name not in options:
            _refuse(
                path, name, f"it in the table [server], as server.{name}: it is a field of TritonConfig", content[name]
            )
    _check_keys(path, "", content, [*options, *tables])
    for name in tables:
        _check_type(path, name, content.setdefault(name, {}), dict)
    for name, kind in options.items():
        if name in content:
            _check_type(path, name, content[name], int if isinstance(kind, range) else kind)
            if isinstance(kind, range) and content[name] not in kind:
                _refuse(path, name, f"an integer from {kind[0]} to {kind[-1]}", content[name])
    server = content.pop("server")
    models = content.pop("models")
    _check_keys(path, "server.", server, fields)
    for name, value in server.items():
        try:
            TritonConfig(**{name: value, "allow_grpc" if name == "allow_http" else "allow_http": True})
        except PyTritonError as error:
            raise ConfigFileError(f"{path}: {str(error).replace('TritonConfig', 'server')}") from None
    return ConfigFile(path, content, server, {name: _read_model(path, name, told) for name, told in models.items()})


def _read(path: Path) -> dict[str, Any]:
    parse = _parse_yaml if path.suffix in (".yaml", ".yml") else _parse_toml
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigFileError(f"{path}: expected a name that ends in .toml, .yaml or .yml")
    try:
        content = parse(path, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigFileError(f"{path}: {' '.join(str(error).split())}") from None
    _check_type(path, "the file", content, dict)
    return dict(content)


def _parse_toml(_path: Path, text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    # Its error is a ValueError that names the line.
    return tomllib.loads(text)


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigFileError(
            f"{path}: PyYAML, which reads YAML, is not installed: pip install 'pytriton-server[yaml]', or write TOML"
        ) from None
    try:
        # An empty file is read as None.
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _read_model(path: Path, model: str, told: Any) -> dict[str, Any]:
    key = f"models.{model}"
    _check_type(path, key, told, dict)
    known = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in _OF_CODE]
    _check_keys(path, f"{key}.", told, [*_OF_SERVE, *known])
    if "idle" in told:
        check_duration(path, f"{key}.idle", told["idle"])
    if "sleep" in told:
        check_sleep(path, f"{key}.sleep", told["sleep"])
    golden = told.get("golden", False)
    if not isinstance(golden, bool) and not (isinstance(golden, (int, float)) and 0 <= golden < 1):
        _refuse(path, f"{key}.golden", "true, false, or a number of at least 0 and below 1", golden)
    for name in ("pinned", "starts_asleep"):
        if name in told:
            _check_type(path, f"{key}.{name}", told[name], bool)
    if told.get("pinned") and (given := "idle" if "idle" in told else "starts_asleep" * told.get("starts_asleep", 0)):
        _refuse(path, f"{key}.pinned", f"false for a model with {given}: what is pinned never sleeps", told["pinned"])
    for name, least in (("workers", 0), ("min_workers", 1)):
        number = told.get(name, least)
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            _refuse(path, f"{key}.{name}", f"an integer of at least {least}", number)
    return {name: _read_value(path, f"{key}.{name}", name, value) for name, value in told.items()}


def _read_value(path: Path, key: str, name: str, value: Any) -> Any:
    if name in _TABLES:
        return _make(path, key, _TABLES[name], value)
    if name == "cost":
        _check_type(path, key, value, dict)
        _check_keys(path, f"{key}.", value, [field.name for field in dataclasses.fields(Cost)])
        for field in value:
            if field not in _OF_COST:
                _refuse(path, f"{key}.{field}", f"{', '.join(_OF_COST)} alone in this table: the function says the "
                        f"rest, with @model(cost=Cost({field}=...))", value[field])  # fmt: skip
        return value
    if name == "timeout_action":
        return _choose(path, key, TimeoutAction, value)
    if name == "model_warmup":
        _check_type(path, key, value, list)
        return [_make(path, f"{key}[{number}]", ModelWarmup, told) for number, told in enumerate(value)]
    if name == "inputs":
        _check_type(path, key, value, dict)
        return {tensor: _make(path, f"{key}.{tensor}", WarmupInput, told) for tensor, told in value.items()}
    if name == "priority_queue_policy":
        _check_type(path, key, value, dict)
        try:
            return {int(level): _make(path, f"{key}.{level}", QueuePolicy, policy) for level, policy in value.items()}
        except ValueError:
            _refuse(path, key, "numbers of priority levels as keys", ", ".join(map(str, value)))
    return value


def _make(path: Path, key: str, kind: type[Any], value: Any) -> Any:
    """Make an object of a table with its fields."""
    _check_type(path, key, value, dict)
    known = dataclasses.fields(kind)
    _check_keys(path, f"{key}.", value, [field.name for field in known])
    missing = [each.name for each in known if each.default is each.default_factory and each.name not in value]
    if missing:
        _refuse(path, key, f"a table with {', '.join(missing)}", value)
    fields = {name: _read_value(path, f"{key}.{name}", name, told) for name, told in value.items()}
    try:
        return kind(**fields)
    except PyTritonError as error:
        raise ConfigFileError(f"{path}: {str(error).replace(kind.__name__, key)}") from None


def _choose(path: Path, key: str, kind: type[enum.Enum], value: Any) -> enum.Enum:
    if value not in kind.__members__:
        _refuse(path, key, " or ".join(kind.__members__), value)
    return kind[value]


def check_duration(path: Path, key: str, value: Any) -> None:
    """Refuse a value that `read_duration` does not read."""
    try:
        read_duration(value)
    except (TypeError, ValueError):
        _refuse(path, key, DURATION, value)


def check_sleep(path: Path, key: str, value: Any) -> None:
    """Refuse a value that `ProcessWorker.sleep` does not take."""
    if value not in SLEEPS:
        _refuse(path, key, " or ".join(SLEEPS), value)


def _check_keys(path: Path, prefix: str, table: Mapping[str, Any], known: Collection[str]) -> None:
    for name in table:
        if name not in known:
            likely = difflib.get_close_matches(str(name), known) or sorted(known)
            _refuse(path, f"{prefix}{name}", f"a known key, such as {', '.join(likely)}", name)


def _check_type(path: Path, key: str, value: Any, kind: type) -> None:
    names: Mapping[type, str] = {dict: "a table", list: "a list", str: "text", bool: "true or false", int: "an integer"}
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        _refuse(path, key, names[kind], value)


def _refuse(path: Path, key: str, expected: str, received: Any) -> NoReturn:
    shown = repr(received)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    raise ConfigFileError(f"{path}: {key}: expected {expected}; got {shown}")
