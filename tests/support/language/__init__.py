"""Small models of text, trained here: one continues a text by its characters, one makes vectors of words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from support.paths import ROOT

CORPUS = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

_ORDER = 4


class CharacterModel:
    """Continues a text by the characters that follow its last ones in a corpus."""

    def __init__(self, corpus: str = CORPUS) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        for order in range(_ORDER + 1):
            for at in range(order, len(corpus)):
                self._counts[corpus[at - order : at]][corpus[at]] += 1

    def continue_text(self, prompt: str, number: int, temperature: float, seed: int) -> Iterator[str]:
        """Yield so many characters; with the temperature 0 the likeliest ones."""
        random = np.random.default_rng(seed % 2**63)
        text = prompt
        for _ in range(number):
            counts = next(
                self._counts[text[len(text) - order :]]
                for order in range(min(_ORDER, len(text)), -1, -1)
                if text[len(text) - order :] in self._counts
            )
            characters = sorted(counts)
            weights = np.array([counts[it] for it in characters], np.float64)
            if temperature:
                weights **= 1 / temperature
                chosen = characters[random.choice(len(characters), p=weights / weights.sum())]
            else:
                chosen = characters[int(np.argmax(weights))]
            text += chosen
            yield chosen


class WordVectors:
    """Makes vectors of texts: inverse document frequencies over the words of a corpus, reduced by an SVD."""

    def __init__(self, size: int = 16, corpus: str = CORPUS) -> None:
        documents = [self._words(part) for part in corpus.split("\n\n")]
        self._index = {word: at for at, word in enumerate(sorted({word for part in documents for word in part}))}
        counts = np.array([self._count(part) for part in documents])
        self._weights = np.log((1 + len(documents)) / (1 + (counts > 0).sum(0)))
        self._axes = np.linalg.svd(counts * self._weights, full_matrices=False)[2][:size].T

    def __call__(self, text: str) -> npt.NDArray[np.float32]:
        """Return the vector of a text, of the length 1 where it has a word of the corpus."""
        vector = (self._count(self._words(text)) * self._weights) @ self._axes
        length = np.linalg.norm(vector)
        scaled: npt.NDArray[np.float32] = (vector / length if length else vector).astype(np.float32)
        return scaled

    def count_words(self, text: str) -> int:
        """Return how many words a text has."""
        return len(self._words(text))

    @staticmethod
    def _words(text: str) -> list[str]:
        return "".join(it.lower() if it.isalnum() else " " for it in text).split()

    def _count(self, words: list[str]) -> npt.NDArray[np.float64]:
        counts = np.zeros(len(self._index))
        for word in words:
            if word in self._index:
                counts[self._index[word]] += 1
        return counts
