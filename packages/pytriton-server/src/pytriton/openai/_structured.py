"""Answers that are to be JSON: what a request asks for, and whether an answer is that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import referencing
from jsonschema.validators import extend

from pytriton.openai._errors import OpenAIError, model_failed
from pytriton.openai._requests import depth_of

SCHEMA = "json_schema"
"""The optional input for the schema."""

_MOST_SCHEMA_DEPTH = 64


def _takes_all(*_: Any) -> None:
    """Check nothing: a caller's pattern could keep the endpoints busy for ever."""


_Validator: Any = extend(jsonschema.Draft202012Validator, {"pattern": _takes_all, "patternProperties": _takes_all})


class AnswerCheck:
    """Checks that texts are JSON, and match the schema if there is one."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self.schema = schema
        # Without its own registry, the validator would fetch the addresses in `$ref`.
        self._validator = None if schema is None else _Validator(schema, registry=referencing.Registry())

    def check(self, text: str, model: str) -> None:
        """Check a whole text."""
        try:
            value = json.loads(text)
            if self._validator is None:
                problem = None if isinstance(value, dict) else f"expected a JSON object; got {value!r:.100}"
            else:
                error = jsonschema.exceptions.best_match(self._validator.iter_errors(value))
                problem = None if error is None else f"{error.json_path}: {error.message:.200}"
        except (ValueError, RecursionError) as error:
            problem = f"expected JSON ({error}); got {text!r:.100}"
        except referencing.exceptions.Unresolvable as error:
            problem = f"its schema refers to what is not in it ({error})"
        if problem is not None:
            raise model_failed(model, f"its answer does not fit the response_format: {problem}.")


def read_response_format(given: Any) -> AnswerCheck | None:
    """Return the check for the format that was asked for; None if any text will do."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
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
    try:
        _Validator.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise _invalid(f"json_schema.schema: {error.json_path}: {error.message:.200}") from None
    return AnswerCheck(schema)


def _invalid(problem: str) -> OpenAIError:
    return OpenAIError(400, f"response_format: {problem}.", param="response_format", code="invalid_value")
