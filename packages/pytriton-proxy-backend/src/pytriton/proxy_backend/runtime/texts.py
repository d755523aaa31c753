"""Texts of what user code raises and returns, whatever its own `__str__` and `__repr__` do."""

from __future__ import annotations

import traceback

from ..system.escapes import escaped, escaped_lines
from ..wire import layout

_MAX_SHOWN = 200
_LEFT_OUT = b" [...] "

# gRPC sends a text in a header, percent-encoded, and clients take 8 KiB of headers; some of it is not ours.
_MAX_ENCODED = 7 << 10
_PERCENT = ord("%")


def error_text(error: BaseException) -> str:
    """Return the text of an error; says so where it has none because its `__str__` fails."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be told: __str__ raised {type(failure).__name__}>"


def told_error(error: BaseException) -> str:
    """Return the text of an error for a log; what it has from a caller looks like no line and no colour there."""
    return escaped_lines(error_text(error))


def told_trace(error: BaseException) -> str:
    """Return the traceback of an error for a log; likewise."""
    text = "".join(traceback.format_exception(error))
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            said = error_text(one)
            if "\n" in said:
                text = text.replace(said, escaped_lines(said))
            chain += [one.__cause__, one.__context__]
    return "\n".join(map(escaped, text.split("\n")))


def shown(value: object) -> str:
    """Return the `repr` of a value, the begin of it where it is long."""
    try:
        text = repr(value)
    except Exception as failure:
        return f"<__repr__ raised {type(failure).__name__}>"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 has a form for a text: not for the half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shortened(text: str) -> str:
    """Return a text that fits into a message, and into the trailers of gRPC: of a longer one, the begin and the end.

    What UTF-8 has no form for, the half of a surrogate pair, is replaced.
    """
    raw = text.encode("utf-8", "replace")
    kept = _both_ends(raw, layout.MAX_TEXT)
    if _encoded_size(kept) > _MAX_ENCODED:
        kept = _both_ends(raw, _MAX_ENCODED // 3)
    return kept.decode("utf-8", "ignore")


def _both_ends(raw: bytes, limit: int) -> bytes:
    if len(raw) <= limit:
        return raw
    begin = limit // 4
    end = limit - begin - len(_LEFT_OUT)
    return raw[:begin] + _LEFT_OUT + raw[-end:]


def _encoded_size(raw: bytes) -> int:
    plain = sum(0x20 <= byte < 0x7F and byte != _PERCENT for byte in raw)
    return plain + 3 * (len(raw) - plain)
