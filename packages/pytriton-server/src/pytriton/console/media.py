"""What is in the bytes of an answer: images and sounds to be shown, and what is rather saved than read."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytriton.catalog.media import media_type_of
from pytriton.client import ModelResult

MOST_PARTS = 12
"""Further parts of one answer are left out."""

LONG_TEXT = 2_000
"""A longer text can be saved, too."""

_SUFFIXES = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "audio/mpeg": "mp3",
    "audio/ogg": "ogg",
    "audio/flac": "flac",
    "audio/wav": "wav",
    "application/pdf": "pdf",
    "text/plain": "txt",
}


@dataclass(frozen=True)
class Part:
    """An element of an output that is more than a short text."""

    name: str
    """The output."""
    media_type: str
    data: bytes

    @property
    def is_image(self) -> bool:
        """Whether it can be shown."""
        return self.media_type.startswith("image/")

    @property
    def is_sound(self) -> bool:
        """Whether it can be played."""
        return self.media_type.startswith("audio/")

    @property
    def file_name(self) -> str:
        """The name to save it under."""
        stem = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in self.name)[:60]
        return f"{stem or 'output'}.{_SUFFIXES.get(self.media_type, 'bin')}"

    @property
    def described(self) -> str:
        """The text that replaces it among the outputs."""
        kind = _SUFFIXES.get(self.media_type, "bytes").upper() if self.media_type != "text/plain" else "text"
        return f"<{kind}, {len(self.data):,} bytes>"


def find_parts(result: ModelResult) -> list[Part]:
    """Return the parts of an answer that can be shown, played or saved."""
    return [part for _, _, part in _parts(result)][:MOST_PARTS]


def describe_parts(result: ModelResult) -> ModelResult:
    """Return an answer in which bytes that are not text are replaced by descriptions."""
    shown = copy.copy(result)
    for name, place, part in _parts(result):
        if part.media_type != "text/plain":
            if shown[name] is result[name]:
                shown[name] = np.array(result[name], object)
            shown[name][place] = part.described.encode()
    return shown


def _parts(result: ModelResult) -> Iterator[tuple[str, tuple[int, ...], Part]]:
    for name, value in result.items():
        array: Any = np.asarray(value, object if isinstance(value, bytes) else None)
        if array.dtype.kind not in "OS":
            continue
        for place in np.ndindex(array.shape):
            data = array[place]
            if not isinstance(data, bytes) or not data:
                continue
            media_type = media_type_of(data)
            if media_type != "text/plain" or len(data) > LONG_TEXT:
                yield name, place, Part(name, media_type, data)
