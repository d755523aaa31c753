"""`Golden`: what a callable answers to its warm-up, recorded by one process and compared by those that follow it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import GoldenError
from ...wire.record import Array

# The most elements that are recorded of each output, evenly spread; the most elements of texts; the most answers.
_MOST_ELEMENTS = 4096
_MOST_TEXTS = 512
_MOST_ANSWERS = 64
_SHOWN_CHARACTERS = 40


class Golden:
    """Records the outputs of warm-up requests, or compares them with the record of an earlier process.

    Of an output with more than 4,096 elements (512 strings) as many are recorded, evenly spread, beside its shape; and
    not more than 64 outputs.
    """

    def __init__(
        self,
        tolerance: float,
        known: Sequence[Mapping[str, Any]] | None,
        on_answer: Callable[[dict[str, Any]], object],
    ) -> None:
        """Begin to compare with what is `known`, or to record: then `on_answer` gets each output as JSON has it.

        Numbers with fractions may be apart by `tolerance` of the recorded one, and by so much of the largest recorded
        one of the output, or of 1 if that is less. All else has to be equal.
        """
        self._tolerance = tolerance
        self._known = known
        self._on_answer = on_answer
        self._count = 0

    def take(self, outputs: Mapping[str, Array]) -> None:
        """Take the outputs of the next response to a warm-up request.

        Raises `GoldenError` if they are not what was recorded.
        """
        for name, value in outputs.items():
            place, self._count = self._count, self._count + 1
            if place >= _MOST_ANSWERS:
                continue
            found = _recorded(name, value)
            if self._known is None:
                self._on_answer(found)
            elif place < len(self._known):
                _compare(self._known[place], found, place, self._tolerance)

    def finish(self) -> None:
        """Look, when all warm-up requests are over, whether there were as many outputs as were recorded."""
        if self._known is not None and min(self._count, _MOST_ANSWERS) != len(self._known):
            raise GoldenError(f"expected {len(self._known)} outputs in all warm-up requests, got {self._count}")


def _recorded(name: str, value: Array) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.kind in "SUT":
        array = array.astype(object)
    elif array.dtype.name == "bfloat16":
        # Without the package of that type, nobody could read the file again.
        array = array.astype(np.float32)
    is_text = array.dtype.kind == "O"
    most = _MOST_TEXTS if is_text else _MOST_ELEMENTS
    places = _places(array.size, most)
    picked = array.reshape(-1)[places]
    return {
        "output": name,
        "dtype": "bytes" if is_text else array.dtype.name,
        "shape": list(array.shape),
        "data": [_digest(each) for each in picked] if is_text else base64.b64encode(picked.tobytes()).decode(),
    }


def _places(size: int, most: int) -> Any:
    return np.arange(size) if size <= most else np.linspace(0, size - 1, most).astype(np.int64)


def _digest(element: Any) -> list[str]:
    """Return what a string is known by, and its beginning for people."""
    data = element if isinstance(element, bytes) else str(element).encode()
    shown = data[:_SHOWN_CHARACTERS].decode(errors="replace")
    return [hashlib.sha256(data).hexdigest()[:16], shown + ("..." if len(data) > _SHOWN_CHARACTERS else "")]


def _compare(known: Mapping[str, Any], found: Mapping[str, Any], place: int, tolerance: float) -> None:
    what = f"output {found['output']!r} (number {place + 1} of the warm-up)"
    for field in ("output", "dtype", "shape"):
        if known[field] != found[field]:
            raise GoldenError(f"{what}: expected {field} {known[field]!r}, got {found[field]!r}")
    if known["data"] == found["data"]:
        return
    expected, got = _values(known), _values(found)
    differ = np.asarray(_keys(known) != _keys(found)) if found["dtype"] == "bytes" else expected != got
    if expected.dtype.kind == "f":
        wide = np.promote_types(expected.dtype, np.float32)
        expected, got = expected.astype(wide), got.astype(wide)
        # If all values are small, such as the shares of many classes, small differences count.
        largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        differ = ~np.isclose(got, expected, rtol=tolerance, atol=tolerance * min(1.0, largest), equal_nan=True)
    if not differ.any():
        return
    first = int(np.argmax(differ))
    shape = tuple(found["shape"])
    most = _MOST_TEXTS if found["dtype"] == "bytes" else _MOST_ELEMENTS
    index = np.unravel_index(int(_places(int(np.prod(shape)), most)[first]), shape)
    raise GoldenError(
        f"{what}: expected {_shown(expected[first])} at {[int(each) for each in index]}, got {_shown(got[first])}; "
        f"{int(differ.sum())} of {len(differ)} compared elements differ"
        + (f" by more than the tolerance {tolerance:g}" if found["dtype"].startswith("float") else "")
    )


def _values(recorded: Mapping[str, Any]) -> Array:
    """Return what was recorded; of strings their beginnings."""
    if recorded["dtype"] == "bytes":
        return np.array([each[1] for each in recorded["data"]], object)
    return np.frombuffer(base64.b64decode(recorded["data"]), recorded["dtype"])


def _keys(recorded: Mapping[str, Any]) -> Array:
    return np.array([each[0] for each in recorded["data"]])


def _shown(value: Any) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)
