"""The tokenizer that a model declares, a `tokenizer.json`, as the library `tokenizers` reads it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_INSTALL = "pip install 'pytriton-server[tokenizer]'"


class Tokenizer:
    """Turns texts into tokens and back."""

    def __init__(self, told: Any) -> None:
        self._told = told
        # The file may ask for padding and truncation as in training, which would falsify counts.
        told.no_padding()
        told.no_truncation()
        self.size: int = told.get_vocab_size()
        """The number of its tokens; each token is less than this."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the tokens of a text."""
        return list(self._told.encode(text, add_special_tokens=special).ids)

    def count(self, text: str, *, special: bool = False) -> int:
        """Return how many tokens a text has; see `encode`."""
        return len(self._told.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """Return the text of tokens."""
        return str(self._told.decode(list(tokens), skip_special_tokens=not special))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return how the tokenizer writes each token."""
        return [str(self._told.id_to_token(token)) for token in tokens]


def read_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a file, which is read once as long as it does not change."""
    file = Path(path)
    try:
        file = file / "tokenizer.json" if file.is_dir() else file
        found = file.stat()
    except (OSError, ValueError) as error:
        raise ValueError(f"its tokenizer cannot be read: {error}") from None
    return _read(str(file), found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=16)
def _read(path: str, _changed: int, _size: int) -> Tokenizer:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(f"its tokenizer needs the package tokenizers: {_INSTALL}") from None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(path))
    except Exception as error:  # the library raises no more specific class
        raise ValueError(f"its tokenizer {path} cannot be read: {error}") from None
