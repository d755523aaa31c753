"""What is shown, played or saved of an answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytriton.catalog.media import media_type_of
from pytriton.catalog.tensors import result_as_text
from pytriton.client import ModelResult
from pytriton.console.media import LONG_TEXT, MOST_PARTS, describe_parts, find_parts

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0 JFIF", "image/jpeg"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WAVEfmt ", "audio/wav"),
        (b"RIFF\0\0\0\0AVI ", "text/plain"),
        (b"ID3\4", "audio/mpeg"),
        (b"OggS", "audio/ogg"),
        (b"fLaC", "audio/flac"),
        (b"%PDF-1.7", "application/pdf"),
        (b"\xfe\xfe", "application/octet-stream"),
        ("zażółć".encode(), "text/plain"),
    ],
)
def test_what_bytes_are_is_said_by_how_they_begin(data: bytes, kind: str) -> None:
    assert media_type_of(data) == kind


def result(**outputs: Any) -> ModelResult:
    made = {name: np.array(values, object) for name, values in outputs.items()}
    return ModelResult(made, model_name="m", model_version="1")


def test_an_image_is_shown_and_described_in_the_text() -> None:
    answer = result(picture=[PNG], label=[b"cat"])
    [part] = find_parts(answer)
    assert (part.name, part.is_image, part.is_sound, part.data) == ("picture", True, False, PNG)
    assert part.file_name == "picture.png"
    assert result_as_text(describe_parts(answer), one_line=False) == "picture: <PNG, 208 bytes>\nlabel: cat"
    assert answer["picture"].tolist() == [PNG]


def test_short_texts_and_numbers_are_no_parts() -> None:
    answer = result(label=[b"cat", b""])
    answer["score"] = np.array([0.5])
    assert find_parts(answer) == []
    assert describe_parts(answer) == answer


def test_a_long_text_is_shown_and_can_be_saved() -> None:
    answer = result(**{"a story / of": [b"x" * (LONG_TEXT + 1)]})
    [part] = find_parts(answer)
    assert part.file_name == "a_story___of.txt"
    assert "xxx" in result_as_text(describe_parts(answer), one_line=False)


def test_a_few_of_many_are_enough() -> None:
    assert len(find_parts(result(pictures=[PNG] * 50))) == MOST_PARTS
