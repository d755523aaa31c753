"""How many tokens a request has taken: as the model counts them, else its tokenizer, else by an estimate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pytriton.openai._tokens.tokenizer import Tokenizer

_CHARACTERS_PER_TOKEN = 4


def count_tokens(text: str, tokenizer: Tokenizer | None, *, special: bool = False) -> int:
    """Return how many tokens a text has; without a tokenizer about how many, by its length."""
    return _estimated(len(text)) if tokenizer is None else tokenizer.count(text, special=special)


class Usage:
    """The tokens of all choices of a request.

    Clients break without counts, so what a model does not count is counted or estimated.
    """

    def __init__(self, prompts: Sequence[bytes], each: int, tokenizer: Tokenizer | None, special: bool) -> None:
        self._prompts = prompts
        self._each = each
        self._tokenizer = tokenizer
        self._special = special
        self._told: list[Mapping[str, int]] = [{} for _ in prompts]
        self._characters = [0] * len(prompts)
        # Kept for a tokenizer only, because a whole text has fewer tokens than its parts.
        self._said: list[list[str]] = [[] for _ in prompts]
        self._so_far = [(0, 0) for _ in prompts]
        self._of_prompts: dict[bytes, int] = {}

    def add(self, number: int, told: Mapping[str, int], said: str) -> None:
        """Count a part of a choice."""
        self._told[number] = told
        self._characters[number] += len(said)
        if self._tokenizer is not None and "completion_tokens" not in told:
            self._said[number].append(said)

    def add_texts(self, number: int, texts: Sequence[str]) -> None:
        """Count parts of a choice of which the model tells no counts."""
        self._characters[number] += sum(map(len, texts))
        if self._tokenizer is not None:
            self._said[number] += texts

    async def begin(self) -> None:
        """Count the prompts now, for a caller who wants counts before the end."""
        if self._tokenizer is not None:
            await asyncio.to_thread(lambda: [self._prompt(number) for number in range(len(self._prompts))])

    def of(self, number: int) -> dict[str, int]:
        """Return the counts of a choice so far."""
        told = self._told[number].get("completion_tokens")
        if told is None and self._tokenizer is not None:
            parts, told = self._so_far[number]
            said = self._said[number]
            told += sum(map(self._tokenizer.count, said[parts:]))
            self._so_far[number] = len(said), told
        return _shown(self._prompt(number), _estimated(self._characters[number]) if told is None else told)

    async def total(self) -> dict[str, int]:
        """Return the counts of all choices; the prompt that several share counts once."""
        # Counting long texts takes time, so a thread does it.
        return self._total() if self._tokenizer is None else await asyncio.to_thread(self._total)

    def _total(self) -> dict[str, int]:
        numbers = range(len(self._prompts))
        return _shown(sum(map(self._prompt, numbers[:: self._each])), sum(map(self._completion, numbers)))

    def _prompt(self, number: int) -> int:
        told = self._told[number].get("prompt_tokens")
        if told is not None:
            return told
        prompt = self._prompts[number]
        if prompt not in self._of_prompts:
            self._of_prompts[prompt] = count_tokens(prompt.decode(), self._tokenizer, special=self._special)
        return self._of_prompts[prompt]

    def _completion(self, number: int) -> int:
        told = self._told[number].get("completion_tokens")
        if told is not None:
            return told
        if self._tokenizer is not None:
            return self._tokenizer.count("".join(self._said[number]))
        return _estimated(self._characters[number])


def _estimated(characters: int) -> int:
    return -(-characters // _CHARACTERS_PER_TOKEN)


def _shown(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
