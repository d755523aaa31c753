"""Origins: which pages of other places a browser lets read a server's answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytriton.exceptions import PyTritonValidationError

ANY_ORIGIN = "*"

# The form in which browsers write it in the header `Origin`.
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)(?::(\d{1,5}))?")
_USUAL_PORTS = {"http": "80", "https": "443"}
_EXPECTED = "origins as browsers send them, such as https://app.example or http://localhost:3000, or * alone"


def check_origins(values: Sequence[str], where: str) -> None:
    """Check that each value is an origin as browsers send it, or that `*` is the only one."""
    for value in values:
        problem = "* stands alone, as it is any origin" if value == ANY_ORIGIN and len(values) > 1 else _problem(value)
        if problem is not None:
            raise PyTritonValidationError(
                f"{where} must hold {_EXPECTED}; got {value!r}: {problem}.", expected=_EXPECTED, received=value
            )


def _problem(value: str) -> str | None:
    if value == ANY_ORIGIN:
        return None
    if "://" not in value:
        return "it has no scheme, such as https://"
    scheme, _, rest = value.partition("://")
    if any(mark in rest for mark in "/?#"):
        return "an origin ends with its host and port, without a path or a slash"
    if "@" in rest:
        return "an origin has no user"
    if value != value.lower():
        return "browsers send it in lower case"
    found = _ORIGIN.fullmatch(value)
    if found is None or (found[3] is not None and not 0 < int(found[3]) < 65536):
        return "it is no scheme, host and port (a name with other letters than ASCII is written as xn--...)"
    if found[3] is not None and _USUAL_PORTS.get(scheme) == found[3]:
        return f"browsers leave out the port {found[3]} of {scheme}"
    return None
