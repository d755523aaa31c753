"""What `serve` is to serve: the models of a file or module, or the one thing in it that is named."""

import contextlib
import difflib
import importlib
import importlib.machinery
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pytriton.decorators import get_model_signature
from pytriton.decorators.serving import find_signature
from pytriton.exceptions import PyTritonError
from pytriton.proxy_backend import TargetError
from pytriton.proxy_backend.worker.loading import load_module
from pytriton.server.lifecycle.stop_signals import StopRequested
from pytriton.triton import Triton

_EXAMPLE = """decorate a function with @model, as in

from pytriton.decorators import model


@model
def shout(text: str) -> str:
    return text.upper()
"""


class UserCodeError(Exception):
    """The target's code raised an error (the text is the user's part of its traceback), or cannot be reloaded."""


def folder_of(text: str) -> Path:
    """Return the folder of a file to be served; for a module, the current folder."""
    place = _split(text)[0]
    return Path(place).absolute().parent if place.endswith(".py") else Path.cwd()


def load_served(text: str, *, again: bool = False) -> "Triton | dict[str, Any]":
    """Import what is to be served: `path/to/app.py` or `package.module`, with a colon and a name for one object alone.

    Returns the `Triton` that is named, or that the named function makes; otherwise the models, by the targets under
    which worker processes find them. Without a name, these are the functions and classes under `@model` that the module
    itself defines. With `again`, modules from its folder are imported anew.
    """
    place, name = _split(text)
    if not place.endswith(".py") or not Path(place).exists():
        _check_is_no_slip(text, place)
    folder = str(folder_of(text))
    if place.endswith(".py"):
        place = str(Path(place).absolute())
    if folder not in sys.path:
        # `python app.py` and `python -m package.module` do the same; worker processes inherit these paths.
        sys.path.insert(0, folder)
    with _without_modules_of(folder) if again else contextlib.nullcontext():
        return _load(text, place, name)


def _check_is_no_slip(text: str, place: str) -> None:
    """Raise an error if a name that is no file looks like a mistyped one."""
    path = Path(place)
    folder = path if path.is_dir() else path.parent
    files = sorted(each.name for each in folder.glob("*.py")) if folder.is_dir() else []
    first = place.partition(".")[0]
    is_name = path.name == place and bool(first)
    spec = importlib.machinery.PathFinder.find_spec(first, [os.getcwd(), *sys.path]) if is_name else None
    is_module = spec is not None and ("." not in place or spec.submodule_search_locations is not None)
    if path.is_dir() and not (is_module and (path / "__init__.py").exists()):
        shown = ", ".join(str(folder / each) for each in files) or "none"
        raise TargetError(f"{text!r} is a folder: name a file or a module. Its files: {shown}.", target=text)
    likely = difflib.get_close_matches(path.name, files, 1)
    if likely and not is_module:
        raise TargetError(f"There is no {text!r}. Did you mean {folder / likely[0]}?", target=text)


def _split(text: str) -> tuple[str, str]:
    place, _, name = (text, "", "") if text.endswith(".py") else text.partition(":")
    return place, name


@contextlib.contextmanager
def _without_modules_of(folder: str) -> Iterator[None]:
    """Let modules of a folder be imported again; if the block fails, the old ones are restored."""
    own = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Packages installed below the folder do not count.
        if file and name != "__main__" and file.startswith(f"{folder}{os.sep}") and "site-packages" not in file:
            own[name] = module
    for name in own:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        sys.modules.update(own)
        raise


def _load(text: str, place: str, name: str) -> "Triton | dict[str, Any]":
    module = _call(lambda: load_module(place, text), f"{text} fails when it is imported")
    if not name:
        models = {f"{place}:{name}": found for name, found in _models(module) if _is_own(found, module)}
        if not models:
            raise TargetError(_nothing_found(module, text), target=text)
        _check_names(models, text)
        return models
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            there = ", ".join(name for name, _ in [*_models(module), *_tritons(module)]) or "none"
            raise TargetError(f"{text!r}: there is no {name!r}. What can be served: {there}.", target=text) from None
    if find_signature(found) is not None:
        return {f"{place}:{name}": found}
    if inspect.isfunction(found) and not inspect.signature(found).parameters:
        found = _call(found, f"{text} fails when it is called")
    if isinstance(found, Triton):
        return found
    raise TargetError(
        f"{text!r} is {found!r}: expected a function or class under @model of pytriton.decorators, an object of such a "
        "class, a Triton, or a function without parameters that returns one.",
        target=text,
    )


def _check_names(models: dict[str, Any], text: str) -> None:
    """Check that no two models have one name."""
    places: dict[str, str] = {}
    for place, model in models.items():
        name = get_model_signature(model).name
        own = place.rpartition(":")[2]
        if name in places:
            raise TargetError(
                f"{text!r}: {places[name]} and {own} are both named {name!r}, and a server has one model of a name. "
                f"Give one of them another, @model(name=...), or serve one of them alone, {text}:{own}.",
                target=text,
            )
        places[name] = own


def _models(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the models of a module, each once, in its order."""
    seen = set()
    for name, found in list(vars(module).items()):
        if id(found) not in seen and find_signature(found) is not None:
            seen.add(id(found))
            yield name, found


def _tritons(module: ModuleType) -> Iterator[tuple[str, Triton]]:
    return ((name, found) for name, found in list(vars(module).items()) if isinstance(found, Triton))


def _is_own(found: Any, module: ModuleType) -> bool:
    """Return whether the module itself defines this class or function, so that nobody has to name it."""
    return hasattr(found, "__qualname__") and found.__module__ == module.__name__


def _nothing_found(module: ModuleType, text: str) -> str:
    others = [f"{text}:{name}" for name, _ in [*_models(module), *_tritons(module)]]
    if others:
        return f"{text!r} defines no model itself. Name what it imports or makes: {', '.join(others)}."
    return f"{text!r} defines no model: {_EXAMPLE}"


def _call(function: Callable[[], Any], failure: str) -> Any:
    try:
        return function()
    except (TargetError, StopRequested):
        raise
    except (Exception, SystemExit) as error:
        raise user_code_error(failure, error) from error


def user_code_error(failure: str, error: BaseException) -> UserCodeError:
    """Return the text for an error that the user's code has raised."""
    return UserCodeError(f"{failure}:\n{_traceback_of(error)}")


def _traceback_of(error: BaseException) -> str:
    """Return the traceback of an error of the user's code, without the frames through which that was called."""
    told = traceback.TracebackException.from_exception(error)
    ours = tuple(f"{path}{os.sep}" for path in sys.modules["pytriton"].__path__)
    frames = [
        frame
        for frame in told.stack
        if frame.filename != importlib.__file__ and not frame.filename.startswith("<frozen importlib")
    ]
    if isinstance(error, PyTritonError):
        # The text says what is wrong, and the last frame of the user where.
        frames = [frame for frame in frames if not frame.filename.startswith(ours)]
        told.__cause__ = told.__context__ = None
    else:
        frames = list(itertools.dropwhile(lambda frame: frame.filename.startswith(ours), frames))
    told.stack = traceback.StackSummary.from_list(frames)
    return "".join(told.format()).rstrip()
