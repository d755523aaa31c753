"""What bytes are: an image, a sound, a document or text, by how they begin."""

_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"%PDF-", "application/pdf"),
)
_OF_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}


def media_type_of(data: bytes) -> str:
    """Return the media type of bytes by how they begin."""
    if data[:4] == b"RIFF" and data[8:12] in _OF_RIFF:
        return _OF_RIFF[data[8:12]]
    found = next((kind for start, kind in _STARTS if data.startswith(start)), None)
    if found is not None:
        return found
    try:
        data.decode()
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "text/plain"
