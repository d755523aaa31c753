"""The published vulnerabilities of tritonserver: which of them a version has, and what of them is covered here.

The list itself is in `pytriton.server.tritonserver.advisories_known`.
"""

from __future__ import annotations

from pytriton.server.tritonserver.advisories_known import ADVISORIES, KNOWN_AS_OF, NEWEST_KNOWN_VERSION, Advisory, Guard
from pytriton.server.tritonserver.version import parse_server_version

__all__ = [
    "ADVISORIES",
    "KNOWN_AS_OF",
    "NEWEST_KNOWN_VERSION",
    "Advisory",
    "Guard",
    "advisories_of",
    "is_newer_than_known",
]


def advisories_of(version: str) -> list[Advisory]:
    """Give what is known of a version of tritonserver, the most severe first.

    Every version before the one with the fix counts as affected: bulletins rarely say where a fault came in.

    Args:
        version: Such as `"2.51.0"`.

    Raises:
        ValueError: It is no version.
    """
    wanted = _parsed(version)
    found = [advisory for advisory in ADVISORIES if wanted < _parsed(advisory.fixed_in)]
    return sorted(found, key=lambda advisory: (-advisory.severity, advisory.id))


def is_newer_than_known(version: str) -> bool:
    """Return whether a version came out after the list was written, so that little of it can be in there.

    Raises:
        ValueError: It is no version.
    """
    return _parsed(version) > _parsed(NEWEST_KNOWN_VERSION)


def _parsed(version: str) -> tuple[int, int, int]:
    parsed = parse_server_version(version)
    if parsed is None:
        raise ValueError(f"expected a version of tritonserver, such as '2.51.0', got {version!r}")
    return parsed
