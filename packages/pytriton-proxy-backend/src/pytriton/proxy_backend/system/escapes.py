"""Texts of others in a log: nothing in them moves a cursor, colours a terminal, or looks like a line of our own."""

from __future__ import annotations

import re
from typing import TextIO

# Control characters of ASCII and Latin-1 (with the sequences of terminals) except the tab, separators of lines,
# characters that change the direction of text, and halves of surrogate pairs, which no file can hold.
_UNSAFE = re.compile("[\0-\x08\n-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MARGIN = "    "


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream, such as `sys.stdout`, is a terminal."""
    return stream is not None and not stream.closed and stream.isatty()


def escaped(text: str) -> str:
    r"""Return a text as one line of a log, with escapes such as `\n` or `\x1b` for all control characters."""
    return _UNSAFE.sub(_escape, text)


def escaped_lines(text: str) -> str:
    """Return a text of one or more lines for a log, escaped, with a margin before all but the first."""
    if "\n" not in text:
        return escaped(text)
    return f"\n{_MARGIN}".join(escaped(line.rstrip("\r")) for line in text.split("\n"))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
