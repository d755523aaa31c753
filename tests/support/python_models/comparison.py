"""What two servers say, compared: where it differs, and what of that is meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MEANT = {
    "text of a TypeError": "Triton's lists the C++ signatures of what was called; ours says what was expected.",
    "names of C++": "Triton's names a type of its C++ code; ours says what was expected.",
    "error that cannot be told": "Triton's tells the second error with its place, ours its type.",
    "types are checked": "Triton's leaves a tensor out whose type does not exist; ours refuses the configuration.",
    "errors are failures": "A request that is answered with an error counts as failed, as for every model of ours; "
    "Triton's Python backend counts it as a success.",
    "answers are successes": "A request counts by what its caller has got; Triton's Python backend counts one whose "
    "`execute` raises after the answer was sent as failed.",
}
"""What differs from Triton's Python backend and shall: a name for it, and the reason."""

_ABSENT = "(nothing)"
_TOLD = 600


def check_alike(expected: Any, found: Any, meant: Mapping[str, str]) -> None:
    """Check that two values are alike but for what is meant to differ.

    Args:
        expected: What Triton's Python backend says.
        found: What ours says.
        meant: What must differ: a place, with all below it, and the name in `MEANT`.
    """
    unknown = set(meant.values()) - set(MEANT)
    assert not unknown, f"not in MEANT: {unknown}"
    different = dict(differences(expected, found))
    named = {place: next((part for part in _above(place) if part in meant), None) for place in different}
    faults = [
        f"{place}:\n  Triton's: {str(theirs)[:_TOLD]!r}\n  ours:     {str(ours)[:_TOLD]!r}"
        for place, (theirs, ours) in different.items()
        if named[place] is None
    ]
    assert not faults, "\n".join(["answers differ", *faults])
    alike = set(meant) - set(named.values())
    assert not alike, f"said to differ, but does not: {sorted(alike)}"


def _above(place: str) -> Iterator[str]:
    """Yield a place and those that it is in."""
    while place:
        yield place
        place = place.rpartition("/")[0]


def differences(expected: Any, found: Any, place: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield where two values differ, and how: keys and indices joined by slashes, then both values."""
    both = isinstance(expected, dict) and isinstance(found, dict)
    if both and ("error" in expected) == ("error" in found):
        for key in sorted({*expected, *found}, key=str):
            yield from differences(
                expected.get(key, _ABSENT), found.get(key, _ABSENT), f"{place}/{key}" if place else str(key)
            )
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, f"{place}/{number}" if place else str(number))
    elif expected != found:
        yield place, (expected, found)
