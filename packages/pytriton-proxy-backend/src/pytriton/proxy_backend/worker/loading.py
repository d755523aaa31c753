"""From text such as `package.module:make_model` to the object that it names, and from a function to such a text."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import TargetError

# The name under which a script is imported that runs as `__main__` elsewhere, so that its guarded part does not run.
_SCRIPT_MODULE = "__pytriton_main__"
_loading = threading.local()


def is_loading() -> bool:
    """Return whether this thread is importing the module that `load_module` was asked for."""
    return bool(getattr(_loading, "depth", 0))


def load_target(target: str) -> Any:
    """Import the object that a target names."""
    module_name, separator, name = target.rpartition(":")
    if not (separator and module_name and name):
        raise TargetError(
            f"expected module:name, such as 'my_package.models:make_model', or path/to/file.py:name; got {target!r}",
            target=target,
        )
    found: Any = load_module(module_name, target)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise TargetError(
                f"{target!r}: module {module_name!r} ({getattr(found, '__file__', 'built in')}) has no {name!r}. "
                "Is the name right, and is it defined at the level of the module?",
                target=target,
            ) from error
    return found


def load_module(module_name: str, target: str) -> ModuleType:
    """Import the module of a target: `package.module`, or the path of a `.py` file.

    The part under `if __name__ == "__main__":` does not run.
    """
    _loading.depth = getattr(_loading, "depth", 0) + 1
    try:
        return _load_module(module_name, target)
    except ModuleNotFoundError as error:
        # A script that serves imports the server, which the interpreter of a worker need not have.
        if not (error.name or "").startswith("pytriton."):
            raise
        raise TargetError(
            f"{target!r}: {module_name} imports {error.name}, which this interpreter ({sys.executable}) has not. "
            'Import it where it is needed, such as under `if __name__ == "__main__":`, or put the callable into a '
            "module of its own, or install the package here",
            target=target,
        ) from error
    finally:
        _loading.depth -= 1


def target_of(function: Callable[..., Any]) -> str:
    """Return the text by which another process finds a function or class of a module.

    Lambdas, nested functions, bound methods and code typed into an interpreter have none, which is an error.
    """
    module_name = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    shown = name or repr(function)
    if not isinstance(module_name, str) or not isinstance(name, str) or "<" in name:
        raise TargetError(
            f"{shown} cannot be found by another process: expected a function or class at the level of a module (no "
            "lambda, none inside of another function, no object). Move it there, or name it as 'module:function'",
            target=str(shown),
        )
    module = sys.modules.get(module_name)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise TargetError(
            f"{module_name}:{name} is another object than the one that was given, so another process would not find "
            "it. Give the object that the module has under this name, or name it as 'module:function'",
            target=f"{module_name}:{name}",
        )
    if module_name not in ("__main__", _SCRIPT_MODULE):
        return f"{module_name}:{name}"
    spec = getattr(module, "__spec__", None)
    if spec is not None and module_name == "__main__":
        # the program was started as `python -m package.module`
        return f"{spec.name}:{name}"
    file = getattr(module, "__file__", None)
    if file is None:
        raise TargetError(
            f"{name} was typed into an interpreter, where another process cannot find it. Put it into a file that can "
            "be imported",
            target=f"__main__:{name}",
        )
    return f"{Path(file).absolute()}:{name}"


def _load_module(module_name: str, target: str) -> ModuleType:
    if module_name.endswith(".py"):
        return _load_file(Path(module_name), target)
    if not all(module_name.split(".")):
        raise TargetError(f"{target!r}: {module_name!r} is not the name of a module", target=target)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        # Another module that this one imports is missing, and its own error says that better.
        if not (module_name == missing or module_name.startswith(f"{missing}.")):
            raise
        raise TargetError(
            f"{target!r}: there is no module {missing!r} in this interpreter ({sys.executable}). Install it there, or "
            "start in the folder that has it",
            target=target,
        ) from error


def _load_file(path: Path, target: str) -> ModuleType:
    loaded = sys.modules.get(_SCRIPT_MODULE)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if not path.is_file():
        raise TargetError(f"{target!r}: there is no file {path}", target=target)
    spec = importlib.util.spec_from_file_location(_SCRIPT_MODULE, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{target!r}: {path} is not a file of Python code", target=target)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT_MODULE] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_SCRIPT_MODULE]
        raise
    return module
