"""Checks that `dev.py test --ci` skipped no test but those that `tools/skips.toml` allows, and says which they were.

A test that needs a package or a program skips itself where there is none, so that everybody can run the rest. In CI
that would hide it: a package that is missing from an environment takes whole modules along, and all stays green.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tomli

LIST = Path(__file__).with_name("skips.toml")
PROGRAMS_VARIABLE = "PYTRITON_CI_PROGRAMS"
"""Environment variable that `.ci/run` sets where programs can be installed: what needs one has to run then."""


class Skip(NamedTuple):
    """A test, or a module of tests, that was skipped."""

    step: str
    test: str
    reason: str


def skips_of(report: Path) -> Iterator[Skip]:
    """Yield what was skipped in one step, by the report in JUnit's format that pytest has written of it."""
    for case in ET.parse(report).iter("testcase"):
        for skipped in case.findall("skipped"):
            if skipped.get("type") != "pytest.xfail":
                # Of a module that was skipped as a whole, the text alone says why.
                message, text = skipped.get("message", ""), skipped.text or ""
                reason = (
                    text.partition("Skipped: ")[2].rstrip("')\"\n ") if message == "collection skipped" else message
                )
                yield Skip(report.stem, f"{case.get('classname') or ''}.{case.get('name')}".lstrip("."), reason)


def why_allowed(skip: Skip, entries: list[dict[str, Any]], *, has_programs: bool) -> str | None:
    """Return why a skip is allowed; None if it is not.

    Args:
        skip: What was skipped.
        entries: Those of the list.
        has_programs: Whether this machine is to have the programs of others that tests are about.
    """
    for entry in entries:
        is_meant = any(fnmatch.fnmatchcase(skip.step, step) for step in entry.get("steps", ["*"]))
        if is_meant and re.search(entry["reason"], skip.reason) and not (entry.get("program") and has_programs):
            why: str = entry["why"]
            return why
    return None


def main(folder: str) -> int:
    """Print what was skipped, by why that is allowed, and then what may not be; return the exit code."""
    entries: list[dict[str, Any]] = tomli.loads(LIST.read_text(encoding="utf-8"))["skip"]
    has_programs = bool(os.environ.get(PROGRAMS_VARIABLE))
    allowed: Counter[str] = Counter()
    refused = []
    for report in sorted(Path(folder).glob("*.xml")):
        for skip in skips_of(report):
            why = why_allowed(skip, entries, has_programs=has_programs)
            allowed.update([why] if why else [])
            refused += [] if why else [skip]
    for why, count in allowed.most_common():
        print(f"{count:5} skipped: {why}")
    for skip in refused:
        print(f"Not allowed by tools/skips.toml, in the step {skip.step}: {skip.test}: {skip.reason}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
