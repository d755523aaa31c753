"""Parameters of the load of a model: what is accepted, and the files of a model that is given by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pytriton.inprocess.capi.errors import InvalidArgumentError, wrong_argument
from pytriton.inprocess.capi.parameters import Parameter
from pytriton.inprocess.server.memory_models import CONFIG_FILE, config_text

_CONFIG = "config"
_FILE = "file:"


def load_parameters(
    model_name: str,
    parameters: Mapping[str, Parameter] | None,
    config: Mapping[str, Any] | str | None,
    files: Mapping[str, str | bytes] | None,
) -> dict[str, Parameter]:
    """Put the parameters of a load together."""
    where = f"load of model {model_name!r}"
    merged: dict[str, Parameter] = {}
    if parameters is not None and not isinstance(parameters, Mapping):
        raise wrong_argument("parameters", "a dict", parameters, where=where)
    for key, value in (parameters or {}).items():
        _add(merged, key, value, where)
    if config is not None:
        if not isinstance(config, (str, Mapping)):
            raise wrong_argument("config", "a dict or JSON text", config, where=where)
        _add(merged, _CONFIG, config if isinstance(config, str) else _json(config, where), where)
    if files is not None and not isinstance(files, Mapping):
        raise wrong_argument("files", "a dict from path to content", files, where=where)
    for path, content in (files or {}).items():
        if not isinstance(path, str) or not isinstance(content, (str, bytes, bytearray, memoryview)):
            raise wrong_argument("files", "a dict from str to str or bytes", {path: content}, where=where)
        _add(merged, _FILE + path, content.encode() if isinstance(content, str) else bytes(content), where)
    return merged


def _add(merged: dict[str, Parameter], key: object, value: object, where: str) -> None:
    if not isinstance(key, str) or "\0" in key:
        raise wrong_argument("the name of a parameter", "a str without zero characters", key, where=where)
    if key in merged:
        raise InvalidArgumentError(
            f"{where}: expected {key!r} to be given once, received it twice.",
            expected="once",
            received="twice",
            where=where,
        )
    if key.startswith(_FILE) and isinstance(value, str):
        # Triton takes the content of a file as bytes only.
        value = value.encode()
    if not isinstance(value, (str, int, bytes)):
        raise wrong_argument(f"parameter {key!r}", "a str, int, bool or bytes", value, where=where)
    if isinstance(value, str) and "\0" in value:
        raise wrong_argument(f"parameter {key!r}", "text without zero characters", value, where=where)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise wrong_argument(f"parameter {key!r}", "an int of 64 bits", value, where=where)
    merged[key] = value


def _json(config: Mapping[str, Any], where: str) -> str:
    try:
        return json.dumps(config)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{where}: expected a config that can be written as JSON: {error}",
            expected="values of JSON",
            received=config,
            where=where,
        ) from error


def files_of(name: str, parameters: Mapping[str, Parameter]) -> dict[str, bytes]:
    """Return the files of a model that is given by parameters, with its configuration as `config.pbtxt`."""
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == _CONFIG and isinstance(value, str):
            files[CONFIG_FILE] = config_text(name, value)
        elif key.startswith(_FILE) and isinstance(value, bytes):
            files.setdefault(key.removeprefix(_FILE), value)
        else:
            raise InvalidArgumentError(
                f"load of model {name!r}: expected the parameters 'config' (JSON text) and 'file:<path>' (bytes), "
                f"received {key!r} with a value of type {type(value).__name__}.",
                expected=("config", "file:<path>"),
                received=key,
                where=f"load of model {name!r}",
            )
    return files
