"""Protobuf's text format, as far as model configurations go: a writer and a reader, so that no protobuf is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pytriton.exceptions import PyTritonModelConfigError

_INDENT: Final = "  "
# The text format has short escapes for these, or they would end or change a string.
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
# In JSON these fields look like strings and messages; the text format writes them differently.
_ENUMS: Final = {"data_type", "kind", "timeout_action", "format"}
_MAPS: Final = {"parameters", "priority_queue_policy", "inputs", "metric_tags", "cc_model_filenames"}
_LISTS: Final = {
    "dims", "gpus", "input", "instance_group", "model_warmup", "output", "preferred_batch_size", "profile", "shape",
}  # fmt: skip


# ---- writing --------------------------------------------------------------------------------------------------------


def render(message: Mapping[str, Any]) -> str:
    """Return the text of a configuration, given as the JSON form of Triton's message `ModelConfig`."""
    return "\n".join(_fields(message)) + "\n"


def _fields(message: Mapping[str, Any]) -> Iterator[str]:
    for key, value in message.items():
        name = _snake(key)
        if name in _MAPS:
            for entry, content in value.items():
                label = str(entry) if isinstance(entry, int) else _quoted(entry)
                yield from _block(name, [f"key: {label}", *_entry(content)])
        elif isinstance(value, Mapping):
            yield from _block(name, _fields(value))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for item in value:
                yield from _block(name, _fields(item))
        else:
            yield f"{name}: {_scalar(name, value)}"


def _entry(content: Any) -> Iterator[str]:
    if isinstance(content, Mapping):
        yield from _block("value", _fields(content))
    else:
        yield f"value: {_scalar('value', content)}"


def _block(name: str, lines: Iterator[str] | list[str]) -> Iterator[str]:
    yield f"{name} {{"
    for line in lines:
        yield _INDENT + line
    yield "}"


def _scalar(name: str, value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_scalar(name, item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if name in _ENUMS else _quoted(value)
    return str(value)


def _quoted(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(char) or _plain(char) for char in text) + '"'


def _plain(char: str) -> str:
    if char.isprintable():
        return char
    # Always three digits, so that a following digit does not belong to the escape.
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogatepass"))


def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda capital: "_" + capital.group().lower(), name)


# ---- reading --------------------------------------------------------------------------------------------------------

_TOKEN: Final = re.compile(
    r"""(?P<blank>(?:\s|\#[^\n]*)+)
    |(?P<name>[A-Za-z_][\w.]*)
    |(?P<number>-?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?))
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<sign>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
_ESCAPED: Final = re.compile(
    rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_LETTERS: Final = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_CLOSING: Final = {"{": "}", "<": ">"}
_MAX_DEPTH: Final = 64


def parse_prototxt(text: str, where: str = "the configuration") -> dict[str, Any]:
    """Read the text of a `config.pbtxt` as it is, with every field that it has.

    Args:
        text: A message `ModelConfig` in protobuf's text format.
        where: What to call the text in an error.

    Returns:
        Its fields by name: dictionaries, lists, strings (for enumerators, too), numbers and booleans.

    Raises:
        PyTritonModelConfigError: The text is not in that format; the error says the line and what is there.
    """
    return _Reader(text, where).message(None, 0)


class _Reader:
    """Reads one text, token by token."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where
        self._at = 0
        self._kind = self._token = ""
        self._advance()

    def message(self, closing: str | None, depth: int) -> dict[str, Any]:
        if depth > _MAX_DEPTH:
            raise self._error(f"at most {_MAX_DEPTH} messages in each other")
        found: dict[str, Any] = {}
        while self._kind and self._token != closing:
            if self._kind != "name":
                raise self._error("the name of a field")
            name = self._take()
            has_colon = self._skip(":")
            for value in self._values(has_colon, depth):
                _put(found, name, value)
            if not self._skip(","):
                self._skip(";")
        if closing is not None and not self._skip(closing):
            raise self._error(repr(closing))
        return found

    def _values(self, has_colon: bool, depth: int) -> list[Any]:
        if not self._skip("["):
            return [self._value(has_colon, depth)]
        values: list[Any] = []
        while not self._skip("]"):
            if values and not self._skip(","):
                raise self._error("',' or ']'")
            values.append(self._value(has_colon, depth))
        return values

    def _value(self, has_colon: bool, depth: int) -> Any:
        if self._token in _CLOSING and self._kind == "sign":
            return self.message(_CLOSING[self._take()], depth + 1)
        if not has_colon:
            raise self._error("':' or a message")
        if self._kind == "string":
            parts = []
            while self._kind == "string":
                parts.append(self._take())
            return _unquoted(parts, self)
        if self._kind == "number":
            return self._number(self._take())
        if self._kind == "name":
            word = self._take()
            return {"true": True, "false": False, "True": True, "False": False}.get(word, word)
        raise self._error("a value")

    def _number(self, token: str) -> int | float:
        sign, digits = (-1, token[1:]) if token.startswith("-") else (1, token)
        if digits[:2] in ("0x", "0X"):
            return sign * int(digits, 16)
        if digits.isdigit():
            return sign * int(digits, 8 if digits.startswith("0") and digits.strip("01234567") == "" else 10)
        return sign * float(digits.rstrip("fF"))

    def _skip(self, sign: str) -> bool:
        if self._kind != "sign" or self._token != sign:
            return False
        self._advance()
        return True

    def _take(self) -> str:
        token = self._token
        self._advance()
        return token

    def _advance(self) -> None:
        while True:
            if self._at == len(self._text):
                self._kind = self._token = ""
                return
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                self._kind, self._token = "", self._text[self._at]
                raise self._error("a name, a value or a sign of the format")
            self._at = match.end()
            if match.lastgroup != "blank":
                self._kind, self._token = str(match.lastgroup), match.group()
                return

    def _error(self, expected: str) -> PyTritonModelConfigError:
        line = self._text.count("\n", 0, self._at) + 1
        received = repr(self._token) if self._token else "its end"
        return PyTritonModelConfigError(f"{self._where}, line {line}: expected {expected}, got {received}.")


def _put(found: dict[str, Any], name: str, value: Any) -> None:
    snake = _snake(name)
    if snake in _MAPS and isinstance(value, dict):
        found.setdefault(name, {})[value.get("key", "")] = value.get("value", {})
    elif snake in _LISTS:
        found.setdefault(name, []).append(value)
    elif name in found:
        # This field is repeated, and nobody here reads it.
        found[name] = [*found[name], value] if isinstance(found[name], list) else [found[name], value]
    else:
        found[name] = value


def _unquoted(parts: list[str], reader: _Reader) -> str:
    encoded = b"".join(part[1:-1].encode("utf-8", "surrogatepass") for part in parts)
    decoded = _ESCAPED.sub(_unescaped, encoded)
    try:
        return decoded.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PyTritonModelConfigError(f"{reader._where}: a string is not UTF-8: {decoded!r}.") from error


def _unescaped(match: re.Match[bytes]) -> bytes:
    octal, short, four, eight, letter = match.groups()
    if octal is not None:
        return bytes([int(octal, 8) & 0xFF])
    if short is not None:
        return bytes([int(short, 16)])
    if letter is not None:
        return _LETTERS.get(letter, letter)
    point = int(four or eight, 16)
    return chr(point).encode("utf-8", "surrogatepass") if point <= 0x10FFFF else b"\xff"
