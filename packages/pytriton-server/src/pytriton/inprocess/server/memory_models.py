"""Models that are given in memory, as the folder of a model repository.

Triton can load a model from parameters by itself, but then the model is in none of its lists, and no ensemble that is
loaded later can use it: for that Triton wants to read the model's configuration in a repository. So the files are
written to a repository of the server's own, which goes when the server stops, and Triton loads them from there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from pytriton.inprocess.capi.errors import InvalidArgumentError, UnsupportedError

CONFIG_FILE = "config.pbtxt"
# Five years. Every file system can store such a time for years to come.
_AHEAD_NS = 5 * 365 * 24 * 3600 * 10**9
_MESSAGES = "tritonclient.grpc.model_config_pb2"


class MemoryRepository:
    """The folder of the models of one server that are given in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._last_time_ns = 0

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and is_folder_name(name) and (self._path / name).is_dir()

    def write(self, name: str, files: Mapping[str, bytes]) -> None:
        """Write a model, in place of an earlier one of the name."""
        for file in files:
            path = PurePosixPath(file)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise InvalidArgumentError(
                    f"Model {name!r}: expected the path of a file inside the model's folder, such as '1/model.py', "
                    f"received {file!r}.",
                    expected="a relative path",
                    received=file,
                    where=f"model {name!r}",
                )
        folder = self._path / name
        with self._lock:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
            for file, content in files.items():
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            if not any(entry.is_dir() and entry.name.isdigit() for entry in folder.iterdir()):
                # Triton needs a version folder, even for a model without files.
                (folder / "1").mkdir()
            self._set_times(folder)

    def remove(self, name: str) -> None:
        """Remove a model, which must not be loaded any more. Does nothing if there is none of the name."""
        with self._lock:
            if name in self:
                shutil.rmtree(self._path / name)

    def _set_times(self, folder: Path) -> None:
        """Make the files newer than those of any earlier write, so that Triton loads them again.

        They must also be newer than files that appear later, such as `__pycache__`, which would make Triton load the
        model once more.
        """
        self._last_time_ns = max(time.time_ns() + _AHEAD_NS, self._last_time_ns + 1_000_000)
        for parent, _, files in os.walk(folder):
            for path in (parent, *(os.path.join(parent, file) for file in files)):
                os.utime(path, ns=(self._last_time_ns, self._last_time_ns))


def is_folder_name(name: str) -> bool:
    """Return whether a model's name can be the name of a folder."""
    return os.path.basename(name) == name and name not in ("", ".", "..")


def config_text(name: str, config: str) -> bytes:
    """Turn the configuration of a model from JSON into the text of `config.pbtxt`."""
    where = f"model {name!r}"
    try:
        fields = json.loads(config)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{where}: expected a config as JSON: {error}", expected="JSON", received=config, where=where
        ) from error
    if not isinstance(fields, dict):
        raise InvalidArgumentError(
            f"{where}: expected a config as a JSON object, received {config!r}.",
            expected="a JSON object",
            received=config,
            where=where,
        )
    from google.protobuf import json_format, text_format  # type: ignore[import-untyped, unused-ignore]

    message = _messages().ModelConfig()
    try:
        json_format.ParseDict(fields, message)
    except (json_format.ParseError, AttributeError, TypeError) as error:
        raise InvalidArgumentError(
            f"{where}: expected a config with the fields of Triton's ModelConfig: {error}",
            expected="fields of ModelConfig",
            received=fields,
            where=where,
        ) from error
    if not message.name:
        message.name = name
    text: str = text_format.MessageToString(message)
    return text.encode()


def _messages() -> Any:
    """Return the module with the message `ModelConfig`, without the client around it, which loads all of gRPC."""
    loaded = sys.modules.get(_MESSAGES)
    if loaded is not None:
        return loaded
    package = importlib.util.find_spec("tritonclient")
    for folder in (package.submodule_search_locations if package is not None else None) or ():
        file = os.path.join(folder, "grpc", "model_config_pb2.py")
        if os.path.isfile(file):
            return _import_file("pytriton.inprocess._model_config_pb2", file)
    raise UnsupportedError(
        "Expected tritonclient[grpc] to be installed, which has the message ModelConfig for configurations in memory. "
        "Install it with `pip install 'tritonclient[grpc]'`.",
        expected="tritonclient[grpc]",
        received=None,
    )


def _import_file(name: str, file: str) -> ModuleType:
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UnsupportedError(f"Expected a Python module in {file}.", expected="a Python module", received=file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return module
