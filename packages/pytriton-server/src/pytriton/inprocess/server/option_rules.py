"""Rules for the values of options: each checks one value and gives it as the C API wants it.

A rule is called with the value and the name of the option, for the text of the error.
"""

from __future__ import annotations

import json
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any

from pytriton.inprocess.capi.errors import InvalidArgumentError, OptionTypeError, RepositoryNotFoundError

Rule = Callable[[Any, str], Any]


def wrong_type(name: str, expected: str, received: object) -> OptionTypeError:
    """Make the error for a value of the wrong type."""
    return OptionTypeError(
        f"Options.{name}: expected {expected}, received {received!r} of type {type(received).__name__}.",
        expected=expected,
        received=received,
        where=f"Options.{name}",
    )


def bad_value(name: str, expected: str, received: object) -> InvalidArgumentError:
    """Make the error for a value that is not accepted."""
    return InvalidArgumentError(
        f"Options.{name}: expected {expected}, received {received!r}.",
        expected=expected,
        received=received,
        where=f"Options.{name}",
    )


def text(value: object, name: str) -> bytes:
    """Accept text without zero characters, which would end it on the C side."""
    if not isinstance(value, str):
        raise wrong_type(name, "a str", value)
    if "\0" in value:
        raise bad_value(name, "text without zero characters", value)
    return value.encode("utf-8", "surrogateescape")


def path(value: object, name: str) -> bytes:
    """Accept a path as text or as an object with `__fspath__`."""
    if not isinstance(value, (str, os.PathLike)):
        raise wrong_type(name, "a path (str or os.PathLike)", value)
    as_text = os.fspath(value)
    if not isinstance(as_text, str):
        raise wrong_type(name, "a path as text", value)
    return text(as_text, name)


def function(value: object, name: str) -> Any:
    """Accept what can be called."""
    if not callable(value):
        raise wrong_type(name, "a callable", value)
    return value


def boolean(value: object, name: str) -> bool:
    """Accept a truth value and nothing that is merely taken for one."""
    if _is_boolean(value):
        return bool(value)
    raise wrong_type(name, "a bool", value)


def _is_boolean(value: object) -> bool:
    # numpy's bool is no Python bool, but means the same.
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _integer(low: int, high: int) -> Rule:
    def check(value: object, name: str) -> int:
        if isinstance(value, bool):
            raise wrong_type(name, "an int", value)
        try:
            integer = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise wrong_type(name, "an int", value) from None
        if not low <= integer <= high:
            # ctypes would cut the number without an error.
            raise bad_value(name, f"an int from {low} to {high}", integer)
        return integer

    return check


int32 = _integer(-(1 << 31), (1 << 31) - 1)
uint31 = _integer(0, (1 << 31) - 1)
uint32 = _integer(0, (1 << 32) - 1)
uint64 = _integer(0, (1 << 64) - 1)


def number(value: object, name: str) -> float:
    """Accept a float or an int, also one of numpy, that is not negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(name, "a float", value)
    as_float = float(value)
    if not as_float >= 0 or as_float == float("inf"):
        raise bad_value(name, "a finite number that is not negative", value)
    return as_float


def setting(value: object, name: str) -> bytes:
    """Accept the value of a setting: text, or a number or truth value that is written as Triton reads it."""
    if _is_boolean(value):
        return b"true" if value else b"false"
    if isinstance(value, numbers.Real):
        return str(value).encode()
    return text(value, name)


def json_text(value: object, name: str) -> bytes:
    """Accept the settings of a cache: a mapping, or the text of a JSON object."""
    if isinstance(value, str):
        try:
            loaded = json.loads(value)
        except ValueError:
            raise bad_value(name, "the text of a JSON object", value) from None
        if not isinstance(loaded, dict):
            raise bad_value(name, "the text of a JSON object", value)
        return text(value, name)
    if not isinstance(value, Mapping):
        raise wrong_type(name, "a dict of settings", value)
    # Triton reads every setting of a cache as text.
    texts = {
        text(key, f"{name} (name of a setting)").decode(): setting(one, f"{name}[{key!r}]").decode()
        for key, one in value.items()
    }
    return json.dumps(texts).encode()


def optional(rule: Rule) -> Rule:
    """Accept `None`, too."""
    return lambda value, name: None if value is None else rule(value, name)


def member_of(enumeration: type[IntEnum]) -> Rule:
    """Accept a member of an enumeration, but not its number, which no reader of the code would understand."""

    def check(value: object, name: str) -> int:
        if not isinstance(value, enumeration):
            raise wrong_type(name, f"a member of {enumeration.__name__}", value)
        return int(value)

    return check


def list_of(rule: Rule) -> Rule:
    """Accept a sequence, but not text, which is one of characters."""

    def check(value: object, name: str) -> list[Any]:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise wrong_type(name, "a list", value)
        return [rule(item, f"{name}[{index}]") for index, item in enumerate(value)]

    return check


def mapping(key_rule: Rule, value_rule: Rule) -> Rule:
    """Accept a mapping."""

    def check(value: object, name: str) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise wrong_type(name, "a dict", value)
        return {key_rule(key, f"{name} (key)"): value_rule(item, f"{name}[{key!r}]") for key, item in value.items()}

    return check


settings = mapping(text, setting)


def record(cls: type, **fields: Rule) -> Rule:
    """Accept an object of a class, whose attributes have rules of their own."""

    def check(value: object, name: str) -> dict[str, Any]:
        if not isinstance(value, cls):
            raise wrong_type(name, f"a {cls.__name__}", value)
        return {key: rule(getattr(value, key), f"{name}.{key}") for key, rule in fields.items()}

    return check


def repositories(value: object) -> list[str]:
    """Accept the model repositories: a path or several."""
    name = "model_repository"
    if value is None:
        raise bad_value(name, "a path or a list of paths", value)
    if isinstance(value, (str, os.PathLike)):
        value = [value]
    paths: list[bytes] = list_of(path)(value, name)
    return [one.decode("utf-8", "surrogateescape") for one in paths]


def existing_folders(paths: list[str]) -> list[bytes]:
    """Check that folders are there."""
    for one in paths:
        # Triton reads remote repositories itself.
        if "://" not in one and not os.path.isdir(one):
            problem = "a file of another kind" if os.path.exists(one) else "nothing there"
            raise RepositoryNotFoundError(
                f"Options.model_repository: expected a folder with models at {one!r} ({os.path.abspath(one)}), found "
                f"{problem}. Create the folder or correct the path.",
                expected="a folder",
                received=one,
                where="Options.model_repository",
            )
    return [one.encode("utf-8", "surrogateescape") for one in paths]
