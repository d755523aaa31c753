"""The calls of tools that a model makes: as an output of its own, or within its text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytriton.openai._errors import OpenAIError, model_failed
from pytriton.openai._formats.strict_json import STRICT

_MOST_CALLS = 128
_SEPARATORS = " \t\r\n;,"
_MISTRAL_NAME = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:\[ARGS\]\s*)?(?=\{)")


@dataclass(frozen=True)
class _Form:
    """How a family of models writes calls."""

    begin: str  # what stands in front of them
    end: str | None  # what stands behind each; None where they go on to the end of the text
    is_bare: bool  # whether a text that begins with an object of JSON is a call, too
    read: Callable[[str], list[Mapping[str, Any]]]  # returns the calls of what is between


def _read_objects(text: str) -> list[Mapping[str, Any]]:
    """Return the calls of objects behind each other, or of an array of them."""
    calls: list[Mapping[str, Any]] = []
    at = 0
    while at < len(text):
        if text[at] in _SEPARATORS:
            at += 1
            continue
        value, at = STRICT.raw_decode(text, at)
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                raise ValueError("expected an object with a name")
            calls.append(call)
    if not calls:
        raise ValueError("expected a call")
    return calls


def _read_mistral(text: str) -> list[Mapping[str, Any]]:
    """Return the calls of an array, or of names that each have their arguments behind them."""
    if text.lstrip().startswith("["):
        return _read_objects(text)
    calls: list[Mapping[str, Any]] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text.startswith("[TOOL_CALLS]", at):
            at += len("[TOOL_CALLS]")
        elif (name := _MISTRAL_NAME.match(text, at)) is not None:
            # The arguments are read as JSON, because a text in them may contain the marker of a call.
            arguments, at = STRICT.raw_decode(text, name.end())
            calls.append({"name": name[1], "arguments": arguments})
        else:
            raise ValueError("expected the name of a tool and an object")
    return calls


TOOL_PARSERS: Mapping[str, _Form] = {
    "hermes": _Form("<tool_call>", "</tool_call>", False, _read_objects),
    "llama3": _Form("<|python_tag|>", None, True, _read_objects),
    "mistral": _Form("[TOOL_CALLS]", None, False, _read_mistral),
}
"""By the name of the family that wrote so first; Qwen writes as Hermes."""


def longest_begin(text: str, ends: Sequence[str]) -> int:
    """Return the start of the longest suffix of `text` with which one of `ends` begins."""
    longest = max(map(len, ends), default=1) - 1
    tail = text[max(0, len(text) - longest) :]
    found = next((at for at in range(len(tail)) if any(end.startswith(tail[at:]) for end in ends)), len(tail))
    return len(text) - len(tail) + found


class ToolText:
    """Takes the calls out of a text that comes in parts.

    It reports a complete call; text that only looks like a call stays text.

    Args:
        parser: The form of the calls.
        tools: The names of the tools: an object alone is a call only of one of them.
    """

    def __init__(self, parser: str, tools: Collection[str]) -> None:
        self._form = TOOL_PARSERS[parser]
        self._tools = tools
        self._held = ""
        self._begin: str | None = None  # what the call began with that is read
        self._has_text = False
        self._tried = 0  # how far ends of the call were looked for

    def feed(self, text: str) -> tuple[str, list[Mapping[str, Any]]]:
        """Take the next part; return the text that is surely no call, and the complete calls."""
        self._held += text
        return self._take(is_last=False)

    def end(self) -> tuple[str, list[Mapping[str, Any]]]:
        """Return what was held back, when no part follows."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> tuple[str, list[Mapping[str, Any]]]:
        told = ""
        calls: list[Mapping[str, Any]] = []
        while True:
            if self._begin is None:
                told += self._before()
            if self._begin is None or (found := self._inside(is_last=is_last)) is None:
                break
            told += found[0]
            calls += found[1]
        if is_last:
            held, self._held = self._held, ""
            if self._begin is not None:
                found = self._rest(held, self._begin)
                told += found[0]
                calls += found[1]
            elif held.strip() or self._has_text:
                told += held
        return told, calls

    def _before(self) -> str:
        """Return the text in front of the next call, and see whether that has begun."""
        form = self._form
        if not self._has_text and form.is_bare and self._held.lstrip()[:1] in ("{", "["):
            self._begin = ""
            return ""
        text, begin, rest = self._held.partition(form.begin)
        if begin:
            self._begin, self._held = begin, rest
            text = text.rstrip()
        else:
            # White space before a call does not count as text.
            at = longest_begin(text, [form.begin])
            at = len(text[:at].rstrip())
            self._held, text = text[at:], text[:at]
        self._has_text = self._has_text or bool(text)
        return text

    def _inside(self, *, is_last: bool) -> tuple[str, list[Mapping[str, Any]]] | None:
        """Return what a call is that has come to its end, and go behind it; None where it has not."""
        end = self._form.end
        if end is None:
            return None
        first = self._held.find(end)
        while (at := self._held.find(end, self._tried)) >= 0:
            try:
                calls = self._form.read(self._held[:at])
            except (ValueError, RecursionError) as error:
                if _is_within_text(error):
                    self._tried = at + len(end)
                    continue
                break
            self._go_behind(at, end)
            return "", calls
        if at < 0 and (first < 0 or not is_last):
            return None
        # The part up to the first end mark is no call. The text behind it may have calls.
        text = f"{self._begin}{self._held[:first]}{end}"
        self._has_text = True
        self._go_behind(first, end)
        return text, []

    def _go_behind(self, at: int, end: str) -> None:
        self._held = self._held[at + len(end) :]
        self._begin, self._tried = None, 0

    def _rest(self, inside: str, begin: str) -> tuple[str, list[Mapping[str, Any]]]:
        """Return what a call is that goes on to the end of the text."""
        try:
            calls = self._form.read(inside)
            if not begin:
                for call in calls:
                    if call["name"] not in self._tools or not {"arguments", "parameters"} & call.keys():
                        raise ValueError("an object with a name, as an answer of JSON may be")
        except (ValueError, RecursionError):
            self._has_text = True
            return begin + inside, []
        return "", calls


def _is_within_text(error: Exception) -> bool:
    """Return whether JSON cannot be read because it was cut within a text of it."""
    return isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string")


@dataclass
class CallDeltas:
    """Makes the deltas of OpenAI's streams from the calls in a model's output."""

    model: str
    _begun: set[int] = field(default_factory=set)
    _last: int = -1

    @property
    def any(self) -> bool:
        """Whether there was one."""
        return bool(self._begun)

    def read(self, text: str) -> list[dict[str, Any]]:
        """Return the deltas for an output `tool_calls`: JSON of a call or a piece of one, or of a list of them."""
        if not text.strip():
            return []
        try:
            value = STRICT.decode(text)
        except (ValueError, RecursionError) as error:
            raise self._failed(f"no JSON ({error})", text) from None
        return [self.make(call) for call in (value if isinstance(value, list) else [value])]

    def make(self, call: Any) -> dict[str, Any]:
        """Return the delta for a call, or for a piece of one."""
        if not isinstance(call, dict):
            raise self._failed("no call", call)
        within = call.get("function")
        function = within if isinstance(within, dict) else call
        name = function.get("name")
        arguments = function.get("arguments", function.get("parameters"))
        if arguments is None:
            arguments = "{}" if name is not None and "index" not in call else ""
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        index = call.get("index")
        if index is None:
            index = self._last + 1 if name is not None else self._last
        if type(index) is not int or not 0 <= index < _MOST_CALLS:
            raise self._failed(f"no call with an index from 0 to {_MOST_CALLS - 1}", call)
        self._last = index
        if index in self._begun:
            return {"index": index, "function": {"arguments": arguments}}
        if not isinstance(name, str):
            raise self._failed("a call without the name of its function", call)
        self._begun.add(index)
        identity = call.get("id") or f"call_{uuid.uuid4().hex[:24]}"
        return {
            "index": index,
            "id": str(identity),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _failed(self, what: str, got: Any) -> OpenAIError:
        expected = 'calls of tools, {"name": ..., "arguments": {...}} or as OpenAI writes them'
        return model_failed(self.model, f"expected {expected}; got {what}: {got!r:.100}.")


def joined_calls(deltas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls that deltas are of, whole."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta["index"] not in calls:
            calls[delta["index"]] = {
                "id": delta["id"], "type": delta["type"], "function": dict(delta["function"])
            }  # fmt: skip
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return [calls[index] for index in sorted(calls)]
