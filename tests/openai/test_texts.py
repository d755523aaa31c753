"""What texts of models are read as does not depend on the borders of their parts, nor on what callers put into them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pytriton.openai._errors import OpenAIError
from pytriton.openai._formats.schemas import read_response_format
from pytriton.openai._formats.strict_json import JsonAnswer, make_decoder
from pytriton.openai._formats.tool_calls import ToolText
from pytriton.openai._requests import ChatRequest
from pytriton.openai._texts import Stops


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in itertools.pairwise(borders)]


quietly = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quietly
@given(
    st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0))
)
def test_stops(text: str, stops: list[str], places: list[int]) -> None:
    found = Stops(stops)
    told = ""
    for part in cut(text, places):
        told += found.feed(part)
        if found.is_over:
            break
    told += found.end()
    # The first text that has come to its end, as an engine sees it that looks after each character.
    ends = [(at, at - len(stop)) for at in range(len(text) + 1) for stop in stops if text[:at].endswith(stop) and at]
    assert told == (text if not ends else text[: min(ends)[1]])
    assert found.is_over == bool(ends)


CALL = '{"name": "f", "arguments": {"a": "x"}}'
INNER = '{"name": "g", "arguments": {"a": "</tool_call> <tool_call>"}}'
HERMES = ["<tool_call>", "</tool_call>", CALL, INNER, '{"name": "f', '"', "text", " ", "\n", "{}"]
MISTRAL = ["[TOOL_CALLS]", "f[ARGS]", "f", ' {"a": "[TOOL_CALLS]"}', "{}", f"[{CALL}]", " ", "text", "[TOOL", "{"]
LLAMA = ["<|python_tag|>", CALL, '{"name": "Ada", "born": 1815}', '{"name": "h", "parameters": {}}', ";", " ", "text"]


def read(parser: str, parts: list[str]) -> tuple[str, list[Any]]:
    tools = ToolText(parser, {"f", "g"})
    told, calls = "", []
    for step in [*(lambda part=part: tools.feed(part) for part in parts), tools.end]:
        more, found = step()
        told += more
        calls += found
    return told, calls


@pytest.mark.parametrize(("parser", "pieces"), [("hermes", HERMES), ("mistral", MISTRAL), ("llama3", LLAMA)])
def test_calls_in_texts(parser: str, pieces: list[str]) -> None:
    @quietly
    @given(st.lists(st.sampled_from(pieces), max_size=8).map("".join), st.lists(st.integers(0)))
    def check(text: str, places: list[int]) -> None:
        assert read(parser, cut(text, places)) == read(parser, [text])

    check()


@pytest.mark.parametrize(
    ("parser", "text", "said", "names"),
    [
        ("hermes", f"<tool_call>{INNER}</tool_call>", "", ["g"]),
        ("hermes", f'<tool_call>{{"name": "f</tool_call> {CALL}', f'<tool_call>{{"name": "f</tool_call> {CALL}', []),
        ("hermes", f'<tool_call>{{"n</tool_call><tool_call>{CALL}</tool_call>', '<tool_call>{"n</tool_call>', ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, []),
        ("mistral", '[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g{}', "", ["f", "g"]),
        ("llama3", CALL, "", ["f"]),
        ("llama3", '{"name": "f", "parameters": {}}', "", ["f"]),
        # Answers of JSON, as an agent with a form of its answer gets them.
        ("llama3", '{"name": "f", "born": 1815}', None, []),
        ("llama3", '{"name": "Ada", "arguments": {}}', None, []),
        ("llama3", '[{"name": "Ada"}, {"name": "Grace"}]', None, []),
    ],
)
def test_what_is_a_call(parser: str, text: str, said: str | None, names: list[str]) -> None:
    told, calls = read(parser, [text])
    assert told == (text if said is None else said)
    assert [call["name"] for call in calls] == names


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "[1, 1e999]", '{"a": Infinity}', "-1e400"])
def test_numbers_that_json_lacks(text: str) -> None:
    with pytest.raises(ValueError, match="no number that JSON"):
        make_decoder().decode(text)
    assert make_decoder({"-Infinity": -9999.0}).decode("[-Infinity, 1.5]") == [-9999.0, 1.5]


def test_half_a_character_can_be_answered() -> None:
    assert JsonAnswer({"a": "\ud800", "b": "ü"}).body == b'{"a":"\\ud800","b":"\\u00fc"}'


def checked(schema: Any) -> Callable[[str], None]:
    check = read_response_format({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
    return lambda text: check.check(text, "m")


def test_schemas_that_would_take_for_ever() -> None:
    levels = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    with pytest.raises(OpenAIError, match=r"at most 100000 steps") as refused:
        checked({"$ref": "#/$defs/d0", "$defs": {**levels, "d40": {}}})("{}")
    assert refused.value.status == 400
    with pytest.raises(OpenAIError, match="refers to itself without end") as refused:
        checked({"$ref": "#"})("{}")
    assert refused.value.status == 400
    with pytest.raises(OpenAIError, match="at most 10000 objects, lists and values; got 20002"):
        checked({"enum": list(range(20_000))})
    # They are not compiled.
    for pattern in ("(" * 3000, "a{99999999999}"):
        checked({"properties": {"a": {"pattern": pattern}}})('{"a": "b"}')


@pytest.mark.parametrize("reference", ["#/$defs/no", "http://127.0.0.1:1/schema", "other"])
def test_references_to_nothing_are_refused_before_the_model_is_asked(reference: str) -> None:
    with pytest.raises(OpenAIError, match="refers to what is not in it") as refused:
        checked({"properties": {"a": [{"$ref": reference}, {"items": {"$ref": reference}}][1]}})
    assert refused.value.status == 400


def test_references_within_a_schema() -> None:
    part = {"$id": "part", "$defs": {"n": {"$anchor": "here", "type": "integer"}}}
    schema = {"$id": "http://a.example/b", "$defs": {"x": part}, "items": {"$ref": "part#here"}}
    checked(schema)("[1, 2]")
    with pytest.raises(OpenAIError, match="is not of type 'integer'"):
        checked(schema)('["a"]')


@pytest.mark.parametrize("name", ["messages", "stop", "tools"])
def test_one_wrong_element_is_enough(name: str) -> None:
    body = json.loads(json.dumps({"model": "m", "messages": [{}], name: [1] * 10_000}))
    with pytest.raises(ValidationError) as refused:
        ChatRequest.model_validate(body)
    assert refused.value.error_count() <= 2
