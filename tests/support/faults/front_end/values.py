"""Hostile values in JSON: numbers, shapes, texts and structures that a server may not have thought of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any


class Raw(str):
    """A piece of JSON as it stands: what `json.dumps` would not write."""


# Numbers at the edges of every type that a parser may take them for.
INTEGERS = [
    -1,
    0,
    1,
    2,
    -2,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**31),
    -(2**63),
    -(2**63) - 1,
    10**30,
    10**400,
]
NUMBERS = [
    Raw(text) for text in ("1e999", "-1e999", "1e-999", "NaN", "Infinity", "-Infinity", "-0", "0.1", "1E5", "00", "1.")
]
TEXTS = [
    "",
    " ",
    "x",
    "y",
    "\0",
    "a\0b",
    "../../etc/passwd",
    "%s%n",
    "\ud800",
    "\U0001f600",
    "'\"\\",
    "true",
    "-1",
    "BYTES",
    "a" * 300,
]
RAW_TEXTS = [Raw('"\\u12"'), Raw('"\\ud800\\ud800"'), Raw('"\x01"'), Raw('"\xff\xfe"'), Raw('"\\x"'), Raw('"open')]
DTYPES = [
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
    "BYTES",
]


def number(rng: random.Random) -> Any:
    return rng.choice(INTEGERS) if rng.random() < 0.7 else rng.choice(NUMBERS)


def text(rng: random.Random) -> Any:
    roll = rng.random()
    if roll < 0.1:
        return rng.choice(RAW_TEXTS)
    if roll < 0.13:
        return "n" * rng.choice([1000] * 10 + [70_000] * 3 + [1_000_000])
    return rng.choice(TEXTS)


def deep(rng: random.Random, levels: int | None = None) -> Raw:
    """List or objects in each other; a few thousand levels most of the time, seldom a great many."""
    if levels is None:
        levels = rng.choice([10, 100, 1000, 3000] * 5 + [10_000, 50_000, 200_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"inputs":', "}]"), ("[0,", "]")])
    return Raw(opening * levels + "1" + closing * (levels if rng.random() < 0.7 else 0))


def wide(rng: random.Random) -> Raw:
    count = rng.choice([100] * 10 + [1000] * 10 + [10_000] * 3 + [100_000])
    return rng.choice(
        [
            Raw("[" + ",".join(["0"] * count) + "]"),
            Raw("[" + ",".join(["[]"] * count) + "]"),
            Raw("[" + ",".join(['""'] * count) + "]"),
            Raw("{" + ",".join(f'"k{index}":{index}' for index in range(count)) + "}"),
            Raw("{" + ",".join(['"k":1'] * count) + "}"),
        ]
    )


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Return a value of any type."""
    makers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: number(rng),
        lambda: text(rng),
        list,
        dict,
    ]
    if depth < 3:
        makers += [
            lambda: [anything(rng, depth + 1) for _ in range(rng.randrange(4))],
            lambda: {str(text(rng)): anything(rng, depth + 1) for _ in range(rng.randrange(4))},
        ]
    if rng.random() < 0.015:
        makers = [lambda: deep(rng), lambda: wide(rng)]
    return rng.choice(makers)()


def shape(rng: random.Random) -> Any:
    roll = rng.random()
    if roll < 0.1:
        return anything(rng)
    if roll < 0.2:
        return [1] * rng.choice([9] * 5 + [100] * 5 + [10_000] * 2 + [100_000])
    if roll < 0.3:
        return [anything(rng) for _ in range(rng.randrange(4))]
    if roll < 0.5:
        return rng.choice(
            [[1, 2**40], [2**32, 2**32], [1, 2**62], [2**63 - 1, 2], [1, -5], [-1], [-3, -3], [0], [1, 0], [1, 2**31]]
        )
    return [rng.choice(INTEGERS) for _ in range(rng.randrange(1, 5))]


def dumps(value: Any) -> bytes:
    """Return JSON of a value with raw pieces in it; texts that no UTF-8 has are written all the same."""
    return _write(value).encode("utf-8", "surrogatepass")


# One for all of the many values, where `json.dumps` would make an encoder for each.
_plain = json.JSONEncoder(ensure_ascii=False).encode


def _write(value: Any) -> str:
    if type(value) is int:
        return repr(value)
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_key(name)}:{_write(content)}" for name, content in value.items()) + "}"
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{_key(name)}:{_write(content)}" for name, content in value.pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_write, value)) + "]"
    return _plain(value)


def _key(name: Any) -> str:
    # A raw text may lack its closing quote: as a key, too.
    return str(name) if isinstance(name, Raw) else _plain(str(name))


class Pairs:
    """An object that may say the same key twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs
