"""Answers that are to be JSON: what a request asks for, and whether an answer is that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import jsonschema
import referencing
import referencing.jsonschema
from jsonschema.validators import extend

from pytriton.openai._errors import OpenAIError, model_failed
from pytriton.openai._formats.strict_json import STRICT, depth_of

SCHEMA = "json_schema"
"""The optional input for the schema."""

_MOST_SCHEMA_DEPTH = 64
_MOST_SCHEMA_PARTS = 10_000
# How many rules of a schema one check may apply, which takes half a second. With references, a small schema may apply
# very many.
_MOST_STEPS = 100_000
_steps = threading.local()


class _TooManyStepsError(Exception):
    """A check takes too long."""


def _takes_all(*_: Any) -> None:
    """Check nothing: a caller's pattern could keep the endpoints busy for ever."""


def _counted(rule: Callable[..., Iterator[Any] | None]) -> Callable[..., Iterator[Any] | None]:
    @wraps(rule)
    def apply(*arguments: Any) -> Iterator[Any] | None:
        _steps.left -= 1
        if _steps.left < 0:
            raise _TooManyStepsError
        return rule(*arguments)

    return apply


_Validator: Any = extend(
    jsonschema.Draft202012Validator,
    {
        **{name: _counted(rule) for name, rule in jsonschema.Draft202012Validator.VALIDATORS.items()},
        "pattern": _takes_all,
        "patternProperties": _takes_all,
    },
)


class AnswerCheck:
    """Checks that texts are JSON, and match the schema if there is one."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self.schema = schema
        # Without its own registry, the validator would fetch the addresses in `$ref`.
        self._validator = None if schema is None else _Validator(schema, registry=referencing.Registry())

    def check(self, text: str, model: str) -> None:
        """Check a whole text."""
        try:
            problem = self._problem(STRICT.decode(text))
        except (ValueError, RecursionError) as error:
            problem = f"expected JSON ({error}); got {text!r:.100}"
        if problem is not None:
            raise model_failed(model, f"its answer does not fit the response_format: {problem}.")

    def _problem(self, value: Any) -> str | None:
        if self._validator is None:
            return None if isinstance(value, dict) else f"expected a JSON object; got {value!r:.100}"
        _steps.left = _MOST_STEPS
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(value))
        except _TooManyStepsError:
            raise _invalid(
                f"expected a schema whose check takes at most {_MOST_STEPS} steps; this takes more"
            ) from None
        except (RecursionError, referencing.exceptions.Unresolvable) as error:
            raise _invalid(f"json_schema.schema: it refers to itself without end, or to nothing ({error})") from None
        return None if error is None else f"{error.json_path}: {error.message:.200}"


def read_response_format(given: Mapping[str, Any]) -> AnswerCheck:
    """Return the check for a format that was asked for, which is not that of any text."""
    kind = given.get("type")
    if kind == "json_object":
        return AnswerCheck(None)
    told = given.get("json_schema") if kind == "json_schema" else None
    schema = told.get("schema") if isinstance(told, Mapping) else None
    if not isinstance(schema, Mapping):
        raise _invalid(
            'expected {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": '
            f'{{"name": ..., "schema": {{...}}}}}}; got {given!r:.100}'
        )
    if depth_of(schema) > _MOST_SCHEMA_DEPTH:
        raise _invalid(f"expected a schema of at most {_MOST_SCHEMA_DEPTH} levels")
    if (count := _count_of(schema)) > _MOST_SCHEMA_PARTS:
        raise _invalid(f"expected a schema of at most {_MOST_SCHEMA_PARTS} objects, lists and values; got {count}")
    try:
        # Formats are not checked, because the format of patterns would compile them.
        _Validator.check_schema(schema, format_checker=jsonschema.FormatChecker(()))
        resource = referencing.jsonschema.DRAFT202012.create_resource(schema)
        _look_up(resource, referencing.Registry().resolver_with_root(resource))
    except jsonschema.exceptions.SchemaError as error:
        raise _invalid(f"json_schema.schema: {error.json_path}: {error.message:.200}") from None
    except referencing.exceptions.Unresolvable as error:
        raise _invalid(f"json_schema.schema: it refers to what is not in it, {error.ref!r:.100}") from None
    return AnswerCheck(schema)


def _count_of(value: Any) -> int:
    count, left = 0, [value]
    while left:
        each = left.pop()
        count += 1
        left += each.values() if isinstance(each, Mapping) else each if isinstance(each, list) else ()
    return count


def _look_up(resource: Any, resolver: Any) -> None:
    """Look all references of a schema up."""
    reference = resource.contents.get("$ref") if isinstance(resource.contents, Mapping) else None
    if isinstance(reference, str):
        resolver.lookup(reference)
    for part in resource.subresources():
        _look_up(part, resolver.in_subresource(part))


def _invalid(problem: str) -> OpenAIError:
    return OpenAIError(400, f"response_format: {problem}.", param="response_format", code="invalid_value")
