"""The published vulnerabilities of tritonserver: which of them a version has, and what the guard does about each.

The list is `advisories.json` beside this file.

Sources: ids, severities (CVSS 3.1 base scores), descriptions and first fixed releases are those of NVIDIA's security
bulletins 5509 (2023), 5535, 5546, 5565 (2024), 5612, 5687, 5691, 5723, 5734 (2025), 5790, 5816, 5828, 5848, 5853, 5865
and 5875 (2026) in the repository NVIDIA/product-security on GitHub, read as they were on 2026-09-08. Versions are those
that the repository triton-inference-server/server names for the branches of these releases.

The bulletins rarely say which request does the harm. Where a change between a release and the one before fits, `change`
names its pull request, and component and summary follow it. That it is the one is our reading, not NVIDIA's word; where
two numbers fit two changes alike, which is which is arbitrary. Where none is known to fit, `change` is empty.

Left out: the plugin for MLflow (CVE-2026-47487), which is no part of the server.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytriton.server.tritonserver.version import parse_server_version

_DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

KNOWN_AS_OF: str = _DATA["known_as_of"]
"""Day of the newest bulletin in the list."""
NEWEST_KNOWN_VERSION: str = _DATA["newest_known_version"]
"""The list covers the changes up to this version."""
RELEASES: dict[str, str] = _DATA["releases"]
"""Versions and the releases that they came with."""


class Coverage(enum.Enum):
    """How the guard treats a vulnerability."""

    COVERED = "covered"
    PARTLY = "partly"
    NOT_COVERED = "not covered"
    UNKNOWN = "not known"
    """NVIDIA has not published which request triggers it."""


@dataclass(frozen=True)
class Advisory:
    """A published vulnerability of tritonserver."""

    id: str  # its number
    severity: float  # CVSS 3.1 base score of the bulletin
    fixed_in: str  # first version of tritonserver without it
    component: str  # where it is
    guard: Coverage  # what the guard does about it
    summary: str  # what happens, in a sentence
    also: str = ""  # what else helps, by default or by a setting; empty if nothing does
    change: str = ""  # pull request that fits, `repository#number`; empty if none is known

    @property
    def release(self) -> str:
        """The release that `fixed_in` came with, such as `25.07`."""
        return RELEASES[self.fixed_in]


ADVISORIES = tuple(Advisory(**{**fields, "guard": Coverage(fields["guard"])}) for fields in _DATA["advisories"])
"""All of them, in the order of the versions that fixed them."""


def advisories_of(version: str) -> list[Advisory]:
    """Return the known vulnerabilities of a version, the most severe first.

    Every version before the fix counts, because bulletins rarely say where a fault began.
    """
    wanted = _parsed(version)
    found = [advisory for advisory in ADVISORIES if wanted < _parsed(advisory.fixed_in)]
    return sorted(found, key=lambda advisory: (-advisory.severity, advisory.id))


def is_newer_than_known(version: str) -> bool:
    """Return whether a version is newer than the list of vulnerabilities."""
    return _parsed(version) > _parsed(NEWEST_KNOWN_VERSION)


def _parsed(version: str) -> tuple[int, int, int]:
    parsed = parse_server_version(version)
    if parsed is None:
        raise ValueError(f"expected a version of tritonserver, such as '2.51.0', got {version!r}")
    return parsed
