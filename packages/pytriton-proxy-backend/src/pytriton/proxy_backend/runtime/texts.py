"""Texts of what user code raises and returns, whatever its own `__str__` and `__repr__` do."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator

from ..system.escapes import escaped, escaped_lines
from ..wire import layout

_MAX_SHOWN = 200
_LEFT_OUT = b" [...] "

# gRPC sends a text percent-encoded in a header. Clients accept 8 KiB of headers, some of which are not ours.
_MAX_ENCODED = 7 << 10
_PERCENT = ord("%")

# Frames of the standard library lie between the server and the user's code.
_STDLIB = os.path.dirname(os.__file__) + os.sep
# Decorators call the decorated function through it.
_CALLERS = (f"{os.sep}wrapt{os.sep}",)
_INSTALLED = ("site-packages", "dist-packages")


def error_text(error: BaseException) -> str:
    """Return the text of an error, or that its `__str__` fails."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be told: __str__ raised {type(failure).__name__}>"


def told_error(error: BaseException) -> str:
    """Return the text of an error for a log, escaped, because a caller may have chosen parts of it."""
    return escaped_lines(error_text(error))


def format_trace(error: BaseException) -> str:
    """Return the traceback of an error and its causes from the user's first frame on; all if there is none."""
    told = traceback.TracebackException.from_exception(error, compact=True)
    folders = _own_folders()
    for each in _chain(told, set()):
        frames = list(each.stack)
        # A syntax error names its place itself, and has no frame for it.
        none = len(frames) if getattr(each, "filename", None) else 0
        begin = next((i for i, frame in enumerate(frames) if not _is_between(frame.filename, folders)), none)
        each.stack = traceback.StackSummary.from_list(frames[begin:])
    return "".join(told.format())


def told_trace(error: BaseException) -> str:
    """Return the traceback of an error for a log, from the user's first frame on, escaped."""
    text = format_trace(error)
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
    """Return the `repr` of a value, cut if it is long."""
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
    """Return a text that fits into a message and into gRPC's trailers; a longer one keeps its begin and end.

    Halves of surrogate pairs, which UTF-8 cannot encode, are replaced, and so is NUL, which would end it for Triton.
    """
    raw = text.encode("utf-8", "replace").replace(b"\0", rb"\0")
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


def _chain(told: traceback.TracebackException, seen: set[int]) -> Iterator[traceback.TracebackException]:
    if id(told) in seen:
        return
    seen.add(id(told))
    yield told
    # Exception groups exist since Python 3.11.
    for each in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if each is not None:
            yield from _chain(each, seen)


def _own_folders() -> tuple[str, ...]:
    """Return the folders of pytriton, of which an installation for development has several."""
    package = sys.modules.get("pytriton")
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return tuple({f"{path}{os.sep}" for path in (own, *getattr(package, "__path__", ()))})


def _is_between(file: str, folders: tuple[str, ...]) -> bool:
    """Return whether code of a file stands between the server and the user's code."""
    if file.startswith((*folders, "<frozen ")):
        return True
    if any(part in file for part in _CALLERS):
        return True
    return file.startswith(_STDLIB) and not any(part in file for part in _INSTALLED)
